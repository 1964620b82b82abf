"""What one device of each kind can do at most, and where the figures come from."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """Peak figures of one device.

    Attributes:
      flops: dense bfloat16 FLOP/s; None: no meaningful peak (a CPU).
      memory: bytes that programs can use; None: not known.
      memory_bandwidth: bytes/s to and from that memory.
      link: bytes/s that a device sends to one neighbour; both directions at once.
      links_per_axis: neighbours along one axis of the interconnect: 2 in a ring, and
        1 where all devices hang on one switch (`link` is then the whole device's).
      ring: devices along an axis of the topology from which it closes to a ring; a
        shorter axis is a chain, which carries half. 0: a switch, nothing to close.
      launch: seconds that a kernel costs at least, however small; 0: not counted.
      price: US$ a device-hour, on demand; None: differs too much between vendors.
      source: of the figures.
    """

    flops: float | None
    memory: int | None
    memory_bandwidth: float | None
    link: float | None = None
    links_per_axis: int = 2
    ring: int = 0
    launch: float = 0.0
    price: float | None = None
    source: str


HARDWARE: dict[str, Hardware] = {
    "v4": Hardware(
        flops=275e12,
        memory=32 * 2**30,
        memory_bandwidth=1200e9,
        link=50e9,
        ring=4,
        price=3.22,
        source="docs.cloud.google.com/tpu/docs/v4; links: arXiv 2304.01433",
    ),
    "v5e": Hardware(
        flops=197e12,
        memory=16 * 2**30,
        memory_bandwidth=819e9,
        link=50e9,
        ring=16,
        price=1.20,
        source="docs.cloud.google.com/tpu/docs/v5e (ICI 400 GB/s both ways, 4 ports)",
    ),
    "v5p": Hardware(
        flops=459e12,
        memory=95 * 2**30,
        memory_bandwidth=2765e9,
        link=100e9,
        ring=4,
        price=4.20,
        source="docs.cloud.google.com/tpu/docs/v5p (ICI 1200 GB/s both ways, 6 ports)",
    ),
    "v6e": Hardware(
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
        flops=989e12,
        memory=84942979072,
        memory_bandwidth=3352e9,
        link=450e9,
        links_per_axis=1,
        launch=2e-6,
        source="NVIDIA H100 SXM data sheet (NVLink 900 GB/s both ways); 2 us a kernel",
    ),
    "cpu": Hardware(
        flops=None,
        memory=None,
        memory_bandwidth=None,
        source="a CPU has no peak of its own here: only sizes and counts are planned",
    ),
}
"""By the name that starts a topology. Prices of TPUs: Google's list for the US, 2025;
`recurjax plan --price` replaces them."""
