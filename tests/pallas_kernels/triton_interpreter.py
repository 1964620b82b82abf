"""Kernels of Triton's language on a CPU: by Triton's interpreter, on torch's tensors.

`interpreted()` has the backends' launches run in a process of the interpreter that
has torch, with the Triton of `make compilers`. All else is the
backend as it is: its sizes, its arguments, the sums behind its kernels.

As a program it is that process: a line of JSON a launch on stdin, arrays in files.
"""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[2]
COMPILERS = ROOT / ".compilers"


def reason_to_skip() -> str | None:
    """Returns what is missing for the interpreter beside torch, or None."""
    if not (COMPILERS / "triton").is_dir():
        return "no Triton here: run make compilers"
    return None


@contextmanager
def interpreted() -> Iterator[None]:
    """Runs what `triton_call.launch` launches in the interpreter's process."""
    import jax
    import pytest

    from pallas_kernels import triton_call
    from tests.torch_python import PYTHON

    process = subprocess.Popen(
        [PYTHON, __file__],
        env=os.environ | {"PYTHONPATH": f"{COMPILERS}:{ROOT}", "TRITON_INTERPRET": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def run(request: dict, out_shape: Any, *arrays: Any) -> list[np.ndarray]:
        with tempfile.TemporaryDirectory() as folder:
            for number, array in enumerate(arrays):
                _write(Path(folder) / f"in{number}", np.asarray(array))
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(json.dumps(request | {"folder": folder}) + "\n")
            process.stdin.flush()
            assert process.stdout.readline() == "done\n", request
            return [
                np.fromfile(Path(folder) / f"out{n}", x.dtype).reshape(x.shape)
                for n, x in enumerate(out_shape)
            ]

    def launch(kernel, *arguments, grid, out_shape, warps, **constants):
        del warps
        scalars = [x if isinstance(x, int) else None for x in arguments]
        arrays = [x for x in arguments if not isinstance(x, int)]
        request = {
            "kernel": kernel,
            "scalars": scalars,
            "inputs": [[x.dtype.name, x.shape] for x in arrays],
            "outputs": [[x.dtype.name, x.shape] for x in out_shape],
            "grid": grid,
            "constants": constants,
        }
        call = partial(run, request, out_shape)
        return jax.pure_callback(call, list(out_shape), *arrays)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_call, "launch", launch)
        yield
    assert process.stdin is not None and process.stdout is not None
    process.stdin.close()
    process.stdout.close()
    assert process.wait() == 0


def _write(file: Path, array: np.ndarray) -> None:
    np.ascontiguousarray(array).tofile(file)


def quicken() -> dict[Any, Any]:
    """Leaves out what takes most of the time; returns what each launch must clear."""
    from triton.runtime import interpreter

    # Each inner function enters the interpreter once a launch and not at each of its
    # calls, and sums are not checked for overflow.
    entered: dict[Any, Any] = {}

    def inner(self: Any, *arguments: Any, **options: Any) -> Any:
        if self.fn not in entered:
            interpreter._patch_lang(self.fn)
            entered[self.fn] = self.rewrite()
        return entered[self.fn](*arguments, **options)

    interpreter.InterpretedFunction.__call__ = inner
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
    # Lanes that a `where` leaves out may be infinite.
    np.seterr(all="ignore")
    return entered


def main() -> None:
    """Answers launches until stdin ends."""
    import torch

    entered = quicken()
    for line in sys.stdin:
        request = json.loads(line)
        folder = Path(request["folder"])

        def tensor(dtype: str, shape: list[int], file: Path | None) -> Any:
            kind = getattr(torch, dtype)
            if file is None:  # NaN shows what no program writes
                filling = float("nan") if kind.is_floating_point else 0
                return torch.full(shape, filling, dtype=kind)
            return torch.frombuffer(bytearray(file.read_bytes()), dtype=kind).reshape(
                shape
            )

        inputs = iter(
            tensor(*spec, folder / f"in{n}")  # noqa: B023
            for n, spec in enumerate(request["inputs"])
        )
        arguments = [next(inputs) if x is None else x for x in request["scalars"]]
        outputs = [tensor(*spec, None) for spec in request["outputs"]]
        module, function = request["kernel"].split(":")
        kernel = getattr(_module(module), function)
        entered.clear()
        kernel[(request["grid"],)](*arguments, *outputs, **request["constants"])
        for n, x in enumerate(outputs):
            bits = x.contiguous().view(torch.uint8) if x.ndim else x
            bits.numpy().tofile(folder / f"out{n}")
        print("done", flush=True)


def _module(name: str) -> Any:
    """Imports a file of kernels alone: its package would bring jax."""
    if name not in sys.modules:
        file = ROOT / (name.replace(".", "/") + ".py")
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


if __name__ == "__main__":
    main()
