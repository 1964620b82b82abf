"""`recurjax report RUN [RUN ...]`: runs next to each other in one HTML file.

The file needs no network and no script: styles are inside, curves are embedded SVG
images. All text that comes from a run is escaped.
"""

import base64
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import tyro

from recurjax.cli.inspect.runs import find_run
from recurjax.cli.options import parse, shows_usage
from recurjax.config_json import to_json
from recurjax.errors import UserError
from recurjax.evaluation.rows import FILE, newest, settings_of
from recurjax.evaluation.rows import read_rows as read_evaluations
from recurjax.experiment import Experiment, read_experiment
from recurjax.files.atomic import figure_bytes, write_atomic
from recurjax.files.json_files import json_text, parse_json
from recurjax.files.metric_rows import read_rows
from recurjax.model import count_parameters
from recurjax.training.run import RunDirectory
from recurjax.version import VERSION

_USAGE = """usage: recurjax report RUN [RUN ...] [--out FILE]

Writes one HTML file that compares runs: differing settings, curves over steps, tokens,
FLOPs and time, samples, evaluations and environment. The file needs no network.
recurjax report --help lists the options.

example: recurjax report runs/quickstart runs/wider --out report.html"""

_POINTS = 1200
"""Points that the curves of all runs in a figure have together."""
_SAMPLE_CHARACTERS = 40_000
"""Of all runs' samples together."""
_MOST_EVALUATIONS = 500


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportOptions:
    """Compares runs in one HTML file.

    Attributes:
      runs: run directories.
      out: the file to write.
    """

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    out: Path = Path("report.html")


class _Run(NamedTuple):
    """The contents of a run directory.

    Attributes:
      name: the shortest part of the path that tells the runs apart.
      color: color of its curves.
      rows: rows of metrics.jsonl.
      starts: starts of starts.jsonl, oldest first.
    """

    name: str
    color: str
    directory: RunDirectory
    experiment: Experiment
    rows: list[dict[str, Any]]
    starts: list[dict[str, Any]]

    def points(self, kind: str, metric: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns steps and values; a value that was not finite is NaN."""
        rows = [row for row in self.rows if row["kind"] == kind and metric in row]
        values = [math.nan if row[metric] is None else row[metric] for row in rows]
        return np.array([row["step"] for row in rows], float), np.array(values, float)

    def last(self, kind: str, metric: str) -> float | None:
        """Returns the last value; None: there is none, or it is not finite."""
        values = self.points(kind, metric)[1]
        return float(values[-1]) if len(values) and math.isfinite(values[-1]) else None

    @property
    def step(self) -> int:
        return max((row["step"] for row in self.rows), default=0)

    def tokens(self, steps: np.ndarray) -> np.ndarray:
        """Returns the tokens that were trained on by these steps."""
        return steps * self.experiment.training.tokens_per_step

    def flops(self, steps: np.ndarray) -> np.ndarray:
        """Returns the training FLOPs, as the model counts them."""
        return self.tokens(steps) * self.experiment.flops_per_token

    def hours(self, steps: np.ndarray) -> np.ndarray:
        """Returns training hours, without compilation and evaluations.

        `tokens_per_second` of a row is the mean since the first step of its start.
        """
        at, rates = self.points("train", "tokens_per_second")
        firsts = sorted({start["step"] + 1 for start in self.starts} or {1})
        seconds, base = [0.0], 0.0
        for number, first in enumerate(firsts):
            after = firsts[number + 1] if number + 1 < len(firsts) else math.inf
            inside = (at >= first) & (at < after)
            passed = self.tokens(at[inside] - first) / rates[inside]
            seconds += [base + second for second in passed]
            base = seconds[-1]
        return np.interp(steps, [0.0, *at], seconds) / 3600 if len(at) else steps * 0


def run(argv: list[str]) -> int:
    """Runs the command."""
    if shows_usage(argv, _USAGE, help=False):
        return 0
    options = parse(ReportOptions, argv, prog="recurjax report")
    if not options.runs:
        raise UserError("name at least one run: recurjax report runs/quickstart")
    if not options.out.absolute().parent.is_dir():
        raise UserError(f"--out: there is no directory {options.out.parent}")
    page = report([find_run(path) for path in options.runs])
    write_atomic(options.out, page)
    print(f"{options.out}: {len(page.encode()) / 1e3:,.0f} kB")
    return 0


def report(roots: Sequence[Path]) -> str:
    """Returns the HTML page of some runs.

    Raises:
      UserError: one of them has a damaged config or damaged evaluations.
    """
    runs = _read(roots)
    title = ", ".join(each.name for each in runs)
    sections = {
        "Summary": _summary(runs),
        "Settings that differ": _differences(runs) if len(runs) > 1 else "",
        "Curves": _curves(runs),
        "Samples": _samples(runs),
        "Evaluations": _evaluations(runs),
        "Environment": _environment(runs),
        "All settings": _settings(runs),
    }
    body = "\n".join(
        f"<section>\n<h2>{name}</h2>\n{content}\n</section>"
        for name, content in sections.items()
        if content
    )
    return _PAGE.format(title=escape(title), body=body, version=escape(VERSION))


def _read(roots: Sequence[Path]) -> list[_Run]:
    paths = [root.resolve() for root in roots]
    # As many trailing parts of the paths as tell the runs apart.
    depth = next(
        (n for n in range(1, 99) if len({p.parts[-n:] for p in paths}) == len(paths)),
        None,
    )
    if depth is None:
        raise UserError("recurjax report: name each run once")
    runs = []
    for number, path in enumerate(paths):
        directory = RunDirectory(path)
        metrics = directory.metrics
        runs.append(
            _Run(
                name="/".join(path.parts[-depth:]),
                color=_COLORS[number % len(_COLORS)],
                directory=directory,
                experiment=read_experiment(directory.config),
                rows=read_rows(metrics).rows if metrics.is_file() else [],
                starts=list(_starts(directory.starts)),
            )
        )
    return runs


def _starts(file: Path) -> Iterator[dict[str, Any]]:
    for line in file.read_bytes().splitlines() if file.is_file() else ():
        with suppress(UserError):  # a line that a kill cut off
            row = parse_json(line, "a start")
            if isinstance(row, dict) and type(row.get("step")) is int:
                yield row


def _summary(runs: Sequence[_Run]) -> str:
    rows = []
    for each in runs:
        step, training = np.array([each.step]), each.experiment.training
        figures = [
            _figure(each.last("train", "loss"), ".4f"),
            _figure(each.last("validation", "loss"), ".4f"),
            _figure(each.last("validation", "bits_per_byte"), ".4f"),
            _figure(each.last("validation", "accuracy"), ".4f"),
        ]
        rows.append(
            [
                f'<span class="key" style="background:{each.color}"></span>'
                + escape(each.name),
                f"{each.step:,} of {training.steps:,}",
                f"{count_parameters(each.experiment.model).total:,}",
                f"{each.tokens(step).item():,}",
                f"{each.flops(step).item():.3g}",
                _duration(each.hours(step).item() * 3600),
                _figure(each.last("train", "tokens_per_second"), ",.0f"),
                *figures,
            ]
        )
    header = ["run", "step", "parameters", "tokens", "FLOPs", "training time"]
    header += ["tokens/s", "train loss", "validation loss", "bits per byte", "accuracy"]
    # A figure that no run has, such as a task's accuracy, needs no column.
    shown = [n for n in range(len(header)) if any(row[n] != "" for row in rows)]
    return _table([header[n] for n in shown], [[row[n] for n in shown] for row in rows])


def _figure(value: float | None, format: str) -> str:
    return "" if value is None else f"{value:{format}}"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _differences(runs: Sequence[_Run]) -> str:
    configs = [dict(_flat(to_json(each.experiment))) for each in runs]
    fields = dict.fromkeys(name for config in configs for name in config)
    rows = [
        [f"<code>{escape(name)}</code>", *(escape(text) for text in texts)]
        for name in fields
        if name != "name"
        and len(set(texts := [config.get(name, "–") for config in configs])) > 1
    ]
    if not rows:
        return "<p>The runs have the same settings.</p>"
    return _table(["setting", *(escape(each.name) for each in runs)], rows)


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yields the settings of a config by their dotted names."""
    items = dict(enumerate(value)) if isinstance(value, list) else value
    if isinstance(items, dict) and items:
        for key, inner in items.items():
            yield from _flat(inner, f"{name}.{key}" if name else str(key))
    else:
        yield name, value if isinstance(value, str) else json_text(value)


_TIME = "training time (hours)"
_AXES: dict[str, Callable[[_Run, np.ndarray], np.ndarray]] = {
    "training step": lambda each, steps: steps,
    "tokens": _Run.tokens,
    "training FLOPs": _Run.flops,
    _TIME: _Run.hours,
}
_LOSS = "loss (nats per token)"
_OVER_STEPS = {
    "bits_per_byte": ("validation", "bits per byte"),
    "accuracy": ("validation", "accuracy"),
    "gradient_norm": ("train", "gradient norm"),
    "learning_rate": ("train", "learning rate"),
}


def _curves(runs: Sequence[_Run]) -> str:
    if not any(each.rows for each in runs):
        return "<p>No metrics are recorded.</p>"
    kinds = ("train", "validation")
    figures = [
        _plot(runs, kinds, "loss", across, _LOSS, logarithmic=across in _LOGARITHMIC)
        for across in _AXES
    ]
    figures += [
        _plot(runs, (kind,), metric, "training step", label)
        for metric, (kind, label) in _OVER_STEPS.items()
        if any(len(each.points(kind, metric)[0]) > 1 for each in runs)
    ]
    legend = "".join(
        f'<li><span class="key" style="background:{each.color}"></span>'
        f"{escape(each.name)}</li>"
        for each in runs
    )
    note = "thin: training (means of neighbouring rows); thick: validation"
    return (
        f'<ul class="legend">{legend}<li>{note}</li></ul>\n'
        f'<div class="figures">{"".join(figures)}</div>'
    )


_LOGARITHMIC = ("tokens", "training FLOPs")


def _plot(
    runs: Sequence[_Run],
    kinds: Sequence[str],
    metric: str,
    across: str,
    label: str,
    *,
    logarithmic: bool = False,
) -> str:
    from matplotlib.figure import Figure  # slow to import, and needed here only
    from matplotlib.ticker import NullFormatter

    figure = Figure(figsize=(4.2, 2.9), layout="constrained")
    axes = figure.subplots()
    for each in runs:
        for kind in kinds:
            steps, values = each.points(kind, metric)
            if not len(steps):
                continue
            both = np.stack([_AXES[across](each, steps), values])
            thin = kind == "train" and len(kinds) > 1
            axes.plot(
                *_means(both, max(20, _POINTS // len(runs))),
                # A marker for each of many points would be most of the file.
                "o-" if kind == "validation" and len(steps) <= 60 else "-",
                color=each.color,
                alpha=0.5 if thin else 1.0,
                linewidth=0.9 if thin else 1.3,
                markersize=3.5,
            )
    if across == _TIME and axes.get_xlim()[1] < 2:
        axes.xaxis.set_major_formatter(lambda hours, _: f"{hours * 60:.3g}")
        across = "training time (minutes)"
    axes.set(xlabel=across, ylabel=label)
    # Less than two powers of ten on a log axis have too few labels to be read.
    places = np.concatenate([line.get_xdata() for line in axes.lines])
    if logarithmic and len(places) and places.max() > 100 * places.min() > 0:
        axes.set_xscale("log")
        axes.xaxis.set_minor_formatter(NullFormatter())
    image = base64.b64encode(figure_bytes(figure, "svg")).decode()
    text = escape(f"{label} over {across}")
    return f'<img alt="{text}" src="data:image/svg+xml;base64,{image}">'


def _means(points: np.ndarray, most: int) -> np.ndarray:
    """Averages neighbours, so that at most so many points are left."""
    width = math.ceil(points.shape[1] / most)
    length = points.shape[1] // width * width
    return points[:, :length].reshape(2, -1, width).mean(-1)


def _samples(runs: Sequence[_Run]) -> str:
    parts = []
    for each in runs:
        if not each.directory.samples.is_file():
            continue
        text = each.directory.samples.read_text(encoding="utf-8", errors="replace")
        # A heading, its text, the next heading, ...
        pieces = re.split(r"^=== step (\d+) ===\n", text, flags=re.MULTILINE)[1:]
        if not pieces:
            continue
        step, last = pieces[-2:]
        most = _SAMPLE_CHARACTERS // len(runs)
        parts.append(
            f"<h3>{escape(each.name)}, step {int(step):,}</h3>\n"
            f"<pre>{escape(_shortened(last.strip(), most))}</pre>"
        )
    return "\n".join(parts)


def _shortened(text: str, most: int) -> str:
    # A byte that no text has would end the page's encoding or its layout.
    text = "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)
    return text if len(text) <= most else f"{text[:most]} …"


def _evaluations(runs: Sequence[_Run]) -> str:
    rows = []
    for each in runs:
        if not (each.directory.root / FILE).is_file():
            continue
        for row in newest(read_evaluations(each.directory.root)):
            error = "" if row.stderr is None else f" ± {row.stderr:.4f}"
            floor = "" if row.floor is None else f" (floor {row.floor:.4f})"
            texts = (each.name, row.task, row.metric)
            rows.append(
                [
                    *(escape(str(text)) for text in texts),
                    f"{row.value:.4f}{error}{floor}",
                    f"{row.n:,}",
                    f"{row.step:,}",
                    escape(settings_of(row)),
                ]
            )
    if not rows:
        return ""
    header = ["run", "task", "metric", "value ± stderr", "n", "step", "settings"]
    return _table(header, rows[-_MOST_EVALUATIONS:])


def _environment(runs: Sequence[_Run]) -> str:
    fields = ("time", "step", "devices", "processes", "jax", "jaxlib", "commit")
    rows = [
        [
            escape(each.name),
            *(escape(str(start.get(name, ""))) for name in fields),
            "yes" if start.get("dirty") else "",
        ]
        for each in runs
        for start in each.starts[-20:]
    ]
    header = ["run", "start", *fields[1:], "uncommitted changes"]
    return _table(header, rows) if rows else ""


def _settings(runs: Sequence[_Run]) -> str:
    return "\n".join(
        f"<details><summary>{escape(each.name)}</summary>\n"
        f"<pre>{escape(json_text(to_json(each.experiment), indent=2))}</pre></details>"
        for each in runs
    )


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a table of cells that are HTML already."""
    head = "".join(f"<th>{cell}</th>" for cell in header)
    lines = (
        "<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows
    )
    return (
        f'<div class="table"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n'
        + "\n".join(lines)
        + "\n</tbody></table></div>"
    )


_COLORS = (
    *("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000"),
    *("#7f3c8d", "#80ba5a", "#a5aa99"),
)
"""Okabe and Ito's colours, which colour-blind readers tell apart, and three more."""

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
* {{ box-sizing: border-box; }}
body {{
  margin: 0 auto; max-width: 66rem; padding: 1rem; color: #1f2328; background: #fff;
  font: 1rem/1.5 system-ui, sans-serif;
}}
h1 {{ font-size: 1.4rem; overflow-wrap: anywhere; }}
h2 {{ font-size: 1.1rem; border-bottom: 1px solid #d8dce0; margin-top: 2rem; }}
h3 {{ font-size: 1rem; overflow-wrap: anywhere; }}
.table {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-size: .875rem; }}
th, td {{
  text-align: left; vertical-align: top; padding: .3rem .75rem .3rem 0;
  border-bottom: 1px solid #e6e8eb; font-variant-numeric: tabular-nums;
}}
td {{ min-width: 4rem; max-width: 24rem; overflow-wrap: break-word; }}
pre {{
  white-space: pre-wrap; overflow-wrap: anywhere; background: #f5f6f7; padding: .75rem;
  font-size: .8rem; border-radius: .3rem; margin: .5rem 0;
}}
.key {{ display: inline-block; width: .8rem; height: .8rem; margin-right: .4rem; }}
.legend {{
  list-style: none; padding: 0; display: flex; flex-wrap: wrap; gap: .2rem 1rem;
}}
.figures {{
  display: grid; gap: 1rem; grid-template-columns: repeat(auto-fit, minmax(19rem, 1fr));
}}
.figures img {{ width: 100%; max-width: 32rem; height: auto; }}
footer {{ color: #59636e; font-size: .8rem; margin-top: 2rem; }}
@media print {{
  body {{ max-width: none; padding: 0; font-size: 9pt; }}
  .figures {{ grid-template-columns: 1fr 1fr; }}
  .table {{ overflow: visible; }}
  table {{ font-size: 7pt; }}
  td {{ min-width: 0; }}
  img, tr, h2, h3 {{ break-inside: avoid; break-after: auto; }}
  .key {{ print-color-adjust: exact; }}
}}
</style>
</head>
<body>
<h1>{title}</h1>
{body}
<footer>recurjax {version}</footer>
</body>
</html>
"""
