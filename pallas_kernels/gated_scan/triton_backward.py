"""The Triton kernels of the backward pass.

`_backward_kernel`: the same programs as forward, in reverse. With l[t] the gradient of
h[t]: l[t] = dh[t] + g[t+1] l[t+1]; dv = (1 - g) l; dg = l (h[t-1] - v). One loop makes
all of it; a narrow stream's gradient is summed over its tiles on chip. Gate,
values, states and their gradients cross memory once, gate and the states' gradients
twice where stretches are linked. Where queries read the last stream, dh[t] of it is
d_logits[t] q[t], made here, and that of the queries is summed over the heads here.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.gated_scan.triton_forward import States, fold_summaries
from pallas_kernels.gated_scan.triton_launch import (
    GateInputs,
    Launch,
    launch_kernel,
)
from pallas_kernels.gated_scan.triton_program import (
    Gates,
    Read,
    ScanProgram,
    Tiled,
    at_group,
    over_tiles,
)
from pallas_kernels.named_refs import by_name

Array = jax.Array


def run_backward(
    launch: Launch,
    gates: GateInputs,
    values,
    initial,
    lengths,
    states,
    d_states,
    finals,
    reading: tuple,
):
    """Returns gradients of (gate or logits, bias, values, initial, queries).

    Each is in its array's shape; that of the bias is float32 [D], and None where the
    gate is given; that of the queries is None without them.

    Args:
      states, d_states: [B T, tiles, W] each; of a stream that is read d_states is that
        of its ends, [B blocks, tiles, W].
      finals: gradients of the last states, float32 [B, tiles, W] each.
      reading: queries [B T, 1 or tiles, W] and their logits' gradient, float32 [B T,
        tiles, W / E]; or none.
    """
    ragged = () if lengths is None else (lengths,)
    arrays = (*gates.arrays, *values, *initial, *states, *d_states, *finals, *ragged)
    arrays = (*arrays, *reading)
    summary = jax.ShapeDtypeStruct(launch.line(launch.B * launch.blocks), jnp.float32)
    # As forward, from the other end: what later stretches make of the gradient.
    if launch.summaries:
        summaries = launch_kernel(
            launch,
            _summarize_backward_kernel,
            *gates.arrays,
            *d_states,
            *finals,
            *ragged,
            out_shape=[summary] * (1 + launch.streams),
        )
        arrays = (*arrays, *summaries)
    out = launch_kernel(
        launch,
        _backward_kernel,
        *arrays,
        out_shape=[
            jax.ShapeDtypeStruct(x.shape, x.dtype)
            for x in (gates.gate, *values, *initial, *reading[:1])
        ]
        + [summary] * launch.logits,
    )
    N = launch.streams
    # Every stretch has summed its positions; a few numbers of each are left to sum.
    d_bias = out[-1].sum(0).reshape(-1) if launch.logits else None
    d_values, d_initial = tuple(out[1 : 1 + N]), tuple(out[1 + N : 1 + 2 * N])
    d_queries = out[1 + 2 * N] if launch.read else None
    return out[0], d_bias, d_values, d_initial, d_queries


class _SummaryRefs(NamedTuple):
    """References of `_summarize_backward_kernel`; tuples have one per stream."""

    gate: Any  # [B T, tiles, W]: the gate or its logits
    bias: tuple[Any, ...]  # float32 [1, tiles, W], with logits
    resets: tuple[Any, ...]  # int32 [B T] or [T], where some state is reset
    d_states: tuple[Any, ...]  # [B T, tiles, W] of each stream
    d_finals: tuple[Any, ...]  # float32 [B, tiles, W] of each stream
    lengths: tuple[Any, ...]  # int32 [B], where rows have their own
    product: Any  # out, float32 [B blocks, tiles, W]
    added: tuple[Any, ...]  # out, float32 [B blocks, tiles, W] of each stream


def _summarize_backward_kernel(*refs, launch: Launch):
    """Writes what a stretch makes of a gradient: u_before = product u_after + added."""
    N = launch.streams
    streams = dict.fromkeys(("d_states", "d_finals", "added"), N)
    counts = launch.gate_counts | {"lengths": launch.lengths}
    at = by_name(_SummaryRefs, refs, **streams, **counts)
    program = ScanProgram.here(launch)
    gates = Gates.of(program, GateInputs(at.gate, at.bias, at.resets))
    last, d_finals = _ends(program, at.d_finals, at.lengths)

    def turn(n, carry):
        product, flowing = carry
        for t, inside in _positions(program, n):
            gate = gates.read(t, inside)
            dh = _read_streams(program, at.d_states, t, inside)
            keeps = [keep for _, keep in gates.at(gate)]
            totals = _totals(dh, d_finals, flowing, _is_last(t, inside, last))
            flowing = _passed_on(keeps, totals)
            product = tuple(p * k for p, k in zip(product, keeps, strict=True))
        return product, flowing

    ones = tuple(zero + 1 for zero in launch.zeros)
    zeros = (tuple(launch.zeros),) * N
    product, flowing = jax.lax.fori_loop(0, program.turns, turn, (ones, zeros))
    for ref, parts in zip((at.product, *at.added), (product, *flowing), strict=True):
        program.write_block(ref, list(parts))


class _BackwardRefs(NamedTuple):
    """References of `_backward_kernel`; a tuple of streams has one for each."""

    gate: Any  # [B T, tiles, W]: the gate or its logits
    bias: tuple[Any, ...]  # float32 [1, tiles, W], with logits
    resets: tuple[Any, ...]  # int32 [B T] or [T], where some state is reset
    values: tuple[Any, ...]  # [B T, 1 or tiles, W] of each stream
    initial: tuple[Any, ...]  # float32 [B, tiles, W] of each stream
    states: tuple[Any, ...]  # [B T, tiles, W] of each stream
    d_states: tuple[Any, ...]  # [B T, tiles, W] each; of ends [B blocks, ...]
    d_finals: tuple[Any, ...]  # float32 [B, tiles, W] of each stream
    lengths: tuple[Any, ...]  # int32 [B], where rows have their own
    queries: tuple[Any, ...]  # [B T, 1 or tiles, W], where they read the last stream
    d_logits: tuple[Any, ...]  # float32 [B T, tiles, W / E], with queries
    summaries: tuple[Any, ...]  # float32 [B blocks, tiles, W]: product, then added
    d_gate: Any  # out, [B T, tiles, W]: of the gate or its logits
    d_values: tuple[Any, ...]  # out, [B T, 1 or tiles, W] of each stream
    d_initial: tuple[Any, ...]  # out, float32 [B, tiles, W] of each stream
    d_queries: tuple[Any, ...]  # out, [B T, 1 or tiles, W], with queries
    d_bias: tuple[Any, ...]  # out, float32 [B blocks, tiles, W], with logits


_STREAMS = ("values", "initial", "states", "d_states", "d_finals")
_OUT_STREAMS = ("d_values", "d_initial")


def _backward_kernel(*refs, launch: Launch):
    at = by_name(
        _BackwardRefs,
        refs,
        **dict.fromkeys((*_STREAMS, *_OUT_STREAMS), launch.streams),
        **dict.fromkeys(("queries", "d_logits", "d_queries"), launch.read),
        lengths=launch.lengths,
        summaries=launch.summaries,
        d_bias=int(launch.logits),
        **launch.gate_counts,
    )
    program = ScanProgram.here(launch)
    gates = Gates.of(program, GateInputs(at.gate, at.bias, at.resets))
    last, d_finals = _ends(program, at.d_finals, at.lengths)
    initial = [program.read_row(ref) for ref in at.initial]
    # The ends' gradient of a stream that queries read enters with the chunk.
    whole = at.d_states[: launch.streams - launch.read]

    def turn(n, carry):
        flowing, d_bias, keys = carry
        # 2. All reads of the turn first, so that they are under way together.
        read = []
        for t, inside in _positions(program, n):
            inputs = _Inputs(
                gate=gates.read(t, inside),
                values=_read_streams(program, at.values, t, inside),
                before=_before(program, at.states, initial, t),
                d_states=_read_streams(program, whole, t, inside),
                queries=_read_streams(program, at.queries, t, inside),
                d_logits=_read_streams(program, at.d_logits, t, inside),
            )
            read.append((t, inside, inputs))
        # 3. Then back, position by position: totals are l, the gradients of the states.
        for t, inside, here in read:
            factors = gates.at(here.gate)
            ends = _is_last(t, inside, last)
            d_states = list(here.d_states)
            for ref, q, d in zip(
                at.d_queries, here.queries, here.d_logits, strict=True
            ):
                d_states.append([x * at_group(q, m) for m, x in enumerate(d)])
                of_q = [x * k for x, k in zip(d, keys, strict=True)]
                program.write(ref, t, over_tiles(of_q, q), inside)
                # The state before this position is that of the next one to be done.
                keys = tuple(here.before[-1])
            totals = _totals(d_states, d_finals, flowing, ends)
            flowing = _passed_on([keep for _, keep in factors], totals)
            d_gate = _for_gate(factors, totals, here)
            if launch.logits:
                # Of g to of its logit: beyond the stretch g is 1 and this is 0.
                d_gate = [
                    d * g * (1 - g) for d, (g, _) in zip(d_gate, factors, strict=True)
                ]
                d_bias = tuple(s + d for s, d in zip(d_bias, d_gate, strict=True))
            program.write(at.d_gate, t, d_gate, inside)
            for ref, v, parts in zip(at.d_values, here.values, totals, strict=True):
                program.write(ref, t, _for_values(factors, parts, v), inside)
        return flowing, d_bias, keys

    # 1. The gradient that enters from behind: of the row's last state, through what the
    # later stretches make of it.
    entering = _entering(program, d_finals, at.summaries, last)
    zeros = tuple(launch.zeros)
    keys = ()
    if launch.read:
        of_ends = program.read_block(at.d_states[-1], program.block)
        of_keys = tuple(u + d for u, d in zip(entering[-1], of_ends, strict=True))
        entering = (*entering[:-1], of_keys)
        top = program.first + program.turns * launch.tiles.unroll - 1
        (of_top,) = _read_streams(program, at.states[-1:], top, program.inside(top))
        keys = tuple(of_top)
    carry = (entering, zeros if launch.logits else (), keys)
    flowing, d_bias, _ = jax.lax.fori_loop(0, program.turns, turn, carry)
    for ref in at.d_bias:
        program.write_block(ref, list(d_bias))
    # 4. What leaves a row's first stretch is the gradient of its initial state; later
    # stretches write nothing.
    for ref, parts, ends in zip(at.d_initial, flowing, d_finals, strict=True):
        if last is not None:  # A row without a position ends where it began.
            empty = [jnp.where(last < 0, d, 0.0) for d in ends]
            parts = [p + d for p, d in zip(parts, empty, strict=True)]
        program.write_row(ref, list(parts), program.block == 0)


class _Inputs(NamedTuple):
    """The inputs of one position, for every stream and tile."""

    gate: Read
    values: list[Tiled]
    before: list[Tiled]
    d_states: list[Tiled]
    queries: list[Tiled]
    d_logits: list[Tiled]


def _ends(program: ScanProgram, final_refs, length_refs):
    """Returns (the row's last position or None, gradients of its last states)."""
    last = length_refs[0][program.row] - 1 if length_refs else None
    return last, tuple(tuple(program.read_row(ref)) for ref in final_refs)


def _entering(program: ScanProgram, d_finals: States, summary_refs, last) -> States:
    """Returns the gradient that enters the stretch from behind."""
    launch = program.launch
    if last is not None:  # It enters at the row's own last position instead.
        states = tuple(tuple(0 * d for d in parts) for parts in d_finals)
    elif launch.tiles.linked:
        states = d_finals
    else:
        here = program.block == launch.blocks - 1
        states = tuple(
            tuple(jnp.where(here, d, 0.0) for d in parts) for parts in d_finals
        )
    if not summary_refs:
        return states
    behind = launch.blocks - 1 - program.block
    return fold_summaries(
        program, summary_refs, states, behind, lambda n: launch.blocks - 1 - n
    )


def _positions(program: ScanProgram, n: Array):
    """Returns the positions of turn n of the reversed stretch, and if they are own."""
    unroll = program.launch.tiles.unroll
    top = program.first + (program.turns - n) * unroll - 1
    return [(top - u, program.inside(top - u)) for u in range(unroll)]


def _read_streams(
    program: ScanProgram, refs, t: Array, keep: Array | None
) -> list[Tiled]:
    return [program.read(ref, t, other=0.0, keep=keep) for ref in refs]


def _is_last(t: Array, inside: Array | None, last: Array | None) -> Array | None:
    """Returns whether t is the row's last position; None: that is no matter."""
    if last is None:
        return None
    return t == last if inside is None else (t == last) & inside


def _before(program: ScanProgram, refs, initial: list[Tiled], t: Array):
    """Returns the states before position t; zeros before a chunk that is not first."""
    # The first position has no state before it in memory: it reads the initial one.
    # Chunks start from 0, wherever their neighbour ended.
    past = t > 0 if program.launch.tiles.linked else t > program.first
    inside = program.inside(t - 1)
    past = past if inside is None else past & inside
    states = _read_streams(program, refs, t - 1, past)
    return [
        [jnp.where(t == 0, h_in, h) for h, h_in in zip(parts, first, strict=True)]
        for parts, first in zip(states, initial, strict=True)
    ]


def _totals(d_states: list[Tiled], d_finals: States, flowing: States, ends):
    """Returns l, the gradient of every state."""
    totals = [
        [u + d for u, d in zip(parts, more, strict=True)]
        for parts, more in zip(flowing, d_states, strict=True)
    ]
    if ends is None:
        return totals
    return [
        [u + jnp.where(ends, d, 0.0) for u, d in zip(parts, more, strict=True)]
        for parts, more in zip(totals, d_finals, strict=True)
    ]


def _passed_on(keeps: list[Array], totals: list[Tiled]) -> States:
    return tuple(
        tuple(keep * u for keep, u in zip(keeps, parts, strict=True))
        for parts in totals
    )


def _for_gate(factors: list, totals: list[Tiled], at: _Inputs) -> Tiled:
    """Returns dg = l (h[t-1] - v), summed over the streams."""
    gradient, resets = [], at.gate.resets
    for tile in range(len(factors)):
        # g weighs the state before, 1 - g the value; a reset forgets the state, and the
        # gate then weighs the value alone.
        of_keep = sum(u[tile] * h[tile] for u, h in zip(totals, at.before, strict=True))
        of_new = sum(
            u[tile] * at_group(v, tile) for u, v in zip(totals, at.values, strict=True)
        )
        d_keep = of_keep if resets is None else jnp.where(resets, 0.0, of_keep)
        gradient.append(d_keep - of_new)
    return gradient


def _for_values(factors: list, parts: Tiled, values: Tiled) -> Tiled:
    """Returns dv = (1 - g) l, summed over the tiles that share a stream's channels."""
    each = [(1 - g) * u for (g, _), u in zip(factors, parts, strict=True)]
    return over_tiles(each, values)
