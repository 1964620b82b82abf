"""Peak rates of one device of each kind, and their sources.

The one table of hardware: model FLOPs utilisation reads a device's peak from it, plans
read the rest.
"""

from dataclasses import dataclass
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
    # 2 us is the low end of what a kernel inside an XLA loop was seen to cost.
    "h100": Hardware(
        kinds=("H100",),
        flops=989e12,
        memory=84942979072,
        memory_bandwidth=3352e9,
        link=450e9,
        links_per_axis=1,
        launch=2e-6,
        source="NVIDIA H100 SXM data sheet (NVLink 900 GB/s both ways); 2 us a kernel",
    ),
    "cpu": Hardware(
        kinds=(),
        flops=None,
        source="a CPU has no peak of its own here: only sizes and counts are planned",
    ),
    # Trained on and not planned for: only their peak is known here.
    "h200": Hardware(kinds=("H200",), flops=989e12, source="NVIDIA's data sheet"),
    "h100_pcie": Hardware(
        kinds=("H100 PCIe",), flops=756e12, source="NVIDIA's data sheet"
    ),
    "a100": Hardware(kinds=("A100",), flops=312e12, source="NVIDIA's data sheet"),
    "l40s": Hardware(kinds=("L40S",), flops=362e12, source="NVIDIA's data sheet"),
    "l40": Hardware(kinds=("L40",), flops=181e12, source="NVIDIA's data sheet"),
    "l4": Hardware(kinds=("L4",), flops=121e12, source="NVIDIA's data sheet"),
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
