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
    GateInputs,
    Launch,
    launch_kernel,
)
from pallas_kernels.named_refs import by_name

Array = jax.Array


def run_forward(
    launch: Launch, gates: GateInputs, values, initial, lengths, queries: tuple
):
    """Returns (states [B, T, D] of each stream, finals [B, D], logits or None).

    Of a stream that is read and not kept the states are those at the ends of chunks,
    [B, 8 blocks, D]. Logits are [B, T, 128], a head per lane.

    Args:
      values: [B, T, W] each.
      initial: float32 [B, D] each.
      lengths: int32 [B].
      queries: [B, T, W] in a tuple, or none.
    """
    N, rows = len(values), launch.tiles.rows
    wide, states = launch.rows_spec(launch.D), [gates.gate.shape] * N
    state_specs = [wide] * N
    if not launch.keeps:
        states[-1] = (launch.B, STRETCHES * launch.blocks, launch.D)
        state_specs[-1] = launch.ends_spec()
    logits = jax.ShapeDtypeStruct((launch.B, launch.T, LANES), jnp.float32)
    out = launch_kernel(
        launch,
        _forward_kernel,
        lengths,
        *gates.arrays,
        *values,
        *(h[:, None] for h in initial),
        *queries,
        in_specs=[
            pl.BlockSpec(memory_space=pltpu.SMEM),
            *launch.gate_specs(),
            *(launch.rows_spec(width) for width in launch.widths),
            *[launch.state_spec()] * N,
            *[launch.rows_spec(launch.widths[-1])] * launch.read,
        ],
        out_specs=[
            *state_specs,
            *[launch.state_spec()] * N,
            *[launch.rows_spec(LANES)] * launch.read,
        ],
        out_shape=[
            *map(jax.ShapeDtypeStruct, states, (v.dtype for v in values)),
            *[jax.ShapeDtypeStruct((launch.B, 1, launch.D), jnp.float32)] * N,
            *[logits] * launch.read,
        ],
        scratch_shapes=[
            pltpu.VMEM((1, launch.together, rows, LANES), jnp.float32),
            pltpu.VMEM((N, launch.together, rows, LANES), jnp.float32),
            pltpu.VMEM((N, launch.together, rows, LANES), jnp.float32),
            pltpu.VMEM((N, 1, launch.D), jnp.float32),
        ],
    )
    finals = tuple(h[:, 0] for h in out[N : 2 * N])
    return tuple(out[:N]), finals, out[-1] if launch.read else None


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
    logits: tuple[Any, ...]  # out, float32 [rows, 128], with queries: a head per lane
    e_rows: Any  # scratch, float32 [1, together, rows, 128]: some gates, with a sign
    value_rows: Any  # scratch, float32 [N, together, rows, 128]: of the values
    state_rows: Any  # scratch, float32 [N, together, rows, 128]: of the states
    carried: Any  # scratch, float32 [N, 1, D]: the state between a row's blocks


def _forward_kernel(*refs, launch: Launch):
    streams = dict.fromkeys(
        ("values", "initial", "states", "finals"), len(launch.widths)
    )
    read = dict.fromkeys(("queries", "logits"), launch.read)
    at = by_name(_Refs, refs, **streams, **read, **launch.gate_counts)
    row, block = pl.program_id(0), pl.program_id(1)
    here, last = row_in_block(launch, at.lengths[row] - 1, block)

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
        first = turn * launch.together
        for i in range(launch.together):
            at.e_rows[0, i] = read_gate(launch, at, first + i, block)
            for n, ref in enumerate(at.values):
                at.value_rows[n, i] = read_rows(launch, ref, first + i, block, 0.0)
        entering = _entering(launch, block, first, at.e_rows, at.value_rows, at.carried)
        _run(launch, entering, at.e_rows, at.value_rows, at.state_rows)
        for i in range(launch.together):
            lanes = lanes_of(first + i, launch.D // LANES)
            for n, ref in enumerate(at.states):
                states = at.state_rows[n, i]
                if not launch.keeps and n == len(launch.widths) - 1:
                    # The last positions of stretches, which are chunks.
                    ends = position(launch, launch.tiles.stretch - 1)
                    states = at.state_rows.at[n, i][ends, :]
                ref[:, lanes] = states.astype(ref.dtype)
            for queries, logits in zip(at.queries, at.logits, strict=True):
                q = read_rows(launch, queries, first + i, block, 0.0)
                keys = at.state_rows[len(launch.widths) - 1, i]
                logits[:, :] += sum_heads(launch, q * keys, first + i)

            # 3. The row's last own position may be in any of its blocks.
            @pl.when(here)
            def _(i=i, lanes=lanes):
                for n, ref in enumerate(at.finals):
                    ref[:, lanes] = at.state_rows[n, i, pl.ds(last, 1), :]

        return 0

    jax.lax.fori_loop(0, launch.D // LANES // launch.together, groups, 0)


def _entering(launch: Launch, block, first, e_rows, value_rows, carried):
    """Returns the states before every stretch, [8, 128] a group and stream."""
    N, G = len(launch.widths), launch.together
    lanes = [lanes_of(first + i, launch.D // LANES) for i in range(G)]
    # Stretches are chunks: only a row's very first one starts from a state.
    if not launch.tiles.linked:
        fresh = block == 0
        return [
            [jnp.where(fresh, only_first(carried[n, :, at]), 0.0) for at in lanes]
            for n in range(N)
        ]

    def step(s, carry):
        products, states = carry
        states, keeps = _advance(launch, s, states, e_rows, value_rows)
        return [p * k for p, k in zip(products, keeps, strict=True)], states

    # All 8 stretches at once, each from 0: what it adds to a state, and what it leaves
    # of one. Then the true states go through the eight in order.
    zeros = jnp.zeros((STRETCHES, LANES), jnp.float32)
    start = ([zeros + 1] * G, [[zeros] * G for _ in range(N)])
    products, added = jax.lax.fori_loop(0, launch.tiles.stretch, step, start)
    entering = [[zeros] * G for _ in range(N)]
    for n in range(N):
        for i, at in enumerate(lanes):
            entering[n][i], carried[n, :, at] = chain(
                products[i], added[n][i], carried[n, :, at]
            )
    return entering


def _run(launch: Launch, entering, e_rows, value_rows, state_rows) -> None:
    def step(s, states):
        states, _ = _advance(launch, s, states, e_rows, value_rows)
        for n, groups in enumerate(states):
            for i, h in enumerate(groups):
                state_rows.at[n, i][position(launch, s), :] = h
        return states

    jax.lax.fori_loop(0, launch.tiles.stretch, step, entering)


def _advance(launch: Launch, s, states, e_rows, value_rows):
    """Returns the states one position later, and each group's factor of the old."""
    at = position(launch, s)
    gates = [
        read_signed(e_rows.at[0, i][at, :], signed=launch.resets > 0)[:2]
        for i in range(launch.together)
    ]
    states = [
        [
            keep * h + (1 - g) * value_rows.at[n, i][at, :]
            for i, ((g, keep), h) in enumerate(zip(gates, groups, strict=True))
        ]
        for n, groups in enumerate(states)
    ]
    return states, [keep for _, keep in gates]
