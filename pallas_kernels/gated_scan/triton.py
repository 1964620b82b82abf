"""GPU path: launches the kernels of `triton_kernels.py` by jax-triton."""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import triton_call
from pallas_kernels.dispatch import refusal_of_one_position
from pallas_kernels.gated_scan.call import (
    GatedScanCall,
    ScanOutputs,
    States,
    array_of,
    as_given,
    bias_of,
    find_resets,
    refusal_of_streams,
)
from pallas_kernels.gated_scan.queries import ends_of, pull_apart, read_apart
from pallas_kernels.gated_scan.triton_sizes import find_sizes, refusal_of_widths
from pallas_kernels.powers import next_power, refusal_of_size
from pallas_kernels.target import refusal_of_triton
from pallas_kernels.triton_call import float32_shape

Array = jax.Array

_KERNELS = "pallas_kernels.gated_scan.triton_kernels"


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """How a pass of a call is cut into programs of one warp: see `Sizes`.

    Attributes:
      W: the narrowest stream's width.
      head: E where queries can be read in a kernel, else 0.
      linked: whether the state flows from one stretch into the next; else each is a
        chunk.
    """

    B: int
    T: int
    D: int
    W: int
    head: int
    channels: int
    unroll: int
    stretch: int
    linked: bool

    @classmethod
    def of(cls, call: GatedScanCall, *, backward: bool) -> "Launch":
        """Returns the cut for a call; the caller's sizes replace the heuristic's."""
        (B, T, D), W, blocks = call.gate.shape, call.narrowest, call.options.blocks
        readable = call.head > 0 and call.head % 16 == W % call.head == 0
        head = call.head if readable else 0
        chunk = min(call.options.chunk or T, T)
        sizes = find_sizes(
            B,
            T,
            D,
            W,
            backward=backward,
            head=head,
            chunk=chunk,
            channels=blocks.channels,
            unroll=blocks.unroll,
            stretch=blocks.stretch,
        )
        linked = sizes.stretch != chunk
        return cls(B=B, T=T, D=D, W=W, head=head, linked=linked, **sizes._asdict())

    @property
    def stretches(self) -> int:
        """Programs that share a row and its channels."""
        return -(-self.T // self.stretch)

    @property
    def summaries(self) -> bool:
        """Whether programs must know what other stretches make of a state."""
        return self.linked and self.stretches > 1

    def run(
        self, kernel: str, x: "_Arrays", *arrays: Any, out_shape: list, **switches: Any
    ) -> list:
        """Runs a kernel of `triton_kernels` and returns its outputs."""
        first, second = x.widths
        return triton_call.launch(
            f"{_KERNELS}:{kernel}",
            *(x.gate, x.bias, x.keeps, x.lasts, *arrays, self.T, self.stretch),
            grid=self.B * self.stretches * (self.W // self.channels),
            out_shape=out_shape,
            warps=1,
            D=self.D,
            W=self.W,
            W0=first,
            W1=second,
            TILES=next_power(self.D // self.W),
            CHANNELS=self.channels,
            UNROLL=self.unroll,
            STREAMS=x.streams,
            LOGITS=x.logits,
            STARTS=x.starts,
            LENGTHS=x.lengths,
            **switches,
        )

    def summarize(self, x: "_Arrays", *arrays: Array, backward: bool) -> Array:
        """Returns what each stretch makes of a state, or padding."""
        if not self.summaries:
            return x.lasts
        shape = (self.B, self.stretches, 1 + x.streams, self.D)
        if backward:
            x = x._replace(widths=(self.D, self.D))
        [summaries] = self.run(
            "summarize_kernel", x, *arrays, out_shape=[float32_shape(*shape)],
            BACKWARD=backward,
        )  # fmt: skip
        return summaries


def supported(call: GatedScanCall) -> str | None:
    """Returns why the kernels cannot run this call, None when they can."""
    return (
        refusal_of_triton()
        or refusal_of_one_position(array_of(call.gate))
        or expressible(call)
        or triton_call.refusal_of_packages()
    )


def expressible(call: GatedScanCall) -> str | None:
    """Returns what of a call the kernels do not do, whatever the device."""
    widths = [v.shape[2] for v in call.values]
    reason = refusal_of_widths(call.gate.shape[2], widths) or refusal_of_streams(call)
    if reason is not None or not call.options.blocks.given():
        return reason
    launch = Launch.of(call, backward=False)
    # Heads that linked stretches read apart bound no program's channels.
    divisor = math.gcd(0 if launch.linked else launch.head, launch.W)
    reason = refusal_of_size("channels", launch.channels, most=divisor & -divisor)
    if reason is None and launch.unroll > launch.stretch:
        return (
            f"unroll must be at most the {launch.stretch} positions of a stretch, got "
            f"{launch.unroll}"
        )
    return reason


def forward(
    call: GatedScanCall, *, residuals: bool
) -> tuple[ScanOutputs, States | None]:
    """Returns the outputs, and all states, None where they are left out."""
    launch = Launch.of(call, backward=False)
    x, (B, T, D) = _Arrays.of(call, launch), call.gate.shape
    keeps = residuals or not x.reads
    summaries = launch.summarize(x, *x.values, x.initial, backward=False)
    parts = D // launch.channels
    shapes = [(B, T, D)] * 2 if keeps else [(B, T, D), (B, launch.stretches, D)]
    v0, v1 = x.values
    h0, h1, finals, sums = launch.run(
        "forward_kernel",
        x,
        *(v0, v1, x.queries, x.initial, summaries),
        out_shape=[
            jax.ShapeDtypeStruct(shapes[0], v0.dtype),
            jax.ShapeDtypeStruct(shapes[1] if x.streams == 2 else (1,), v1.dtype),
            float32_shape(B, x.streams, D),
            float32_shape(B, T, parts) if x.reads else float32_shape(1),
        ],
        LINKED=launch.summaries,
        QUERIES=x.reads,
        KEEPS=keeps,
    )
    states = (h0, h1)[: x.streams]
    finals = tuple(finals[:, s] for s in range(x.streams))
    saved = states if residuals else None
    if not x.reads:
        return read_apart(call, states, finals), saved
    if residuals:
        states = (h0, ends_of(h1, launch.stretch))
    # A head's parts are next to each other.
    logits = sums.reshape(B, T, D // launch.head, -1).sum(-1)
    return ScanOutputs(states, finals, logits), saved


def backward(
    call: GatedScanCall, residuals: States, cotangents: ScanOutputs
) -> GatedScanCall:
    """Returns gradients in place of the arrays."""
    launch = Launch.of(call, backward=True)
    x, (B, _, D) = _Arrays.of(call, launch), call.gate.shape
    d_states, d_finals, d_logits = cotangents
    dq = None
    if not x.reads:
        d_states, dq = pull_apart(call, residuals, cotangents)
        d_logits = None
    d_logits = x.lasts if d_logits is None else d_logits.astype(jnp.float32)
    d_finals = _stacked(d_finals)
    d_states = (d_states[0], d_states[-1])
    summaries = launch.summarize(x, *d_states, d_finals, backward=True)
    shape = jax.ShapeDtypeStruct
    v0, v1 = x.values
    padding = float32_shape(1)
    d_gate, d_v0, d_v1, d_queries, d_initial, d_bias = launch.run(
        "backward_kernel",
        x,
        *(v0, v1, x.queries, x.initial, residuals[0], residuals[-1], *d_states),
        *(d_finals, d_logits, summaries),
        out_shape=[
            shape(x.gate.shape, x.gate.dtype),
            shape(v0.shape, v0.dtype),
            shape(v1.shape, v1.dtype) if x.streams == 2 else padding,
            shape(x.queries.shape, x.queries.dtype) if x.reads else padding,
            float32_shape(B, x.streams, D),
            float32_shape(B, launch.stretches, D) if x.logits else padding,
        ],
        LINKED=launch.summaries,
        QUERIES=x.reads,
        HEAD=launch.head or D,
    )
    if x.reads:
        dq = d_queries
    return call._replace(
        gate=as_given(call.gate, d_gate, d_bias.sum((0, 1)) if x.logits else None),
        values=(d_v0, d_v1)[: x.streams],
        initial=tuple(d_initial[:, s] for s in range(x.streams)),
        starts=None,
        lengths=None,
        queries=dq,
    )


class _Arrays(NamedTuple):
    """What kernels read in another form than the call has it."""

    gate: Array  # or its logits
    bias: Array  # float32 [D], padding where the gate is given
    keeps: Array  # float32 [B, T], 0 where the state is reset; [1] where it never is
    lasts: Array  # int32 [B], padding where rows have no lengths
    values: tuple[Array, Array]  # one stream: twice the same
    queries: Array  # padding without queries that the kernel reads
    initial: Array  # float32 [B, streams, D]
    widths: tuple[int, int]
    streams: int
    logits: bool
    starts: bool
    lengths: bool
    reads: bool

    @classmethod
    def of(cls, call: GatedScanCall, launch: Launch) -> "_Arrays":
        (B, T, _), bias = call.gate.shape, bias_of(call.gate)
        # Linked stretches are not chunks: states are reset within them.
        period = call.period if launch.linked else None
        resets = find_resets(T, call.starts, period)
        keeps = jnp.ones(1)
        if resets is not None:
            keeps = jnp.broadcast_to(1 - resets.astype(jnp.float32), (B, T))
        lengths = jnp.zeros(1) if call.lengths is None else call.lengths
        values = (call.values[0], call.values[-1])
        reads = call.queries is not None and launch.head > 0 and not launch.linked
        return cls(
            gate=array_of(call.gate),
            bias=jnp.zeros(1) if bias is None else bias,
            keeps=keeps,
            lasts=lengths.astype(jnp.int32) - 1,
            values=values,
            queries=call.queries if reads and call.queries is not None else values[1],
            initial=_stacked(call.initial),
            widths=(values[0].shape[2], values[1].shape[2]),
            streams=len(call.values),
            logits=bias is not None,
            starts=resets is not None,
            lengths=call.lengths is not None,
            reads=reads,
        )


def _stacked(states: tuple[Array, ...]) -> Array:
    return jnp.stack([h.astype(jnp.float32) for h in states], axis=1)
