"""Hostile inputs: damaged and malicious files and words on every reader and command.

Reproduces no table. Draws cases from a seed: a whole input (a run's config, a
tokenizer, a GGUF header, shards, a checkpoint, a corpus, words of the command line) of
which one thing is spoilt. Each runs in a forked process of its own, with bounded memory
and time, and ends in one of six classes:

    right      it was read, and where nothing may change nothing did
    refused    one sentence, exit code 2
    traceback  any other error, also where the last guard of `recurjax` told it
    wrong      read as something else, or an input that must be refused was not
    hang       not done within --seconds
    abort      the process died of a signal

Exit code 1 if a case ended in one of the last four; each is named with its number as it
ends, and `--only NUMBER` runs it alone with its traceback. With `--into` a run that was
stopped goes on where it was. Expect no such case in about two minutes for 1000, ten
with `--device`, which adds what needs a device and a compiled program.

`tests/trials/test_hostile_table.py` holds the rooms to a list of every function that
reads a file, a URL or a socket, every command and every field of a request.

    python tests/trials/hostile_inputs.py --cases 1000 --seed 0 --into hostile.json
"""

import asyncio
import copy
import gzip
import io
import json
import math
import os
import random
import resource
import select
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
import tyro
from flax import nnx
from safetensors.numpy import save_file

# As a script Python looks for modules next to it, not at the root of the tree.
sys.path.insert(0, str(Path(__file__).parents[2]))

from recurjax.cli import main as command_line
from recurjax.cli.chat import ChatSession
from recurjax.cli.convert import read_heads
from recurjax.cli.generate import _TextLines
from recurjax.cli.options import override
from recurjax.cli.serve import _read_key
from recurjax.config_json import from_json, to_json
from recurjax.convert.formats.gguf_header import read_header
from recurjax.convert.formats.gguf_tokenizer import gguf_tokenizer
from recurjax.convert.formats.safetensors_files import open_directory
from recurjax.convert.hugging_face.keys import read_keys
from recurjax.convert.hugging_face.read_config import model_from_keys
from recurjax.convert.imported_run import write_run
from recurjax.data.answers import open_answers
from recurjax.data.chat import ChatTemplate, TemplateProcess, load_template
from recurjax.data.config import (
    Bytes,
    Conversations,
    DataConfig,
    EmbeddedText,
    TextFiles,
)
from recurjax.data.prepared import PreparedStream, prepare, read_manifest
from recurjax.data.tokenizers import ByteTokenizer, load_tokenizer
from recurjax.errors import UserError
from recurjax.evaluation.core import read_tasks
from recurjax.evaluation.exit_scores import HEAD_FILE, read_exit_head
from recurjax.evaluation.journal import Journal
from recurjax.evaluation.requests import read_requests
from recurjax.evaluation.rows import Row, append_rows, read_rows
from recurjax.experiment import Experiment, read_experiment, write_experiment
from recurjax.files.atomic import write_atomic
from recurjax.files.storage import fetched_folder
from recurjax.inference.sampling import PLAIN
from recurjax.layers.attention import AttentionConfig
from recurjax.layers.mlp import MlpConfig
from recurjax.model import Decoder, ModelConfig
from recurjax.parameters import to_nested_dict
from recurjax.serving.bodies import CHAT_FIELDS, NEUTRAL
from recurjax.training.config import EvaluationConfig, TrainingConfig
from recurjax.training.optimizers import AdamW
from recurjax.training.run import RunDirectory, load_run, plot_losses
from recurjax.training.run.run_lock import Folder, Lock
from recurjax.variants.latent_recurrent_transformer import (
    LatentRecurrentTransformerConfig,
)
from recurjax.variants.transformer import TransformerConfig
from tests.variants.latent_recurrent_transformer import switches as lrt
from tests.variants.rat import switches as rat
from tests.variants.recurformer import switches as recurformer
from tests.variants.recurrent_transformer import switches as rt
from tests.variants.relaxed_recursive_transformer import switches as rrt

CLASSES = ("right", "refused", "traceback", "wrong", "hang", "abort")
Expected = Literal["any", "refused", "same"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What to run.

    Attributes:
      cases: how many.
      seed: draws them.
      into: the file of answers; what it holds is not run again.
      rooms: draws from rooms whose names hold this text.
      only: the number of one case, run in this process with its traceback.
      device: also what loads models and compiles programs.
      seconds: of processor time, after which a case counts as hanging; where it only
        waits, six times as many.
      gigabytes: of address space that a case may add.
    """

    cases: int = 1000
    seed: int = 0
    into: Path | None = None
    rooms: str = ""
    only: int | None = None
    device: bool = False
    seconds: float = 20.0
    gigabytes: float = 4.0


class Case(NamedTuple):
    """One spoilt input.

    Attributes:
      room: which kind of input.
      spoilt: what was done to it, in words.
      run: reads it; returns something that JSON can hold, or None.
      expected: "refused" where nothing else is right; "same": refused, or what the
        whole input gives.
    """

    room: str
    spoilt: str
    run: Callable[[], Any]
    expected: Expected = "any"


class Spoilt(NamedTuple):
    """New bytes, what was done, and whether they must be refused."""

    data: bytes
    done: str
    expected: Expected


VARIANTS: dict[str, ModelConfig] = {
    "RT": rt.SWITCHES["the_paper"],
    "LRT": lrt.SWITCHES[lrt.RECURRENT[0]],
    "RAT": rat.SWITCHES["rat"],
    "RRT": rrt.SWITCHES["sequence, untied, rank 2"],
    "RecurFormer": recurformer.SWITCHES["ragged_groups"],
}
HOSTILE: tuple[Any, ...] = (
    *(None, True, -1, 0, 1.5, 1e308, float("nan"), float("inf"), 1 << 40, 10**30),
    *("", "x", "a\0b", "../../etc/passwd", "\ud800", "\u202e", "é" * 300, "1", "nan"),
    *([], {}, [[]], {"type": []}, {"type": "Nothing"}, [None], {"": 1}, ["x"] * 1000),
)
WORDS = (
    *("", "-1", "0", "1.5", "1e400", "nan", "inf", "9" * 400, "None", "True", "{}"),
    *("x", "a\0b", "caf\udce9", "\ud800", "../x", "[", "--", "/dev/null", "é" * 300),
)


def config() -> Experiment:
    """Returns the experiment whose inputs are spoilt."""
    return Experiment(
        name="hostile",
        model=ModelConfig(
            vocabulary=257,
            stack=TransformerConfig(
                layers=1,
                width=16,
                attention=AttentionConfig(heads=2, key_heads=2, head_width=8),
                mlp=MlpConfig(kind="swiglu", width=24),
            ),
        ),
        data=DataConfig(corpus=EmbeddedText(), tokenizer=Bytes(), prefetch=0),
        optimizer=AdamW(learning_rate=1e-2),
        training=TrainingConfig(steps=2, batch=2, length=16),
        evaluation=EvaluationConfig(every=2, batches=1),
    )


# What is spoilt: bytes of any file, the text of a JSON file, one value in it.


def spoil_bytes(draw: random.Random, data: bytes) -> Spoilt:
    """Cuts, flips, clears or repeats a part."""
    at = draw.randrange(max(1, len(data)))
    kinds = ("cut", "flip", "zeros", "longer", "empty", "noise", "byte")
    match kind := draw.choice(kinds):
        case "cut":
            new = data[:at]
        case "flip":
            new = (
                data[:at] + bytes([data[at] ^ 1 << draw.randrange(8)]) + data[at + 1 :]
            )
        case "zeros":
            new = data[:at] + bytes(min(64, len(data) - at)) + data[at + 64 :]
        case "longer":
            new = data + data[at:]
        case "empty":
            new = b""
        case "noise":
            new = data[:at] + draw.randbytes(64) + data[at + 64 :]
        case _:
            new = data[:at] + bytes([draw.randrange(256)]) + data[at + 1 :]
    return Spoilt(new, f"{kind} at {at}", "any")


def spoil_json(draw: random.Random, data: bytes) -> Spoilt:
    """Spoils a JSON file's text, or one of its values."""
    values = json.loads(data)
    texts: tuple[tuple[str, bytes], ...] = (
        ("cut", data.rstrip()[: draw.randrange(len(data.rstrip()))]),
        ("not UTF-8", data.replace(b'"', b'"\xe9', 1)),
        ("deep lists", b"[" * 100_000),
        ("deep objects", b'{"a":' * 5000 + b"1" + b"}" * 5000),
        ("a list", b"[1]"),
        ("a number", b"9" * 5000),
        ("zeros", bytes(len(data))),
        ("a BOM", b"\xff\xfe" + data),
    )
    if draw.random() < 0.25:
        done, new = draw.choice(texts)
        return Spoilt(new, done, "refused")
    values, done = spoil_value(draw, values)
    text = json.dumps(values)
    if draw.random() < 0.1:
        text = text.replace(": 1", f": {'1' * 400}", 1)
    return Spoilt(text.encode("utf-8", "surrogatepass"), done, "any")


def spoil_value(draw: random.Random, values: Any) -> tuple[Any, str]:
    """Replaces, removes or adds one value somewhere inside."""
    values, path = copy.deepcopy(values), []
    parent: Any = None
    node: Any = values
    while isinstance(node, dict | list) and node and (not path or draw.random() < 0.8):
        keys = list(node) if isinstance(node, dict) else range(len(node))
        parent = node
        path.append(draw.choice(list(keys)))
        node = node[path[-1]]
    if parent is None:
        return draw.choice(HOSTILE), "all of it"
    where = ".".join(str(step)[:30] for step in path)
    if draw.random() < 0.15:
        parent.pop(path[-1])
        return values, f"without {where}"
    parent[path[-1]] = new = draw.choice(HOSTILE)
    return values, f"{where} is {ascii(new)[:40]}"


# The rooms: each makes a whole input in a folder and spoils it.

Room = Callable[[random.Random, Path], Case]


def _json_room(
    name: str, file: str, read: Callable[[Path], Any], *, folder: str | None = None
) -> Room:
    """Returns a room that spoils one JSON file of the base and reads it."""

    def room(draw: random.Random, base: Path) -> Case:
        here = base / "case"
        _copy(base / (folder or name), here)
        spoilt = spoil_json(draw, (here / file).read_bytes())
        (here / file).write_bytes(spoilt.data)
        return Case(name, f"{file}: {spoilt.done}", lambda: read(here), spoilt.expected)

    return room


def _bytes_room(
    name: str,
    read: Callable[[Path], Any],
    *,
    pattern: str = "*",
    folder: str | None = None,
    expected: Expected = "any",
) -> Room:
    """Returns a room that spoils the bytes of a file of the base and reads it."""

    def room(draw: random.Random, base: Path) -> Case:
        here = base / "case"
        _copy(base / (folder or name), here)
        files = sorted(f for f in here.rglob(pattern) if f.is_file())
        file = draw.choice(files)
        if draw.random() < 0.1:
            file.unlink()
            done = "removed"
        else:
            spoilt = spoil_bytes(draw, file.read_bytes())
            file.write_bytes(spoilt.data)
            done = spoilt.done
        message = f"{file.relative_to(here)}: {done}"
        return Case(name, message, lambda: read(here), expected)

    return room


def _overrides(draw: random.Random, base: Path) -> Case:
    """An option of `train`, with a value that few fields take."""
    names = [
        *("--training.steps", "--training.batch", "--training.length", "--name"),
        *("--optimizer.learning-rate", "--optimizer.b2", "--training.start-from"),
        *("--model.stack.layers", "--model.stack.width", "--model.dtype"),
        *("--model.stack.attention.heads", "--model.stack.windows", "--mesh.data"),
        *("--data.corpus.patterns", "--data.prefetch", "--evaluation.sample-prompts"),
        *("--model.vocabulary", "--model.final-norm.eps", "--unknown", "--"),
    ]
    name, value = draw.choice(names), draw.choice(WORDS)

    def run() -> None:
        result = override(config(), [name, value], prog="recurjax train")
        from_json(Experiment, to_json(result))

    return Case("overrides", f"{name} {ascii(value)[:40]}", run)


def _words(draw: random.Random, base: Path) -> Case:
    """A command with a hostile word; what it names is not there, so it must refuse."""
    nothing = str(base / "nothing")
    lines = [
        ["generate", nothing, "--prompt", "a", "--max-new-tokens"],
        *(
            ["generate", nothing, option]
            for option in ("--prompt", "--top-p", "--seed")
        ),
        *(["evaluate", nothing, o] for o in ("--batch", "--length", "--text")),
        ["evaluate", "core", nothing],
        ["evaluate", "exits", nothing],
        ["evaluate", "task", nothing],
        ["evaluate", "harness", nothing, "--tasks"],
        ["evaluate", "requests", nothing],
        ["serve", nothing, "--port"],
        ["serve", nothing, "--api-key-file"],
        ["chat", nothing, "--load"],
        ["card", nothing],
        *(["data", kind, nothing] for kind in ("show", "verify")),
        ["data", "merge", "--out", nothing],
        *(["convert", kind, nothing] for kind in ("from-hf", "from-torch", "to-torch")),
        ["convert", "from-authors", nothing, nothing, "--experiment"],
        ["train", nothing],
        ["train", str(base / "nothing.py"), "--name"],
        ["plan", nothing, "--topology"],
        ["data", "prepare", "--out", nothing, "--corpus"],
        ["data", "prepare", "--corpus", nothing, "--out", nothing, "--tokenizer"],
        ["data"],
        ["bench"],
        [],
    ]
    words = [*draw.choice(lines), draw.choice(WORDS)]
    message = " ".join(ascii(word)[:40] for word in words).replace(nothing, "NOTHING")
    return Case("words", message, lambda: run_command(*words), "refused")


def _corpus(draw: random.Random, base: Path) -> Case:
    """A corpus that is tokenized."""
    here = base / "case"
    _copy(base / "corpus", here)
    file = draw.choice(sorted(here.iterdir()))
    spoil = (
        spoil_json if file.suffix == ".jsonl" and draw.random() < 0.5 else spoil_bytes
    )
    spoilt = spoil(draw, file.read_bytes())
    file.write_bytes(spoilt.data)
    words = ["data", "prepare", "--out", str(here / "out"), "--corpus", str(file)]
    return Case("corpus", f"{file.name}: {spoilt.done}", lambda: run_command(*words))


def _metrics(draw: random.Random, base: Path) -> Case:
    """Rows of metrics.jsonl, one spoilt: the others must be there after a resume."""
    here = base / "case"
    _copy(base / "metrics", here)
    file = here / "metrics.jsonl"
    lines = file.read_bytes().splitlines()
    at = draw.randrange(len(lines))
    spoil = draw.choice((spoil_json, spoil_bytes))
    spoilt = spoil(draw, lines[at])
    file.write_bytes(b"\n".join([*lines[:at], spoilt.data, *lines[at + 1 :]]) + b"\n")
    whole = [line.decode() for line in lines[:at] + lines[at + 1 :]]

    def run() -> None:
        directory = RunDirectory(here)
        directory.rewind(1000)
        directory.was_evaluated(8)
        directory.has_no_finite_loss(8)
        plot_losses(directory.metrics, directory.loss_plot)
        kept = set(directory.metrics.read_text().splitlines())
        lost = [line for line in whole if line not in kept]
        if lost:
            raise Failed(f"{len(lost)} rows were lost that nothing was wrong with")

    return Case("metrics", f"line {at}: {spoilt.done}", run)


def _requests(draw: random.Random, base: Path) -> Case:
    """A file of ready requests, plain or gzipped, or the task's config beside it."""
    here = base / "case"
    _copy(base / "requests", here)
    folder = here / "task" / "rc"
    if draw.random() < 0.2:
        file = folder / "config.json"
        spoilt = spoil_json(draw, file.read_bytes())._replace(expected="any")
    elif draw.random() < 0.5:
        file = folder / "requests.jsonl"
        lines = file.read_bytes().splitlines()
        at = draw.randrange(len(lines))
        spoilt = spoil_json(draw, lines[at])
        data = b"\n".join([*lines[:at], spoilt.data, *lines[at + 1 :]])
        spoilt = Spoilt(data, spoilt.done, "any")
    else:
        file = draw.choice(sorted(folder.glob("requests.*")))
        spoilt = spoil_bytes(draw, file.read_bytes())
    file.write_bytes(spoilt.data)
    message = f"{file.name}: {spoilt.done}"
    pattern = str(folder / "requests.*")
    return Case("requests", message, lambda: _read_requests(pattern))


def _read_requests(pattern: str) -> None:
    for file in read_requests([pattern]):
        text = "".join(
            c.context + c.continuation for i in file.items for c in i.choices
        )
        ByteTokenizer().encode(text)


def _gguf(draw: random.Random, base: Path) -> Case:
    """A GGUF header: bytes, or one field of another type."""
    fields = dict(_GGUF)
    if draw.random() < 0.5:
        name = draw.choice(list(fields))
        if draw.random() < 0.3:
            fields.pop(name)
        else:
            fields[name] = draw.choice([3, "x", [], ["a"], [1], -1, [["a"]], "a\0b"])
        data, done = _gguf_bytes(fields), f"{name} changed"
    else:
        data, done, _ = spoil_bytes(draw, _gguf_bytes(fields))
    file = base / "case.gguf"
    file.write_bytes(data)
    return Case("gguf", done, lambda: _read_gguf(file))


def _generate(draw: random.Random, base: Path) -> Case:
    """Prompts from a file."""
    lines = [json.dumps(draw.choice(HOSTILE)) for _ in range(2)]
    data = "\n".join(lines).encode("utf-8", "surrogatepass")
    file = base / "prompts.jsonl"
    file.write_bytes(data)
    words = ["generate", str(base / "run"), "--prompts-file", str(file), "--json"]
    words += ["--max-new-tokens", draw.choice(["1", "0", "-1", "2"])]
    return Case("prompts", ascii(lines)[:80], lambda: run_command(*words))


def _lines_room(name: str, file: str, read: Callable[[Path], Any]) -> Room:
    """Returns a room that spoils one line of a file of JSON lines, or its bytes."""

    def room(draw: random.Random, base: Path) -> Case:
        here = base / "case"
        _copy(base / name, here)
        data = (here / file).read_bytes()
        if draw.random() < 0.3:
            spoilt = spoil_bytes(draw, data)
        else:
            lines = data.splitlines()
            at = draw.randrange(len(lines))
            spoilt = spoil_json(draw, lines[at])
            lines[at] = spoilt.data
            spoilt = Spoilt(b"\n".join(lines) + b"\n", spoilt.done, "any")
        (here / file).write_bytes(spoilt.data)
        return Case(name, f"{file}: {spoilt.done}", lambda: read(here))

    return room


def _exit_head(draw: random.Random, base: Path) -> Case:
    """An exit head: bytes, or arrays of another kind."""
    here = base / "case"
    _copy(base / "exit head", here)
    file = here / HEAD_FILE
    if draw.random() < 0.5:
        spoilt = spoil_bytes(draw, file.read_bytes())
        file.write_bytes(spoilt.data)
        return Case("exit head", spoilt.done, lambda: read_exit_head(here) and None)
    arrays: list[Any] = [
        *(np.zeros(shape, np.float32) for shape in ((), (2,), (2, 16), (0, 16))),
        *(np.full((2, 16), value) for value in (np.nan, np.inf, 1e300)),
        *(np.zeros((2, 16), kind) for kind in ("i8", "U3", "c16", "?", "f2", "O")),
    ]
    name, array = draw.choice(["weight", "bias"]), draw.choice(arrays)
    whole = {"weight": np.zeros((2, 16), "f4"), "bias": np.zeros(2, "f4")}
    np.savez(file, **(whole | {name: array}))
    return Case(
        "exit head",
        f"{name} is {array.dtype}{array.shape}",
        lambda: read_exit_head(here) and None,
    )


def _lock(draw: random.Random, base: Path) -> Case:
    """The lock of a run directory."""
    here = base / "case"
    _copy(base / "lock", here)
    file = here / "lock"
    kind = draw.choice(["json", "token", "bytes", "pipe", "folder", "link"])
    if kind == "json":
        file.write_bytes(spoil_json(draw, file.read_bytes()).data)
    elif kind == "token":
        tokens = ["../x", "a\0b", "x" * 300, "", "/etc/passwd", "\u202e", 1, None]
        holder = json.loads(file.read_bytes()) | {"token": draw.choice(tokens)}
        file.write_text(json.dumps(holder))
    elif kind == "bytes":
        file.write_bytes(spoil_bytes(draw, file.read_bytes()).data)
    else:
        file.unlink()
        if kind == "pipe":
            os.mkfifo(file)
        elif kind == "folder":
            file.mkdir()
        else:
            file.symlink_to("/dev/zero")

    def run() -> None:
        # Another machine's holder would be watched for 90 s: what is read decides.
        holder = Lock(Folder(here)).read()
        if holder is not None and not holder.token.isalnum():
            raise Failed(f"a token {holder.token!r}, which becomes a file's name")

    return Case("lock", kind, run)


def _new(draw: random.Random, base: Path) -> Case:
    """`recurjax new` and `experiments` with hostile names."""
    here = base / "case"
    shutil.rmtree(here, ignore_errors=True)
    here.mkdir()
    word = draw.choice(WORDS)
    source = "quickstart" if draw.random() < 0.5 else draw.choice(WORDS)
    line = draw.choice(
        (
            ["new", word, "--from", source],
            ["new", "mine", f"--from={source}"],
            ["new", "mine", "--from", "quickstart", word],
            ["experiments", word],
            ["experiments", f"rat:{word}"],
        )
    )

    def run() -> None:
        os.chdir(here)
        run_command(*line)

    return Case("new", " ".join(ascii(w)[:40] for w in line), run)


def _doctor(draw: random.Random, base: Path) -> Case:
    """`recurjax doctor` in hostile surroundings."""
    names = [
        *("RECURJAX_CACHE", "RECURJAX_COMPILERS", "HOME", "XDG_CACHE_HOME"),
        *("HF_HOME", "HF_ENDPOINT", "XLA_FLAGS", "TMPDIR", "PATH", "LC_ALL"),
    ]
    values = [word for word in WORDS if "\0" not in word and "\ud800" not in word]
    name, value = draw.choice(names), draw.choice(values)
    words = ["doctor"] if draw.random() < 0.8 else ["doctor", draw.choice(WORDS)]

    def run() -> None:
        os.environ[name] = value
        run_command(*words)

    return Case("doctor", f"{words[1:]} {name}={ascii(value)[:40]}", run)


def _parquet(draw: random.Random, base: Path) -> Case:
    """A Parquet file: bytes, or a column of another kind."""
    here = base / "case"
    _copy(base / "parquet", here)
    file = draw.choice(sorted(here.iterdir()))
    done = "whole"
    if draw.random() < 0.7:
        spoilt = spoil_bytes(draw, file.read_bytes())
        file.write_bytes(spoilt.data)
        done = spoilt.done
    words = ["data", "prepare", "--out", str(here / "out"), "--corpus", str(file)]
    return Case("parquet", f"{file.name}: {done}", lambda: run_command(*words))


_OBJECTS = (
    *("../canary", "a/../../canary", "/canary", "a//b", "a/./b", "..", "a\\..\\b"),
    *("a\0b", "\u202etxt", "é" * 200, "a b", "*.txt", "[a]", "a.txt/", "a/b.txt", " "),
)


def _bucket(draw: random.Random, base: Path) -> Case:
    """A bucket with hostile names and objects, read as corpus, run, data or folder."""
    here = base / "case"
    shutil.rmtree(here, ignore_errors=True)
    (here / "deep" / "deeper").mkdir(parents=True)
    objects = {"run/a.txt": b"To be, or not to be.\n" * 20}
    for _ in range(draw.randrange(3)):
        objects[f"run/{draw.choice(_OBJECTS)}"] = draw.randbytes(draw.randrange(40))
    if draw.random() < 0.3:
        objects["run/config.json"] = spoil_json(draw, b'{"name": "x", "a": [1]}').data
    url = "memory://bucket/run"
    out = str(here / "deep" / "deeper" / "out")
    use = draw.choice(["corpus", "glob", "folder", "run", "prepared", "tokenizer"])

    def run() -> None:
        import fsspec

        os.chdir(here / "deep" / "deeper")
        # Copies have names of their own there; anywhere else they would be outside.
        cache = here / "deep" / "cache"
        os.environ["RECURJAX_CACHE"] = str(cache)
        tempfile.tempdir = str(here / "deep")
        system: Any = fsspec.filesystem("memory")
        for name, data in objects.items():
            system.pipe_file("/bucket/object", data)
            # Past the file system's own tidying: a real store takes any name.
            system.store[f"/bucket/{name}"] = system.store.pop("/bucket/object")
        try:
            if use in ("corpus", "glob"):
                corpus = f"{url}/a.txt" if use == "corpus" else f"{url}/**"
                run_command("data", "prepare", "--out", out, "--corpus", corpus)
            elif use == "folder":
                with fetched_folder(url):
                    pass
            elif use == "run":
                run_command("card", url)
            elif use == "prepared":
                run_command("data", "show", url)
            else:
                load_tokenizer(url)
        finally:
            for canary in base.rglob("canary"):
                if cache not in canary.parents:
                    raise Failed(f"an object was written outside: {canary}")

    return Case("bucket", f"{use} of {ascii(sorted(objects))[:120]}", run)


_TALK = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "x"}]
_COMPLETION: dict[str, Any] = {
    **{"model": "m", "prompt": "ab", "n": 1, "max_tokens": 4, "echo": False},
    **{"stream": False, "stream_options": {"include_usage": True}, "stop": ["z"]},
    **{"seed": 1, "temperature": 1.0, "top_p": 0.9, "top_k": 5, "min_p": 0.1},
    **{"repetition_penalty": 1.1, "logprobs": 1, "ignore_eos": False, "exit": 0.5},
    **{"return_token_ids": True, "return_exits": True, "frequency_penalty": 0},
    **{"presence_penalty": 0, "logit_bias": {}, "user": "u", "best_of": 1},
    "suffix": "",
}
_CHAT: dict[str, Any] = {
    **{name: _COMPLETION[name] for name in _COMPLETION if name in CHAT_FIELDS},
    **{"messages": _TALK, "max_completion_tokens": 4, "logprobs": True},
    **{"top_logprobs": 1, "chat_template_kwargs": {"a": 1}},
    **{name: None for name in NEUTRAL if name in CHAT_FIELDS},
}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": _COMPLETION,
    "/v1/chat/completions": _CHAT,
    "/tokenize": {"model": "m", "prompt": "ab", "add_special_tokens": True},
    "/detokenize": {"model": "m", "tokens": [97, 98]},
}
"""A body of each route, with all the fields that it takes."""


def _request(draw: random.Random, base: Path) -> Case:
    """A body of a request: JSON or bytes; answered, or refused in OpenAI's form."""
    path = draw.choice(list(BODIES))
    body = {
        name: value
        for name, value in BODIES[path].items()
        if draw.random() < 0.7 or name in ("messages", "prompt", "tokens")
    }
    data = json.dumps(body).encode()
    spoilt = (spoil_json if draw.random() < 0.9 else spoil_bytes)(draw, data)
    return Case("request", f"{path}: {spoilt.done}", lambda: _ask(path, spoilt.data))


def _headers(draw: random.Random, base: Path) -> Case:
    """Who asks, and for what: a method, a path, headers."""
    names = [b"host", b"origin", b"content-type", b"authorization", b"content-length"]
    values = [
        *(b"localhost", b"evil.example", b"", b"\xff\xfe", b"a" * 10**5, b"[::1"),
        *(b"null", b"http://localhost", b"Bearer \xe9", b"application/json; charset=x"),
    ]
    pairs = [(draw.choice(names), draw.choice(values)) for _ in range(2)]
    paths = [*BODIES, "/", "/health", "/metrics", "/v1/models", "/tokenizer_info"]
    path = draw.choice([*paths, "/../etc/passwd", "/%00", "//", "/v1/models/x", "*"])
    method = draw.choice(["GET", "POST", "PUT", "OPTIONS", "HEAD", "TRACE", "X"])
    query = draw.choice([b"", b"model=x", b"model=m", b"model=%ff%00", b"&&=&" * 999])

    def run() -> None:
        data = json.dumps(BODIES.get(path, {})).encode()
        _ask(path, data, method=method, headers=pairs, query=query)

    return Case("headers", f"{method} {path} {ascii(pairs)[:90]}", run)


def _ask(
    path: str,
    data: bytes,
    *,
    method: str = "POST",
    headers: Sequence[tuple[bytes, bytes]] = ((b"content-type", b"application/json"),),
    query: bytes = b"",
) -> None:
    """Calls the server's application, whose model answers at once.

    Raises:
      UserError: it refused, in OpenAI's form.
      Failed: any other answer but 200.
    """
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        if receive.calls:  # pyright: ignore[reportFunctionMemberAccess]
            await asyncio.Event().wait()
        receive.calls = 1  # pyright: ignore[reportFunctionMemberAccess]
        return {"type": "http.request", "body": data, "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    receive.calls = 0  # pyright: ignore[reportFunctionMemberAccess]
    scope = {
        **{"type": "http", "method": method, "path": path, "query_string": query},
        **{"headers": list(headers), "asgi": {"version": "3.0"}, "scheme": "http"},
        **{"client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80)},
        **{"root_path": "", "http_version": "1.1", "raw_path": path.encode()},
    }
    asyncio.run(application().asgi(scope, receive, send))
    status, text = sent[0]["status"], b"".join(m.get("body", b"") for m in sent[1:])
    if status >= 500:
        raise Failed(f"status {status}: {text[:300]!r}")
    if status >= 400:
        error = json.loads(text)["error"] if method != "HEAD" else {"message": ""}
        if len(error["message"]) > 1000:
            raise Failed(f"a message of {len(error['message'])} characters")
        raise UserError(error["message"])
    for line in text.split(b"\n\n") if b"data: " in text[:6] else ():
        event = json.loads(line[6:]) if line[6:] not in (b"", b"[DONE]") else {}
        if "error" in event:
            raise Failed(str(event["error"]))


def application(*, length: int = 48, longest_token: int | None = 1) -> Any:
    """Returns an application of a model whose text is "ab".

    Args:
      length: tokens of each of its two slots.
      longest_token: bytes of text that a token may have; None: not known.
    """
    from recurjax.exits import parse_rule
    from recurjax.inference.engine import Engine, EngineConfig
    from recurjax.inference.engine.prefix_cache import PrefixCache
    from recurjax.serving.app import App, Served
    from recurjax.serving.worker import AnswerStream, News, Worker

    tokenizer = ByteTokenizer(bos=True)
    tokenizer.longest_token = longest_token
    engine: Any = SimpleNamespace(
        config=EngineConfig(
            **{"slots": 2, "length": length, "top_logprobs": 2},
            exit=parse_rule("confidence:0.5"),
        ),
        slots=2,
        active=0,
        waiting=0,
        prefix_cache=PrefixCache(0),
        counts=SimpleNamespace(read_tokens=0, reused_tokens=0, new_tokens=0, exits={}),
        _vocabulary=tokenizer.vocabulary,
        _tokenizer=tokenizer,
        _eos=tokenizer.eos,
    )
    engine._stops = lambda settings: Engine._stops(engine, settings)
    two = {"logprobs": [-1.0, -1.0], "top": [[(97, -1.0)], [(98, -1.0)]]}

    class Answering(Worker):
        def submit(
            self, requests: Any, *, scored: bool = False, continues: bool = True
        ) -> list[AnswerStream]:
            for prompt, settings in requests:
                Engine.check(engine, prompt, settings)
            self.check_count(len(requests))
            queue: Any = asyncio.Queue()
            streams = [AnswerStream(*request, queue) for request in requests]
            exits = [("a", 1), ("b", 2)]
            for stream in streams:
                self._streams.add(stream)
                news = News(
                    text="ab", tokens=[97, 98], exits=exits, reason="stop", **two
                )
                queue.put_nowait((stream, news))
            return streams

    worker = Answering(lambda: engine, most_waiting=4)
    worker.engine = engine
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}")
    return App(
        {
            "m": Served(
                name="m", worker=worker, tokenizer=tokenizer, template=template, exits=2
            )
        }
    )


_PARTS = (
    *("{{ 9 ** (9 ** 9) }}", "{{ 'a' * 10 ** 10 }}", "{{ messages }}", "{{ x }}"),
    *(
        "{% for a in range(99999) %}",
        "{% endfor %}",
        "{% if messages %}",
        "{% endif %}",
    ),
    *("{{ ''.__class__.__mro__ }}", "{{ (" * 500, ") }}" * 500, "{%", "%}", "{#", "}}"),
    *("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{{ messages[0].content }}"),
    *(
        "{{ raise_exception('no') }}",
        "{% include 'x' %}",
        "{{ 1 / 0 }}",
        "text",
        "\ud7ff",
    ),
    *("{% set ns = namespace(x='ab') %}", "{% set ns.x = ns.x ~ ns.x %}", "{{ ns.x }}"),
    *(
        "{{ messages|tojson(indent=10 ** 9) }}",
        "{{ '%999999999d' % 1 }}",
        "{{ 'é'|e }}",
    ),
    *("{{ range(10 ** 9)|list|length }}", "{% generation %}", "{% endgeneration %}"),
    *(
        "{{ strftime_now('%Y' * 999) }}",
        "{{ cycler(1).next() }}",
        "{{ lipsum(99999) }}",
    ),
)


def _template(draw: random.Random, base: Path) -> Case:
    """A chat template of pieces that are hostile, or fit together badly."""
    source = "".join(draw.choice(_PARTS) for _ in range(draw.randrange(1, 7)))
    values = {"messages": _TALK, "x": draw.choice(HOSTILE[:-1])}
    if draw.random() < 0.3:
        values["messages"] = draw.choice(HOSTILE[:-1])

    def run() -> None:
        process = TemplateProcess(seconds=1, memory=2**28, characters=10**5)
        try:
            process.render(source, [values])
        finally:
            process.close()

    return Case("template", ascii(source)[:120], run)


def _chat(draw: random.Random, base: Path) -> Case:
    """Lines that are typed into `recurjax chat`."""
    words = [draw.choice(WORDS).encode("utf-8", "surrogatepass") for _ in range(3)]
    orders = [
        b"/temperature ",
        b"/load ",
        b"/save ",
        b"/system ",
        b"/retry ",
        b"//",
        b"",
    ]
    lines = b"\n".join(draw.choice(orders) + word for word in words) + b"\n"
    here = base / "case"
    shutil.rmtree(here, ignore_errors=True)
    here.mkdir()

    def run() -> None:
        os.chdir(here)
        sys.stdin = io.TextIOWrapper(io.BytesIO(lines), encoding="utf-8")
        run_command("chat", str(base / "run"), "--max-new-tokens", "2")

    return Case("chat", ascii(lines)[:120], run)


def _surgery(draw: random.Random, base: Path) -> Case:
    """Runs, texts, heads and numbers that a conversion between variants is given."""
    here = base / "case"
    shutil.rmtree(here, ignore_errors=True)
    here.mkdir()
    (here / "text").write_bytes(spoil_bytes(draw, b"To be or not. " * 40).data)
    heads = json.dumps({"replaced": [[0], [1]], "beta": 0.5}).encode()
    (here / "heads").write_bytes(spoil_json(draw, heads).data)
    word = draw.choice(WORDS)
    kind, options = draw.choice(
        (
            ("to-recurformer", ["--heads", str(here / "heads")]),
            ("to-recurformer", ["--beta", word]),
            ("to-recurformer", ["--beta", "0.5", "--length", "8", "--samples", word]),
            ("to-recurformer", ["--beta", "1", "--text", str(here / "text")]),
            ("to-recursive", ["--loops", "2", "--rank", word]),
            ("to-recursive", ["--loops", word, "--rank", "1"]),
            ("to-transformer", [word]),
        )
    )
    run_of = draw.choice(["deep", "deep", "RAT run", "RRT run", "nothing"])
    words = ["convert", kind, str(base / run_of), str(here / "out"), *options]
    message = f"{kind} {run_of} {[ascii(o)[-40:] for o in options]}"
    return Case("surgery", message, lambda: run_command(*words))


def _read_config(folder: Path) -> Any:
    experiment = read_experiment(folder / "config.json")
    experiment.model.stack.flops_per_token(16)


def _read_talk(folder: Path) -> None:
    talk = ChatSession(
        *(None, ByteTokenizer(), ChatTemplate("{{ messages }}")),  # pyright: ignore
        **{"sampling": PLAIN, "max_new_tokens": None, "seed": 0},
    )
    talk.load(folder / "talk.json")


def _read_template(folder: Path) -> None:
    file = folder / "template.jinja"
    tokenizer = ByteTokenizer()
    template = load_template(folder, file=file, tokenizer=tokenizer)
    assert template is not None
    template.encode([dict(message) for message in _TALK], tokenizer)


def _read_journal(folder: Path) -> None:
    journal = Journal(folder / "answers.jsonl")
    journal.add([("new", 1)])
    again = Journal(folder / "answers.jsonl")
    if len(again) != len(journal) or again["new"] != 1:
        raise Failed("an answer that was kept is not there")


def _read_texts(folder: Path) -> None:
    lines = _TextLines(folder / "texts.jsonl", ["a", "b"], {"seed": 0})
    lines.add(1, {"prompt": "b", "text": "", "tokens": [], "finish_reason": "stop"})
    _TextLines(folder / "texts.jsonl", ["a", "b"], {"seed": 0})


def _read_talks(folder: Path) -> None:
    corpus = Conversations(
        patterns=(str(folder / "talks.jsonl"),), template=str(folder / "t.jinja")
    )
    data = DataConfig(corpus=corpus, tokenizer=Bytes(), prefetch=0)
    open_answers(data, ByteTokenizer(bos=True))


def _show_card(folder: Path) -> None:
    run_command("card", str(folder))


def _read_prepared(folder: Path) -> Any:
    stream = PreparedStream(folder, read_manifest(folder))
    [tokens] = stream.read([(0, stream.tokens)])
    return [int(tokens.sum()), len(tokens), stream.starts.tolist()]


def _read_tensors(folder: Path) -> Any:
    source = open_directory(folder)
    for name, info in source.tensors.items():
        if info.dtype in ("F32", "BF16", "F16", "F64"):
            source.read(name)


def _read_tokenizer(folder: Path) -> Any:
    tokenizer = load_tokenizer(folder)
    ids = tokenizer.encode("0 1" if (folder / "symbols.json").is_file() else "ab a")
    tokenizer.decode(ids)
    stream = tokenizer.stream()
    stream.push(ids.tolist())
    stream.finish()


def _read_hf_config(folder: Path) -> Any:
    model_from_keys(read_keys(folder / "config.json"), where="config.json")


def _read_gguf(file: Path) -> None:
    try:
        fields, _ = read_header(file)
    except (ValueError, OSError, RecursionError) as error:  # as `open_gguf` takes them
        raise UserError(f"{file} is not a complete GGUF file: {error}") from error
    gguf_tokenizer(fields, where=str(file))


def _read_run(folder: Path) -> Any:
    loaded = load_run(folder, report=lambda text: None)
    leaves = np.concatenate(
        [np.asarray(leaf).ravel() for leaf in _leaves(to_nested_dict(loaded.model))]
    )
    return [loaded.step, float(leaves.sum()), float(np.abs(leaves).sum())]


def _import_hf(folder: Path) -> Any:
    out = folder.parent / "imported"
    shutil.rmtree(out, ignore_errors=True)
    run_command("convert", "from-hf", str(folder), str(out), "--no-check")


def _leaves(tree: Any) -> list[Any]:
    if not isinstance(tree, dict):
        return [tree]
    return [leaf for child in tree.values() for leaf in _leaves(child)]


HOST_ROOMS: dict[str, Room] = {
    "config": _json_room("config", "config.json", _read_config),
    **{
        f"{name} config": _json_room(name, "config.json", _read_config)
        for name in VARIANTS
    },
    "hf config": _json_room("hf config", "config.json", _read_hf_config),
    "tokenizer": _json_room("tokenizer", "tokenizer.json", _read_tokenizer),
    "tokenizer config": _json_room(
        "tokenizer", "tokenizer_config.json", _read_tokenizer
    ),
    "bytes": _json_room("bytes", "byte_tokenizer.json", _read_tokenizer),
    "symbols": _json_room("symbols", "symbols.json", _read_tokenizer),
    "index": _json_room("shards", "model.safetensors.index.json", _read_tensors),
    "shards": _bytes_room("shards", _read_tensors),
    "manifest": _json_room("prepared", "manifest.json", _read_prepared),
    "prepared": _bytes_room(
        "prepared", _read_prepared, pattern="*s-0*", expected="same"
    ),
    "arrays": _bytes_room("prepared", _read_prepared, pattern="*.npy", expected="same"),
    "core": _json_room("core", "task.json", lambda f: read_tasks(f / "task.json")),
    "heads": _json_room("heads", "heads.json", lambda f: read_heads(f / "heads.json")),
    "talk": _json_room("talk", "talk.json", _read_talk),
    "template file": _bytes_room("template", _read_template),
    "exit head": _exit_head,
    "lock": _lock,
    "key": _bytes_room("key", lambda f: _read_key(f / "key")),
    "rows": _lines_room("rows", "evaluations.jsonl", lambda f: read_rows(f)),
    "journal": _lines_room("journal", "answers.jsonl", _read_journal),
    "texts": _lines_room("texts", "texts.jsonl", _read_texts),
    "talks": _lines_room("talks", "talks.jsonl", _read_talks),
    "metrics": _metrics,
    "requests": _requests,
    "overrides": _overrides,
    "words": _words,
    "new": _new,
    "doctor": _doctor,
    "corpus": _corpus,
    "parquet": _parquet,
    "bucket": _bucket,
    "gguf": _gguf,
    "request": _request,
    "headers": _headers,
    "template": _template,
}
"""Rooms that need no device, by their names."""
DEVICE_ROOMS: dict[str, Room] = {
    "run": _bytes_room("run", _read_run, pattern="checkpoints/**/*", expected="same"),
    "run config": _json_room("run", "config.json", _read_run),
    **{
        f"{name} run": _json_room(
            f"{name} run", "config.json", _read_run, folder=f"{name} run"
        )
        for name in VARIANTS
    },
    "hf keys": _json_room("hf", "config.json", _import_hf),
    "hf": _bytes_room("hf", _import_hf),
    "prompts": _generate,
    "chat": _chat,
    "surgery": _surgery,
    "card": _json_room("run", "config.json", _show_card),
}
"""Rooms that load models or compile programs."""


# The whole inputs.


def make_base(base: Path) -> None:
    """Makes whole inputs that no device is needed for."""
    write_experiment(config(), _folder(base / "config") / "config.json")
    keys = {
        **{"model_type": "qwen2", "vocab_size": 64, "hidden_size": 16},
        **{"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24},
        **{"rms_norm_eps": 1e-6, "rope_theta": 1e4, "use_sliding_window": True},
        **{"sliding_window": 4, "max_window_layers": 0, "layer_types": None},
        **{"tie_word_embeddings": True, "max_position_embeddings": 32},
        **{"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    }
    file = _folder(base / "hf config") / "config.json"
    file.write_text(json.dumps(keys | {"layer_types": ["sliding_attention"]}))
    tokenizer = gguf_tokenizer(_GGUF, where="base")
    tokenizer.save(_folder(base / "tokenizer"))
    ByteTokenizer(bos=True).save(_folder(base / "bytes"))
    text = json.dumps({"type": "symbols", "vocabulary": 9})
    (_folder(base / "symbols") / "symbols.json").write_text(text)
    shards = _folder(base / "shards")
    homes = {}
    for number in range(2):
        name, tensor = f"model-{number}.safetensors", f"layers.{number}.weight"
        save_file({tensor: np.ones((3, 4), np.float32)}, shards / name)
        homes[tensor] = name
    index = {"metadata": {"total_size": 96}, "weight_map": homes}
    (shards / "model.safetensors.index.json").write_text(json.dumps(index))
    corpus = _folder(base / "corpus")
    (corpus / "a.txt").write_text("To be, or not to be: that is the question.\n" * 40)
    row = {"text": "caf\u00e9 \U0001f600", "id": 1, "more": [1, {"a": None}]}
    (corpus / "b.jsonl").write_text(json.dumps(row) + "\n")
    texts = TextFiles(patterns=(str(corpus / "a.txt"),))
    prepare(texts, ByteTokenizer(bos=True), base / "prepared", shard_tokens=1 << 16)
    task = {
        **{"label": "t", "kind": "multiple_choice", "fewshot": 0, "delimiter": " "},
        **{"baseline": 25.0},
        "items": [{"query": "a", "choices": ["b", "c"], "gold": 0}],
    }
    (_folder(base / "core") / "task.json").write_text(json.dumps(task))
    rows = [
        {"step": step, "kind": kind, "loss": 3.0 / step, "skipped": 0.0}
        for step in range(1, 13)
        for kind in ("train", "validation")[: 1 + (step % 4 == 0)]
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (_folder(base / "metrics") / "metrics.jsonl").write_text(text)
    asked = [
        {
            **{"request_type": "loglikelihood", "doc_id": item, "idx": choice},
            **{"label": 1, "doc": {"id": item}},
            "request": {"context": f"Question {item}:", "continuation": f" {choice}"},
        }
        for item in (0, 1, 1_000_000, 1_000_001)
        for choice in range(2)
    ]
    folder = _folder(base / "requests" / "task" / "rc")
    text = "".join(json.dumps(row) + "\n" for row in asked)
    (folder / "requests.jsonl").write_text(text)
    (folder / "requests.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    message = json.dumps({"task_config": {"version": 1, "more": [{"a": None}]}})
    (folder / "config.json").write_text(message)
    for name, stack in VARIANTS.items():
        folder = _folder(base / name)
        write_experiment(_variant(name, stack), folder / "config.json")
    (_folder(base / "talk") / "talk.json").write_text(json.dumps({"messages": _TALK}))
    text = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    (_folder(base / "template") / "template.jinja").write_text(text)
    arrays = {"weight": np.zeros((2, 16), "f4"), "bias": np.zeros(2, "f4")}
    np.savez(_folder(base / "exit head") / HEAD_FILE, **arrays)
    holder = {
        **{"host": "here", "pid": 1, "since": "2026", "machine": "m", "born": "1"},
        "token": "abc",
    }
    (_folder(base / "lock") / "lock").write_text(json.dumps(holder))
    (_folder(base / "key") / "key").write_text("s3cret\n")
    append_rows(
        _folder(base / "rows"),
        [Row(step=1, task="t", metric="m", value=0.5, n=2, settings={"a": 1})] * 3,
    )
    text = "".join(json.dumps([f"key{n}", {"a": n}]) + "\n" for n in range(4))
    (_folder(base / "journal") / "answers.jsonl").write_text(text)
    lines = _TextLines(_folder(base / "texts") / "texts.jsonl", ["a", "b"], {"seed": 0})
    line = {"text": "x", "tokens": [1], "finish_reason": "length"}
    lines.add(0, {"prompt": "a", **line})
    answer = {"role": "assistant", "content": "y"}
    row = json.dumps({"messages": [*_TALK, answer]}) + "\n"
    (_folder(base / "talks") / "talks.jsonl").write_text(row * 3)
    (base / "talks" / "t.jinja").write_text(
        "{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    _make_parquet(_folder(base / "parquet"))
    heads = {"replaced": [[0, 1], []], "beta": 0.5}
    (_folder(base / "heads") / "heads.json").write_text(json.dumps(heads))


def make_models(base: Path) -> None:
    """Makes a run and a Hugging Face directory, with weights that were not trained."""
    experiment = config()
    model = Decoder(experiment.model, rngs=nnx.Rngs(0))
    write_run(base / "run", model, experiment, ByteTokenizer(bos=True), step=3)
    deep = replace(
        experiment,
        model=replace(
            experiment.model, stack=replace(experiment.model.stack, layers=2)
        ),
    )
    variants = {f"{name} run": _variant(name, m) for name, m in VARIANTS.items()}
    for name, each in {"deep": deep, **variants}.items():
        model = Decoder(each.model, rngs=nnx.Rngs(0))
        write_run(base / name, model, each, ByteTokenizer(bos=True), step=3)
    words = ("convert", "to-torch", str(base / "run"), str(base / "hf"))
    run_command(*words, "--format", "hf", "--no-check")


def _variant(name: str, model: ModelConfig) -> Experiment:
    stack = model.stack
    if isinstance(
        stack, LatentRecurrentTransformerConfig
    ):  # it embeds tokens itself, padded to fours
        stack = replace(stack, vocabulary=260, length=16)
    model = replace(model, vocabulary=257, stack=stack)
    return replace(config(), name=name, model=model)


def _make_parquet(folder: Path) -> None:
    import pyarrow as pa  # pyright: ignore[reportMissingImports]
    import pyarrow.parquet as pq  # pyright: ignore[reportMissingImports]

    texts = ["To be, or not to be.", "caf\u00e9 \U0001f600", ""] * 9
    columns = {
        "text": pa.array(texts),
        "null": pa.array([*texts, None]),
        "dictionary": pa.array(texts).dictionary_encode(),
        "large": pa.array(texts, pa.large_string()),
        "binary": pa.array([b"\xff\xfe"] * 5),
        "numbers": pa.array([1, 2, 3]),
        "lists": pa.array([["a"], ["b", None]]),
        "nulls": pa.array([None, None]),
        "empty": pa.array([], pa.string()),
    }
    for name, column in columns.items():
        pq.write_table(pa.table({"text": column}), folder / f"{name}.parquet")
    other = pa.table({"other": columns["text"]})
    pq.write_table(other, folder / "no_text.parquet")


_GGUF: dict[str, Any] = {
    "general.architecture": "llama",
    "general.alignment": 32,
    "llama.block_count": 1,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": ["a", "b", "ab", "\u0120", "<s>"],
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.token_type": [1, 1, 1, 1, 3],
    "tokenizer.ggml.bos_token_id": 4,
    "tokenizer.ggml.eos_token_id": 4,
}


def _gguf_bytes(fields: dict[str, Any]) -> bytes:
    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value.encode())) + value.encode()

    def typed(value: Any) -> tuple[int, bytes]:
        if isinstance(value, list):
            inner = typed(value[0])[0] if value else 4
            body = b"".join(typed(item)[1] for item in value)
            return 9, struct.pack("<IQ", inner, len(value)) + body
        if isinstance(value, str):
            return 8, text(value)
        return 5, struct.pack("<i", value)

    parts = []
    for name, value in fields.items():
        kind, body = typed(value)
        parts.append(text(name) + struct.pack("<I", kind) + body)
    tensor = text("output_norm.weight") + struct.pack("<IQIQ", 1, 8, 0, 0)
    head = struct.pack("<IQQ", 3, 1, len(fields))
    return b"GGUF" + head + b"".join(parts) + tensor + bytes(128)


def _folder(path: Path) -> Path:
    path.mkdir(parents=True)
    return path


def _copy(source: Path, to: Path) -> None:
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(source, to)


# Running a case in a process of its own.


class Failed(Exception):
    """A command ended with another code than 0 and 2, or said more than a sentence."""


def run_command(*words: str) -> None:
    """Runs `recurjax WORDS` here.

    Raises:
      UserError: it refused, in one sentence.
      Failed: it did not know what happened.
    """
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = command_line.main(list(words))
    said = err.getvalue().strip().rpartition("\n")[2]
    if code == 2 and (said.startswith("recurjax: ") or not said):
        raise UserError(said)
    if code != 0:
        raise Failed(f"exit code {code}: {said}")


def outcome(run: Callable[[], Any]) -> tuple[str, Any]:
    """Returns a class and what was read or said."""
    try:
        return "right", run()
    except UserError as error:
        return "refused", str(error)
    except BaseException as error:
        return "traceback", f"{type(error).__name__}: {error}"


def in_a_process(
    run: Callable[[], Any], *, seconds: float, gigabytes: float
) -> tuple[str, Any]:
    """Returns the outcome of a forked process, killed when its time is over."""
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(ours)
        quiet = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(quiet, descriptor)
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * os.sysconf("SC_PAGE_SIZE") + int(gigabytes * 2**30)
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        # The kernel ends it with SIGXCPU: on a busy machine a clock would be unjust.
        limit = math.ceil(seconds)
        resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 5))
        answer = json.dumps(outcome(run), default=lambda value: None)
        os.write(theirs, answer.encode("utf-8", "surrogatepass")[: 1 << 15])
        os._exit(0)
    os.close(theirs)
    ready, _, _ = select.select([ours], [], [], 6 * seconds)
    if not ready:
        os.kill(child, signal.SIGKILL)
    data = os.read(ours, 1 << 16) if ready else b""
    os.close(ours)
    _, status = os.waitpid(child, 0)
    over = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU
    if not ready or over:
        return "hang", f"not done in {seconds} s"
    if not data:
        return "abort", f"status {status}"
    try:
        kind, said = json.loads(data)
    except ValueError:
        return "refused", "a very long sentence"
    return kind, said


def judged(case: Case, matches: tuple[str, Any], whole: Any) -> tuple[str, Any]:
    """Returns the class, after what the case expects."""
    kind, said = matches
    if kind == "refused" and "\n" in str(said).strip():
        return "traceback", f"more than a sentence: {said}"
    if kind == "right" and case.expected == "refused":
        return "wrong", "was not refused"
    if kind == "right" and case.expected == "same" and said != whole:
        return "wrong", f"read {ascii(said)[:80]}"
    return matches


def main(options: Options) -> int:
    """Runs the cases and prints the table."""
    # jax warns of forks; none of our processes has a device when it forks.
    warnings.filterwarnings("ignore", message=".*fork.*")
    for name in command_line.COMMANDS:
        import_module(command_line.module_of(name))
    named = HOST_ROOMS | (DEVICE_ROOMS if options.device else {})
    rooms = [room for name, room in named.items() if options.rooms in name]
    limits = {"seconds": options.seconds, "gigabytes": options.gigabytes}
    with tempfile.TemporaryDirectory(prefix="hostile-") as folder:
        base = Path(folder)
        # Of all cases: each compiles what the one before it did.
        jax.config.update("jax_compilation_cache_dir", str(base / "programs"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        # Whatever starts threads runs in another process: they do not outlive a fork.
        _made(lambda: make_base(base), limits)
        wholes = {"prepared": _made(lambda: _read_prepared(base / "prepared"), limits)}
        if options.device:
            _made(lambda: make_models(base), limits)
            wholes["run"] = _made(lambda: _read_run(base / "run"), limits)
        counts: dict[str, Counter] = {}
        answers = _answers(options.into)
        started = time.monotonic()
        numbers = range(options.cases) if options.only is None else [options.only]
        for number in numbers:
            key = f"{options.seed}/{number}"
            if options.only is None and key in answers:
                room, kind = answers[key]
                counts.setdefault(room, Counter())[kind] += 1
                continue
            draw = random.Random(key)
            case = draw.choice(rooms)(draw, base)
            if options.only is not None:
                return _shown(case)
            result = in_a_process(case.run, **limits)
            kind, said = judged(case, result, wholes.get(case.room))
            counts.setdefault(case.room, Counter())[kind] += 1
            answers[key] = [case.room, kind]
            if kind not in CLASSES[:2]:
                print(f"case {number}: {kind}: {case.room}: {case.spoilt}")
                print(f"    {ascii(said)[:300]}", flush=True)
            if len(answers) % 100 == 0:
                _keep(options.into, answers)
                seconds = time.monotonic() - started
                print(f"{number + 1} of {options.cases}, {seconds:.0f} s", flush=True)
        _keep(options.into, answers)
        _print_table(counts)
        print(f"{options.cases} cases, {time.monotonic() - started:.0f} s")
    total = sum(counts.values(), Counter())
    return int(any(total[kind] for kind in CLASSES[2:]))


def _answers(file: Path | None) -> dict[str, Any]:
    return {} if file is None or not file.is_file() else json.loads(file.read_bytes())


def _keep(file: Path | None, answers: dict[str, Any]) -> None:
    if file is not None:
        write_atomic(file, json.dumps(answers) + "\n")


def _made(run: Callable[[], Any], limits: dict[str, float]) -> Any:
    kind, said = in_a_process(run, **limits | {"seconds": 600.0})
    if kind != "right":
        raise SystemExit(f"the whole inputs could not be made: {kind}: {said}")
    return said


def _shown(case: Case) -> int:
    print(f"{case.room}: {case.spoilt}; expected: {case.expected}")
    try:
        print("right:", case.run())
    except BaseException:
        traceback.print_exc()
    return 0


def _print_table(counts: dict[str, Counter]) -> None:
    rows = [*sorted(counts.items()), ("all", sum(counts.values(), Counter()))]
    print(f"{'input':<12}" + "".join(f"{kind:>11}" for kind in CLASSES))
    for room, row in rows:
        print(f"{room:<12}" + "".join(f"{row[kind]:>11}" for kind in CLASSES))


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options, description=__doc__)))
