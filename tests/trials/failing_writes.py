"""A fault at every write: afterwards there is the old state or the new one.

Reproduces no table. Runs a command once and counts what it writes below its folder:
files opened to write, writes, forced writes, renames, links and folders. Then, for
every k, it runs the command again with the k-th of them failing as on a full disk (of
a write one half arrives), and asks three things: the command ends with one sentence or
as if nothing had been; what a reader then finds is what was there before, or what a
whole run leaves; and the same command again, without a fault, ends with the same.

A shim in C, `failing_writes.c`, fails the calls, also those of native libraries; it
needs Linux and a C compiler. Each run is a forked process. Answers are kept in the file
`--into`, so that a run that was stopped goes on where it was. Expect a line for each
fault that loses something, and a line a command: "prepare: 61 of 61 faults lose
nothing". Exit code 1 if one does. A fault takes a tenth of a second (prepare) to ten
seconds (train) on one core.

    python tests/trials/failing_writes.py --into failing_writes.json
"""

import ctypes
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import tyro

# As a script Python looks for modules next to it, not at the root of the tree.
sys.path.insert(0, str(Path(__file__).parents[2]))

from recurjax.errors import UserError  # noqa: E402
from recurjax.evaluation.rows import newest, read_rows  # noqa: E402
from recurjax.files.atomic import write_atomic  # noqa: E402
from tests.trials.hostile_inputs import (  # noqa: E402
    in_a_process,
    make_base,
    make_models,
    run_command,
)

_SHIM = "RECURJAX_FAILING_WRITES"
_LIMITS = {"seconds": 600.0, "gigabytes": 16.0}
_TINY = str(Path(__file__).with_name("kill_and_resume.py"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Which faults to try.

    Attributes:
      commands: of `COMMANDS`.
      into: the file of answers; what it holds is not tried again.
      most: stops after this number of new faults.
    """

    commands: tuple[str, ...] = ("prepare", "convert", "generate", "evaluate", "train")
    into: Path = Path("failing_writes.json")
    most: int | None = None


class Command(NamedTuple):
    """A command that writes.

    Attributes:
      words: of it, from the folder of inputs and its own, which is empty before.
      state: what a reader finds in that folder, as JSON; None: nothing.
      begin: what is in the folder before.
    """

    words: Callable[[Path, Path], list[str]]
    state: Callable[[Path], Any]
    begin: Callable[[Path, Path], Any] = lambda base, here: None


def _files(folder: Path) -> dict[str, str] | None:
    """Returns the checksums of a folder's files; None: there is no such folder."""
    if not folder.exists():
        return None
    return {
        file.relative_to(folder).as_posix(): hashlib.sha256(
            file.read_bytes()
        ).hexdigest()
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


def _texts(here: Path) -> list[Any]:
    file = here / "texts.jsonl"
    data = file.read_bytes() if file.exists() else b""
    # The line that a fault cut off is no text yet.
    lines = data[: data.rfind(b"\n") + 1].splitlines()
    return sorted((json.loads(line) for line in lines), key=lambda line: line["number"])


def _rows(here: Path) -> list[Any]:
    rows = newest(read_rows(here / "run"))
    return sorted([row.task, row.metric, row.value, row.n] for row in rows)


def _trained(here: Path) -> Any:
    """Returns what a run ended with; None: it has no checkpoint yet."""
    from tests.trials.kill_and_resume import contents

    if not any((here / "run" / "checkpoints").glob("[0-9]*")):
        return None
    found = contents(here / "run")
    arrays = {n: hashlib.sha256(x).hexdigest() for n, x in found.arrays.items()}
    return [found.step, arrays, found.data_states, found.metrics]


def _evaluated_before(base: Path, here: Path) -> None:
    shutil.copytree(base / "run", here / "run")
    shutil.copy(base / "rows" / "evaluations.jsonl", here / "run")


COMMANDS: dict[str, Command] = {
    "prepare": Command(
        words=lambda base, here: [
            *("data", "prepare", "--corpus", str(base / "corpus" / "a.txt")),
            *("--out", str(here / "out"), "--shard-tokens", "1024"),
        ],
        state=lambda here: _files(here / "out"),
    ),
    "convert": Command(
        words=lambda base, here: [
            *("convert", "to-torch", str(base / "run"), str(here / "out")),
            *("--format", "hf", "--no-check"),
        ],
        state=lambda here: _files(here / "out"),
    ),
    "generate": Command(
        words=lambda base, here: [
            *("generate", str(base / "run"), "--prompts-file", str(here / "prompts")),
            *("--json-lines", str(here / "texts.jsonl"), "--max-new-tokens", "2"),
        ],
        state=_texts,
        begin=lambda base, here: (here / "prompts").write_text("a\nb\n"),
    ),
    "evaluate": Command(
        words=lambda base, here: [
            *("evaluate", str(here / "run"), "--length", "8", "--tokens", "64"),
            *("--text", str(base / "corpus" / "a.txt"), "--batch", "8"),
        ],
        state=_rows,
        begin=_evaluated_before,
    ),
    "train": Command(
        words=lambda base, here: [
            *("train", _TINY, "--runs", str(here), "--name", "run"),
            *("--training.steps", "4", "--training.checkpoint-every", "2"),
        ],
        state=_trained,
    ),
}


def main(options: Options) -> int:
    """Tries what has no answer yet."""
    with tempfile.TemporaryDirectory(prefix="failing-") as folder:
        root = Path(folder)
        if _SHIM not in os.environ:
            return _in_a_process_with_the_shim(root)
        answers: dict[str, Any] = {}
        if options.into.is_file():
            answers = json.loads(options.into.read_text(encoding="utf-8"))
        base = root / "base"
        _must(partial(make_base, base))
        if set(options.commands) != {"prepare"}:
            _must(partial(make_models, base))
        left = options.most
        for name in options.commands:
            left = _try_all(name, base, root, options.into, answers, left)
    mine = [answers.get(name, {}) for name in options.commands]
    return int(any(said for faults in mine for said in faults.get("lost", {}).values()))


def _try_all(
    name: str,
    base: Path,
    root: Path,
    into: Path,
    answers: dict[str, Any],
    left: int | None,
) -> int | None:
    """Tries the faults of one command; returns how many may still be tried."""
    command, here = COMMANDS[name], root / "here"
    old = _begin(command, base, here)
    total = _must(lambda: _run(command, base, here, number=0))
    new = _must(lambda: command.state(here))
    faults = answers.setdefault(name, {"total": total, "lost": {}})
    for number in range(1, total + 1):
        if left == 0 or str(number) in faults["lost"]:
            continue
        said = _try(command, base, here, number, old, new)
        faults["lost"][str(number)] = said
        if said:
            print(f"{name}, write {number} of {total}: {said[:300]}", flush=True)
        left = None if left is None else left - 1
        # After each, so that a stop loses at most one.
        write_atomic(into, json.dumps(answers, indent=1) + "\n")
    done = [said for number, said in faults["lost"].items() if int(number) <= total]
    lost = sum(bool(said) for said in done)
    print(
        f"{name}: {len(done) - lost} of {len(done)} faults lose nothing, {total} writes"
    )
    return left


def _try(
    command: Command, base: Path, here: Path, number: int, old: Any, new: Any
) -> str:
    """Returns what a fault loses; empty: nothing."""
    _begin(command, base, here)
    kind, said = in_a_process(
        lambda: _run(command, base, here, number=number), **_LIMITS
    )
    # A fault that a library swallows may leave everything as it must be.
    if kind not in ("right", "refused"):
        return f"it ended with {kind}: {said}"
    state = _read(command, here)
    if not _is_between(state, old, new):
        return f"then there is neither the old nor the new: {str(state)[:200]}"
    if kind == "right" and state != new:
        return "it said nothing, and what it should have written is not there"
    kind, said = in_a_process(lambda: _run(command, base, here, number=0), **_LIMITS)
    if kind == "refused" and state == new:
        return ""  # all was there, and the command does not write over it
    if kind != "right":
        return f"the same command again ended with {kind}: {said}"
    return (
        "" if _read(command, here) == new else "the same command again ends otherwise"
    )


def _is_between(state: Any, old: Any, new: Any) -> bool:
    """Whether a state is the old one, the new one, or on the way by complete steps."""
    if state in (old, new):
        return True
    # Texts that have ended, of those that will; a checkpoint before the last.
    if isinstance(state, list) and isinstance(new, list) and state and new:
        if isinstance(state[0], int):
            rows = new[3][: len(state[3])]
            return state[0] < new[0] and state[3] == rows
        return all(item in new for item in state)
    return state == []


def _begin(command: Command, base: Path, here: Path) -> Any:
    shutil.rmtree(here, ignore_errors=True)
    here.mkdir()
    command.begin(base, here)
    return _read(command, here)


def _run(command: Command, base: Path, here: Path, *, number: int) -> int:
    """Runs a command with the write of this number failing; 0: none does.

    Returns:
      How many writes there were.
    """
    shim = ctypes.CDLL(os.environ[_SHIM])
    shim.arm(str(here).encode(), number)
    try:
        run_command(*command.words(base, here))
        return shim.counted()
    finally:
        shim.arm(b"", -1)


def _read(command: Command, here: Path) -> Any:
    """Returns what a reader finds; a refusal or an error is a state that never fits."""
    kind, state = in_a_process(lambda: command.state(here), **_LIMITS)
    return state if kind == "right" else f"{kind}: {state}"


def _must(run: Callable[[], Any]) -> Any:
    kind, said = in_a_process(run, **_LIMITS)
    if kind != "right":
        raise SystemExit(f"without a fault it ended with {kind}: {said}")
    return said


def _in_a_process_with_the_shim(root: Path) -> int:
    source, library = Path(__file__).with_suffix(".c"), root / "failing_writes.so"
    compiler = shutil.which("cc")
    if compiler is None or sys.platform != "linux":
        raise UserError("failing_writes.py needs Linux and a C compiler, cc")
    words = [compiler, "-O1", "-fPIC", "-shared", "-o", str(library), str(source)]
    subprocess.run([*words, "-ldl"], check=True)
    settings = {
        **{"LD_PRELOAD": str(library), _SHIM: str(library)},
        # Of all processes: nobody counts what is written there.
        "JAX_COMPILATION_CACHE_DIR": str(root / "programs"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    argv = [sys.executable, __file__, *sys.argv[1:]]
    return subprocess.run(argv, env={**os.environ, **settings}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options, description=__doc__)))
