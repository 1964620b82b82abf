"""The Hopper kernel at the paper's sizes, as shapes, for `tests/compile_target.py`."""

import os
import re
import tempfile
from functools import partial

import jax

from experiments.recurrent_transformer.hopper.layer import hopper_layers
from tests.pallas_kernels.recurrent_prefill.layer_cases import Case

PAPER = Case(
    positions=512,
    heads=16,
    key_heads=16,
    head_width=64,
    width=1024,
    inner=4096,
    dtype="bfloat16",
)


def layer(batch: int = 512):
    """Returns a function of x and weights, and its arguments."""
    x, weights, _ = jax.eval_shape(PAPER._replace(batch=batch).inputs)
    return partial(hopper_layers, spec=PAPER.spec), (x, weights)


def resources(target: str, batch: int) -> dict[str, int]:
    """Returns what the compiler makes of the kernel.

    Registers and spilled bytes as ptxas reports them; how often its loop over ticks
    signals a counter in memory, waits at one and orders copies with other accesses; and
    loads that would not see what other programs write.

    Args:
      batch: one that no other case has: a process compiles a kernel once.
    """
    # Only the process that compiles may import this.
    from tests.compile_target import compile_for

    function, arguments = layer(batch=batch)
    dumps = ("MOSAIC_GPU_DUMP_PTXAS", "MOSAIC_GPU_DUMP_PTX")
    os.environ.update(dict.fromkeys(dumps, "1"))
    # The compiler writes it to standard output or error, as a C program does.
    before = {stream: os.dup(stream) for stream in (1, 2)}
    with tempfile.TemporaryFile() as file:
        for stream in before:
            os.dup2(file.fileno(), stream)
        try:
            compile_for(target, function, arguments)
        finally:
            for stream, kept in before.items():
                os.dup2(kept, stream)
                os.close(kept)
            for name in dumps:
                del os.environ[name]
        file.seek(0)
        text = file.read().decode()
    (registers,) = re.findall(r"Used (\d+) registers", text)
    (spilled,) = re.findall(r"(\d+) bytes spill stores", text)
    return {
        "registers": int(registers),
        "spilled_bytes": int(spilled),
        "signals": len(re.findall(r"\bred\.release\.gpu\b", text)),
        "waits": len(re.findall(r"\bfence\.acquire\.gpu\b", text)),
        "fences": len(re.findall(r"\bfence\.proxy\.async\.global\b", text)),
        "read_only_loads": len(re.findall(r"\bld\.global\.nc\b", text)),
    }
