"""A disk that becomes full at any point of a save: always the same one sentence."""

import re
import subprocess
import sys

import pytest

from recurjax.errors import UserError
from recurjax.training.checkpoint import Checkpoints
from tests.source_tree import ROOT
from tests.training.checkpoint.cases import state


@pytest.mark.slow
@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.sweep)])
def test_wherever_a_full_disk_is_noticed_the_sentence_is_the_same(every, tmp_path):
    apart = ["unshare", "--mount", "--map-root-user"]
    try:
        mount = ["mount", "-t", "tmpfs", "none", str(tmp_path)]
        subprocess.run([*apart, *mount], capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"cannot mount a small file system of its own: {error}")
    done = subprocess.run(
        [
            *apart,
            sys.executable,
            "-W",
            "error",
            "-m",
            __name__,
            str(tmp_path),
            f"{every}",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert (done.returncode, done.stderr) == (0, "")
    messages = [line for line in done.stdout.splitlines() if line != "enough"]
    sentence = (
        rf"UserError: checkpoint \d could not be written to {tmp_path}: no space left"
        r" on the device; (the last good checkpoint is \d|there is no earlier.*)\."
    )
    assert len(messages) > 15 // every
    assert [line for line in messages if not re.fullmatch(sentence, line)] == []


def save_on_disks_of_many_sizes(directory, every):
    """Names what saving twice raised, for each number of files that the disk holds.

    Args:
      every: how far apart the numbers are.
    """
    for files in range(4, 46, every):
        disk = f"size=900k,nr_inodes={files}"
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", disk, "none", directory], check=True
        )
        try:
            save_two_steps(directory)
            print("enough")
        except (UserError, OSError) as error:
            print(f"{type(error).__name__}: {error}")
        subprocess.run(["umount", directory], check=True)


def save_two_steps(directory):
    checkpoints = Checkpoints(directory)
    try:
        for step in (1, 2):
            checkpoints.save(step, state(step), data_state={})
    finally:
        checkpoints.close()


if __name__ == "__main__":
    save_on_disks_of_many_sizes(sys.argv[1], int(sys.argv[2]))
