"""More loops at test time than in training: S3, HashHop and text.

No table of the paper. A recursive model of one layer, run four times, learns S3's
running products in rows of 16, HashHop's chains of 2 among 4 pairs, or the bytes of the
package's Shakespeare, plainly and with a number of loops that each step draws
(`RandomLoops`, mean 4, at most 8). Then it reads with 1 to 8 loops: rows twice as long
as in training, text as long. The question: does a model trained with 4 loops read
better with 8? Prints the share of right tokens, or bits per byte on validation text,
three seeds. A stopped set continues with the same command.

    python experiments/relaxed_recursive_transformer/more_loops.py
"""

import sys
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
from rich.console import Console

from recurjax.cli.options import parse, run_script
from recurjax.data.config import Bytes, DataConfig, EmbeddedText
from recurjax.data.dataset import open_dataset
from recurjax.data.tasks import (
    HashHop,
    StateTracking,
    TaskConfig,
    TaskData,
    TaskDataset,
)
from recurjax.errors import UserError
from recurjax.evaluation.accuracy import count_answers
from recurjax.evaluation.perplexity import score
from recurjax.experiment import Experiment
from recurjax.files.atomic import write_atomic
from recurjax.layers.attention import AttentionConfig
from recurjax.layers.initialization import UNIT_VARIANCE
from recurjax.layers.mlp import MlpConfig
from recurjax.machine import host
from recurjax.model import Decoder, ModelConfig
from recurjax.sharding import MeshConfig, make_mesh, placed
from recurjax.surgery.fewer_layers import with_loops
from recurjax.training.config import EvaluationConfig, TrainingConfig
from recurjax.training.loop import train
from recurjax.training.objective import NextToken, RandomLoops
from recurjax.training.optimizers import AdamW, Cosine
from recurjax.training.run import LoadedRun, load_run
from recurjax.training.spikes import SpikeConfig
from recurjax.training.sweep import seeded, table_of, tell
from recurjax.types import Batch
from recurjax.variants.relaxed_recursive_transformer import (
    RelaxedRecursiveTransformerConfig,
)
from recurjax.variants.transformer import TransformerConfig

Training = Literal["plain", "random"]
LOOPS = 4
OBJECTIVES = {"plain": NextToken(), "random": RandomLoops(mean=LOOPS, most=2 * LOOPS)}
_HOP = HashHop(size=2, hops=2, length=128, validation_rows=256)
TEXT, TEXT_LENGTH = "text", 128
ACCURACY, BITS = "accuracy by loops", "bits per byte by loops"
_SHAKESPEARE = DataConfig(corpus=EmbeddedText(), tokenizer=Bytes(bos=False))
TASKS: dict[str, TaskConfig] = {
    "s3": StateTracking(length=16, validation_length=32, validation_rows=256),
    "hash_hop": replace(_HOP, length=_HOP.length_of(4)),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Trains what is not trained yet and prints the table.

    Attributes:
      runs: one run directory each, results.md of the tasks and text.md.
      tasks: s3, hash_hop, text.
      ways: plain: always four loops; random: a number that each step draws.
      loops: at test time.
      width: D, heads of 16.
      steps: steps of each run, 64 rows each.
      seeds: how many runs of each.
      rate: the peak of the learning rate.
    """

    runs: Path = Path("runs/more_loops")
    tasks: tuple[str, ...] = (*TASKS, TEXT)
    ways: tuple[Training, ...] = ("plain", "random")
    loops: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 7, 8)
    width: int = 64
    steps: int = 2000
    seeds: int = 3
    rate: float = 2e-3

    def __post_init__(self):
        known = (*TASKS, TEXT)
        unknown = [name for name in self.tasks if name not in known]
        if unknown:
            raise UserError(
                f"--tasks must be among {', '.join(known)}, got {', '.join(unknown)}"
            )
        if min(*self.loops, self.steps, self.seeds) < 1 or self.width % 16:
            raise UserError(
                "--loops, --steps and --seeds must be at least 1, --width a multiple "
                "of 16"
            )


def experiment(options: Options, task: str, training: Training) -> Experiment:
    """Returns a training of the recursive model."""
    vocabulary, length, data = 256, TEXT_LENGTH, _SHAKESPEARE
    if task != TEXT:
        config = TASKS[task]
        vocabulary, length = config.vocabulary, config.longest("train")
        data = TaskData(task=config)
    heads = options.width // 16
    one_layer = TransformerConfig(
        layers=LOOPS,
        width=options.width,
        attention=AttentionConfig(heads=heads, key_heads=heads, head_width=16),
        mlp=MlpConfig(kind="gelu", width=4 * options.width),
        init=UNIT_VARIANCE,
    )
    return Experiment(
        name=f"{task}_{training}",
        model=ModelConfig(
            vocabulary=vocabulary,
            stack=RelaxedRecursiveTransformerConfig(transformer=one_layer, loops=LOOPS),
        ),
        data=data,
        objective=OBJECTIVES[training],
        optimizer=AdamW(learning_rate=options.rate),
        schedule=Cosine(warmup_steps=options.steps // 10, end=0.1),
        training=TrainingConfig(
            steps=options.steps,
            batch=64,
            length=length,
            checkpoint_every=max(1, options.steps // 4),
            # Fewer loops have a higher loss.
            spikes=SpikeConfig(enabled=False),
        ),
        evaluation=EvaluationConfig(batch=64),
    )


def doubled(task: TaskConfig) -> TaskConfig:
    """Returns the task that is tested: twice as long as what was learned."""
    if isinstance(task, HashHop):
        # Long enough for the longer answer, until its pairs are known.
        deeper = replace(task, hops=2 * task.hops, length=4 * task.length)
        return replace(deeper, length=deeper.length_of(2 * task.pairs))
    return task  # S3's test is as long by its own config


def accuracy(model: Decoder, task: TaskConfig) -> float:
    """Returns the share of right tokens in the test."""
    rows = TaskDataset(config=TaskData(task=task)).loader(
        "validation", length=task.longest("validation"), batch=64
    )
    right = total = 0
    for row in rows:
        batch = Batch(jnp.asarray(row["ids"]), jnp.asarray(row["targets"]))
        counts = count_answers(model, batch)
        right, total = right + int(counts.right.sum()), total + int(counts.total.sum())
    return right / total


def text_bits(run: LoadedRun, loops: tuple[int, ...]) -> dict[str, float]:
    """Returns bits per byte of the validation text, by number of loops."""
    data = open_dataset(run.experiment.data, tokenizer=run.tokenizer)
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])

    def bits(model: Decoder) -> float:
        rows = data.loader("validation", length=TEXT_LENGTH, batch=64)
        batches = placed(iter(rows), mesh, batch=64)
        return score(model, batches, token_bytes=data.token_bytes).bits_per_byte

    return {str(n): bits(with_loops(run.model, n)) for n in loops}


def main(argv: list[str] | None = None) -> int:
    """Trains, tests with every number of loops and prints the table."""
    argv = sys.argv[1:] if argv is None else argv
    options = parse(Options, argv, prog="more_loops.py")
    console = Console(stderr=True)
    accuracies: dict[str, list[dict[str, float]]] = {}
    bits: dict[str, list[dict[str, float]]] = {}
    for seed, task, training in product(
        range(options.seeds), options.tasks, options.ways
    ):
        run = seeded(experiment(options, task, training), seed)
        console.rule(run.name)
        root = options.runs / run.name
        if train(run, root, console=console).outcome != "finished":
            console.print("stopped: the same command goes on from here")
            return 130
        loaded = load_run(root, report=console.print)
        if task == TEXT:
            tell(bits, training, seed, text_bits(loaded, options.loops))
            table = table_of(BITS, bits)
            write_atomic(options.runs / "text.md", table)
            continue
        shares = {
            str(n): accuracy(with_loops(loaded.model, n), doubled(TASKS[task]))
            for n in options.loops
        }
        tell(accuracies, f"{task}, {training}", seed, shares)
        write_atomic(options.runs / "results.md", table_of(ACCURACY, accuracies))
    for what, results in ((ACCURACY, accuracies), (BITS, bits)):
        if results:
            print(table_of(what, results), end="")
    return 0


if __name__ == "__main__":
    host.prepare()
    run_script(main)
