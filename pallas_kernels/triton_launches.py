"""What launches of kernels in Triton's language share: jax's, and PyTorch's.

This file imports nothing, because `recurjax convert to-torch` copies it.
"""

LEAST_TRITON = (3, 6)
"""The kernels carry tuples through loops, which older releases cannot."""


def serves_kernels(version: str) -> bool:
    """Whether a release of Triton compiles the kernels."""
    return tuple(map(int, version.split(".")[:2])) >= LEAST_TRITON


def find_stretches(
    T: int, width: int, warps: int, *, enough: int, full: int, shortest: int
) -> int:
    """Returns how many stretches a row of T positions of `width` elements is cut into.

    Args:
      warps: that walk the rows if none is cut.
      enough: warps from which on none is cut.
      full: warps that rows are cut for where there are fewer.
      shortest: positions of a stretch, at least.
    """
    # Kernels count a stretch's elements in 32 bits.
    stretches = -(-T * width // 2**29)
    if warps >= enough:
        return stretches
    return max(stretches, min(-(-full // warps), T // shortest))
