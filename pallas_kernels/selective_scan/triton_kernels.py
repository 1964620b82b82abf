"""The Triton kernels: both passes of a row's block of channels."""

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.selective_scan.triton_launch import LOG2_E, Arrays, Launch
from pallas_kernels.selective_scan.triton_program import Program, Step, sigmoid

Array = jax.Array


# A program owns a row and a block of channels. Its state stays in registers from the
# first position to the last; the inputs of `unroll` positions are read before the
# state moves, so that the reads overlap. Crossing memory: u, dt, z and y once, b and c
# once a block of channels, and a state of every chunk where they are kept.
def forward_kernel(launch: Launch, ins: Arrays, y_ref, final_ref, *kept_ref):
    """Writes y, the last state and, where there is a place for them, kept states."""
    program = Program.here(launch)
    a = pltriton.load(program.state(ins.a, 0))
    bias = pltriton.load(ins.bias.at[program.channels])
    skip = pltriton.load(ins.skip.at[program.channels])

    def group(first, h):
        steps = [program.step(ins, first + i, bias) for i in range(launch.unroll)]
        outs = [
            (program.read_shared(ins.c, s.t, s.inside), program.read(ins.z, *s[:2]))
            for s in steps
        ]
        for s, (c, z) in zip(steps, outs, strict=True):
            h = s.advance(h, s.decay(a))
            y = jnp.sum(h * c[:, None], axis=0) + skip * s.u
            program.write(y_ref, s.t, y * z * sigmoid(z), s.inside)
        return h

    def one_chunk(g, h):
        for ref in kept_ref:
            pltriton.store(program.state(ref, program.row * launch.chunks + g), h)
        groups = launch.chunk // launch.unroll
        walk = lambda m, h: group(g * launch.chunk + m * launch.unroll, h)  # noqa: E731
        return jax.lax.fori_loop(0, groups, walk, h)

    h = pltriton.load(program.state(ins.initial, program.row))
    h = jax.lax.fori_loop(0, launch.chunks, one_chunk, h)
    pltriton.store(program.state(final_ref, program.row), h)


# The same programs, chunks from last to first. Registers cannot hold a chunk's states:
# from the kept one the program first walks to the start of each group of `unroll`
# positions and holds these; then, last group first, it makes the group's own states
# again and runs back over them. Gradients of b and c are sums over channels: each
# block writes its own part. Crossing memory: u, dt, z, dy and their gradients once
# (inputs are read again from the cache), kept states once, b and c once a block.
def backward_kernel(launch: Launch, ins: Arrays, kept_ref, dy_ref, d_final_ref, *outs):
    """Writes the gradients of everything; of b and c one block of channels' part."""
    du_ref, ddt_ref, dz_ref, db_ref, dc_ref, da_ref, d_initial_ref = outs[:7]
    d_skip_ref, d_bias_ref = outs[7:]
    program = Program.here(launch)
    a = pltriton.load(program.state(ins.a, 0))
    bias = pltriton.load(ins.bias.at[program.channels])
    skip = pltriton.load(ins.skip.at[program.channels])

    def back(s: Step, before: Array, decay: Array, after: Array, sums):
        """Goes back over one position; `dh` is what the later ones ask of its state."""
        dh, da, d_skip, d_bias = sums
        c, z = program.read_shared(ins.c, s.t, s.inside), program.read(ins.z, *s[:2])
        d_out = program.read(dy_ref, s.t, s.inside)
        # 1. Through the gate y silu(z), whose y is made again from the state.
        gate = sigmoid(z)
        dy = d_out * z * gate
        y = jnp.sum(after * c[:, None], axis=0) + skip * s.u
        dz = d_out * y * gate * (1 + z * (1 - gate))
        program.write(dz_ref, s.t, dz, s.inside)
        program.write_part(dc_ref, s.t, jnp.sum(after * dy[None, :], axis=1), s.inside)
        # 2. All that is asked of the state after this position: by y, and by later
        # ones.
        g = dh + c[:, None] * dy[None, :]
        d_input = g * (s.delta * s.u)[None, :]
        program.write_part(db_ref, s.t, jnp.sum(d_input, axis=1), s.inside)
        # 3. What is left of it for the state before, and the exponent's share, for a
        # and s.
        dh = decay * g
        d_exponent = dh * before
        da = da + d_exponent * s.delta[None, :]
        of_input = jnp.sum(g * s.b[:, None], axis=0)
        program.write(du_ref, s.t, skip * dy + s.delta * of_input, s.inside)
        # 4. The step, then through its softplus to dt. `a` is held times log2(e).
        d_delta = s.u * of_input + jnp.sum(d_exponent * a, axis=0) / LOG2_E
        d_raw = d_delta * sigmoid(s.raw)
        program.write(ddt_ref, s.t, d_raw, s.inside)
        # Past the row's end dy and u are 0, but the exponent's part of d_raw is not.
        d_bias = d_bias + jnp.where(s.inside, d_raw, 0.0)
        return dh, da, d_skip + dy * s.u, d_bias

    groups, unroll = launch.chunk // launch.unroll, launch.unroll

    def walk(first, h):
        """Returns the states around each position of a group, and what moved them."""
        passed = []
        for i in range(unroll):
            s = program.step(ins, first + i, bias)
            decay = s.decay(a)
            after = s.advance(h, decay)
            passed.append((s, h, decay, after))
            h = after
        return passed

    # States that enter groups move up and down a tuple, for only loops that are loops
    # keep the program small: Triton's compiler looks at all of it for each load.
    def one_chunk(turn, sums):
        g = launch.chunks - 1 - turn
        h = pltriton.load(program.state(kept_ref, program.row * launch.chunks + g))

        def enter(m, entering):
            (*_, last) = walk(g * launch.chunk + m * unroll, entering[-1])
            return (*entering[1:], last[-1])

        def leave(turn, carry):
            entering, sums = carry
            first = g * launch.chunk + (groups - 1 - turn) * unroll
            for s, before, decay, after in reversed(walk(first, entering[-1])):
                sums = back(s, before, decay, after, sums)
            return (entering[0], *entering[:-1]), sums

        entering = jax.lax.fori_loop(0, groups - 1, enter, (h,) * groups)
        return jax.lax.fori_loop(0, groups, leave, (entering, sums))[1]

    dh = pltriton.load(program.state(d_final_ref, program.row))
    zeros = jnp.zeros((launch.channels,), jnp.float32)
    sums = (dh, jnp.zeros_like(dh), zeros, zeros)
    sums = jax.lax.fori_loop(0, launch.chunks, one_chunk, sums)
    dh, da, d_skip, d_bias = sums
    pltriton.store(program.state(d_initial_ref, program.row), dh)
    pltriton.store(program.state(da_ref, program.row), da)
    pltriton.store(d_skip_ref.at[program.row, program.channels], d_skip)
    pltriton.store(d_bias_ref.at[program.row, program.channels], d_bias)
