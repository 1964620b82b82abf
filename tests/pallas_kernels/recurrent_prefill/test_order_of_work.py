"""The order of work that a training call has where its caller leaves it open."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.recurrent_prefill import LayerWeights, empty_cache
from pallas_kernels.recurrent_prefill.triton import backend as triton
from pallas_kernels.recurrent_prefill.triton.backend import choose_schedule
from pallas_kernels.target import Target, as_if
from tests.pallas_kernels.recurrent_prefill.layer_cases import Case


def call_of(rows: int, width: int, *, layers=12, positions=512, slots=0):
    """Returns the shapes of x, weights and cache."""
    H, E = width // 64, 64

    def make():
        q, mlp = jnp.zeros((layers, width, H, E)), jnp.zeros((layers, width, 4 * width))
        back = (q.transpose(0, 2, 3, 1), mlp, mlp.swapaxes(1, 2))
        spec = Case(positions=positions, heads=H, key_heads=H, head_width=E).spec
        cache = empty_cache(layers, rows, slots, width, spec)
        return jnp.zeros((rows, positions, width)), LayerWeights(q, q, q, *back), cache

    return jax.eval_shape(make)


@pytest.mark.parametrize(
    ("capability", "call", "want"),
    [
        # The 300M model: a position reads 44 MB of weights of each layer.
        ("9.0", {"rows": 64, "width": 1408}, "prefix"),
        ("9.0", {"rows": 8, "width": 1408}, "prefix"),
        ("9.0", {"rows": 32, "width": 1024}, "wavefront"),
        ("9.0", {"rows": 64, "width": 1024}, "prefix"),
        ("9.0", {"rows": 64, "width": 512}, "wavefront"),
        ("9.0", {"rows": 64, "width": 512, "layers": 1}, "prefix"),
        # Decoding and prompts fill a cache.
        ("9.0", {"rows": 64, "width": 512, "slots": 600}, "prefix"),
        # It would hold 26 GB more than layer by layer.
        ("9.0", {"rows": 64, "width": 512, "positions": 4096}, "prefix"),
        ("8.0", {"rows": 64, "width": 512}, "wavefront"),
        ("8.9", {"rows": 64, "width": 512}, "prefix"),
    ],
)
def test_a_wavefront_is_taken_where_launches_bind(capability, call, want):
    device = Target(platform="gpu", kind="a GPU", compute_capability=capability)
    with as_if(device):
        assert choose_schedule(None, *call_of(**call)) == want
        assert choose_schedule("prefix", *call_of(**call)) == "prefix"


@pytest.mark.parametrize("pass_", ["forward", "both"])
def test_a_call_without_an_order_runs_the_one_that_is_chosen(pass_):
    case = Case(positions=48, layers=3)
    x, weights, dz = case.inputs()
    cache = empty_cache(3, case.batch, 0, case.width, case.spec)
    device = Target(platform="gpu", kind="a GPU", compute_capability="9.0")

    def traced(schedule: str | None) -> str:
        def forward(x, weights, cache):
            call = case.call(x, weights, cache, schedule=schedule)
            return triton.forward(call, residuals=True)

        def both(x, weights, cache):
            call = case.call(x, weights, cache, schedule=schedule)
            _, saved = triton.forward(call, residuals=True)
            return triton.backward(call, saved, (dz, cache))

        with as_if(device):
            assert choose_schedule(None, x, weights, cache) == "wavefront"
            run = forward if pass_ == "forward" else both
            return str(jax.make_jaxpr(run)(x, weights, cache))

    assert traced(None) == traced("wavefront") != traced("prefix")
