"""GPU path: launches the kernels of `triton_kernels.py` by jax-triton."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float

from pallas_kernels import triton_call
from pallas_kernels.dispatch import refusal_of_one_position
from pallas_kernels.powers import refusal_of_size
from pallas_kernels.selective_scan.call import (
    SelectiveScanCall,
    SelectiveScanOutputs,
    refusal_of_arrays,
    refusal_of_unroll,
)
from pallas_kernels.selective_scan.triton_sizes import (
    LONGEST_CHUNK,
    WARP,
    find_sizes,
    refusal_of_sizes,
)
from pallas_kernels.target import refusal_of_triton
from pallas_kernels.triton_call import float32_shape

Array = jax.Array

LOG2_E = 1.4426950408889634
_KERNELS = "pallas_kernels.selective_scan.triton_kernels"


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """A pass of a call, and its cut: see `Sizes`."""

    B: int
    T: int
    I: int
    N: int
    chunk: int
    channels: int
    unroll: int
    stretch: int

    @classmethod
    def of(cls, call: SelectiveScanCall, *, backward: bool) -> "Launch":
        """Returns the cut for a call; the caller's sizes replace the heuristic's."""
        (B, T, I), N = call.u.shape, call.a.shape[1]
        chunk, blocks = call.options.chunk, call.options.blocks
        sizes = find_sizes(
            B,
            T,
            I,
            chunk,
            backward=backward,
            channels=blocks.backward_channels if backward else blocks.channels,
            unroll=blocks.backward_unroll if backward else blocks.unroll,
            stretch=blocks.stretch,
        )
        return cls(B=B, T=T, I=I, N=N, chunk=chunk, **sizes._asdict())

    @property
    def stretches(self) -> int:
        """Programs that share a row and its channels."""
        return -(-self.T // self.stretch)

    @property
    def programs(self) -> int:
        """Programs of the pass."""
        return self.B * self.stretches * (self.I // self.channels)

    def run(self, kernel: str, *arrays: Any, out_shape: list, **switches: Any) -> list:
        """Runs a kernel of `triton_kernels` and returns its outputs."""
        return triton_call.launch(
            f"{_KERNELS}:{kernel}",
            *(*arrays, self.T, self.stretch),
            grid=self.programs,
            out_shape=out_shape,
            warps=max(1, self.channels // WARP),
            I=self.I,
            N=self.N,
            CHANNELS=self.channels,
            UNROLL=self.unroll,
            **switches,
        )

    def summaries(self, *arrays: Array, **switches: bool) -> list:
        """Returns (sums, ends) of all stretches; of one stretch, arrays as padding."""
        if self.stretches == 1:
            return [arrays[2]] * 2
        shape = (self.B, self.stretches)
        out_shape = [
            float32_shape(*shape, self.I),
            float32_shape(*shape, self.N, self.I),
        ]
        return self.run("summarize_kernel", *arrays, out_shape=out_shape, **switches)


def supported(call: SelectiveScanCall) -> str | None:
    """Returns why the kernels cannot run this call, None when they can."""
    return (
        refusal_of_triton()
        or refusal_of_one_position(call.u)
        or expressible(call)
        or triton_call.refusal_of_packages()
    )


def expressible(call: SelectiveScanCall) -> str | None:
    """Returns what of a call the kernels do not do, whatever the device."""
    reason = refusal_of_arrays(call)
    if reason is not None:
        return reason
    (I, N), chunk, blocks = call.a.shape, call.options.chunk, call.options.blocks
    if (reason := refusal_of_sizes(I, N)) is not None:
        return reason
    if chunk > LONGEST_CHUNK:
        return f"keeps a state every {LONGEST_CHUNK} positions at least, got {chunk}"
    for name, size in blocks.given().items():
        if name.endswith("channels"):
            reason = refusal_of_size(name, size, most=I & -I)
        elif name.endswith("unroll"):
            reason = refusal_of_unroll(name, size, chunk)
        if reason is not None:
            return reason
    return None


def forward(
    call: SelectiveScanCall, *, residuals: bool
) -> tuple[SelectiveScanOutputs, Float[Array, "B G N I"] | None]:
    """Returns (y, final), and the states [B, G, N, I] that enter chunks or None."""
    launch, x = Launch.of(call, backward=False), _Arrays.of(call)
    B, T, N, I = launch.B, launch.T, launch.N, launch.I
    inputs = (call.u, call.dt, x.a, call.b)
    summaries = launch.summaries(
        *(*inputs, x.z, x.bias, x.keeps), STARTS=x.starts, BACKWARD=False
    )
    y = jax.ShapeDtypeStruct(call.u.shape, call.u.dtype)
    kept = (
        float32_shape(B, -(-T // launch.chunk), N, I) if residuals else float32_shape(1)
    )
    initial = call.initial.astype(jnp.float32).swapaxes(1, 2)
    y, final, kept = launch.run(
        "forward_kernel",
        *(*inputs, call.c, x.skip, x.z, x.bias, initial, x.keeps, *summaries),
        out_shape=[y, float32_shape(B, N, I), kept],
        STARTS=x.starts,
        CHUNK=launch.chunk,
        KEEPS=residuals,
    )
    out = SelectiveScanOutputs(y, final.swapaxes(1, 2))
    return out, kept if residuals else None


def backward(
    call: SelectiveScanCall,
    residuals: Float[Array, "B G N I"],
    cotangents: SelectiveScanOutputs,
) -> SelectiveScanCall:
    """Returns the call's gradients, each in the place of its array."""
    launch, x = Launch.of(call, backward=True), _Arrays.of(call)
    B, T, N, I, S = launch.B, launch.T, launch.N, launch.I, launch.stretches
    summaries = launch.summaries(
        *(cotangents.y, call.dt, x.a, call.c, x.z, x.bias, x.keeps),
        STARTS=x.starts,
        BACKWARD=True,
    )
    wide = jax.ShapeDtypeStruct
    shared = float32_shape(I // launch.channels, B, T, N)
    scratch = (launch.programs, launch.chunk // launch.unroll, N, launch.channels)
    du, ddt, dz, db, dc, da, d_initial, d_skip, d_bias, _ = launch.run(
        "backward_kernel",
        *(call.u, call.dt, x.a, call.b, call.c, x.skip, x.z, x.bias, x.keeps),
        *(residuals, cotangents.y),
        cotangents.final.astype(jnp.float32).swapaxes(1, 2),
        *(*summaries, B),
        out_shape=[
            *(wide(v.shape, v.dtype) for v in (call.u, call.dt, x.z)),
            *(shared, shared, float32_shape(B, S, N, I), float32_shape(B, N, I)),
            *(float32_shape(B, S, I), float32_shape(B, S, I), float32_shape(*scratch)),
        ],
        STARTS=x.starts,
        CHUNK=launch.chunk,
    )
    return call._replace(
        u=du,
        dt=ddt,
        a=da.sum(axis=(0, 1)).T,
        b=db.sum(axis=0),
        c=dc.sum(axis=0),
        skip=d_skip.sum(axis=(0, 1)),
        z=dz,
        dt_bias=d_bias.sum(axis=(0, 1)),
        initial=d_initial.swapaxes(1, 2),
        starts=None,
    )


class _Arrays(NamedTuple):
    """Arrays that kernels read in another form than the call's, and the optional z."""

    a: Array  # [N, I], times log2(e): kernels raise 2 to it
    skip: Array  # float32 [I]
    z: Array
    bias: Array  # float32 [I]
    keeps: Array  # float32 [B, T], 0 where a document starts; [1] where none does
    starts: bool

    @classmethod
    def of(cls, call: SelectiveScanCall) -> "_Arrays":
        starts, float32 = call.starts, jnp.float32
        assert call.skip is not None and call.dt_bias is not None
        assert call.z is not None
        return cls(
            a=call.a.astype(float32).T * LOG2_E,
            skip=call.skip.astype(float32),
            z=call.z,
            bias=call.dt_bias.astype(float32),
            keeps=jnp.ones(1) if starts is None else 1 - starts.astype(float32),
            starts=starts is not None,
        )
