"""Calls of chunk attention at test size, and both passes through what computes them."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.chunk_attention import ChunkEnds
from pallas_kernels.chunk_attention.call import (
    ChunkAttentionCall,
    ChunkAttentionOptions,
)
from pallas_kernels.chunk_attention.reference import chunk_attention_reference
from tests.compiling import QUICK_COMPILE
from tests.marks import slow_except
from tests.pallas_kernels.laws import OracleCase
from tests.tolerances import assert_gradients_close, assert_values_close


class Case(NamedTuple):
    """A call: two rows, four heads.

    Attributes:
      ends: chunk ends; None: those of the call's own chunks.
      first: number of the chunk that each row starts in, or None.
    """

    length: int
    groups: int = 2
    chunk: int = 3
    ends: int | None = None
    first: tuple[int, ...] | None = None
    documents: bool = False
    dtype: str = "float32"
    width: int = 16
    batch: int = 2
    heads: int = 4

    def inputs(self):
        """Returns (arrays to differentiate by, first, documents of t and of ends)."""
        draw = np.random.default_rng(self.length)
        B, T, H, E = self.batch, self.length, self.heads, self.width
        S = -(-T // self.chunk) if self.ends is None else self.ends

        def normal(*shape):
            return jnp.asarray(draw.normal(size=shape), self.dtype)

        arrays = (
            normal(B, T, self.groups, E),
            normal(B, T, H).astype(jnp.promote_types(self.dtype, "float32")),
            normal(B, T, H, E),
            normal(B, H, S, E),
            normal(B, H, S, E),
        )
        first = None if self.first is None else jnp.asarray(self.first, jnp.int32)
        documents = end_documents = None
        if self.documents:
            documents = np.sort(draw.integers(3, size=(B, T)), axis=1).astype(np.int32)
            end_documents = np.zeros((B, S), np.int32)
            real = documents[:, self.chunk - 1 :: self.chunk][:, :S]
            end_documents[:, : real.shape[1]] = real
            documents, end_documents = (
                jnp.asarray(documents),
                jnp.asarray(end_documents),
            )
        return arrays, first, documents, end_documents

    def call(self, arrays=None, **options) -> ChunkAttentionCall:
        """Returns the call as backends receive it, of these arrays or its own."""
        drawn, first, documents, of_ends = self.inputs()
        q, own_logits, own_values, keys, values = drawn if arrays is None else arrays
        ends = ChunkEnds(keys, values, of_ends)
        options = ChunkAttentionOptions(**self.options, **options)
        return ChunkAttentionCall(
            q, own_logits, own_values, ends, first, documents, options
        )

    @property
    def options(self) -> dict:
        return {"chunk": self.chunk, "scale": 0.5}

    def weights(self) -> np.ndarray:
        """Returns do, the same for everything that is compared."""
        shape = (self.batch, self.length, self.heads, self.width)
        return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def op_passes(attention, case: Case, arrays, **changes):
    """Returns o and the gradients of a fixed random sum of it, by jax.grad."""
    _, first, documents, end_documents = case.inputs()
    options = {**case.options, "first": first, "documents": documents, **changes}

    @partial(jax.jit, compiler_options=QUICK_COMPILE)
    @partial(jax.value_and_grad, has_aux=True)
    def run(arrays):
        q, own_logits, own_values, keys, values = arrays
        ends = ChunkEnds(keys, values, end_documents)
        o = attention(q, own_logits, own_values, ends, **options)
        return jnp.sum(o * case.weights()), o

    (_, o), gradients = run(arrays)
    return o, gradients


def backend_passes(backend, case: Case, arrays, **options):
    """Returns what `op_passes` does, from a backend's own two functions."""

    @partial(jax.jit, compiler_options=QUICK_COMPILE)
    def run(arrays):
        reason = backend.expressible(case.call(arrays))
        assert reason is None, reason
        call = case.call(arrays, **options)
        o, lse = backend.forward(call, residuals=True)
        do = jnp.asarray(case.weights()).astype(o.dtype)
        return o, tuple(jax.tree.leaves(backend.backward(call, (o, lse), do)))

    return run(arrays)


def assert_is_the_definition(passes, case: Case) -> None:
    """Compares `passes(case, arrays)` with the reference in float32."""
    arrays = case.inputs()[0]
    got = passes(case, arrays)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), arrays)
    want = op_passes(chunk_attention_reference, case, wide)
    assert_values_close(got[0], want[0], case.dtype)
    assert_gradients_close(got[1], want[1], case.dtype)


def refusal(backend, case: Case) -> str | None:
    """Returns why a backend's kernels do not do a case, whatever the device."""
    return backend.expressible(case.call())


KERNEL_CASES = {
    "one position": Case(1),
    "prime": Case(37),
    "whole blocks": Case(48, groups=1),
    "a group for each head": Case(33, groups=4),
    "a chunk longer than a block": Case(50, chunk=20),
    "chunks of one": Case(19, chunk=1),
    "cached ends": Case(18, ends=13, first=(7, 0)),
    "a decode step": Case(1, chunk=1, ends=13, first=(11, 2)),
    "documents": Case(37, documents=True),
    "documents and cached ends": Case(18, ends=13, first=(3, 0), documents=True),
    "no ends": Case(7, ends=0, first=(2, 0)),
    "bfloat16": Case(37, dtype="bfloat16"),
}
_QUICK = ("prime", "cached ends")
_SLOW = ("one position", "documents and cached ends", "a decode step", "bfloat16")
"""The rest repeats these at other sizes; compiling each costs seconds."""


def kernel_cases(backend: str, cases: dict[str, Case]) -> list:
    """Returns a backend's cases as parameters; most are slow or a sweep."""
    quick, slow = ([f"{backend} {name}" for name in x] for x in (_QUICK, _SLOW))
    parameters = [
        pytest.param(
            OracleCase(backend, case.length, _switches(case), case.dtype),
            id=f"{backend} {name}",
        )
        for name, case in cases.items()
    ]
    return slow_except(quick, parameters, slow=slow)


def _switches(case: Case) -> dict:
    return {k: v for k, v in case._asdict().items() if k not in ("length", "dtype")}


def by_arrays(attention, q, own_logits, own_values, keys, values, **options):
    """Calls the op or its definition with the ends' arrays one by one."""
    ends = ChunkEnds(keys, values, options.pop("end_documents"))
    return attention(q, own_logits, own_values, ends, **options)
