"""A model made recursive, and a recursive model written out.

In numpy, tensor by tensor; nothing here is differentiated. Next to the two models,
memory holds one tensor of the new one and a few layers' matrices of the source,
gathered from its devices. Source: the paper's section 2.3, its ablations and eq. (4);
layers count from 0.
"""

import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Float

from recurjax.errors import UserError
from recurjax.files.atomic import write_figure
from recurjax.model import Decoder, ModelConfig
from recurjax.surgery.named_parameters import (
    Parameters,
    made_by,
    named_leaves,
    on_host,
    stacked,
)
from recurjax.types import Array
from recurjax.variants.rat import RatConfig
from recurjax.variants.relaxed_recursive_transformer import (
    RelaxedRecursiveTransformerConfig,
)
from recurjax.variants.relaxed_recursive_transformer.block import depths_of, map_name
from recurjax.variants.relaxed_recursive_transformer.config import Sharing
from recurjax.variants.transformer import TransformerConfig

BlockInit = Literal["stepwise", "average", "lower", "upper", "fixed_start", "random"]
"""How a block starts from pretrained layers:

stepwise: at equal steps from the first layer to the last, both kept; average: the mean
of all layers that share it; lower, upper: the first, the last K; fixed_start: at equal
steps from the first layer, the last not kept; random: from none, as a new model's: the
baseline of the others."""


TiedNorms = Literal["average", "choice", "zero"]
"""How the norms that loops share start: the mean of the layers that share them, one
layer's, or zeros (the paper's appendix F; with one_plus norms, zeros scale by 1)."""


class Factors(NamedTuple):
    """R is about A B: A has orthonormal columns, B carries the singular values."""

    reduce: Float[np.ndarray, "N R"]
    expand: Float[np.ndarray, "R M"]


_MAPS = (
    *("q", "k", "v", "out", "up", "gate", "down", "forget_gate", "output_gate"),
    *("forget_gate_reduce", "forget_gate_expand"),
    *("output_gate_reduce", "output_gate_expand", "u", "z", "x", "dt", "back"),
)
"""All linear maps of any layer, in the order of the seeds of their A."""


def maps_of(model: Decoder) -> list[dict[str, str]]:
    """Returns, for each place of the pattern, the weight of each linear map.

    Args:
      model: a stack to be looped, or a looped one.
    """
    stack = model.config.stack
    if isinstance(stack, RelaxedRecursiveTransformerConfig):
        stack = stack.transformer
    assert isinstance(stack, TransformerConfig | RatConfig)
    places: list[dict[str, str]] = [{} for _ in stack.pattern]
    for name in named_leaves(model):
        block = re.match(r"stack\.blocks\.(\d+)\.(.*)", name)
        if block is None or not is_matrix(name):
            continue
        place, linear = int(block[1]), map_name(block[2])
        if linear in stack.block_maps(place):
            places[place][linear] = block[2]
    return places


def to_recursive(
    model: Decoder,
    stack: RelaxedRecursiveTransformerConfig,
    *,
    init: BlockInit,
    adapters: Literal["svd", "zero"] = "svd",
    fused_qkv: bool = False,
    norms: TiedNorms | None = None,
    seed: int = 0,
    mesh: Mesh | None = None,
    advance: Callable[[int], None] = lambda done: None,
) -> Decoder:
    """Makes a model recursive: a shared block, and additions towards its layers.

    Embedding, final norm and head are copied. Untied norms and biases are each layer's
    own; tied ones start as the matrices do.

    Args:
      model: a Transformer, or a stack of RAT's mixers.
      stack: what it becomes; its `transformer` is the model's own config.
      init: see `BlockInit`.
      adapters: "svd": the best of their rank, see `low_rank_factors`; "zero": they add
        nothing yet. Where there is nothing to add, they start as "zero" either way.
      fused_qkv: take the factors of q, k and v side by side, so that they share A; for
        models that have them as one matrix.
      norms: how tied norms start; None: as the matrices do. Biases of linear maps do.
      seed: seed of a random block, and of A if the LoRA starts at zero.
      mesh: mesh of the model and of the result; None: one device.
      advance: gets how many matrices were given their additions since the last call;
        in all as many as `matrices` counts, where the rank is not 0.

    Raises:
      UserError: the model's layers cannot be looped, or are others than `stack` says.
    """
    base = loopable(model)
    if stack.transformer != base:
        raise UserError("stack.transformer must be the model's own stack, unchanged")
    if norms is not None and not stack.tie_norms:
        raise UserError(
            f"norms {norms!r} initializes norms that loops share, and with "
            "tie_norms off no loops share one: leave norms out"
        )
    config = dataclasses.replace(model.config, stack=stack)
    start = Start(
        init=init, adapters=adapters, fused_qkv=fused_qkv, norms=norms, seed=seed
    )
    parts = RecursiveParts(model, config, start, advance)
    return made_by(config, parts, mesh=mesh)


def matrices(model: Decoder) -> int:
    """Returns how many matrices a model's layers have that loops may share."""
    base = loopable(model)
    return sum(map(len, maps_of(model))) * (base.layers // len(base.pattern))


def to_transformer(model: Decoder, *, mesh: Mesh | None = None) -> Decoder:
    """Writes a recursive model out: an ordinary model of L layers that is equal.

    Each depth's matrices are W + A B, multiplied in float64.

    Args:
      mesh: mesh of the model and of the result; None: one device.

    Raises:
      UserError: the model is not recursive, or its deeper loops read loop 1's keys and
        values, which no Transformer does.
    """
    stack = recursive_config(model)
    if stack.loop_cache == "first" and stack.loops > 1:
        raise UserError(
            "a model with loop_cache 'first' cannot become a Transformer, "
            "because its deeper loops have no keys and values of their own"
        )
    config = dataclasses.replace(model.config, stack=stack.transformer)
    ours, P = named_leaves(model), len(stack.transformer.pattern)
    depths = depths_of(stack.layers, stack.loops, stack.sharing)
    linear = [{weight: n for n, weight in maps.items()} for maps in maps_of(model)]

    def make(name: str) -> np.ndarray | Array:
        block = re.match(r"stack\.blocks\.(\d+)\.(.*)", name)
        if block is None:
            return ours[name]
        place, inner = int(block[1]), block[2]

        def layer(repeat: int) -> np.ndarray:
            [[b, k]] = np.argwhere(depths == place + repeat * P).tolist()
            return _of_use(ours, stack, inner, b, k, linear[place].get(inner))

        return stacked(stack.layers // P, layer)

    return made_by(config, make, mesh=mesh)


def recursive_stack(
    model: Decoder, **settings: Any
) -> RelaxedRecursiveTransformerConfig:
    """Returns the constraint that makes a model recursive, for `to_recursive`.

    Args:
      settings: loops, sharing, rank, tie_norms, loop_cache.

    Raises:
      UserError: the model's layers cannot be looped, or not in this way.
    """
    base = loopable(model)
    try:
        return RelaxedRecursiveTransformerConfig(transformer=base, **settings)
    except ValueError as error:
        raise UserError(str(error)) from error


def loopable(model: Decoder) -> TransformerConfig | RatConfig:
    """Returns the stack of a model whose layers can be looped.

    Raises:
      UserError: it is another variant's.
    """
    stack = model.config.stack
    if not isinstance(stack, TransformerConfig | RatConfig):
        raise UserError(
            "only layers of a TransformerConfig or a RatConfig can be looped, and the "
            f"model's stack is a {type(stack).__name__}"
        )
    return stack


def is_recursive(model: Decoder) -> bool:
    """Whether the model runs a block several times."""
    return isinstance(model.config.stack, RelaxedRecursiveTransformerConfig)


def recursive_config(model: Decoder) -> RelaxedRecursiveTransformerConfig:
    """Returns a recursive model's stack.

    Raises:
      UserError: the model is not recursive.
    """
    stack = model.config.stack
    if not isinstance(stack, RelaxedRecursiveTransformerConfig):
        raise UserError(
            f"the model must be recursive, and its stack is a {type(stack).__name__}"
        )
    return stack


def _of_use(
    ours: dict[str, Array],
    stack: RelaxedRecursiveTransformerConfig,
    name: str,
    b: int,
    k: int,
    linear: str | None,
) -> np.ndarray:
    """Returns a parameter of the block's layer k as its b-th use has it.

    Args:
      linear: the linear map whose weight it is; None: of none.
    """
    repeat, place = divmod(k, len(stack.transformer.pattern))
    leaf = ours[f"stack.blocks.{place}.{name}"]
    by_use = not stack.tie_norms and not is_matrix(name)
    value = on_host(leaf[b, repeat] if by_use else leaf[repeat])
    if linear is None or not stack.rank:
        return value
    # The addition joined in.
    reduce, expand = (
        on_host(ours[f"stack.adapters.{place}.{linear}.w_{side}"][b, repeat])
        for side in ("reduce", "expand")
    )
    dense = flat(name, value)
    dense += reduce.astype(np.float64) @ expand.astype(np.float64)
    return dense.reshape(value.shape).astype(value.dtype)


def source_layers(
    init: BlockInit, layers: int, loops: int, sharing: Sharing = "cycle"
) -> tuple[tuple[int, ...], ...]:
    """Returns, for each of the block's K layers, the layers whose mean it starts from.

    Stepwise takes i (L - 1) / (K - 1), rounded to the nearest, halves to even. Rounding
    is of exact fractions: floating point rounds some of the halves up.

    Args:
      init: any but "random", which starts from no layer.
      sharing: which layers share one, for "average".
    """
    block = layers // loops
    if init == "average":
        depths = depths_of(layers, loops, sharing)
        return tuple(tuple(int(l) for l in depths[:, i]) for i in range(block))
    # With one layer to a block the steps have no second end; the first layer serves.
    if block == 1 and init != "upper":
        return ((0,),)
    if init == "random":
        raise ValueError("source_layers: a random block starts from no layer")
    starts = {
        "stepwise": lambda i: round(Fraction(i * (layers - 1), block - 1)),
        "lower": lambda i: i,
        "upper": lambda i: layers - block + i,
        "fixed_start": lambda i: i * layers // block,
    }
    return tuple((starts[init](i),) for i in range(block))


def evenly_kept(layers: int, count: int) -> tuple[int, ...]:
    """Returns which layers stay when fewer are wanted: the ends, and equal steps.

    i (L - 1) / (count - 1), rounded as stepwise; for L that the loops do not divide.
    """
    if not 1 <= count <= layers:
        raise ValueError(f"evenly_kept: count must be in 1..{layers}, got {count}")
    # One layer has no second end to step to.
    if count == 1:
        return (0,)
    return tuple(round(Fraction(i * (layers - 1), count - 1)) for i in range(count))


_FUSED = ("q", "k", "v")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """How the parts are initialized: see `to_recursive`."""

    init: BlockInit
    adapters: Literal["svd", "zero"]
    fused_qkv: bool
    norms: TiedNorms | None
    seed: int


class RecursiveParts:
    """Makes the parameters of a recursive model by their names, each once."""

    def __init__(
        self,
        model: Decoder,
        config: ModelConfig,
        start: Start,
        advance: Callable[[int], None],
    ):
        """Prepares; nothing is made yet.

        Args:
          model: the Transformer.
          config: config of the recursive model.
          advance: see `to_recursive`.
        """
        self._advance = advance
        stack = config.stack
        assert isinstance(stack, RelaxedRecursiveTransformerConfig)
        self.stack, self.start, base = stack, start, stack.transformer
        self.source, self.pattern = named_leaves(model), len(base.pattern)
        self.maps = maps_of(model)
        self.depths = depths_of(base.layers, stack.loops, stack.sharing)
        self.sources: Sequence[Sequence[int]] = ()
        if start.init == "random":
            self._drawn = _drawn_block(config, stack, start.seed)
        else:
            self.sources = source_layers(
                start.init, base.layers, stack.loops, stack.sharing
            )
        # A and B that were computed with others and not yet requested.
        self._factors: dict[tuple[int, str, str], np.ndarray] = {}

    def __call__(self, name: str) -> np.ndarray | Array:
        """Returns the parameter of this name; those outside the block are copied."""
        if (block := re.match(r"stack\.blocks\.(\d+)\.(.*)", name)) is not None:
            return self._of_block(int(block[1]), block[2])
        adapter = re.match(r"stack\.adapters\.(\d+)\.(\w+)\.w_(\w+)", name)
        if adapter is None:
            return self.source[name]
        place, linear, side = int(adapter[1]), adapter[2], adapter[3]
        if (place, linear, side) not in self._factors:
            # A and B come together, and of fused maps all three pairs.
            fused = self.start.fused_qkv and linear in _FUSED
            names = [n for n in _FUSED if n in self.maps[place]] if fused else [linear]
            for each, pair in self._adapters(place, names):
                for its_side, factor in pair._asdict().items():
                    self._factors[place, each, its_side] = factor
        return self._factors.pop((place, linear, side))

    def _of_block(self, place: int, name: str) -> np.ndarray:
        # Place p of the pattern serves the layers p, p + P, ... of each loop. Leading
        # axes: by loop where each use has its own, then the repeats of the pattern.
        by_use = not self.stack.tie_norms and not is_matrix(name)
        if by_use and self.start.init != "random":
            rows = [row[place :: self.pattern].tolist() for row in self.depths]
            return np.stack(
                [np.stack([self._layer(name, depth) for depth in row]) for row in rows]
            )
        layers = self._layers_of(place)
        shared = stacked(len(layers), lambda repeat: self._shared(name, layers[repeat]))
        # A random block's norms start as a new model's, own ones too.
        return np.stack([shared] * self.stack.loops) if by_use else shared

    def _layers_of(self, place: int) -> range:
        return range(place, self.stack.block_layers, self.pattern)

    def _layer(self, name: str, depth: int) -> np.ndarray:
        """Returns one parameter of one layer of the Transformer."""
        repeat, place = divmod(depth, self.pattern)
        return on_host(self.source[f"stack.blocks.{place}.{name}"][repeat])

    def _shared(self, name: str, k: int) -> np.ndarray:
        """Returns what layer k of the block starts from."""
        source, norms = self.sources[k] if self.sources else (), self.start.norms
        if norms is not None and "_norm." in name:
            sharing = self.depths[:, k].tolist()
            if norms == "choice":
                # A block that is one layer's already keeps that layer's norms.
                single = self.start.init not in ("average", "random")
                sharing = source if single else sharing[:1]
            return self._mean(name, sharing) * (norms != "zero")
        if self.sources:
            return self._mean(name, source)
        repeat, place = divmod(k, self.pattern)
        return on_host(self._drawn[f"stack.blocks.{place}.{name}"][repeat])

    def _mean(self, name: str, depths: Sequence[int]) -> np.ndarray:
        if len(depths) == 1:
            return self._layer(name, depths[0])
        return np.mean([self._layer(name, depth) for depth in depths], 0)

    def _adapters(
        self, place: int, names: Sequence[str]
    ) -> Iterator[tuple[str, Factors]]:
        """Yields for each map its A and B, by loop and by repeat of the pattern."""
        factors: dict[str, Factors] = {}
        layers, weights = self._layers_of(place), self.maps[place]
        for repeat, k in enumerate(layers):
            shared = {
                name: flat(weights[name], self._shared(weights[name], k))
                for name in names
            }
            # Kept from the first use to the second where the two are opposite.
            vectors: np.ndarray | None = None
            for b, depth in enumerate(self.depths[:, k].tolist()):
                residuals = {}
                for name in names:
                    weight = weights[name]
                    residuals[name] = flat(weight, self._layer(weight, depth))
                    residuals[name] -= shared[name]
                pairs, vectors = self._pairs(depth, residuals, vectors)
                for name, pair in pairs.items():
                    if name not in factors:
                        axes = (len(self.depths), len(layers))
                        factors[name] = Factors(
                            *(np.empty(axes + s.shape, np.float32) for s in pair)
                        )
                    for factor, side in zip(factors[name], pair, strict=True):
                        factor[b, repeat] = side
                    self._advance(1)
        yield from factors.items()

    def _pairs(
        self, depth: int, residuals: Parameters, vectors: np.ndarray | None
    ) -> tuple[dict[str, Factors], np.ndarray | None]:
        """Returns one depth's factors, and the vectors that its other use may take."""
        names = list(residuals)
        if len(names) == 1:
            pair, vectors = self._pair(depth, names[0], residuals[names[0]], vectors)
            return {names[0]: pair}, vectors
        ranks = {
            min(self.stack.rank, *residual.shape) for residual in residuals.values()
        }
        if len(ranks) > 1:
            raise UserError(
                f"rank {self.stack.rank} exceeds what q, k and v can share with "
                "fused_qkv: lower the rank or leave fused_qkv off"
            )
        side_by_side = np.concatenate(list(residuals.values()), axis=1)
        (reduce, expand), vectors = self._pair(depth, "q", side_by_side, vectors)
        widths = [residual.shape[1] for residual in residuals.values()]
        cuts = np.split(expand, np.cumsum(widths)[:-1], axis=1)
        pairs = {n: Factors(reduce, cut) for n, cut in zip(names, cuts, strict=True)}
        return pairs, vectors

    def _pair(
        self, depth: int, name: str, residual: np.ndarray, vectors: np.ndarray | None
    ) -> tuple[Factors, np.ndarray | None]:
        # No matrix has more rank than its smaller side.
        rank = min(self.stack.rank, *residual.shape)
        if self.start.adapters == "svd" and residual.any():
            # The mean of two layers is halfway between them: the residuals differ in
            # sign only, and the singular vectors of one are the other's too.
            opposite = self.start.init == "average" and self.stack.loops == 2
            if vectors is None or not opposite:
                vectors = leading_vectors(residual, rank)
            return factors_along(residual, vectors), vectors
        # Nothing to add: a drawn A, so that B = 0 still has a gradient. A stream of
        # each matrix's own: the order of making them means nothing.
        inputs, outputs = residual.shape
        draw = np.random.default_rng((self.start.seed, depth, _MAPS.index(name)))
        reduce = draw.normal(scale=inputs**-0.5, size=(inputs, rank))
        return Factors(reduce, np.zeros((rank, outputs))), vectors


def flat(name: str, weight: np.ndarray) -> np.ndarray:
    """Returns a weight as the matrix [N, M] of its product, copied to float64."""
    # w_out reads heads, [H, E, D]: all but its last axis are inputs. The others write
    # to heads, [D, H, E].
    inputs = -1 if name.endswith("w_out") else weight.shape[0]
    outputs = weight.shape[-1] if inputs == -1 else -1
    return weight.astype(np.float64).reshape(inputs, outputs)


def is_matrix(name: str) -> bool:
    """Whether a parameter is a linear map's weight, no norm and no bias."""
    return name.rpartition(".")[2].startswith("w_")


def _drawn_block(
    config: ModelConfig, stack: RelaxedRecursiveTransformerConfig, seed: int
) -> dict[str, Array]:
    """Returns a newly drawn block; memory holds it in addition to both models."""
    # Norms and additions apart: only the block itself is drawn.
    plain = dataclasses.replace(stack, rank=0, tie_norms=True)
    fresh = dataclasses.replace(config, stack=plain)

    @jax.jit
    def draw(key: Array) -> dict[str, Array]:
        # What is not returned, the compiled program does not make.
        leaves = named_leaves(Decoder(fresh, rngs=nnx.Rngs(key)))
        return {n: leaf for n, leaf in leaves.items() if n.startswith("stack.blocks.")}

    return draw(jax.random.key(seed))


def low_rank_factors(residual: Float[np.ndarray, "N M"], rank: int) -> Factors:
    """Returns the A [N, R] and B [R, M] whose product is nearest to the residual.

    With residual = V S U^T (the paper's U S V^T, which is of x W^T) these are A = V_r
    and B = S_r U_r^T, eq. (4); what is left has the dropped singular values' norm. The
    singular vectors are eigenvectors of the smaller Gram matrix, in float64: the larger
    side is then never squared. A's columns are orthonormal where singular values vanish
    too, so that such a direction can still be learned.

    Args:
      rank: R, at most min(N, M).
    """
    return factors_along(residual, leading_vectors(residual, rank))


def leading_vectors(
    residual: Float[np.ndarray, "N M"], rank: int
) -> Float[np.ndarray, "S R"]:
    """Returns the leading singular vectors of the smaller side, S = min(N, M).

    They are the left ones where N <= M. Of a matrix and its negative they are the same.

    Args:
      rank: R, at most min(N, M).
    """
    residual = np.asarray(residual, np.float64)
    N, M = residual.shape
    if not 1 <= rank <= min(N, M):
        raise ValueError(f"leading_vectors: rank must be in 1..{min(N, M)}, got {rank}")
    gram = residual @ residual.T if N <= M else residual.T @ residual
    # Eigenvalues come in ascending order.
    return np.linalg.eigh(gram)[1][:, ::-1][:, :rank]


def factors_along(
    residual: Float[np.ndarray, "N M"], vectors: Float[np.ndarray, "S R"]
) -> Factors:
    """Returns the A and B whose product is the residual's part along these vectors."""
    residual = np.asarray(residual, np.float64)
    N, M = residual.shape
    if N <= M:
        return Factors(vectors, vectors.T @ residual)
    # residual @ vectors = V S: its orthonormal basis is V, whatever S holds of zeros.
    reduce, scales = np.linalg.qr(residual @ vectors)
    return Factors(reduce, scales @ vectors.T)


class Energy(NamedTuple):
    """The distance of one depth's matrix from the shared one, and the recovered share.

    Attributes:
      depth: depth of the layer, from 0.
      name: the linear map's name, such as q or down.
      residual: Frobenius norm of W_l - W'.
      kept: share of its square that the addition has; 1 where there is no residual.
    """

    depth: int
    name: str
    residual: float
    kept: float


def kept_energy(
    model: Decoder,
    recursive: Decoder,
    *,
    advance: Callable[[int], None] = lambda done: None,
) -> list[Energy]:
    """Compares a recursive model with the one that it was made of.

    What is left over is ||W_l - W' - A B||^2, so kept = 1 - left / ||W_l - W'||^2; an
    addition of low rank by singular values can only keep, one not trained for it may
    also lose.
    """
    stack, base, maps = recursive_config(recursive), loopable(model), maps_of(model)
    ours, theirs, P = named_leaves(recursive), named_leaves(model), len(base.pattern)
    energies = []
    for b, row in enumerate(depths_of(base.layers, stack.loops, stack.sharing)):
        for k, depth in enumerate(row.tolist()):
            repeat, place = divmod(k, P)
            for name, weight in maps[place].items():
                block = f"stack.blocks.{place}.{weight}"
                # One matrix after another, gathered from its devices. In float64:
                # differences of nearly equal matrices are what is measured.
                residual = flat(weight, on_host(theirs[block][depth // P]))
                residual -= flat(weight, on_host(ours[block][repeat]))
                before = float(np.sum(residual**2))
                if stack.rank:
                    reduce, expand = (
                        on_host(
                            ours[f"stack.adapters.{place}.{name}.w_{side}"][b, repeat]
                        )
                        for side in ("reduce", "expand")
                    )
                    residual -= reduce.astype(np.float64) @ expand.astype(np.float64)
                after = float(np.sum(residual**2))
                # A layer that is the shared one leaves nothing to make up for.
                fraction = 1.0 - after / before if before else 1.0
                energies.append(Energy(depth, name, before**0.5, fraction))
                advance(1)
    return sorted(energies, key=lambda energy: energy.depth)


def plot_energy(energies: list[Energy], file: Path) -> None:
    """Draws the kept share of each matrix' residual, depths down, matrices across."""
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(energy.name for energy in energies))
    depths = 1 + max(energy.depth for energy in energies)
    shares = np.full((depths, len(names)), np.nan)
    for energy in energies:
        shares[energy.depth, names.index(energy.name)] = energy.kept
    figure = Figure(figsize=(1.8 + 0.6 * len(names), 1.2 + 0.26 * depths))
    figure.set_layout_engine("constrained")
    axes = figure.subplots()
    image = axes.imshow(shares, cmap="viridis", vmin=0, vmax=1, aspect="auto")
    axes.set_xticks(range(len(names)), names)
    axes.set(ylabel="depth", title="kept share of the residual")
    figure.colorbar(image)
    write_figure(figure, file)
