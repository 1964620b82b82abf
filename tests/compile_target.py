"""Compiles a program for a GPU or TPU that is not there: run in a process of its own.

    JAX_PLATFORMS=cpu PYTHONPATH=.compilers python -m tests.compile_target TARGET CASE

TARGET is "h100" or a TPU topology such as "v5e:2x2"; CASE is "module:function", whose
call returns a function and its arguments as ShapeDtypeStructs. `make compilers` fetches
what it needs. The last line on stdout is JSON, see `summary`.
"""

import importlib
import json
import os
import re
import sys

os.environ["TPU_SKIP_MDS_QUERY"] = "1"
os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"

import jax  # noqa: E402
from jax.sharding import (  # noqa: E402
    AbstractDevice,
    AbstractMesh,
    AxisType,
    SingleDeviceSharding,
)

from pallas_kernels.target import Target, as_if  # noqa: E402
from recurjax.plan.child import open_devices  # noqa: E402
from recurjax.plan.hlo import Instruction, Module, parse  # noqa: E402
from recurjax.plan.topology import parse_topology  # noqa: E402

NOT_LAUNCHED = {
    *("parameter", "get-tuple-element", "tuple", "constant", "bitcast", "while"),
    *("after-all", "partition-id", "replica-id", "conditional", "call"),
}


def compile_for(target: str, function, arguments):
    """Compiles `function` for one device of the target."""
    first = open_devices(parse_topology(target))[0]
    if target == "h100":
        device = AbstractDevice("NVIDIA H100 80GB HBM3", None, "cuda")
    else:
        device = AbstractDevice(first.device_kind, 1, "tpu")
    placed = SingleDeviceSharding(first)
    mesh = AbstractMesh(
        (1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=device
    )
    arguments = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=placed),
        arguments,
    )
    with (
        as_if(Target.of(first)),
        jax.sharding.use_abstract_mesh(mesh),
    ):
        lowered = jax.jit(function, out_shardings=placed).lower(*arguments)
    return lowered.compile()


def loop_bodies(module: Module) -> list[dict]:
    """Returns what each while body of a program launches an iteration."""
    loops = [
        instruction
        for computation in module.computations.values()
        for instruction in computation.values()
        if instruction.opcode == "while"
    ]
    bodies = []
    for body in dict.fromkeys(loop.attribute("body") for loop in loops):
        inside = module.computations[body].values()
        launched = [
            _told(instruction)
            for instruction in inside
            if instruction.opcode not in NOT_LAUNCHED
        ]
        inner = sum(instruction.opcode == "while" for instruction in inside)
        bodies.append({"body": body, "launched": launched, "loops": inner})
    return bodies


def _told(instruction: Instruction) -> str:
    """Names a launch: an opcode with what it was in jax, or a kernel."""
    if instruction.kernel is not None:
        return f"{instruction.kernel} {instruction.name.split('.')[0]}"
    called = re.search(r'op_name="[^"]*/([\w]+)"', instruction.attributes)
    return f"{instruction.opcode} {called[1] if called else ''}"


def summary(compiled) -> dict:
    """Returns the loops, the custom calls and the bytes of a compiled program."""
    hlo = compiled.as_text()
    memory = compiled.memory_analysis()
    return {
        "loops": loop_bodies(parse(hlo)),
        "custom_calls": sorted(set(re.findall(r'custom_call_target="([^"]*)"', hlo))),
        "temp_bytes": memory.temp_size_in_bytes,
    }


def summary_of(target: str, case: str) -> dict:
    """Compiles one case and returns its summary."""
    module, name = case.split(":")
    function, arguments = getattr(importlib.import_module(module), name)()
    return summary(compile_for(target, function, arguments))


if __name__ == "__main__":
    print(json.dumps(summary_of(*sys.argv[1:])))
