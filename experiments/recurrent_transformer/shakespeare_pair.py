"""The small pair: RT against the Transformer on the embedded text, both tuned.

Reproduces no table of the paper; it asks at a size for two CPU cores what the C4 runs
ask at 150M and 300M parameters. Each of the two models is trained at the same three
learning rates, with three seeds each (of the init and of the order of the rows): 18
runs of as many tokens, in at most 15 minutes on two idle cores. It prints a line per
run and a table of validation bits per byte, also in `table.md`. A run that is done is
not made
again: after an interruption the same command continues.

    python experiments/recurrent_transformer/shakespeare_pair.py

At four times the tokens, and the Transformer with as much of the processor's time as
the Recurrent Transformer took there:

    python experiments/recurrent_transformer/shakespeare_pair.py --steps 800 \
        --rates 1e-2 --directory runs/shakespeare_pair_800
    python experiments/recurrent_transformer/shakespeare_pair.py --steps 936 \
        --rates 1e-2 --models transformer --directory runs/shakespeare_pair_936

The paper's RMSNorm ablation, the persistent pair from z instead of norm(z), is a third
model, which is trained where it is named:

    python experiments/recurrent_transformer/shakespeare_pair.py \
        --models recurrent unnormed --directory runs/shakespeare_unnormed
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice, product
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import tyro

from recurjax.config_json import to_json
from recurjax.data.dataset import open_dataset
from recurjax.errors import UserError
from recurjax.evaluation.perplexity import score
from recurjax.experiment import Experiment
from recurjax.files.atomic import write_atomic
from recurjax.machine import host
from recurjax.model import count_parameters
from recurjax.run_table import load_experiment
from recurjax.sharding import MeshConfig, make_mesh
from recurjax.training.program import build_step
from recurjax.training.step import TrainState
from recurjax.training.sweep import shortened
from recurjax.types import Array, Batch

Model = Literal["transformer", "recurrent", "unnormed"]
MODELS: dict[Model, str] = {
    "transformer": "Transformer",
    "recurrent": "Recurrent Transformer",
    "unnormed": "un-normed persistent pair",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Trains the pair at every rate with every seed, and makes the table.

    Attributes:
      directory: keeps results.json and table.md.
      models: transformer, recurrent or unnormed.
      rates: peak learning rates.
      seeds: how many, from 0, at each rate.
      steps: steps of a run; None: as in the experiments.
      evaluation_batches: 64 rows each; None: the full validation split.
    """

    directory: Path = Path("runs/shakespeare_pair")
    models: tuple[Model, ...] = ("transformer", "recurrent")
    rates: tuple[float, ...] = (3e-3, 1e-2, 3e-2)
    seeds: int = 3
    steps: int | None = None
    evaluation_batches: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PairRun:
    """A trained model: which one, its validation score, what it took.

    Attributes:
      model: a key of MODELS.
      rate: the peak learning rate.
      seed: seed of the init and of the order of the rows.
      bits_per_byte: validation.
      seconds: seconds of processor time for training alone, all threads together and
        without the compilation: neighbours on the machine change it less than wall
        time.
    """

    model: str
    rate: float
    seed: int
    bits_per_byte: float
    seconds: float


def main(argv: list[str] | None = None) -> int:
    """Makes the runs that are missing, prints and writes the table."""
    options = tyro.cli(Options, args=argv, description=__doc__)
    experiments = pair(options)
    options.directory.mkdir(parents=True, exist_ok=True)
    file = options.directory / "results.json"
    runs = read_results(file, experiments)
    done = {(run.model, run.rate, run.seed) for run in runs}
    trainers = {model: trainer(model, each) for model, each in experiments.items()}
    # The seed changes last: a table of one seed is complete after a third of the time.
    for seed, rate, model in product(
        range(options.seeds), options.rates, options.models
    ):
        if (model, rate, seed) in done:
            continue
        run = trainers[model](rate, seed)
        runs.append(run)
        write_results(file, experiments, runs)
        print(
            f"{model}, rate {rate:g}, seed {seed}: {run.bits_per_byte:.3f} bits per "
            f"byte, {run.seconds:.0f} s",
            flush=True,
        )
    text = table(runs, experiments, rates=options.rates, seeds=options.seeds)
    write_atomic(options.directory / "table.md", text)
    print(text, end="")
    return 0


def pair(options: Options) -> dict[str, Experiment]:
    """Returns both experiments, as short as the options say."""
    table = Path(__file__).with_name("runs.py")
    experiments = {
        model: load_experiment(f"{table}:shakespeare_{model}")
        for model in options.models
    }
    for model, experiment in experiments.items():
        evaluation = replace(experiment.evaluation, batches=options.evaluation_batches)
        short = shortened(experiment, options.steps)
        experiments[model] = replace(short, evaluation=evaluation)
    return experiments


def trainer(model: str, experiment: Experiment) -> Callable[[float, int], PairRun]:
    """Returns what trains and scores a model at a rate, with a seed.

    It makes the same updates as `recurjax train --optimizer.learning-rate RATE
    --training.seed SEED --data.seed SEED`, without the run directory. The rate is an
    argument of the compiled step, so that one compilation serves all runs.
    """
    dataset = open_dataset(experiment.data)
    length, batch = experiment.training.length, experiment.training.batch
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])

    # Built where it is traced: the peak rate is then an argument of the program.
    @partial(jax.jit, donate_argnums=0)
    def step(state: TrainState, batch: Batch, rate: Array) -> TrainState:
        return build_step(experiment, mesh, peak=rate).update(state, batch)[0]

    start = build_step(experiment, mesh).initialise

    def run(rate: float, seed: int) -> PairRun:
        state = start(jax.random.key(seed))
        rows = iter(dataset.loader("train", length=length, batch=batch, seed=seed))
        began = time.process_time()
        for number in range(experiment.training.steps):
            state = step(state, _batch(next(rows)), jnp.float32(rate))
            if number == 0:  # it may have compiled
                jax.block_until_ready(state)
                began = time.process_time()
        jax.block_until_ready(state)
        seconds = time.process_time() - began
        rows.close()
        held_out = dataset.loader("validation", length=length, batch=batch)
        batches = islice(map(_batch, held_out), experiment.evaluation.batches)
        result = score(state.model, batches, token_bytes=dataset.tokenizer.token_bytes)
        return PairRun(
            model=model,
            rate=rate,
            seed=seed,
            bits_per_byte=result.bits_per_byte,
            seconds=seconds,
        )

    return run


def table(
    runs: list[PairRun],
    experiments: dict[str, Experiment],
    *,
    rates: tuple[float, ...],
    seeds: int,
) -> str:
    """Returns the Markdown table: mean and spread (largest less smallest) over seeds.

    FLOPs and seconds are of one run; the seconds are the median of all its runs.
    """
    head = [f"rate {rate:g}" for rate in rates]
    costs = ("TFLOP", "processor seconds")
    lines = [
        _row("model", "parameters", *costs, *head, "the best rate's seeds"),
        "|" + "---|" * (len(rates) + 5),
    ]
    for model, title in MODELS.items():
        if model not in experiments:
            continue
        scores = {
            rate: [
                run.bits_per_byte
                for seed in range(seeds)
                for run in runs
                if (run.model, run.rate, run.seed) == (model, rate, seed)
            ]
            for rate in rates
        }
        best = min(rates, key=lambda rate: statistics.fmean(scores[rate]))
        cells = [
            f"{statistics.fmean(score):.3f} ({max(score) - min(score):.3f})"
            for score in scores.values()
        ]
        experiment = experiments[model]
        parameters = count_parameters(experiment.model).total
        tokens = experiment.training.steps * experiment.training.tokens_per_step
        flops = tokens * experiment.flops_per_token / 1e12
        seconds = statistics.median(run.seconds for run in runs if run.model == model)
        finals = ", ".join(f"{each:.3f}" for each in scores[best])
        numbers = (f"{parameters:,}", f"{flops:.3g}", f"{seconds:.0f}")
        lines.append(_row(title, *numbers, *cells, f"{best:g}: {finals}"))
    return "\n".join(lines) + "\n"


def read_results(file: Path, experiments: dict[str, Experiment]) -> list[PairRun]:
    """Reads the runs that are done; none without the file.

    Raises:
      UserError: they were made with other settings.
    """
    if not file.exists():
        return []
    results = json.loads(file.read_text())
    if results["experiments"] != _settings(experiments):
        raise UserError(
            f"{file} has runs with other settings: name another --directory or "
            "remove it"
        )
    return [PairRun(**run) for run in results["runs"]]


def write_results(
    file: Path, experiments: dict[str, Experiment], runs: list[PairRun]
) -> None:
    """Writes all runs so far atomically."""
    results = {"experiments": _settings(experiments), "runs": [asdict(r) for r in runs]}
    write_atomic(file, json.dumps(results, indent=2) + "\n")


def _batch(rows: dict[str, Any]) -> Batch:
    return Batch(rows["ids"], rows["targets"], None)


def _settings(experiments: dict[str, Experiment]) -> Any:
    # Through JSON, as they will be read back: tuples become lists.
    return json.loads(json.dumps({m: to_json(e) for m, e in experiments.items()}))


def _row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    host.prepare()
    try:
        sys.exit(main())
    except UserError as error:
        print(f"shakespeare_pair: {error}", file=sys.stderr)
        sys.exit(2)
