"""The TPU kernel of the backward pass: blocks, stretches and positions in reverse.

The programs are those of the forward pass. One block's gate, values, states and the
gradients of these make the gradients of gate and values; the gradient of the state
stays in VMEM between blocks. Everything crosses HBM once, and 16 more rows of the
states a block, for the state before its first position. A narrow stream's gradient is
summed over its tiles in VMEM. Where queries read the last stream, dh[t] of it is
d_logits[t] q[t], made here, and that of the queries is summed over the heads here.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.gated_scan.mosaic_block import (
    chain,
    lanes_of,
    position,
    read_gate,
    read_rows,
    read_signed,
    row_in_block,
    spread_heads,
)
from pallas_kernels.gated_scan.mosaic_launch import (
    HALO,
    LANES,
    STRETCHES,
    GateInputs,
    Launch,
    launch_kernel,
)
from pallas_kernels.named_refs import by_name

Array = jax.Array
_BEFORE = 8
"""Rows of scratch in front of a block's states; the last of them is the one before."""


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

    That of the bias is float32 [D], and None where the gate is given; that of the
    queries is None without them.

    Args:
      states, d_states: [B, T, D] each; of a stream that is read d_states is that of its
        ends, [B, 8 blocks, D].
      finals: gradients of the last states, float32 [B, D] each.
      reading: queries [B, T, W] and their logits' gradient, float32 [B, T, 128] with a
        head a lane; or none.
    """
    N, rows, together = len(values), launch.tiles.rows, launch.together
    wide = launch.rows_spec(launch.D, reverse=True)
    specs = [launch.rows_spec(width, reverse=True) for width in launch.widths]
    row = [launch.state_spec()] * N
    of_queries = [specs[-1]] * launch.read
    of_logits = [launch.rows_spec(LANES, reverse=True)] * launch.read
    of_ends = [launch.ends_spec(reverse=True)] * launch.read
    halos = states if launch.tiles.linked else ()
    scratch = [
        (1, together, rows, LANES),
        (N, together, rows, LANES),
        (N, together, rows + _BEFORE, LANES),
        (N, together, rows, LANES),
        (1, together, rows, LANES),
        (N, together, rows, LANES),
        (N, 1, launch.D),
        *[(1, together, rows, LANES)] * launch.read,
    ]
    sums = [
        (width // LANES, rows, LANES) if width < launch.D else (1, 8, LANES)
        for width in (*launch.widths, *launch.widths[-1:] * launch.read)
    ]
    out = launch_kernel(
        launch,
        _backward_kernel,
        lengths,
        *gates.arrays,
        *values,
        *states,
        *d_states,
        *(x[:, None] for x in (*initial, *finals)),
        *reading,
        *halos,
        in_specs=[
            pl.BlockSpec(memory_space=pltpu.SMEM),
            *launch.gate_specs(reverse=True),
            *specs,
            *[wide] * (2 * N - launch.read),
            *of_ends,
            *row,
            *row,
            *of_queries,
            *of_logits,
            *[launch.halo_spec()] * len(halos),
        ],
        out_specs=[
            wide,
            *specs,
            *row,
            *[launch.state_spec()] * launch.logits,
            *of_queries,
        ],
        out_shape=[
            *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (gates.gate, *values)),
            *[jax.ShapeDtypeStruct((launch.B, 1, launch.D), jnp.float32)]
            * (N + launch.logits),
            *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in reading[:1]),
        ],
        scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in (*scratch, *sums)],
    )
    # Every row has summed its positions.
    d_bias = out[1 + 2 * N][:, 0].sum(0) if launch.logits else None
    d_initial = tuple(d[:, 0] for d in out[1 + N : 1 + 2 * N])
    dq = out[-1] if launch.read else None
    return out[0], d_bias, tuple(out[1 : 1 + N]), d_initial, dq


class _Refs(NamedTuple):
    """References of the kernel; a tuple has one for each stream."""

    lengths: Any  # int32 [B], in scalar memory
    gate: Any  # [rows, D]: the gate or its logits
    bias: tuple[Any, ...]  # float32 [1, D], with logits
    resets: tuple[Any, ...]  # [rows, 128], where some state is reset: not 0 there
    values: tuple[Any, ...]  # [rows, W] each
    states: tuple[Any, ...]  # [rows, D] each
    d_states: tuple[Any, ...]  # [rows, D] each; of ends [8, D]
    initial: tuple[Any, ...]  # float32 [1, D] each
    d_finals: tuple[Any, ...]  # float32 [1, D] each
    queries: tuple[Any, ...]  # [rows, W], where they read the last stream
    d_logits: tuple[Any, ...]  # float32 [rows, 128], with queries: a head per lane
    halos: tuple[Any, ...]  # [16, D] each, states before the block; none for chunks
    d_gate: Any  # out, [rows, D]: of the gate or its logits
    d_values: tuple[Any, ...]  # out, [rows, W] each
    d_initial: tuple[Any, ...]  # out, float32 [1, D] each
    d_bias: tuple[Any, ...]  # out, float32 [1, D], with logits
    d_queries: tuple[Any, ...]  # out, [rows, W], with queries
    # Scratch, float32: some groups of 128 channels of what the block reads and writes.
    e_rows: Any  # [1, together, rows, 128]: gates, negative where states are reset
    value_rows: Any  # [N, together, rows, 128]
    state_rows: Any  # [N, together, 8 + rows, 128]: row 7 is the position before
    d_state_rows: Any  # [N, together, rows, 128]
    d_gate_rows: Any  # [1, together, rows, 128]
    d_value_rows: Any  # [N, together, rows, 128]
    carried: Any  # [N, 1, D]: the state's gradient between a row's blocks
    of_logits: tuple[Any, ...]  # [1, together, rows, 128]: d_logits of lanes' heads
    sums: tuple[Any, ...]  # [W / 128, rows, 128] each: a narrow stream's gradient
    query_sums: tuple[Any, ...]  # [W / 128, rows, 128]: narrow queries' gradient


_STREAMS = (
    "values",
    "states",
    "d_states",
    "initial",
    "d_finals",
    "d_values",
    "d_initial",
    "sums",
)
_READING = ("queries", "d_logits", "d_queries", "of_logits", "query_sums")


def _backward_kernel(*refs, launch: Launch):
    N = len(launch.widths)
    halos = N if launch.tiles.linked else 0
    counts = {"halos": halos, "d_bias": int(launch.logits)} | launch.gate_counts
    counts |= dict.fromkeys(_READING, launch.read)
    at = by_name(_Refs, refs, **dict.fromkeys(_STREAMS, N), **counts)
    row, block = pl.program_id(0), launch.blocks - 1 - pl.program_id(1)

    # 1. Before a row's last block, which is the first: no gradient has flowed yet.
    @pl.when(block == launch.blocks - 1)
    def _():
        at.carried[:, :] = jnp.zeros_like(at.carried)
        for ref in at.d_bias:
            ref[:, :] = jnp.zeros_like(ref)

    # A narrow gradient is summed over the tiles of its stream; that of queries too.
    summed = [
        *zip(at.d_values, at.sums, launch.widths, strict=True),
        *zip(at.d_queries, at.query_sums, launch.widths[-1:], strict=False),
    ]
    for _, sums, width in summed:
        if width < launch.D:
            sums[:, :] = jnp.zeros_like(sums)

    # 2. A few groups of 128 channels at a time: their rows go to float32 in VMEM, the
    # gradient that enters each stretch is found, then all stretches run back at once.
    def groups(turn, _):
        first = turn * launch.together
        _read(launch, at, row, block, first)
        entering = _entering(launch, at, first)
        _run(launch, at, entering, first)
        for i in range(launch.together):
            lanes = lanes_of(first + i, launch.D // LANES)
            part = at.d_gate_rows[0, i]
            at.d_gate[:, lanes] = part.astype(at.d_gate.dtype)
            for ref in at.d_bias:
                ref[:, lanes] += jnp.sum(part, axis=0, keepdims=True)
            parts = [at.d_value_rows[n, i] for n in range(N)]
            if launch.read:
                keys = at.state_rows[N - 1, i, _BEFORE:, :]
                parts.append(keys * at.of_logits[0][0, i])
            for (ref, sums, width), part in zip(summed, parts, strict=True):
                if width < launch.D:
                    sums[jax.lax.rem(first + i, width // LANES)] += part
                else:
                    ref[:, lanes] = part.astype(ref.dtype)
        return 0

    jax.lax.fori_loop(0, launch.D // LANES // launch.together, groups, 0)
    # 3. A narrow stream's sums over its tiles are complete only after the last group.
    for ref, sums, width in summed:
        for k in range(width // LANES) if width < launch.D else ():
            ref[:, k * LANES : (k + 1) * LANES] = sums[k].astype(ref.dtype)

    # 4. The gradient after the full row is that of its initial state.
    @pl.when(block == 0)
    def _():
        for n in range(N):
            at.d_initial[n][:, :] = at.carried[n]


def _read(launch: Launch, at: _Refs, row, block, first) -> None:
    """Casts a few groups of the block to float32, states one row late."""
    here, last = row_in_block(launch, at.lengths[row] - 1, block)
    for i in range(launch.together):
        group = first + i
        lanes = lanes_of(group, launch.D // LANES)
        at.e_rows[0, i] = read_gate(launch, at, group, block)
        for n in range(len(launch.widths)):
            at.value_rows[n, i] = read_rows(launch, at.values[n], group, block, 0.0)
            _read_d_states(launch, at, block, first, n, i)
            states = read_rows(launch, at.states[n], group, block, 0.0)
            at.state_rows[n, i, _BEFORE:, :] = states
            # Rows are 16 apart in HBM, so the one row before a block is read as 16.
            before = jnp.zeros((1, LANES), jnp.float32)
            if launch.tiles.linked:
                halo = at.halos[n][:, lanes].astype(jnp.float32)
                before = halo[HALO - 1 :]
            initial = at.initial[n][:, lanes]
            before = jnp.where(block == 0, initial, before)
            at.state_rows[n, i, _BEFORE - 1 : _BEFORE, :] = before

        # The last state is the state of the row's last own position.
        @pl.when(here)
        def _(i=i, lanes=lanes):
            for n, ref in enumerate(at.d_finals):
                at.d_state_rows[n, i, pl.ds(last, 1), :] += ref[:, lanes]


def _read_d_states(launch: Launch, at: _Refs, block, first, n: int, i: int) -> None:
    """Casts the gradient of a stream's states; makes it where queries read them."""
    group = first + i
    if not launch.read or n < len(launch.widths) - 1:
        at.d_state_rows[n, i] = read_rows(launch, at.d_states[n], group, block, 0.0)
        return
    q = read_rows(launch, at.queries[0], group, block, 0.0)
    d_logits = read_rows(launch, at.d_logits[0], jnp.int32(0), block, 0.0)
    of_logits = spread_heads(launch, d_logits, group)
    at.of_logits[0][0, i] = of_logits
    at.d_state_rows[n, i] = q * of_logits
    # Stretches are chunks: their last positions are the ends.
    ends = position(launch, launch.tiles.stretch - 1)
    lanes = lanes_of(group, launch.D // LANES)
    of_ends = at.d_states[n][:, lanes].astype(jnp.float32)
    at.d_state_rows.at[n, i][ends, :] += of_ends


def _entering(launch: Launch, at: _Refs, first):
    """Returns the gradient that enters every stretch from behind."""
    N, G, S = len(launch.widths), launch.together, launch.tiles.stretch
    zeros = jnp.zeros((STRETCHES, LANES), jnp.float32)
    entering = [[zeros] * G for _ in range(N)]
    if not launch.tiles.linked:
        return entering

    def step(turn, carry):
        products, flowing = carry
        s = S - 1 - turn
        keeps = [keep for _, keep, _ in _gates(launch, at, s)]
        flowing = _passed_on(keeps, _totals(launch, at, s, flowing))
        return [p * k for p, k in zip(products, keeps, strict=True)], flowing

    # As forward: every stretch from 0 first, then the true gradient goes through the
    # eight, from the last to the first.
    start = ([zeros + 1] * G, entering)
    products, added = jax.lax.fori_loop(0, S, step, start)
    entering = [[zeros] * G for _ in range(N)]
    for n in range(N):
        for i in range(G):
            lanes = lanes_of(first + i, launch.D // LANES)
            entering[n][i], at.carried[n, :, lanes] = chain(
                products[i], added[n][i], at.carried[n, :, lanes], reverse=True
            )
    return entering


def _run(launch: Launch, at: _Refs, entering, first) -> None:
    """Writes the gradients of a few groups; chunks leave theirs of the first state."""
    S = launch.tiles.stretch

    def step(turn, flowing):
        s = S - 1 - turn
        gates = _gates(launch, at, s)
        totals = _totals(launch, at, s, flowing)
        rows = position(launch, s)
        for i, (g, _, resets) in enumerate(gates):
            # dg = l (h[t-1] - v): g weighs the state before, 1 - g the value. A reset
            # forgets the state, whatever g is.
            of_keep = of_new = 0.0
            for n, groups in enumerate(totals):
                of_keep += groups[i] * _before(launch, at, n, i, s)
                of_new += groups[i] * at.value_rows.at[n, i][rows, :]
                at.d_value_rows.at[n, i][rows, :] = (1 - g) * groups[i]
            if resets is not None:
                of_keep = jnp.where(resets, 0.0, of_keep)
            d_gate = of_keep - of_new
            if launch.logits:  # Of g to of its logit; beyond the sequence g is 1: 0.
                d_gate = d_gate * g * (1 - g)
            at.d_gate_rows.at[0, i][rows, :] = d_gate
        return _passed_on([keep for _, keep, _ in gates], totals)

    left = jax.lax.fori_loop(0, S, step, entering)
    if not launch.tiles.linked:
        for n, groups in enumerate(left):
            for i, part in enumerate(groups):
                lanes = lanes_of(first + i, launch.D // LANES)
                at.carried[n, :, lanes] = part[:1]


def _gates(launch: Launch, at: _Refs, s):
    rows = position(launch, s)
    return [
        read_signed(at.e_rows.at[0, i][rows, :], signed=launch.resets > 0)
        for i in range(launch.together)
    ]


def _totals(launch: Launch, at: _Refs, s, flowing):
    """Returns l, the gradient of every state."""
    rows = position(launch, s)
    return [
        [u + at.d_state_rows.at[n, i][rows, :] for i, u in enumerate(groups)]
        for n, groups in enumerate(flowing)
    ]


def _passed_on(keeps: list[Array], totals: list[list[Array]]):
    return [
        [keep * u for keep, u in zip(keeps, groups, strict=True)] for groups in totals
    ]


def _before(launch: Launch, at: _Refs, n: int, i: int, s) -> Array:
    """Returns the states before position s of every stretch: zeros before a chunk."""
    # States lie _BEFORE rows late, so one row less is the position before.
    before = at.state_rows.at[n, i][position(launch, s, _BEFORE - 1), :]
    if launch.tiles.linked:
        return before
    stretch = jax.lax.broadcasted_iota(jnp.int32, before.shape, 0)
    return jnp.where((s == 0) & (stretch > 0), 0.0, before)
