import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from recurjax.layers.initialization import InitConfig
from recurjax.layers.position import (
    Alibi,
    DynamicScaling,
    LearnedPositions,
    LongScaling,
    PositionEmbedding,
    Rope,
    alibi_bias,
    alibi_slopes,
    frequencies,
    rotary_width,
    rotate,
)
from tests.tolerances import assert_values_close

X = np.random.default_rng(0).normal(size=(2, 5, 3, 8)).astype(np.float32)


@pytest.mark.parametrize(
    ("base", "fraction"), [(10000.0, 1.0), (500.0, 0.5), (1e6, 0.25)]
)
def test_rotation_turns_pairs_by_position_times_frequency(base, fraction):
    """Pair (i, i + r/2) is a complex number turned by p base^(-2i/r)."""
    positions = np.asarray([[0, 1, 2, 3, 4], [7, 8, 9, 10, 300]])
    r = int(8 * fraction)
    z = X[..., : r // 2] + 1j * X[..., r // 2 : r]
    theta = base ** (-2.0 * np.arange(r // 2) / r)
    turned = z * np.exp(1j * positions[..., None, None] * theta)
    want = np.concatenate([turned.real, turned.imag, X[..., r:]], axis=-1)
    got = rotate(
        jnp.asarray(X), jnp.asarray(positions), Rope(base=base, fraction=fraction)
    )
    assert_values_close(got, want)


def test_rotated_products_depend_on_the_distance_only():
    x = jnp.asarray(X)
    near = jnp.arange(5)[None]
    products = [
        jnp.einsum("bthe,bshe->bhts", rotate(x, near + shift, Rope()), y)
        for shift, y in ((0, rotate(x, near, Rope())), (9, rotate(x, near + 9, Rope())))
    ]
    assert_values_close(*products)


def test_bfloat16_is_rotated_by_float32_angles():
    positions = jnp.asarray([[1000, 1001, 1002, 1003, 1004]])
    x = jnp.bfloat16(X)
    wide = rotate(x.astype(jnp.float32), positions, Rope())
    np.testing.assert_array_equal(
        rotate(x, positions, Rope()), wide.astype(jnp.bfloat16)
    )


@pytest.mark.parametrize(("width", "fraction"), [(8, 0.4), (7, 1.0), (8, 0.1)])
def test_an_odd_number_of_rotated_dimensions_is_an_error(width, fraction):
    with pytest.raises(ValueError, match="even number of dimensions"):
        rotary_width(width, Rope(fraction=fraction))


@pytest.mark.parametrize(
    "options", [{"fraction": 0.0}, {"fraction": 1.5}, {"base": 1.0}]
)
def test_a_wrong_rope_is_an_error(options):
    with pytest.raises(ValueError, match="Rope"):
        Rope(**options)


def test_alibi_slopes_fall_geometrically_for_any_number_of_heads():
    np.testing.assert_allclose(alibi_slopes(4, Alibi()), [2**-2, 2**-4, 2**-6, 2**-8])
    np.testing.assert_allclose(alibi_slopes(3, Alibi(max_bias=3.0)), [0.5, 0.25, 0.125])


def test_alibi_bias_grows_with_distance_and_is_zero_at_home():
    bias = alibi_bias(
        2, jnp.asarray([[3, 4]]), jnp.asarray([[0, 3, 4]]), Alibi(max_bias=2.0)
    )
    want = -np.asarray([0.5, 0.25])[:, None, None] * [[3, 0, 1], [4, 1, 0]]
    assert_values_close(bias, want[None])


def test_a_learned_position_is_added_where_the_row_stands():
    embedding = PositionEmbedding(
        LearnedPositions(length=6), 4, InitConfig(), rngs=nnx.Rngs(0)
    )
    table = np.asarray(embedding.w_position[...])
    x = jnp.ones((2, 3, 4))
    got = embedding(x, jnp.asarray([[0, 1, 2], [3, 4, 5]]))
    assert_values_close(got, 1 + table.reshape(2, 3, 4))


def test_a_table_of_no_positions_is_an_error():
    with pytest.raises(
        ValueError, match=r"LearnedPositions\.length: must be >= 1, got 0"
    ):
        LearnedPositions(length=0)


def test_long_rope_and_dynamic_bases_follow_the_length():
    plain = 100.0 ** -(np.arange(2) / 2)
    long = LongScaling(short=(1.0, 2.0), long=(3.0, 5.0), length=8, amplitude=1.5)
    rope = Rope(base=100.0, scaling=long)
    for length, factors in ((8, (1.0, 2.0)), (9, (3.0, 5.0))):
        theta, amplitude = frequencies(rope, 4, length=length)
        np.testing.assert_allclose(theta, plain / factors)
        assert amplitude == 1.5
    rope = Rope(base=100.0, scaling=DynamicScaling(factor=2.0, length=8))
    np.testing.assert_allclose(frequencies(rope, 4, length=8)[0], plain)
    base = 100.0 * (2 * 16 / 8 - 1) ** (4 / 2)
    np.testing.assert_allclose(
        frequencies(rope, 4, length=16)[0], base ** -(np.arange(2) / 2)
    )
    with pytest.raises(NotImplementedError, match="depends on the sequence's length"):
        frequencies(rope, 4)
    with pytest.raises(ValueError, match="LongScaling needs 4 factors"):
        rotary_width(8, Rope(scaling=long))
