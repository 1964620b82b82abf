"""Agreement of a run's processes on what only one of them saw or decided.

Each function must be called by every process at the same point. With one process
nothing is sent.
"""

import json
from collections.abc import Callable
from typing import TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from recurjax.errors import UserError
from recurjax.machine.process_group import SharedError

T = TypeVar("T")


def every_process(text: str) -> list[str]:
    """Gives each process the text of all, in the order of process index."""
    if jax.process_count() == 1:
        return [text]
    data = np.frombuffer(text.encode(), np.uint8)
    # All must send arrays of one shape: first the lengths, then texts padded to the
    # longest.
    sizes = multihost_utils.process_allgather(np.int32(data.size))
    row = np.zeros(max(1, int(np.max(sizes))), np.uint8)
    row[: data.size] = data
    rows = multihost_utils.process_allgather(row)
    return [bytes(row[:size]).decode() for row, size in zip(rows, sizes, strict=True)]


def first_process(action: Callable[[], T]) -> T:
    """Runs `action` in process 0 only and gives every process what it returned.

    Args:
      action: returns a JSON value. A file system shows the same directory to several
        processes at different times: what is decided by looking goes through here.

    Raises:
      SharedError: in every process, when the action raised a UserError. Any other
        exception is process 0's alone, and ends the others through
        `recurjax.machine.process_group`.
    """
    # A value and not an array: sizes differ, and the answer is small.
    if jax.process_count() == 1:
        return action()
    answer = {}
    if jax.process_index() == 0:
        try:
            answer = {"value": action()}
        except UserError as error:
            answer = {"error": str(error)}
    # The error travels instead of the value, so that nobody waits for a process that
    # has left.
    answer = json.loads(every_process(json.dumps(answer))[0])
    if "error" in answer:
        raise SharedError(answer["error"])
    return answer["value"]


def each_process(action: Callable[[], T]) -> T:
    """Runs `action` in every process, where each has files of its own.

    Args:
      action: returns a JSON value, the same in all.

    Raises:
      SharedError: in every process, when the action raised a UserError in one of them,
        or returned different values.
    """
    if jax.process_count() == 1:
        return action()
    try:
        answer = {"value": action()}
    except UserError as error:
        answer = {"error": str(error)}
    answers = [json.loads(text) for text in every_process(json.dumps(answer))]
    for other in answers:
        if "error" in other:
            raise SharedError(other["error"])
    if any(other != answers[0] for other in answers):
        raise SharedError(
            "the processes read different copies of the run, "
            f"{answers[0]['value']} and "
            f"{next(a['value'] for a in answers if a != answers[0])}: restart "
            "all of them"
        )
    return answers[0]["value"]
