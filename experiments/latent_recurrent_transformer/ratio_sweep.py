"""Bits a byte over the budget R: the paper's Fig. 3 and Table 4 as one command.

    python experiments/latent_recurrent_transformer/ratio_sweep.py --depth 20
    python experiments/latent_recurrent_transformer/ratio_sweep.py --small

Trains the backbone, LRT-shared and LRT-layerwise at every R (tokens per parameter) of
the paper's Table 4, one after another, rows of runs.py; a stopped sweep continues with
the same command, and on a pod each row can be started by itself. Writes ratios.json,
ratios.md and ratios.png next to the runs: bits per byte over the compute that a
backbone would have had, R for the backbone and 2 R with a memory (two passes), and the
paper's figures. `--core BUNDLE` adds Fig. 3's right half: CORE by zero memory, which is
how the release reads its Table 5. `--small` does the same with the four layers of width
64 on the embedded text, for two CPU cores.
"""

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

from rich.console import Console

from recurjax.cli import evaluate
from recurjax.cli.options import parse, run_script
from recurjax.errors import UserError
from recurjax.evaluation.core import ZERO_MEMORY
from recurjax.experiment import Experiment
from recurjax.files.atomic import write_atomic, write_figure
from recurjax.machine import host
from recurjax.model import count_parameters
from recurjax.run_table import load_experiment, load_runs
from recurjax.training.sweep import Reached, sweep

TABLE = Path(__file__).with_name("runs.py")
RATIOS = (5, 10, 20, 40, 60, 80, 120)
MODELS = ("base", "shared", "layerwise")
PAPER_CORE = {
    "base_20": "0.217 0.242 0.252 0.261 0.267 0.271 0.276",
    "shared_20": "0.226 0.251 0.263 0.274 0.280 0.285",
    "layerwise_20": "0.228 0.254 0.266 0.277 0.284 0.289",
    "base_24": "0.233 0.276 0.291 0.304 0.309 0.312 0.316",
    "shared_24": "0.251 0.283 0.301 0.313 0.317 0.320",
    "layerwise_24": "0.254 0.285 0.303 0.315 0.319 0.322",
}
"""The paper's Table 5 over `RATIOS`; its bits per byte stand in runs.py."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Trains models at budgets, and draws bits per byte over compute.

    Attributes:
      runs: one run directory each, ratios.json, ratios.md, ratios.png.
      depth: layers of the paper's models.
      models: base, shared and layerwise, or fewer.
      ratios: R, tokens per parameter. The paper trained R 120 for the backbone only.
      small: four layers of width 64 on the embedded text instead.
      core: a CORE bundle, see `recurjax evaluate core`.
    """

    runs: Path = Path("runs/lrt_ratios")
    depth: Literal[20, 24] = 20
    models: tuple[Literal["base", "shared", "layerwise"], ...] = MODELS
    ratios: tuple[int, ...] = RATIOS
    small: bool = False
    core: Path | None = None

    def __post_init__(self):
        if not self.models or not self.ratios or min(self.ratios) < 1:
            raise UserError(
                "--models and --ratios must name at least one each, and a ratio "
                "must be at least 1"
            )
        missing = set(self.ratios) - set(RATIOS)
        if missing and not self.small:
            raise UserError(
                f"--ratios: the paper's runs have R {', '.join(map(str, RATIOS))}, not "
                f"{', '.join(map(str, sorted(missing)))}; --small takes any"
            )


class RatioPoint(NamedTuple):
    """A model at a budget.

    Attributes:
      model: base, shared or layerwise.
      ratio: R, tokens per parameter.
      compute: R times the passes of its objective.
      bits_per_byte: bits per byte of the validation split; None: the run diverged.
      core: by zero memory; None: not requested.
      paper_bits_per_byte, paper_core: its figures there; None: it has none.
    """

    model: str
    ratio: int
    compute: int
    bits_per_byte: float | None
    core: float | None = None
    paper_bits_per_byte: float | None = None
    paper_core: float | None = None


def rows(options: Options) -> dict[tuple[str, int], Experiment]:
    """Returns the runs by model and R; R 120 is the backbone's."""
    known = load_runs(TABLE)
    ends = {}
    for ratio in options.ratios:
        for model in options.models:
            if options.small:
                run = load_experiment(f"{TABLE}:shakespeare_{model}")
                ends[model, ratio] = _of_length(run, ratio)
            elif (name := _name(model, options.depth, ratio)) in known:
                ends[model, ratio] = load_experiment(f"{TABLE}:{name}")
    return ends


def main(argv: list[str] | None = None) -> int:
    """Trains what is missing, writes the three files and prints the table."""
    argv = sys.argv[1:] if argv is None else argv
    options = parse(Options, argv, prog="ratio_sweep.py")
    console = Console()
    runs = rows(options)
    reached = sweep(list(runs.values()), options.runs, console=console)
    if reached is None:
        console.print("stopped: the same command goes on from here")
        return 130
    points = [
        _point(options, model, ratio, run, result)
        for ((model, ratio), run), result in zip(runs.items(), reached, strict=True)
    ]
    record = [point._asdict() for point in points]
    write_atomic(options.runs / "ratios.json", json.dumps(record, indent=2) + "\n")
    text = markdown(points)
    write_atomic(options.runs / "ratios.md", text)
    draw(points, options.runs / "ratios.png")
    print(text, end="")
    return 0


def markdown(points: list[RatioPoint]) -> str:
    """Returns a row per model and R: its compute, its figures and the paper's."""
    heads = ("model", "R", "R of that compute without a memory")
    heads += ("bits per byte", "paper", "CORE", "paper")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for point in points:
        figures = (point.bits_per_byte, point.paper_bits_per_byte)
        figures += (point.core, point.paper_core)
        texts = ["" if each is None else f"{each:.3f}" for each in figures]
        cells = (point.model, str(point.ratio), str(point.compute), *texts)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def draw(points: list[RatioPoint], file: Path) -> None:
    """Draws bits per byte (and CORE) over compute; the paper's figures are dashed."""
    from matplotlib.figure import Figure  # slow to import, and needed here only

    columns = ["bits_per_byte"]
    if any(point.core is not None for point in points):
        columns.append("core")
    figure = Figure(figsize=(6 * len(columns), 4), layout="constrained")
    for axes, column in zip(
        figure.subplots(1, len(columns), squeeze=False)[0], columns, strict=True
    ):
        for number, model in enumerate(dict.fromkeys(point.model for point in points)):
            for name, line, title in (
                (column, "o-", model),
                (f"paper_{column}", "x--", f"{model}, paper"),
            ):
                curve = [
                    (point.compute, getattr(point, name))
                    for point in points
                    if point.model == model and getattr(point, name) is not None
                ]
                if curve:
                    axes.plot(
                        *zip(*curve, strict=True), line, color=f"C{number}", label=title
                    )
        axes.set_xscale("log")
        axes.set_xlabel("compute, as tokens a parameter of the backbone")
        axes.set_ylabel("CORE" if column == "core" else "validation bits per byte")
        axes.grid(alpha=0.3, which="both")
        axes.legend()
    write_figure(figure, file)


def _name(model: str, depth: int, ratio: int) -> str:
    return f"{model}_{depth}" + ("" if ratio == 10 else f"_r{ratio}")


def _of_length(run: Experiment, ratio: int) -> Experiment:
    tokens = ratio * count_parameters(run.model).total
    steps = max(1, round(tokens / run.training.tokens_per_step))
    training = replace(run.training, steps=steps)
    return replace(run, name=f"{run.name}_r{ratio}", training=training)


def _point(
    options: Options, model: str, ratio: int, run: Experiment, result: Reached
) -> RatioPoint:
    # A diverged run's checkpoint is not the requested one.
    lacking = options.core is None or result.diverged
    core = None if lacking else _core(options, run)
    point = RatioPoint(
        model, ratio, ratio * run.objective.passes, result.bits_per_byte, core
    )
    if options.small:
        return point
    row = load_runs(TABLE)[_name(model, options.depth, ratio)]
    printed = PAPER_CORE[f"{model}_{options.depth}"].split()
    return point._replace(
        paper_bits_per_byte=float(row.expected.removesuffix(" BPB")),
        paper_core=float(printed[RATIOS.index(ratio)]),
    )


def _core(options: Options, run: Experiment) -> float:
    """Returns CORE by zero memory; stored next to the run, and read if present."""
    folder = options.runs / run.name
    file = folder / "core.json"
    if not file.exists():
        words = [str(folder), str(options.core), "--json", str(file)]
        evaluate.run(["core", *words])
    scores = json.loads(file.read_text())
    return scores[ZERO_MEMORY if ZERO_MEMORY in scores else "core"]["core"]


if __name__ == "__main__":
    host.prepare()
    run_script(main)
