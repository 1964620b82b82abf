"""GPU kernels in Triton's language, which jax and PyTorch both launch.

This file imports neither of them. `triton.py` launches the kernels from jax; PyTorch
launches them as `kernel[grid](*tensors)`. No GPU has run them yet.

A program owns a row, a stretch of LENGTH positions and CHANNELS channels, whose states
are independent of all others. In `forward_kernel` and `summarize_kernel` a thread has a
channel and its N states, N vectors [CHANNELS], so that the sum over n needs no other
thread. In `backward_kernel` a state is one array [N, CHANNELS], because the gradients
of b and c are sums over channels.

A row is one stretch where batch and channels fill the device. A stretch turns a state h
into exp(A S) h + h0, where S is the sum of its steps and h0 what it makes of zero. Its
summary is S of each channel, -inf where a document starts in it, and h0. Each program
folds the summaries of the stretches before its own (after it, in the backward pass).

Shapes: u, dt, z, y [B, T, I]; b, c [B, T, N]; a [N, I], times log2(e); keeps [B, T], 0
where a document starts, else 1; initial, final [B, N, I]; kept [B, chunks, N, I]; sums
[B, stretches, I]; ends [B, stretches, N, I].
"""

import triton
import triton.language as tl

from pallas_kernels.triton_kernels import LOG2_E, find_place, read, sigmoid, write

NO_STEP = tl.constexpr(-1e30)
"""Of dt past a row's end: its step is exactly 0 and leaves the state as it is."""


@triton.jit
def _softplus(x):
    e = tl.exp2(-tl.abs(x) * LOG2_E)
    # log(1 + e) after Kahan: exact where e is small.
    w = 1.0 + e
    log1p = tl.where(w == 1.0, e, tl.log(w) * (e / (w - 1.0)))
    return tl.maximum(x, 0.0) + log1p


@triton.jit
def _read_keep(keeps, t, end, STARTS: tl.constexpr):
    keep = 1.0
    if STARTS:
        keep = tl.load(keeps + t, mask=t < end, other=1.0)
    return keep


@triton.jit
def _read_states(states, I: tl.constexpr, N: tl.constexpr, i):
    """Returns N vectors of an array [N, I]."""
    h = ()
    for n in tl.static_range(N):
        h = h + (tl.load(states + n * I + i),)
    return h


@triton.jit
def _write_states(states, h, I: tl.constexpr, N: tl.constexpr, i):
    for n in tl.static_range(N):
        tl.store(states + n * I + i, h[n])


@triton.jit
def _decay_over(total, A):
    """Returns what a stretch whose steps have this sum leaves of a state."""
    return tl.where(total < 0.0, 0.0, tl.exp2(total * A))


# Forward: what a stretch makes of a state, from x = u and w = b. BACKWARD: what it
# makes of the gradient of its last state, from x = d_out and w = c. Crossing memory:
# x, dt (and z) once, w once a block of channels, one state.
@triton.jit
def summarize_kernel(
    x, dt, a, w, z, bias, keeps, T, LENGTH,
    sums, ends,
    I: tl.constexpr, N: tl.constexpr, CHANNELS: tl.constexpr, UNROLL: tl.constexpr,
    STARTS: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    """Writes the summaries of stretches."""
    row, stretch, column, line, end = find_place(T, LENGTH, I, CHANNELS)
    i = column + tl.arange(0, CHANNELS)
    A = _read_states(a, I, N, i)
    B0 = tl.load(bias + i)
    total = tl.zeros([CHANNELS], tl.float32)
    h = ()
    for _ in tl.static_range(N):
        h = h + (tl.zeros([CHANNELS], tl.float32),)
    x += line * I
    dt += line * I
    z += line * I
    w += line * N
    keeps += line
    for m in range(0, end, UNROLL):
        for k in tl.static_range(UNROLL):
            t = m + k
            if BACKWARD:
                t = tl.cdiv(end, UNROLL) * UNROLL - 1 - t
            step = _softplus(read(dt, t, end, I, i, NO_STEP) + B0)
            keep = _read_keep(keeps, t, end, STARTS)
            into = read(x, t, end, I, i)
            if BACKWARD:
                gate = read(z, t, end, I, i)
                into = into * gate * sigmoid(gate)
            else:
                into = into * step
            after = ()
            for n in tl.static_range(N):
                decay = tl.exp2(step * A[n]) * keep
                added = into * read(w, t, end, N, n)
                if BACKWARD:
                    after = after + (decay * (h[n] + added),)
                else:
                    after = after + (decay * h[n] + added,)
            h = after
            total += step
            if STARTS:
                total = tl.where(keep == 0.0, float("-inf"), total)
    number = row * tl.cdiv(T, LENGTH) + stretch
    tl.store(sums + number * I + i, total)
    _write_states(ends + number * N * I, h, I, N, i)


@triton.jit
def _read_group(dt, u, z, t, end, I: tl.constexpr, i, UNROLL: tl.constexpr):
    """Returns dt, u and z of UNROLL positions from t on."""
    group = ()
    for k in tl.static_range(UNROLL):
        group = group + (
            read(dt, t + k, end, I, i, NO_STEP),
            read(u, t + k, end, I, i),
            read(z, t + k, end, I, i),
        )
    return group


# The state stays in registers from the first position to the last. Wide inputs of
# UNROLL positions are read while those before them are computed. Crossing memory: u,
# dt, z and y once, b and c once a block of channels, and where KEEPS the state that
# enters every CHUNK positions.
@triton.jit
def forward_kernel(
    u, dt, a, b, c, skip, z, bias, initial, keeps, sums, ends, T, LENGTH,
    y, final, kept,
    I: tl.constexpr, N: tl.constexpr, CHANNELS: tl.constexpr, UNROLL: tl.constexpr,
    STARTS: tl.constexpr, CHUNK: tl.constexpr, KEEPS: tl.constexpr,
):  # fmt: skip
    """Writes y, the last state and, where KEEPS, the states that enter chunks."""
    row, stretch, column, line, end = find_place(T, LENGTH, I, CHANNELS)
    i = column + tl.arange(0, CHANNELS)
    A = _read_states(a, I, N, i)
    B0 = tl.load(bias + i)
    D = tl.load(skip + i)
    h = _read_states(initial + row * N * I, I, N, i)
    for before in range(stretch):
        number = row * tl.cdiv(T, LENGTH) + before
        total = tl.load(sums + number * I + i)
        added = _read_states(ends + number * N * I, I, N, i)
        after = ()
        for n in tl.static_range(N):
            after = after + (_decay_over(total, A[n]) * h[n] + added[n],)
        h = after
    u += line * I
    dt += line * I
    z += line * I
    y += line * I
    b += line * N
    c += line * N
    keeps += line
    kept += (row * tl.cdiv(T, CHUNK) + stretch * (LENGTH // CHUNK)) * N * I
    ahead = _read_group(dt, u, z, 0, end, I, i, UNROLL)
    for m in range(0, end, UNROLL):
        if KEEPS:
            if m % CHUNK == 0:
                _write_states(kept + m // CHUNK * N * I, h, I, N, i)
        here = ahead
        ahead = _read_group(dt, u, z, m + UNROLL, end, I, i, UNROLL)
        outs = ()
        for k in tl.static_range(UNROLL):
            t = m + k
            step = _softplus(here[3 * k] + B0)
            x = here[3 * k + 1]
            gate = here[3 * k + 2]
            keep = _read_keep(keeps, t, end, STARTS)
            out = D * x
            after = ()
            for n in tl.static_range(N):
                state = tl.exp2(step * A[n]) * keep * h[n]
                state += step * x * read(b, t, end, N, n)
                out += state * read(c, t, end, N, n)
                after = after + (state,)
            h = after
            outs = outs + (out * gate * sigmoid(gate),)
        # Written together: a write keeps the compiler from moving later reads ahead.
        for k in tl.static_range(UNROLL):
            write(y, m + k, end, I, i, outs[k])
    if stretch == tl.cdiv(T, LENGTH) - 1:
        _write_states(final + row * N * I, h, I, N, i)


@triton.jit
def _step(
    u, dt, b, keeps, t, end, A, B0, I: tl.constexpr, i, N: tl.constexpr, n,
    STARTS: tl.constexpr,
):  # fmt: skip
    """Returns (dt + bias, step, u, b, decay [N, CHANNELS]) of a position."""
    raw = read(dt, t, end, I, i, NO_STEP) + B0
    step = _softplus(raw)
    decay = tl.exp2(step[None, :] * A) * _read_keep(keeps, t, end, STARTS)
    return raw, step, read(u, t, end, I, i), read(b, t, end, N, n), decay


# Chunks go from last to first. From the kept state the program walks to the start of
# each group of UNROLL positions and stores these states in `scratch`, which stays in
# the cache. Then, last group first, it computes the group's own states again, holds
# them with their decays, and goes back over them. Gradients of b and c are sums over
# channels: each block of channels writes its part. Crossing memory: u, dt, z, d_out and
# their gradients once (inputs are read again from the cache), kept states once, b, c
# and the parts once a block.
@triton.jit
def backward_kernel(
    u, dt, a, b, c, skip, z, bias, keeps, kept, d_out, d_final, sums, ends, B, T,
    LENGTH, du, ddt, dz, db, dc, da, d_initial, d_skip, d_bias, scratch,
    I: tl.constexpr, N: tl.constexpr, CHANNELS: tl.constexpr, UNROLL: tl.constexpr,
    STARTS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Writes all gradients; of arrays that programs share, each program's part."""
    row, stretch, column, line, end = find_place(T, LENGTH, I, CHANNELS)
    i = column + tl.arange(0, CHANNELS)
    GROUPS: tl.constexpr = CHUNK // UNROLL
    STATE: tl.constexpr = N * CHANNELS
    n = tl.arange(0, N)
    state = n[:, None] * I + i[None, :]
    A = tl.load(a + state)
    B0 = tl.load(bias + i)
    D = tl.load(skip + i)
    # 1. The gradient of the stretch's last state, through all later stretches.
    dh = tl.load(d_final + row * N * I + state)
    last = tl.cdiv(T, LENGTH) - 1
    for back in range(last - stretch):
        number = row * tl.cdiv(T, LENGTH) + last - back
        total = tl.load(sums + number * I + i)[None, :]
        dh = _decay_over(total, A) * dh + tl.load(ends + number * N * I + state)
    sum_a = tl.zeros([N, CHANNELS], tl.float32)
    sum_skip = tl.zeros([CHANNELS], tl.float32)
    sum_bias = tl.zeros([CHANNELS], tl.float32)
    u += line * I
    dt += line * I
    z += line * I
    d_out += line * I
    du += line * I
    ddt += line * I
    dz += line * I
    b += line * N
    c += line * N
    keeps += line
    part = (tl.program_id(0) % (I // CHANNELS) * B * T + line) * N
    db += part
    dc += part
    kept += (row * tl.cdiv(T, CHUNK) + stretch * (LENGTH // CHUNK)) * N * I
    scratch += tl.program_id(0).to(tl.int64) * GROUPS * STATE
    place = n[:, None] * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    chunks = tl.cdiv(end, CHUNK)
    for turn in range(chunks):
        g = chunks - 1 - turn
        # 2. The states that enter groups.
        h = tl.load(kept + g * N * I + state)
        for m in range(GROUPS - 1):
            tl.store(scratch + m * STATE + place, h)
            for k in tl.static_range(UNROLL):
                t = g * CHUNK + m * UNROLL + k
                raw, step, x, bt, decay = _step(
                    u, dt, b, keeps, t, end, A, B0, I, i, N, n, STARTS
                )
                h = decay * h + bt[:, None] * (step * x)[None, :]
        tl.store(scratch + (GROUPS - 1) * STATE + place, h)
        tl.debug_barrier()
        for back in range(GROUPS):
            # 3. A group's own states.
            m = GROUPS - 1 - back
            h = tl.load(scratch + m * STATE + place)
            steps = ()
            for k in tl.static_range(UNROLL):
                t = g * CHUNK + m * UNROLL + k
                raw, step, x, bt, decay = _step(
                    u, dt, b, keeps, t, end, A, B0, I, i, N, n, STARTS
                )
                steps = steps + ((raw, step, x, bt, decay, h),)
                h = decay * h + bt[:, None] * (step * x)[None, :]
            # 4. Back over them. `dh` is the gradient of the state `h` from later ones.
            for j in tl.static_range(UNROLL):
                t = g * CHUNK + (m + 1) * UNROLL - 1 - j
                raw, step, x, bt, decay, before = steps[UNROLL - 1 - j]
                ct = read(c, t, end, N, n)
                gate_in = read(z, t, end, I, i)
                dy = read(d_out, t, end, I, i)
                # Through the gate y silu(z), whose y is computed again from the state.
                gate = sigmoid(gate_in)
                out = tl.sum(h * ct[:, None], axis=0) + D * x
                d_gate = dy * out * gate * (1.0 + gate_in * (1.0 - gate))
                write(dz, t, end, I, i, d_gate)
                dy = dy * gate_in * gate
                write(dc, t, end, N, n, tl.sum(h * dy[None, :], axis=1))
                # All of the state's gradient, and what it gives to the input.
                dh += ct[:, None] * dy[None, :]
                write(db, t, end, N, n, tl.sum(dh * (step * x)[None, :], axis=1))
                of_input = tl.sum(dh * bt[:, None], axis=0)
                write(du, t, end, I, i, D * dy + step * of_input)
                # The gradient of the state before, and of the exponent.
                dh = decay * dh
                exponent = dh * before
                sum_a += exponent * step[None, :]
                d_step = x * of_input + tl.sum(exponent * A, axis=0) / LOG2_E
                d_raw = d_step * sigmoid(raw)
                write(ddt, t, end, I, i, d_raw)
                sum_bias += d_raw
                sum_skip += dy * x
                h = before
        tl.debug_barrier()
    if stretch == 0:
        tl.store(d_initial + row * N * I + state, dh)
    number = row * tl.cdiv(T, LENGTH) + stretch
    tl.store(da + number * N * I + state, sum_a)
    tl.store(d_skip + number * I + i, sum_skip)
    tl.store(d_bias + number * I + i, sum_bias)
