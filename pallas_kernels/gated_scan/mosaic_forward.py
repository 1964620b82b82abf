"""The TPU kernel of the forward pass.

A program owns a block of positions of a row and all channels; blocks of a row run in
order and the state stays in VMEM between them. Everything crosses HBM once. For a few
groups of 128 lanes at a time: cast the block to float32; run its 8 stretches side by
side once for what each makes of a state; chain them; run them again from their true
states. Chunks that are stretches need the last step only.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.gated_scan.mosaic_block import (
    chain,
    lanes_of,
    only_first,
    position,
    read_gate,
    read_rows,
    read_signed,
    row_in_block,
    sum_heads,
)
from pallas_kernels.gated_scan.mosaic_launch import (
    LANES,
    STRETCHES,
    Call,
    GateInputs,
    launch_kernel,
)
from pallas_kernels.named_refs import by_name

Array = jax.Array


def run_forward(
    call: Call, gates: GateInputs, values, initial, lengths, queries: tuple
):
    """Returns (states [B, T, D] of each stream, finals [B, D], logits or None).

    Of a stream that is read and not kept the states are those at the ends of chunks,
    [B, 8 blocks, D]. Logits are [B, T, 128], a head a lane.

    Args:
      values: [B, T, W] each.
      initial: float32 [B, D] each.
      lengths: int32 [B].
      queries: [B, T, W] in a tuple, or none.
    """
    N, rows = len(values), call.tiles.rows
    wide, states = call.rows_spec(call.D), [gates.gate.shape] * N
    state_specs = [wide] * N
    if not call.keeps:
        states[-1] = (call.B, STRETCHES * call.blocks, call.D)
        state_specs[-1] = call.ends_spec()
    logits = jax.ShapeDtypeStruct((call.B, call.T, LANES), jnp.float32)
    out = launch_kernel(
        call,
        _forward_kernel,
        *(lengths, *gates.arrays, *values, *(h[:, None] for h in initial), *queries),
        in_specs=[
            pl.BlockSpec(memory_space=pltpu.SMEM),
            *call.gate_specs(),
            *(call.rows_spec(width) for width in call.widths),
            *[call.state_spec()] * N,
            *[call.rows_spec(call.widths[-1])] * call.read,
        ],
        out_specs=[
            *state_specs,
            *[call.state_spec()] * N,
            *[call.rows_spec(LANES)] * call.read,
        ],
        out_shape=[
            *map(jax.ShapeDtypeStruct, states, (v.dtype for v in values)),
            *[jax.ShapeDtypeStruct((call.B, 1, call.D), jnp.float32)] * N,
            *[logits] * call.read,
        ],
        scratch_shapes=[
            pltpu.VMEM((1, call.together, rows, LANES), jnp.float32),
            pltpu.VMEM((N, call.together, rows, LANES), jnp.float32),
            pltpu.VMEM((N, call.together, rows, LANES), jnp.float32),
            pltpu.VMEM((N, 1, call.D), jnp.float32),
        ],
    )
    finals = tuple(h[:, 0] for h in out[N : 2 * N])
    return tuple(out[:N]), finals, out[-1] if call.read else None


class _Refs(NamedTuple):
    """References of the kernel; a tuple has one for each stream."""

    lengths: Any  # int32 [B], in scalar memory
    gate: Any  # [rows, D]: the gate or its logits
    bias: tuple[Any, ...]  # float32 [1, D], with logits
    resets: tuple[Any, ...]  # [rows, 128], where some state is reset: not 0 there
    values: tuple[Any, ...]  # [rows, W] each
    initial: tuple[Any, ...]  # float32 [1, D] each
    queries: tuple[Any, ...]  # [rows, W], where they read the last stream
    states: tuple[Any, ...]  # out, [rows, D] each; or of its ends [8, D]
    finals: tuple[Any, ...]  # out, float32 [1, D] each
    logits: tuple[Any, ...]  # out, float32 [rows, 128], with queries: a head a lane
    e_rows: Any  # scratch, float32 [1, together, rows, 128]: some gates, with a sign
    value_rows: Any  # scratch, float32 [N, together, rows, 128]: of the values
    state_rows: Any  # scratch, float32 [N, together, rows, 128]: of the states
    carried: Any  # scratch, float32 [N, 1, D]: the state between a row's blocks


def _forward_kernel(*refs, call: Call):
    streams = dict.fromkeys(("values", "initial", "states", "finals"), len(call.widths))
    read = dict.fromkeys(("queries", "logits"), call.read)
    at = by_name(_Refs, refs, **streams, **read, **call.gate_counts)
    row, block = pl.program_id(0), pl.program_id(1)
    here, last = row_in_block(call, at.lengths[row] - 1, block)

    # 1. Before a row's first block: the state that it starts from.
    @pl.when(block == 0)
    def _():
        for n, (initial, final) in enumerate(zip(at.initial, at.finals, strict=True)):
            at.carried[n] = initial[:, :]
            final[:, :] = initial[:, :]  # What a row without a position ends with.

    for ref in at.logits:
        ref[:, :] = jnp.zeros_like(ref)

    # 2. A few groups of 128 channels at a time: their rows go to float32 in VMEM, the
    # state that enters each stretch is found, then all stretches run at once.
    def groups(turn, _):
        first = turn * call.together
        for i in range(call.together):
            at.e_rows[0, i] = read_gate(call, at, first + i, block)
            for n, ref in enumerate(at.values):
                at.value_rows[n, i] = read_rows(call, ref, first + i, block, 0.0)
        entering = _entering(call, block, first, at.e_rows, at.value_rows, at.carried)
        _run(call, entering, at.e_rows, at.value_rows, at.state_rows)
        for i in range(call.together):
            lanes = lanes_of(first + i, call.D // LANES)
            for n, ref in enumerate(at.states):
                states = at.state_rows[n, i]
                if not call.keeps and n == len(call.widths) - 1:
                    # The last positions of stretches, which are chunks.
                    ends = position(call, call.tiles.stretch - 1)
                    states = at.state_rows.at[n, i][ends, :]
                ref[:, lanes] = states.astype(ref.dtype)
            for queries, logits in zip(at.queries, at.logits, strict=True):
                q = read_rows(call, queries, first + i, block, 0.0)
                keys = at.state_rows[len(call.widths) - 1, i]
                logits[:, :] += sum_heads(call, q * keys, first + i)

            # 3. The row's last own position may lie in any of its blocks.
            @pl.when(here)
            def _(i=i, lanes=lanes):
                for n, ref in enumerate(at.finals):
                    ref[:, lanes] = at.state_rows[n, i, pl.ds(last, 1), :]

        return 0

    jax.lax.fori_loop(0, call.D // LANES // call.together, groups, 0)


def _entering(call: Call, block, first, e_rows, value_rows, carried):
    """Returns the states before every stretch, [8, 128] a group and stream."""
    N, G = len(call.widths), call.together
    lanes = [lanes_of(first + i, call.D // LANES) for i in range(G)]
    # Stretches are chunks: only a row's very first one starts from a state.
    if not call.tiles.linked:
        fresh = block == 0
        return [
            [jnp.where(fresh, only_first(carried[n, :, at]), 0.0) for at in lanes]
            for n in range(N)
        ]

    def step(s, carry):
        products, states = carry
        states, keeps = _advance(call, s, states, e_rows, value_rows)
        return [p * k for p, k in zip(products, keeps, strict=True)], states

    # All 8 stretches at once, each from 0: what it adds to a state, and what it leaves
    # of one. Then the true states go through the eight in order.
    zeros = jnp.zeros((STRETCHES, LANES), jnp.float32)
    start = ([zeros + 1] * G, [[zeros] * G for _ in range(N)])
    products, added = jax.lax.fori_loop(0, call.tiles.stretch, step, start)
    entering = [[zeros] * G for _ in range(N)]
    for n in range(N):
        for i, at in enumerate(lanes):
            entering[n][i], carried[n, :, at] = chain(
                products[i], added[n][i], carried[n, :, at]
            )
    return entering


def _run(call: Call, entering, e_rows, value_rows, state_rows) -> None:
    def step(s, states):
        states, _ = _advance(call, s, states, e_rows, value_rows)
        for n, groups in enumerate(states):
            for i, h in enumerate(groups):
                state_rows.at[n, i][position(call, s), :] = h
        return states

    jax.lax.fori_loop(0, call.tiles.stretch, step, entering)


def _advance(call: Call, s, states, e_rows, value_rows):
    """Returns the states one position later, and each group's factor of the old."""
    at = position(call, s)
    gates = [
        read_signed(e_rows.at[0, i][at, :], signed=call.resets > 0)[:2]
        for i in range(call.together)
    ]
    states = [
        [
            keep * h + (1 - g) * value_rows.at[n, i][at, :]
            for i, ((g, keep), h) in enumerate(zip(gates, groups, strict=True))
        ]
        for n, groups in enumerate(states)
    ]
    return states, [keep for _, keep in gates]
