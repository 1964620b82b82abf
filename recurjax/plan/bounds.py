"""The least time that a program can take on a topology, and what follows from it."""

from dataclasses import dataclass
from typing import Any

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
        known = [one for one in self._by_name().values() if one is not None]
        return max(known) if self.compute is not None else None

    @property
    def binding(self) -> str | None:
        """The resource that it is."""
        if self.seconds is None:
            return None
        known = {name: one or 0.0 for name, one in self._by_name().items()}
        return max(known, key=lambda name: known[name])

    def _by_name(self) -> dict[str, float | None]:
        return {
            "compute": self.compute,
            "memory": self.memory,
            "interconnect": self.interconnect,
            "launch": self.launch,
        }


def find_bounds(answer: dict[str, Any], topology: Topology) -> Bounds | None:
    """Returns the bounds of a compiled program; None: it was not compiled.

    Args:
      answer: of `compile_elsewhere`.
      topology: that it was compiled for.
    """
    if "traffic" not in answer:
        return None
    hardware, traffic = topology.hardware, answer["traffic"]
    flops = answer["flops"]["products"] / topology.devices
    sent = sum(one["sent"] for one in traffic["collectives"])
    speed = topology.collective_bandwidth
    bandwidth = hardware.memory_bandwidth
    return Bounds(
        compute=None if hardware.flops is None else flops / hardware.flops,
        memory=None if bandwidth is None else traffic["bytes"] / bandwidth,
        interconnect=None if speed is None else sent / speed,
        launch=traffic["launches"] * hardware.launch,
    )
