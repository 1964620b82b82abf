"""Kill and resume: a run killed at any moment and resumed ends with the same bits.

Reproduces no table. Trains a tiny model once without a break, with a checkpoint every
five steps; then again and again, each time killed (SIGKILL) once: in turn in the
middle of a save and at a random moment. Each is resumed by the same command, and what
it ends with is compared bit for bit with the unbroken run: parameters, optimizer state,
data-iterator state and all rows of metrics.jsonl less their timings. Expect a line a
kill and at last "20 of 20 ended bit-identical", in about three minutes on two cores;
exit code 1 if one differs. With `--into` a stopped night goes on where it was.

    python tests/trials/kill_and_resume.py --kills 200 --into kills.json
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import tyro
from jax.sharding import SingleDeviceSharding

from recurjax.data.config import Bytes, DataConfig, EmbeddedText
from recurjax.errors import UserError
from recurjax.experiment import Experiment
from recurjax.files.atomic import write_atomic
from recurjax.files.metric_rows import read_rows
from recurjax.layers.attention import AttentionConfig
from recurjax.layers.mlp import MlpConfig
from recurjax.model import ModelConfig
from recurjax.training.checkpoint import Checkpoints
from recurjax.training.checkpoint.manifest import Manifest, named, nested
from recurjax.training.config import EvaluationConfig, TrainingConfig
from recurjax.training.optimizers import AdamW, Cosine
from recurjax.training.run import RunDirectory
from recurjax.variants.transformer import TransformerConfig

STEPS, EVERY = 40, 5
TIMINGS = ("tokens_per_second", "mfu")


def config() -> Experiment:
    """Returns the experiment."""
    return Experiment(
        name="kill_and_resume",
        model=ModelConfig(
            vocabulary=257,
            tied_head=True,
            stack=TransformerConfig(
                layers=2,
                width=16,
                attention=AttentionConfig(heads=4, key_heads=2, head_width=4),
                mlp=MlpConfig(kind="swiglu", width=32),
            ),
        ),
        data=DataConfig(corpus=EmbeddedText(), tokenizer=Bytes()),
        optimizer=AdamW(learning_rate=1e-2),
        schedule=Cosine(warmup_steps=4),
        training=TrainingConfig(
            steps=STEPS, batch=16, length=64, log_every=1, checkpoint_every=EVERY
        ),
        evaluation=EvaluationConfig(every=10, batches=2),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Kills training runs and compares what they end with.

    Attributes:
      kills: how many runs are killed.
      seed: of the moments.
      directory: keeps the runs there; None: in a directory that is removed.
      into: keeps the answers there; kills that it holds are not done again.
      most: stops after so many new kills.
    """

    kills: int = 20
    seed: int = 0
    directory: Path | None = None
    into: Path | None = None
    most: int | None = None


def main(argv: list[str] | None = None) -> int:
    """Runs the experiment and returns its exit code."""
    options = tyro.cli(Options, args=argv, description=__doc__)
    with tempfile.TemporaryDirectory() as temporary:
        root = options.directory or Path(temporary)
        answers = _ends(root, options)
    mine = [answers[key] for key in _keys(options) if key in answers]
    same = sum(not differs for differs in mine)
    left = options.kills - len(mine)
    rest = f", {left} not done" if left else ""
    print(f"{same} of {len(mine)} ended bit-identical{rest}")
    return 0 if same == len(mine) else 1


class Contents(NamedTuple):
    """All that must agree between two runs.

    Attributes:
      step: of the newest checkpoint.
      arrays: of that checkpoint, as bytes, by name.
      data_states: the data iterator's state in each process.
      metrics: the rows of metrics.jsonl without timings.
    """

    step: int
    arrays: dict[str, bytes]
    data_states: list[dict[str, Any]]
    metrics: list[dict[str, Any]]


def contents(root: Path) -> Contents:
    """Reads what a run directory ended with."""
    run = RunDirectory(root)
    checkpoints = Checkpoints(run.checkpoints)
    step = checkpoints.steps()[-1]
    manifest = run.checkpoints / str(step) / "manifest" / "manifest.json"
    place = SingleDeviceSharding(jax.devices()[0])
    wanted = {
        name: jax.ShapeDtypeStruct(entry.shape, entry.dtype, sharding=place)
        for name, entry in Manifest.from_text(manifest.read_text()).arrays.items()
    }
    restored = checkpoints.restore(nested(wanted), step=step)
    checkpoints.close()
    if restored is None:
        raise UserError(f"{root} has no checkpoint")
    rows = read_rows(run.metrics).rows  # a line that was cut off is none yet
    return Contents(
        step=step,
        arrays={n: np.asarray(x).tobytes() for n, x in named(restored.tree).items()},
        data_states=restored.data_states,
        metrics=[{k: v for k, v in row.items() if k not in TIMINGS} for row in rows],
    )


def difference(got: Contents, want: Contents) -> str:
    """Names what differs; empty when nothing does."""
    fields = [
        name
        for name in ("step", "data_states", "metrics")
        if getattr(got, name) != getattr(want, name)
    ]
    names = sorted(got.arrays.keys() | want.arrays.keys())
    fields += [n for n in names if got.arrays.get(n) != want.arrays.get(n)]
    return ", ".join(fields)


def _keys(options: Options) -> list[str]:
    return [f"{options.seed}/{number}" for number in range(1, options.kills + 1)]


def _ends(root: Path, options: Options) -> dict[str, str]:
    """Returns what each kill's run ended with that the unbroken one did not."""
    answers: dict[str, str] = {}
    if options.into is not None and options.into.is_file():
        answers = json.loads(options.into.read_text(encoding="utf-8"))
    left = [key for key in _keys(options) if key not in answers][: options.most]
    if not left:
        return answers
    began = time.monotonic()
    whole = _unbroken(root)
    print(f"the unbroken run: {STEPS} steps, {time.monotonic() - began:.1f} s")
    for key in left:
        began = time.monotonic()
        number = int(key.partition("/")[2])
        name = f"killed-{number}"
        shutil.rmtree(root / name, ignore_errors=True)
        seen, moment = _kill(
            root, name, random.Random(key), while_saving=number % 2 == 1
        )
        resumed = finish(start(root, name), name)
        differs = difference(contents(root / name), whole)
        answers[key] = differs
        if options.into is not None:
            write_atomic(options.into, json.dumps(answers, indent=0) + "\n")
        print(
            f"kill {number:>2} {moment}, after step {seen} was reported; {resumed}; "
            + (f"DIFFERENT in {differs}" if differs else "bit-identical")
            + f" ({time.monotonic() - began:.1f} s)",
            flush=True,
        )
        if options.directory is None:
            shutil.rmtree(root / name)
    return answers


def _unbroken(root: Path) -> Contents:
    shutil.rmtree(root / "whole", ignore_errors=True)
    finish(start(root, "whole"), "whole")
    return contents(root / "whole")


def _kill(
    root: Path, name: str, moments: random.Random, *, while_saving: bool
) -> tuple[int, str]:
    """Starts a run and kills it; returns the last step it told of, and the moment."""
    process, saves = start(root, name), root / name / "checkpoints"
    last, seen = moments.randrange(1, STEPS), 0
    delay = moments.uniform(0.0, 0.03 if while_saving else 0.2)
    assert process.stdout is not None
    while seen < last:
        line = process.stdout.readline()
        if not line:
            break
        seen = step_of(line, seen)
    while while_saving and process.poll() is None and not _is_saving(saves):
        pass
    time.sleep(delay)
    process.kill()
    rest = process.communicate()[0].splitlines()
    for line in rest:
        seen = step_of(line, seen)
    if process.returncode == 0:
        return seen, "after its end"
    if process.returncode != -signal.SIGKILL:
        raise RuntimeError(f"{name} failed: {' / '.join(rest[-3:])}")
    return seen, "in a save" if _is_saving(saves) else "between saves"


def finish(process: subprocess.Popen[str], name: str) -> str:
    """Waits for the end and returns what was said about where it began."""
    said = process.communicate()[0].splitlines()
    if process.returncode != 0:
        raise RuntimeError(f"{name} failed: {' / '.join(said[-3:])}")
    resumed = [line for line in said if line.startswith("resuming")]
    return resumed[0] if resumed else "begun anew"


def start(root: Path, name: str) -> subprocess.Popen[str]:
    """Starts a run, or resumes it; what it says comes line by line."""
    command = [sys.executable, "-m", "recurjax", "train", __file__]
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(root / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    return subprocess.Popen(
        [*command, "--runs", str(root), "--name", name],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **cache, "PYTHONUNBUFFERED": "1"},
    )


def step_of(line: str, before: int) -> int:
    """Takes n from "step n/40  loss ..."; other lines change nothing."""
    head, _, rest = line.partition("/")
    message = head.startswith("step ") and rest.startswith(str(STEPS))
    return int(head.removeprefix("step ")) if message else before


def _is_saving(checkpoints: Path) -> bool:
    """Whether a step is being written: orbax renames its directory at the end."""
    names = os.listdir(checkpoints) if checkpoints.is_dir() else []
    return any("orbax-checkpoint-tmp" in name for name in names)


if __name__ == "__main__":
    sys.exit(main())
