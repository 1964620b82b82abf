"""The picture of a run: loss.png."""

import io
from pathlib import Path

from recurjax.files.whole import write_whole
from recurjax.training.run.metrics import read_rows


def plot_losses(metrics: Path, png: Path) -> None:
    """Draws training and validation loss, in nats a token, over steps.

    Args:
      metrics: a run's metrics.jsonl.
      png: written whole or not at all.
    """
    from matplotlib.figure import Figure  # slow to import, and needed here only

    rows = read_rows(metrics).rows
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for kind, style in (("train", "-"), ("validation", "o-")):
        points = [(r["step"], r.get("loss")) for r in rows if r["kind"] == kind]
        # null: a loss that was not finite leaves a gap.
        points = [point for point in points if point[1] is not None]
        if points:
            steps, losses = zip(*points, strict=True)
            axes.plot(steps, losses, style, label=kind, markersize=4, linewidth=1.2)
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats a token)")
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend()
    # Drawn in memory, so that the file appears whole.
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=120)
    write_whole(png, drawn.getvalue())
