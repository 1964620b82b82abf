from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from pallas_kernels.target import Target, as_if
from recurjax.errors import UserError
from recurjax.inference.sampling import (
    PLAIN,
    SamplingConfig,
    filter_logits,
    penalize,
    row_keys,
    sample,
    sampling_rows,
)
from tests.compiling import QUICK_COMPILE

ROWS, V = 6, 11
LOGITS = np.random.default_rng(0).normal(scale=2.0, size=(ROWS, V)).astype(np.float32)

_sample = jax.jit(sample, compiler_options=QUICK_COMPILE)


def draw(keys, logits, seen, *, config: SamplingConfig):
    return _sample(keys, logits, seen, sampling_rows([config] * len(logits)))


def filtered(logits, config: SamplingConfig, platform: str = "cpu") -> np.ndarray:
    """Returns what passes the filters, searched as the platform does it."""
    rows = sampling_rows([config] * len(logits))
    return np.asarray(_FILTER[platform](jnp.asarray(logits), rows))


def _filter_of(platform: str):
    @partial(jax.jit, compiler_options=QUICK_COMPILE)
    def run(logits, rows):
        with as_if(Target(platform=platform, kind="")):
            return filter_logits(logits, rows)

    return run


_FILTER = {platform: _filter_of(platform) for platform in ("cpu", "gpu")}
of_platforms = pytest.mark.parametrize("platform", _FILTER)


def expected(logits: np.ndarray, config: SamplingConfig) -> np.ndarray:
    """Filters one row token by token, in float64."""
    order = sorted(range(len(logits)), key=lambda token: -logits[token])
    order = order[: config.top_k]
    weights = {token: np.exp(np.float64(logits[token])) for token in order}
    total = sum(weights.values())
    kept, mass = [], 0.0
    for token in order:
        if config.top_p == 1 or mass < config.top_p:
            kept.append(token)
        mass += weights[token] / total
    floor = config.min_p * weights[order[0]]
    kept = [token for token in kept if weights[token] >= floor]
    result = np.full(len(logits), -np.inf, np.float32)
    result[kept] = logits[kept]
    return result


@pytest.mark.parametrize(
    "config",
    [
        SamplingConfig(top_k=1),
        SamplingConfig(top_k=4),
        SamplingConfig(top_k=100),
        SamplingConfig(top_p=0.05),
        SamplingConfig(top_p=0.7),
        SamplingConfig(min_p=0.1),
        SamplingConfig(min_p=1.0),
        SamplingConfig(top_k=5, top_p=0.8, min_p=0.2),
    ],
    ids=repr,
)
@of_platforms
def test_filters_keep_what_a_plain_loop_keeps(platform, config):
    want = np.stack([expected(row, config) for row in LOGITS])
    got = filtered(LOGITS, config, platform)
    np.testing.assert_array_equal(got, want)


@of_platforms
def test_top_p_counts_the_probability_left_by_top_k(platform):
    logits = jnp.log(jnp.array([[0.4, 0.3, 0.2, 0.1]]))
    both = filtered(logits, SamplingConfig(top_k=2, top_p=0.5), platform)
    alone = filtered(logits, SamplingConfig(top_p=0.5), platform)
    assert np.isfinite(both).tolist() == [[True, False, False, False]]
    assert np.isfinite(alone).tolist() == [[True, True, False, False]]


@of_platforms
def test_ties_with_the_last_token_kept_are_kept(platform):
    logits = jnp.array([[1.0, 0.0, 1.0, 1.0]])
    for config in (SamplingConfig(top_k=1), SamplingConfig(top_p=0.1)):
        kept = np.isfinite(filtered(logits, config, platform))
        assert kept.tolist() == [[True, False, True, True]]


def test_penalty_divides_positive_and_multiplies_negative_logits():
    logits = jnp.array([[2.0, -2.0, 2.0, -2.0, 0.0]])
    seen = jnp.array([[True, True, False, False, True]])
    got = penalize(logits, seen, jnp.array([2.0]))
    np.testing.assert_array_equal(got, [[1.0, -4.0, 2.0, -2.0, 0.0]])


def test_penalty_comes_before_the_greedy_choice():
    logits = jnp.array([[3.0, 2.0, 1.0]])
    seen = jnp.array([[True, False, False]])
    config = SamplingConfig(temperature=0.0, repetition_penalty=2.0)
    assert draw(row_keys(0, 1), logits, seen, config=config).tolist() == [1]


def test_draws_follow_the_filtered_softmax():
    rows, temperature = 20_000, 1.7
    config = SamplingConfig(temperature=temperature, top_k=8, min_p=0.02)
    logits = jnp.broadcast_to(LOGITS[0], (rows, V))
    ids = draw(row_keys(3, rows), logits, None, config=config)
    kept = expected(LOGITS[0] / np.float32(temperature), config).astype(np.float64)
    want = np.exp(kept) / np.exp(kept).sum()
    got = np.bincount(np.asarray(ids), minlength=V) / rows
    assert (want == 0).any() and (got[want == 0] == 0).all()
    sigma = np.sqrt(want * (1 - want) / rows)
    assert (np.abs(got - want) <= 4.5 * sigma).all()


def test_temperature_zero_is_the_argmax_and_a_tiny_one_nearly():
    keys, want = row_keys(0, ROWS), LOGITS.argmax(axis=1).tolist()
    for temperature, top_p in ((0.0, 0.9), (1e-30, 0.9), (1.0, 1e-45), (1.0, 1e-300)):
        config = SamplingConfig(temperature=temperature, top_p=top_p)
        assert draw(keys, jnp.asarray(LOGITS), None, config=config).tolist() == want


@pytest.mark.parametrize("penalty", [1e-300, 1e-45, 1e38])
def test_an_extreme_penalty_leaves_numbers(penalty):
    logits = jnp.array([[3.0, 2.0, -1.0, 0.0]])
    seen = jnp.array([[False, True, True, True]])
    config = SamplingConfig(repetition_penalty=penalty)
    [token] = draw(row_keys(0, 1), logits, seen, config=config).tolist()
    # Far below 1 a penalty is a preference for what was seen.
    assert token == 1 if penalty < 1 else token in (0, 1, 3)


def test_a_row_draws_the_same_alone_as_among_others():
    keys = row_keys(5, ROWS)
    config = SamplingConfig(top_p=0.95)
    together = draw(keys, jnp.asarray(LOGITS), None, config=config).tolist()
    alone = [
        draw(keys[r : r + 1], jnp.asarray(LOGITS[r : r + 1]), None, config=config)
        for r in range(ROWS)
    ]
    assert [int(ids[0]) for ids in alone] == together


def test_a_row_draws_the_same_whatever_its_neighbours_want():
    wishes = [
        PLAIN,
        SamplingConfig(temperature=0.0),
        SamplingConfig(temperature=0.6, top_k=3),
        SamplingConfig(top_p=0.7, min_p=0.05),
        SamplingConfig(repetition_penalty=1.7),
        SamplingConfig(temperature=2.0, top_k=5, top_p=0.9),
    ]
    seen = np.random.default_rng(1).random((ROWS, V)) < 0.4
    for seed in range(8):
        keys = row_keys(seed, ROWS)
        mixed = np.asarray(_sample(keys, LOGITS, seen, sampling_rows(wishes)))
        for row, config in enumerate(wishes):
            alike = draw(keys, LOGITS, seen, config=config)
            assert mixed[row] == alike[row]


@of_platforms
def test_filters_work_on_numbers_of_either_sign_and_both_zeros(platform):
    logits = np.array([[3e38, 0.0, -0.0, -1e-30, -3e38, -np.inf]], np.float32)
    for k, kept in ((1, 1), (2, 3), (3, 3), (4, 4), (5, 5)):
        got = filtered(logits, SamplingConfig(top_k=k), platform)
        assert np.isfinite(got).sum() == kept


def conditions(jaxpr) -> int:
    """Counts the branches that run or do not."""
    here = sum(equation.primitive.name == "cond" for equation in jaxpr.eqns)
    inner = [x for equation in jaxpr.eqns for x in jaxprs_in_params(equation.params)]
    return here + sum(map(conditions, inner))


def test_searches_stand_in_branches_that_run_only_where_they_are_wanted():
    def outside(jaxpr) -> set[str]:
        """Returns the operations that always run."""
        names = {equation.primitive.name for equation in jaxpr.eqns}
        for equation in jaxpr.eqns:
            if equation.primitive.name != "cond":
                for inner in jaxprs_in_params(equation.params):
                    names |= outside(inner)
        return names

    traced = jax.make_jaxpr(sample)(
        row_keys(0, ROWS), LOGITS, None, sampling_rows([PLAIN] * ROWS)
    )
    assert conditions(traced.jaxpr) == 3  # any draw at all, top-k, top-p
    assert not outside(traced.jaxpr) & {"scan", "while", "sort", "exp", "top_k"}


def test_rows_and_seeds_have_streams_of_their_own():
    data = [jax.random.key_data(row_keys(seed, 4)).tolist() for seed in (0, 1)]
    streams = {tuple(key) for keys in data for key in keys}
    assert len(streams) == 8
    assert jax.random.key_data(row_keys(0, 2)).tolist() == data[0][:2]


def test_low_precision_logits_are_sampled_in_float32():
    # In bfloat16 the cumulative mass of 512 equal tokens stalls below one half.
    logits = jnp.zeros((1, 512), jnp.bfloat16).at[0, 0].set(0.01)
    ids = draw(
        row_keys(0, 400),
        jnp.broadcast_to(logits, (400, 512)),
        None,
        config=SamplingConfig(top_p=0.999),
    )
    assert len(np.unique(np.asarray(ids))) > 200
    assert ids.dtype == jnp.int32


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_k", 0),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("min_p", 1.5),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", float("inf")),
    ],
)
def test_values_out_of_range_are_refused_by_name(field, value):
    with pytest.raises(
        UserError, match=rf"SamplingConfig\.{field}: must be .*, got {value}"
    ):
        SamplingConfig(**{field: value})


def test_seeds_out_of_range_are_refused():
    for seed in (-1, 1 << 32):
        with pytest.raises(UserError, match=f"got {seed}"):
            row_keys(seed, 1)
    assert not PLAIN.penalizes
