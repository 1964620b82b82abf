"""The RNN baseline: RAT's recurrence over the whole sequence."""

from functools import partial

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Float

from pallas_kernels.gated_scan import GateLogits, gated_scan
from recurjax.layers.attention import merge, project_flat, read_layer, write_layer
from recurjax.layers.initialization import InitConfig, draw_output_weight, draw_weight
from recurjax.layers.linear import apart
from recurjax.layers.mesh import sequence_shards
from recurjax.types import Array, Tokens
from recurjax.variants.rat import sequence_parallel
from recurjax.variants.rat.caches import RnnCache, start, state_dtype
from recurjax.variants.rat.config import RnnMixerConfig
from recurjax.variants.rat.gate import Gate
from recurjax.variants.rat.recurrence import document_starts


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
        """Makes an empty cache: its size does not depend on the length, unless 0."""
        channels = self.config.heads * self.config.head_width if length else 0
        state = jnp.zeros((layers, batch, channels), state_dtype(dtype))
        return RnnCache(state, **start(batch))

    def __call__(
        self, x: Float[Array, "B T D"], cache: RnnCache, tokens: Tokens
    ) -> tuple[Float[Array, "B T D"], RnnCache]:
        x_gate, x_v = apart(x, 2)
        gate, v = self.forget_gate.logits(x_gate), project_flat(x_v, self.w_v)
        starts = document_starts(tokens.segments)
        if cache.slots == 0:
            h = self._train(gate, v, starts)
        elif starts is not None:
            raise NotImplementedError(
                "RnnMixer: segments are for the training cache (length 0) only"
            )
        else:
            # The whole past is one state; padding at a row's end leaves it as it was.
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
