"""A plan: the memory of one program on a topology, and a lower bound of its time."""

import dataclasses
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recurjax.experiment import Experiment
from recurjax.plan.compilers import compile_elsewhere
from recurjax.plan.programs import ProgramName
from recurjax.plan.topology import Topology


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """Seconds of one call, if one resource were all that counted.

    Attributes:
      compute: FLOPs of a device at its peak; None: no peak known.
      memory: bytes moved at the memory's bandwidth.
      interconnect: bytes sent in collectives, each along one axis, none hidden.
      launch: kernels one after another at the cost of starting one; 0: not counted.
    """

    compute: float | None
    memory: float | None
    interconnect: float | None
    launch: float

    @property
    def seconds(self) -> float | None:
        """The largest of them: nothing runs faster, however well it overlaps."""
        known = [bound for bound in self._by_name().values() if bound is not None]
        # Without a peak of compute the largest of the other times is not a bound.
        return max(known) if self.compute is not None else None

    @property
    def binding(self) -> str | None:
        """The resource that it is."""
        if self.seconds is None:
            return None
        known = {name: bound or 0.0 for name, bound in self._by_name().items()}
        return max(known, key=lambda name: known[name])

    def _by_name(self) -> dict[str, float | None]:
        return {
            "compute": self.compute,
            "memory": self.memory,
            "interconnect": self.interconnect,
            "launch": self.launch,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A compiled program's memory, FLOPs and traffic, and the bounds that follow.

    Attributes:
      experiment: its name.
      program, topology: what was compiled for what.
      mesh: sizes of the mesh's axes.
      answer: result of `compile_elsewhere`: memory, FLOPs, traffic, or why it failed.
      bounds: None where the program does not compile.
      steps: training steps of the experiment.
      price: US$ a device-hour, or None.
      seconds: seconds that planning took.
    """

    experiment: str
    program: ProgramName
    topology: Topology
    mesh: dict[str, int]
    answer: dict[str, Any]
    bounds: Bounds | None
    steps: int
    price: float | None
    seconds: float

    @property
    def needed(self) -> int | None:
        """Bytes on one device; None where the compiler does not say."""
        memory = self.answer.get("memory")
        return self.answer.get("needed") if memory is None else sum(memory.values())

    @property
    def fits(self) -> bool:
        """Whether it compiles into a device's memory."""
        capacity = self.topology.hardware.memory
        # What the compiler refused has no place on any device.
        if "failed" in self.answer or self.needed is None:
            return False
        return capacity is None or self.needed <= capacity

    @property
    def reason(self) -> str | None:
        """Why it does not fit or compile, in the compiler's words where it has any."""
        if self.fits:
            return None
        if "failed" in self.answer:
            return self.answer["failed"]
        capacity = self.topology.hardware.memory
        assert capacity is not None and self.needed is not None
        return (
            f"the compiler's program takes {self.needed / 2**30:.1f} GiB of the "
            f"device's {capacity / 2**30:.1f} GiB"
        )

    @property
    def tokens_per_second(self) -> float | None:
        """At the bound, over all devices."""
        seconds = None if self.bounds is None else self.bounds.seconds
        return None if not seconds else self.answer["tokens"] / seconds

    @property
    def utilisation(self) -> float | None:
        """MFU at the bound: the variant's own FLOPs over the devices' peak."""
        seconds = None if self.bounds is None else self.bounds.seconds
        peak = self.topology.hardware.flops
        if not seconds or peak is None:
            return None
        # The peak of all devices together, as the FLOPs are of all of them.
        return self.answer["own_flops"] / (seconds * peak * self.topology.devices)

    @property
    def run_hours(self) -> float | None:
        """Hours of the full training at the bound."""
        seconds = None if self.bounds is None else self.bounds.seconds
        if seconds is None or self.program != "train":
            return None
        return seconds * self.steps / 3600

    @property
    def run_cost(self) -> float | None:
        """Cost of those hours in US$."""
        if self.run_hours is None or self.price is None:
            return None
        return self.run_hours * self.topology.devices * self.price

    def to_json(self) -> dict[str, Any]:
        """Returns everything as plain JSON."""
        bounds = None
        if self.bounds is not None:
            bounds = dataclasses.asdict(self.bounds) | {
                "binding": self.bounds.binding,
                "seconds": self.bounds.seconds,
            }
        return {
            "experiment": self.experiment,
            "program": self.program,
            "topology": self.topology.name,
            "mesh": self.mesh,
            "fits": self.fits,
            "reason": self.reason,
            "needed": self.needed,
            "bounds": bounds,
            "tokens_per_second": self.tokens_per_second,
            "mfu": self.utilisation,
            "run_hours": self.run_hours,
            "run_cost": self.run_cost,
            "peaks": dataclasses.asdict(self.topology.hardware),
            "planning_seconds": self.seconds,
            **self.answer,
        }


def make_plan(
    experiment: Experiment,
    topology: Topology,
    program: ProgramName = "train",
    *,
    rows: int | None = None,
    length: int | None = None,
    price: float | None = None,
    cache: Path | None = None,
) -> Plan:
    """Compiles and reads one program.

    Args:
      experiment: its mesh is laid over the topology.
      topology: the devices.
      program: program of the experiment.
      rows, length: rows and length of prefill and decode, see `build_program`.
      price: US$ a device-hour; None: the list price, where there is one.
      cache: a folder of earlier results.

    Raises:
      UserError: the compilers are missing or the mesh does not fit.
    """
    began = time.perf_counter()
    answer = compile_elsewhere(
        experiment, topology, program, rows=rows, length=length, cache=cache
    )
    return Plan(
        experiment=experiment.name,
        program=program,
        topology=topology,
        mesh=answer["mesh"],
        answer=answer,
        bounds=find_bounds(answer, topology),
        steps=experiment.training.steps,
        price=topology.hardware.price if price is None else price,
        seconds=time.perf_counter() - began,
    )


def find_bounds(answer: dict[str, Any], topology: Topology) -> Bounds | None:
    """Returns the bounds of a compiled program; None: it was not compiled.

    Args:
      answer: result of `compile_elsewhere`: memory, FLOPs, traffic, or why it failed.
      topology: the topology that it was compiled for.
    """
    if "traffic" not in answer:
        return None
    hardware, traffic = topology.hardware, answer["traffic"]
    # Other arithmetic does not count: a vector unit does it in parallel to the
    # products.
    flops = answer["flops"]["products"] / topology.devices
    sent = sum(collective["sent"] for collective in traffic["collectives"])
    # One axis of the interconnect a time; collectives over two axes could use both.
    speed = topology.collective_bandwidth
    bandwidth = hardware.memory_bandwidth
    return Bounds(
        compute=None if hardware.flops is None else flops / hardware.flops,
        memory=None if bandwidth is None else traffic["bytes"] / bandwidth,
        interconnect=None if speed is None else sent / speed,
        launch=traffic["launches"] * hardware.launch,
    )
