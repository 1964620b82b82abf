"""What a device can do, asked in one place: its platform, its generation, its memory.

Programs are made for the first device of this process. A plan makes them for devices
that are not here: it sets the target with `as_if`. The target is part of the key of
jit's caches, so that a program traced for one is never run or compiled for another.
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import jax

_MIB = 2**20
VMEM = {
    # Of 128 MiB.
    **dict.fromkeys(("TPU v5 lite", "TPU v5e", "TPU v6 lite", "TPU v6e"), 120 * _MIB),
    # Of 64 MiB.
    **dict.fromkeys(("TPU v5", "TPU v5p"), 56 * _MIB),
}
"""Bytes of a TPU's VMEM that a kernel may use, by jax's name of the device: the TPUs
that our kernels were compiled for. A v4 has 16 MiB, too little for them."""
LEAST_VMEM = min(VMEM.values())
"""What a kernel may use that is cut alike for all of them."""
_LEAST_CAPABILITY = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """A device as far as the choice of a program depends on it.

    Attributes:
      platform: "cpu", "gpu" or "tpu".
      kind: jax's name of the device.
      compute_capability: of an NVIDIA GPU, such as "9.0"; "unknown" where jax has none.
      cudnn: whether a GPU's programs may call cuDNN; only a machine that has cuDNN can
        compile them.
    """

    platform: str
    kind: str
    compute_capability: str = "unknown"
    cudnn: bool = True

    @classmethod
    def of(cls, device: Any, *, cudnn: bool = True) -> "Target":
        """Describes a device of jax, which may be one that can only be compiled for."""
        return cls(
            platform=device.platform,
            kind=device.device_kind,
            compute_capability=str(getattr(device, "compute_capability", "unknown")),
            cudnn=cudnn,
        )

    @property
    def calls_cudnn(self) -> bool:
        """Whether programs may call cuDNN."""
        return self.platform == "gpu" and self.cudnn

    def capability_at_least(self, major: int) -> bool:
        """Whether it is an NVIDIA GPU of this compute capability or a later one."""
        found = self.compute_capability.split(".")[0]
        return found.isdigit() and int(found) >= major


_SET = jax.make_user_context(None)


def current() -> Target:
    """Returns the target that `as_if` set, else this process's first device."""
    return Target.of(jax.devices()[0]) if _SET.value is None else _SET.value


def as_if(target: Target) -> AbstractContextManager[None]:
    """Makes tracing choose, in this thread, what it would on the target."""
    return _SET(target)


def refusal_of_capability() -> str | None:
    """Returns why the GPU is too old for our kernels and cuDNN's, None if it is not."""
    device = current()
    if device.capability_at_least(_LEAST_CAPABILITY):
        return None
    found = device.compute_capability
    return f"needs compute capability 8.0 or higher, found {found}"


def refusal_of_triton() -> str | None:
    """Returns why Triton's kernels cannot run on the target, None when they can."""
    platform = current().platform
    if platform != "gpu":
        return f"needs an NVIDIA GPU, found {platform}"
    return refusal_of_capability()


def refusal_of_mosaic_tpu() -> str | None:
    """Returns why the TPU kernels cannot run on the target, None when they can."""
    target = current()
    if target.platform != "tpu":
        return f"needs a TPU, found {target.platform}"
    if target.kind not in VMEM:
        return f"needs the VMEM of a v5e, v5p or v6e, found {target.kind}"
    return None


def vmem_bytes() -> int:
    """Returns what a kernel may use of VMEM; off a TPU, what most of them allow."""
    return VMEM.get(current().kind, max(VMEM.values()))
