"""Selects the implementation of an attention call by what each supports."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax.numpy as jnp

from pallas_kernels import cpu, mesh_cut, target
from pallas_kernels.cpu import attention as cpu_attention
from recurjax.layers.attention import alibi_channels

AttentionImplementation = Literal["cudnn", "splash", "cpu", "blocks", "xla"]

_BLOCKS_FROM, _SPLASH_FROM = 1024, 512
"""The logits of shorter sequences always fit in memory."""
_KERNELS_FROM = 256
"""Where blocks are our own kernels: they move less from here on. Both passes of 64
rows, 22 heads of 64, packed, compiled: T 512 3.4 for 16.7 GB on an H100, 3.9 for 12.2
on a v5e; T 256 1.7 for 4.8 and 1.8 for 3.2. Bands in XLA do not: with ALiBi 21.2 for
16.7 at T 512 on an H100."""
_BLOCKS_FROM_ON_CPU = 64
"""There a block's logits stay in the cache: CPU time of a thread, both passes, blocks
for one piece, 9 heads of 64 on 3 key heads: 20 for 99 ms at B 2, T 512; 4 heads of 16
at B 32, T 64: 2.6 for 2.8."""
_CPU_FROM = 64
"""The C++ kernels compute full tiles of 64 tokens. Both passes of 8 rows, 4 heads of
64, two cores of an EPYC: T 64 0.91 ms, xla 1.58; T 32 0.88, xla 0.65."""
_CUDNN_HEAD_WIDTH, _CUDNN_HEAD_WIDTH_OF_HOPPER = 128, 256
"""The widest heads for which cuDNN has a backward: on every GPU, and from 9.0 on."""
_SPLASH_MULTIPLE = 128  # Of a block's tokens.


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionCall:
    """The static properties of a call of `attend`.

    Attributes:
      shape: [B, T, H, E] of the queries.
      key_heads: K.
      dtype: dtype of the queries.
      mixed: whether keys or values have another dtype.
      causal, window, soft_cap: the caller's.
      dense: whether there is a mask or a bias as an array.
      segments, alibi: whether there are any.
    """

    shape: tuple[int, ...]
    key_heads: int
    dtype: Any
    mixed: bool
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

    @property
    def plain(self) -> bool:
        """Whether only causality and documents tell who sees whom, and nothing else."""
        return self.window is None and not self.alibi and self.soft_cap is None


def choose(
    call: AttentionCall, named: AttentionImplementation | None
) -> AttentionImplementation:
    """Returns the named implementation, else the first that supports the call.

    Raises:
      NotImplementedError: the named one cannot.
    """
    if named is not None:
        reason = _REFUSALS[named](call)
        if reason is not None:
            raise NotImplementedError(f"attend: {named}: {reason}")
        return named
    for name, refusal in _REFUSALS.items():
        if refusal(call) is None and _pays(name, call):
            return name
    raise AssertionError("xla serves every call")


def _pays(name: AttentionImplementation, call: AttentionCall) -> bool:
    """Whether one that can serve a call is to be taken unasked."""
    if name == "splash":
        # Plain causal attention and packed rows have kernels of our own, in blocks.
        return not call.plain and call.length >= _SPLASH_FROM
    if name == "cpu":
        return call.length >= _CPU_FROM
    # Logits of a long row would be the largest array of a training step; those of a
    # short one are computed fastest at once.
    if name != "blocks":
        return True
    if target.computes_on_few_cores():
        return call.length >= _BLOCKS_FROM_ON_CPU
    return call.length >= (_KERNELS_FROM if call.plain else _BLOCKS_FROM)


def _refusal_of_dense(call: AttentionCall) -> str | None:
    if call.dense:
        return "a dense mask or bias would cost O(T S) memory"
    return None if call.causal else "only causal attention is served"


def _refusal_of_channels(call: AttentionCall) -> str | None:
    """Returns why ALiBi cannot be brought in by more channels, where there is any."""
    if not call.alibi:
        return None
    return alibi_channels.refusal(call.length, call.dtype)


def _refusal_of_cudnn(call: AttentionCall) -> str | None:
    if call.soft_cap is not None:
        return "a soft cap is not supported"
    if call.dense:
        return "a dense mask or bias would cost O(T S) memory"
    if call.segments:
        return "documents of packed rows would be a dense mask of O(T S) memory"
    if call.dtype not in (jnp.bfloat16, jnp.float16):
        return f"dtype must be bfloat16 or float16, got {call.dtype}"
    E = call.shape[3]
    more = alibi_channels.CHANNELS if call.alibi else 0
    widest = _CUDNN_HEAD_WIDTH
    if target.current().capability_at_least(9):
        widest = _CUDNN_HEAD_WIDTH_OF_HOPPER
    if E % 8 or E + more > widest:
        beside = f" and {more} channels for ALiBi" if more else ""
        return f"head width must be a multiple of 8 up to {widest}, got {E}{beside}"
    return target.refusal_of_cudnn() or _refusal_of_channels(call)


def _refusal_of_splash(call: AttentionCall) -> str | None:
    if (reason := _refusal_of_dense(call)) is not None:
        return reason
    if call.dtype != jnp.bfloat16:
        return f"dtype must be bfloat16, got {call.dtype}"
    if call.length % _SPLASH_MULTIPLE:
        return f"the length must be a multiple of {_SPLASH_MULTIPLE}, got {call.length}"
    if call.alibi and call.soft_cap is not None:
        return "the soft cap would be taken of ALiBi's bias too"
    if (reason := target.refusal_of_tpu()) is not None:
        return reason
    cut = find_cut(call.shape[0], call.key_heads)
    return _refusal_of_channels(call) or (None if cut is None else cut.refusal)


def _refusal_of_cpu(call: AttentionCall) -> str | None:
    if (reason := _refusal_of_dense(call)) is not None:
        return reason
    if call.mixed:
        return "needs q, k and v of one dtype"
    E, cap = call.shape[3], call.soft_cap
    if (reason := cpu_attention.refusal(E, call.dtype, soft_cap=cap)) is not None:
        return reason
    cut = find_cut(call.shape[0], call.key_heads)
    return cpu.refusal() or (None if cut is None else cut.refusal)


def find_cut(rows: int, key_heads: int) -> mesh_cut.Cut | None:
    """Returns how the current mesh shards a call: by rows, and by key heads."""
    return mesh_cut.find_cut(rows, lambda devices: key_heads % devices == 0)


_REFUSALS: dict[AttentionImplementation, Callable[[AttentionCall], str | None]] = {
    "cudnn": _refusal_of_cudnn,
    "splash": _refusal_of_splash,
    "cpu": _refusal_of_cpu,
    "blocks": _refusal_of_dense,
    "xla": lambda call: None,
}
"""By name, why one cannot serve a call, or None; in order of preference."""
