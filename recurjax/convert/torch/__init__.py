"""PyTorch: exports a run as a self-contained module, and reads it back."""

from recurjax.convert.torch.export import (
    compare_with_export,
    compare_with_hf,
    from_torch,
    to_torch,
)

__all__ = ["compare_with_export", "compare_with_hf", "from_torch", "to_torch"]
