"""RAT's layer, its reversed design and the baselines, each with what it caches.

RAT is gated recurrence inside chunks and softmax attention across them; the reversed
design is the opposite. The RNN runs RAT's recurrence over the entire sequence; the
attention mixer sees all tokens or a window; Mamba is a selective state space model.

Each cache is a NamedTuple for L stacked layers. It has `slots`, 0 for the training
cache, which keeps nothing, and `position` and `layer`, which the stack sets for each
layer and moves after the last one.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Float, Int

from pallas_kernels import target
from pallas_kernels.chunk_attention import ChunkEnds
from pallas_kernels.gated_scan import (
    GateLogits,
    ends_of,
    gate_of,
    gated_scan,
    queried_scan,
)
from pallas_kernels.mesh_cut import as_it_lies
from recurjax.layers.attention import (
    KeyValueCache,
    SelfAttention,
    attend,
    dropped_slots,
    empty_key_value_cache,
    keys_for_queries,
    merge,
    project,
    project_flat,
    read_layer,
    slots_for,
    write_layer,
)
from recurjax.layers.initialization import InitConfig, draw_output_weight, draw_weight
from recurjax.layers.linear import apart, linear
from recurjax.layers.mamba import Mamba, MambaCache, empty_mamba_cache
from recurjax.layers.mesh import sequence_shards
from recurjax.layers.position import document_starts, rotate
from recurjax.types import Array, Tokens
from recurjax.variants.rat import sequence_parallel
from recurjax.variants.rat.config import (
    AttentionMixerConfig,
    MambaMixerConfig,
    MixerConfig,
    RatMixerConfig,
    ReversedRatMixerConfig,
    RnnMixerConfig,
    gate_bias_span,
)
from recurjax.variants.rat.recurrence import (
    Alignment,
    align,
    attend_across_chunks,
    attend_within_chunks,
    recur_across_chunks,
    rotate_chunks,
    with_ends,
)
from recurjax.variants.rat.sequence_parallel import SequenceShard, gather_ends


def start(batch: int) -> dict[str, Array]:
    """Returns the last two fields of an empty cache."""
    return {
        "position": jnp.zeros(batch, jnp.int32),
        "layer": jnp.zeros((), jnp.int32),
    }


def state_dtype(dtype):
    """Returns the dtype of recurrent states for activations of `dtype`.

    Departs from the authors' code, which stores them in bfloat16 after every token:
    after 4096 steps an RNN's state is then 5.8 % off.
    """
    # Rounding a state after each token adds up; rounding a key once does not.
    return jnp.promote_types(dtype, jnp.float32)


def refuse_documents(mixer: nnx.Module, tokens: Tokens) -> None:
    """Raises NotImplementedError when tokens on a cache are of several documents."""
    if tokens.segments is not None:
        raise NotImplementedError(
            f"{type(mixer).__name__}: segments work with the training cache (length 0) "
            "only: leave them out"
        )


class Gate(nnx.Module):
    """sigmoid(x W + b), W = W_full or W_reduce W_expand.

    Departs from the paper, which has no b: the authors' code does, and it decides how
    far a fresh recurrence looks back.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        head_width: int,
        init: InitConfig,
        *,
        rank: int | None,
        horizon: int | None,
        rngs: nnx.Rngs,
    ):
        # A full gate has as many weights as a projection of values; one of low rank,
        # few.
        wide = (heads, head_width)
        draw = partial(draw_weight, config=init)

        def weight(shape: tuple[int, ...], used: bool) -> nnx.Param | None:
            if not used:
                return None
            return nnx.Param(draw(rngs.params(), shape, fan_in=shape[0]))

        self.w_full = weight((width, *wide), rank is None)
        self.w_reduce = weight((width, rank or 0), rank is not None)
        self.w_expand = weight((rank or 0, *wide), rank is not None)
        bias = None if horizon is None else _draw_bias(rngs.params(), wide, horizon)
        self.b_forget = None if bias is None else nnx.Param(bias)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T I"]:
        """Returns the gate in at least float32."""
        return gate_of(self.logits(x))

    def logits(self, x: Float[Array, "B T D"]) -> GateLogits:
        """Returns what the gate is the sigmoid of: x W in x's dtype, and b."""
        if self.w_full is not None:
            logits = project_flat(x, self.w_full)
        else:
            assert self.w_reduce is not None and self.w_expand is not None
            logits = project_flat(linear(x, self.w_reduce), self.w_expand)
        # Without a bias the gate starts at 1/2 and looks back two tokens.
        if self.b_forget is None:
            return GateLogits(logits)
        # A bias of each token's own has tokens in front of the heads.
        bias = self.b_forget[...]
        bias = bias.reshape(*bias.shape[:-2], -1)
        return GateLogits(logits, bias) if bias.ndim == 1 else GateLogits(logits + bias)


def _draw_bias(key: Array, shape: tuple[int, int], horizon: int) -> Array:
    """Draws log U(1, horizon - 1): gates that span from 2 to `horizon` tokens."""
    # A logit of log(n - 1) is a gate of 1 - 1/n, which looks back about n tokens.
    span = gate_bias_span(horizon)
    return jnp.log(jax.random.uniform(key, shape, minval=1.0, maxval=jnp.exp(span)))


class RatCache(NamedTuple):
    """Chunk ends, and the state of the chunk that each row is in.

    Attributes:
      keys, values: slot s holds the end of chunk s once the row has left it; keys after
        rotation. Heads come before chunks, as `chunk_attention` wants them.
      k_state, v_state: the recurrence's states, at least float32, before rotation;
        without meaning where position mod C = 0.
      position: how many tokens each row has seen.
      layer: which of the stacked layers reads and writes.
    """

    keys: Float[Array, "L B H S E"]
    values: Float[Array, "L B H S E"]
    k_state: Float[Array, "L B I"]
    v_state: Float[Array, "L B I"]
    position: Int[Array, " B"]
    layer: Int[Array, ""]

    @property
    def slots(self) -> int:
        """S, the number of chunks that fit."""
        return self.keys.shape[3]


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
        """Creates an empty cache of `layers` layers for `length` tokens per row."""
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
        # Pad to complete chunks; no token sees the padding, and it is cut off again.
        # The last document continues into it, so that the padding has no document
        # start.
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
        shard: SequenceShard | None = None,
    ) -> Array:
        """Returns y of complete chunks: of all, or of those that a shard holds."""
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
        refuse_documents(self, tokens)
        T, C = x.shape[1], self.config.chunk
        if tokens.lengths is None and cache.slots * C < T:
            raise ValueError(
                f"RatMixer: {T} tokens in one call exceed the cache's "
                f"{cache.slots} chunks of {C}: make the cache longer"
            )
        # Rows may be anywhere in their chunks: shift them so that the chunks of all
        # rows begin together and one chunked scan serves them.
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
        # Write before reading: tokens of the next chunk see a chunk that this call
        # completes.
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
                # A chunk's end is at its last token.
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


class RnnCache(NamedTuple):
    """The recurrence's state; of width 0 in training."""

    state: Float[Array, "L B I"]
    position: Int[Array, " B"]
    layer: Int[Array, ""]

    @property
    def slots(self) -> int:
        """Returns whether anything is kept: 0 or the number of channels."""
        return self.state.shape[2]


class RnnMixer(nnx.Module):
    """o = (z * v~) W_out with v~_t = g_t v~_{t-1} + (1 - g_t) v_t."""

    def __init__(
        self,
        config: RnnMixerConfig,
        width: int,
        init: InitConfig,
        *,
        layer: Array | int,
        layers: int,
        rngs: nnx.Rngs,
    ):
        self.config = config
        H, E = config.heads, config.head_width
        gate = partial(Gate, width, H, E, init, rngs=rngs)
        self.output_gate = gate(rank=config.output_rank, horizon=None)
        self.forget_gate = gate(rank=config.forget_rank, horizon=config.gate_horizon)
        w_v = draw_weight(rngs.params(), (width, H, E), fan_in=width, config=init)
        self.w_v = nnx.Param(w_v)
        self.w_out = nnx.Param(
            draw_output_weight(
                rngs.params(), (H, E, width), layer=layer, layers=layers, config=init
            )
        )

    def init_cache(self, layers: int, batch: int, length: int, dtype) -> RnnCache:
        """Creates an empty cache: its size does not depend on the length, unless 0."""
        channels = self.config.heads * self.config.head_width if length else 0
        state = jnp.zeros((layers, batch, channels), state_dtype(dtype))
        return RnnCache(state, **start(batch))

    def __call__(
        self, x: Float[Array, "B T D"], cache: RnnCache, tokens: Tokens
    ) -> tuple[Float[Array, "B T D"], RnnCache]:
        x_gate, x_v = apart(x, 2)
        gate, v = self.forget_gate.logits(x_gate), project_flat(x_v, self.w_v)
        if cache.slots == 0:
            h = self._train(gate, v, document_starts(tokens.segments))
        else:
            refuse_documents(self, tokens)
            # The past is one state; padding at a row's end does not change it.
            before = (read_layer(cache.state, cache.layer),)
            (h,), (final,) = gated_scan(
                gate, (v,), initial=before, lengths=tokens.lengths
            )
            state = write_layer(cache.state, cache.layer, final)
            cache = cache._replace(state=state)
        mixed = (self.output_gate(x) * h).astype(x.dtype)
        return merge(mixed, self.w_out), cache

    def _train(self, gate: GateLogits, v: Array, starts: Array | None) -> Array:
        if sequence_shards() > 1:
            sequence_parallel.check(self.config, v.shape[1])
            return sequence_parallel.run(sequence_parallel.scan_part, (gate, v, starts))
        return gated_scan(gate, (v,), starts=starts).states[0]


class ReversedRatCache(NamedTuple):
    """Keys and values of the chunk that each row is in, and the state before it.

    Attributes:
      keys, values: slot t mod C holds token t of the running chunk; keys rotated.
      state: state of the recurrence after the last complete chunk, at least float32.
      position, layer: as in `RatCache`.
    """

    keys: Float[Array, "L B C H E"]
    values: Float[Array, "L B C H E"]
    state: Float[Array, "L B I"]
    position: Int[Array, " B"]
    layer: Int[Array, ""]

    @property
    def slots(self) -> int:
        """C, or 0 in training."""
        return self.keys.shape[2]


class ReversedRatMixer(nnx.Module):
    """o = (z * v~) W_out with v~_t = g_t v~_end(c - 1) + (1 - g_t) a_t."""

    def __init__(
        self,
        config: ReversedRatMixerConfig,
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
        self.w_q = nnx.Param(draw(rngs.params(), (width, N, E)))
        self.w_k = nnx.Param(draw(rngs.params(), (width, H, E)))
        self.w_v = nnx.Param(draw(rngs.params(), (width, H, E)))
        self.w_out = nnx.Param(
            draw_output_weight(
                rngs.params(), (H, E, width), layer=layer, layers=layers, config=init
            )
        )

    def init_cache(
        self, layers: int, batch: int, length: int, dtype
    ) -> ReversedRatCache:
        """Creates an empty cache: one chunk of keys and values, whatever the length."""
        H, E = self.config.heads, self.config.head_width
        # Attention looks no further back than the chunk's first token; all before it is
        # in the one state.
        slots, channels = (self.config.chunk, H * E) if length else (0, 0)
        shape = (layers, batch, slots, H, E)
        return ReversedRatCache(
            keys=jnp.zeros(shape, dtype),
            values=jnp.zeros(shape, dtype),
            state=jnp.zeros((layers, batch, channels), state_dtype(dtype)),
            **start(batch),
        )

    def __call__(
        self, x: Float[Array, "B T D"], cache: ReversedRatCache, tokens: Tokens
    ) -> tuple[Float[Array, "B T D"], ReversedRatCache]:
        if cache.slots == 0:
            return self._train(x, tokens), cache
        refuse_documents(self, tokens)
        T = x.shape[1]
        rows = align(cache.position, T, tokens.lengths, self.config.chunk)
        x = rows.lay(x)
        gate = self.forget_gate(x)
        # Attention inside the chunks first; what it gives is what recurs across them.
        a, keys, values = self._attend(x, cache, rows)
        before = read_layer(cache.state, cache.layer)
        y, ends = recur_across_chunks(gate, a, before, size=rows.size)
        # Keep the state after the last complete chunk: a row that completes none keeps
        # its old state.
        count = rows.ended.sum(axis=1)
        last = jnp.take_along_axis(
            ends, jnp.maximum(count - 1, 0)[:, None, None], axis=1
        )
        state = jnp.where((count > 0)[:, None], last[:, 0], before)
        cache = cache._replace(
            keys=write_layer(cache.keys, cache.layer, keys),
            values=write_layer(cache.values, cache.layer, values),
            state=write_layer(cache.state, cache.layer, state),
        )
        return rows.pick(self._output(x, y), T), cache

    def _train(self, x: Array, tokens: Tokens) -> Array:
        B, T, _ = x.shape
        if sequence_shards() > 1:
            sequence_parallel.check(self.config, T)
        C = min(self.config.chunk, T)
        padding = ((0, 0), (0, -T % C))
        x = jnp.pad(x, (*padding, (0, 0)))
        documents = tokens.segments
        if documents is not None:
            documents = jnp.pad(documents, padding, mode="edge")
        q, k, v = self._project(x, jnp.arange(x.shape[1])[None])
        a = attend_within_chunks(q, k, v, size=C, documents=documents)
        gate = self.forget_gate(x)
        # A sequence in training begins without a state before it.
        zeros = jnp.zeros((B, gate.shape[-1]), gate.dtype)
        a = a.reshape(gate.shape)
        y, _ = recur_across_chunks(gate, a, zeros, size=C, documents=documents)
        return self._output(x, y)[:, :T]

    def _attend(
        self, x: Array, cache: ReversedRatCache, rows: Alignment
    ) -> tuple[Array, Array, Array]:
        """Returns a [B, P, I] and the keys and values of the chunk then running."""
        B = x.shape[0]
        C = self.config.chunk
        q, k, v = self._project(x, rows.positions)
        old = [read_layer(cached, cache.layer) for cached in (cache.keys, cache.values)]
        slot = jnp.arange(C)
        # A decode step: the new token takes its slot in the running chunk and attends
        # to the slots up to it. The slots behind hold the last chunk's tokens, which
        # are hidden.
        if rows.places == 1:
            here = (slot == rows.offset[:, None]) & (rows.count > 0)[:, None]
            new = [
                jnp.where(here[..., None, None], laid, cached)
                for laid, cached in zip((k, v), old, strict=True)
            ]
            seen = (slot <= rows.offset[:, None])[:, None, None]
            q = jnp.tile(q, (1, 1, k.shape[2] // q.shape[2], 1))
            keys, values = (cached.astype(q.dtype) for cached in new)
            scale = q.shape[-1] ** -0.5
            a = attend(q, keys, values, scale=scale, causal=False, mask=seen)
            return a.reshape(B, 1, -1), new[0], new[1]
        before = jnp.arange(rows.places) < rows.offset[:, None]  # [B, P]
        more = ((0, 0), (0, rows.places - C), (0, 0), (0, 0))
        k, v = (
            jnp.where(before[..., None, None], jnp.pad(cached, more), laid)
            for laid, cached in zip((k, v), old, strict=True)
        )
        q, k, v = (h.astype(x.dtype) for h in (q, k, v))
        a = attend_within_chunks(q, k, v, size=C)
        total = rows.offset + rows.count
        # What the next call finds: the tokens of the chunk that is running after this
        # one. Slots beyond them keep what they held; nobody sees it.
        place = jnp.minimum((total // C * C)[:, None] + slot, rows.places - 1)
        filled = (slot < (total % C)[:, None])[..., None, None]
        row = jnp.arange(B)[:, None]
        new = [
            jnp.where(filled, laid[row, place], cached)
            for laid, cached in zip((k, v), old, strict=True)
        ]
        return a.reshape(B, rows.places, -1), new[0], new[1]

    def _project(self, x: Array, positions: Array) -> tuple[Array, Array, Array]:
        weights = (self.w_q, self.w_k, self.w_v)
        q, k, v = (project(*pair) for pair in zip(apart(x, 3), weights, strict=True))
        rope = self.config.position
        if rope is not None:
            q, k = rotate(q, positions, rope), rotate(k, positions, rope)
        return q, k, v

    def _output(self, x: Array, y: Array) -> Array:
        (x,) = apart(x, 1)  # The forget gate reads it too.
        mixed = (self.output_gate(x) * y).astype(x.dtype)
        return merge(mixed, self.w_out)


class ShardedSelfAttention(SelfAttention):
    """`SelfAttention` that also trains with its tokens cut over devices."""

    def _attend_to_input(self, q, k, v, tokens: Tokens) -> Array:
        # Only where the mesh cuts the tokens of a row does anything differ from plain
        # attention.
        if sequence_shards() == 1:
            return super()._attend_to_input(q, k, v, tokens)
        config, scale = self.config, self.config.scale
        mixer = AttentionMixerConfig(attention=config, window=self.window)
        sequence_parallel.check(mixer, q.shape[1])
        part = partial(
            sequence_parallel.attention_part,
            scale=config.head_width**-0.5 if scale is None else scale,
            window=self.window,
        )
        # Parts exchange keys by query head, as the chunk op takes them.
        k, v = (keys_for_queries(x, config.heads) for x in (k, v))
        return sequence_parallel.run(part, (q, k, v, tokens.segments))


class AttentionMixer(nnx.Module):
    """`SelfAttention`, whose window's cache is a ring buffer."""

    def __init__(
        self,
        config: AttentionMixerConfig,
        width: int,
        init: InitConfig,
        *,
        layer: Array | int,
        layers: int,
        rngs: nnx.Rngs,
    ):
        self.config = config
        self.attention = ShardedSelfAttention(
            config.attention,
            width,
            init,
            window=config.window,
            layer=layer,
            layers=layers,
            rngs=rngs,
        )

    def init_cache(self, layers: int, batch: int, length: int, dtype) -> KeyValueCache:
        """Creates an empty cache for `length` tokens, or the window if that is less."""
        a, window = self.config.attention, self.config.window
        # A query sees `window` tokens back and itself.
        slots = slots_for(length, window)
        return empty_key_value_cache(
            layers, batch, slots, a.key_heads, a.head_width, dtype
        )

    def __call__(
        self, x: Float[Array, "B T D"], cache: KeyValueCache, tokens: Tokens
    ) -> tuple[Float[Array, "B T D"], KeyValueCache]:
        return self.attention(x, cache, tokens)


class MambaMixerCache(NamedTuple):
    """Last inputs and states of L layers, in at least float32; width 0 in training."""

    mamba: MambaCache
    position: Int[Array, " B"]
    layer: Int[Array, ""]

    @property
    def slots(self) -> int:
        """Returns whether anything is kept: 0 or the number of channels."""
        return self.mamba.state.shape[2]


class MambaMixer(nnx.Module):
    """Mamba over the model width; W_back starts as every mixer's output weight."""

    def __init__(
        self,
        config: MambaMixerConfig,
        width: int,
        init: InitConfig,
        *,
        layer: Array | int,
        layers: int,
        rngs: nnx.Rngs,
    ):
        self.config = config
        draw_back = partial(draw_output_weight, layer=layer, layers=layers, config=init)
        self.mamba = Mamba(config, width, draw_back=draw_back, rngs=rngs)

    def init_cache(
        self, layers: int, batch: int, length: int, dtype
    ) -> MambaMixerCache:
        """Creates an empty cache: its size does not depend on the length, unless 0."""
        width = self.mamba.width if length else 0
        one = empty_mamba_cache(self.config, width, batch, dtype)
        mamba = jax.tree.map(lambda x: jnp.zeros((layers, *x.shape), x.dtype), one)
        return MambaMixerCache(mamba, **start(batch))

    def __call__(
        self, x: Float[Array, "B T D"], cache: MambaMixerCache, tokens: Tokens
    ) -> tuple[Float[Array, "B T D"], MambaMixerCache]:
        if cache.slots == 0:
            if sequence_shards() > 1:
                sequence_parallel.check(self.config, x.shape[1])
            starts = document_starts(tokens.segments)
            y, _ = self.mamba(x, self.mamba.init_cache(x.shape[0]), starts=starts)
            return y, cache
        refuse_documents(self, tokens)
        before = jax.tree.map(lambda h: read_layer(h, cache.layer), cache.mamba)
        y, after = self.mamba(x, before, lengths=tokens.lengths)
        written = jax.tree.map(
            lambda old, h: write_layer(old, cache.layer, h), cache.mamba, after
        )
        return y, cache._replace(mamba=written)


_MIXERS = {
    RatMixerConfig: RatMixer,
    RnnMixerConfig: RnnMixer,
    ReversedRatMixerConfig: ReversedRatMixer,
    AttentionMixerConfig: AttentionMixer,
    MambaMixerConfig: MambaMixer,
}


def make_mixer(
    mixer: MixerConfig,
    width: int,
    init: InitConfig,
    *,
    layer: Array | int,
    layers: int,
    rngs: nnx.Rngs,
) -> RatMixer | RnnMixer | ReversedRatMixer | AttentionMixer | MambaMixer:
    """Builds the module of a mixer's config for layer `layer` of `layers`."""
    # A mixer is known by its config's class, as a stack is.
    build = _MIXERS[type(mixer)]
    return build(mixer, width, init, layer=layer, layers=layers, rngs=rngs)
