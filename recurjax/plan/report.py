"""Plans to look at: a table of one, and a roofline of several."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from recurjax.errors import UserError
from recurjax.files.atomic import write_figure
from recurjax.plan.changes import PlanChange
from recurjax.plan.planning import Plan

_PARTS = ("parameters", "optimizer", "caches", "data", "results", "temporaries", "code")
_MOST_KERNELS = 6


def show_plan(plan: Plan, console: Console) -> None:
    """Prints everything that a plan knows."""
    axes = ", ".join(f"{name} {size}" for name, size in plan.mesh.items() if size > 1)
    table = Table(
        title=f"{plan.experiment}: {plan.program} on {plan.topology.name} "
        f"({plan.topology.devices} devices; mesh {axes or 'of one'})",
        title_justify="left",
        show_header=False,
    )
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for rows in (_memory(plan), _work(plan), _collectives(plan), _times(plan)):
        for name, text in rows:
            table.add_row(name, text)
        table.add_section()
    console.print(table)
    for note in plan.answer.get("notes", ()):
        console.print(f"note: {note}", markup=False, highlight=False)
    hardware = plan.topology.hardware
    if hardware.flops is not None:
        console.print(
            f"peaks: {hardware.source}"
            + ("" if plan.price is None else f"; {plan.price:.2f} US$ a device-hour"),
            markup=False,
            highlight=False,
        )


def show_changes(changes: list[PlanChange], console: Console) -> None:
    """Prints what would help a program that does not fit."""
    table = Table(title="what would help", title_justify="left")
    for heading in ("change", "GiB a device", "fits", "bound, ms"):
        table.add_column(heading)
    for option, plan in changes:
        needed = "not said" if plan.needed is None else gibibytes(plan.needed)
        seconds = None if plan.bounds is None else plan.bounds.seconds
        bound = "" if seconds is None else f"{1e3 * seconds:,.1f}"
        table.add_row(option, needed, "yes" if plan.fits else "no", bound)
    console.print(table)


def gibibytes(count: int) -> str:
    """Writes bytes in GiB, with enough digits for small models."""
    size = count / 2**30
    return f"{size:.2f}" if size >= 0.1 else f"{size:.5f}"


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
            "--plot has no bound to draw, because nothing compiled or the "
            "topology has no peak figures: leave it out"
        )
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    hardware = shown[0][1].topology.hardware
    assert hardware.flops is not None and hardware.memory_bandwidth is not None
    # Left of the ridge memory binds, right of it compute.
    ridge = hardware.flops / hardware.memory_bandwidth
    points = [point for _, plan in shown if (point := _point(plan)) is not None]
    places = [x for x, _ in points]
    # Four times beyond the outermost points on either side, evenly on a log scale.
    x = np.geomspace(min([*places, ridge]) / 4, max([*places, ridge]) * 4, 200)
    figure, axes = plt.subplots(figsize=(7.5, 4.8))
    roof = np.minimum(hardware.flops, x * hardware.memory_bandwidth)
    axes.loglog(x, roof / 1e12, color="black", linewidth=1.5)
    axes.axvline(ridge, color="grey", linewidth=0.8, linestyle=":")
    for (name, plan), (place, height) in zip(shown, points, strict=True):
        binding = plan.bounds.binding if plan.bounds is not None else ""
        label = f"{name} ({binding})"
        axes.plot(place, height / 1e12, "o", markersize=7, label=label)
    axes.set_xlabel("FLOPs of products per byte of device memory")
    axes.set_ylabel("TFLOP/s a device at the bound")
    topology = shown[0][1].topology
    axes.set_title(
        f"{topology.name}: {hardware.flops / 1e12:.0f} TFLOP/s, "
        f"{hardware.memory_bandwidth / 1e9:,.0f} GB/s"
    )
    axes.legend(fontsize=8, loc="lower right")
    figure.tight_layout()
    write_figure(figure, file, dpi=130)
    plt.close(figure)


def _memory(plan: Plan) -> Iterator[tuple[str, str]]:
    capacity = plan.topology.hardware.memory
    room = "" if capacity is None else f" of {gibibytes(capacity)}"
    needed = "not said" if plan.needed is None else gibibytes(plan.needed)
    yield "fits", f"{'yes' if plan.fits else 'no'}: {needed}{room} GiB a device"
    if plan.reason is not None:
        yield "reason", plan.reason
    # Where compilation failed, the arguments' sizes are known all the same.
    memory = plan.answer.get("memory", plan.answer.get("parts", {}))
    for part in _PARTS:
        if memory.get(part):
            name = "activations, temporaries" if part == "temporaries" else part
            yield f"  {name}", f"{gibibytes(memory[part])} GiB"


def _work(plan: Plan) -> Iterator[tuple[str, str]]:
    answer = plan.answer
    yield "tokens a call", f"{answer['tokens']:,}"
    if "flops" in answer:
        flops = answer["flops"]
        yield (
            "FLOPs of products",
            f"{flops['products']:.4g}, other {flops['other']:.3g}",
        )
        model_flops = answer["own_flops"]
        share = f" (the program does {flops['products'] / model_flops:.2f} times it)"
        yield "the variant's own count", f"{model_flops:.4g}{share}"
        if flops["unknown_loops"]:
            yield "", f"{flops['unknown_loops']} loops of unknown length: one trip each"
    if "traffic" not in answer:
        return
    traffic = answer["traffic"]
    yield "bytes accessed a device", f"{traffic['bytes'] / 1e9:,.3f} GB"
    if traffic["bytes"]:
        intensity = flops["products"] / plan.topology.devices / traffic["bytes"]
        yield "arithmetic intensity", f"{intensity:,.1f} FLOPs a byte"
    yield "launches", f"{traffic['launches']:,}"
    # The kernels that run most often.
    kernels = sorted(traffic["kernels"].items(), key=lambda kernel: -kernel[1])
    for name, count in kernels[:_MOST_KERNELS]:
        yield f"  {name}"[:44], f"{count:,}"
    if len(kernels) > _MOST_KERNELS:
        yield "", f"and {len(kernels) - _MOST_KERNELS} kernels more (--json has all)"
    if traffic["unknown_loops"]:
        yield "", f"{traffic['unknown_loops']} loops of unknown length: one trip each"


def _collectives(plan: Plan) -> Iterator[tuple[str, str]]:
    if "traffic" not in plan.answer:
        return
    for collective in plan.answer["traffic"]["collectives"]:
        where = " and ".join(collective["axes"]) or "one device"
        yield (
            f"{collective['kind']} over {where}",
            f"{collective['count']:,} times, {collective['sent'] / 1e6:,.2f} MB sent "
            "a device",
        )


def _times(plan: Plan) -> Iterator[tuple[str, str]]:
    bounds, hardware = plan.bounds, plan.topology.hardware
    if bounds is None or bounds.seconds is None:
        return
    peaks = {
        "compute": f"{(hardware.flops or 0) / 1e12:,.0f} TFLOP/s",
        "memory": f"{(hardware.memory_bandwidth or 0) / 1e9:,.0f} GB/s",
        "interconnect": f"{(plan.topology.collective_bandwidth or 0) / 1e9:,.0f} GB/s",
        "launch": f"{hardware.launch * 1e6:.0f} us a kernel",
    }
    for name, peak in peaks.items():
        seconds = getattr(bounds, name)
        if seconds:
            binds = "  binds" if name == bounds.binding else ""
            yield f"bound by {name}", f"{1e3 * seconds:,.3f} ms at {peak}{binds}"
    yield "tokens/s at the bound", f"{plan.tokens_per_second:,.0f}"
    if plan.utilisation is not None:
        yield "MFU at the bound", f"{plan.utilisation:.1%}"
    if plan.run_hours is not None:
        cost = "" if plan.run_cost is None else f", {plan.run_cost:,.0f} US$"
        yield f"the run's {plan.steps:,} steps", f"{plan.run_hours:,.2f} hours{cost}"


def _point(plan: Plan) -> tuple[float, float] | None:
    """Returns (FLOPs per byte, FLOP/s per device at the bound)."""
    if plan.bounds is None or not plan.bounds.seconds:
        return None
    flops = plan.answer["flops"]["products"] / plan.topology.devices
    moved = plan.answer["traffic"]["bytes"]
    return (flops / moved, flops / plan.bounds.seconds) if moved and flops else None
