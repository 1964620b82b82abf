"""Block sizes tried on this device, and the file in which the best ones are kept.

`pallas_kernels/measured_sizes.py` reads the file.
"""

import sys
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from jax.errors import JaxRuntimeError

from pallas_kernels import measured_sizes, target
from recurjax.errors import UserError
from recurjax.files.atomic import write_atomic
from recurjax.files.json_files import json_text, read_json_object

Sizes = Mapping[str, int]
Candidate = Callable[[], Any]
_NOISE = 0.02
"""By how much a candidate must be faster: two runs of one program differ by less."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tuned:
    """The best sizes found for a shape: an entry of the file.

    Attributes:
      op, backend, device: whose.
      shape: the class of calls that they are for.
      sizes: by name; what is not named the heuristic chose best.
      ms, heuristic_ms: the best time of theirs and of the heuristic's sizes, in the
        round in which the last of them was settled.
      jax: its version.
    """

    op: str
    backend: str
    device: str
    shape: Mapping[str, Any]
    sizes: Sizes
    ms: float
    heuristic_ms: float
    jax: str


def tune_one_by_one(
    *,
    op: str,
    backend: str,
    shape: Mapping[str, Any],
    candidates: Mapping[str, Sequence[int]],
    make: Callable[[Sizes], Candidate],
    time: Callable[[Mapping[Hashable, Candidate]], Mapping[Hashable, list[float]]],
) -> Tuned:
    """Settles one size after the other, from what the heuristic chooses.

    Each is held against the best so far, and the last best against the heuristic: what
    is not faster there by more than noise is not kept.

    Args:
      candidates: what to try, by size, in this order.
      make: compiles a call with sizes; raises where the device cannot have them.
      time: seconds of calls by name, taken in turns.
    """
    best: dict[str, int] = {}
    heuristic = running = make({})
    for name, tried in candidates.items():
        calls: dict[Hashable, Candidate] = {None: running}
        for size in tried:
            try:
                calls[size] = make({**best, name: size})
            except (NotImplementedError, ValueError, JaxRuntimeError) as error:
                # A refusal, or a compiler's: a smaller device runs fewer of them.
                reason = str(error).splitlines()[0]
                print(f"{op}: {name}={size} cannot be: {reason}", file=sys.stderr)
        times = {size: min(took) for size, took in time(calls).items()}
        fastest = min(times, key=lambda size: times[size])
        told = ", ".join(
            f"{'as it is' if size is None else size} {1e3 * took:,.2f} ms"
            for size, took in times.items()
        )
        print(f"{op}/{backend}: {name}: {told}", file=sys.stderr)
        if fastest is not None and times[fastest] < (1 - _NOISE) * times[None]:
            best[name] = fastest  # pyright: ignore[reportArgumentType]
            running = calls[fastest]
    last = time({"heuristic": heuristic, "best": running})
    if not best or min(last["best"]) > (1 - _NOISE) * min(last["heuristic"]):
        best, last = {}, {**last, "best": last["heuristic"]}
    return Tuned(
        op=op,
        backend=backend,
        device=target.current().kind,
        shape=shape,
        sizes=best,
        ms=1e3 * min(last["best"]),
        heuristic_ms=1e3 * min(last["heuristic"]),
        jax=version("jax"),
    )


def keep(found: Iterable[Tuned], file: Path) -> list[Tuned]:
    """Adds to the file what was found, shape by shape; returns it all.

    An entry of the same op, backend, device and shape is replaced, others stay. The
    file is whole at any time: a sweep that is stopped keeps the shapes it has done.

    Raises:
      UserError: there is a file that is another.
    """
    entries: dict[str, dict[str, Any]] = {}
    if file.exists():
        written = read_json_object(file, "the file of block sizes").get("sizes")
        if not isinstance(written, list) or not all(
            isinstance(entry, dict) and entry.keys() >= {"op", "backend", "shape"}
            for entry in written
        ):
            raise UserError(f"{file} holds no block sizes: name another file to write")
        entries = {_name_of(entry): entry for entry in written}
    told = []
    for one in found:
        entry = asdict(one)
        entries[_name_of(entry)] = entry
        text = json_text({"sizes": list(entries.values())}, indent=2)
        write_atomic(file, text + "\n")
        told.append(one)
        sizes = ", ".join(f"{name} {size}" for name, size in one.sizes.items())
        shape = ", ".join(f"{name} {value}" for name, value in one.shape.items())
        ours = f"the heuristic's sizes {one.heuristic_ms:,.2f} ms"
        print(
            f"{one.op}/{one.backend}, {shape}: "
            + (f"{sizes} {one.ms:,.2f} ms, {ours}" if sizes else f"best are {ours}")
        )
    return told


def how_to_use(file: Path) -> str:
    """Says how a program reads the file."""
    return f"read by every program that has {measured_sizes.VARIABLE}={file}"


def _name_of(entry: Mapping[str, Any]) -> str:
    parts = [entry.get(name) for name in ("op", "backend", "device", "shape")]
    return json_text(parts)
