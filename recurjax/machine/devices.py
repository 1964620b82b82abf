"""Peak rates of one device of each kind, and their sources.

The one table of hardware: model FLOPs utilisation reads a device's peak from it, plans
read the rest.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """Peak figures of one device; what only plans need is None where none is made.

    Attributes:
      kinds: parts of jax's `device_kind`, each of which means this device.
      flops: dense bfloat16 FLOP/s (T4: float16); None: no meaningful peak (a CPU).
      memory: bytes that programs can use; None: not known.
      memory_bandwidth: bytes/s to and from that memory.
      link: bytes/s that a device sends to one neighbour; both directions at once.
      links_per_axis: neighbours along one axis of the interconnect: 2 in a ring, and
        1 where all devices hang on one switch (`link` is then that of the full device).
      ring: devices along an axis of the topology from which it closes to a ring; a
        shorter axis is a chain, which carries half. 0: a switch, nothing to close.
      launch: seconds that a kernel costs at least, however small; 0: not counted.
      price: US$ a device-hour, on demand; None: differs too much between vendors.
      source: source of the numbers.
    """

    kinds: tuple[str, ...]
    flops: float | None
    memory: int | None = None
    memory_bandwidth: float | None = None
    link: float | None = None
    links_per_axis: int = 2
    ring: int = 0
    launch: float = 0.0
    price: float | None = None
    source: str


_LAUNCH = 2e-6
"""Seconds a kernel: the low end of what one inside an XLA loop was seen to cost."""
_on_nvlink = partial(Hardware, links_per_axis=1, launch=_LAUNCH)


def _alone(name: str, teraflops: int, mebibytes: int, gigabytes: int) -> Hardware:
    """Describes a GPU whose links are those of PCIe."""
    return Hardware(
        kinds=(name,),
        flops=teraflops * 1e12,
        memory=mebibytes * 2**20,
        memory_bandwidth=gigabytes * 1e9,
        launch=_LAUNCH,
        source=f"NVIDIA's data sheet of the {name}, products summed in float32",
    )


HARDWARE: dict[str, Hardware] = {
    "v4": Hardware(
        kinds=("TPU v4",),
        flops=275e12,
        memory=32 * 2**30,
        memory_bandwidth=1200e9,
        link=50e9,
        ring=4,
        price=3.22,
        source="docs.cloud.google.com/tpu/docs/v4; links: arXiv 2304.01433",
    ),
    "v5e": Hardware(
        kinds=("TPU v5 lite", "TPU v5e"),
        flops=197e12,
        memory=16 * 2**30,
        memory_bandwidth=819e9,
        link=50e9,
        ring=16,
        price=1.20,
        source="docs.cloud.google.com/tpu/docs/v5e (ICI 400 GB/s both ways, 4 ports)",
    ),
    "v5p": Hardware(
        kinds=("TPU v5p", "TPU v5"),
        flops=459e12,
        memory=95 * 2**30,
        memory_bandwidth=2765e9,
        link=100e9,
        ring=4,
        price=4.20,
        source="docs.cloud.google.com/tpu/docs/v5p (ICI 1200 GB/s both ways, 6 ports)",
    ),
    "v6e": Hardware(
        kinds=("TPU v6",),
        flops=918e12,
        memory=32 * 2**30,
        memory_bandwidth=1638e9,
        link=100e9,
        ring=16,
        price=2.70,
        source="docs.cloud.google.com/tpu/docs/v6e (ICI 800 GB/s both ways, 4 ports)",
    ),
    # Of a chip's two cores, each of which is a device, half a chip.
    "tpu7x": Hardware(
        kinds=("TPU7x",),
        flops=2307e12 / 2,
        memory=96 * 2**30,
        memory_bandwidth=7380e9 / 2,
        link=50e9,
        ring=4,
        source="docs.cloud.google.com/tpu/docs/tpu7x (ICI 1200 GB/s both ways a chip)",
    ),
    "h100": _on_nvlink(
        kinds=("H100",),
        flops=989e12,
        memory=84942979072,
        memory_bandwidth=3352e9,
        link=450e9,
        source="NVIDIA H100 SXM data sheet (NVLink 900 GB/s both ways)",
    ),
    "h200": _on_nvlink(
        kinds=("H200",),
        flops=989e12,
        memory=151397597184,
        memory_bandwidth=4800e9,
        link=450e9,
        source="NVIDIA H200 SXM data sheet (NVLink 900 GB/s both ways)",
    ),
    "b200": _on_nvlink(
        kinds=("B200",),
        flops=2250e12,
        memory=191514411008,
        memory_bandwidth=7672e9,
        link=900e9,
        source="NVIDIA HGX B200 data sheet (NVLink 1800 GB/s both ways)",
    ),
    "a100": _on_nvlink(
        kinds=("A100",),
        flops=312e12,
        memory=85100068864,
        memory_bandwidth=2039e9,
        link=300e9,
        source="NVIDIA A100 SXM 80GB data sheet (NVLink 600 GB/s both ways)",
    ),
    # Without NVLink: planned one at a time. Memory is what nvidia-smi shows in all.
    "l4": _alone("L4", 121, 23_034, 300),
    "l40s": _alone("L40S", 362, 46_068, 864),
    "rtx4090": _alone("RTX 4090", 165, 24_564, 1008),
    "rtx5090": _alone("RTX 5090", 209, 32_607, 1792),
    "cpu": Hardware(
        kinds=(),
        flops=None,
        source="a CPU has no peak of its own here: only sizes and counts are planned",
    ),
    # Trained on and not planned for: only their peak is known here.
    "h100_pcie": Hardware(
        kinds=("H100 PCIe",), flops=756e12, source="NVIDIA's data sheet"
    ),
    "l40": Hardware(kinds=("L40",), flops=181e12, source="NVIDIA's data sheet"),
    "t4": Hardware(kinds=("T4",), flops=65e12, source="NVIDIA's data sheet"),
}
"""By the name that starts a topology. Prices of TPUs: Google's list for the US, 2025;
`recurjax plan --price` replaces them."""


def peak_flops(device: Any) -> float | None:
    """Returns the device's peak FLOP/s, or None when it is not in the table (CPUs).

    Of several names that are parts of the device's, the longest counts: "H100 PCIe"
    before "H100", "TPU v5 lite" before "TPU v5".
    """
    # A part of a name is enough, for drivers append form factor and memory ("NVIDIA
    # H100 80GB HBM3").
    matches = [
        (len(kind), hardware.flops)
        for hardware in HARDWARE.values()
        for kind in hardware.kinds
        if kind in device.device_kind
    ]
    return max(matches)[1] if matches else None


def is_flat_slice(device: Any) -> bool:
    """Whether its slices are flat (v5e): axes of a mesh may then be cut in pieces.

    As `jax.make_mesh` decides it.
    """
    return device.device_kind in ("TPU v5 lite", "TPU v5e")
