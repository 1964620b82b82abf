"""A recursive model's parameters, each made of a Transformer's when it is asked for.

So that beside the two models memory holds one tensor of the new one, and of the
Transformer a few layers' matrices, gathered from its devices.
"""

import dataclasses
import re
from collections.abc import Iterator, Sequence
from typing import Literal

import jax
import numpy as np
from flax import nnx

from recurjax.errors import UserError
from recurjax.model import Decoder, ModelConfig
from recurjax.surgery.low_rank import Factors, factors_along, leading_vectors
from recurjax.surgery.named_parameters import (
    Parameters,
    named_leaves,
    on_host,
    stacked,
)
from recurjax.surgery.shared_block import BlockInit, source_layers
from recurjax.types import Array
from recurjax.variants.relaxed_recursive_transformer import (
    RelaxedRecursiveTransformerConfig,
)
from recurjax.variants.relaxed_recursive_transformer.block import depths_of

TiedNorms = Literal["average", "choice", "zero"]
"""How the norms that loops share start: the mean of the layers that share them, one
layer's, or zeros (the paper's appendix F; with one_plus norms, zeros scale by 1)."""

MAPS = {
    "q": "attention.w_q",
    "k": "attention.w_k",
    "v": "attention.w_v",
    "out": "attention.w_out",
    "up": "mlp.w_up",
    "gate": "mlp.w_gate",
    "down": "mlp.w_down",
}
"""Our name of the weight that each adapter adds to."""

_FUSED = ("q", "k", "v")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """How the parts start: see `to_recursive`."""

    init: BlockInit
    adapters: Literal["svd", "zero"]
    fused_qkv: bool
    norms: TiedNorms | None
    seed: int


class RecursiveParts:
    """Makes the parameters of a recursive model by their names, each once."""

    def __init__(self, model: Decoder, config: ModelConfig, start: Start):
        """Prepares; nothing is made yet.

        Args:
          model: the Transformer.
          config: of the recursive model.
        """
        stack = config.stack
        assert isinstance(stack, RelaxedRecursiveTransformerConfig)
        self.stack, self.start, base = stack, start, stack.transformer
        self.source, self.pattern = named_leaves(model), len(base.windows)
        self.depths = depths_of(base.layers, stack.loops, stack.sharing)
        self.sources: Sequence[Sequence[int]] = ()
        if start.init == "random":
            self._drawn = _drawn_block(config, stack, start.seed)
        else:
            self.sources = source_layers(
                start.init, base.layers, stack.loops, stack.sharing
            )
        # A and B that were made with others and not yet asked for.
        self._made: dict[tuple[int, str, str], np.ndarray] = {}

    def __call__(self, name: str) -> np.ndarray | Array:
        """Returns the parameter of this name; those outside the block are copied."""
        if (block := re.match(r"stack\.blocks\.(\d+)\.(.*)", name)) is not None:
            return self._of_block(int(block[1]), block[2])
        adapter = re.match(r"stack\.adapters\.(\d+)\.(\w+)\.w_(\w+)", name)
        if adapter is None:
            return self.source[name]
        place, linear, side = int(adapter[1]), adapter[2], adapter[3]
        if (place, linear, side) not in self._made:
            # A and B come together, and of fused maps all three pairs.
            fused = self.start.fused_qkv and linear in _FUSED
            for one, pair in self._adapters(place, _FUSED if fused else (linear,)):
                for its_side, made in pair._asdict().items():
                    self._made[place, one, its_side] = made
        return self._made.pop((place, linear, side))

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
        chosen, norms = self.sources[k] if self.sources else (), self.start.norms
        if norms is not None and "_norm." in name:
            sharing = self.depths[:, k].tolist()
            if norms == "choice":
                # A block that is one layer's already keeps that layer's norms.
                single = self.start.init not in ("average", "random")
                sharing = chosen if single else sharing[:1]
            return self._mean(name, sharing) * (norms != "zero")
        if self.sources:
            return self._mean(name, chosen)
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
        made: dict[str, Factors] = {}
        layers = self._layers_of(place)
        for repeat, k in enumerate(layers):
            shared = {
                name: flat(MAPS[name], self._shared(MAPS[name], k)) for name in names
            }
            # Kept from the first use to the second where the two lie opposite.
            vectors: np.ndarray | None = None
            for b, depth in enumerate(self.depths[:, k].tolist()):
                residuals = {}
                for name in names:
                    residuals[name] = flat(MAPS[name], self._layer(MAPS[name], depth))
                    residuals[name] -= shared[name]
                pairs, vectors = self._pairs(depth, residuals, vectors)
                for name, pair in pairs.items():
                    if name not in made:
                        axes = (len(self.depths), len(layers))
                        made[name] = Factors(
                            *(np.empty(axes + s.shape, np.float32) for s in pair)
                        )
                    for whole, side in zip(made[name], pair, strict=True):
                        whole[b, repeat] = side
        yield from made.items()

    def _pairs(
        self, depth: int, residuals: Parameters, vectors: np.ndarray | None
    ) -> tuple[dict[str, Factors], np.ndarray | None]:
        """Returns one depth's factors, and the vectors that its other use may take."""
        names = list(residuals)
        if len(names) == 1:
            pair, vectors = self._pair(depth, names[0], residuals[names[0]], vectors)
            return {names[0]: pair}, vectors
        ranks = {min(self.stack.rank, *one.shape) for one in residuals.values()}
        if len(ranks) > 1:
            raise UserError(
                f"q, k and v cannot share factors of rank {self.stack.rank}, which is "
                "more than one of them has: lower the rank or leave fused_qkv off"
            )
        side_by_side = np.concatenate(list(residuals.values()), axis=1)
        (reduce, expand), vectors = self._pair(depth, "q", side_by_side, vectors)
        widths = [one.shape[1] for one in residuals.values()]
        cuts = np.split(expand, np.cumsum(widths)[:-1], axis=1)
        pairs = {n: Factors(reduce, cut) for n, cut in zip(names, cuts, strict=True)}
        return pairs, vectors

    def _pair(
        self, depth: int, name: str, residual: np.ndarray, vectors: np.ndarray | None
    ) -> tuple[Factors, np.ndarray | None]:
        # No matrix has more rank than its smaller side.
        rank = min(self.stack.rank, *residual.shape)
        if self.start.adapters == "svd" and residual.any():
            # The mean of two layers lies between them: the residuals differ in sign
            # alone, and the singular vectors of one are the other's too.
            opposite = self.start.init == "average" and self.stack.loops == 2
            if vectors is None or not opposite:
                vectors = leading_vectors(residual, rank)
            return factors_along(residual, vectors), vectors
        # Nothing to add: a drawn A, so that B = 0 still has a gradient. A stream of
        # each matrix's own: the order of making them means nothing.
        inputs, outputs = residual.shape
        draw = np.random.default_rng((self.start.seed, depth, list(MAPS).index(name)))
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
    """Returns a block as a new model draws it; it is held beside both models."""
    # Norms and additions apart: only the block itself is drawn.
    plain = dataclasses.replace(stack, rank=0, tie_norms=True)
    fresh = dataclasses.replace(config, stack=plain)

    @jax.jit
    def draw(key: Array) -> dict[str, Array]:
        # What is not returned, the compiled program does not make.
        made = named_leaves(Decoder(fresh, rngs=nnx.Rngs(key)))
        return {n: leaf for n, leaf in made.items() if n.startswith("stack.blocks.")}

    return draw(jax.random.key(seed))
