"""GPU kernels in Triton's language, which jax and PyTorch both launch.

This file imports neither of them. `triton.py` launches the kernels from jax; PyTorch
launches them as `kernel[grid](*tensors)`. No GPU has run them yet.

A program owns a row, a stretch of LENGTH positions and the same CHANNELS channels of
every tile of the gate: D / W tiles, where W is the narrowest stream's width. So it
reads a narrow stream once and sums its gradient over the tiles on chip. The state is
one array [TILES, CHANNELS] for each of one or two streams, in registers from the first
position to the last. Inputs of the next UNROLL positions are read while these are
computed. All but the summaries cross memory once.

A stretch is a chunk, which no state enters, or it is LINKED with the next one. It turns
a state h into product h + added, and that is its summary. Each program folds the
summaries of the stretches before its own (after it, in the backward pass).

Where QUERIES: the last stream is keys k, and a head of it is HEAD channels. Queries of
position t read k[t]: logits[t, h] = q[t] . k[t]. A stretch is then a chunk, and others
read k at its last position only.

Shapes: gate, states h0 and h1 [B, T, D]; values v0 and v1 [B, T, D or W]; queries as
v1; bias [D]; keeps [B, T], 0 where the state is set to zero first, else 1; lasts [B],
the position that `finals` means, -1 for the initial state; initial and finals
[B, STREAMS, D]; summaries [B, stretches, 1 + STREAMS, D], product first; ends
[B, chunks, D]; logits [B, T, D / CHANNELS], sums over a program's channels; their
gradient [B, T, D / HEAD]. Of one stream, v1 and h1 are padding.
"""

import triton
import triton.language as tl

from pallas_kernels.triton_kernels import find_place, read, sigmoid, write

FAR = tl.constexpr(2**30)
"""Past the end of every stretch."""


@triton.jit
def _beyond(tile, used: tl.constexpr):
    """Returns 0 for the first tiles and FAR for those past them.

    Of a `where` Triton does not know that columns which it is added to are contiguous,
    and reads them one by one.
    """
    return (tile >= used).to(tl.int32) * FAR


@triton.jit
def _columns(
    column, D: tl.constexpr, W: tl.constexpr, TILES: tl.constexpr,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, SUMS: tl.constexpr = False,
):  # fmt: skip
    """Returns the program's channels of a stream of WIDTH, [TILES, CHANNELS].

    All tiles read the same channels of a narrow stream, and the first writes SUMS over
    the tiles there. TILES is a power of two, of which D / W are used.
    """
    tile = tl.arange(0, TILES)[:, None]
    j = column + tl.arange(0, CHANNELS)[None, :]
    if WIDTH == D:
        j += tile * W
    return j + _beyond(tile, 1 if SUMS and WIDTH != D else D // W)


@triton.jit
def _numbers(
    column, D: tl.constexpr, W: tl.constexpr, TILES: tl.constexpr, EACH: tl.constexpr
):  # fmt: skip
    """Returns where the tiles' numbers are in a line of one each EACH channels."""
    tile = tl.arange(0, TILES)
    return (tile * W + column) // EACH + _beyond(tile, D // W)


@triton.jit
def _find_last(lasts, row, first, end):
    """Returns which of the stretch's positions is the row's last one; -1: none."""
    last = tl.load(lasts + row) - first
    return tl.where(last < end, last, -1)


@triton.jit
def _read_states(ref, exist, D: tl.constexpr, wide, STREAMS: tl.constexpr):
    """Returns the states of an array [STREAMS, D] if they `exist`, else zeros."""
    h = ()
    for s in tl.static_range(STREAMS):
        h = h + (read(ref + s * D, 0, exist, D, wide),)
    return h


@triton.jit
def _add_states(h, ref, D: tl.constexpr, wide, STREAMS: tl.constexpr):
    total = ()
    for s in tl.static_range(STREAMS):
        total = total + (h[s] + read(ref + s * D, 0, 1, D, wide),)
    return total


@triton.jit
def _write_states(ref, h, D: tl.constexpr, wide, STREAMS: tl.constexpr):
    for s in tl.static_range(STREAMS):
        write(ref + s * D, 0, 1, D, wide, h[s])


@triton.jit
def _fold(summaries, number, h, D: tl.constexpr, wide, STREAMS: tl.constexpr):
    """Returns what stretch `number` makes of the states h."""
    summaries += number * (1 + STREAMS) * D
    product = read(summaries, 0, 1, D, wide)
    after = ()
    for s in tl.static_range(STREAMS):
        added = read(summaries + (1 + s) * D, 0, 1, D, wide)
        after = after + (product * h[s] + added,)
    return after


@triton.jit
def _read_group(
    inputs, keeps, t, end, STEP: tl.constexpr, UNROLL: tl.constexpr,
    LOGITS: tl.constexpr, STARTS: tl.constexpr,
):  # fmt: skip
    """Returns what UNROLL positions read from t on, STEP by STEP.

    Of each: the inputs (reference, width, columns, first line that may be read), of
    which the gate is the first, and where STARTS the keep.
    """
    group = ()
    for k in tl.static_range(UNROLL):
        line = t + k * STEP
        position = ()
        for n in tl.static_range(len(inputs)):
            ref, W, j, first = inputs[n]
            at = line * W + j
            inside = (at >= first * W) & (at < end * W)
            # Past the stretch a gate of 1 leaves the state as it is.
            other = 0.0
            if n == 0:
                other = float("inf") if LOGITS else 1.0
            position = position + (tl.load(ref + at, mask=inside, other=other),)
        if STARTS:
            inside = (line >= 0) & (line < end)
            keep = tl.load(keeps + line, mask=inside, other=1.0)
            position = position + (keep,)
        group = group + (position,)
    return group


@triton.jit
def _gates(position, bias, LOGITS: tl.constexpr, STARTS: tl.constexpr):
    """Returns (g, the keep) of a position."""
    g = position[0].to(tl.float32)
    if LOGITS:
        g = sigmoid(g + bias)
    keep = 1.0
    if STARTS:
        keep = position[len(position) - 1]
    return g, keep


# Forward: what a stretch makes of a state, from the streams' values. BACKWARD: what it
# makes of the gradient of the state behind it, from those of its states and, with
# LENGTHS, of the row's last state. Crossing memory: the gate and these once.
@triton.jit
def summarize_kernel(
    gate, bias, keeps, lasts, x0, x1, d_finals, T, LENGTH,
    summaries,
    D: tl.constexpr, W: tl.constexpr, W0: tl.constexpr, W1: tl.constexpr,
    TILES: tl.constexpr, CHANNELS: tl.constexpr, UNROLL: tl.constexpr,
    STREAMS: tl.constexpr, LOGITS: tl.constexpr, STARTS: tl.constexpr,
    LENGTHS: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    """Writes the summaries of stretches."""
    row, stretch, column, line, end = find_place(T, LENGTH, W, CHANNELS)
    wide = _columns(column, D, W, TILES, CHANNELS, D)
    inputs = (
        (gate + line * D, D, wide, 0),
        (x0 + line * W0, W0, _columns(column, D, W, TILES, CHANNELS, W0), 0),
    )
    if STREAMS == 2:
        j1 = _columns(column, D, W, TILES, CHANNELS, W1)
        inputs = inputs + ((x1 + line * W1, W1, j1, 0),)
    B0 = 0.0
    if LOGITS:
        B0 = read(bias, 0, 1, D, wide)
    if LENGTHS:
        last = _find_last(lasts, row, stretch * LENGTH, end)
    keeps += line
    d_finals += row * STREAMS * D
    product = tl.full([TILES, CHANNELS], 1.0, tl.float32)
    h = ()
    for _ in tl.static_range(STREAMS):
        h = h + (tl.zeros([TILES, CHANNELS], tl.float32),)
    turns = tl.cdiv(end, UNROLL)
    first = turns * UNROLL - 1 if BACKWARD else 0
    STEP: tl.constexpr = -1 if BACKWARD else 1
    for m in range(turns):
        t = first + m * UNROLL * STEP
        here = _read_group(inputs, keeps, t, end, STEP, UNROLL, LOGITS, STARTS)
        for k in tl.static_range(UNROLL):
            g, keep = _gates(here[k], B0, LOGITS, STARTS)
            decay = g * keep
            if BACKWARD and LENGTHS:
                if t - k == last:
                    h = _add_states(h, d_finals, D, wide, STREAMS)
            after = ()
            for s in tl.static_range(STREAMS):
                x = here[k][1 + s].to(tl.float32)
                if BACKWARD:
                    after = after + (decay * (h[s] + x),)
                else:
                    after = after + (decay * h[s] + (1.0 - g) * x,)
            h = after
            product *= decay
    summaries += (row * tl.cdiv(T, LENGTH) + stretch) * (1 + STREAMS) * D
    write(summaries, 0, 1, D, wide, product)
    _write_states(summaries + D, h, D, wide, STREAMS)


@triton.jit
def forward_kernel(
    gate, bias, keeps, lasts, v0, v1, queries, initial, summaries, T, LENGTH,
    h0, h1, finals, logits,
    D: tl.constexpr, W: tl.constexpr, W0: tl.constexpr, W1: tl.constexpr,
    TILES: tl.constexpr, CHANNELS: tl.constexpr, UNROLL: tl.constexpr,
    STREAMS: tl.constexpr, LOGITS: tl.constexpr, STARTS: tl.constexpr,
    LENGTHS: tl.constexpr, LINKED: tl.constexpr, QUERIES: tl.constexpr,
    KEEPS: tl.constexpr,
):  # fmt: skip
    """Writes states, last states and logits; of k its chunks' ends unless KEEPS."""
    row, stretch, column, line, end = find_place(T, LENGTH, W, CHANNELS)
    number = row * tl.cdiv(T, LENGTH) + stretch
    wide = _columns(column, D, W, TILES, CHANNELS, D)
    inputs = (
        (gate + line * D, D, wide, 0),
        (v0 + line * W0, W0, _columns(column, D, W, TILES, CHANNELS, W0), 0),
    )
    j1 = _columns(column, D, W, TILES, CHANNELS, W1)
    if STREAMS == 2:
        inputs = inputs + ((v1 + line * W1, W1, j1, 0),)
    if QUERIES:
        inputs = inputs + ((queries + line * W1, W1, j1, 0),)
    B0 = 0.0
    if LOGITS:
        B0 = read(bias, 0, 1, D, wide)
    keeps += line
    initial += row * STREAMS * D
    finals += row * STREAMS * D
    states = (h0 + line * D, h1 + line * D)
    part = _numbers(column, D, W, TILES, CHANNELS)
    logits += line * (D // CHANNELS)
    # 1. The state that enters: the row's own, what earlier stretches made of it, or 0.
    enters = ((stretch == 0) | LINKED).to(tl.int32)
    h = _read_states(initial, enters, D, wide, STREAMS)
    if LENGTHS:
        last = _find_last(lasts, row, stretch * LENGTH, end)
        # A row without a position ends where it began.
        if number == row * tl.cdiv(T, LENGTH) and tl.load(lasts + row) < 0:
            _write_states(finals, h, D, wide, STREAMS)
    if LINKED:
        for before in range(stretch):
            h = _fold(summaries, number - stretch + before, h, D, wide, STREAMS)
    # 2. Turns of UNROLL positions: the next are read, and the state goes through these.
    for m in range(0, end, UNROLL):
        here = _read_group(inputs, keeps, m, end, 1, UNROLL, LOGITS, STARTS)
        for k in tl.static_range(UNROLL):
            t = m + k
            g, keep = _gates(here[k], B0, LOGITS, STARTS)
            after = ()
            for s in tl.static_range(STREAMS):
                v = here[k][1 + s].to(tl.float32)
                state = g * keep * h[s] + (1.0 - g) * v
                if KEEPS or s == 0:
                    write(states[s], t, end, D, wide, state)
                after = after + (state,)
            h = after
            if LENGTHS:
                if t == last:
                    _write_states(finals, h, D, wide, STREAMS)
            if QUERIES:
                sums = tl.sum(h[1] * here[k][3].to(tl.float32), axis=1)
                write(logits, t, end, D // CHANNELS, part, sums)
    if not KEEPS:
        write(h1 + number * D, 0, 1, D, wide, h[1])
    if not LENGTHS:
        if stretch == tl.cdiv(T, LENGTH) - 1:
            _write_states(finals, h, D, wide, STREAMS)


@triton.jit
def _over_tiles(x, WIDTH: tl.constexpr, D: tl.constexpr):
    """Returns a stream's gradient, of a narrow one the sum over the tiles."""
    if WIDTH != D:
        x = tl.broadcast_to(tl.sum(x, axis=0, keep_dims=True), x.shape)
    return x


# With l[t] the gradient of h[t]: l[t] = dh[t] + g[t+1] l[t+1]; dv = (1 - g) l; dg = l
# (h[t-1] - v). One loop from the last position to the first makes all of them. Where
# QUERIES, dh of k is d_logits q, made here, and the gradient of the queries is summed
# over the heads here. Crossing memory: gate, values, states and gradients once.
@triton.jit
def backward_kernel(
    gate, bias, keeps, lasts, v0, v1, queries, initial, h0, h1, d_h0, d_h1, d_finals,
    d_logits, summaries, T, LENGTH,
    d_gate, d_v0, d_v1, d_queries, d_initial, d_bias,
    D: tl.constexpr, W: tl.constexpr, W0: tl.constexpr, W1: tl.constexpr,
    TILES: tl.constexpr, CHANNELS: tl.constexpr, UNROLL: tl.constexpr,
    STREAMS: tl.constexpr, LOGITS: tl.constexpr, STARTS: tl.constexpr,
    LENGTHS: tl.constexpr, LINKED: tl.constexpr, QUERIES: tl.constexpr,
    HEAD: tl.constexpr,
):  # fmt: skip
    """Writes all gradients; of the bias each stretch's part."""
    row, stretch, column, line, end = find_place(T, LENGTH, W, CHANNELS)
    behind = tl.cdiv(T, LENGTH) - 1 - stretch
    number = row * tl.cdiv(T, LENGTH) + stretch
    wide = _columns(column, D, W, TILES, CHANNELS, D)
    j1 = _columns(column, D, W, TILES, CHANNELS, W1)
    # What a position reads, in this order. The state before it is a line earlier; the
    # first position of a row or chunk reads none.
    first = ((stretch == 0) | (not LINKED)).to(tl.int32)
    inputs = (
        (gate + line * D, D, wide, 0),
        (v0 + line * W0, W0, _columns(column, D, W, TILES, CHANNELS, W0), 0),
        (h0 + (line - 1) * D, D, wide, first),
        (d_h0 + line * D, D, wide, 0),
    )
    if STREAMS == 2:
        inputs = inputs + (
            (v1 + line * W1, W1, j1, 0),
            (h1 + (line - 1) * D, D, wide, first),
        )
    if QUERIES:
        head = _numbers(column, D, W, TILES, HEAD)[:, None]
        inputs = inputs + (
            (d_logits + line * (D // HEAD), D // HEAD, head, 0),
            (queries + line * W1, W1, j1, 0),
        )
    elif STREAMS == 2:
        inputs = inputs + ((d_h1 + line * D, D, wide, 0),)
    WIDTHS: tl.constexpr = (W0, W1)
    d_values = (d_v0 + line * W0, d_v1 + line * W1)
    owned = (
        _columns(column, D, W, TILES, CHANNELS, W0, True),
        _columns(column, D, W, TILES, CHANNELS, W1, True),
    )
    B0 = 0.0
    if LOGITS:
        B0 = read(bias, 0, 1, D, wide)
    keeps += line
    initial += row * STREAMS * D
    d_finals += row * STREAMS * D
    d_initial += row * STREAMS * D
    d_gate += line * D
    d_queries += line * W1
    # 1. The gradient of the stretch's last state, through all later stretches. With
    # LENGTHS that of the row's last state enters at its position.
    enters = 0
    if LENGTHS:
        last = _find_last(lasts, row, stretch * LENGTH, end)
    else:
        enters = ((behind == 0) | LINKED).to(tl.int32)
    flow = _read_states(d_finals, enters, D, wide, STREAMS)
    if LINKED:
        for back in range(behind):
            flow = _fold(summaries, number + behind - back, flow, D, wide, STREAMS)
    if QUERIES:
        flow = (flow[0], flow[1] + read(d_h1 + number * D, 0, 1, D, wide))
    sum_bias = tl.zeros([TILES, CHANNELS], tl.float32)
    # 2. Back over the positions.
    turns = tl.cdiv(end, UNROLL)
    top = turns * UNROLL - 1
    for m in range(turns):
        t0 = top - m * UNROLL
        here = _read_group(inputs, keeps, t0, end, -1, UNROLL, LOGITS, STARTS)
        for k in tl.static_range(UNROLL):
            t = t0 - k
            g, keep = _gates(here[k], B0, LOGITS, STARTS)
            if LENGTHS:
                if t == last:
                    flow = _add_states(flow, d_finals, D, wide, STREAMS)
            befores = ()
            for s in tl.static_range(STREAMS):
                befores = befores + (here[k][2 + 3 * s].to(tl.float32),)
            if k == UNROLL - 1:
                if t + stretch == 0:
                    befores = _add_states(befores, initial, D, wide, STREAMS)
            dg = tl.zeros([TILES, CHANNELS], tl.float32)
            after = ()
            for s in tl.static_range(STREAMS):
                v = here[k][1 + 3 * s].to(tl.float32)
                before = befores[s]
                dh = here[k][3 + 3 * s].to(tl.float32)
                if QUERIES and s == 1:
                    state = g * keep * before + (1.0 - g) * v
                    dq = _over_tiles(dh * state, W1, D)
                    write(d_queries, t, end, W1, owned[1], dq)
                    dh = dh * here[k][7].to(tl.float32)
                total = flow[s] + dh
                dv = _over_tiles((1.0 - g) * total, WIDTHS[s], D)
                write(d_values[s], t, end, WIDTHS[s], owned[s], dv)
                dg += total * (keep * before - v)
                after = after + (g * keep * total,)
            flow = after
            if LOGITS:
                dg *= g * (1.0 - g)
                sum_bias += dg
            write(d_gate, t, end, D, wide, dg)
    # 3. What leaves the first stretch; of a row without a position also its last state.
    if stretch == 0:
        if LENGTHS:
            if tl.load(lasts + row) < 0:
                flow = _add_states(flow, d_finals, D, wide, STREAMS)
        _write_states(d_initial, flow, D, wide, STREAMS)
    if LOGITS:
        write(d_bias + number * D, 0, 1, D, wide, sum_bias)
