"""Where a Triton program stands, what it reads there, and what a position does."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.selective_scan.triton_launch import LOG2_E, Arrays, Launch

Array = jax.Array


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """The program's row and channels, and how it reads and writes there."""

    launch: Launch
    row: Array
    block: Array

    @classmethod
    def here(cls, launch: Launch) -> "Program":
        """Returns where this program stands: neighbours have neighbouring channels."""
        n = pl.program_id(0)
        return cls(
            launch=launch,
            row=n // launch.columns,
            block=n % launch.columns,
        )

    @property
    def channels(self):
        return pl.ds(self.block * self.launch.channels, self.launch.channels)

    def state(self, ref, number) -> Any:
        """Returns the place of the number-th [N, channels] of an array [_ N, I]."""
        N = self.launch.N
        return ref.at[pl.ds(number * N, N), self.channels]

    def read(self, ref, t, inside) -> Array:
        """Reads position t of an array [B T, I]; zeros where it is not `inside`."""
        at = ref.at[self.row * self.launch.T + t, self.channels]
        mask = jnp.full((self.launch.channels,), inside)
        return pltriton.load(at, mask=mask, other=0.0).astype(jnp.float32)

    def write(self, ref, t, value: Array, inside) -> None:
        """Writes position t of an array [B T, I] if it is `inside`."""
        at = ref.at[self.row * self.launch.T + t, self.channels]
        mask = jnp.full((self.launch.channels,), inside)
        pltriton.store(at, value.astype(ref.dtype), mask=mask)

    def read_shared(self, ref, t, inside) -> Array:
        """Reads position t of an array [B T, N] that all channels share."""
        at = ref.at[self.row * self.launch.T + t, pl.ds(0, self.launch.N)]
        mask = jnp.full((self.launch.N,), inside)
        return pltriton.load(at, mask=mask, other=0.0).astype(jnp.float32)

    def write_part(self, ref, t, value: Array, inside) -> None:
        """Writes position t of this block's part of an array [columns B T, N]."""
        line = (self.block * self.launch.B + self.row) * self.launch.T + t
        mask = jnp.full((self.launch.N,), inside)
        pltriton.store(ref.at[line, pl.ds(0, self.launch.N)], value, mask=mask)

    def step(self, ins: Arrays, t, bias: Array) -> "Step":
        """Reads what moves the state at position t."""
        inside = t < self.launch.T
        raw = self.read(ins.dt, t, inside) + bias
        u = self.read(ins.u, t, inside)
        restart = None
        if ins.starts is not None:
            at = ins.starts.at[self.row * self.launch.T + t]
            restart = pltriton.load(at, mask=inside, other=0) > 0
        # Past the row's end the step is 0: the state stays as it is.
        delta = jnp.where(inside, softplus(raw), 0.0)
        return Step(
            t, inside, raw, delta, u, self.read_shared(ins.b, t, inside), restart
        )


class Step(NamedTuple):
    """What a position does to the state."""

    t: Array
    inside: Array
    raw: Array  # [channels], dt + bias
    delta: Array  # [channels], its softplus
    u: Array  # [channels]
    b: Array  # [N]
    restart: Array | None  # whether a document starts; None: nowhere

    def decay(self, a: Array) -> Array:
        """Returns what is left of the state before, [N, channels]."""
        decay = jnp.exp2(self.delta[None, :] * a)
        return decay if self.restart is None else jnp.where(self.restart, 0.0, decay)

    def advance(self, h: Array, decay: Array) -> Array:
        """Returns the state after the position."""
        return decay * h + self.b[:, None] * (self.delta * self.u)[None, :]


def softplus(x: Array) -> Array:
    """Returns log(1 + exp(x)), exact where it is small."""
    return jnp.maximum(x, 0.0) + jnp.log1p(jnp.exp2(-jnp.abs(x) * LOG2_E))


def sigmoid(x: Array) -> Array:
    """Returns 1 / (1 + exp(-x)), by a power of two."""
    return 1 / (1 + jnp.exp2(-x * LOG2_E))
