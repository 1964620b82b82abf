"""RAT's layer: gated recurrence inside chunks, softmax attention across them."""

from functools import partial

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Float

from pallas_kernels import target
from pallas_kernels.chunk_attention import ChunkEnds
from pallas_kernels.gated_scan import GateLogits, ends_of, queried_scan
from pallas_kernels.mesh_cut import as_it_lies
from recurjax.layers.attention import (
    dropped_slots,
    merge,
    project,
    project_flat,
    read_layer,
    write_layer,
)
from recurjax.layers.initialization import InitConfig, draw_output_weight, draw_weight
from recurjax.layers.linear import apart
from recurjax.layers.mesh import sequence_shards
from recurjax.layers.position import rotate
from recurjax.types import Array, Tokens
from recurjax.variants.rat import sequence_parallel
from recurjax.variants.rat.alignment import Alignment, align
from recurjax.variants.rat.caches import RatCache, start, state_dtype
from recurjax.variants.rat.config import RatMixerConfig
from recurjax.variants.rat.gate import Gate
from recurjax.variants.rat.recurrence import (
    attend_across_chunks,
    document_starts,
    rotate_chunks,
    with_ends,
)
from recurjax.variants.rat.sequence_parallel import Shard, gather_ends


class RatMixer(nnx.Module):
    """o = (z * y) W_out: see `recurrence` for y."""

    def __init__(
        self,
        config: RatMixerConfig,
        width: int,
        init: InitConfig,
        *,
        layer: Array | int,
        layers: int,
        rngs: nnx.Rngs,
    ):
        self.config = config
        H, E, N = config.heads, config.head_width, config.groups
        draw = partial(draw_weight, fan_in=width, config=init)
        gate = partial(Gate, width, H, E, init, rngs=rngs)
        self.output_gate = gate(rank=config.output_rank, horizon=None)
        self.forget_gate = gate(rank=config.forget_rank, horizon=config.gate_horizon)
        self.w_v = nnx.Param(draw(rngs.params(), (width, H, E)))
        self.w_q = nnx.Param(draw(rngs.params(), (width, N, E)))
        self.w_k = nnx.Param(draw(rngs.params(), (width, N, E)))
        self.w_out = nnx.Param(
            draw_output_weight(
                rngs.params(), (H, E, width), layer=layer, layers=layers, config=init
            )
        )

    def init_cache(self, layers: int, batch: int, length: int, dtype) -> RatCache:
        """Makes an empty cache for `length` tokens a row of `layers` such layers."""
        H, E = self.config.heads, self.config.head_width
        # The cache grows by a chunk's end, not by a token: C times fewer keys and
        # values.
        slots = -(-length // self.config.chunk)
        ends = (layers, batch, H, slots, E)
        # The running chunk is one state a stream: its earlier tokens need not be kept.
        state = (layers, batch, H * E if length else 0)
        wide = state_dtype(dtype)
        return RatCache(
            keys=jnp.zeros(ends, dtype),
            values=jnp.zeros(ends, dtype),
            k_state=jnp.zeros(state, wide),
            v_state=jnp.zeros(state, wide),
            **start(batch),
        )

    def __call__(
        self, x: Float[Array, "B T D"], cache: RatCache, tokens: Tokens
    ) -> tuple[Float[Array, "B T D"], RatCache]:
        if cache.slots == 0:
            return self._train(x, tokens), cache
        return self._continue(x, cache, tokens)

    def _train(self, x: Array, tokens: Tokens) -> Array:
        T = x.shape[1]
        C = min(self.config.chunk, T)
        shards = sequence_shards()
        if shards > 1:
            sequence_parallel.check(self.config, T)
        # Whole chunks only: what is added at the end is cut off again, and nothing
        # before it sees it. A document goes on there, so that no start is told in the
        # padding.
        padding = ((0, 0), (0, -T % C))
        documents = tokens.segments
        if padding[1][1]:
            x = jnp.pad(x, (*padding, (0, 0)))
            if documents is not None:
                documents = jnp.pad(documents, padding, mode="edge")
        arrays = (*self._project(x), documents)
        mix = partial(self._mix, chunk=C)
        y = mix(*arrays) if shards == 1 else sequence_parallel.run(mix, arrays)
        return self._output(x, y)[:, :T]

    def _mix(
        self,
        q: Array,
        k: Array,
        v: Array,
        gate: GateLogits,
        documents: Array | None,
        *,
        chunk: int,
        shard: Shard | None = None,
    ) -> Array:
        """Returns y of whole chunks: of all, or of those that a shard holds."""
        # One gate for both streams: k~ and v~ forget alike, so one op runs them
        # together. A state starts from zero in each chunk and at each document. Of k~
        # all but the ends serve their own position's logits only, which the op makes.
        starts = document_starts(documents)
        scanned = queried_scan(gate, v, k, q, starts=starts, chunk=chunk)
        v, v_ends = map(self._heads, with_ends(scanned.values, chunk))
        k_ends = self._heads(scanned.ends)
        # Positions attend to the states at the ends of the chunks before their own; the
        # own chunk they know through their own state, which is not rotated (see
        # `attend_across_chunks`).
        G = v.shape[1] // chunk
        numbers = jnp.arange(G)[None]
        # No position sees the end of the last chunk. Left out it would leave an odd
        # number of ends, which a GPU's and a TPU's layouts pad and copy in both passes.
        seen = slice(0, G if G > 1 else 0)
        first = None
        if shard is not None:
            # A shard counts its chunks on from those of its left neighbours, and the
            # end of its last chunk is seen by its right one.
            numbers = numbers + shard.index * G
            seen = slice(0, G)
            first = jnp.full(v.shape[0], shard.index * G, jnp.int32)
        ends = ChunkEnds(
            keys=self._rotate_ends(k_ends[:, seen], numbers[:, seen]),
            values=v_ends[:, seen].swapaxes(1, 2),
            documents=None
            if documents is None
            else documents[:, chunk - 1 :: chunk][:, seen],
        )
        if shard is not None:
            ends = gather_ends(ends, shard)
        # Positions as if nothing were cut, for a rotation by token.
        places = numbers[0, 0] * chunk + jnp.arange(v.shape[1])[None]
        rotated = self._rotate_queries(q, numbers, places)
        return attend_across_chunks(
            *(scanned.logits, rotated, v, ends),
            size=chunk,
            first=first,
            documents=documents,
        )

    def _continue(
        self, x: Array, cache: RatCache, tokens: Tokens
    ) -> tuple[Array, RatCache]:
        if tokens.segments is not None:
            raise NotImplementedError(
                "RatMixer: segments are for the training cache (length 0) only"
            )
        T, C = x.shape[1], self.config.chunk
        if tokens.lengths is None and cache.slots * C < T:
            raise ValueError(
                f"RatMixer: {T} tokens in one call do not fit a cache of {cache.slots} "
                f"chunks of {C}"
            )
        # Rows may stand anywhere in their chunks: laid out at their places, the chunks
        # of all rows begin together and one scan in chunks serves them.
        rows = align(cache.position, T, tokens.lengths, C)
        x = rows.lay(x)
        q, k, v, gate = self._project(x)
        # A gate of 1 hands the state on over places that hold no token.
        logits = jnp.where(rows.real[..., None], gate.logits, jnp.inf)
        gate = gate._replace(logits=logits)
        # A row that begins a chunk begins from zero; what the cache holds is then the
        # last chunk's.
        fresh = (rows.offset == 0)[:, None]
        old = [read_layer(h, cache.layer) for h in (cache.v_state, cache.k_state)]
        v_old, k_old = (jnp.where(fresh, 0, h) for h in old)
        scanned = queried_scan(
            *(gate, v, k, q),
            initial=(v_old, k_old),
            lengths=rows.shift + rows.count,
            chunk=rows.size,
        )
        # A row without a new token keeps its state, also where it would begin a chunk.
        moved = (rows.count > 0)[:, None]
        finals = [
            jnp.where(moved, h, o) for h, o in zip(scanned.finals, old, strict=True)
        ]
        v = self._heads(scanned.values)
        written = (scanned.ends, ends_of(scanned.values, rows.size))
        k_ends, v_ends = map(self._heads, written)
        # Written before it is read: a chunk that these tokens complete is seen by those
        # of them that stand in the next one.
        cache = self._write(cache, k_ends, v_ends, finals, rows)
        ends = ChunkEnds(
            keys=_as_it_lies(read_layer(cache.keys, cache.layer)).astype(x.dtype),
            values=_as_it_lies(read_layer(cache.values, cache.layer)).astype(x.dtype),
        )
        rotated = self._rotate_queries(q, rows.numbers, rows.positions)
        y = attend_across_chunks(
            scanned.logits, rotated, v, ends, size=rows.size, first=rows.first
        )
        return rows.pick(self._output(x, y), T), cache

    def _project(self, x: Array) -> tuple[Array, Array, Array, GateLogits]:
        """Returns q by group, k and v flat, and the forget gate's logits."""
        x_q, x_k, x_v, x_gate = apart(x, 4)
        k, v = project_flat(x_k, self.w_k), project_flat(x_v, self.w_v)
        return project(x_q, self.w_q), k, v, self.forget_gate.logits(x_gate)

    def _output(self, x: Array, y: Array) -> Array:
        z = self.output_gate(x)
        mixed = (z * y.reshape(z.shape)).astype(x.dtype)
        return merge(mixed, self.w_out)

    def _heads(self, h: Array) -> Array:
        return h.reshape(*h.shape[:2], self.config.heads, -1)

    def _rotate_queries(self, q: Array, numbers: Array, positions: Array) -> Array:
        rope = self.config.position
        if rope is None:
            return q
        if self.config.position_of == "token":
            return rotate(q, positions, rope)
        return rotate_chunks(q, numbers, rope)

    def _rotate_ends(self, k: Array, numbers: Array) -> Array:
        """Rotates the keys [B, G, H, E] of chunks' ends; gives [B, H, G, E]."""
        rope = self.config.position
        if rope is not None:
            if self.config.position_of == "token":
                # A chunk's end stands at its last token.
                numbers = (numbers + 1) * self.config.chunk - 1
            k = rotate(k, numbers, rope)
        return k.swapaxes(1, 2)

    def _write(
        self,
        cache: RatCache,
        k_ends: Array,
        v_ends: Array,
        finals: list,
        rows: Alignment,
    ) -> RatCache:
        """Writes the ends of chunks that the new tokens complete, and the states."""
        keys = self._rotate_ends(k_ends, rows.numbers).swapaxes(1, 2)
        # A chunk's end is kept only when its last token is among the new ones.
        nowhere = dropped_slots(cache.slots, rows.numbers.shape[1])
        slot = jnp.where(rows.ended, rows.numbers, nowhere)
        index = (cache.layer, jnp.arange(v_ends.shape[0])[:, None], slice(None), slot)
        put = {"mode": "drop", "unique_indices": True}
        v_state, k_state = finals
        return cache._replace(
            keys=cache.keys.at[index].set(keys.astype(cache.keys.dtype), **put),
            values=cache.values.at[index].set(v_ends.astype(cache.values.dtype), **put),
            v_state=write_layer(cache.v_state, cache.layer, v_state),
            k_state=write_layer(cache.k_state, cache.layer, k_state),
        )


def _as_it_lies(ends: Float[Array, "B H S E"]) -> Float[Array, "B H S E"]:
    """Keeps XLA for GPUs from turning all layers' chunk ends to another layout."""
    if target.transposes_stacked_caches():
        return as_it_lies(ends, rows=0, columns=(1,))
    return ends
