"""What Triton's compiler makes of a call's kernels for a GPU that is not here.

    JAX_PLATFORMS=cpu PYTHONPATH=.compilers python -m tests.triton_resources 8.6 CASE

prints a line of JSON per kernel: warps, stages, registers per thread, bytes of stack
that a thread spills to, bytes of shared memory, and the atomic operations that other
programs may see before the program's own stores. CASE is "module:function", whose call
with the words after it returns a function and its arguments as ShapeDtypeStructs. `make
compilers` fetches the compiler. jax lowers Pallas' kernels to Triton's language and XLA
compiles that when a program is loaded; here Triton itself does, by the same passes.
jax-triton has Triton compile its kernels when a program is lowered.
"""

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import jax
from jax._src.interpreters.mlir import make_ir_context
from jax._src.lib.mlir import ir
from jax._src.lib.triton import dialect

from pallas_kernels.target import Target, as_if
from tests.absent_compilers import COMPILERS
from tests.source_tree import ROOT


class Kernel(NamedTuple):
    """A kernel as jax lowers it: Triton's language as text, and its launch options."""

    name: str
    text: str
    warps: int
    stages: int


def resources_of(capability: str, case: str, *words: str) -> list[dict]:
    """Asks a process of its own; `capability` is that of a GPU, such as "8.6"."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.triton_resources", capability, case, *words],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(COMPILERS)},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def kernels_of(function, arguments, target: Target) -> list[Kernel]:
    """Returns the different kernels of a call: Pallas' are in the program's order."""
    library = importlib.import_module("jax_triton.triton_lib")
    compile_inplace = library.compile_ttir_to_ptx_inplace
    matches: dict[Kernel, None] = {}

    def record(ttir, backend, options, capability):
        # Its first stage puts a kernel's functions in line, in place.
        text = str(backend.make_ttir(ttir, {}, options, capability))
        [name] = re.findall(r"tt.func public @(\w+)", text)
        matches[Kernel(name, text, options.num_warps, options.num_stages)] = None
        return compile_inplace(ttir, backend, options, capability)

    library.compile_ttir_to_ptx_inplace = record
    with as_if(target):
        traced = jax.jit(function).trace(*arguments)
        lowered = traced.lower(lowering_platforms=("cuda",))

    def visit(operation) -> ir.WalkResult:
        if operation.name == "stablehlo.custom_call":
            name = ir.StringAttr(operation.attributes["call_target_name"]).value
            if "triton" in name and "mhlo.backend_config" in operation.attributes:
                matches[_kernel(operation.attributes["mhlo.backend_config"])] = None
        return ir.WalkResult.ADVANCE

    lowered.compiler_ir("stablehlo").operation.walk(visit)
    return list(matches)


def _kernel(config) -> Kernel:
    config = ir.DictAttr(config)
    number = lambda name: ir.IntegerAttr(config[name]).value  # noqa: E731
    context = make_ir_context()  # knows the dialect of a barrier too
    dialect.register_dialect(context)
    with context:
        module = ir.Module.parse(ir.StringAttr(config["ir"]).value_bytes)
        text = module.operation.get_asm()
    name = ir.StringAttr(config["name"]).value
    return Kernel(name, text, number("num_warps"), number("num_stages"))


def compiled(kernel: Kernel, capability: str) -> dict:
    """Has Triton compile a kernel and reads what it takes."""
    triton = importlib.import_module("triton")
    target = importlib.import_module("triton.backends.compiler").GPUTarget
    bare = int(capability.replace(".", ""))
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ttir"
        source.write_text(kernel.text)
        os.environ["TRITON_CACHE_DIR"] = folder  # jax-triton leaves none
        options = {"num_warps": kernel.warps, "num_stages": kernel.stages}
        result = triton.compile(
            str(source), target=target("cuda", bare, 32), options=options
        )
        binary = Path(folder) / "kernel.cubin"
        binary.write_bytes(result.asm["cubin"])
        tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
        done = subprocess.run(
            [tools / "cuobjdump", "-res-usage", binary],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    registers, stack = re.findall(r"REG:(\d+) STACK:(\d+)", done)[0]
    return {
        "kernel": kernel.name,
        "warps": kernel.warps,
        "stages": kernel.stages,
        "registers": int(registers),
        "stack": int(stack),
        "shared": result.metadata.shared,
        "unordered": unordered_atomics(result.asm["ptx"]),
    }


def unordered_atomics(ptx: str) -> int:
    """Counts atomics that no barrier of all threads parts from a store before them.

    An atomic operation releases what its own thread wrote, and what others did before a
    barrier with it. One that has no release is counted too.
    """
    result, stored = 0, False
    for line in ptx.splitlines():
        if "st.global" in line:
            stored = True
        elif "bar.sync" in line:
            stored = False
        elif "atom." in line:
            result += stored or "acq_rel" not in line
    return result


def main(capability: str, case: str, *words: str) -> None:
    """Prints what each kernel of a case takes."""
    # Triton 3.9 wants it set, and warns if it is not: fused products.
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    module, function = case.split(":")
    call, arguments = getattr(importlib.import_module(module), function)(*words)
    target = Target(platform="gpu", kind="a GPU", compute_capability=capability)
    for kernel in kernels_of(call, arguments, target):
        print(json.dumps(compiled(kernel, capability)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
