"""The XLA backend: loops over positions in parallel over chunks, or over blocks.

On CPU: one loop of T turns, restarted every C positions; a turn costs a microsecond or
less there, and memory is read in its own order. Elsewhere a turn costs launches. Within
chunks: one loop of C turns over all chunks at once. Over the full sequence: blocks of
`_BLOCK` positions: their summaries in parallel, an associative scan of the T / `_BLOCK`
summaries, then the blocks again from their true states. The second pass reads the
inputs again and needs no array of products.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float

from pallas_kernels import target
from pallas_kernels.gated_scan.call import (
    GatedScanCall,
    ScanOutputs,
    States,
    gate_of,
    pull_back,
)
from pallas_kernels.gated_scan.folded_scan import (
    scan_backward,
    scan_forward,
    summarize_backward,
    summarize_forward,
)
from pallas_kernels.gated_scan.queries import pull_apart, read_apart

Array = jax.Array

_BLOCK = 128


def supported(call: GatedScanCall) -> str | None:
    """Returns which size it has no use for; it does everything else."""
    in_blocks = call.period is None and target.current().platform != "cpu"
    taken = ("stretch",) if in_blocks else ()
    return call.options.blocks.refusal_beyond(*taken)


def forward(call: GatedScanCall, *, residuals: bool) -> tuple[ScanOutputs, States]:
    """Returns the outputs, and all states."""
    del residuals  # What nobody reads the compiler leaves out.
    lengths, (_, T, _) = call.lengths, call.gate.shape
    dtype = jnp.promote_types(call.gate.dtype, jnp.float32)
    gate, values = gate_of(call.gate), call.values
    initial = tuple(h.astype(dtype) for h in call.initial)
    narrow = tuple(v.dtype for v in values)
    if lengths is not None:  # Final states are read from all states: keep those wide.
        values = tuple(v.astype(dtype) for v in values)
    states, last = jax.lax.platform_dependent(
        gate,
        values,
        initial,
        call.starts,
        cpu=partial(chunked_forward, size=T, period=call.options.chunk),
        default=partial(blocked_forward, size=_block(call))
        if call.period is None
        else partial(chunked_forward, size=call.period),
    )
    if lengths is not None:
        at = jnp.maximum(lengths - 1, 0)[:, None, None]
        last = tuple(
            jnp.where(
                (lengths > 0)[:, None], jnp.take_along_axis(h, at, axis=1)[:, 0], h_in
            )
            for h, h_in in zip(states, initial, strict=True)
        )
    states = tuple(h.astype(d) for h, d in zip(states, narrow, strict=True))
    return read_apart(call, states, last), states


def backward(
    call: GatedScanCall, residuals: States, cotangents: ScanOutputs
) -> GatedScanCall:
    """Returns gradients in place of the arrays, all but the queries' wide."""
    d_states, dq = pull_apart(call, residuals, cotangents)
    d_finals, lengths = cotangents.finals, call.lengths
    T, dtype = call.gate.shape[1], jnp.promote_types(call.gate.dtype, jnp.float32)
    g = gate_of(call.gate)  # Again: kept, it would be the widest of what is.
    initial = tuple(h.astype(dtype) for h in call.initial)
    passed = tuple(jnp.zeros_like(h) for h in initial)
    # With lengths the last state is one of the states: its gradient is added there. A
    # row without a position ends as it began: its gradient passes straight through.
    if lengths is not None:
        none = (lengths == 0)[:, None]
        passed = tuple(jnp.where(none, d, 0) for d in d_finals)
        at = (jnp.arange(len(lengths)), jnp.maximum(lengths - 1, 0))
        d_states = tuple(
            dh.astype(dtype).at[at].add(jnp.where(none, 0, d))
            for dh, d in zip(d_states, d_finals, strict=True)
        )
        d_finals = tuple(jnp.zeros_like(d) for d in d_finals)
    d_gate, d_values, d_initial = jax.lax.platform_dependent(
        g,
        call.values,
        initial,
        call.starts,
        residuals,
        d_states,
        d_finals,
        cpu=partial(chunked_backward, size=T, period=call.options.chunk),
        default=partial(blocked_backward, size=_block(call))
        if call.period is None
        else partial(chunked_backward, size=call.period),
    )
    d_initial = tuple(d + p for d, p in zip(d_initial, passed, strict=True))
    return call._replace(
        gate=pull_back(call.gate, g, d_gate),
        values=d_values,
        initial=d_initial,
        starts=None,
        lengths=None,
        queries=dq,
    )


def _block(call: GatedScanCall) -> int:
    """Returns the positions of a block of a full sequence."""
    sizes = call.options.blocks.given()
    return min(sizes.get("stretch", _BLOCK), call.gate.shape[1])


def blocked_forward(
    gate: Float[Array, "B T D"],
    values: tuple[Float[Array, "B T _"], ...],
    initial: tuple[Float[Array, "B D"], ...],
    starts: Bool[Array, "B T"] | None,
    *,
    size: int,
):
    """Runs one recurrence over the full sequence, block after block."""
    T, dtype = gate.shape[1], initial[0].dtype
    gate, values, starts = _fold_inputs(gate, values, starts, size)
    # Each block's effect on any state. Folded, this gives the state before each block,
    # from which all blocks run at once.
    product, added = summarize_forward(gate, values, starts, dtype)
    entering = tuple(
        _combine(product, h, h_in) for h, h_in in zip(added, initial, strict=True)
    )
    states, last = scan_forward(gate, values, starts, entering)
    return _unfold(states, T), tuple(h[:, -1] for h in last)


def blocked_backward(
    gate: Float[Array, "B T D"],
    values: tuple[Float[Array, "B T _"], ...],
    initial: tuple[Float[Array, "B D"], ...],
    starts: Bool[Array, "B T"] | None,
    states: tuple[Float[Array, "B T D"], ...],
    d_states: tuple[Float[Array, "B T D"], ...],
    d_finals: tuple[Float[Array, "B D"], ...],
    *,
    size: int,
):
    """Runs its gradient, block before block."""
    T, dtype = gate.shape[1], initial[0].dtype
    gate, values, starts = _fold_inputs(gate, values, starts, size)
    states = tuple(_fold(h, size, "edge") for h in states)
    d_states = tuple(_fold(dh, size, 0) for dh in d_states)
    product, added = summarize_backward(gate, starts, d_states, dtype)
    backwards = product[:, ::-1]
    d_last = tuple(
        _combine(backwards, u[:, ::-1], d)[:, ::-1]
        for u, d in zip(added, d_finals, strict=True)
    )
    entering = tuple(
        jnp.concatenate([h_in[:, None], h[:, :-1, -1].astype(dtype)], axis=1)
        for h_in, h in zip(initial, states, strict=True)
    )
    d_gate, d_values, d_entering = scan_backward(
        gate, values, starts, entering, states, d_states, d_last
    )
    d_initial = tuple(d[:, 0] for d in d_entering)
    return _unfold((d_gate,), T)[0], _unfold(d_values, T), d_initial


def chunked_forward(
    gate: Float[Array, "B T D"],
    values: tuple[Float[Array, "B T _"], ...],
    initial: tuple[Float[Array, "B D"], ...],
    starts: Bool[Array, "B T"] | None,
    *,
    size: int,
    period: int | None = None,
):
    """Runs stretches of `size` positions side by side; only the first has a past."""
    T = gate.shape[1]
    gate, values, starts = _fold_inputs(gate, values, starts, size)
    entering = tuple(_at_chunk(h, gate.shape[1], 0) for h in initial)
    states, last = scan_forward(gate, values, starts, entering, period=period)
    return _unfold(states, T), tuple(h[:, -1] for h in last)


def chunked_backward(
    gate: Float[Array, "B T D"],
    values: tuple[Float[Array, "B T _"], ...],
    initial: tuple[Float[Array, "B D"], ...],
    starts: Bool[Array, "B T"] | None,
    states: tuple[Float[Array, "B T D"], ...],
    d_states: tuple[Float[Array, "B T D"], ...],
    d_finals: tuple[Float[Array, "B D"], ...],
    *,
    size: int,
    period: int | None = None,
):
    """Runs its gradient."""
    T = gate.shape[1]
    gate, values, starts = _fold_inputs(gate, values, starts, size)
    G = gate.shape[1]
    d_gate, d_values, d_entering = scan_backward(
        gate,
        values,
        starts,
        tuple(_at_chunk(h, G, 0) for h in initial),
        tuple(_fold(h, size, "edge") for h in states),
        tuple(_fold(dh, size, 0) for dh in d_states),
        tuple(_at_chunk(d, G, G - 1) for d in d_finals),
        period=period,
    )
    d_initial = tuple(d[:, 0] for d in d_entering)
    return _unfold((d_gate,), T)[0], _unfold(d_values, T), d_initial


def _combine(product, added, first):
    """Returns what enters each stretch: x[0] = first, x[j+1] = product x[j] + added."""

    def compose(early, late):
        return late[0] * early[0], late[0] * early[1] + late[1]

    products, sums = jax.lax.associative_scan(compose, (product, added), axis=1)
    later = products[:, :-1] * first[:, None] + sums[:, :-1]
    return jnp.concatenate([first[:, None], later], axis=1)


def _at_chunk(state, chunks: int, number: int):
    """Puts [B, D] at one of `chunks` chunks; zeros at the others."""
    here = (jnp.arange(chunks) == number)[None, :, None]
    return jnp.where(here, state[:, None], 0)


def _fold_inputs(gate, values, starts, size: int):
    """Folds; the padding's gate is 1, so that it carries the state along."""
    values = tuple(_fold(v, size, 0) for v in values)
    starts = None if starts is None else _fold(starts, size, False)
    return _fold(gate, size, 1), values, starts


def _fold(x, size: int, fill):
    """[B, T, ...] to [B, G, C, ...]."""
    padding = [(0, 0)] * x.ndim
    padding[1] = (0, -x.shape[1] % size)
    if padding[1][1]:
        how = {"mode": "edge"} if fill == "edge" else {"constant_values": fill}
        x = jnp.pad(x, padding, **how)
    return x.reshape(x.shape[0], -1, size, *x.shape[2:])


def _unfold(arrays, length: int):
    return tuple(x.reshape(x.shape[0], -1, x.shape[-1])[:, :length] for x in arrays)
