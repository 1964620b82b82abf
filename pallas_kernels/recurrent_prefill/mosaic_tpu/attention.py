"""Attention on TPU: a tile's queries over their prefix, heads in groups.

The prefix, persistent pairs by row, is in HBM; a program reads it a chunk at a time and
writes the tile's pairs there.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Float, Int

from pallas_kernels.recurrent_prefill.call import Array, LayerSpec
from pallas_kernels.recurrent_prefill.equations import HIDDEN
from pallas_kernels.recurrent_prefill.mosaic_tpu.launch import (
    BUFFERS,
    LANES,
    PAIR,
    HeadGroup,
    block_of_rows,
    dot,
    head_groups,
)
from pallas_kernels.recurrent_prefill.tiles.layout import Tiles


class SoftmaxState(NamedTuple):
    """Softmax state of queries that have read some of their keys."""

    largest: Any
    normalizer: Any
    weighted: Any

    @classmethod
    def scratch(cls, *shape: int, numbers: int, width: int) -> "SoftmaxState":
        """Returns VMEM for the state of queries [*shape].

        Args:
          numbers, width: lanes of a query's largest logit and sum; of its values.
        """
        of_heads = pltpu.VMEM((*shape, numbers), jnp.float32)
        return cls(of_heads, of_heads, pltpu.VMEM((*shape, width), jnp.float32))


class Stacked(NamedTuple):
    """Rows' queries by group of heads: those of M = b x heads one below the other.

    Numbers fill their lanes, so that they need not be spread for every chunk.
    """

    q: Any  # [PAIR, groups, M, width]
    state: Any  # numbers [PAIR, groups, M, LANES], weighted [PAIR, groups, M, width]

    @classmethod
    def scratch(cls, groups: list[HeadGroup], b: int, dtype) -> "Stacked":
        """Returns VMEM for it."""
        shape, width = (PAIR, len(groups), b * groups[0].heads), groups[0].width
        state = SoftmaxState.scratch(*shape, numbers=LANES, width=width)
        return cls(pltpu.VMEM((*shape, width), dtype), state)


class Span(NamedTuple):
    """The slots that a row's queries see, and the slot of query 0."""

    stop: Any
    query: Any


def stack(q_ref, stacked: Stacked, groups, spec: LayerSpec):
    """Starts PAIR rows: the heads' queries one below the other, nothing read yet.

    Heads narrower than a register's 128 lanes go together: each query has the other
    heads' lanes cleared, so that the keys' lanes go to the matrix unit once.

    Args:
      q_ref: [PAIR, b, H E].
    """
    for g, group in enumerate(groups):
        q = q_ref[:, :, _columns(group, spec)]
        owner = jax.lax.broadcasted_iota(jnp.int32, q.shape, 2) // spec.head_width
        for h, mine in enumerate(_queries(group, q.shape[1])):
            alone = jnp.where(owner == h, q, jnp.zeros_like(q))
            stacked.q[:, g, mine, : group.width] = alone
    largest, normalizer, weighted = stacked.state
    largest[:] = jnp.full_like(largest, HIDDEN)
    normalizer[:] = jnp.zeros_like(normalizer)
    weighted[:] = jnp.zeros_like(weighted)


def attend_chunk(
    pairs,
    stacked: Stacked,
    groups,
    b: int,
    first,
    spans: list[Span],
    same: list[Array] | None,
    spec: LayerSpec,
):
    """Merges one chunk of PAIR rows' prefix into the state of their b queries each.

    Args:
      pairs: keys and values, [PAIR, chunk, H E]; values beyond the prefix are 0.
      first: the slot of the chunk's first pair.
      spans: spans of each row, or one for all.
      same: for each row, which pairs are of the query's document; None: all.
    """
    keys_ref, values_ref = pairs
    shape = (b * groups[0].heads, keys_ref.shape[1])
    at = first + jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    query = jax.lax.broadcasted_iota(jnp.int32, shape, 0)
    rank = jax.lax.rem(query, b)
    distances = [(s.query + rank - at).astype(jnp.float32) for s in spans] * PAIR
    seen = [at < span.stop for span in spans] * PAIR
    if same is not None:
        seen = [both & alike for both, alike in zip(seen, same, strict=True)]

    def logits_of(i, g, group):
        M = group.heads * b
        q, k = stacked.q[i, g, :M, : group.width], keys_ref[i, :, _columns(group, spec)]
        logits = spec.logit_scale * dot(q, k, transposed=True)
        if spec.alibi_max_bias is not None:
            rate = -spec.alibi_max_bias / spec.heads
            slope = jnp.zeros((M, shape[1]), jnp.float32)
            for h, mine in enumerate(_queries(group, b)):
                below = query[:M] >= mine.start
                slope = jnp.where(below, 2.0 ** (rate * (group.first + h + 1)), slope)
            logits = logits - slope * distances[i][:M]
        return jnp.where(seen[i][:M], logits, HIDDEN)

    # Every group of every row does one step before any does the next: while one waits
    # for the matrix unit or for a sum over lanes, the others continue.
    parts = [(i, g, group) for i in range(PAIR) for g, group in enumerate(groups)]
    states = [
        SoftmaxState(
            *(ref.at[i, g, pl.ds(0, b * group.heads)] for ref in stacked.state)
        )
        for i, g, group in parts
    ]
    logits = [logits_of(*part) for part in parts]
    old = [state.largest[...] for state in states]
    largest = [
        jnp.maximum(most, jnp.max(new, axis=1, keepdims=True))
        for most, new in zip(old, logits, strict=True)
    ]
    # Next to a visible pair others weigh exactly 0. A chunk of a cache, or of other
    # documents, may have none: what it adds, the tile's own pairs multiply with 0.
    p = [jnp.exp(new - most) for new, most in zip(logits, largest, strict=True)]
    read = [
        dot(weights.astype(values_ref.dtype), values_ref[i, :, _columns(group, spec)])
        for weights, (i, _, group) in zip(p, parts, strict=True)
    ]
    for n, (state, (_, _, group)) in enumerate(zip(states, parts, strict=True)):
        shrink, mine = jnp.exp(old[n] - largest[n]), pl.ds(0, group.width)
        total = jnp.sum(p[n], axis=1, keepdims=True)
        state.largest[:] = largest[n]
        state.normalizer[:] = state.normalizer[...] * shrink + total
        weighted = state.weighted[:, mine] * _repeated(shrink, group.width)
        state.weighted[:, mine] = weighted + read[n]


def unstack(stacked: Stacked, state: SoftmaxState, groups, spec: LayerSpec):
    """Puts PAIR rows' heads side by side, [b, H E], and their numbers in lanes."""
    _, b, lanes = state.largest.shape
    head = jax.lax.rem(jax.lax.broadcasted_iota(jnp.int32, (b, lanes), 1), spec.heads)
    for i in range(PAIR):
        largest = normalizer = jnp.zeros((b, lanes), jnp.float32)
        for g, group in enumerate(groups):
            shape = (b, group.width)
            owner = jax.lax.broadcasted_iota(jnp.int32, shape, 1) // spec.head_width
            rows = jnp.zeros(shape, jnp.float32)
            for h, queries in enumerate(_queries(group, b)):
                most, total = (
                    _repeated(ref[i, g, queries], lanes) for ref in stacked.state[:2]
                )
                mine = head == group.first + h
                largest = jnp.where(mine, most, largest)
                normalizer = jnp.where(mine, total, normalizer)
                weighted = stacked.state.weighted[i, g, queries, : group.width]
                rows = jnp.where(owner == h, weighted, rows)
            state.weighted[i, :, _columns(group, spec)] = rows
        state.largest[i], state.normalizer[i] = largest, normalizer


def _columns(group: HeadGroup, spec: LayerSpec):
    """Returns a group's columns among those of all heads."""
    first = group.first * spec.head_width
    return slice(first, first + group.width)


def _queries(group: HeadGroup, b: int) -> list[slice]:
    """Returns where each head of a group has its queries in a stack."""
    return [slice(h * b, (h + 1) * b) for h in range(group.heads)]


def _repeated(numbers: Float[Array, "M lanes"], width: int) -> Float[Array, "M width"]:
    """Returns numbers that are the same in all lanes in `width` lanes."""
    copies = -(-width // numbers.shape[1])
    return jnp.concatenate([numbers] * copies, axis=1)[:, :width]


class Filled(NamedTuple):
    """The contents of a cache before the call, with rows at different positions."""

    keys: Any  # [B, S, H E] in HBM, full chunks; slots beyond `start` mean nothing
    values: Any  # [B, S, H E] in HBM
    start: Any  # [B] in SMEM: how many slots of each row are filled
    most: Any  # [B / rows] in SMEM: of that row of a program that has most


class Segments(NamedTuple):
    """Documents of the call's positions: no pair crosses them."""

    by_row: Any  # int32 [B, 1, S] in HBM, full chunks
    position: Any  # int32 [rows, 1], those of a position's rows


class SegmentScratch(NamedTuple):
    """VMEM for documents on their way from HBM."""

    chunks: Any  # [BUFFERS, PAIR, 1, chunk], of the pairs
    queries: Any  # [2, PAIR, 1, chunk], with those of PAIR rows' queries among them
    arrived: Any  # [BUFFERS] semaphores
    queries_arrived: Any  # [2] semaphores

    @classmethod
    def of(cls, chunk: int) -> "SegmentScratch":
        """Returns the scratch for chunks of `chunk` positions."""
        return cls(
            chunks=pltpu.VMEM((BUFFERS, PAIR, 1, chunk), jnp.int32),
            queries=pltpu.VMEM((2, PAIR, 1, chunk), jnp.int32),
            arrived=pltpu.SemaphoreType.DMA((BUFFERS,)),
            queries_arrived=pltpu.SemaphoreType.DMA((2,)),
        )


class PrefixScratch(NamedTuple):
    """VMEM for what is on its way from HBM, and to it."""

    state_rows: Any  # softmax state of a few rows' queries, [few, b, ...]
    stacked: Any  # of PAIR rows: `Stacked`
    q_rows: Any  # [2, PAIR, b, H E], queries of PAIR rows and of the next ones
    k_chunks: Any  # [BUFFERS, PAIR, chunk, H E]
    v_chunks: Any  # [BUFFERS, PAIR, chunk, H E]
    written_k: Any  # [few, b, H E], pairs on their way to HBM
    written_v: Any  # [few, b, H E]
    q_arrived: Any  # [2] semaphores
    arrived: Any  # [2, BUFFERS] semaphores, of keys and of values
    written: Any  # [2] semaphores
    segments: Any  # `SegmentScratch`, or None

    @classmethod
    def of(
        cls, spec: LayerSpec, tiles: Tiles, lanes: int, *, segments: bool
    ) -> "PrefixScratch":
        """Returns the scratch of a kernel; `lanes` are those of numbers by head."""
        b, HE, dtype = tiles.tile, spec.heads * spec.head_width, jnp.dtype(spec.dtype)
        few = block_of_rows(tiles.rows, 16)
        chunks = pltpu.VMEM((BUFFERS, PAIR, tiles.keys, HE), dtype)
        written = pltpu.VMEM((few, b, HE), dtype)
        return cls(
            state_rows=SoftmaxState.scratch(few, b, numbers=lanes, width=HE),
            stacked=Stacked.scratch(head_groups(spec), b, dtype),
            q_rows=pltpu.VMEM((2, PAIR, b, HE), dtype),
            k_chunks=chunks,
            v_chunks=chunks,
            written_k=written,
            written_v=written,
            q_arrived=pltpu.SemaphoreType.DMA((2,)),
            arrived=pltpu.SemaphoreType.DMA((2, BUFFERS)),
            written=pltpu.SemaphoreType.DMA((2,)),
            segments=SegmentScratch.of(tiles.keys) if segments else None,
        )


def read_prefix(
    q_hbm,
    filled: Filled | None,
    segments: Any,
    pairs,
    state,
    scratch: PrefixScratch,
    row,
    before,
    spec: LayerSpec,
):
    """Reads the prefix of a tile's queries, PAIR rows at once.

    That is what the cache held and the `before` pairs of this call. Chunks come from
    HBM in the order in which they are used, BUFFERS - 1 of them on their way while one
    is read.

    Args:
      q_hbm: the queries [B, T, H E].
      filled: refs of the cache; None: it holds nothing.
      segments: refs of `Segments`; None: each row is one document.
      pairs: persistent keys and values of this call [B, S, H E].
      state: where the softmax state of the queries goes, [b, rows, ...].
      row: first of the program's rows.
    """
    b, rows, _ = state.weighted.shape
    few, chunk = scratch.state_rows.weighted.shape[0], scratch.k_chunks.shape[2]
    # First the cache's chunks, as many for all rows of the program, then the call's.
    most = 0 if filled is None else filled.most[row // rows]
    cached = None if filled is None else (filled.keys, filled.values)
    old = (most + chunk - 1) // chunk
    chunks = old + (before + chunk - 1) // chunk
    groups = head_groups(spec)

    def pairs_copies(n, source, r, c):
        """Returns the copies of the n-th chunk of all: chunk c of `source`, rows r."""
        there = pl.ds(row + PAIR * r, PAIR), pl.ds(c * chunk, chunk)
        buffer = jax.lax.rem(n, BUFFERS)
        buffers = scratch.k_chunks, scratch.v_chunks
        copies = [
            pltpu.make_async_copy(
                hbm.at[there], vmem.at[buffer], scratch.arrived.at[i, buffer]
            )
            for i, (hbm, vmem) in enumerate(zip(source, buffers, strict=True))
        ]
        if segments is not None:
            to = scratch.segments.chunks, scratch.segments.arrived
            copies.append(segments_copy(r, c, *(ref.at[buffer] for ref in to)))
        return copies

    def segments_copy(r, c, vmem, semaphore):
        """Returns the copy of chunk c of rows r's documents."""
        begin = pl.multiple_of(c * chunk, chunk)
        there = pl.ds(row + PAIR * r, PAIR), slice(None), pl.ds(begin, chunk)
        return pltpu.make_async_copy(segments.by_row.at[there], vmem, semaphore)

    def queries_copies(r):
        half = jax.lax.rem(r, 2)
        there = pl.ds(row + PAIR * r, PAIR), pl.ds(pl.multiple_of(before, b), b)
        to = scratch.q_rows.at[half], scratch.q_arrived.at[half]
        copies = [pltpu.make_async_copy(q_hbm.at[there], *to)]
        if segments is not None:
            to = scratch.segments.queries, scratch.segments.queries_arrived
            to = (ref.at[half] for ref in to)
            copies.append(segments_copy(r, before // chunk, *to))
        return copies

    def fetch(n):
        r, c = n // jnp.maximum(chunks, 1), jax.lax.rem(n, jnp.maximum(chunks, 1))
        any_left = n < rows // PAIR * chunks

        @pl.when(any_left & (c >= old))
        def _():
            for copy in pairs_copies(n, pairs, r, c - old):
                copy.start()

        if cached is not None:

            @pl.when(any_left & (c < old))
            def _():
                for copy in pairs_copies(n, cached, r, c):
                    copy.start()

    def fetch_queries(r):
        @pl.when(r < rows // PAIR)
        def _():
            for copy in queries_copies(r):
                copy.start()

    fetch_queries(0)
    for n in range(BUFFERS - 1):
        fetch(n)

    def read_pair(r):
        fetch_queries(r + 1)
        for copy in queries_copies(r):
            copy.wait()
        half = jax.lax.rem(r, 2)
        stack(scratch.q_rows.at[half], scratch.stacked, groups, spec)
        documents = None
        if segments is not None:
            near = scratch.segments.queries.at[half]
            first_query = jax.lax.rem(before, chunk)
            documents = [
                _of_queries(near[i], first_query, b, b * groups[0].heads)
                for i in range(PAIR)
            ]

        def read_chunk(c, _):
            n = r * chunks + c
            fetch(n + BUFFERS - 1)
            # What is waited for is a buffer's fill, wherever that comes from.
            for copy in pairs_copies(n, pairs, 0, 0):
                copy.wait()
            buffer = jax.lax.rem(n, BUFFERS)
            k, v = scratch.k_chunks.at[buffer], scratch.v_chunks.at[buffer]
            if filled is None:
                first, spans = c * chunk, [Span(before, before)]
                _clear_tiles(v, (before - first) // b, b)
            else:
                in_cache = c < old
                first = jnp.where(in_cache, c, c - old) * chunk
                starts = [filled.start[row + PAIR * r + i] for i in range(PAIR)]
                spans = [
                    Span(
                        jnp.where(in_cache, start, before),
                        before + jnp.where(in_cache, start, 0),
                    )
                    for start in starts
                ]
                _clear_slots(v, first, spans)
            same = None
            if documents is not None:
                theirs = scratch.segments.chunks.at[buffer]
                same = [mine == theirs[i] for i, mine in enumerate(documents)]
            attend_chunk((k, v), scratch.stacked, groups, b, first, spans, same, spec)

        jax.lax.fori_loop(0, chunks, read_chunk, None)

    # The loop over positions reads the state by position: a few rows at a time are
    # turned.
    def read_rows(i, _):
        def one_pair(j, _):
            read_pair(i * (few // PAIR) + j)
            mine = (ref.at[pl.ds(PAIR * j, PAIR)] for ref in scratch.state_rows)
            unstack(scratch.stacked, SoftmaxState(*mine), groups, spec)

        jax.lax.fori_loop(0, few // PAIR, one_pair, None)
        block = pl.ds(pl.multiple_of(i * few, few), few)
        for by_position, by_row in zip(state, scratch.state_rows, strict=True):
            _turn(by_row, by_position.at[:, block])

    jax.lax.fori_loop(0, rows // few, read_rows, None)


def _of_queries(documents: Int[Array, "1 chunk"], first, b: int, count: int):
    """Returns those of b queries from `first` on, by head, as a column [count, 1]."""
    shape = (count, documents.shape[1])
    rank = jax.lax.rem(jax.lax.broadcasted_iota(jnp.int32, shape, 0), b)
    mine = jax.lax.broadcasted_iota(jnp.int32, shape, 1) == first + rank
    return jnp.sum(jnp.where(mine, documents, 0), axis=1, keepdims=True)


# Slots beyond the prefix were never written and may hold NaN, which a probability of 0
# would not stop.
def _clear_tiles(values, first, b: int):
    """Clears [PAIR, chunk, H E] from its tile `first` on."""

    def clear(s, _):
        part = values.at[:, pl.ds(pl.multiple_of(s * b, b), b)]
        part[:] = jnp.zeros(part.shape, part.dtype)

    jax.lax.fori_loop(first, values.shape[1] // b, clear, None)


def _clear_slots(values, first, spans: list[Span]):
    """Clears [PAIR, chunk, H E] where its slots, from `first` on, are not in a span."""
    chunk = values.shape[1]
    for i, span in enumerate(spans):

        @pl.when(first + chunk > span.stop)
        def _(i=i, span=span):
            slot = first + jax.lax.broadcasted_iota(jnp.int32, values.shape[1:], 0)
            valid = jnp.where(slot < span.stop, values[i].astype(jnp.float32), 0.0)
            values[i] = valid.astype(values.dtype)


def write_pairs(tile_pairs, pairs, scratch: PrefixScratch, row, first):
    """Writes a tile's pairs to HBM by row, and waits until they are there.

    Args:
      tile_pairs: keys and values [b, rows, H E].
      pairs: all of them, [B, S, H E].
      row: first of the program's rows.
      first: the tile's first position.
    """
    few, b, _ = scratch.written_k.shape
    rows = tile_pairs[0].shape[1]

    def write_rows(i, _):
        block = pl.ds(pl.multiple_of(i * few, few), few)
        there = pl.ds(row + i * few, few), pl.ds(pl.multiple_of(first, b), b)
        turned = scratch.written_k, scratch.written_v
        copies = []
        for n, (tile, vmem, hbm) in enumerate(
            zip(tile_pairs, turned, pairs, strict=True)
        ):
            _turn(tile.at[:, block], vmem)
            copy = pltpu.make_async_copy(vmem, hbm.at[there], scratch.written.at[n])
            copy.start()
            copies.append(copy)
        for copy in copies:
            copy.wait()

    jax.lax.fori_loop(0, rows // few, write_rows, None)


def _turn(source, target):
    """Writes [N, M, width] as [M, N, width], the lanes of a register at a time."""
    width = source.shape[2]
    for first in range(0, width, LANES):
        lanes = pl.ds(first, min(LANES, width - first))
        turned = jnp.swapaxes(source[:, :, lanes].astype(jnp.float32), 0, 1)
        target[:, :, lanes] = turned.astype(target.dtype)
