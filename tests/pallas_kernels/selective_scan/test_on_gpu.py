"""The compiled GPU kernels against the definition: needs a GPU, skips aloud without.

JAX_PLATFORMS=cuda,cpu python -m pytest tests/pallas_kernels -k on_gpu
"""

import jax
import pytest

from pallas_kernels.selective_scan import selective_scan, triton
from tests.pallas_kernels.selective_scan.test_selective_scan import LAWS
from tests.tolerances import assert_gradients_close, assert_values_close

CASES = {
    "one position": (1, {}),
    "prime": (37, {"starts": True}),
    "exact": (64, {"chunk": 16, "channels": 256}),
    "one more": (65, {"chunk": 16, "channels": 256, "lengths": True}),
    "odd chunks": (301, {"chunk": 7, "channels": 48, "starts": True}),
    "stretches": (1000, {"chunk": 16, "channels": 48, "starts": True}),
    "long": (4099, {"chunk": 16, "channels": 512, "starts": True}),
    "bfloat16": (129, {"chunk": 16, "channels": 256, "dtype": "bfloat16"}),
    "bfloat16, long": (4096, {"chunk": 32, "channels": 2048, "dtype": "bfloat16"}),
}


@pytest.fixture(autouse=True)
def gpu():
    if jax.default_backend() != "gpu":
        pytest.skip(f"needs a GPU, found {jax.default_backend()}")


@pytest.fixture
def laws():
    laws = type(LAWS)()
    laws.backends = {"triton": (triton, {})}
    return laws


@pytest.mark.parametrize("name", CASES)
def test_compiled_kernels_agree_with_the_definition_on_gpu(name, laws):
    length, options = CASES[name]
    call, dtype = laws.call(length, **options), options.get("dtype", "float32")
    got = laws.both_passes(call, "triton")
    with jax.default_matmul_precision("highest"):
        want = laws.both_passes(call, None)
    assert_values_close(got[0], want[0], dtype)
    # One by one: those of A and of the biases are sums over all positions, next to
    # which the others would count as noise.
    for name, gradient in want[1].items():
        assert_gradients_close(got[1][name], gradient, dtype)


def test_the_op_picks_the_kernels_on_gpu():
    call = LAWS.call(64, chunk=16, channels=256)
    picked = selective_scan(**call.arrays, **call.rest)
    named = selective_scan(**call.arrays, **call.rest, implementation="triton")
    assert_values_close(tuple(picked), tuple(named))
