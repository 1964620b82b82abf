"""The parts that both TPU kernels share: layout of lanes, chain of stretches.

A block has 8 stretches of S positions. Position s of all stretches is one register a
group of 128 lanes: rows s, s + S, ..., read with a stride.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.gated_scan.mosaic_launch import LANES, STRETCHES, Launch

Array = jax.Array
Indices = slice | pl.Slice


def lanes_of(group: Array, groups: int) -> Indices:
    """Returns the lanes of a group, of an array that has `groups` groups."""
    return pl.ds(pl.multiple_of(jax.lax.rem(group, groups) * LANES, LANES), LANES)


def read_rows(launch: Launch, ref, group: Array, block: Array, fill: float) -> Array:
    """Reads a group's lanes of a block in float32; `fill` beyond the sequence."""
    part = ref[:, lanes_of(group, ref.shape[1] // LANES)].astype(jnp.float32)
    if launch.T % launch.tiles.rows == 0:
        return part
    t = jax.lax.broadcasted_iota(jnp.int32, part.shape, 0) + block * launch.tiles.rows
    return jnp.where(t < launch.T, part, fill)


def read_gate(launch: Launch, at: Any, group: Array, block: Array) -> Array:
    """Reads a group's lanes of a block's gate, negative where the state is reset.

    What is reset rides in the sign: one scratch array serves for both. A gate of 0
    becomes the smallest normal number there, so that it has a sign: 1 - g is the same,
    and nothing else of g is used where the state is reset.

    Args:
      at: the kernel's references, with those of `GateInputs` among them.
    """
    # Beyond the sequence: a gate of 1, which is a logit of infinity, keeps the state.
    fill = float("inf") if launch.logits else 1.0
    g = read_rows(launch, at.gate, group, block, fill)
    if launch.logits:
        g = jax.nn.sigmoid(g + at.bias[0][:, lanes_of(group, launch.D // LANES)])
    if not launch.resets:
        return g
    resets = read_rows(launch, at.resets[0], group, block, 0.0)
    return jnp.where(resets > 0, -jnp.maximum(g, jnp.finfo(g.dtype).tiny), g)


def read_signed(e: Array, *, signed: bool) -> tuple[Array, Array, Array | None]:
    """Returns (g, the factor of the state before, where it is reset or None)."""
    if not signed:
        return e, e, None
    return jnp.abs(e), jnp.maximum(e, 0.0), e < 0


def position(launch: Launch, s: Array | int, offset: int = 0) -> Indices:
    """Returns the rows of position s in every stretch."""
    return pl.ds(s + offset, STRETCHES, stride=launch.tiles.stretch)


def chain(product: Array, added: Array, first: Array, *, reverse: bool = False):
    """Runs a state [1, 128] through 8 stretches: x[i+1] = product[i] x[i] + added[i].

    Returns what enters every stretch [8, 128], and what leaves the last one [1, 128].
    """
    stretch = jax.lax.broadcasted_iota(jnp.int32, product.shape, 0)
    entering = jnp.zeros_like(product)
    state = first
    order = range(STRETCHES)
    for i in reversed(order) if reverse else order:
        entering = jnp.where(stretch == i, state, entering)
        state = product[i : i + 1] * state + added[i : i + 1]
    return entering, state


def only_first(state: Array) -> Array:
    """Returns [8, 128]: the state [1, 128] for stretch 0, zeros for the others."""
    shape = (STRETCHES, LANES)
    return jnp.where(jax.lax.broadcasted_iota(jnp.int32, shape, 0) == 0, state, 0.0)


def row_in_block(launch: Launch, last: Array, block: Array) -> tuple[Array, Array]:
    """Returns (whether position `last` is in the block, its row there, or 0)."""
    row = last - block * launch.tiles.rows
    inside = (row >= 0) & (row < launch.tiles.rows)
    return inside, jnp.where(inside, row, 0)


def sum_heads(launch: Launch, x: Array, group: Array) -> Array:
    """Returns [rows, 128] with a head per lane: x [rows, 128] summed by head."""
    if launch.head % LANES:
        return _product(x, _heads(launch, group), contract=0)
    return jnp.where(_of_head(launch, x, group), jnp.sum(x, axis=1, keepdims=True), 0.0)


def spread_heads(launch: Launch, x: Array, group: Array) -> Array:
    """Returns [rows, 128]: a group's lanes, each with its head's lane of x."""
    if launch.head % LANES:
        return _product(x, _heads(launch, group), contract=1)
    column = jnp.sum(
        jnp.where(_of_head(launch, x, group), x, 0.0), axis=1, keepdims=True
    )
    return jnp.broadcast_to(column, x.shape)


def _of_head(launch: Launch, x: Array, group: Array) -> Array:
    """Returns which lane is that of the head that all of the group's channels have."""
    head = group * LANES // launch.head
    return jax.lax.broadcasted_iota(jnp.int32, x.shape, 1) == head


# Heads that share a register's lanes: one that is not finite makes the others of its
# position so too.
def _product(x: Array, heads: Array, *, contract: int) -> Array:
    return jax.lax.dot_general(
        x,
        heads,
        (((1,), (contract,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )


def _heads(launch: Launch, group: Array) -> Array:
    """Returns [128, 128]: 1 where a lane of the group (row) is of a head (column)."""
    shape = (LANES, LANES)
    channel = group * LANES + jax.lax.broadcasted_iota(jnp.int32, shape, 0)
    first = jax.lax.broadcasted_iota(jnp.int32, shape, 1) * launch.head
    return ((channel >= first) & (channel < first + launch.head)).astype(jnp.float32)
