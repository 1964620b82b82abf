"""A task's accuracies as a picture: by pairs, by length, by place in the row."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path

from recurjax.files.whole import write_whole

Curve = tuple[Sequence[int], Sequence[float]]


def curves_of(
    slices: Mapping[str, float], positions: Sequence[float | None]
) -> dict[str, Curve]:
    """Returns what there is to draw: values and their accuracies by what they are.

    Args:
      slices: accuracies by names such as "pairs=8".
      positions: by place; drawn where nearly every place is asked.
    """
    by: dict[str, dict[int, float]] = {}
    for name, share in slices.items():
        kind, _, value = name.partition("=")
        by.setdefault(kind, {})[int(value)] = share
    curves: dict[str, Curve] = {
        kind: (sorted(found), [found[value] for value in sorted(found)])
        for kind, found in sorted(by.items(), reverse=True)
    }
    asked = {at: share for at, share in enumerate(positions) if share is not None}
    # A curve over few places would look like one over all of them.
    if len(asked) > 0.9 * len(positions):
        curves["position"] = (list(asked), list(asked.values()))
    return curves


def plot_by_slice(
    curves: Mapping[str, Mapping[str, Curve]], png: Path, *, trained: int
) -> None:
    """Draws a field for each kind of slice, with a curve for each model.

    Args:
      curves: of each model by its name, what `curves_of` found; alike in their kinds.
      png: written whole or not at all.
      trained: tokens a row in training, a line where places or lengths are drawn.
    """
    from matplotlib.figure import Figure  # slow to import, and needed here only

    kinds = list(dict.fromkeys(kind for found in curves.values() for kind in found))
    figure = Figure(figsize=(1 + 4.5 * max(1, len(kinds)), 4), layout="constrained")
    fields = figure.subplots(1, max(1, len(kinds)), squeeze=False)[0]
    for kind, axes in zip(kinds, fields, strict=False):
        for name, found in curves.items():
            values, shares = found[kind]
            marker = "o" if len(values) < 20 else None
            axes.plot(values, shares, marker=marker, label=name, linewidth=1.2)
            # Numbers of pairs and lengths double from one to the next: even steps on a
            # log axis.
            if marker and min(values) > 0 and max(values) > 8 * min(values):
                axes.set_xscale("log", base=2)
        if kind in ("length", "position"):
            axes.axvline(trained, color="gray", linestyle=":", label="training")
        axes.set_xlabel(kind)
        axes.set_ylabel("accuracy")
        # The same scale in every field, and room for curves that lie on 0 or 1.
        axes.set_ylim(-0.02, 1.02)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=120)
    write_whole(png, drawn.getvalue())
