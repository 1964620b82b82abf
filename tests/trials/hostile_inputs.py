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

Exit code 1 if a case ended in one of the last four; each is named with its number, and
`--only NUMBER` runs it alone with its traceback. Expect no such case in about a minute
for 1000, five with `--device`, which adds what needs a device and a compiled program.

    python tests/trials/hostile_inputs.py --cases 1000 --seed 0
"""

import copy
import gzip
import io
import json
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
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import tyro
from flax import nnx
from safetensors.numpy import save_file

from recurjax.cli import main as command_line
from recurjax.cli.convert import read_heads
from recurjax.cli.options import override
from recurjax.config_json import from_json, to_json
from recurjax.convert.formats.gguf_header import read_header
from recurjax.convert.formats.gguf_tokenizer import gguf_tokenizer
from recurjax.convert.formats.safetensors_files import open_directory
from recurjax.convert.hugging_face.keys import read_keys
from recurjax.convert.hugging_face.read_config import model_from_keys
from recurjax.convert.imported_run import write_run
from recurjax.data.config import Bytes, DataConfig, EmbeddedText, TextFiles
from recurjax.data.prepared import PreparedStream, prepare, read_manifest
from recurjax.data.tokenizers import ByteTokenizer, load_tokenizer
from recurjax.errors import UserError
from recurjax.evaluation.core import read_tasks
from recurjax.evaluation.requests import read_requests
from recurjax.experiment import Experiment, read_experiment, write_experiment
from recurjax.layers.attention import AttentionConfig
from recurjax.layers.mlp import MlpConfig
from recurjax.model import Decoder, ModelConfig
from recurjax.parameters import to_nested_dict
from recurjax.training.config import EvaluationConfig, TrainingConfig
from recurjax.training.optimizers import AdamW
from recurjax.training.run import RunDirectory, load_run, plot_losses
from recurjax.variants.transformer import TransformerConfig

CLASSES = ("right", "refused", "traceback", "wrong", "hang", "abort")
Expected = Literal["any", "refused", "same"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What to run.

    Attributes:
      cases: how many.
      seed: draws them.
      only: the number of one case, run in this process with its traceback.
      device: also what loads models and compiles programs.
      seconds: after which a case counts as hanging.
      gigabytes: of address space that a case may add.
    """

    cases: int = 1000
    seed: int = 0
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
    return Case("words", message, lambda: _command(*words), "refused")


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
    return Case("corpus", f"{file.name}: {spoilt.done}", lambda: _command(*words))


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
    return Case("prompts", ascii(lines)[:80], lambda: _command(*words))


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
        raise UserError(f"{file} is not a whole GGUF file: {error}") from error
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
    _command("convert", "from-hf", str(folder), str(out), "--no-check")


def _leaves(tree: Any) -> list[Any]:
    if not isinstance(tree, dict):
        return [tree]
    return [leaf for child in tree.values() for leaf in _leaves(child)]


HOST_ROOMS: tuple[Room, ...] = (
    _json_room("config", "config.json", lambda f: read_experiment(f / "config.json")),
    _json_room("hf config", "config.json", _read_hf_config),
    _json_room("tokenizer", "tokenizer.json", _read_tokenizer),
    _json_room("tokenizer", "tokenizer_config.json", _read_tokenizer),
    _json_room("bytes", "byte_tokenizer.json", _read_tokenizer),
    _json_room("symbols", "symbols.json", _read_tokenizer),
    _json_room("shards", "model.safetensors.index.json", _read_tensors),
    _bytes_room("shards", _read_tensors),
    _json_room("prepared", "manifest.json", _read_prepared),
    _bytes_room("prepared", _read_prepared, pattern="*s-0*", expected="same"),
    _bytes_room("prepared", _read_prepared, pattern="*.npy", expected="same"),
    _json_room("core", "task.json", lambda f: read_tasks(f / "task.json")),
    _json_room("heads", "heads.json", lambda f: read_heads(f / "heads.json")),
    *(_metrics, _requests),
    *(_overrides, _words, _words, _corpus, _gguf, _gguf),
)
DEVICE_ROOMS: tuple[Room, ...] = (
    _bytes_room("run", _read_run, pattern="checkpoints/**/*", expected="same"),
    _json_room("run", "config.json", _read_run),
    _json_room("hf", "config.json", _import_hf),
    _bytes_room("hf", _import_hf),
    _generate,
)


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
    heads = {"replaced": [[0, 1], []], "beta": 0.5}
    (_folder(base / "heads") / "heads.json").write_text(json.dumps(heads))


def make_models(base: Path) -> None:
    """Makes a run and a Hugging Face directory, with weights that were not trained."""
    experiment = config()
    model = Decoder(experiment.model, rngs=nnx.Rngs(0))
    write_run(base / "run", model, experiment, ByteTokenizer(bos=True), step=3)
    words = ("convert", "to-torch", str(base / "run"), str(base / "hf"))
    _command(*words, "--format", "hf", "--no-check")


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


def _command(*words: str) -> None:
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
        answer = json.dumps(outcome(run), default=lambda value: None)
        os.write(theirs, answer.encode("utf-8", "surrogatepass")[: 1 << 15])
        os._exit(0)
    os.close(theirs)
    ready, _, _ = select.select([ours], [], [], seconds)
    if not ready:
        os.kill(child, signal.SIGKILL)
    data = os.read(ours, 1 << 16) if ready else b""
    os.close(ours)
    _, status = os.waitpid(child, 0)
    if not ready:
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
    rooms = HOST_ROOMS + (DEVICE_ROOMS if options.device else ())
    limits = {"seconds": options.seconds, "gigabytes": options.gigabytes}
    with tempfile.TemporaryDirectory(prefix="hostile-") as folder:
        base = Path(folder)
        # Whatever starts threads runs in another process: they do not outlive a fork.
        _made(lambda: make_base(base), limits)
        wholes = {"prepared": _made(lambda: _read_prepared(base / "prepared"), limits)}
        if options.device:
            _made(lambda: make_models(base), limits)
            wholes["run"] = _made(lambda: _read_run(base / "run"), limits)
        counts: dict[str, Counter] = {}
        started = time.monotonic()
        numbers = range(options.cases) if options.only is None else [options.only]
        for number in numbers:
            draw = random.Random(f"{options.seed}/{number}")
            case = draw.choice(rooms)(draw, base)
            if options.only is not None:
                return _shown(case)
            result = in_a_process(case.run, **limits)
            kind, said = judged(case, result, wholes.get(case.room))
            counts.setdefault(case.room, Counter())[kind] += 1
            if kind not in CLASSES[:2]:
                print(f"case {number}: {kind}: {case.room}: {case.spoilt}")
                print(f"    {ascii(said)[:300]}", flush=True)
        _print_table(counts)
        print(f"{options.cases} cases, {time.monotonic() - started:.0f} s")
    total = sum(counts.values(), Counter())
    return int(any(total[kind] for kind in CLASSES[2:]))


def _made(run: Callable[[], Any], limits: dict[str, float]) -> Any:
    kind, said = in_a_process(run, **limits)
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
