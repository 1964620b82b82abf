"""Properties of the device: platform, generation and memory.

Code elsewhere does not compare platforms: it calls a function of this module that names
the property it depends on, such as `prefers_unrolled_decode`.

Programs are made for jax's default device (`jax.default_device`), or this process's
first one. While it traces, jax does not say which device holds a program's arguments:
to run one on the CPU of a machine with a GPU, set the default device to the CPU, or use
`as_if`, as a plan does for absent devices. Both are part of the key of jit's
caches, so that a program traced for one target never runs on another.
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

_MIB = 2**20
LEAST_VMEM = 56 * _MIB
"""What a kernel may use that is cut alike for all TPUs: a v5p core's 64 MiB less what
the compiler keeps. A v4 has 16 MiB, too little for our kernels."""
MOST_VMEM = 120 * _MIB
"""What a kernel may use where there is no TPU to ask: that of a v5e or v6e."""
_COMPILER_S_VMEM = 8 * _MIB
_LEAST_CAPABILITY = 8
_SHARED_MEMORY = {
    **dict.fromkeys(("8.0", "8.7"), 166_912),
    # A10, L4, RTX 30, 40 and 50.
    **dict.fromkeys(("8.6", "8.9", "12.0", "12.1"), 101_376),
    **dict.fromkeys(("9.0", "10.0", "10.3"), 232_448),
}
"""Bytes of shared memory that a block may have, by compute capability: NVIDIA's table
of technical specifications, less the 1,024 bytes that the system keeps of each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """A device as far as the choice of a program depends on it.

    Attributes:
      platform: "cpu", "gpu" or "tpu".
      kind: jax's name of the device.
      compute_capability: compute capability of an NVIDIA GPU, such as "9.0"; "unknown"
        if jax has none.
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
        text = self.compute_capability.split(".")[0]
        return text.isdigit() and int(text) >= major


_SET = jax.make_user_context(None)


def current() -> Target:
    """Returns the target that `as_if` set, else jax's default device."""
    if _SET.value is not None:
        return _SET.value
    # A device, a platform's name, or None: the first device.
    default: Any = getattr(jax.config, "jax_default_device")  # noqa: B009
    if default is None or isinstance(default, str):
        default = jax.devices(default)[0]
    return Target.of(default)


def as_if(target: Target) -> AbstractContextManager[None]:
    """Makes tracing in this thread choose as on the target."""
    return _SET(target)


def shares_host_memory() -> bool:
    """Returns whether arrays take the host's memory: on a CPU.

    The operating system grants it on credit and kills the process that uses it up,
    where an accelerator's allocator raises an error.
    """
    return current().platform == "cpu"


def computes_on_few_cores() -> bool:
    """Returns whether a few cores with large caches do the work: on a CPU.

    What fits a core's cache causes no memory traffic, so small blocks pay off for short
    sequences. Arithmetic binds sooner than bandwidth, so a second sum over the same
    numbers costs as much as the first.
    """
    return current().platform == "cpu"


def widens_bfloat16() -> bool:
    """Returns whether bfloat16 is computed as float32: by XLA for CPUs.

    To read or write a part of a bfloat16 array, XLA of jaxlib before 0.12 converts the
    entire array to float32 and back (`tests/inference/test_compute_dtype.py` compiles
    both cases).
    """
    return current().platform == "cpu"


def reduces_one_by_one() -> bool:
    """Returns whether a maximum is taken one number at a time: by XLA for CPUs."""
    return current().platform == "cpu"


def copies_stacked_weights() -> bool:
    """Returns whether a loop over layers copies each layer's weights: on a CPU.

    XLA for CPUs has no product that reads a part of an array, so that it first copies
    each layer's weights out of their stack. A program of one layer, which the host
    calls for each, copies none.
    """
    return current().platform == "cpu"


def prefers_unrolled_decode() -> bool:
    """Returns whether a decode step is faster without a loop over layers: on a GPU.

    In a loop, XLA for GPUs copies each layer's weights out of their stack before it
    multiplies by them. For one token that is three times the bytes that a step has to
    move. A layer with a constant number is read in place.
    """
    return current().platform == "gpu"


def transposes_stacked_caches() -> bool:
    """Returns whether one layer's product can transpose all layers' cache: on a GPU.

    XLA for GPUs may give the entire cache the layout that the product of one layer
    likes best, which copies the cache at every token.
    """
    return current().platform == "gpu"


def tiles_memory() -> bool:
    """Returns whether arrays are stored in tiles of their last two axes: on a TPU.

    The last axis is padded to a multiple of 128. A matrix with a narrow last axis, such
    as a head's width, is copied to another layout for every product.
    """
    return current().platform == "tpu"


def prefetches_to_vmem() -> bool:
    """Returns whether XLA copies arrays that fit to the chip's memory: on a TPU.

    It copies all of a small array to use or change a part of it, in every step.
    """
    return current().platform == "tpu"


def slices_rows_slowly() -> bool:
    """Returns whether one slice per row costs more than reading all rows: on a TPU.

    For a slice at another place in every row, XLA for TPUs moves up to 20 times the
    array that the slices come from.
    """
    return current().platform == "tpu"


def refusal_of_host_calls() -> str | None:
    """Returns why programs cannot call this machine's C++ code, None when they can.

    A program for a target that `as_if` set may run elsewhere.
    """
    if _SET.value is not None:
        return "a program for an absent device calls no code of this machine"
    platform = current().platform
    return None if platform == "cpu" else f"needs a CPU, found {platform}"


def refusal_of_capability() -> str | None:
    """Returns why the GPU is too old for our kernels and cuDNN's, None if it is not."""
    device = current()
    if device.capability_at_least(_LEAST_CAPABILITY):
        return None
    capability = device.compute_capability
    return f"needs compute capability 8.0 or higher, found {capability}"


def refusal_of_triton() -> str | None:
    """Returns why Triton's kernels cannot run on the target, None when they can."""
    platform = current().platform
    if platform != "gpu":
        return f"needs an NVIDIA GPU, found {platform}"
    return refusal_of_capability()


def refusal_of_cudnn() -> str | None:
    """Returns why programs cannot call cuDNN's attention, None when they can."""
    device = current()
    if not device.calls_cudnn:
        return f"needs a GPU with cuDNN, found {device.platform}"
    return refusal_of_capability()


def on_hopper() -> bool:
    """Whether it is a GPU of compute capability 9.0: its matrix unit has no other."""
    return current().compute_capability == "9.0"


def shared_memory_bytes() -> int:
    """Returns what a GPU's kernel may have a block; off a GPU, what an H100's may."""
    target = current()
    if target.platform != "gpu":
        return _SHARED_MEMORY["9.0"]
    least = min(_SHARED_MEMORY.values())
    return _SHARED_MEMORY.get(target.compute_capability, least)


def refusal_of_tpu() -> str | None:
    """Returns why a program for any TPU cannot run on the target, None when it can."""
    platform = current().platform
    return None if platform == "tpu" else f"needs a TPU, found {platform}"


def refusal_of_mosaic_tpu() -> str | None:
    """Returns why the TPU kernels cannot run on the target, None when they can."""
    if (reason := refusal_of_tpu()) is not None:
        return reason
    kind = current().kind
    vmem = vmem_of(kind)
    if vmem is None:
        return f"needs a TPU that jax knows the VMEM of, found {kind}"
    if vmem < LEAST_VMEM:
        return (
            f"needs {LEAST_VMEM // _MIB} MiB of VMEM for a kernel, {kind} has "
            f"{vmem // _MIB}"
        )
    return None


def vmem_bytes() -> int:
    """Returns what a kernel may use of VMEM; off a TPU, what most of them allow."""
    vmem = vmem_of(current().kind)
    return MOST_VMEM if vmem is None else vmem


@cache
def vmem_of(kind: str) -> int | None:
    """Returns what a kernel may use of a core's VMEM, by jax's name of the TPU.

    None for names that jax does not know.
    """
    from jax.experimental.pallas import tpu as pltpu  # a tenth of jax's own import

    # jax reports on the device that programs are lowered for; here it is one by name.
    # Under a mesh jax accepts only a mesh of the same size, so set an empty one first.
    device = AbstractDevice(kind, 1, "tpu")
    named = AbstractMesh((1,), ("x",), (AxisType.Auto,), abstract_device=device)
    set_mesh = jax.sharding.use_abstract_mesh
    with set_mesh(AbstractMesh((), ())), set_mesh(named):
        try:
            capacity = pltpu.get_tpu_info().vmem_capacity_bytes
        except ValueError:
            return None
    return capacity - _COMPILER_S_VMEM
