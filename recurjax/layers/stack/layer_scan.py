"""A scan over stacked layers that takes bfloat16 weights one layer at a time."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Float

from pallas_kernels import target
from recurjax.types import Array

Remat = Literal["nothing", "dots", "block"]


def scan_layers(
    body: Callable,
    carry: Any,
    layers: Any,
    *,
    remat: Remat,
    unroll: int,
    cached: bool,
    reverse: bool = False,
) -> tuple[Any, Any]:
    """Computes `lax.scan(body, carry, layers)`.

    XLA's CPU backend has no bfloat16 of its own: to take a layer from a bfloat16 stack,
    it first widens the whole stack to float32, again in every call. So where
    nothing is differentiated, such stacks are scanned as their bits.

    Args:
      layers: the scan's xs; the leading axis of each leaf counts the layers.
      remat, unroll: see `rematerialize` and `lax.scan`.
      cached: a prefill or a decode step, not training.
      reverse: the last layer first.
    """
    body = rematerialize(body, remat)
    scan = partial(jax.lax.scan, unroll=unroll, reverse=reverse)
    narrow = jax.tree.map(lambda leaf: leaf.dtype == jnp.bfloat16, layers)
    # Training differentiates, and integers have no gradient: bits are for calls with a
    # cache.
    if not (cached and target.widens_bfloat16() and any(jax.tree.leaves(narrow))):
        return scan(body, carry, layers)

    def on_bits(carry, bits):
        return body(carry, jax.tree.map(_from_bits, bits, narrow))

    bits = jax.tree.map(_to_bits, layers, narrow)
    return scan(on_bits, carry, bits)


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


_FEW = 2
"""Turns whose weights fit on a TPU's chip beside each other. Of three XLA did not take
them all, as compiled for a v5e, of any width."""


def layers_a_turn(
    x: Float[Array, "B T D"], unroll: int, turns: int, *, cached: bool
) -> int:
    """Returns how many of a scan's turns are unrolled: all in a GPU's decode step.

    XLA for TPUs reads each layer's weights in place in a loop too, but of two layers it
    takes both to the chip at each.

    Args:
      unroll: as the config has it.
      turns: of the scan.
      cached: a prefill or a decode step, not training.
    """
    if cached and x.shape[1] == 1 and target.prefers_unrolled_decode():
        return turns
    return loops_a_turn(x, min(unroll, turns), turns, cached=cached)


def loops_a_turn(
    x: Float[Array, "B T D"], unroll: int, turns: int, *, cached: bool
) -> int:
    """Returns the same of loops over one stack: all if few in a TPU's decode step."""
    decodes = cached and x.shape[1] == 1
    few = turns <= _FEW and target.prefetches_to_vmem()
    return turns if decodes and few else unroll


def _to_bits(x: Array, narrow: bool) -> Array:
    return _bits(x) if narrow else x


def _from_bits(x: Array, narrow: bool) -> Array:
    return jax.lax.bitcast_convert_type(x, jnp.bfloat16) if narrow else x


@jax.custom_jvp
def _bits(x: Array) -> Array:
    return jax.lax.bitcast_convert_type(x, jnp.uint16)


@_bits.defjvp
def _bits_jvp(*_):
    # Integers have no gradient: without this rule it would be zero, silently.
    raise NotImplementedError(
        "scan_layers: a call with a cache has no gradient in bfloat16 weights on CPU: "
        "keep the parameters in float32"
    )
