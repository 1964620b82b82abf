"""Mamba's recurrence, on a GPU by Triton's kernels."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from kernels import launch, runs_kernels, triton
from layers import STRETCH, recurrence
from torch import Tensor
from torch.autograd.function import once_differentiable

from pallas_kernels.selective_scan.triton_kernels import (
    backward_kernel,
    forward_kernel,
    summarize_kernel,
)
from pallas_kernels.selective_scan.triton_sizes import (
    WARP,
    find_sizes,
    refusal_of_sizes,
)

SKIPPED = -1e30
"""Of dt where the state stays as it is: its step is exactly 0."""
CHUNK = 16
"""Positions between two states that are kept for the backward pass."""


def selective_scan(
    u: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    skip: Tensor,
    z: Tensor,
    h: Tensor,
) -> tuple[Tensor, Tensor]:
    """h_t = exp(s A) h_(t-1) + s B u, y = (C h + D u) silu(z), with s = softplus(dt).

    Args:
      u: [B, T, I] with I channels, as dt and z; dt is in at least float32.
      a: A, [I, N]: a channel has N states.
      b: B, [B, T, N], as c, which is C.
      skip: D, [I].
      h: [B, I, N], the state before the first position.

    Returns:
      y [B, T, I] in z's dtype, and the last state.
    """
    if runs_kernels(u, dt, b, c, z) and refusal_of_sizes(*a.shape) is None:
        keeps = torch.is_grad_enabled()
        return SelectiveScan.apply(keeps, u, dt, a, b, c, skip, z, h)
    dtype, steps = dt.dtype, F.softplus(dt)
    u, b, c = u.to(dtype), b.to(dtype), c.to(dtype)
    outputs = []
    # By stretches, so that few states are in memory at once.
    parts = (part.split(STRETCH, dim=1) for part in (steps[..., None], u, b, c))
    for step, u_t, b_t, c_t in zip(*parts, strict=True):
        inputs = step * u_t[..., None] * b_t[:, :, None]
        states = recurrence((step * a).exp(), inputs, h)
        h = states[:, -1]
        outputs.append((states * c_t[:, :, None]).sum(-1))
    y = torch.cat(outputs, dim=1) + skip * u
    return y.to(z.dtype) * F.silu(z), h


class Cut:
    """A pass' programs, each a stretch of a row and some channels."""

    def __init__(self, u: Tensor, N: int, *, backward: bool):
        self.B, self.T, I = u.shape
        self.channels, self.unroll, self.length = find_sizes(
            self.B, self.T, I, CHUNK, backward=backward
        )
        self.stretches = triton.cdiv(self.T, self.length)
        self.programs = self.B * self.stretches * (I // self.channels)
        self.constants = {
            "I": I,
            "N": N,
            "CHANNELS": self.channels,
            "UNROLL": self.unroll,
            "STARTS": False,
        }

    def run(self, kernel: Any, *arrays: Any, outputs: list[Tensor], **switches: Any):
        """Runs a kernel."""
        launch(
            kernel,
            self.programs,
            *(*arrays, self.T, self.length, *outputs),
            warps=max(1, self.channels // WARP),
            **self.constants | switches,
        )

    def summaries(self, *arrays: Tensor, backward: bool) -> list[Tensor]:
        """Returns (sums, ends) of all stretches; of one stretch, padding."""
        if self.stretches == 1:
            return [arrays[2]] * 2
        shape = (self.B, self.stretches, self.constants["I"])
        sums = arrays[2].new_empty(shape)
        ends = arrays[2].new_empty(*shape[:2], self.constants["N"], shape[2])
        self.run(summarize_kernel, *arrays, outputs=[sums, ends], BACKWARD=backward)
        return [sums, ends]


class SelectiveScan(torch.autograd.Function):
    """Keeps the state that enters every chunk for the backward pass."""

    @staticmethod
    def forward(context: Any, trains: bool, *arrays: Tensor) -> tuple[Tensor, Tensor]:
        """Returns y and the last state of `selective_scan`'s arguments."""
        u, dt, a, b, c, skip, z, h = (x.contiguous() for x in arrays)
        N = a.shape[1]
        cut = Cut(u, N, backward=False)
        # Kernels raise 2 to it, and read N vectors of channels.
        exponents = (a.float() * math.log2(math.e)).T.contiguous()
        skip, initial = skip.float(), h.float().mT.contiguous()
        bias, keeps = torch.zeros_like(skip), skip.new_ones(1)
        summaries = cut.summaries(u, dt, exponents, b, z, bias, keeps, backward=False)
        y, last = torch.empty_like(z), torch.empty_like(initial)
        kept = skip.new_empty(
            (cut.B, triton.cdiv(cut.T, CHUNK), *initial.shape[1:]) if trains else 1
        )
        cut.run(
            forward_kernel,
            *(u, dt, exponents, b, c, skip, z, bias, initial, keeps, *summaries),
            outputs=[y, last, kept],
            CHUNK=CHUNK,
            KEEPS=trains,
        )
        context.save_for_backward(u, dt, exponents, b, c, skip, z, bias, keeps, kept)
        context.dtypes = [x.dtype for x in arrays]
        return y, last.mT.to(h.dtype)

    @staticmethod
    @once_differentiable
    def backward(
        context: Any, d_y: Tensor, d_last: Tensor
    ) -> tuple[Tensor | None, ...]:
        """Returns the gradients of all arguments."""
        u, dt, exponents, b, c, skip, z, bias, keeps, kept = context.saved_tensors
        (B, T, I), N = u.shape, b.shape[2]
        cut = Cut(u, N, backward=True)
        d_y, d_last = d_y.contiguous(), d_last.float().mT.contiguous()
        summaries = cut.summaries(d_y, dt, exponents, c, z, bias, keeps, backward=True)
        du, ddt, dz = (torch.empty_like(x) for x in (u, dt, z))
        # Sums over channels, and over rows and stretches: a part for each program.
        db, dc = skip.new_empty(2, I // cut.channels, B, T, N)
        da = skip.new_empty(B, cut.stretches, N, I)
        d_skip, d_bias = skip.new_empty(2, B, cut.stretches, I)
        d_initial = torch.empty_like(d_last)
        scratch = skip.new_empty(cut.programs, CHUNK // cut.unroll, N, cut.channels)
        cut.run(
            backward_kernel,
            *(u, dt, exponents, b, c, skip, z, bias, keeps, kept, d_y, d_last),
            *(*summaries, B),
            outputs=[
                *(du, ddt, dz, db, dc, da, d_initial, d_skip, d_bias, scratch),
            ],
            CHUNK=CHUNK,
        )
        gradients = (
            *(du, ddt, da.sum((0, 1)).T, db.sum(0), dc.sum(0), d_skip.sum((0, 1))),
            *(dz, d_initial.mT),
        )
        pairs = zip(gradients, context.dtypes, strict=True)
        return None, *(gradient.to(dtype) for gradient, dtype in pairs)
