"""Checks and times the persistent kernel on an H100: it has never run on a device.

    timeout 600 python -m experiments.recurrent_transformer.hopper.run --out hopper.json

1. Values and what a backward pass reads, against the definition, at sizes that take 28,
   120 and 131 programs.
2. One layer forward at the shapes of `first_gpu.py`, next to the paper's milliseconds.

The kernel's programs wait for one another, so give the command a time limit.
`--tiny` runs a small case in jax's interpreter, on a CPU.
"""

import argparse
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from experiments.first_gpu import PAPER_MS, TOLERANCES, draw_inputs
from experiments.recurrent_transformer.hopper.layer import (
    hopper_layers,
    refusal_of_device,
)
from pallas_kernels.recurrent_prefill.reference import recurrent_prefill_reference
from recurjax.bench.recurrent_transformer import LARGE
from recurjax.bench.report import device_name
from recurjax.bench.timing import repeat
from recurjax.files.atomic import write_atomic
from recurjax.machine import host

CHECKED = (
    {"B": 70, "T": 1, "D": 128, "H": 2},
    {"B": 70, "T": 37, "D": 128, "H": 2},
    {"B": 600, "T": 37, "D": 128, "H": 2},
    {"B": 70, "T": 37, "D": 512, "H": 8},
    {"B": 70, "T": 37, "D": 1024, "H": 16},
)
TINY = {"B": 2, "T": 3, "D": 128, "H": 2}


def check(shape: dict[str, int], **options: Any) -> float:
    """Returns the largest error of z as a share of the largest z.

    Raises:
      AssertionError: it is above the tolerance.
    """
    B, T, D, H = (shape[name] for name in "BTDH")
    spec, weights, x, _ = draw_inputs(2, B, T, D, H, "bfloat16")
    got, _ = jax.jit(partial(hopper_layers, spec=spec, **options))(x, weights)
    with jax.default_matmul_precision("highest"):
        want = jax.jit(partial(recurrent_prefill_reference, spec=spec))(x, weights)
    error = float(jnp.abs(got - want).max() / jnp.abs(want).max())
    assert error <= TOLERANCES["bfloat16"], (shape, error)
    return error


def time_layer(shape: dict[str, int], *, repeats: int, **options: Any) -> float:
    """Returns a layer's forward in ms, the best of some repeats."""
    B, T, D, H = (shape[name] for name in "BTDH")
    spec, weights, x, _ = draw_inputs(1, B, T, D, H, "bfloat16")
    run = jax.jit(partial(hopper_layers, spec=spec, **options))
    return 1e3 * min(repeat(partial(run, x, weights), repeats=repeats))


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Checks, times, writes JSON and returns it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--repeats", type=int, default=10)
    words = parser.parse_args(arguments)
    options: dict[str, Any] = {}
    if words.tiny:
        # Not above: jax has no public name of it.
        from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

        options = {"interpret": InterpretGPUParams(), "programs": 14}
    elif (reason := refusal_of_device()) is not None:
        sys.exit(f"the kernel {reason}: try --tiny")
    report: dict[str, Any] = {"device": device_name(), "tiny": words.tiny}
    report["checked"] = []
    for shape in (TINY,) if words.tiny else CHECKED:
        report["checked"].append({**shape, "error": check(shape, **options)})
        print(json.dumps(report["checked"][-1]), file=sys.stderr)
    report["layer_forward"] = []
    shapes = (TINY,) if words.tiny else LARGE
    for shape, theirs in zip(shapes, PAPER_MS, strict=False):
        row: dict[str, Any] = dict(shape)
        row["hopper_ms"] = time_layer(shape, repeats=words.repeats, **options)
        row |= {} if words.tiny else {"paper_ms": theirs}
        report["layer_forward"].append(row)
        print(json.dumps(row), file=sys.stderr)
    write_atomic(words.out, json.dumps(report, indent=2) + "\n")
    return report


if __name__ == "__main__":
    host.prepare()
    main()
