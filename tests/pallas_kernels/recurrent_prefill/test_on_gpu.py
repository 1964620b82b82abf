"""The compiled GPU kernels against the reference: needs a GPU, skips aloud without.

JAX_PLATFORMS=cuda,cpu python -m pytest tests/pallas_kernels -k on_gpu
"""

from functools import partial

import jax
import pytest

from pallas_kernels.dispatch import Implementation
from pallas_kernels.recurrent_prefill import recurrent_prefill
from pallas_kernels.recurrent_prefill.call import empty_cache
from tests.pallas_kernels.recurrent_prefill.layer_cases import Case, reference
from tests.tolerances import assert_gradients_close, assert_values_close

CASES = {
    "one position": Case(positions=1),
    "prime": Case(positions=37),
    "exact": Case(positions=64, batch=16),
    "switches": Case(
        positions=33,
        layers=2,
        batch=3,
        key_heads=1,
        norm="layer",
        gated=True,
        biases=True,
        activation="silu",
        normed_persistent=False,
    ),
    "wavefront": Case(positions=65, layers=3, batch=40, schedule="wavefront"),
    "bfloat16": Case(positions=37, batch=70, dtype="bfloat16"),
    # Programs share the contracted axis; several tiles, the last one partial.
    "splits": Case(positions=150, batch=32, width=256, inner=1024),
    "splits, bfloat16": Case(
        positions=150, batch=32, width=256, inner=1024, dtype="bfloat16"
    ),
}


@pytest.fixture(autouse=True)
def gpu():
    if jax.default_backend() != "gpu":
        pytest.skip(f"needs a GPU, found {jax.default_backend()}")


@pytest.mark.parametrize("tile", [16, None])
@pytest.mark.parametrize("name", CASES)
def test_compiled_kernels_agree_with_the_reference_on_gpu(name, tile):
    check(CASES[name], "triton", tile=tile)


def check(case: Case, backend: Implementation, tile: int | None = 16) -> None:
    x, weights, dz = case.inputs()
    options = {**case.options, "tile": tile}

    @jax.jit
    def run(x, weights, dz):
        cache = empty_cache(case.layers, case.batch, 0, case.width, case.spec)
        call = partial(recurrent_prefill, implementation=backend, **options)
        z, back = jax.vjp(lambda x, w: call(x, w, cache)[0], x, weights)
        return z, back(dz)

    z, gradients = run(x, weights, dz)
    with jax.default_matmul_precision("highest"):
        want_z, want = reference(case)
    assert_values_close(z, want_z, case.dtype)
    assert_gradients_close(gradients, want, case.dtype)
