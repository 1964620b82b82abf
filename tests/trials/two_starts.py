"""Two starts: a run that is started twice at once trains once, and loses nothing.

Reproduces no table. Trains the tiny model of kill_and_resume.py once without a break;
then again and again with a second process that is started in the same directory at a
random moment, as a job that was queued twice; the first is held still (SIGSTOP) until
the second has ended, for it would be done before the other has imported jax. The second
must end with code 2 and a sentence that names the first. In every other trial the first
is then killed (SIGKILL) and the command given once more, which takes the dead process'
lock over. What a run ends with is compared bit for bit with the unbroken one:
parameters, optimizer, data, all rows of metrics.jsonl. Expect a line a trial and at
last "10 of 10 ended as one start does", in about five minutes on two cores; exit code 1
if one does not.

    python tests/trials/two_starts.py --trials 10
"""

import random
import re
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import tyro
from kill_and_resume import (
    STEPS,
    Contents,
    contents,
    difference,
    finish,
    start,
    step_of,
)

from recurjax.errors import UserError


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Starts runs twice and compares what they end with.

    Attributes:
      trials: how many runs are started twice.
      seed: of the moments.
    """

    trials: int = 10
    seed: int = 0

    def __post_init__(self):
        if self.trials < 1:
            raise UserError("--trials must be at least 1")


def main(argv: list[str] | None = None) -> int:
    """Runs the experiment and returns its exit code."""
    options = tyro.cli(Options, args=argv, description=__doc__)
    with tempfile.TemporaryDirectory() as folder:
        root, good = Path(folder), 0
        finish(start(root, "whole"), "whole")
        whole = contents(root / "whole")
        for number in range(1, options.trials + 1):
            moments = random.Random(f"{options.seed}/{number}")
            wrong, message = trial(
                root, f"twice-{number}", moments, whole, kills=number % 2 == 0
            )
            good += not wrong
            print(f"trial {number:>2} {message}; {wrong or 'as one start'}", flush=True)
    print(f"{good} of {options.trials} ended as one start does")
    return 0 if good == options.trials else 1


def trial(
    root: Path, name: str, moments: random.Random, whole: Contents, *, kills: bool
) -> tuple[str, str]:
    """Starts a run twice; returns what is wrong with it, and what happened."""
    last, seen = moments.randrange(1, STEPS // 2), 0
    first = start(root, name)
    assert first.stdout is not None
    while seen < last and (line := first.stdout.readline()):
        seen = step_of(line, seen)
    first.send_signal(signal.SIGSTOP)
    try:
        wrong = refusal(start(root, name), first.pid)
    finally:
        first.send_signal(signal.SIGCONT)
    message = f"second start after step {seen}"
    if kills and first.poll() is None:
        first.send_signal(signal.SIGKILL)
        first.communicate()
        message += f", first killed, {finish(start(root, name), name)}"
    else:
        finish(first, name)
    differs = difference(contents(root / name), whole)
    faults = [wrong, f"DIFFERENT in {differs}" if differs else ""]
    return "; ".join(filter(None, faults)), message


def refusal(second: subprocess.Popen[str], pid: int) -> str:
    """Says what was wrong with how the second start ended; nothing: it was refused."""
    said = second.communicate()[0].strip()
    names = re.search(rf"^recurjax: .* is in use by process {pid} on ", said, re.M)
    if second.returncode == 2 and names:
        return ""
    return f"THE SECOND ended with {second.returncode}: {said[-200:]}"


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        sys.exit(f"two_starts.py: {error}")
