"""PyTorch: a run out as a module that stands by itself, and back."""

from recurjax.convert.torch.export import (
    compare_with_export,
    compare_with_hf,
    from_torch,
    to_torch,
)

__all__ = ["compare_with_export", "compare_with_hf", "from_torch", "to_torch"]
