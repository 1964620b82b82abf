"""The reversed design: softmax attention inside chunks, recurrence across them."""

from functools import partial

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Float

from recurjax.layers.attention import attend, merge, project, read_layer, write_layer
from recurjax.layers.initialization import InitConfig, draw_output_weight, draw_weight
from recurjax.layers.linear import apart
from recurjax.layers.mesh import sequence_shards
from recurjax.layers.position import rotate
from recurjax.types import Array, Tokens
from recurjax.variants.rat import sequence_parallel
from recurjax.variants.rat.alignment import Alignment, align
from recurjax.variants.rat.caches import ReversedRatCache, start, state_dtype
from recurjax.variants.rat.config import ReversedRatMixerConfig
from recurjax.variants.rat.gate import Gate
from recurjax.variants.rat.recurrence import attend_within_chunks, recur_across_chunks


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
        """Makes an empty cache: one chunk of keys and values, whatever the length."""
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
        if tokens.segments is not None:
            raise NotImplementedError(
                "ReversedRatMixer: segments are for the training cache only"
            )
        T = x.shape[1]
        rows = align(cache.position, T, tokens.lengths, self.config.chunk)
        x = rows.lay(x)
        gate = self.forget_gate(x)
        # Attention inside the chunks first; what it gives is what recurs across them.
        a, keys, values = self._attend(x, cache, rows)
        before = read_layer(cache.state, cache.layer)
        y, ends = recur_across_chunks(gate, a, before, size=rows.size)
        # The state that is kept is the one after the last chunk that is whole: a row
        # that completes none keeps the old.
        whole = rows.ended.sum(axis=1)
        last = jnp.take_along_axis(
            ends, jnp.maximum(whole - 1, 0)[:, None, None], axis=1
        )
        state = jnp.where((whole > 0)[:, None], last[:, 0], before)
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
        old = [read_layer(kept, cache.layer) for kept in (cache.keys, cache.values)]
        slot = jnp.arange(C)
        # A decode step: the new token takes its slot in the running chunk and attends
        # to the slots up to it. The slots behind hold the last chunk's tokens, which
        # are hidden.
        if rows.places == 1:
            here = (slot == rows.offset[:, None]) & (rows.count > 0)[:, None]
            new = [
                jnp.where(here[..., None, None], laid, kept)
                for laid, kept in zip((k, v), old, strict=True)
            ]
            seen = (slot <= rows.offset[:, None])[:, None, None]
            q = jnp.tile(q, (1, 1, k.shape[2] // q.shape[2], 1))
            keys, values = (kept.astype(q.dtype) for kept in new)
            scale = q.shape[-1] ** -0.5
            a = attend(q, keys, values, scale=scale, causal=False, mask=seen)
            return a.reshape(B, 1, -1), new[0], new[1]
        before = jnp.arange(rows.places) < rows.offset[:, None]  # [B, P]
        more = ((0, 0), (0, rows.places - C), (0, 0), (0, 0))
        k, v = (
            jnp.where(before[..., None, None], jnp.pad(kept, more), laid)
            for laid, kept in zip((k, v), old, strict=True)
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
            jnp.where(filled, laid[row, place], kept)
            for laid, kept in zip((k, v), old, strict=True)
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
