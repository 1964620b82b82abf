"""What both passes of RAT's mixer move between its projections, compiled for an H100.

    JAX_PLATFORMS=cpu PYTHONPATH=.compilers python -m tests.variants.rat.traffic

64 rows of 4,096 tokens, D 2048, 16 heads of 128, 2 groups, chunks of 16, bfloat16. Of a
slice the slice counts; everything else is operands and results of what is launched.
"""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from pallas_kernels.gated_scan import GateLogits
from recurjax.layers.initialization import InitConfig
from recurjax.plan.hlo import parse
from recurjax.plan.traffic import read_traffic
from recurjax.variants.rat import RatMixerConfig
from recurjax.variants.rat.mixers import RatMixer
from tests.compile_target import compile_for

BATCH, LENGTH, WIDTH, HEADS, GROUPS, CHUNK = 64, 4096, 2048, 16, 2, 16


def training():
    """Returns y and all gradients as a function of arrays, and their shapes."""
    head_width = WIDTH // HEADS
    config = RatMixerConfig(
        heads=HEADS, head_width=head_width, chunk=CHUNK, groups=GROUPS
    )
    # Only what is static of it counts: no weight is made.
    mixer = nnx.eval_shape(
        lambda: RatMixer(
            config, WIDTH, InitConfig(), layer=0, layers=1, rngs=nnx.Rngs(0)
        )
    )

    def run(q, k, v, gate, dy):
        def mixed(q, k, v, gate):
            q = q.reshape(*q.shape[:2], GROUPS, head_width)
            return mixer._mix(q, k, v, gate, None, chunk=CHUNK).reshape(v.shape)

        y, pull = jax.vjp(mixed, q, k, v, gate)
        return y, pull(dy)

    shape = partial(jax.ShapeDtypeStruct, dtype="bfloat16")
    narrow = shape((BATCH, LENGTH, GROUPS * head_width))
    wide = shape((BATCH, LENGTH, WIDTH))
    gate = GateLogits(wide, jax.ShapeDtypeStruct((WIDTH,), jnp.float32))  # pyright: ignore[reportArgumentType]
    return run, (narrow, narrow, wide, gate, wide)


def traffic(target: str) -> dict:
    """Returns launches and bytes, and the least: each input and output once."""
    function, arguments = training()
    compiled = compile_for(target, function, arguments)
    collectives = read_traffic(parse(compiled.as_text()), axes=(), sizes=())
    memory = compiled.memory_analysis()
    return {
        "launches": collectives.launches,
        "bytes": collectives.bytes,
        "least": memory.argument_size_in_bytes + memory.output_size_in_bytes,
    }


if __name__ == "__main__":
    row = traffic("h100")
    moved, least = row["bytes"] / 1e9, row["least"] / 1e9
    print(f"{row['launches']} launches, {moved:.2f} GB moved, {least:.2f} GB at least")
