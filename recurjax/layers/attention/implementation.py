"""Which implementation of attention serves a call: what each refuses, and the order."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax.numpy as jnp

from pallas_kernels import mesh_cut, target

AttentionImplementation = Literal["cudnn", "blocks", "xla"]

_BLOCKS_FROM = 1024  # Shorter sequences' logits fit beside everything else.
_CUDNN_HEAD_WIDTH = 128  # The widest head for which cuDNN has a backward on every GPU.


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """What is static of a call of `attend`.

    Attributes:
      shape: [B, T, H, E] of the queries.
      key_heads: K.
      dtype: of the queries.
      causal, window, soft_cap: the caller's.
      dense: whether there is a mask or a bias as an array.
      segments, alibi: whether there are any.
    """

    shape: tuple[int, ...]
    key_heads: int
    dtype: Any
    causal: bool
    window: int | None
    dense: bool
    segments: bool
    alibi: bool
    soft_cap: float | None

    @property
    def length(self) -> int:
        """T."""
        return self.shape[1]


def choose(
    call: Call, named: AttentionImplementation | None
) -> AttentionImplementation:
    """Returns the one that is named, else the first that serves.

    Raises:
      NotImplementedError: the named one cannot.
    """
    if named is not None:
        reason = _REFUSALS[named](call)
        if reason is not None:
            raise NotImplementedError(f"attend: {named}: {reason}")
        return named
    for name, refusal in _REFUSALS.items():
        # Logits of a long row would be the largest array of a training step; those of
        # a short one are computed fastest at once.
        if name == "blocks" and call.length < _BLOCKS_FROM:
            continue
        if refusal(call) is None:
            return name
    raise AssertionError("xla serves every call")


def _refusal_of_dense(call: Call) -> str | None:
    if call.dense:
        return "a dense mask or bias would cost O(T S) memory"
    return None if call.causal else "only causal attention is served"


def _refusal_of_cudnn(call: Call) -> str | None:
    if call.soft_cap is not None:
        return "a soft cap is not supported"
    if call.dense:
        return "a dense mask or bias would cost O(T S) memory"
    if call.segments:
        return "documents of packed rows would be a dense mask of O(T S) memory"
    if call.dtype not in (jnp.bfloat16, jnp.float16):
        return f"dtype must be bfloat16 or float16, got {call.dtype}"
    if call.alibi:
        return "a bias, as ALiBi is, would be a dense array of O(T S) memory"
    E = call.shape[3]
    if E % 8 or E > _CUDNN_HEAD_WIDTH:
        return f"head width must be a multiple of 8 up to 128, got {E}"
    if not target.current().calls_cudnn:
        return f"needs a GPU with cuDNN, found {target.current().platform}"
    return target.refusal_of_capability()


def find_cut(rows: int, key_heads: int) -> mesh_cut.Cut | None:
    """Returns how the mesh that is set cuts a call: by rows, and by whole key heads."""
    return mesh_cut.find_cut(rows, lambda devices: key_heads % devices == 0)


_REFUSALS: dict[AttentionImplementation, Callable[[Call], str | None]] = {
    "cudnn": _refusal_of_cudnn,
    "blocks": _refusal_of_dense,
    "xla": lambda call: None,
}
"""By name, why one cannot serve a call, or None; in order of preference."""
