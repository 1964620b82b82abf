"""The cache bytes of a token by depth, next to the paper's cross-entropy.

    python experiments/recurrent_transformer/cache_footprint.py

Section 8.4: with the parameters fixed, a model of a times fewer layers is sqrt(a) times
wider, so its cache is sqrt(a) times smaller. Counted on the shapes of the cache that
`generate` fills for the runs of the C4 tables, in bfloat16; nothing is computed.
"""

from pathlib import Path

import jax
from flax import nnx

from recurjax.model import Decoder, ModelConfig
from recurjax.run_table import load_runs

TABLE = Path(__file__).with_name("runs.py")
TABLES = {
    f"c4_{size}_": (
        *("transformer_24", "transformer_12", "transformer_6"),
        *("recurrent_12", "recurrent_6"),
    )
    for size in ("300m", "150m")
}
"""Rows of a table by their prefix; the second is what the others are compared with."""


def bytes_a_token(model: ModelConfig) -> int:
    """Counts what one position more adds to the cache of one row."""

    def size(length: int) -> int:
        cache = jax.eval_shape(
            lambda: Decoder(model, rngs=nnx.Rngs(0)).init_cache(1, length)
        )
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))

    return size(513) - size(512)


def table() -> str:
    """Returns Markdown, a row per run."""
    runs = load_runs(TABLE)
    lines = [
        "| run | layers | width | bytes per token | share of 12 layers | paper |",
        "|---|---|---|---|---|---|",
    ]
    for prefix, names in TABLES.items():
        models = {
            name: runs[prefix + name].make(prefix + name).model
            for name in names
            if prefix + name in runs
        }
        transformer = bytes_a_token(models["transformer_12"])
        for name, model in models.items():
            count, stack = bytes_a_token(model), model.stack
            lines.append(
                f"| {prefix}{name} | {stack.layers} | {stack.width} | {count:,} | "
                f"{count / transformer:.2f} | {runs[prefix + name].expected} |"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
