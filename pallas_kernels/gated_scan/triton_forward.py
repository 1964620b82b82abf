"""The Triton kernels of the forward pass.

`_forward_kernel`: a program owns a stretch of positions of a row and the same few
channels of every tile. The state stays in registers; gate and values of `unroll`
positions are read before they are used, so that the loads overlap; every input and
every state crosses memory once. Between linked stretches the entering state is folded
from the summaries of the stretches before, which `_summarize_kernel` makes: then gate
and values are read twice.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

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
)
from pallas_kernels.named_refs import by_name

Array = jax.Array
States = tuple[tuple[Array, ...], ...]
"""One float32 [tiles, channels] for every stream and, within it, group of tiles."""


def run_forward(
    launch: Launch, gates: GateInputs, values, initial, lengths, queries: tuple
):
    """Returns (states [B T, tiles, W] of each stream, finals [B, tiles, W], sums).

    Of a stream that is read and not kept the states are those at the ends of chunks,
    [B blocks, tiles, W]. Sums [B T, tiles, W / channels] are q k~ over a program's
    channels, None without queries.

    Args:
      values: [B T, 1 or tiles, W] each.
      initial: float32 [B, tiles, W] each.
      lengths: int32 [B] or None.
      queries: [B T, 1 or tiles, W] in a tuple, or none.
    """
    ragged = () if lengths is None else (lengths,)
    arrays = (*gates.arrays, *values, *initial, *ragged, *queries)
    # Stretches of one sequence run at once, so each must know what the ones before it
    # make of the row's state. Chunks start at 0 and need no summaries.
    if launch.summaries:
        summary = jax.ShapeDtypeStruct(
            launch.line(launch.B * launch.blocks), jnp.float32
        )
        summaries = launch_kernel(
            launch,
            _summarize_kernel,
            *gates.arrays,
            *values,
            out_shape=[summary] * (1 + launch.streams),
        )
        arrays = (*arrays, *summaries)
    N, positions = launch.streams, launch.B * launch.T
    shapes = [launch.line(positions)] * N
    if not launch.keeps:
        shapes[-1] = launch.line(launch.B * launch.blocks)
    sums = jax.ShapeDtypeStruct(
        (positions, launch.D // launch.width, launch.columns), jnp.float32
    )
    out = launch_kernel(
        launch,
        _forward_kernel,
        *arrays,
        out_shape=[
            *map(jax.ShapeDtypeStruct, shapes, (v.dtype for v in values)),
            *(jax.ShapeDtypeStruct(h.shape, h.dtype) for h in initial),
            *[sums] * launch.read,
        ],
    )
    return tuple(out[:N]), tuple(out[N : 2 * N]), out[-1] if launch.read else None


class _SummaryRefs(NamedTuple):
    """References of `_summarize_kernel`; a tuple has one for each stream."""

    gate: Any  # [B T, tiles, W]: the gate or its logits
    bias: tuple[Any, ...]  # float32 [1, tiles, W], with logits
    resets: tuple[Any, ...]  # int32 [B T] or [T], where some state is reset
    values: tuple[Any, ...]  # [B T, 1 or tiles, W] each
    product: Any  # out, float32 [B blocks, tiles, W]
    added: tuple[Any, ...]  # out, float32 [B blocks, tiles, W] each


def _summarize_kernel(*refs, launch: Launch):
    """Writes what a stretch makes of a state: h_last = product h_in + added."""
    N = launch.streams
    at = by_name(_SummaryRefs, refs, values=N, added=N, **launch.gate_counts)
    program = ScanProgram.here(launch)
    gates = Gates.of(program, GateInputs(at.gate, at.bias, at.resets))

    def turn(n, carry):
        product, states = carry
        for _, read, values, _ in _inputs(program, n, gates, at.values):
            states, decays = _advance(gates, read, values, states)
            product = tuple(p * k for p, k in zip(product, decays, strict=True))
        return product, states

    # A state is a linear function of the one that enters: running from 0 gives the sum,
    # and the product of all factors what is left of any other start.
    ones = tuple(zero + 1 for zero in launch.zeros)
    zeros = (tuple(launch.zeros),) * N
    product, states = jax.lax.fori_loop(0, program.turns, turn, (ones, zeros))
    for ref, parts in zip((at.product, *at.added), (product, *states), strict=True):
        program.write_block(ref, list(parts))


class _ForwardRefs(NamedTuple):
    """References of `_forward_kernel`; a tuple of streams has one for each."""

    gate: Any  # [B T, tiles, W]: the gate or its logits
    bias: tuple[Any, ...]  # float32 [1, tiles, W], with logits
    resets: tuple[Any, ...]  # int32 [B T] or [T], where some state is reset
    values: tuple[Any, ...]  # [B T, 1 or tiles, W] of each stream
    initial: tuple[Any, ...]  # float32 [B, tiles, W] of each stream
    lengths: tuple[Any, ...]  # int32 [B], where rows have their own
    queries: tuple[Any, ...]  # [B T, 1 or tiles, W], where they read the last stream
    summaries: tuple[Any, ...]  # float32 [B blocks, tiles, W]: product, then added
    states: tuple[Any, ...]  # out, [B T, tiles, W] each; of ends [B blocks, ...]
    finals: tuple[Any, ...]  # out, float32 [B, tiles, W] of each stream
    sums: tuple[Any, ...]  # out, float32 [B T, tiles, W / channels], with queries


def _forward_kernel(*refs, launch: Launch):
    N = launch.streams
    at = by_name(
        _ForwardRefs,
        refs,
        **dict.fromkeys(("values", "initial", "states", "finals"), N),
        lengths=launch.lengths,
        summaries=launch.summaries,
        queries=launch.read,
        sums=launch.read,
        **launch.gate_counts,
    )
    program = ScanProgram.here(launch)
    gates = Gates.of(program, GateInputs(at.gate, at.bias, at.resets))
    last = at.lengths[0][program.row] - 1 if at.lengths else None
    written = at.states if launch.keeps else at.states[:-1]

    # 2. One turn: `unroll` positions are read, then the state goes through them.
    def turn(n, states):
        read_ahead = _inputs(program, n, gates, at.values, at.queries)
        for t, read, values, queries in read_ahead:
            states, _ = _advance(gates, read, values, states)
            inside = program.inside(t)
            for ref, parts in zip(written, states, strict=False):
                program.write(ref, t, list(parts), inside)
            # A head's channels may be several programs': the sum of each is written.
            for ref, q in zip(at.sums, queries, strict=True):
                products = [h * at_group(q, m) for m, h in enumerate(states[-1])]
                sums = [jnp.sum(x, axis=1, keepdims=True) for x in products]
                program.write(ref, t, sums, inside)
            # A padded row's last state is that of its last own position, which is
            # inside some stretch: the program that passes it writes it.
            if last is not None:
                ends = t == last if inside is None else (t == last) & inside
                for ref, parts in zip(at.finals, states, strict=True):
                    program.write_row(ref, list(parts), ends)
        return states

    # 1. The state that enters: the row's own, what earlier stretches made of it, or 0.
    entering = _entering(program, at.initial, at.summaries)
    states = jax.lax.fori_loop(0, program.turns, turn, entering)
    # Stretches are chunks here: what one ends with is its end.
    if not launch.keeps:
        program.write_block(at.states[-1], list(states[-1]))
    # 3. A full row's last state is what its last stretch ends with.
    if last is None:
        done = program.block == launch.blocks - 1
    else:  # A row without a position ends where it began.
        done, states = (program.block == 0) & (last < 0), entering
    for ref, parts in zip(at.finals, states, strict=True):
        program.write_row(ref, list(parts), done)


def _entering(program: ScanProgram, initial_refs, summary_refs) -> States:
    """Returns the state before the stretch: zeros before a chunk that is not first."""
    if not program.launch.tiles.linked:
        first = program.block == 0
        return tuple(tuple(program.read_row(ref, first)) for ref in initial_refs)
    states = tuple(tuple(program.read_row(ref)) for ref in initial_refs)
    return fold_summaries(
        program, summary_refs, states, program.block, lambda block: block
    )


def fold_summaries(
    program: ScanProgram, refs, states: States, count, block_of
) -> States:
    """Runs states through the summaries of stretches block_of(0), ..., `count` of them.

    Without summaries there is one stretch only.
    """
    if not refs:
        return states

    # Every program of a row folds for itself: a few numbers a stretch, which cost less
    # than a kernel more that would chain them.
    def fold(n, states):
        product, *added = (program.read_block(ref, block_of(n)) for ref in refs)
        return tuple(
            tuple(p * h + a for p, h, a in zip(product, parts, more, strict=True))
            for parts, more in zip(states, added, strict=True)
        )

    return jax.lax.fori_loop(0, count, fold, states)


def _inputs(program: ScanProgram, n: Array, gates: Gates, value_refs, query_refs=()):
    """Reads the positions of turn n; those beyond the stretch change nothing."""
    read = []
    for u in range(program.launch.tiles.unroll):
        t = program.first + n * program.launch.tiles.unroll + u
        inside = program.inside(t)
        gate = gates.read(t, inside)
        values, queries = (
            [program.read(ref, t, other=0.0, keep=inside) for ref in refs]
            for refs in (value_refs, query_refs)
        )
        read.append((t, gate, values, queries))
    return read


def _advance(gates: Gates, read: Read, values: list[Tiled], states: States):
    """Returns the states one position later, and each tile's factor of the old."""
    factors = gates.at(read)
    states = tuple(
        tuple(
            keep * h + (1 - g) * at_group(v, n)
            for n, ((g, keep), h) in enumerate(zip(factors, parts, strict=True))
        )
        for parts, v in zip(states, values, strict=True)
    )
    return states, [keep for _, keep in factors]
