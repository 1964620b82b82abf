"""HashHop in miniature: which heads can go, and does their recency tell?

The paper's table 4 for two CPU cores, with controls that it lacks. A base (row
small_hash_hop of runs.py: four layers, strings of 4, chains of 4 among 12 pairs) is
trained until it follows chains, first on single hops among few pairs. Then shares of
its heads are replaced and each model, the base too, is trained on by a quarter of all
these steps (`--further`), once for each seed: of Mamba's start, of the rows, and of the
heads that `random` draws. `recent` replaces the heads of highest RA-I, `groups`
complete groups by their mean, `least` those of lowest RA-I: if RA-I chooses better than
chance, recent scores above random and least. The score is the longest right beginning
of the chain over its length. A stopped set continues with the same command.

    python experiments/recurformer/hash_hop.py --runs runs/recurformer_hash_hop
"""

import sys
from dataclasses import dataclass, replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from rich.console import Console

from recurjax.cli.options import parse, run_script
from recurjax.convert.imported_run import write_run
from recurjax.data.tasks import HashHop, TaskData, TaskDataset
from recurjax.errors import UserError
from recurjax.evaluation.hash_hop import read_chains
from recurjax.experiment import Experiment
from recurjax.files.atomic import write_atomic
from recurjax.machine import host
from recurjax.model import Decoder
from recurjax.run_table import load_experiment
from recurjax.surgery.recency import HeadRecency, choose_heads, measure_recency
from recurjax.surgery.recurformer import to_recurformer
from recurjax.training.loop import train
from recurjax.training.run import LoadedRun, load_run
from recurjax.training.spikes import Diverged
from recurjax.training.sweep import seeded, shortened, table_of, tell
from recurjax.types import Batch
from recurjax.variants.recurformer import MambaConfig

TABLE = Path(__file__).with_name("runs.py")
CHOICES = ("recent", "groups", "random", "least")
FIRST = ((1, 3, 1500, 64), (1, 8, 1000, 48))
"""(hops, pairs, steps, rows per step) of the problems before the table's."""
ENOUGH = 0.9
"""The score from which on a base follows chains."""
QUARTER = 0.25
"""Of the base's steps a model is trained on."""
TEXTS = 32
"""Rows on which heads are measured; of the test, which nothing is trained on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Trains base and replacements and prints the score of each.

    Attributes:
      runs: one run directory each, and results.md.
      betas: shares of heads to replace.
      choices: which heads: recent, groups, random, least.
      steps: steps of the base on its last problems; None: the table's.
      seeds: how often each share and choice is tried on the base.
      base_seed: seed of the base.
      window: how far back counts as recent, in tokens.
      learning_rate: learning rate of converted models; None: the base's.
      further: how long a model is trained on, as a share of the base's steps.
    """

    runs: Path = Path("runs/recurformer_hash_hop")
    betas: tuple[float, ...] = (0.25, 0.5, 0.75, 0.9, 1.0)
    choices: tuple[str, ...] = CHOICES
    steps: int | None = None
    seeds: int = 3
    base_seed: int = 0
    window: int = 17
    learning_rate: float | None = None
    further: float = QUARTER

    def __post_init__(self):
        if self.seeds < 1 or self.window < 1:
            raise UserError("--seeds and --window must be at least 1")
        if not 0 < self.further <= 1:
            raise UserError(f"--further must be a share in (0, 1], got {self.further}")
        unknown = [name for name in self.choices if name not in CHOICES]
        if unknown:
            raise UserError(
                f"--choices must be among {', '.join(CHOICES)}, got "
                f"{', '.join(unknown)}"
            )


def base(seed: int, *, steps: int | None) -> list[Experiment]:
    """Returns the trainings of a seed's base, each but the first on the last one."""
    run = seeded(load_experiment(f"{TABLE}:small_hash_hop"), seed)
    assert isinstance(run.data, TaskData) and isinstance(run.data.task, HashHop)
    name, stages = f"base_seed{seed}", []
    for number, (hops, pairs, part, batch) in enumerate(FIRST):
        task = replace(run.data.task, hops=hops)
        task = replace(task, length=task.length_of(pairs))
        short = shortened(run, part if steps is None else steps)
        stages.append(
            replace(
                short,
                name=f"{name}_first{number}",
                data=replace(run.data, task=task),
                training=replace(short.training, batch=batch, length=task.length),
            )
        )
    return [*stages, replace(shortened(run, steps), name=name)]


def further(
    stages: list[Experiment],
    start: Path,
    name: str,
    *,
    seed: int,
    learning_rate: float | None = None,
    share: float = QUARTER,
) -> list[Experiment]:
    """Returns a share of each training of the base, on the model of a directory."""
    again, model = [], load_run(start, report=_quiet).model.config
    for stage in stages:
        assert isinstance(stage.data, TaskData)
        short = shortened(stage, max(1, int(stage.training.steps * share)))
        optimizer = short.optimizer
        if learning_rate is not None:
            optimizer = replace(optimizer, learning_rate=learning_rate)
        again.append(
            replace(
                short,
                name=stage.name.replace(stages[-1].name, name),
                model=model,
                optimizer=optimizer,
                # Other rows than the base learned from.
                data=replace(stage.data, seed=stage.data.seed + 1000 * (seed + 1)),
            )
        )
    return again


def chosen(
    recency: HeadRecency, choice: str, beta: float, *, seed: int
) -> tuple[tuple[int, ...], ...]:
    """Returns the heads that go."""
    if choice == "groups":
        return choose_heads(recency, beta, scope="groups")
    if choice == "least":
        recency = recency._replace(count=-recency.count, ratio=-recency.ratio)
    elif choice == "random":
        order = np.random.default_rng(seed).permutation(recency.count.size)
        recency = recency._replace(count=order.reshape(recency.count.shape))
    return choose_heads(recency, beta, scope="heads")


def chain_score(model: Decoder, run: Experiment) -> float:
    """Returns the longest right beginning of the chain over its length, on the test."""
    data, batch = run.data, run.evaluation_batch
    assert isinstance(data, TaskData) and isinstance(data.task, HashHop)
    loader = TaskDataset(config=data).loader(
        "validation", length=run.training.length, batch=batch
    )
    rows = (Batch(jnp.asarray(r["ids"]), jnp.asarray(r["targets"])) for r in loader)
    scores = read_chains(model, rows, data.task)
    return sum(scores) / len(scores)


def main(argv: list[str] | None = None) -> int:
    """Trains what is not trained yet and prints the table."""
    argv = sys.argv[1:] if argv is None else argv
    options = parse(Options, argv, prog="hash_hop.py")
    console = Console(stderr=True)
    scores: dict[str, list[dict[str, float]]] = {}
    diverged: list[str] = []

    def results() -> str:
        lost = (f"{name} diverged and has no score.\n" for name in diverged)
        return table_of("h_gq at beta", scores) + "".join(lost)

    def finish(stages: list[Experiment], root: Path | None = None) -> LoadedRun | None:
        """Trains one after the other, the first on the model of `root` if any."""
        for run in stages:
            console.rule(run.name)
            start = None if root is None else str(root)
            training = replace(run.training, start_from=start)
            root = options.runs / run.name
            again = replace(run, training=training)
            if train(again, root, console=console).outcome != "finished":
                console.print("stopped: the same command goes on from here")
                return None
        assert root is not None
        return load_run(root, report=_quiet)

    def score(name: str, column: str, run: LoadedRun, seed: int) -> None:
        tell(scores, name, seed, {column: chain_score(run.model, run.experiment)})
        write_atomic(options.runs / "results.md", results())

    stages = base(options.base_seed, steps=options.steps)
    data = stages[-1].data
    assert isinstance(data, TaskData) and isinstance(data.task, HashHop)
    scores["floor"] = [{"0": data.task.chain_floor()}]
    trained = finish(stages)
    if trained is None:
        return 130
    score("base", "0", trained, 0)
    reached = scores["base"][0]["0"]
    if reached < ENOUGH and options.steps is None:
        raise UserError(
            f"the base reaches {reached:.3f} of {ENOUGH}, too little for its "
            "heads to mean anything: use another --base-seed"
        )
    root = options.runs / stages[-1].name
    recency = _measured(trained, options.window)
    # Other bases, and rates and steps given as options, have directories of
    # their own.
    of = f"_base{options.base_seed}" if options.base_seed else ""
    rate = options.learning_rate
    changed_by = "" if rate is None else f"_rate{rate}"
    if options.further != QUARTER:
        changed_by += f"_further{options.further}"

    def train_on(start: Path, name: str, seed: int) -> LoadedRun | None:
        name = f"{name}{of}{changed_by}_seed{seed}"
        changes = {"learning_rate": rate, "share": options.further}
        return finish(further(stages, start, name, seed=seed, **changes), start)

    for seed in range(options.seeds):
        on = train_on(root, "on", seed)
        if on is None:
            return 130
        score("base, trained on", "0", on, seed)
        for beta in options.betas:
            for choice in options.choices:
                # Of all heads there is one choice.
                name = f"{'all' if beta == 1 else choice}_{beta}"
                changed = options.runs / f"start_{name}{of}_seed{seed}"
                if not changed.exists():
                    heads = chosen(recency, choice, beta, seed=seed)
                    _write(trained, heads, changed, seed=seed)
                try:
                    run = train_on(changed, name, seed)
                except Diverged as error:
                    # The other seeds are still informative.
                    console.print(f"{name}, seed {seed}: {error}")
                    diverged.append(f"{choice} at beta {beta}, seed {seed},")
                    write_atomic(options.runs / "results.md", results())
                    continue
                if run is None:
                    return 130
                score(choice, str(beta), run, seed)
    print(results(), end="")
    return 0


def _measured(run: LoadedRun, window: int) -> HeadRecency:
    data = run.experiment.data
    assert isinstance(data, TaskData)
    dataset = TaskDataset(config=data)
    rows = [dataset.row("validation", number).ids for number in range(TEXTS)]
    batches = np.stack(rows).reshape(-1, 4, len(rows[0]))
    return measure_recency(run.model, list(batches), window=window)


def _write(
    run: LoadedRun, heads: tuple[tuple[int, ...], ...], out: Path, *, seed: int
) -> None:
    mamba = MambaConfig(dt_rank=16)
    model = to_recurformer(run.model, heads, mamba=mamba, seed=seed)
    experiment = replace(run.experiment, name=out.name, model=model.config)
    write_run(out, model, experiment, run.tokenizer)


def _quiet(_: str) -> None:
    """Prints nothing."""


if __name__ == "__main__":
    host.prepare()
    run_script(main)
