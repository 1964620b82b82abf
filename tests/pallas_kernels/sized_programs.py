"""Which block sizes a traced call runs with: given, measured, or its heuristic's."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from pallas_kernels.measured_sizes import VARIABLE
from pallas_kernels.target import Target, as_if

GPU = Target(platform="gpu", kind="an A10", compute_capability="8.6")
HOPPER = Target(platform="gpu", kind="an H100", compute_capability="9.0")
TPU = Target(platform="tpu", kind="TPU v5 lite")


def program(run: Callable[..., Any], arrays: Any, target: Target, **options: Any):
    """Returns the text of both passes of `run(*arrays, **options)` on a target."""

    def both(*arrays):
        out, pull = jax.vjp(lambda *given: run(*given, **options), *arrays)
        return pull(out)

    with as_if(target):
        return str(jax.make_jaxpr(both)(*arrays))


def write_sizes(
    path: Path, op: str, backend: str, target: Target, shape: Mapping, sizes: Mapping
) -> str:
    """Writes a file of measured sizes for one class of calls; returns its path."""
    entry = {"op": op, "backend": backend, "device": target.kind}
    entry |= {"shape": shape, "sizes": sizes}
    file = path / "tiles.json"
    file.write_text(json.dumps({"sizes": [entry]}))
    return str(file)


def assert_measured_sizes_are_read(
    *,
    monkeypatch: Any,
    tmp_path: Path,
    op: str,
    backend: str,
    target: Target,
    shape: Mapping,
    blocks: Any,
    run: Callable[..., Any],
    arrays: Any,
) -> None:
    """Checks that such calls run with measured sizes where their caller gives none.

    Args:
      blocks: other sizes than the heuristic's, as a caller gives them.
    """
    monkeypatch.delenv(VARIABLE, raising=False)
    free = program(run, arrays, target)
    given = program(run, arrays, target, blocks=blocks)
    assert given != free
    sizes = blocks.given()
    file = write_sizes(tmp_path, op, backend, target, shape, sizes)
    monkeypatch.setenv(VARIABLE, file)
    assert program(run, arrays, target) == given
    # Whoever names sizes, or none of them, has said how to run it.
    assert program(run, arrays, target, blocks=type(blocks)()) == free
