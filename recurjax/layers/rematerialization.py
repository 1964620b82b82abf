"""Activation checkpointing of a scanned block."""

from collections.abc import Callable
from typing import Literal

import jax

Remat = Literal["nothing", "dots", "block"]


def rematerialize(body: Callable, remat: Remat) -> Callable:
    """Wraps a scan's body so that its backward pass computes part of it again.

    Args:
      body: the function of (carry, x) given to `lax.scan`.
      remat: "nothing" keeps all residuals; "dots" keeps the outputs of matrix products
        without batch dimensions (those with weights) and computes the rest again;
        "block" keeps the body's input only.
    """
    if remat == "nothing":
        return body
    dots = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    policy = dots if remat == "dots" else None
    # Inside a scan nothing can be merged across iterations, so CSE needs no barrier.
    return jax.checkpoint(body, policy=policy, prevent_cse=False)
