"""The cost of refining a subset of positions, in passes over all positions.

FLOPs of all matrix products of the programs traced for a TPU, forward, of the paper's
20 layers and of the small set's model; nothing runs. `refine` computes T / S positions,
so S of them should cost about one pass. More than one: the shared projection of the
memory.

    python experiments/latent_recurrent_transformer/refinement_cost.py
"""

import dataclasses
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx

from pallas_kernels import target
from recurjax.model import Decoder, ModelConfig
from recurjax.plan.flops import count_flops
from recurjax.run_table import load_experiment
from recurjax.types import Tokens
from recurjax.variants.latent_recurrent_transformer import (
    LatentRecurrentTransformerStack,
)
from recurjax.variants.latent_recurrent_transformer.presets import nanochat, shared
from recurjax.variants.latent_recurrent_transformer.recurrence import (
    strided_partition,
)

TABLE = Path(__file__).with_name("runs.py")
SUBSETS = (1, 2, 4, 8)
LENGTH = 512
"""Of the paper's model here: longer passes are computed in blocks that skip what is
hidden, where a buffer's keys are masked. A CPU takes blocks from 64 tokens on."""
PLATFORM = "tpu"


def models() -> dict[str, ModelConfig]:
    """Returns the two models, both LRT-shared."""
    paper, small = (
        load_experiment(f"{TABLE}:{name}").model
        for name in ("shared_20", "shakespeare_shared")
    )
    # Windows depend on the length, so build a new stack.
    stack = nanochat(20, memory=shared(20), length=LENGTH, remat="block")
    paper = dataclasses.replace(paper, stack=stack, dtype="float32")
    return {"20 layers, T 512": paper, "4 layers, T 128": small}


def passes(config: ModelConfig, subsets: int) -> tuple[int, list[int]]:
    """Counts the FLOPs of a pass over all positions and of each refinement."""
    T, D = config.stack.length, config.stack.width  # pyright: ignore[reportAttributeAccessIssue]
    model = jax.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    stack = model.stack
    assert isinstance(stack, LatentRecurrentTransformerStack)
    ids = jax.ShapeDtypeStruct((1, T), jnp.int32)
    x = jax.ShapeDtypeStruct((1, T, D), jnp.dtype(config.dtype))
    start = LatentRecurrentTransformerStack.initial
    _, buffer = jax.eval_shape(lambda s, x, i: start(s, x, Tokens(i)), stack, x, ids)

    def refine(positions):
        return lambda stack, x, ids, buffer: stack.refine(
            x, Tokens(ids), positions, buffer
        )

    def product_flops(function, *inputs) -> int:
        with target.as_if(target.Target(platform=PLATFORM, kind="")):
            jaxpr = jax.make_jaxpr(function)(*inputs)
        return count_flops(jaxpr, platform=PLATFORM).products

    total = product_flops(lambda s, x, i: start(s, x, Tokens(i)), stack, x, ids)
    parts = [
        product_flops(refine(positions), stack, x, ids, buffer)
        for positions in strided_partition(T, subsets)
    ]
    return total, parts


def markdown() -> str:
    """Returns the table: one refinement, and all S, over a pass of all positions."""
    heads = "".join(f" S = {subsets} |" for subsets in SUBSETS)
    lines = [f"| one refinement, all S |{heads}", "|---" * (len(SUBSETS) + 1) + "|"]
    for name, config in models().items():
        cells = []
        for subsets in SUBSETS:
            total, parts = passes(config, subsets)
            cells.append(f"{parts[0] / total:.3f}, {sum(parts) / total:.3f}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Prints the table."""
    print(markdown(), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
