"""Each class of shapes fits each generation of GPUs: no spill, no launch that fails."""

import pytest

from pallas_kernels.target import Target, as_if, shared_memory_bytes
from tests.absent_compilers import COMPILERS
from tests.pallas_kernels.recurrent_prefill.compile_cases import GPU_CLASSES
from tests.triton_resources import resources_of, unordered_atomics

CASE = "tests.pallas_kernels.recurrent_prefill.compile_cases:gpu_class"
# Every kernel in a branch, for layers that have a tile; the others are a sweep of some
# half a minute each. A10, L4 and RTX 40 have the least shared memory.
SLOW = {("9.0", "wavefront", "bfloat16")}
EVERY = [
    (capability, name, dtype)
    for capability in ("8.0", "8.6", "8.9", "9.0", "12.0")
    for name in GPU_CLASSES
    for dtype in ("bfloat16", "float32")
]


SPILLED = {
    ("8.0", "wide heads", "float32"): 8,
    ("8.0", "few rows, wide heads", "float32"): 8,
    ("8.0", "wavefront", "float32"): 8,
    ("8.6", "rows", "float32"): 8,
    ("8.9", "rows", "float32"): 8,
}
"""Bytes a thread of `prefix_kernel`, in a wavefront of `hidden_kernel`, and on 8.6 and
8.9 of `add_product_kernel`."""


@pytest.mark.parametrize(
    ("capability", "name", "dtype"),
    [
        pytest.param(*one, marks=pytest.mark.slow if one in SLOW else pytest.mark.sweep)
        for one in EVERY
    ],
)
def test_kernels_spill_nothing_and_fit_the_shared_memory(capability, name, dtype):
    if not (COMPILERS / "triton").is_dir():
        pytest.skip("no Triton here: run make compilers")
    with as_if(Target(platform="gpu", kind="", compute_capability=capability)):
        most = shared_memory_bytes()
    kernels = resources_of(capability, CASE, name, dtype)
    assert len(kernels) >= 12  # six forward, seven and more backward
    spilled = SPILLED.get((capability, name, dtype), 0)
    unfit = [k for k in kernels if k["stack"] > spilled or k["shared"] > most]
    assert unfit == []
    # A program that is the last of those that share a sum sees all of it.
    assert not any(k["unordered"] for k in kernels)


def test_an_atomic_operation_right_behind_a_store_is_told():
    store, barrier = "st.global.b32 [%rd1], {%r1};", "bar.sync 0;"
    atomic = "@%p4 atom.global.gpu.acq_rel.add.u32 %r2, [%rd2], %r3;"
    assert unordered_atomics("\n".join([store, barrier, atomic])) == 0
    assert unordered_atomics("\n".join([barrier, store, atomic])) == 1
    assert unordered_atomics(atomic.replace("acq_rel", "relaxed")) == 1
