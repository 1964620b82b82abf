"""Writes the tables of experiments/README.md from the tables of runs.

A row a run: what it reproduces, the figure expected, and what it costs: parameters and
tokens, and the FLOPs of training that the model itself counts. Runs nothing; the count
of parameters takes about half a minute.

    python experiments/table_of_runs.py
"""

import re
from pathlib import Path

from recurjax.data.config import DataConfig, Prepared, PromptAnswer
from recurjax.experiment import Experiment
from recurjax.files.whole import write_whole
from recurjax.model import count_parameters
from recurjax.run_table import Run, load_experiment, load_runs

FOLDER = Path(__file__).parent
README = FOLDER / "README.md"
TABLES = (
    *("recurrent_transformer", "rat", "latent_recurrent_transformer"),
    *("relaxed_recursive_transformer", "recurformer", "tasks"),
)


def table(paper: str) -> str:
    """Returns the Markdown table of a paper's runs."""
    file = FOLDER / paper / "runs.py"
    lines = [
        "| run | reproduces | expected | needs | parameters | tokens | FLOPs |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, run in load_runs(file).items():
        lines.append(named(name, run) + costs(load_experiment(f"{file}:{name}")))
    return "\n".join(lines) + "\n"


def named(name: str, run: Run) -> str:
    """Returns the cells that are known without making the experiment."""
    return f"| `{name}` | {run.reproduces} | {run.expected} |"


def costs(experiment: Experiment) -> str:
    """Returns the other cells of a row."""
    data, training = experiment.data, experiment.training
    corpus = data.corpus if isinstance(data, DataConfig) else None
    needs = "nothing"
    if isinstance(corpus, Prepared):
        needs = f"`{corpus.directory}`"
    elif isinstance(corpus, PromptAnswer):
        needs = " ".join(f"`{pattern}`" for pattern in corpus.patterns)
    parameters = count_parameters(experiment.model).total
    tokens = training.steps * training.tokens_per_step
    flops = tokens * experiment.flops_per_token
    return f" {needs} | {_short(parameters)} | {_short(tokens)} | {flops:.1e} |"


def filled(text: str, paper: str, rows: str) -> str:
    """Returns the README with a paper's table in its place.

    Raises:
      ValueError: the README has no place for it.
    """
    start, end = f"<!-- {paper}/runs.py -->\n", "<!-- end -->"
    whole = re.compile(f"(?<={re.escape(start)}).*?(?={re.escape(end)})", re.DOTALL)
    if not whole.search(text):
        raise ValueError(f"README.md has no {start.strip()} ... {end}")
    return whole.sub(lambda _: rows, text, count=1)


def main() -> None:
    """Writes the file anew."""
    text = README.read_text()
    for paper in TABLES:
        text = filled(text, paper, table(paper))
    write_whole(README, text)


def _short(count: int) -> str:
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.4g}{unit}"
    return str(count)


if __name__ == "__main__":
    main()
