"""Which calls the scans' GPU kernels serve: those of `pallas_kernels`, in Triton."""

from typing import Any

import torch
from torch import Tensor

from pallas_kernels.triton_launches import serves_kernels

try:
    import triton
    import triton.language as tl  # noqa: F401
except ImportError:  # plain torch computes every scan
    triton: Any = None


def runs_kernels(*tensors: Tensor) -> bool:
    """Whether kernels scan these: on an NVIDIA GPU, with a Triton that is new enough.

    A compiled module is plain torch, and so is a step of generation. No GPU has run the
    kernels yet: with `triton = None` in this module plain torch computes everywhere.
    """
    x = tensors[0]
    return (
        triton is not None
        and serves_kernels(triton.__version__)
        and x.is_cuda
        and torch.version.cuda is not None
        and torch.cuda.get_device_capability(x.device) >= (8, 0)
        and not torch.compiler.is_compiling()
        and x.shape[1] > 1
        and all(x.dtype in (torch.float32, torch.bfloat16) for x in tensors)
    )


def launch(
    kernel: Any, programs: int, *arguments: Any, warps: int = 1, **constants: Any
) -> None:
    """Runs a kernel in so many programs, on the device of its first tensor."""
    with torch.cuda.device_of(arguments[0]):
        options = {"num_warps": warps, "num_stages": 1}
        kernel[(programs,)](*arguments, **options, **constants)
