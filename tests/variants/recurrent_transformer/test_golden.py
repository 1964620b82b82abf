"""The authors' layers and language models: values and gradients, by every schedule."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from recurjax.layers.norm import NormConfig
from recurjax.model import Decoder, ModelConfig
from recurjax.parameters import to_nested_dict
from recurjax.types import Tokens
from recurjax.variants.recurrent_transformer import RecurrentTransformerStack
from tests.compiling import QUICK_COMPILE
from tests.golden.cases import golden_cases, largest_of_each, load
from tests.golden.one_position import write_one_position
from tests.tolerances import assert_gradients_close, assert_values_close
from tests.variants.recurrent_transformer.golden_cases import (
    config_of,
    filled,
    meta_of,
    nested,
)

BLOCKS = golden_cases("recurrent_transformer/rt_block_*.npz")
MODELS = golden_cases("recurrent_transformer/rt_lm_*.npz")
TILES = {"prefix": 8, "wavefront": 8, "naive": None}
quick = partial(jax.jit, compiler_options=QUICK_COMPILE)
slow, sweep = pytest.mark.slow, pytest.mark.sweep


def runs(files, others=slow, dtypes=("own",)):
    """Returns (path, schedule, dtype) of every file by every schedule.

    A file runs fast in its own dtype by one schedule, the next file by the next.
    """
    schedules, results = list(TILES), []
    for number, file in enumerate(files):
        fast = schedules[number % len(schedules)]
        for schedule, dtype in itertools.product(schedules, dtypes):
            marks = () if schedule == fast else others
            results.append(
                pytest.param(
                    *(*file.values, schedule, dtype),
                    marks=sweep if dtype != "own" else marks,
                    id=f"{file.id}-{schedule}-{dtype}",
                )
            )
    return results


@pytest.mark.parametrize(
    ("path", "schedule", "dtype"), runs(BLOCKS, others=sweep, dtypes=("own", "float32"))
)
def test_values_and_gradients_are_the_authors(path, schedule, dtype):
    case = load(path)
    meta = meta_of(case)
    dtype = meta["dtype"] if dtype == "own" else dtype
    with jax.enable_x64(dtype == "float64"):
        stack = stack_of(case, meta, schedule, dtype)

        @quick
        @partial(jax.value_and_grad, argnums=(0, 1), has_aux=True)
        def run(stack, x, g):
            cache = stack.init_cache(x.shape[0], 0, x.dtype)
            z, _ = stack(x, cache, tokens_of(x))
            return jnp.sum(z * g), z

        x, g = (jnp.asarray(case[name], dtype) for name in ("x", "g"))
        (loss, z), (for_stack, for_x) = run(stack, x, g)
        assert_values_close(z, case["z"], dtype)
        assert_gradients_close(loss, case["loss"], dtype)
        want, whole = (
            {"x": tensors["grad.x"], "stack": nested(tensors, meta, "grad")}
            for tensors in (case, largest_of_each(case))
        )
        got = {"x": for_x, "stack": to_nested_dict(for_stack)}
        assert_gradients_close(got, want, dtype, whole=whole)


@pytest.mark.parametrize(("path", "schedule", "dtype"), runs(BLOCKS, others=sweep))
def test_prefill_and_steps_give_the_authors_values(path, schedule, dtype):
    case = load(path)
    meta = meta_of(case)
    assert dtype == "own"
    with jax.enable_x64(meta["dtype"] == "float64"):
        stack = stack_of(case, meta, schedule, meta["dtype"])
        x = jnp.asarray(case["x"])
        cut = meta["N"] // 2

        @quick
        def run(stack, x):
            cache = stack.init_cache(x.shape[0], x.shape[1], x.dtype)
            parts = []
            if cut:  # one position has nothing before it
                first, cache = stack(x[:, :cut], cache, tokens_of(x[:, :cut]))
                parts.append(first)

            def step(cache, x_t):
                z_t, cache = stack(x_t[:, None], cache, tokens_of(x_t[:, None]))
                return cache, z_t[:, 0]

            _, steps = jax.lax.scan(step, cache, x[:, cut:].swapaxes(0, 1))
            return jnp.concatenate([*parts, steps.swapaxes(0, 1)], axis=1)

        assert_values_close(run(stack, x), case["z"], meta["dtype"])


@pytest.mark.parametrize(
    ("path", "schedule", "dtype"), runs(MODELS, dtypes=("own", "float32"))
)
def test_a_language_model_is_the_authors(path, schedule, dtype):
    case = load(path)
    meta = meta_of(case)
    dtype = meta["dtype"] if dtype == "own" else dtype
    with jax.enable_x64(dtype == "float64"):
        norm = NormConfig(
            kind="rms" if meta["norm"] == "rms" else "layer",
            eps=meta["eps"],
            bias="param.ln_f.bias" in case,
        )
        config = ModelConfig(
            vocabulary=meta["vocab"],
            stack=config_of(case, meta, schedule=schedule, tile=TILES[schedule]),
            final_norm=norm,
            dtype=dtype,
        )
        model = filled(partial(Decoder, config), model_parameters(case, meta), dtype)

        @quick
        @partial(jax.value_and_grad, has_aux=True)
        def run(model, ids):
            logits, _ = model(Tokens(ids), model.init_cache(ids.shape[0], 0))
            log_p = jax.nn.log_softmax(logits[:, :-1])
            target = jnp.take_along_axis(log_p, ids[:, 1:, None], axis=-1)
            return -jnp.mean(target), logits

        ids = jnp.asarray(case["input_ids"], jnp.int32)
        (loss, logits), gradients = run(model, ids)
        assert_values_close(logits, case["logits"], dtype)
        assert_values_close(loss, case["loss"], dtype)
        if "grad.wte.weight" in case:
            want, whole = (
                model_parameters(tensors, meta, "grad")
                for tensors in (case, largest_of_each(case))
            )
            got = to_nested_dict(gradients)
            assert_gradients_close(got, want, dtype, whole=whole)


@pytest.mark.parametrize(
    "schedule",
    [
        pytest.param(name, marks=slow if number else ())
        for number, name in enumerate(TILES)
    ],
)
def test_a_case_of_one_position_is_met(schedule, tmp_path):
    path = write_one_position(tmp_path / "rt_block_one.npz", "recurrent_autograd")
    test_values_and_gradients_are_the_authors(path, schedule, "own")
    test_prefill_and_steps_give_the_authors_values(path, schedule, "own")


def stack_of(case, meta, schedule: str, dtype: str) -> RecurrentTransformerStack:
    config = config_of(case, meta, schedule=schedule, tile=TILES[schedule])
    make = partial(RecurrentTransformerStack, config)
    return filled(make, nested(case, meta, "param"), dtype)


def model_parameters(case, meta, kind: str = "param") -> dict:
    norm = {"scale": case[f"{kind}.ln_f.weight"]}
    if f"{kind}.ln_f.bias" in case:
        norm["bias"] = case[f"{kind}.ln_f.bias"]
    return {
        "stack": nested(case, meta, kind),
        "final_norm": norm,
        "w_embedding": case[f"{kind}.wte.weight"],
        "w_head": case[f"{kind}.ff_out.weight"].T,
    }


def tokens_of(x) -> Tokens:
    return Tokens(ids=jnp.zeros(x.shape[:2], jnp.int32))
