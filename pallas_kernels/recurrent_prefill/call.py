"""The op's arguments and results: switches, weights, cache, sizes, residuals."""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from pallas_kernels.activations import Activation
from pallas_kernels.block_sizes import GivenSizes

NormKind = Literal["rms", "layer", "none"]
Dtype = Literal["float32", "bfloat16", "float64"]
Schedule = Literal["naive", "prefix", "wavefront"]
_WORDS = {
    "norm": NormKind,
    "qk_norm": NormKind,
    "activation": Activation,
    "dtype": Dtype,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSpec:
    """Every switch of the layer; scales and biases are there when their weights are.

    Attributes:
      heads: H.
      key_heads: K, a divisor of H; query head h reads key head h // (H / K).
      head_width: E.
      norm, norm_eps: kind and eps of both pre-norms, over D.
      qk_norm, qk_norm_eps: kind and eps of the norm of queries and keys over all heads
        together, H E and K E.
      normed_persistent: whether the persistent pair is projected from norm(z), as in
        the paper, or from z itself (the paper's ablation).
      alibi_max_bias: m in slope_h = 2^(-m (h + 1) / H); None: no ALiBi.
      rope_base, rope_width: of the rotary embedding in half-split order, and how many
        of the E dimensions it rotates; None: no RoPE.
      logit_scale: multiplies q k^T (on top of qk-norm).
      residual_scale: multiplies what both branches write.
      activation: activation of the MLP, or of its gate if the weights have one (SwiGLU
        is "silu" with a gate).
      block: c of the blocked recurrence: position i sees the temporary pairs of its own
        block of c positions (block i // c) and the persistent pairs of all earlier
        blocks. 1 is the Recurrent Transformer.
      dtype: dtype of matrix operands, keys and values. The residual stream, softmax and
        all accumulators are at least float32.
    """

    heads: int
    key_heads: int
    head_width: int
    norm: NormKind = "rms"
    norm_eps: float = 1e-6
    qk_norm: NormKind = "rms"
    qk_norm_eps: float = 1e-6
    normed_persistent: bool = True
    alibi_max_bias: float | None = None
    rope_base: float | None = None
    rope_width: int = 0
    logit_scale: float
    residual_scale: float
    activation: Activation = "gelu"
    block: int = 1
    dtype: Dtype = "float32"

    def __post_init__(self):
        for name, words in _WORDS.items():
            if getattr(self, name) not in get_args(words):
                raise ValueError(
                    f"LayerSpec: {name} must be one of {list(get_args(words))}, got "
                    f"{getattr(self, name)!r}"
                )
        for name in ("heads", "key_heads", "head_width", "block"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"LayerSpec: {name} must be at least 1, got {getattr(self, name)}"
                )
        if self.heads % self.key_heads:
            raise ValueError(
                f"LayerSpec: key_heads must divide heads={self.heads}, got "
                f"{self.key_heads}"
            )
        if self.rope_base is not None and not (
            0 < self.rope_width <= self.head_width and self.rope_width % 2 == 0
        ):
            raise ValueError(
                f"LayerSpec: rope_width must be even and at most head_width="
                f"{self.head_width}, got {self.rope_width}"
            )


Array = jax.Array


class LayerWeights(NamedTuple):
    """Weights of L layers, at least float32; None where the layer has no such part.

    Heads are an axis of their own, so that sharding never cuts one; flattened, head h
    owns columns h E to (h + 1) E.
    """

    w_q: Float[Array, "L D H E"]
    w_k: Float[Array, "L D K E"]
    w_v: Float[Array, "L D K E"]
    w_out: Float[Array, "L H E D"]
    w_up: Float[Array, "L D F"]
    w_down: Float[Array, "L F D"]
    w_gate: Float[Array, "L D F"] | None = None
    attention_norm_scale: Float[Array, "L D"] | None = None
    attention_norm_bias: Float[Array, "L D"] | None = None
    mlp_norm_scale: Float[Array, "L D"] | None = None
    mlp_norm_bias: Float[Array, "L D"] | None = None
    q_norm_scale: Float[Array, "L HE"] | None = None
    q_norm_bias: Float[Array, "L HE"] | None = None
    k_norm_scale: Float[Array, "L KE"] | None = None
    k_norm_bias: Float[Array, "L KE"] | None = None
    b_q: Float[Array, "L H E"] | None = None
    b_k: Float[Array, "L K E"] | None = None
    b_v: Float[Array, "L K E"] | None = None
    b_out: Float[Array, "L D"] | None = None
    b_up: Float[Array, "L F"] | None = None
    b_gate: Float[Array, "L F"] | None = None
    b_down: Float[Array, "L D"] | None = None


class RecurrentCache(NamedTuple):
    """Pairs that later positions read, and each row's position.

    Slot s holds position s. S = 0 is the training cache: it keeps nothing, and every
    row starts at position 0.

    A decode step leaves its pair to the next one, which makes it in one product with
    its own temporary pair and so reads w_k and w_v once: `written` is then one less
    than `position`. Every other call writes all of its pairs.

    Attributes:
      keys: persistent keys, after k-norm and rotation; slots at and beyond `written`
        have no meaning.
      values: persistent values.
      temporary_keys, temporary_values: of the row's unfinished block of c = spec.block
        positions: slot p mod c holds position p. c - 1 slots (none at c = 1): a block
        with c positions is finished.
      source: what the pair of position `written` is projected from, where that is less
        than `position`; without a meaning otherwise. Of width 0 where no step leaves a
        pair: with c > 1, and in the training cache.
      position: how many tokens each row has seen.
      written: how many of its persistent pairs are in the slots.
    """

    keys: Float[Array, "L B S K E"]
    values: Float[Array, "L B S K E"]
    temporary_keys: Float[Array, "L B open K E"]
    temporary_values: Float[Array, "L B open K E"]
    source: Float[Array, "L B D_or_0"]
    position: Int[Array, " B"]
    written: Int[Array, " B"]

    @property
    def slots(self) -> int:
        """S, the number of tokens that fit."""
        return self.keys.shape[2]


def source_width(length: int, width: int, spec: LayerSpec) -> int:
    """Returns the width of a cache's `source`: D, or 0 where none is ever kept."""
    return width if length and spec.block == 1 else 0


def empty_cache(
    layers: int, batch: int, length: int, width: int, spec: LayerSpec
) -> RecurrentCache:
    """Creates a cache of zeros for `length` tokens per row, at position 0.

    Args:
      width: D of the layers.
    """
    slots = (layers, batch, length, spec.key_heads, spec.head_width)
    # A block of c positions is finished with its last one: c - 1 temporary pairs are
    # all that an unfinished one can hold.
    open_slots = spec.block - 1 if length else 0
    open_block = (layers, batch, open_slots, spec.key_heads, spec.head_width)
    source = (layers, batch, source_width(length, width, spec))
    return RecurrentCache(
        keys=jnp.zeros(slots, spec.dtype),
        values=jnp.zeros(slots, spec.dtype),
        temporary_keys=jnp.zeros(open_block, spec.dtype),
        temporary_values=jnp.zeros(open_block, spec.dtype),
        source=jnp.zeros(source, spec.dtype),
        # Two arrays: a cache is donated, and no buffer can be given away twice.
        position=jnp.zeros(batch, jnp.int32),
        written=jnp.zeros(batch, jnp.int32),
    )


class Rows(NamedTuple):
    """Lengths and segments of the rows.

    Attributes:
      lengths: how many of the T positions of a row are real, the rest is padding on the
        right. None: all.
      segments: document number of each position: no pair crosses documents. For the
        training cache only. None: one document per row.
    """

    lengths: Int[Array, " B"] | None = None
    segments: Int[Array, "B T"] | None = None


class Residuals(NamedTuple):
    """The residuals of the backward pass besides the op's inputs: O(T) per layer.

    The input of layer l > 0 is z[l - 1].

    Attributes:
      z: the layers' outputs, at least float32.
      attended: softmax-weighted values, before w_out, in spec.dtype.
      lse: log of the sum of exp(logits), at least float32.
    """

    z: Float[Array, "L B T D"]
    attended: Float[Array, "L B T H E"]
    lse: Float[Array, "L B T H"]


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockSizes(GivenSizes):
    """Block sizes of a call, apart from `tile`; None: the backend chooses.

    Attributes:
      rows: rows of the batch in one program.
      keys: slots of the prefix that are read at once, at most.
      depth: how much of the contracted axis a product reads at once, at most.
      columns: columns of one program of a product, at most.
      attend_rows: rows in one program of the attention step.
      sub_tile: positions of a tile that read its earlier pairs together, forward.
      splits: parts of the contracted axis that programs of their own multiply, at most,
        forward.
      stages: blocks of operands that are on their way at once, at most, forward.
    """

    rows: int | None = None
    keys: int | None = None
    depth: int | None = None
    columns: int | None = None
    attend_rows: int | None = None
    sub_tile: int | None = None
    splits: int | None = None
    stages: int | None = None


class Stages(NamedTuple):
    """Devices that hold the layers, and their mesh axis."""

    count: int
    axis: str | None


ONE_STAGE = Stages(1, None)


@jax.tree_util.register_static
@dataclass(frozen=True, kw_only=True, slots=True)
class RecurrentPrefillOptions:
    """The static options of a call.

    Attributes:
      spec: every switch of the layer.
      schedule, tile: see `recurrent_prefill`.
      blocks: sizes of the caller's; the backend chooses what they leave out.
      stages: number of mesh stages that share the layers.
      interpret: runs kernels as plain JAX, on any device; pltpu.InterpretParams: with
        the TPU's own semantics.
    """

    spec: LayerSpec
    schedule: str | None = None
    tile: int | None = None
    blocks: BlockSizes = BlockSizes()
    stages: Stages = ONE_STAGE
    interpret: Any = False


class RecurrentPrefillCall(NamedTuple):
    """The arguments of every backend; with gradients in place of arrays, its results.

    Outputs of a backend are z and the cache with the new positions.
    """

    x: Float[Array, "B T D"]
    weights: LayerWeights
    cache: RecurrentCache
    rows: Rows
    options: RecurrentPrefillOptions

    @property
    def spec(self) -> LayerSpec:
        """The switches of the layer."""
        return self.options.spec

    @property
    def seen(self) -> Int[Array, " B"]:
        """How many positions each row has seen after the call."""
        count = self.x.shape[1] if self.rows.lengths is None else self.rows.lengths
        return (self.cache.position + count).astype(self.cache.position.dtype)

    def with_gradients(
        self, dx: Array, dweights: LayerWeights, dcache: RecurrentCache
    ) -> "RecurrentPrefillCall":
        """Returns gradients in place of the arrays; integers have none."""
        dcache = dcache._replace(position=None, written=None)
        return self._replace(x=dx, weights=dweights, cache=dcache, rows=Rows())


def refusal_of_kernels(call: RecurrentPrefillCall) -> str | None:
    """Returns what no kernel does of a call, whatever its device; None: nothing."""
    if call.options.stages.count > 1:
        return "runs no layers on several stages"
    if call.x.shape[1] == 1 and call.cache.slots:
        # A tile's prefix, and the cache with it, is padded to full programs of rows: a
        # decode step of one row would move many times what it reads.
        return "leaves a decode step to xla, which reads the cache in place"
    if call.spec.block != 1:
        return f"runs blocks of one position, got block={call.spec.block}"
    if call.spec.dtype == "float64" or call.x.dtype == jnp.float64:
        return "computes in float32 at most"
    return None
