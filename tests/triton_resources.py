"""What Triton's kernels take of a GPU that is not here: shared memory, registers.

XLA's compiler ahead of time only lowers them; here they go through Triton itself, for
any compute capability. Needs the package triton, which no part of recurjax imports.
"""

import importlib
import re
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import jax
from jax._src.lib.mlir import ir
from jax._src.lib.triton import dialect

_CALL = "__gpu$xla.gpu.triton"


class Kernel(NamedTuple):
    """A lowered kernel: its name, Triton's text, and how it is launched."""

    name: str
    text: str
    warps: int
    stages: int


class Resources(NamedTuple):
    """Bytes of shared memory a block, registers and bytes of stack a thread."""

    shared: int
    registers: int
    stack: int


def kernels_of(function, arguments) -> list[Kernel]:
    """Returns the kernels that a function of shapes launches, each once."""
    traced = jax.jit(function).trace(*arguments)
    module = traced.lower(lowering_platforms=("cuda",)).compiler_ir("stablehlo")
    found: dict[str, Kernel] = {}

    def visit(op):
        if op.name == "stablehlo.custom_call" and _CALL in str(
            op.attributes["call_target_name"]
        ):
            config = op.attributes["mhlo.backend_config"]
            kernel = Kernel(
                name=config["name"].value,
                text=_text(config["ir"].value_bytes),
                warps=config["num_warps"].value,
                stages=config["num_stages"].value,
            )
            found.setdefault(kernel.text, kernel)
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    return list(found.values())


def resources(kernel: Kernel, capability: int) -> Resources:
    """Compiles a kernel for a compute capability, such as 86."""
    triton = importlib.import_module("triton")
    target = importlib.import_module("triton.backends.compiler").GPUTarget
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ttir"
        source.write_text(kernel.text)
        made = triton.compile(
            str(source),
            target=target("cuda", capability, 32),
            options={"num_warps": kernel.warps, "num_stages": kernel.stages},
        )
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(made.asm["cubin"])
        tools = Path(triton.__file__).parent / "backends/nvidia/bin"
        told = subprocess.run(
            [tools / "cuobjdump", "-res-usage", cubin],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    registers, stack = re.findall(r"REG:(\d+) STACK:(\d+)", told)[-1]
    return Resources(made.metadata.shared, int(registers), int(stack))


def _text(bytecode: bytes) -> str:
    with ir.Context() as context:
        dialect.register_dialect(context)
        return str(ir.Module.parse(bytecode))
