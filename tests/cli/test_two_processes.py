"""Evaluations and texts of two processes, and of eight devices, are those of one."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from tests.cli.commands import recurjax
from tests.pairs import environment, places

REQUESTS = "FOLDER/*/rc_0shot/requests.jsonl"
TEXT = ("--text", "FOLDER/text.txt")
MEASURED = {
    "text": (
        "evaluate",
        "text",
        "RUN",
        "--text",
        "FOLDER/text.txt",
        "--positions",
        "8",
        "--batch",
        "8",
    ),
    "requests": ("evaluate", "requests", "RUN", REQUESTS, "--batch", "8"),
    "task": ("evaluate", "task", "RUN", "copy", "--limit", "8", "--batch", "8"),
}
WRITTEN = {
    "likeliest": ("--temperature", "0"),
    "drawn": ("--temperature", "0.9", "--top-k", "20", "--seed", "5"),
}
EIGHT = ("--mesh.data", "2", "--mesh.fsdp", "2", "--mesh.tensor", "2")
PAIR = ("--mesh.data", "2", "--mesh.tensor", "2")
"""Two devices a process: rows lie in both, and each row's model in both devices."""

# Commands one after the other in one process; what each prints in a file of its own.
DRIVER = """
import json, os, sys
from contextlib import redirect_stdout
from pathlib import Path
from recurjax.cli.main import main
folder, rank = Path(sys.argv[1]), os.environ["JAX_PROCESS_ID"]
for name, words in json.loads(sys.argv[2]).items():
    with (folder / f"{name}.{rank}").open("w") as out, redirect_stdout(out):
        code = main(words)
    if code:
        sys.exit(f"{name}: {code}")
"""


def commands(run, folder, mesh):
    """Returns the words of every command, by its name."""
    result = {
        name: [*(str(run) if word == "RUN" else word for word in words), *mesh]
        for name, words in MEASURED.items()
    }
    prompts = ("--prompts-file", "FOLDER/prompts.txt", "--json")
    for name, words in WRITTEN.items():
        sizes = ("--max-new-tokens", "9")
        result[name] = ["generate", str(run), *prompts, *sizes, *words, *mesh]
    return {
        name: [word.replace("FOLDER", str(folder)) for word in words]
        for name, words in result.items()
    }


def here(run, folder, mesh):
    """Returns what every command prints in this process, as JSON."""
    answers = {}
    for name, words in commands(run, folder, mesh).items():
        code, out, err = recurjax(*words)
        assert code == 0, err
        answers[name] = json.loads(out)
    return answers


def in_two_processes(run, folder, env):
    """Returns what the first of two prints; the other one prints nothing."""
    message = json.dumps(commands(run, folder, PAIR))
    pair = [
        subprocess.Popen(
            [sys.executable, "-c", DRIVER, str(folder), message],
            stderr=subprocess.PIPE,
            text=True,
            env={**env, **environment(2), **place},
        )
        for place in places()
    ]
    try:
        said = [process.communicate(timeout=200)[1] for process in pair]
    finally:
        for process in pair:
            process.kill()
    assert [process.returncode for process in pair] == [0, 0], said
    assert all(not (folder / f"{name}.1").read_text() for name in MEASURED | WRITTEN)
    # One process shows how far it is and how fast it was.
    assert "decode:" in said[0] and "decode:" not in said[1]
    return {
        name: json.loads((folder / f"{name}.0").read_text())
        for name in MEASURED | WRITTEN
    }


def figures(answer):
    """Returns the numbers of a report, by their paths in it; times left out."""
    if isinstance(answer, dict):
        parts = [(k, v) for k, v in answer.items() if k not in ("run", "timing")]
    elif isinstance(answer, list):
        parts = list(enumerate(answer))
    else:
        return {"": answer}
    return {
        f"{key}/{path}": value
        for key, part in parts
        for path, value in figures(part).items()
    }


@pytest.mark.slow
def test_two_processes_and_eight_devices_give_the_numbers_of_one(
    finished, quick_compilation, tmp_path
):
    (tmp_path / "text.txt").write_text("To be, or not to be, that is the question:\n")
    (tmp_path / "prompts.txt").write_text("To be\nA horse, a horse\nNow\n")
    folder = tmp_path / "pick" / "rc_0shot"
    folder.mkdir(parents=True)
    rows = [
        {
            "request": {"context": f"{n} and", "continuation": f" {word}"},
            "idx": choice,
            "doc_id": n,
            "label": n % 2,
        }
        for n in range(5)
        for choice, word in enumerate(["yes", "nothing"])
    ]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "requests.jsonl").write_text(lines)

    result, kept = {}, {}
    for name in ("one", "eight", "pair"):
        run = shutil.copytree(finished, tmp_path / name / "tiny")
        (run / "evaluations.jsonl").unlink(missing_ok=True)
        if name == "pair":
            result[name] = in_two_processes(run, tmp_path, quick_compilation)
        else:
            result[name] = here(run, tmp_path, EIGHT if name == "eight" else ())
        kept[name] = (run / "evaluations.jsonl").read_text().splitlines()
        assert not (run / "evaluations").exists()
        assert not os.path.lexists(run / "lock")
    for several in ("eight", "pair"):
        for command, want in result["one"].items():
            got, want = figures(result[several][command]), figures(want)
            assert got.keys() == want.keys()
            for path, value in want.items():
                if isinstance(value, float):
                    value = pytest.approx(value, rel=1e-4, abs=1e-6)
                assert got[path] == value, (several, command, path)
        # One process writes the rows, once each.
        assert len(kept[several]) == len(kept["one"])
