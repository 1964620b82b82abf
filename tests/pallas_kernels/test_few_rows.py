"""Products of a few rows with int8 by the C++ kernel against numpy's in float64."""

from functools import partial
from itertools import product as pairs

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import cpu
from pallas_kernels.cpu.few_rows import few_rows, serves
from pallas_kernels.target import Target, as_if
from recurjax.layers.linear import GRIDS, linear, plain, quantize
from recurjax.sharding import MeshConfig, make_mesh
from tests.layers.attention.test_cpu import WIDTHS, needs_kernels
from tests.tolerances import assert_values_close

pytestmark = needs_kernels
SIZES = {
    "vectors": (512, 192),
    "nothing_fits": (333, 217),
    "few_outputs": (3000, 3),
    "shared_out": (700, 1500),
}


def draw(rows: int, inputs: int, outputs: int):
    """Returns x and W."""
    draws = np.random.default_rng(rows + inputs)
    x = jnp.asarray(draws.normal(size=(rows, inputs)), jnp.float32)
    weight = draws.integers(-128, 128, size=(inputs, outputs), dtype=np.int8)
    return x, jnp.asarray(weight)


@pytest.mark.parametrize("lanes", WIDTHS)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_it_is_the_product(size, transposed, lanes, monkeypatch):
    """Any number of rows; a row's sums do not depend on the others."""
    if lanes is not None:
        monkeypatch.setattr(cpu, "lanes", lambda: lanes)
    x, weight = draw(8, *SIZES[size])
    expected = np.asarray(x, np.float64) @ np.asarray(weight, np.float64)
    matrix = weight.T if transposed else weight
    for rows in range(1, 9):
        y = few_rows(x[:rows], matrix, transposed=transposed)
        assert_values_close(y, expected[:rows])


def test_its_gradient_is_that_of_the_product():
    x, weight = draw(2, 512, 192)
    wide = weight.astype(jnp.float32)
    for transposed in (False, True):
        matrix = weight.T if transposed else weight
        product = partial(few_rows, weight=matrix, transposed=transposed)
        got = jax.grad(lambda x, product=product: product(x)[0].sum())(x)
        want = jax.grad(lambda x: (x @ wide)[0].sum())(x)
        assert_values_close(got, want)


def test_it_knows_vmap():
    x, weight = draw(6, 512, 192)
    weights = jnp.stack([weight, weight[::-1]])
    got = jax.vmap(few_rows)(x.reshape(2, 3, 512), weights)
    assert_values_close(got[1], few_rows(x[3:], weight[::-1]))


def test_a_decode_step_of_int8_calls_it():
    """Scales and all; with a bfloat16 x the result is rounded once."""
    draws = np.random.default_rng(0)
    weight = jnp.asarray(draws.normal(size=(512, 192)), jnp.float32)
    narrow = quantize(weight, GRIDS["int8"], first=-2, inputs=1)
    for dtype, rows in pairs(("float32", "bfloat16"), (1, 8)):
        x = jnp.asarray(draws.normal(size=(rows, 1, 512)), dtype)
        text = str(jax.make_jaxpr(lambda x: linear(x, narrow))(x))
        assert "recurjax_few_rows" in text
        wide = x.astype(jnp.float32) @ plain(narrow)
        assert_values_close(linear(x, narrow), wide.astype(dtype))


def test_what_it_leaves_to_xla():
    x, weight = draw(8, 512, 192)
    assert serves(x, weight)
    for others in (
        (draw(9, 512, 192)[0], weight),
        (x.astype(jnp.float16), weight),
        (x, weight.astype(jnp.bfloat16)),
        (x[:, :100], weight[:100]),
    ):
        assert not serves(*others)
    with jax.set_mesh(make_mesh(MeshConfig(data=4, tensor=2))):
        assert not serves(x, weight)
    with as_if(Target(platform="tpu", kind="TPU v5e")):
        assert not serves(x, weight)
