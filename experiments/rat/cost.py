"""The cost of each mixer of the 1.3B models, Mamba and RT's layer against T.

Training FLOPs of a token (a mixer alone, the causal half not discounted) and bytes of
the cache, a token and layer, in bfloat16 with float32 states. Counted, not timed, so
it runs anywhere in seconds. With --png the picture is written too.

    python experiments/rat/cost.py --png cost.png
"""

import sys
from dataclasses import dataclass
from pathlib import Path

from recurjax.cli.options import parse, run_script
from recurjax.errors import UserError
from recurjax.files.atomic import write_figure
from recurjax.variants.rat import PlaceConfig, presets
from recurjax.variants.rat.stack import MixerCost, mixer_cost

WIDTH = 2048
LENGTHS = (1024, 4096, 16384, 65536, 262144)


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Prints the table.

    Attributes:
      png: also draws it into this file.
    """

    png: Path | None = None

    def __post_init__(self):
        if self.png is not None and not self.png.parent.is_dir():
            raise UserError(f"--png: there is no directory {self.png.parent}")


def mixers(length: int) -> dict[str, PlaceConfig]:
    """Returns what a place of a 1.3B model may be; the reversed has 64 chunks."""
    size = {"width": WIDTH, "heads": 16}
    chunk = length // 64
    return {
        "RNN": presets.rnn(**size, length=length),
        "RAT(64)": presets.rat(**size, chunk=64),
        "RAT(16)": presets.rat(**size, chunk=16),
        "reversed": presets.reversed_rat(**size, chunk=chunk, length=length),
        "window 1024": presets.attention(**size, window=1024),
        "attention": presets.attention(**size),
        "Mamba": presets.mamba(width=WIDTH),
        "RT's layer": presets.recurrent(**size),
    }


def costs() -> dict[str, list[MixerCost]]:
    """Returns each mixer's cost at every length."""
    rows: dict[str, list[MixerCost]] = {}
    for length in LENGTHS:
        for name, mixer in mixers(length).items():
            cost = mixer_cost(mixer, width=WIDTH, length=length)
            rows.setdefault(name, []).append(cost)
    return rows


def markdown(rows: dict[str, list[MixerCost]]) -> str:
    """Returns the two tables."""
    heads = " | ".join(f"T {length}" for length in LENGTHS)
    rule = "|---" * (len(LENGTHS) + 1) + "|"
    lines = [f"| MFLOP a token | {heads} |", rule]
    for name, row in rows.items():
        columns = " | ".join(f"{cost.flops / 1e6:.0f}" for cost in row)
        lines.append(f"| {name} | {columns} |")
    lines += ["", f"| cache, bytes per token | {heads} |", rule]
    for name, row in rows.items():
        each = zip(row, LENGTHS, strict=True)
        columns = " | ".join(
            f"{cost.cache_bytes / length:,.1f}" for cost, length in each
        )
        lines.append(f"| {name} | {columns} |")
    return "\n".join(lines) + "\n"


def draw(rows: dict[str, list[MixerCost]], png: Path) -> None:
    """Draws both against T, on logarithmic axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.8), layout="constrained")
    left, two = figure.subplots(1, 2)
    for name, row in rows.items():
        # Dashed: with as many chunks, the reversed design costs what RAT(64) does.
        style = "o--" if name == "reversed" else "o-"
        left.loglog(LENGTHS, [cost.flops for cost in row], style, label=name)
        two.loglog(LENGTHS, [cost.cache_bytes for cost in row], style, label=name)
    left.set(xlabel="T (tokens)", ylabel="training FLOPs a token, one mixer")
    two.set(xlabel="T (tokens)", ylabel="bytes of a row's cache, one layer")
    left.legend(fontsize=8)
    write_figure(figure, png)


def main(argv: list[str] | None = None) -> int:
    """Prints the table, and plots it on request."""
    argv = sys.argv[1:] if argv is None else argv
    options = parse(Options, argv, prog="cost.py")
    rows = costs()
    print(markdown(rows), end="")
    if options.png is not None:
        draw(rows, options.png)
    return 0


if __name__ == "__main__":
    run_script(main)
