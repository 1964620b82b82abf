"""Calls of the scan, and both passes of a backend or of the definition on them."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.gated_scan import GateLogits
from pallas_kernels.gated_scan.call import (
    GatedScanCall,
    GatedScanOptions,
    ScanOutputs,
)
from pallas_kernels.gated_scan.reference import (
    gated_scan_reference,
    queried_scan_reference,
)
from tests.compiling import QUICK_COMPILE
from tests.tolerances import assert_gradients_close, assert_values_close


class Case(NamedTuple):
    """Sizes and switches of a call; its numbers follow from them."""

    positions: int
    chunk: int | None = None
    batch: int = 2
    widths: tuple[int, ...] = (32, 16)
    starts: bool = False
    lengths: bool = False
    logits: bool = False
    head: int = 0
    dtype: str = "float32"

    def call(self, **options) -> GatedScanCall:
        """Returns the call as backends receive it, with more options.

        With a head width E queries read the last stream.
        """
        options = GatedScanOptions(chunk=self.chunk, **options)
        return GatedScanCall(*self.inputs(), options)

    def inputs(self):
        """Returns (gate, values, initial, starts, lengths, queries)."""
        draw = np.random.default_rng(self.positions)
        B, T, D = self.batch, self.positions, max(self.widths)
        gate = jax.nn.sigmoid(jnp.asarray(draw.normal(size=(B, T, D)), "float32"))
        gate = gate.at[0, :: max(T // 3, 1), 0].set(0)
        values = tuple(
            jnp.asarray(draw.normal(size=(B, T, W)), self.dtype) for W in self.widths
        )
        initial = tuple(
            jnp.asarray(draw.normal(size=(B, D)), "float32") for _ in values
        )
        starts = jnp.asarray(draw.random(size=(B, T)) < 0.3) if self.starts else None
        lengths = [T // 2, 0, T, 1][:B]
        lengths = jnp.asarray(lengths, jnp.int32) if self.lengths else None
        gate = gate.astype(self.dtype)
        if self.logits:
            logits = jnp.asarray(draw.normal(size=(B, T, D)), self.dtype)
            gate = GateLogits(logits, jnp.asarray(draw.normal(size=D), "float32"))
        queries = None
        if self.head:
            shape = (B, T, self.widths[-1] // self.head, self.head)
            queries = jnp.asarray(draw.normal(size=shape), self.dtype)
        return gate, values, initial, starts, lengths, queries

    def cotangents(self) -> ScanOutputs:
        """Returns gradients of the outputs."""
        draw = np.random.default_rng(0)
        B, T, D = self.batch, self.positions, max(self.widths)
        lengths = [T] * len(self.widths)
        of_logits = None
        if self.head:
            assert self.chunk is not None
            lengths[-1] = T // self.chunk
            shape = (B, T, D // self.head)
            of_logits = jnp.asarray(draw.normal(size=shape), "float32")
        of_states = tuple(
            jnp.asarray(draw.normal(size=(B, length, D)), self.dtype)
            for length in lengths
        )
        of_finals = tuple(
            jnp.asarray(draw.normal(size=(B, D)), "float32") for _ in self.widths
        )
        return ScanOutputs(of_states, of_finals, of_logits)


def both_passes(backend, case: Case, **options):
    """Returns a backend's (outputs, gradients of gate, values, initial and queries)."""

    @partial(jax.jit, compiler_options=QUICK_COMPILE)
    def run(call, cotangents):
        out, states = backend.forward(call, residuals=True)
        return out, _floating(backend.backward(call, states, cotangents))

    return run(case.call(**options), case.cotangents())


def definition(case: Case):
    """Returns the definition's ((states, finals, logits), gradients), in float32."""
    gate, values, initial, starts, lengths, queries = case.inputs()
    arrays = (gate, values, initial, queries)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), arrays)
    rest = {"starts": starts, "lengths": lengths, "chunk": case.chunk}

    @partial(jax.jit, compiler_options=QUICK_COMPILE)
    def run(wide, cotangents):
        def scan(gate, values, initial, queries):
            if queries is None:
                scanned = gated_scan_reference(gate, values, initial=initial, **rest)
                return ScanOutputs(*scanned, None)
            v, ends, logits, finals = queried_scan_reference(
                gate, *values, queries, initial=initial, **rest
            )
            return ScanOutputs((v, ends), finals, logits)

        out, pull = jax.vjp(scan, *wide)
        return out, pull(jax.tree.map(lambda x: x.astype(jnp.float32), cotangents))

    return run(wide, case.cotangents())


def check(backend, case: Case, **options) -> None:
    """Compares both passes of a backend with the definition's."""
    (states, finals, logits), gradients = both_passes(backend, case, **options)
    (want_states, want_finals, want_logits), want = definition(case)
    assert all(h.dtype == case.dtype for h in states)
    assert_values_close(states, want_states, case.dtype)
    assert_values_close(finals, want_finals)  # float32 whatever the streams are
    # XLA reads the states as they are kept, kernels before they are rounded.
    assert_values_close(logits, want_logits, case.dtype)
    assert_gradients_close(gradients, want, case.dtype)


def check_finite_difference(backend, case: Case, **options) -> None:
    """Compares a backend's gradient along a direction with its own values' slope."""
    call = case.call(**options)
    inner = (0.1 + 0.8 * call.gate, call.values, call.initial, call.queries)
    draw = np.random.default_rng(1)
    along = jax.tree.map(
        lambda x: jnp.asarray(draw.normal(size=x.shape), x.dtype), inner
    )

    def call_of(arrays):
        gate, values, initial, queries = arrays
        return call._replace(gate=gate, values=values, initial=initial, queries=queries)

    def total(arrays, cotangents):
        out, states = backend.forward(call_of(arrays), residuals=True)
        return _dot(out, cotangents), states

    @partial(jax.jit, compiler_options=QUICK_COMPILE)
    def run(arrays, along, cotangents):
        step = 2.0**-9
        ends = [
            jax.tree.map(lambda x, d, sign=sign: x + sign * step * d, arrays, along)
            for sign in (1, -1)
        ]
        above, below = (total(end, cotangents)[0] for end in ends)
        _, states = total(arrays, cotangents)
        gradients = backend.backward(call_of(arrays), states, cotangents)
        return (above - below) / (2 * step), _dot(_floating(gradients), along)

    slope, product = run(inner, along, case.cotangents())
    np.testing.assert_allclose(product, slope, rtol=1e-2)  # float32 differences


def _floating(call: GatedScanCall):
    return call.gate, call.values, call.initial, call.queries


def _dot(left, right):
    products = jax.tree.map(lambda x, y: jnp.sum(x * y), left, right)
    return sum(jax.tree.leaves(products))
