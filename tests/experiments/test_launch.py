"""The launch scripts: syntax, what they would run, two processes under one entry."""

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.pairs import environment, places
from tests.source_tree import ROOT

LAUNCH = ROOT / "experiments" / "launch"
SCRIPTS = sorted(LAUNCH.glob("*.sh"))
PLACE = {
    **{"PROJECT": "p", "ZONE": "us-west4-a", "NAME": "rat", "TYPE": "v5litepod-16"},
    **{"BUCKET": "gs://b", "REPOSITORY": "https://host/recurjax.git"},
    **{"CLUSTER": "c", "IMAGE": "image:1", "RUNS": "/runs", "SLURM_JOB_ID": "7"},
}
STOPPED = 75


def bash(script: Path, *words: str, **env: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        ["bash", str(script), *words],
        env={"PATH": os.environ["PATH"], **env},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_script_parses_and_says_how_it_is_used(script):
    assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0
    assert os.access(script, os.X_OK)
    done = bash(script, **PLACE)
    assert done.returncode == 2 and "usage: " in done.stderr


@pytest.mark.parametrize(
    ("name", "said"),
    [("tpu_vm.sh", "ZONE: such as us-west4-a"), ("xpk.sh", "CLUSTER: name of the")],
)
def test_a_place_that_is_not_named_is_asked_for(name, said):
    done = bash(LAUNCH / name, "e.py", PROJECT="p")
    assert done.returncode != 0 and said in done.stderr


@pytest.mark.parametrize("name", ["slurm.sh", "tpu_vm.sh", "xpk.sh"])
def test_a_dry_run_shows_the_command_with_its_words_kept(name):
    words = ("e.py", "--mesh.fsdp", "16", "--name", "two words")
    done = bash(LAUNCH / name, *words, DRY_RUN="1", **PLACE)
    assert done.returncode == 0, done.stderr
    commands = [shlex.split(line) for line in done.stdout.splitlines()]
    inner = [word for command in commands for word in command if "entry.sh" in word]
    assert len(inner) == 1
    if name == "slurm.sh":
        (command,) = commands
        assert command[0] == "srun" and command[-5:] == list(words)
        return
    run = shlex.split(inner[0].replace("\\\n", " "))
    start = run.index("train")
    assert run[start + 1 : start + 6] == list(words)
    assert run[start + 6] == "--runs"
    assert [c[0] for c in commands] == (["xpk"] if name == "xpk.sh" else ["gcloud"] * 5)


def test_entry_hands_on_the_commands_own_code_and_its_words(tmp_path):
    entry, log = LAUNCH / "entry.sh", tmp_path / "logs" / "a.log"
    script = "echo finished at step 3: $1; exit $2"
    assert bash(entry, str(log), "bash", "-c", script, "x", "a b", "0").returncode == 0
    assert bash(entry, str(log), "bash", "-c", script, "x", "c", "3").returncode == 3
    assert log.read_text() == "finished at step 3: a b\nfinished at step 3: c\n"
    stopped = "echo terminated at step 3, saved in runs"
    assert bash(entry, str(log), "bash", "-c", stopped).returncode == STOPPED
    # What an earlier try said does not count.
    assert bash(entry, str(log), "true").returncode == 0


def test_entry_waits_for_a_command_that_saves_after_sigterm(tmp_path):
    log = tmp_path / "a.log"
    script = (
        "trap 'sleep 0.3; echo terminated at step 5, saved; exit 0' TERM; "
        "echo up; while true; do sleep 0.05; done"
    )
    with subprocess.Popen(
        [str(LAUNCH / "entry.sh"), str(log), "bash", "-c", script],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "up\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == STOPPED
    assert log.read_text().endswith("terminated at step 5, saved\n")


@pytest.mark.slow
def test_two_processes_under_the_entry_stop_save_and_resume(
    quick_compilation, tmp_path
):
    file = tmp_path / "constant.py"  # with a schedule that lets a run be lengthened
    file.write_text(
        "from dataclasses import replace\n"
        "from recurjax.training.optimizers import Constant\n"
        "from tests.training.tiny_experiment import config as tiny\n"
        "def config():\n    return replace(tiny(), schedule=Constant())\n"
    )

    def start(steps: int) -> list[subprocess.Popen]:
        command = [sys.executable, "-m", "recurjax", "train"]
        command += [str(file), "--runs", str(tmp_path)]
        command += ["--training.steps", str(steps), "--evaluation.every", "0"]
        command += ["--training.checkpoint-every", "20"]
        return [
            subprocess.Popen(
                [str(LAUNCH / "entry.sh"), str(tmp_path / f"{rank}.log"), *command],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd=ROOT,
                env=quick_compilation | environment(2) | place,
            )
            for rank, place in enumerate(places())
        ]

    def codes(pair: list[subprocess.Popen]) -> list[int]:
        try:
            return [process.wait(timeout=200) for process in pair]
        finally:
            for process in pair:
                process.kill()

    pair = start(10**6)
    saved, limit = tmp_path / "tiny" / "checkpoints" / "20", time.monotonic() + 150
    while not saved.is_dir() and time.monotonic() < limit and pair[0].poll() is None:
        time.sleep(0.1)
    pair[1].send_signal(signal.SIGTERM)
    assert codes(pair) == [STOPPED, STOPPED], (tmp_path / "0.log").read_text()
    log = (tmp_path / "0.log").read_text()
    reached = int(log.split("terminated at step ")[1].split(",")[0])
    assert codes(start(reached + 5)) == [0, 0], (tmp_path / "0.log").read_text()
    log = (tmp_path / "0.log").read_text()
    assert f"resuming at step {reached} of {reached + 5}" in log
    assert f"finished at step {reached + 5}" in log
