"""One layer of the nanochat backbone: its attention, and the memory's two entries."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Bool, Float, Int

from recurjax.layers.attention import (
    KeyValueCache,
    attend,
    attend_to_cache,
    merge,
    project,
    visible_by_position,
)
from recurjax.layers.embedding import look_up
from recurjax.layers.initialization import draw_output_weight, draw_weight
from recurjax.layers.linear import apart, apart_by_layer, linear
from recurjax.layers.mesh import keep_rows_apart
from recurjax.layers.mlp import Mlp, MlpConfig
from recurjax.layers.position import Rope, rotate
from recurjax.types import Array
from recurjax.variants.latent_recurrent_transformer.config import (
    LatentRecurrentTransformerConfig,
)
from recurjax.variants.latent_recurrent_transformer.recurrence import (
    InjectedMemory,
    Positions,
    indices,
    mixed,
    put,
    rms,
)


class FullSequence(NamedTuple):
    """All positions of a sequence at once; nothing came before.

    Attributes:
      keep_kv: whether keys and values are returned, as a buffer's.
      origins: whether the buffer also has its `BufferOrigin`.
    """

    keep_kv: bool
    origins: bool = False


class BufferOrigin(NamedTuple):
    """Keys and values of the pass with no memory, as a memory enters them: linearly.

    So a memory can be added later without another pass.

    Attributes:
      keys: before rotation and norm.
      values: as they are attended to.
      gate: g_rec of eq. (3); 0 in layers that the memory does not enter.
    """

    keys: Float[Array, "B T K E"]
    values: Float[Array, "B T K E"]
    gate: Float[Array, "B T K"]


class KeyValueBuffer(NamedTuple):
    """Keys and values of all positions; a pass over some of them renews theirs.

    Attributes:
      keys, values: as they are attended to.
      origin: see `BufferOrigin`; None where nothing is to be refreshed.
    """

    keys: Float[Array, "B T K E"]
    values: Float[Array, "B T K E"]
    origin: BufferOrigin | None = None


KeyValueStore = FullSequence | KeyValueBuffer | KeyValueCache


def attend_at(
    q: Float[Array, "B n H E"],
    k: Float[Array, "B n K E"],
    v: Float[Array, "B n K E"],
    store: KeyValueStore,
    *,
    positions: Positions | None,
    window: int,
    segments: Int[Array, "B T"] | None,
    lengths: Int[Array, " B"] | None,
) -> tuple[Float[Array, "B n H E"], KeyValueBuffer | KeyValueCache | None]:
    """Writes fresh keys and values, then attends to all that is visible.

    Args:
      store: `FullSequence` (n = T), a `KeyValueBuffer` whose `positions` are fresh, or
        a cache, at whose rows' own positions the n tokens go.
      window: how many tokens back a query sees.
      segments: document numbers of all T positions, or None; not with a cache.
      lengths: how many of a cache's n new tokens are real; None: all.

    Returns:
      The output, and the store after the writing; None if nothing is kept.
    """
    scale = q.shape[-1] ** -0.5
    if isinstance(store, FullSequence):
        T = q.shape[1]
        # A window that reaches the first token hides nothing: plain causal attention
        # has faster forms.
        span = window if window < T - 1 else None
        options = {"window": span, "segments": segments}
        o = attend(q, k, v, scale=scale, causal=True, **options)
        return o, KeyValueBuffer(k, v) if store.keep_kv else None
    if isinstance(store, KeyValueBuffer):
        # The fresh keys are written first, so that the chosen positions see each
        # other and all others as these were in the pass before.
        assert positions is not None
        keys, values = put(store.keys, positions, k), put(store.values, positions, v)
        mask = _visible(positions, keys.shape[1], window, segments)
        o = attend(q, keys, values, scale=scale, causal=False, mask=mask)
        return o, store._replace(keys=keys, values=values)
    return attend_to_cache(q, k, v, store, scale=scale, window=window, lengths=lengths)


def _visible(
    positions: Positions, length: int, window: int, segments: Array | None
) -> Array:
    visible = indices(positions, length)
    # Chosen positions see by their number in the sequence, not by their place in q.
    mask = visible_by_position(
        jnp.asarray(visible[None]), jnp.arange(length)[None], window=window
    )
    if segments is None:
        return mask
    documents = segments[:, visible]
    return mask & (documents[:, :, None] == segments[:, None, :])[:, None]


class ResidualStream(NamedTuple):
    """The state that a pass carries from block to block.

    Attributes:
      x: the residual stream.
      values: those of the first layer, if the config mixes them in.
      history: outputs of the blocks so far, if the config mixes them in.
    """

    x: Float[Array, "B n D"]
    values: Float[Array, "B n K E"] | None = None
    history: Float[Array, "L B n D"] | None = None


class PassInputs(NamedTuple):
    """The inputs of all blocks of a pass.

    Attributes:
      x0: the normed embeddings.
      ids: ids of the same n tokens.
      memory: None for a memory of zero.
      position: position of the tokens, for the rotation; [1, n] or [B, n].
      positions: which ones of a buffer they are; None without a buffer.
      segments, lengths: see `attend_at`.
    """

    x0: Float[Array, "B n D"]
    ids: Int[Array, "B n"]
    memory: InjectedMemory | None
    position: Int[Array, "#B n"]
    positions: Positions | None = None
    segments: Int[Array, "B T"] | None = None
    lengths: Int[Array, " B"] | None = None


class MemoryProjection(nnx.Module):
    """W_k,rec and W_v,rec, eq. (2); a side that is not injected has none."""

    def __init__(self, config: LatentRecurrentTransformerConfig, *, rngs: nnx.Rngs):
        assert config.memory is not None
        shape = (config.width, config.key_heads, config.head_width)
        draw = partial(draw_weight, fan_in=config.width, config=config.init)
        memory = config.memory
        # A side that the memory does not enter needs no projection.
        self.w_k = nnx.Param(draw(rngs.params(), shape)) if memory.keys else None
        self.w_v = nnx.Param(draw(rngs.params(), shape)) if memory.values else None

    def __call__(self, memory: InjectedMemory) -> InjectedMemory:
        """Returns the memory with its keys and values."""
        m_k, m_v = apart(memory.state, 2)
        keys = None if self.w_k is None else project(m_k, self.w_k)
        values = None if self.w_v is None else project(m_v, self.w_v)
        return InjectedMemory(memory.state, keys, values)


class LatentBlock(nnx.Module):
    """x <- alpha x + beta x0 + gamma m; x += Attn(rms x); x += MLP(rms x)."""

    def __init__(
        self,
        config: LatentRecurrentTransformerConfig,
        *,
        place: int,
        layer: Array | int,
        rngs: nnx.Rngs,
    ):
        self.config = config
        self.window = config.layer_windows[place]
        D, H, K, E = config.width, config.heads, config.key_heads, config.head_width
        init, depth = config.init, {"layer": layer, "layers": config.layers}
        draw = partial(draw_weight, fan_in=D, config=init)
        self.w_q = nnx.Param(draw(rngs.params(), (D, H, E)))
        self.w_k = nnx.Param(draw(rngs.params(), (D, K, E)))
        self.w_v = nnx.Param(draw(rngs.params(), (D, K, E)))
        out = draw_output_weight(rngs.params(), (H, E, D), config=init, **depth)
        self.w_out = nnx.Param(out)
        mlp = MlpConfig(kind="relu_squared", width=config.mlp_width)
        self.mlp = Mlp(mlp, D, init, rngs=rngs, **depth)
        # Each scale is a number per layer, and starts where the layer is nanochat's.
        scalar = lambda value: nnx.Param(jnp.asarray(value, jnp.float32))  # noqa: E731
        mixes = config.input_mixing != "none"
        self.residual_scale = scalar(1.0) if config.residual_scales else None
        self.input_scale = scalar(0.1) if mixes else None
        # One weight for each earlier layer, so that the vector is as long as the stack.
        self.history_scale = (
            nnx.Param(jnp.zeros(config.layers, jnp.float32))
            if config.input_mixing == "dense"
            else None
        )
        self.attention_scale = scalar(1.0) if config.attention_scale else None
        self.mlp_scale = scalar(1.0) if config.mlp_scale else None
        self.value_scale = scalar(0.5) if config.value_residual == "first" else None
        projected = config.value_residual == "projected"
        self.w_input_v = (
            nnx.Param(draw(rngs.params(), (D, K, E))) if projected else None
        )
        param = lambda value: None if value is None else nnx.Param(value)  # noqa: E731
        table, gate, mix, projection = None, None, None, None
        if config.layer_value_embeddings[place]:
            table = draw(rngs.params(), (config.vocabulary, K, E))
            # Zero gates at the start: sigmoid 1/2 times the scale, the same for all
            # tokens.
            gate = jnp.zeros((config.value_gate_channels or D, K), jnp.float32)
        memory = config.memory
        if memory is not None and memory.gated:
            mix = jnp.zeros((D, 2, K), jnp.float32)
            if memory.projection == "layerwise":
                projection = MemoryProjection(config, rngs=rngs)
        self.w_value_embedding, self.w_value_gate = param(table), param(gate)
        self.w_mix, self.memory = param(mix), projection
        resides = memory is not None and memory.residual
        self.memory_scale = scalar(0.1) if resides else None

    def __call__(
        self,
        stream: ResidualStream,
        inputs: PassInputs,
        store: KeyValueStore,
        layer: Array,
    ) -> tuple[ResidualStream, KeyValueStore | None]:
        x = self._input(stream, inputs, layer)
        # The normed input is what every projection of the layer reads.
        a = rms(x)
        q, k, v, first, origin = self._project(a, stream, inputs, layer)
        o, written = attend_at(
            q,
            k,
            v,
            store,
            positions=inputs.positions,
            window=self.window,
            segments=inputs.segments,
            lengths=inputs.lengths,
        )
        # What the keys and values were made of goes along, for a memory that comes
        # later.
        if (
            isinstance(store, FullSequence)
            and store.origins
            and isinstance(written, KeyValueBuffer)
        ):
            written = written._replace(origin=origin)
        x = x + _scaled(self.attention_scale, merge(o, self.w_out))
        x = x + _scaled(self.mlp_scale, self.mlp(rms(x)))
        history = stream.history
        # Written for the layers above; their weights for later entries are masked out.
        if history is not None:
            history = jax.lax.dynamic_update_index_in_dim(history, x, layer, axis=0)
        return ResidualStream(x, first, history), written

    def _input(self, stream: ResidualStream, inputs: PassInputs, layer: Array) -> Array:
        x = _scaled(self.residual_scale, keep_rows_apart(stream.x))
        if self.input_scale is not None:
            x = x + _scaled(self.input_scale, inputs.x0)
        if self.history_scale is not None and stream.history is not None:
            # Entries of this layer and of those above it are not written yet.
            earlier = jnp.arange(self.config.layers) < layer
            weights = jnp.where(earlier, self.history_scale[...], 0).astype(x.dtype)
            x = x + jnp.einsum("l,lbnd->bnd", weights, stream.history)
        if self.memory_scale is not None and inputs.memory is not None:
            x = x + _scaled(self.memory_scale, inputs.memory.state)
        return x

    def _project(
        self, a: Array, stream: ResidualStream, inputs: PassInputs, layer: Array
    ):
        # Two kinds of value residual: a mix with the first layer's values, or a
        # projection of the normed embeddings added.
        a_q, a_k, a_v, a_mix, a_gate = apart(a, 5)
        q, k = project(a_q, self.w_q), project(a_k, self.w_k)
        v = project(a_v, self.w_v)
        first = stream.values
        if first is not None and self.value_scale is not None:
            # Layer 0 has no first values to mix in: its own are they.
            first = jnp.where(layer == 0, v, first)
            share = self.value_scale[...].astype(v.dtype)
            v = jnp.where(layer == 0, v, (1 - share) * v + share * first)
        if self.w_input_v is not None:
            v = v + project(apart_by_layer(inputs.x0, a), self.w_input_v)
        k, v, entry = self._inject(a_mix, k, v, inputs.memory, layer)
        if self.w_value_embedding is not None and self.w_value_gate is not None:
            channels = self.w_value_gate[...].shape[0]
            gate = jax.nn.sigmoid(linear(a_gate[..., :channels], self.w_value_gate))
            # Looked up at the tokens themselves, not at the memory's.
            embedded = look_up(self.w_value_embedding[...], inputs.ids, v.dtype)
            v = v + self.config.value_gate_scale * gate[..., None] * embedded
        origin = None if entry is None else BufferOrigin(k, v, entry)
        q, k = (self._turned(side, inputs.position) for side in (q, k))
        return q, k, v, first, origin

    def _turned(self, x: Array, position: Array) -> Array:
        """Rotates by -theta, nanochat's direction, then norms."""
        return rms(rotate(x, -position, Rope(base=self.config.rope_base)))

    def refreshed(
        self,
        buffer: KeyValueBuffer,
        memory: InjectedMemory,
        *,
        visited: Bool[Array, " T"],
        position: Int[Array, "#B T"],
    ) -> KeyValueBuffer:
        """Adds a memory to the keys and values of positions that had none.

        k = rms(rotate(k_0 + g_rec W_k,rec m)), v = v_0 + g_rec W_v,rec m, with k_0, v_0
        and the gate of the pass without memory; what layers further down made of m is
        left out. Source: the authors' release, `--interleaved-kv-refresh`.

        Args:
          buffer: with its origin.
          memory: what enters all T positions.
          visited: positions that a pass has computed with their memory; left alone.
        """
        origin = buffer.origin
        assert origin is not None
        if self.memory is not None:
            # A shared memory was projected once for all layers; a layerwise one is
            # here.
            memory = self.memory(memory)
        keys, values = buffer.keys, buffer.values
        gate, select = origin.gate[..., None], visited[None, :, None, None]
        # The gate and the values before rotation are those of the pass without memory,
        # so the memory can be added where it would have entered.
        if memory.keys is not None:
            new = self._turned(origin.keys + gate * memory.keys, position)
            keys = jnp.where(select, keys, new)
        if memory.values is not None:
            values = jnp.where(select, values, origin.values + gate * memory.values)
        return buffer._replace(keys=keys, values=values)

    def _inject(
        self, a, k, v, memory: InjectedMemory | None, layer
    ) -> tuple[Array, Array, Array | None]:
        """Returns keys and values with the memory in them, and its gate."""
        config = self.config.memory
        if config is None or self.w_mix is None:
            return k, v, None
        if memory is not None and self.memory is not None:
            state = apart_by_layer(memory.state, a)
            memory = self.memory(memory._replace(state=state))
        # Zero initial weights make both gates 1: the memory enters in full from the
        # start.
        gates = 2 * jax.nn.sigmoid(project(a, self.w_mix))  # [B, n, 2, K]
        mix = partial(mixed, gates=gates, replaces=layer < config.replace_layers)
        new_k, new_v = k, v
        if config.keys:
            new_k = mix(k, None if memory is None else memory.keys)
        if config.values:
            new_v = mix(v, None if memory is None else memory.values)
        gate = gates[:, :, 1]
        # The scan runs one program for all layers, so that where a memory enters is
        # chosen by the layer's number, not by structure.
        if config.entry_layers is None:
            return new_k, new_v, gate
        entered = layer < config.entry_layers
        kept_k, kept_v = jnp.where(entered, new_k, k), jnp.where(entered, new_v, v)
        return kept_k, kept_v, jnp.where(entered, gate, 0)


def _scaled(scale: nnx.Param | None, x: Array) -> Array:
    return x if scale is None else scale[...].astype(x.dtype) * x
