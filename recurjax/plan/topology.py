"""Names of devices to plan for: `v5e:16x16`, `v5p:4x4x2`, `h100`, `b200:8`, `cpu:8`."""

import math
import re
from dataclasses import dataclass

from recurjax.errors import UserError
from recurjax.machine.devices import HARDWARE, Hardware
from recurjax.plan.gpus import GPUS, target_config

EXAMPLES = (
    *("v4:2x2x1", "v4:4x4x4", "v5e:1x1", "v5e:2x2", "v5e:4x4", "v5e:16x16"),
    *("v5p:2x2x1", "v5p:4x4x2", "v5p:4x4x4", "v6e:1x1", "v6e:2x2", "v6e:16x16"),
    *("tpu7x:1x1x1", "tpu7x:2x2x1", "h100", "h100:8", "h200:8", "b200:8", "a100:8"),
    *("l4", "l40s", "rtx4090", "rtx5090", "cpu", "cpu:8"),
)
DIMENSIONS = {"v4": 3, "v5e": 2, "v5p": 3, "v6e": 2, "tpu7x": 3}
CORES = {"tpu7x": 2}
"""Devices of a chip where there are several."""
PLANNED = (*DIMENSIONS, *GPUS, "cpu")
"""Kinds of devices that plans are made for: keys of `HARDWARE`."""
LARGEST_NODE = 8
"""GPUs that one machine has, on one NVLink switch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """Devices that a program is compiled for.

    Attributes:
      name: as the user wrote it.
      kind: one of `PLANNED`.
      shape: chips along each axis of the interconnect; (n,) for GPUs and CPUs.
    """

    name: str
    kind: str
    shape: tuple[int, ...]

    @property
    def devices(self) -> int:
        """The number of jax devices; a TPU chip is one, of TPU7x two."""
        return math.prod(self.shape) * CORES.get(self.kind, 1)

    @property
    def hardware(self) -> Hardware:
        """Peak figures of one device."""
        return HARDWARE[self.kind]

    @property
    def platform(self) -> str:
        """The platform's name in jax: tpu, cuda or cpu."""
        if self.kind in GPUS:
            return "cuda"
        return "cpu" if self.kind == "cpu" else "tpu"

    @property
    def target_config(self) -> str:
        """What XLA's GPU compiler asks of a GPU."""
        return target_config(self.kind)

    @property
    def collective_bandwidth(self) -> float | None:
        """Bytes/s that a device sends in a collective over one axis of the mesh.

        A mesh axis is assumed to be along one axis of the interconnect; the shortest
        axis decides whether that closes to a ring.
        """
        hardware = self.hardware
        if hardware.link is None:
            return None
        closed = all(size == 1 or size >= hardware.ring for size in self.shape)
        return hardware.link * (hardware.links_per_axis if closed else 1)


def parse_topology(name: str) -> Topology:
    """Reads a topology's name.

    Raises:
      UserError: no such kind, or a shape that it does not come in.
    """
    # Only the kind is before the colon; the shape is checked for each kind below.
    kind, _, shape = name.partition(":")
    if kind not in PLANNED:
        raise UserError(
            f"--topology must be one of {', '.join(PLANNED)}, as in "
            f"{', '.join(EXAMPLES)}, got {name!r}"
        )
    if kind in DIMENSIONS:
        dimensions = DIMENSIONS[kind]
        if not re.fullmatch("x".join([r"[1-9]\d*"] * dimensions), shape):
            example = next(name for name in EXAMPLES if name.startswith(kind))
            raise UserError(
                f"topology {name!r}: {kind} has {dimensions} axes of chips: write it "
                f"like {example}"
            )
        sizes = tuple(int(size) for size in shape.split("x"))
    elif shape == "" and ":" not in name:
        sizes = (1,)
    elif re.fullmatch(r"[1-9]\d*", shape):
        sizes = (int(shape),)
    else:
        raise UserError(
            f"topology {name!r}: write {kind} for one device or {kind}:8 for eight"
        )
    if kind in GPUS and HARDWARE[kind].link is None and sizes[0] > 1:
        raise UserError(
            f"--topology {name!r}: {kind} has no NVLink, and other networks are not "
            f"planned: use {kind}"
        )
    if kind in GPUS and sizes[0] > LARGEST_NODE:
        raise UserError(
            f"--topology {name!r}: one NVLink switch connects at most "
            f"{LARGEST_NODE} GPUs, and networks between machines are not "
            f"planned: use at most {kind}:{LARGEST_NODE}"
        )
    return Topology(name=name, kind=kind, shape=sizes)
