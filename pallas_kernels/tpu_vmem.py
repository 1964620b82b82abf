"""How much of a TPU's VMEM a kernel may use; a v4 has 16 MiB, too little for these."""

import jax

_MIB = 2**20
KERNEL_BYTES = {
    # Of 128 MiB.
    **dict.fromkeys(("TPU v5 lite", "TPU v5e", "TPU v6 lite", "TPU v6e"), 120 * _MIB),
    # Of 64 MiB.
    **dict.fromkeys(("TPU v5", "TPU v5p"), 56 * _MIB),
}
"""By jax's name of the device, for the TPUs that the kernels were compiled for."""
LEAST = min(KERNEL_BYTES.values())
"""What a kernel may use that is cut alike for all of them."""


def refusal_of_device() -> str | None:
    """Returns why the TPU kernels cannot run here, None when they can."""
    device = jax.devices()[0]
    if device.platform != "tpu":
        return f"needs a TPU, found {device.platform}"
    if device.device_kind not in KERNEL_BYTES:
        return f"needs the VMEM of a v5e, v5p or v6e, found {device.device_kind}"
    return None


def kernel_bytes() -> int:
    """Returns what a kernel may use here; without a TPU, what most of them allow."""
    return KERNEL_BYTES.get(jax.devices()[0].device_kind, max(KERNEL_BYTES.values()))
