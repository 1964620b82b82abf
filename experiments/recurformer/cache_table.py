"""RecurFormer's cache at 10,240 and 61,440 tokens, as a share of the base's.

The columns cs_10k and cs_60k of table 4, from `cache_bytes`: keys and values in 16
bits, Mamba's states in float32. Under grouped queries it depends on which heads go:
`groups` replaces complete groups, `spread` as many heads of every group (the worst),
and a measured choice is in between. Runs in a second.

    python experiments/recurformer/cache_table.py
"""

import runpy
from pathlib import Path

from recurjax.variants.recurformer import MambaConfig, RecurFormerConfig
from recurjax.variants.recurformer.config import added_parameters, cache_bytes
from recurjax.variants.transformer import TransformerConfig

# Run, not imported: a clone that has trained has a folder runs/ too, which tools that
# look for modules take for this file.
_TABLE = runpy.run_path(str(Path(__file__).with_name("runs.py")))
BETAS, base = _TABLE["BETAS"], _TABLE["base"]

LENGTHS = (10_240, 61_440)
PAPER = {
    "llama2_7b": (
        (0.7510, 0.5020, 0.2530, 0.1030, 0.0040),
        (0.7500, 0.5000, 0.2500, 0.1000, 0.0010),
    ),
    "qwen2_0_5b": (
        (0.7043, 0.4390, 0.3145, 0.0632, 0.0006),
        (0.7035, 0.4375, 0.3130, 0.0626, 0.0001),
    ),
    "qwen2_7b": (
        (0.6578, 0.3815, 0.5930, 0.1268, 0.0007),
        (0.6563, 0.3800, 0.5900, 0.1252, 0.0001),
    ),
}


def replaced_heads(
    stack: TransformerConfig, beta: float, *, whole_groups: bool
) -> tuple[tuple[int, ...], ...]:
    """Replaces round(beta L H) heads, in complete groups or evenly over the groups."""
    L, H, K = stack.layers, stack.attention.heads, stack.attention.key_heads
    size = H // K
    if whole_groups:
        count = round(beta * L * K)
        replaced = {divmod(n, L)[::-1] for n in range(count)}  # (layer, group)
        return tuple(
            tuple(head for head in range(H) if (layer, head // size) in replaced)
            for layer in range(L)
        )
    # The first heads of all groups of all layers go before the second ones.
    order = [
        (layer, group * size + place)
        for place in range(size)
        for group in range(K)
        for layer in range(L)
    ]
    gone = set(order[: round(beta * L * H)])
    return tuple(
        tuple(head for head in range(H) if (layer, head) in gone) for layer in range(L)
    )


def shares(model: str, beta: float, *, whole_groups: bool) -> tuple[list[float], int]:
    """Returns the share of the cache at `LENGTHS`, and the parameters added."""
    stack = base(model).stack
    assert isinstance(stack, TransformerConfig)
    config = RecurFormerConfig(
        transformer=stack,
        replaced=replaced_heads(stack, beta, whole_groups=whole_groups),
        mamba=MambaConfig(),
    )
    row = [cache_bytes(config, length).share for length in LENGTHS]
    return row, added_parameters(config)


def table() -> str:
    """Returns the Markdown table."""
    lines = [
        "| model | beta | paper, 10k / 60k | groups | spread | parameters added |",
        "|---|---|---|---|---|---|",
    ]
    for model, paper in PAPER.items():
        for place, beta in enumerate(BETAS[1:]):
            theirs = " / ".join(f"{column[place]:.4f}" for column in paper)
            grouped, added = shares(model, beta, whole_groups=True)
            spread, _ = shares(model, beta, whole_groups=False)
            cells = [" / ".join(f"{x:.4f}" for x in row) for row in (grouped, spread)]
            lines.append(
                f"| {model} | {beta} | {theirs} | {cells[0]} | {cells[1]} | "
                f"{added / 1e6:+,.0f}M |"
            )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(table(), end="")
