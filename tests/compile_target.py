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
from pathlib import Path

os.environ["TPU_SKIP_MDS_QUERY"] = "1"
os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"

import jax  # noqa: E402
from jax.experimental import topologies  # noqa: E402
from jax.sharding import (  # noqa: E402
    AbstractDevice,
    AbstractMesh,
    AxisType,
    SingleDeviceSharding,
)

H100_CONFIG = (
    Path(__file__).parents[1] / "recurjax" / "plan" / "h100_target_config.txtpb"
)
NOT_LAUNCHED = {
    *("parameter", "get-tuple-element", "tuple", "constant", "bitcast", "while"),
    *("after-all", "partition-id", "replica-id", "conditional", "call"),
}
INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.\-]+ = (.*)$")
OPCODE = re.compile(r"(?:^|[\s)}\]])([a-z][a-z0-9\-]*)\(")


def compile_for(target: str, function, arguments):
    """Compiles `function` for one device of the target."""
    if target == "h100":
        topology = topologies.get_topology_desc(
            platform="cuda", topology="1x1x1", target_config=H100_CONFIG.read_text()
        )
        device = AbstractDevice("NVIDIA H100 80GB HBM3", None, "cuda")
    else:
        topology = topologies.get_topology_desc(platform="tpu", topology_name=target)
        device = AbstractDevice(topology.devices[0].device_kind, 1, "tpu")
    placed = SingleDeviceSharding(topology.devices[0])
    mesh = AbstractMesh(
        (1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=device
    )
    arguments = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=placed),
        arguments,
    )
    with jax.sharding.use_abstract_mesh(mesh):
        lowered = jax.jit(function, out_shardings=placed).lower(*arguments)
    return lowered.compile()


def loop_bodies(hlo: str) -> list[dict]:
    """Returns what each while body of optimised HLO launches an iteration."""
    computations: dict[str, list[str]] = {}
    name = ""
    for line in hlo.splitlines():
        if line.endswith("{") and not line.startswith(" "):
            name = line.removeprefix("ENTRY ").split()[0].lstrip("%")
            computations[name] = []
        elif name:
            computations[name].append(line)
    bodies = []
    for body in dict.fromkeys(re.findall(r"body=%?([\w.\-]+)", hlo)):
        launched = [found for line in computations[body] if (found := _launch(line))]
        inner = sum(" while(" in line for line in computations[body])
        bodies.append({"body": body, "launched": launched, "loops": inner})
    return bodies


def _launch(line: str) -> str | None:
    """Returns what an HLO line launches: an opcode, or a kernel's name."""
    found = INSTRUCTION.match(line)
    if not found or not (opcodes := OPCODE.findall(found[1])):
        return None
    if opcodes[0] in NOT_LAUNCHED:
        return None
    called = re.search(r'op_name="[^"]*/([\w]+)"', line)
    if opcodes[0] == "custom-call":
        target = re.search(r'custom_call_target="([^"]*)"', line)
        kernel = re.search(r"^\s+(?:ROOT )?%?([\w\-]+)", line)
        return f"{target[1] if target else ''} {kernel[1] if kernel else ''}"
    return f"{opcodes[0]} {called[1] if called else ''}"


def summary(compiled) -> dict:
    """Returns the loops, the custom calls and the bytes of a compiled program."""
    hlo = compiled.as_text()
    memory = compiled.memory_analysis()
    return {
        "loops": loop_bodies(hlo),
        "custom_calls": sorted(set(re.findall(r'custom_call_target="([^"]*)"', hlo))),
        "temp_bytes": memory.temp_size_in_bytes,
    }


def main(target: str, case: str) -> None:
    """Prints the summary of one case as JSON."""
    module, name = case.split(":")
    function, arguments = getattr(importlib.import_module(module), name)()
    print(json.dumps(summary(compile_for(target, function, arguments))))


if __name__ == "__main__":
    main(*sys.argv[1:])
