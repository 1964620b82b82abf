"""Activation checkpointing of a scanned block."""

from collections.abc import Callable
from typing import Literal

import jax

Remat = Literal["nothing", "dots", "block"]


def rematerialize(body: Callable, remat: Remat, *, scanned: bool = True) -> Callable:
    """Wraps a layer so that its backward pass computes part of it again.

    Args:
      body: the function of (carry, x) given to `lax.scan`.
      remat: "nothing" keeps all residuals; "dots" keeps the outputs of matrix products
        without batch dimensions (those with weights) and computes the rest again;
        "block" keeps the body's input only.
      scanned: whether a scan runs the body. Nothing can be merged across a scan's
        turns; outside one, the compiler would find forward and recomputed values to be
        the same and keep them, so a barrier stands between.
    """
    if remat == "nothing":
        return body
    dots = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    policy = dots if remat == "dots" else None
    # No policy keeps nothing but the body's input.
    return jax.checkpoint(body, policy=policy, prevent_cse=not scanned)
