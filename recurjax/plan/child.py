"""Compiles one program for one topology: the process that `compilers` starts.

Reads a request as JSON on standard input and writes the answer as JSON in the last line
of standard output. The line before has what is known before compilation, in case the
compiler crashes the process.
"""

import dataclasses
import hashlib
import json
import math
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import Mesh

from pallas_kernels import target
from recurjax.config_json import from_json, to_json
from recurjax.errors import UserError
from recurjax.experiment import Experiment
from recurjax.files.atomic import write_atomic
from recurjax.model import ModelConfig
from recurjax.plan.flops import count_flops
from recurjax.plan.hlo import parse
from recurjax.plan.programs import DeviceProgram, build_program, compile_program
from recurjax.plan.topology import Topology, parse_topology
from recurjax.plan.traffic import read_traffic
from recurjax.sharding import AXES, make_mesh

# The TPU compiler's message on a program's total memory, or on its temporaries.
_WHOLE = re.compile(r"Used ([\d.]+)([KMGT]?) of")
_TEMPORARIES = re.compile(r"HLO temporaries \(([\d.]+)([KMGT]?)\)")
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def main() -> None:
    """Answers the request on standard input."""
    end_with_parent()
    request = json.load(sys.stdin)
    try:
        answer = respond(request, before_compiling=_print)
    except UserError as error:
        answer = {"error": str(error)}
    _print(answer)


def end_with_parent() -> None:
    """Lets this process end when the one that started it does, however that ended.

    A compiler would continue for minutes, and nobody would read its answer.
    """
    parent = os.getppid()

    # An orphan is handed to another parent: the number of the parent changes.
    def watch():
        while os.getppid() == parent:
            time.sleep(1)
        # Without cleaning up: a compiler's threads could hold an ordinary exit back.
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _print(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


def respond(
    request: dict[str, Any],
    before_compiling: Callable[[dict[str, Any]], None] = lambda _: None,
) -> dict[str, Any]:
    """Returns sizes, counts and times of one program.

    Args:
      request: experiment (as JSON), topology, program, rows, length, cache (a folder or
        None).
      before_compiling: called with what is known of the answer by then.

    Raises:
      UserError: the experiment does not go with the mesh.
    """
    topology = parse_topology(request["topology"])
    # Before the first use of a device: later the number of CPU devices is fixed.
    if topology.platform == "cpu":
        jax.config.update("jax_num_cpu_devices", topology.devices)
    experiment = from_json(Experiment, request["experiment"], path="experiment")
    devices = open_devices(topology)
    try:
        mesh = make_mesh(experiment.mesh, devices)
    except NotImplementedError as error:
        raise UserError(
            f"the mesh does not fit the topology {topology.name}: make each "
            "axis of the mesh a product of complete axes of the topology"
        ) from error
    began = time.perf_counter()
    answer: dict[str, Any] = {
        "mesh": dict(zip(AXES, mesh.axis_sizes, strict=True)),
        "devices": topology.devices,
        "versions": versions(),
        "notes": [],
    }
    if topology.platform == "cuda":
        answer["notes"] += attention_notes(experiment.model)
    with as_if_on(devices, topology, mesh):
        program = build_program(
            experiment,
            request["program"],
            mesh,
            rows=request.get("rows"),
            length=request.get("length"),
        )
        answer |= {"tokens": program.tokens, "own_flops": program.own_flops}
        # The sizes of the arguments are known without a compiler.
        answer["parts"] = {k: device_bytes(v) for k, v in program.parts.items()}
        before_compiling(answer)
        try:
            outcome = _compiled(program, topology, mesh, request, began)
            return answer | outcome | {"notes": answer["notes"] + outcome["notes"]}
        except UserError:
            raise
        except Exception as error:  # whatever a compiler has to say is the answer
            return answer | read_failure(error, answer["parts"])


def versions() -> dict[str, str]:
    """Returns the versions that a compiled program depends on."""
    names = ("jax", "jaxlib", "libtpu", "jax-cuda12-plugin", "flax")
    installed = {d.metadata["Name"]: d.version for d in metadata.distributions()}
    return {name: installed[name] for name in names if name in installed}


def _compiled(
    program: DeviceProgram,
    topology: Topology,
    mesh: Any,
    request: dict[str, Any],
    began,
) -> dict[str, Any]:
    # Counted on the jaxpr, before a compiler merges or drops anything.
    traced = program.function.trace(*program.arguments)
    counted = count_flops(traced.jaxpr, platform=topology.platform)
    answer: dict[str, Any] = {"flops": dataclasses.asdict(counted), "notes": []}
    lowered = traced.lower()
    # A search for a mesh requests the same programs repeatedly: compile each once.
    stored = _stored(lowered, topology, mesh, request)
    if stored is not None and stored.is_file():
        seconds = time.perf_counter() - began
        return answer | json.loads(stored.read_text()) | {"from_cache": seconds}
    lowering = time.perf_counter() - began
    try:
        compiled, notes = compile_program(lowered, gpu=topology.platform == "cuda")
    except Exception as error:
        sizes = {name: device_bytes(tree) for name, tree in program.parts.items()}
        failure = read_failure(error, sizes)
    else:
        traffic = read_traffic(
            parse(compiled.as_text()), axes=AXES, sizes=mesh.axis_sizes
        )
        memory = read_memory(
            compiled, program.parts, made_caches=request["program"] == "prefill"
        )
        failure = {
            "memory": dataclasses.asdict(memory),
            # Sums by kind and axes; a program may have thousands of collectives.
            "traffic": dataclasses.asdict(traffic),
            "notes": notes,
        }
    failure["seconds"] = {
        "lower": lowering,
        "compile": time.perf_counter() - began - lowering,
    }
    if stored is not None:
        stored.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(stored, json.dumps(failure))
    return answer | failure


def _stored(
    lowered: Any, topology: Topology, mesh: Any, request: dict[str, Any]
) -> Path | None:
    """Returns the file that holds, or will hold, this very program's result."""
    if request.get("cache") is None:
        return None
    readers = sorted(Path(__file__).parent.glob("*.py"))
    key = hashlib.sha256(lowered.as_text().encode())
    # The code that reads the compiler's answer is part of the key, so that a fixed
    # reader does not return old results.
    for reader in readers:
        key.update(reader.read_bytes())
    around = [topology.name, request["program"], mesh.axis_sizes, versions()]
    key.update(json.dumps(around).encode())
    return Path(request["cache"]) / f"{key.hexdigest()[:32]}.json"


def read_failure(error: Exception, parts: dict[str, int]) -> dict[str, Any]:
    """Returns the reason in the compiler's words, and the bytes that the program needs.

    Args:
      error: the compiler's error.
      parts: bytes of the arguments, which come on top of temporaries.
    """
    text = str(error)
    lines_of_error = [line.strip() for line in text.splitlines() if line.strip()]
    lines = [
        line
        for line in lines_of_error
        if "RESOURCE_EXHAUSTED" in line or "Used " in line
    ]
    reason = " ".join(lines[:2] or lines_of_error[:1]) or type(error).__name__
    # Either message comes, depending on where the compiler gives up.
    needed = None
    if match := _WHOLE.search(text):
        needed = int(float(match[1]) * _UNITS[match[2]])
    elif match := _TEMPORARIES.search(text):
        needed = int(float(match[1]) * _UNITS[match[2]]) + sum(parts.values())
    memory = "RESOURCE_EXHAUSTED" in text or needed is not None
    kind = "memory" if memory else type(error).__name__
    return {"failed": reason[:600], "failed_by": kind, "needed": needed}


STAND_IN = (
    "cuDNN's attention cannot be compiled without cuDNN: from 256 tokens on our own "
    "kernel replaces it and keeps as little; shorter rows are planned with plain "
    "attention, which keeps their logits"
)
"""What a plan for GPUs says of its attention."""


def attention_notes(model: ModelConfig) -> list[str]:
    """Returns what a plan for GPUs says of a model's attention."""
    text, notes = json.dumps(to_json(model)), [STAND_IN]
    widths = {int(width) for width in re.findall(r'"head_width": (\d+)', text)}
    if odd := sorted(width for width in widths if width & (width - 1)):
        notes.append(
            f"our GPU kernels need heads whose width is a power of two, and "
            f"{', '.join(map(str, odd))} is none: XLA computes packed rows, float32, "
            "RAT and the Recurrent Transformer; cuDNN computes other attention"
        )
    # Of the Recurrent Transformer the layers are ours: they call no attention.
    if '"type": "Alibi"' in text and '"type": "AttentionConfig"' in text:
        notes.append(
            "cuDNN takes ALiBi as 8 more channels per head and computes heads of 64, "
            "72 wide with them, as wide as 128: the plan counts 64"
        )
    return notes


def open_devices(topology: Topology) -> list[Any]:
    """Returns the devices of a topology; those of TPUs and GPUs only compile."""
    if topology.platform == "cpu":
        return jax.devices()[: topology.devices]
    if topology.platform == "cuda":
        described = topologies.get_topology_desc(
            platform="cuda",
            topology=f"1x1x{topology.devices}",
            target_config=topology.target_config,
        )
        return list(described.devices)
    options: dict[str, Any] = {}
    # By default the compiler describes complete hosts.
    if (
        math.prod(topology.shape) == 1
    ):  # part of a host: the default host has four chips
        options["chips_per_host_bounds"] = [1, 1, 1]
    if topology.kind == "v4":  # as on the pod: a chip's two cores are one device
        options["chip_config_name"] = "megacore"
    try:
        described = topologies.get_topology_desc(
            platform="tpu", topology_name=topology.name, **options
        )
    except jax.errors.JaxRuntimeError as error:
        first = str(error).splitlines()[0]
        raise UserError(
            f"the compiler does not know the topology {topology.name}: {first}"
        ) from error
    return list(described.devices)


@contextmanager
def as_if_on(devices: list[Any], topology: Topology, mesh: Mesh) -> Iterator[None]:
    """Makes tracing and lowering choose what they would on these devices.

    Backends of operations ask the target that is set, Mosaic asks the mesh. A GPU's
    programs do without cuDNN, which only a machine that has it can compile: see
    `STAND_IN`.
    """
    if topology.platform == "cpu":
        with jax.set_mesh(mesh):
            yield
        return
    # Without cuDNN: the compiler would look for the library when it compiles.
    planned = target.Target.of(devices[0], cudnn=False)
    with (
        target.as_if(planned),
        jax.sharding.use_abstract_mesh(mesh.abstract_mesh),
    ):
        yield


@dataclass(frozen=True, kw_only=True, slots=True)
class CompiledMemory:
    """Bytes on one device.

    Attributes:
      parameters: bytes of the model's parameters.
      optimizer: moments, counters, past losses; 0 where nothing is trained.
      caches: bytes of generation's caches, as arguments or results.
      data: tokens and other arguments.
      results: arrays that are returned and share no buffer with an argument.
      temporaries: activations, gradients and work space at their peak, as the compiler
        packs them.
      code: bytes of the program itself.
    """

    parameters: int
    optimizer: int
    caches: int
    data: int
    results: int
    temporaries: int
    code: int

    @property
    def total(self) -> int:
        """Bytes that the device must hold while the program runs."""
        return (
            self.parameters
            + self.optimizer
            + self.caches
            + self.data
            + self.results
            + self.temporaries
            + self.code
        )


def read_memory(
    compiled: Any, parts: dict[str, Any], *, made_caches: bool
) -> CompiledMemory:
    """Reads the compiler's analysis.

    Args:
      compiled: the program.
      parts: its arguments by what they are, see `DeviceProgram.parts`.
      made_caches: what it returns is a cache (prefill).
    """
    analysis = compiled.memory_analysis()
    sizes = {name: device_bytes(tree) for name, tree in parts.items()}
    known = sum(sizes.values())
    # Padding of tiles, and arguments that no part names.
    rest = max(analysis.argument_size_in_bytes - known, 0)
    # A result reuses a donated argument's buffer, which is counted once, above.
    results = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    return CompiledMemory(
        parameters=sizes.get("parameters", 0),
        optimizer=sizes.get("optimizer", 0),
        caches=sizes.get("caches", 0) + (results if made_caches else 0),
        data=sizes.get("data", 0) + rest,
        results=0 if made_caches else max(results, 0),
        temporaries=analysis.temp_size_in_bytes,
        code=analysis.generated_code_size_in_bytes,
    )


def device_bytes(tree: Any) -> int:
    """Sums the bytes that the leaves of a tree take on one device."""
    return sum(
        # A replicated leaf has its full shape on every device.
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * _bits(leaf.dtype) // 8
        for leaf in jax.tree.leaves(tree)
    )


def _bits(dtype: Any) -> int:
    # numpy stores a 4-bit number in a byte, XLA in half a byte.
    return 4 if dtype == "int4" else 8 * dtype.itemsize


if __name__ == "__main__":
    main()
