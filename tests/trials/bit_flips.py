"""Bit flips: no changed bit of a checkpoint is taken for the model that was trained.

Reproduces no table. Trains a tiny model for a few steps, then flips one bit at a time
of any file in its newest checkpoint, each file by its share of the bytes and the small
ones as often as the large, and restores. "Found": the checkpoint is refused, or the one
before it is restored with a sentence. "Harmless": what is restored is what was saved,
bit for bit (the flip is in padding or in a file that restoring does not read).
"Silent": anything else; exit code 1 if there is one. Answers are kept in the file
`--into`, so that a run that was stopped goes on where it was. Expect 500 flips in
about two minutes on one core, none of them silent.

    python tests/trials/bit_flips.py --flips 500 --into bit_flips.json
"""

import json
import random
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tyro
from jax.sharding import SingleDeviceSharding
from rich.console import Console

from recurjax.errors import UserError
from recurjax.files.atomic import write_atomic
from recurjax.run_table import load_experiment
from recurjax.training.checkpoint import Checkpoints
from recurjax.training.checkpoint.manifest import Manifest, named, nested
from recurjax.training.loop import train
from recurjax.training.run import RunDirectory
from recurjax.training.sweep import shortened


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What to flip.

    Attributes:
      flips: how many, each alone.
      seed: draws files and bits.
      into: the file of answers; what it holds is not done again.
      most: stops after so many new ones.
    """

    flips: int = 500
    seed: int = 0
    into: Path = Path("bit_flips.json")
    most: int | None = None


def trained(root: Path) -> RunDirectory:
    """Trains for two checkpoints and returns the run."""
    tiny = load_experiment(Path(__file__).with_name("kill_and_resume.py"))
    experiment = shortened(tiny, steps=10)
    train(experiment, root, console=Console(quiet=True))
    return RunDirectory(root)


def restored(run: RunDirectory, wanted: Any) -> tuple[int, dict[str, bytes], Any]:
    """Returns the step, the arrays as bytes and the data iterator's place."""
    checkpoints = Checkpoints(run.checkpoints)
    try:
        result = checkpoints.restore(wanted, report=lambda said: None)
    finally:
        checkpoints.close()
    if result is None:
        raise UserError("no checkpoint is left")
    arrays = {name: np.asarray(x).tobytes() for name, x in named(result.tree).items()}
    return result.step, arrays, result.data_states


def outcome(run: RunDirectory, wanted: Any, whole: tuple[int, Any, Any]) -> str:
    """Restores and returns one of found, harmless and silent."""
    try:
        got = restored(run, wanted)
    except UserError:
        return "found"
    if got == whole:
        return "harmless"
    return "found" if got[0] < whole[0] else "silent"


def draw(chosen: random.Random, files: list[Path]) -> tuple[Path, int]:
    """Draws a file and a bit: half by the bytes of files, half any file."""
    sizes = [file.stat().st_size for file in files]
    weights = sizes if chosen.random() < 0.5 else [float(size > 0) for size in sizes]
    [file] = chosen.choices(files, weights)
    return file, chosen.randrange(8 * file.stat().st_size)


def main(options: Options) -> int:
    """Flips, restores, counts."""
    answers: dict[str, str] = {}
    if options.into.is_file():
        answers = json.loads(options.into.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory(prefix="flips-") as folder:
        run = trained(Path(folder) / "run")
        step = Checkpoints(run.checkpoints).steps()[-1]
        place = SingleDeviceSharding(jax.devices()[0])
        manifest = run.checkpoints / str(step) / "manifest" / "manifest.json"
        entries = Manifest.from_text(manifest.read_text()).arrays
        wanted = nested(
            {
                name: jax.ShapeDtypeStruct(entry.shape, entry.dtype, sharding=place)
                for name, entry in entries.items()
            }
        )
        whole = restored(run, wanted)
        newest = run.checkpoints / str(step)
        files = sorted(file for file in newest.rglob("*") if file.is_file())
        new = 0
        for number in range(options.flips):
            key = f"{options.seed}/{number}"
            if key in answers:
                continue
            if new == options.most:
                break
            file, bit = draw(random.Random(key), files)
            data = file.read_bytes()
            changed = bytearray(data)
            changed[bit // 8] ^= 1 << bit % 8
            file.write_bytes(changed)
            try:
                kind = outcome(run, wanted, whole)
            finally:
                file.write_bytes(data)
            answers[key] = kind
            new += 1
            if kind == "silent":
                print(f"flip {number}: bit {bit} of {file.relative_to(newest)}")
            if new % 50 == 0:
                write_atomic(options.into, json.dumps(answers, indent=0) + "\n")
    write_atomic(options.into, json.dumps(answers, indent=0) + "\n")
    mine = [f"{options.seed}/{number}" for number in range(options.flips)]
    counts = Counter(answers[key] for key in mine if key in answers)
    print(
        f"{counts.total()} of {options.flips} flips: {counts['found']} found, "
        f"{counts['harmless']} harmless, {counts['silent']} silent"
    )
    return int(counts["silent"] > 0)


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options, description=__doc__)))
