"""Times the training loop against the bare compiled step, and the data pipeline."""

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from recurjax.bench.timing import BenchRow, in_turns, row
from recurjax.data.config import Bytes, DataConfig, EmbeddedText
from recurjax.experiment import Experiment
from recurjax.layers.attention import AttentionConfig
from recurjax.layers.mlp import MlpConfig
from recurjax.model import ModelConfig
from recurjax.training.config import EvaluationConfig, TrainingConfig
from recurjax.training.loop import train
from recurjax.training.optimizers import AdamW
from recurjax.training.session import Session
from recurjax.variants.transformer import TransformerConfig

_ROUNDS = 5


def rows(*, large: bool, dtype: str, repeats: int) -> Iterator[BenchRow]:
    """Measures loop, bare step and pipeline in turns, so that noise meets all alike.

    The loop is `train` without evaluations or checkpoints inside the timed part; the
    bare step is the session's compiled step on one batch again and again.
    """
    experiment = _experiment(repeats, dtype, wide=large)
    shape = _shape(experiment)
    tokens = experiment.training.tokens_per_step
    loop, bare = [], []
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(_ROUNDS):
            # A directory for each turn: a run that finds a checkpoint would resume it.
            loop.append(_loop(experiment, Path(folder) / f"loop{turn}"))
            bare.append(_bare(experiment, Path(folder) / f"bare{turn}"))
        pipeline = _pipeline(experiment, Path(folder) / "data")
    figure = partial(row, shape=shape, dtype=dtype, tokens=tokens)
    yield figure("trainer/loop/train_step", times=loop)
    yield figure("trainer/bare/train_step", times=bare)
    yield figure("trainer/data/next_batch", times=pipeline)


def summary(rows: list[BenchRow]) -> str:
    """Returns what the rows of this file mean, in two lines."""
    times = {row.name: row for row in rows}
    loop = times["trainer/loop/train_step"]
    bare = times["trainer/bare/train_step"]
    data = times["trainer/data/next_batch"]
    cost = 100 * (loop.min_ms / bare.min_ms - 1)
    ratio = data.tokens_per_s / loop.tokens_per_s
    return (
        f"overhead of the loop over the bare step: {cost:.1f} % (of the minima)\n"
        f"data pipeline alone: {ratio:,.0f} times the training rate"
    )


def steps_in_turns(
    runs: Mapping[str, Experiment], *, repeats: int
) -> dict[str, list[float]]:
    """Returns seconds of several runs' steps, each on one batch, measured in turns."""

    def steps(session: Session) -> Callable[[], Any]:
        held, batch = [session.start(lambda _: None)], session.next_batch()

        def advance() -> Any:
            held[0], metrics = session.step_on(held[0], batch)
            return metrics

        return advance

    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        calls = {}
        for name, run in runs.items():
            session = Session(run, Path(folder) / name)
            stack.callback(session.close)
            calls[name] = steps(session)
        return in_turns(calls, repeats=repeats)


def _loop(experiment: Experiment, root: Path) -> float:
    """Returns seconds a step of `train`, after the first one."""
    result = train(experiment, root, console=Console(quiet=True))
    # `train_seconds` begins after the first step, which compiles.
    return result.train_seconds / (result.step - 1)


def _bare(experiment: Experiment, root: Path) -> float:
    """Returns seconds a step of the compiled program alone, on one batch."""
    session = Session(experiment, root)
    try:
        state = session.start(print)
        # One batch for all steps: the pipeline is measured by itself below.
        batch = session.next_batch()
        state, metrics = session.step_on(state, batch)
        # The first step compiles; its end is waited for so that it is not timed.
        jax.block_until_ready(metrics)
        steps = experiment.training.steps - 1
        began = time.perf_counter()
        for _ in range(steps):
            state, metrics = session.step_on(state, batch)
        # Steps are queued without a wait, as the loop does: one wait at the end.
        jax.block_until_ready((state, metrics))
        return (time.perf_counter() - began) / steps
    finally:
        session.close()


def _pipeline(experiment: Experiment, root: Path) -> list[float]:
    """Returns seconds per batch, from the loader to the devices, in five stretches."""
    session = Session(experiment, root)
    try:
        # The first batch starts the loader's threads and encodes the corpus.
        jax.block_until_ready(session.next_batch())
        stretches = []
        for _ in range(_ROUNDS):
            began = time.perf_counter()
            # 200 batches at a time: one alone takes less than the clock can tell from
            # noise.
            for _ in range(200):
                batch = session.next_batch()
            jax.block_until_ready(batch)
            stretches.append((time.perf_counter() - began) / 200)
        return stretches
    finally:
        session.close()


def _experiment(steps: int, dtype: str, *, wide: bool) -> Experiment:
    width = 768 if wide else 256
    return Experiment(
        name="bench",
        model=ModelConfig(
            vocabulary=257,
            dtype="bfloat16" if dtype == "bfloat16" else "float32",
            stack=TransformerConfig(
                layers=12 if wide else 4,
                width=width,
                attention=AttentionConfig(
                    heads=width // 128, key_heads=width // 128, head_width=128
                ),
                mlp=MlpConfig(kind="relu_squared", width=4 * width),
            ),
        ),
        data=DataConfig(corpus=EmbeddedText(), tokenizer=Bytes()),
        optimizer=AdamW(learning_rate=1e-3),
        training=TrainingConfig(
            # One step more than is timed, for the first one compiles; no checkpoint
            # falls into the timed part.
            steps=steps + 1,
            batch=8,
            length=256,
            checkpoint_every=1_000_000,
        ),
        evaluation=EvaluationConfig(batches=1),
    )


def _shape(experiment: Experiment) -> dict[str, int]:
    model, training = experiment.model, experiment.training
    return {
        "B": training.batch,
        "T": training.length,
        "D": model.stack.width,
        "L": model.stack.layers,
        "V": model.vocabulary,
    }
