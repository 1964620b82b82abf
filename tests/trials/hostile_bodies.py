"""Hostile bodies: what a request may cost that a server refuses.

Reproduces no table. Draws bodies from a seed, from one byte to 16 MiB: noise, JSON that
is deep, long, repeated or of numbers without end, prompts and messages beyond every
limit. Each goes to the server's application, in parts as from a network, next to a task
that asks for a turn of the event loop again and again. A slot has 4,096 tokens of up to
128 bytes, as with `serve` and a tokenizer of a pretrained model. It prints five
figures: the statuses; processor time in the event loop and in all threads, for each
body; how many that are refused take more than 50 ms of it; the longest turn of the
event loop, which is what any other request waits; and by how much the memory of the
process grows after the first five hundred, when the pool's threads have all read
large ones.

Exit code 1 if a status is 500 or more, a turn takes more than 100 ms, or memory grows
by more than 64 MiB. Answers are kept in the file `--into`, so that a run that was
stopped goes on where it was.

    python tests/trials/hostile_bodies.py --bodies 10000 --into bodies.json
"""

import asyncio
import ctypes
import gc
import json
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tyro

# As a script Python looks for modules next to it, not at the root of the tree.
sys.path.insert(0, str(Path(__file__).parents[2]))

from recurjax.files.atomic import write_atomic  # noqa: E402
from recurjax.serving.app import LARGEST_BODY  # noqa: E402
from tests.trials.hostile_inputs import BODIES, application  # noqa: E402

_PART = 2**16
_WARM = 500
_TURN_MS, _GROWTH = 100.0, 64 * 2**20
_REFUSED_MS = 50.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What to send.

    Attributes:
      bodies: how many.
      seed: draws them.
      into: the file of answers; what it holds is not sent again.
      most: stops after this number of new ones.
    """

    bodies: int = 10_000
    seed: int = 0
    into: Path = Path("hostile_bodies.json")
    most: int | None = None


class Answer(NamedTuple):
    """What became of a body.

    Attributes:
      kind: how it was made.
      size: in bytes.
      status: of the answer.
      loop_ms, total_ms: processor time in the event loop, and in all threads.
      turn_ms: the longest turn of the event loop, likewise.
    """

    kind: str
    size: int
    status: int
    loop_ms: float
    total_ms: float
    turn_ms: float


def body(draw: random.Random) -> tuple[str, str, bytes]:
    """Draws a route and a body of at most a little more than the largest size."""
    path = draw.choice(list(BODIES))
    size = int(2 ** draw.uniform(0, 24.01))
    long = "prompt" if "prompt" in BODIES[path] else "messages"
    unit = draw.choice(
        ['"a"', "1", "1.5", '"\\u00e9"', "[]", "{}", "null", "-1", "1e9"]
    )
    inner = {
        "text": '"' + "a" * size + '"',
        "escapes": '"' + "\\u00e9" * (size // 6) + '"',
        "list": "[" + ",".join([unit] * (size // (len(unit) + 1))) + "]",
        "deep": "[" * size,
        "closed": "[" * (size // 2) + "]" * (size // 2),
        "digits": "9" * size,
        "object": "{" + ",".join(f'"{n}":{unit}' for n in range(size // 12)) + "}",
        "spaces": " " * size + "1",
    }
    kind = draw.choice(["noise", "zeros", *inner])
    if kind == "noise":
        return path, kind, draw.randbytes(min(size, 2**22))
    if kind == "zeros":
        return path, kind, bytes(size)
    field = draw.choice([long, "tokens", "n", "stop", "model", "logit_bias", "unknown"])
    n = draw.choice(["", ',"n":64', ',"stream":true'])
    return path, f"{kind} in {field}", f'{{"{field}":{inner[kind]}{n}}}'.encode()


async def send(app: Any, path: str, data: bytes) -> tuple[int, float, float]:
    """Returns the status, milliseconds in the loop and the longest turn of it."""
    parts = [data[at : at + _PART] for at in range(0, len(data), _PART)]
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        if not parts:
            await asyncio.Event().wait()
        await asyncio.sleep(0)
        part = parts.pop(0)
        return {"type": "http.request", "body": part, "more_body": bool(parts)}

    async def keep(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {
        **{"type": "http", "method": "POST", "path": path, "query_string": b""},
        **{"headers": [(b"content-type", b"application/json")], "root_path": ""},
    }
    work = asyncio.ensure_future(app.asgi(scope, receive, keep))
    began = turn = time.thread_time()
    longest = 0.0
    while not work.done():
        await asyncio.sleep(0)
        now = time.thread_time()
        longest, turn = max(longest, now - turn), now
        # Not in a turn of the loop: else this thread would only ask for turns.
        await asyncio.wait([work], timeout=0.001)
        turn = time.thread_time()
    work.result()
    return sent[0]["status"], 1e3 * (time.thread_time() - began), 1e3 * longest


def resident() -> int:
    """Returns the bytes of memory that this process has.

    Without those that are free and that the C library has not returned yet: a pool's
    threads leave between 0 and 100 MiB of them, whatever the number of bodies.
    """
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


async def run(options: Options, answers: dict[str, Any]) -> int:
    """Sends what has no answer yet; returns by how much memory grew."""
    app, new, before = application(length=4096, longest_token=None), 0, 0
    gc.collect()
    gc.freeze()  # as a worker does
    for number in range(options.bodies):
        key = f"{options.seed}/{number}"
        if key in answers:
            continue
        if new == options.most:
            break
        path, kind, data = body(random.Random(key))
        began = time.process_time()
        status, loop_ms, turn_ms = await send(app, path, data)
        total_ms = 1e3 * (time.process_time() - began)
        answers[key] = Answer(kind, len(data), status, loop_ms, total_ms, turn_ms)
        new += 1
        if new == _WARM:
            before = resident()
        if new % 500 == 0:
            write_atomic(options.into, json.dumps(answers) + "\n")
            print(f"{number + 1} of {options.bodies}", flush=True)
    write_atomic(options.into, json.dumps(answers) + "\n")
    return resident() - before if before else 0


def main(options: Options) -> int:
    """Sends the bodies and prints the table."""
    answers: dict[str, Any] = {}
    if options.into.is_file():
        answers = json.loads(options.into.read_text(encoding="utf-8"))
    growth = asyncio.run(run(options, answers))
    mine = [Answer(*row) for key, row in answers.items() if _is_of(key, options)]
    print(
        f"{'size':>10}{'bodies':>8}{'refused':>8}"
        f"{'loop ms':>16}{'all ms':>16}{'turn':>8}"
    )
    for least in (0, 2**10, 2**16, 2**20, 2**22):
        rows = [row for row in mine if least <= row.size < _next(least)]
        if not rows:
            continue
        figures = [
            f"{np.median(times):7.1f} {max(times):7.1f}"
            for times in ([r.loop_ms for r in rows], [r.total_ms for r in rows])
        ]
        refused = sum(400 <= row.status < 500 for row in rows)
        longest = max(row.turn_ms for row in rows)
        print(
            f"{least:>10}{len(rows):>8}{refused:>8} {'  '.join(figures)} {longest:7.1f}"
        )
    refused = [row for row in mine if 400 <= row.status < 500]
    costly = [row for row in refused if row.total_ms > _REFUSED_MS]
    print(f"{len(costly)} of {len(refused)} refused took more than {_REFUSED_MS:g} ms")
    failed = [row for row in mine if row.status >= 500]
    slow = [row for row in mine if row.turn_ms > _TURN_MS]
    print(f"{len(mine)} bodies; memory grew by {growth / 2**20:.0f} MiB")
    for row in [*failed, *slow][:20]:
        print(row)
    return int(bool(failed or slow or growth > _GROWTH))


def _is_of(key: str, options: Options) -> bool:
    seed, _, number = key.partition("/")
    return seed == str(options.seed) and int(number) < options.bodies


def _next(least: int) -> int:
    sizes = [0, 2**10, 2**16, 2**20, 2**22, 2 * LARGEST_BODY]
    return sizes[sizes.index(least) + 1]


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options, description=__doc__)))
