"""Peak arithmetic rates of accelerators, for model FLOPs utilisation."""

from typing import Any

PEAK_FLOPS: tuple[tuple[str, float], ...] = (
    ("H200", 989e12),
    ("H100 PCIe", 756e12),
    ("H100", 989e12),
    ("A100", 312e12),
    ("L40S", 362e12),
    ("L40", 181e12),
    ("L4", 121e12),
    ("T4", 65e12),
    ("TPU v6", 918e12),
    ("TPU v5p", 459e12),
    ("TPU v5 lite", 197e12),
    ("TPU v5e", 197e12),
    ("TPU v5", 459e12),
    ("TPU v4", 275e12),
)
"""Dense bfloat16 (T4: float16) FLOP/s a device, by a part of jax's `device_kind`; first
match wins. Source: the vendors' data sheets."""


def peak_flops(device: Any) -> float | None:
    """Returns the device's peak FLOP/s, or None when it is not in the table (CPUs)."""
    kind = device.device_kind
    return next((peak for part, peak in PEAK_FLOPS if part in kind), None)
