"""A roofline: FLOP/s that programs can reach, by the FLOPs they do for a byte."""

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from recurjax.errors import UserError
from recurjax.files import write_whole
from recurjax.plan.planning import Plan


def plot_roofline(named: Sequence[tuple[str, Plan]], file: Path) -> None:
    """Draws plans of one topology into a PNG file.

    The roof is the peak and the memory's bandwidth; a point below it is held down by
    the interconnect or by launches.

    Args:
      named: plans with bounds, and what the legend calls each.
      file: the PNG.

    Raises:
      UserError: no plan has bounds (a CPU, or nothing compiled).
    """
    shown = [(name, plan) for name, plan in named if _point(plan) is not None]
    if not shown:
        raise UserError(
            "--plot: there is no bound to draw: nothing compiled, or the topology has "
            "no peak figures"
        )
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    hardware = shown[0][1].topology.hardware
    assert hardware.flops is not None and hardware.memory_bandwidth is not None
    ridge = hardware.flops / hardware.memory_bandwidth
    points = [point for _, plan in shown if (point := _point(plan)) is not None]
    places = [x for x, _ in points]
    x = np.geomspace(min([*places, ridge]) / 4, max([*places, ridge]) * 4, 200)
    figure, axes = plt.subplots(figsize=(7.5, 4.8))
    roof = np.minimum(hardware.flops, x * hardware.memory_bandwidth)
    axes.loglog(x, roof / 1e12, color="black", linewidth=1.5)
    axes.axvline(ridge, color="grey", linewidth=0.8, linestyle=":")
    for (name, plan), (place, height) in zip(shown, points, strict=True):
        binding = plan.bounds.binding if plan.bounds is not None else ""
        label = f"{name} ({binding})"
        axes.plot(place, height / 1e12, "o", markersize=7, label=label)
    axes.set_xlabel("FLOPs of products a byte of device memory")
    axes.set_ylabel("TFLOP/s a device at the bound")
    topology = shown[0][1].topology
    axes.set_title(
        f"{topology.name}: {hardware.flops / 1e12:.0f} TFLOP/s, "
        f"{hardware.memory_bandwidth / 1e9:,.0f} GB/s"
    )
    axes.grid(True, which="major", alpha=0.3)
    axes.legend(fontsize=8, loc="lower right")
    figure.tight_layout()
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=130, format="png")
    write_whole(file, drawn.getvalue())
    plt.close(figure)


def _point(plan: Plan) -> tuple[float, float] | None:
    """Returns (FLOPs a byte, FLOP/s a device at the bound)."""
    if plan.bounds is None or not plan.bounds.seconds:
        return None
    flops = plan.answer["flops"]["products"] / plan.topology.devices
    moved = plan.answer["traffic"]["bytes"]
    return (flops / moved, flops / plan.bounds.seconds) if moved and flops else None
