"""Time and memory of each schedule against the sequence length.

    python experiments/recurrent_transformer/scaling.py --out runs/rt_scaling

One layer, float32, B 2, D 64, 2 heads, N from 128 to 4096: writes scaling.json,
scaling.md (a table) and scaling.png (both axes logarithmic). Times are the best of a
few repeats; memory is what the compiled backward pass needs on top of its arguments.
Expect memory linear in N for every schedule; time at these sizes is almost linear too,
naive and the Transformer bending up first.

The paper's plot of one layer's latency over N, at its width and batch, on a GPU:

    python experiments/recurrent_transformer/scaling.py --out runs/rt_latency \
        --batch 512 --width 1024 --heads 16 --dtype bfloat16 --lengths 64 128 256 512 \
        --schedules prefix transformer
"""

import argparse
import dataclasses
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

from recurjax.bench.recurrent_transformer import (
    SCHEDULES,
    Dtype,
    LayerPasses,
    layers,
    programs,
)
from recurjax.bench.report import device_name
from recurjax.bench.timing import repeat
from recurjax.files.atomic import write_atomic, write_figure
from recurjax.machine import host

LENGTHS = (128, 256, 512, 1024, 2048, 4096)
NAMES = (*SCHEDULES, "transformer")
COLUMNS = ("forward_ms", "forward_backward_ms", "backward_mib")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ScalingPoint:
    """One schedule at one length N; times are minima in ms, memory is in MiB."""

    schedule: str
    length: int
    forward_ms: float
    forward_backward_ms: float
    backward_mib: float


def measure(
    length: int, name: str, shape: dict[str, int], dtype: Dtype, *, repeats: int
) -> ScalingPoint:
    """Compiles and times both passes of one schedule at one length."""
    shape = shape | {"T": length}
    passes: LayerPasses = programs(layers(shape)[name], shape, dtype)
    forward = passes.forward.lower(passes.stack, passes.x).compile()
    gradient = passes.forward_backward.lower(passes.stack, passes.x).compile()
    times = [
        1e3
        * min(repeat(partial(run, passes.stack, passes.x), repeats=repeats, warmup=1))
        for run in (forward, gradient)
    ]
    temporary = gradient.memory_analysis().temp_size_in_bytes
    return ScalingPoint(
        schedule=name,
        length=length,
        forward_ms=times[0],
        forward_backward_ms=times[1],
        backward_mib=temporary / 2**20,
    )


def table(points: list[ScalingPoint], shape: dict[str, int], dtype: Dtype) -> str:
    """Returns Markdown: a row per length with three figures per schedule."""
    lengths = sorted({point.length for point in points})
    names = list(dict.fromkeys(point.schedule for point in points))
    lines = [
        "| N | " + " | ".join(names) + " |",
        "|---|" + "---|" * len(names),
    ]
    for length in lengths:
        cells = [
            " / ".join(f"{getattr(point, column):.3g}" for column in COLUMNS)
            for name in names
            for point in points
            if (point.schedule, point.length) == (name, length)
        ]
        lines.append(f"| {length} | " + " | ".join(cells) + " |")
    head = (
        "Forward / forward and backward (ms) / backward's memory (MiB); "
        f"{', '.join(f'{axis} {size}' for axis, size in shape.items())}, {dtype}."
    )
    return "\n".join([head, "", *lines, ""])


def draw(points: list[ScalingPoint], png: Path) -> None:
    """Draws the three columns over N, both axes logarithmic."""
    from matplotlib.figure import Figure  # slow to import, and needed here only

    titles = ("forward (ms)", "forward and backward (ms)", "backward's memory (MiB)")
    figure = Figure(figsize=(12, 4), layout="constrained")
    for axes, column, title in zip(figure.subplots(1, 3), COLUMNS, titles, strict=True):
        for name in dict.fromkeys(point.schedule for point in points):
            curve = [point for point in points if point.schedule == name]
            lengths = [point.length for point in curve]
            axes.loglog(
                lengths, [getattr(p, column) for p in curve], "o-", label=name, base=2
            )
        axes.set_xlabel("N (positions)")
        axes.set_title(title)
    figure.axes[0].legend()
    write_figure(figure, png)


def main(arguments: list[str] | None = None) -> list[ScalingPoint]:
    """Measures, writes the three files and returns the points."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--schedules", nargs="+", default=NAMES, choices=NAMES)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    options: Any = parser.parse_args(arguments)
    if min(options.batch, options.heads) < 1 or options.width % options.heads:
        parser.error("--width must be a multiple of --heads, and --batch at least 1")
    shape = {"B": options.batch, "D": options.width, "H": options.heads}
    options.out.mkdir(parents=True, exist_ok=True)
    points = []
    for length in options.lengths:
        for name in options.schedules:
            point = measure(length, name, shape, options.dtype, repeats=options.repeats)
            points.append(point)
            print(points[-1], file=sys.stderr)
    record = {"device": device_name(), "shape": shape, "dtype": options.dtype} | {
        "points": [dataclasses.asdict(point) for point in points]
    }
    write_atomic(options.out / "scaling.json", json.dumps(record, indent=2) + "\n")
    write_atomic(options.out / "scaling.md", table(points, shape, options.dtype))
    draw(points, options.out / "scaling.png")
    return points


if __name__ == "__main__":
    host.prepare()
    main()
