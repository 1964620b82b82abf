"""Kill and prepare: data that was killed while being prepared ends with the same bytes.

Reproduces no table. Prepares one seeded corpus without a break; then again and again,
each time killed (SIGKILL) at a random moment from the first shard to the last and gone
on with by the same command. All files are compared byte for byte. Expect a line a kill
and at last "20 of 20 ended byte-identical", in about two minutes on two cores; exit
code 1 if one differs.

    python tests/trials/kill_and_prepare.py --kills 20
"""

import hashlib
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import tyro

from recurjax.data.corpora import embedded_text
from recurjax.errors import UserError

SHARD_TOKENS = 1 << 16
"""The corpus has some sixty shards of so many bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Kills preparations and compares what they end with.

    Attributes:
      kills: how many are killed.
      seed: of the corpus and of the moments.
      workers: processes that tokenize in each.
      megabytes: of the corpus.
    """

    kills: int = 20
    seed: int = 0
    workers: int = 1
    megabytes: float = 4.0

    def __post_init__(self):
        if self.kills < 1 or self.workers < 1 or not 0.5 <= self.megabytes < 1000:
            raise UserError(
                "--kills and --workers must be at least 1, --megabytes 0.5 to 1000"
            )


def main(argv: list[str] | None = None) -> int:
    """Runs the experiment and returns its exit code."""
    options = tyro.cli(Options, args=argv, description=__doc__)
    with tempfile.TemporaryDirectory() as folder:
        return _run(Path(folder), options)


def write_corpus(file: Path, options: Options) -> None:
    """Writes documents of very different lengths, one a line."""
    draw, text = random.Random(options.seed), embedded_text()
    size, wanted = 0, int(options.megabytes * 1e6)
    with file.open("w", encoding="utf-8") as lines:
        while size < wanted:
            first = draw.randrange(len(text))
            part = text[first : first + int(draw.lognormvariate(7, 1))] or "."
            lines.write(json.dumps({"text": part}) + "\n")
            size += len(part)


def contents(folder: Path) -> dict[str, str]:
    """Returns a digest of each file, by its name."""
    return {
        file.relative_to(folder).as_posix(): hashlib.sha256(
            file.read_bytes()
        ).hexdigest()
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


def _run(root: Path, options: Options) -> int:
    write_corpus(root / "corpus.jsonl", options)
    began = time.monotonic()
    _finish(_start(root, "whole", options), "whole")
    want, same = contents(root / "whole"), 0
    shards = sum(name.endswith(".arrayrecord") for name in want)
    print(f"unbroken: {shards} shards, {time.monotonic() - began:.1f} s", flush=True)
    moments = random.Random(options.seed)
    for number in range(1, options.kills + 1):
        name = f"killed-{number}"
        seen = _kill(root, name, moments.randrange(shards), options, moments)
        # A kill between the last rename and the process' end finds all done.
        if not (root / name).exists():
            _finish(_start(root, name, options), name)
        got = contents(root / name)
        differs = sorted(n for n in want.keys() | got if want.get(n) != got.get(n))
        left = list(root.glob(f".{name}*"))
        same += not differs and not left
        print(
            f"kill {number:>2} {seen}; "
            + (f"DIFFERENT in {', '.join(differs)}" if differs else "byte-identical")
            + (f", LEFT BEHIND {left}" if left else ""),
            flush=True,
        )
    print(f"{same} of {options.kills} ended byte-identical")
    return 0 if same == options.kills else 1


def _start(root: Path, name: str, options: Options) -> subprocess.Popen[str]:
    words = ["--corpus", str(root / "corpus.jsonl"), "--out", str(root / name)]
    words += ["--shard-tokens", str(SHARD_TOKENS), "--workers", str(options.workers)]
    return subprocess.Popen(
        [sys.executable, "-m", "recurjax", "data", "prepare", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _kill(
    root: Path, name: str, shard: int, options: Options, moments: random.Random
) -> str:
    """Starts a preparation, kills it when so many shards are begun; says where."""
    partial, delay = root / f".{name}.partial", moments.uniform(0, 0.1)
    process = _start(root, name, options)
    while process.poll() is None and _shards(partial) <= shard:
        time.sleep(0.001)
    time.sleep(delay)
    process.send_signal(signal.SIGKILL)
    said = process.communicate()[0]
    if process.returncode == 0:
        return "after its end"
    if process.returncode != -signal.SIGKILL:
        raise RuntimeError(f"{name} failed: {said[-300:]}")
    noted = partial / "progress.json"
    kept = len(json.loads(noted.read_text())["shards"]) if noted.is_file() else 0
    return f"in shard {_shards(partial)}, {kept} noted as whole"


def _shards(folder: Path) -> int:
    return sum(1 for _ in folder.glob("tokens-*.arrayrecord"))


def _finish(process: subprocess.Popen[str], name: str) -> None:
    said = process.communicate()[0]
    if process.returncode != 0:
        raise RuntimeError(f"{name} failed: {said[-300:]}")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        sys.exit(f"kill_and_prepare.py: {error}")
