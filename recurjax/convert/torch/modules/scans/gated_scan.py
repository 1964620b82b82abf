"""The recurrence of RAT and the RNN, on a GPU by Triton's kernels."""

from typing import Any

import torch
from kernels import launch, runs_kernels, triton
from layers import recurrence
from torch import Tensor
from torch.autograd.function import once_differentiable

from pallas_kernels.gated_scan.triton_kernels import (
    backward_kernel,
    forward_kernel,
    summarize_kernel,
)
from pallas_kernels.gated_scan.triton_sizes import find_sizes, refusal_of_widths


def gated_scan(
    gate: Tensor,
    values: list[Tensor],
    initial: list[Tensor],
    resets: Tensor | None = None,
) -> list[Tensor]:
    """h_t = g_t h_(t-1) + (1 - g_t) v_t for each stream v, in the gate's dtype.

    Args:
      gate: [B, T, D], in at least float32.
      values: each [B, T, D], or narrower: channel d then reads d mod its width.
      initial: the state [B, D] of each before the first position.
      resets: [B, T], True where the state is zero before the position.
    """
    B, T, D = gate.shape
    widths = [v.shape[2] for v in values]
    if runs_kernels(gate, *values) and refusal_of_widths(D, widths) is None:
        keeps = gate.new_ones(1)
        if resets is not None:
            keeps = 1 - resets.expand(B, T).to(gate.dtype)
        return list(GatedScan.apply(gate, keeps, torch.stack(initial, 1), *values))
    decay = gate if resets is None else gate.masked_fill(resets[..., None], 0)
    tiled = [v.repeat(1, 1, D // v.shape[2]) for v in values]
    pairs = zip(tiled, initial, strict=True)
    return [recurrence(decay, (1 - gate) * v, h) for v, h in pairs]


class Cut:
    """A pass' programs, each a stretch of a row and some channels of every tile."""

    def __init__(self, gate: Tensor, keeps: Tensor, *values: Tensor, backward: bool):
        (self.B, self.T, D), widths = gate.shape, [v.shape[2] for v in values]
        W = min(widths)
        channels, unroll, self.length = find_sizes(
            self.B, self.T, D, W, backward=backward
        )
        self.stretches = triton.cdiv(self.T, self.length)
        self.programs = self.B * self.stretches * (W // channels)
        padding = gate.new_zeros(1)
        # Where the gate is no logit and every row has all positions.
        self.common = (gate, padding, keeps, padding)
        self.streams, self.widths = len(values), {"W0": widths[0], "W1": widths[-1]}
        self.constants = {
            "D": D,
            "W": W,
            "TILES": triton.next_power_of_2(D // W),
            "CHANNELS": channels,
            "UNROLL": unroll,
            "STREAMS": self.streams,
            "LOGITS": False,
            "STARTS": keeps.dim() > 1,
            "LENGTHS": False,
        }

    def run(self, kernel: Any, *arrays: Tensor, outputs: list[Tensor], **switches: Any):
        """Runs a kernel; of one stream its array stands for a second one, too."""
        launch(
            kernel,
            self.programs,
            *(*self.common, *arrays, self.T, self.length, *outputs),
            **self.constants | self.widths | switches,
        )

    def summarize(self, *arrays: Tensor, backward: bool) -> Tensor:
        """Returns what each stretch makes of a state; of one stretch, padding."""
        if self.stretches == 1:
            return arrays[0]
        D = self.constants["D"]
        widths = {"W0": D, "W1": D} if backward else {}
        shape = (self.B, self.stretches, 1 + self.streams, D)
        summaries = arrays[0].new_empty(shape, dtype=torch.float32)
        self.run(
            summarize_kernel, *arrays, outputs=[summaries], BACKWARD=backward, **widths
        )
        return summaries

    @property
    def switches(self) -> dict[str, bool]:
        """What forward and backward kernels are compiled for."""
        return {"LINKED": self.stretches > 1, "QUERIES": False}


class GatedScan(torch.autograd.Function):
    """Scans one or two streams; states and their gradients are float32."""

    @staticmethod
    def forward(
        context: Any, gate: Tensor, keeps: Tensor, initial: Tensor, *values: Tensor
    ) -> tuple[Tensor, ...]:
        """Returns the states [B, T, D] of each stream."""
        gate, initial, *values = (x.contiguous() for x in (gate, initial, *values))
        cut = Cut(gate, keeps, *values, backward=False)
        v0, v1 = values[0], values[-1]
        states = [torch.empty_like(gate) for _ in values]
        summaries = cut.summarize(v0, v1, initial, backward=False)
        cut.run(
            forward_kernel,
            *(v0, v1, v1, initial, summaries),
            outputs=[states[0], states[-1], torch.empty_like(initial), gate],
            KEEPS=True,
            **cut.switches,
        )
        context.save_for_backward(gate, keeps, initial, *values, *states)
        return tuple(states)

    @staticmethod
    @once_differentiable
    def backward(context: Any, *d_states: Tensor) -> tuple[Tensor | None, ...]:
        """Returns the gradients of gate, initial and values."""
        gate, keeps, initial, *rest = context.saved_tensors
        values, states = rest[: len(d_states)], rest[len(d_states) :]
        d_states = tuple(d.contiguous() for d in d_states)
        cut = Cut(gate, keeps, *values, backward=True)
        d_last = torch.zeros_like(initial)
        summaries = cut.summarize(d_states[0], d_states[-1], d_last, backward=True)
        d_gate, d_initial = torch.empty_like(gate), torch.empty_like(initial)
        d_values = [torch.empty_like(v) for v in values]
        v0, v1 = values[0], values[-1]
        cut.run(
            backward_kernel,
            *(v0, v1, v1, initial, states[0], states[-1], d_states[0], d_states[-1]),
            *(d_last, gate, summaries),
            outputs=[d_gate, d_values[0], d_values[-1], gate, d_initial, gate],
            HEAD=gate.shape[2],
            **cut.switches,
        )
        return d_gate, None, d_initial, *d_values
