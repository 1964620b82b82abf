"""Rows sharded over the mesh's axis `sequence`, with T / S tokens per device.

What crosses devices: the RNN's gate products and final states, RAT's chunk ends, the
keys and values of attention, and of a window only the neighbour's last W. Everything
else, the recurrence inside chunks included, stays where it is. With S = 1 none of this
runs.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Bool, Float, Int

from pallas_kernels.chunk_attention import ChunkEnds, chunk_attention
from pallas_kernels.gated_scan import GateLogits, gated_scan
from pallas_kernels.mesh_cut import free_axes, row_axes
from recurjax.layers.attention import Past, attend_in_window
from recurjax.layers.mesh import SEQUENCE_AXIS, sequence_shards
from recurjax.layers.position import Alibi
from recurjax.types import Array
from recurjax.variants.rat.config import (
    AttentionMixerConfig,
    MambaMixerConfig,
    PlaceConfig,
    RatConfig,
    RatMixerConfig,
    RecurrentLayerConfig,
    ReversedRatMixerConfig,
)


def obstacle(config: RatConfig, length: int, count: int) -> str | None:
    """Returns why rows of `length` tokens cannot lie over `count` shards, or None."""
    if length % count:
        return f"a row of {length} tokens does not divide into {count} shards"
    reasons = (_obstacle(mixer, length // count) for mixer in config.pattern)
    return next((reason for reason in reasons if reason is not None), None)


def check(mixer: PlaceConfig, length: int) -> None:
    """Raises ValueError when rows of `length` tokens cannot be sharded."""
    count = sequence_shards()
    reason = f"a row of {length} tokens does not divide into {count} shards"
    if length % count == 0:
        reason = _obstacle(mixer, length // count)
    if reason is not None:
        raise ValueError(f"{type(mixer).__name__}: {reason}")


class SequenceShard(NamedTuple):
    """A device's place among those that hold a row.

    Attributes:
      index: which part it holds.
      count: S.
    """

    index: Int[Array, ""]
    count: int

    def gather(self, x: Array, axis: int) -> Array:
        """Joins all parts' x along `axis`, on every device."""
        return jax.lax.all_gather(x, SEQUENCE_AXIS, axis=axis, tiled=True)

    def from_left(self, x: Array) -> Array:
        """Returns the left neighbour's x; zeros on the first part."""
        pairs = [(i, i + 1) for i in range(self.count - 1)]
        return jax.lax.ppermute(x, SEQUENCE_AXIS, pairs)


def run(function: Callable[..., Array], arrays: tuple[Any, ...]) -> Array:
    """Runs `function(*parts, shard=...)` on each device's part of [B, T, ...] arrays.

    The batch is sharded too where its mesh axes divide it; heads are left to the
    compiler. Arrays may be trees; a leaf of one axis, such as a gate's bias, is
    replicated.
    """
    cut, mesh = free_axes(), jax.sharding.get_abstract_mesh()
    rows = row_axes(next(x for x in arrays if x is not None).shape[0])
    ours = {*rows, SEQUENCE_AXIS} | {
        axis for axis in mesh.axis_names if mesh.shape[axis] == 1
    }
    spec = P(rows or None, SEQUENCE_AXIS)

    def local(*parts: Any) -> Array:
        return function(
            *parts,
            shard=SequenceShard(jax.lax.axis_index(SEQUENCE_AXIS), cut[SEQUENCE_AXIS]),
        )

    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=jax.tree.map(lambda x: spec if x.ndim > 1 else P(), arrays),
        out_specs=spec,
        axis_names=ours,
        check_vma=False,
    )(*arrays)


def scan_part(
    gate: GateLogits,
    v: Float[Array, "B P I"],
    starts: Bool[Array, "B P"] | None,
    *,
    shard: SequenceShard,
) -> Float[Array, "B P I"]:
    """Computes this part of h[t] = g[t] h[t-1] + (1 - g[t]) v[t] over the full row.

    One scan gives h from a zero state and, as a second stream without values that
    starts at 1, the products a[t] of the part's gates up to t. Parts meet in their last
    (a, h) alone: h_in of part s + 1 is a h_in + h of part s; then h[t] + a[t] h_in.
    """
    B, _, I = gate.shape
    dtype = jnp.promote_types(gate.dtype, jnp.float32)
    # A stream of one channel is tiled over all: it costs a scan no memory.
    nothing = jnp.zeros((*gate.shape[:2], 1), dtype)
    zeros, ones = jnp.zeros((B, I), dtype), jnp.ones((B, I), dtype)
    (h, a), (last, product) = gated_scan(
        gate, (v.astype(dtype), nothing), initial=(zeros, ones), starts=starts
    )

    def pass_on(entering: Array, part: tuple[Array, Array]) -> tuple[Array, Array]:
        product, last = part
        return product * entering + last, entering

    # Every device gets all S ends and folds them itself: two numbers a channel and
    # part, sent once, instead of S - 1 messages one after another.
    parts = (shard.gather(product[None], 0), shard.gather(last[None], 0))
    _, entering = jax.lax.scan(pass_on, zeros, parts)
    h = h + a * entering[shard.index][:, None]
    return h.astype(v.dtype)


def gather_ends(ends: ChunkEnds, shard: SequenceShard) -> ChunkEnds:
    """Joins the chunk ends of all parts."""
    known = ends.documents
    return ChunkEnds(
        keys=shard.gather(ends.keys, 2),
        values=shard.gather(ends.values, 2),
        documents=None if known is None else shard.gather(known, 1),
    )


def attention_part(
    q: Float[Array, "B P H E"],
    k: Float[Array, "B P H E"],
    v: Float[Array, "B P H E"],
    documents: Int[Array, "B P"] | None,
    *,
    scale: float,
    window: int | None,
    shard: SequenceShard,
) -> Float[Array, "B P H E"]:
    """Computes this part of causal attention, over all tokens or over a window."""
    if window is not None:
        return _window_part(q, k, v, documents, scale, window, shard)
    own_logits = jnp.sum(q.astype(jnp.promote_types(q.dtype, jnp.float32)) * k, axis=-1)
    # Causal attention as chunk attention with chunks of one token: every earlier token,
    # of whatever part, is an end.
    ends = ChunkEnds(k.swapaxes(1, 2), v.swapaxes(1, 2), documents)
    first = jnp.full(q.shape[0], shard.index * q.shape[1], jnp.int32)
    ends = gather_ends(ends, shard)
    return chunk_attention(
        q, own_logits, v, ends, chunk=1, scale=scale, first=first, documents=documents
    )


def _window_part(q, k, v, documents, scale: float, window: int, shard: SequenceShard):
    """Attends to this part and to the left neighbour's last W tokens."""
    # The neighbour's last tokens are all that a window reaches: `check` has refused
    # longer ones.
    size = max(window, 1)
    past = Past(
        keys=shard.from_left(k[:, -size:]),
        values=shard.from_left(v[:, -size:]),
        documents=None if documents is None else shard.from_left(documents[:, -size:]),
        start=shard.index * q.shape[1],
    )
    return attend_in_window(
        q, k, v, scale=scale, window=window, documents=documents, past=past
    )


def _obstacle(mixer: PlaceConfig, part: int) -> str | None:
    match mixer:
        case RatMixerConfig():
            if part % mixer.chunk:
                return (
                    f"a chunk of {mixer.chunk} tokens must not cross shards of {part}: "
                    "use fewer shards or another chunk"
                )
        case ReversedRatMixerConfig():
            return "the reversed design does not run over sequence shards"
        case MambaMixerConfig():
            return "Mamba does not run over sequence shards"
        case RecurrentLayerConfig():
            return "a Recurrent Transformer layer does not run over sequence shards"
        case AttentionMixerConfig():
            layer = mixer.attention
            if layer.soft_cap is not None or isinstance(layer.position, Alibi):
                return "a soft cap or ALiBi does not run over sequence shards"
            if layer.implementation is not None:
                return (
                    f"implementation {layer.implementation} does not run over sequence "
                    "shards: leave it None"
                )
            if mixer.window is not None and mixer.window > part:
                return (
                    f"a window of {mixer.window} tokens must not be longer than a "
                    f"shard of {part}: use fewer shards"
                )
    return None
