"""The authors' language models: logits, loss, gradients, generation, initialisation."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from recurjax.model import Decoder
from recurjax.parameters import to_nested_dict
from recurjax.training.objective import NextToken
from recurjax.types import IGNORED, Batch, Tokens
from tests.compiling import QUICK_COMPILE
from tests.golden.cases import golden_cases, largest_of_each, load
from tests.tolerances import assert_gradients_close
from tests.variants.rat import authors

CASES = golden_cases("rat/lm_*.npz")
LOGITS_ABSOLUTE = 5e-5


@pytest.mark.parametrize("path", CASES)
def test_logits_loss_and_gradients_are_the_authors(path):
    case, meta, model = read_case(path)
    ids = jnp.asarray(case["input_ids"], jnp.int32)
    targets = jnp.asarray(np.where(case["labels"] < 0, IGNORED, case["labels"]))
    batch = Batch(ids, targets.astype(jnp.int32))

    @partial(jax.jit, compiler_options=QUICK_COMPILE)
    @partial(jax.value_and_grad, has_aux=True)
    def run(model):
        logits, _ = model(Tokens(ids), model.init_cache(ids.shape[0], 0))
        return NextToken()(model, batch)[0], logits

    (loss, logits), gradients = run(model)
    np.testing.assert_allclose(logits, case["logits"], rtol=0, atol=LOGITS_ABSOLUTE)
    np.testing.assert_allclose(loss, case["loss"], rtol=1e-5)
    want, whole = (
        authors.model(authors.read(tensors, "grad"), model.config)
        for tensors in (case, largest_of_each(case))
    )
    assert_gradients_close(to_nested_dict(gradients), want, whole=whole)


@pytest.mark.parametrize("path", CASES)
def test_generated_logits_are_the_authors(path):
    case, meta, model = read_case(path)
    ids = jnp.asarray(case["input_ids"], jnp.int32)
    B, T = ids.shape

    @partial(jax.jit, compiler_options=QUICK_COMPILE)
    def run(model):
        cache = model.init_cache(B, T)
        first, cache = model(Tokens(ids[:, : meta["n_prefill"]]), cache)

        def step(cache, token):
            logits, cache = model(Tokens(token[:, None]), cache)
            return cache, logits[:, 0]

        later = ids[:, meta["n_prefill"] :].T
        _, steps = jax.lax.scan(step, cache, later)
        return jnp.concatenate([first, steps.swapaxes(0, 1)], axis=1)

    np.testing.assert_allclose(
        run(model), case["gen_logits"], rtol=0, atol=LOGITS_ABSOLUTE
    )


@pytest.mark.parametrize("path", CASES)
def test_initial_weights_follow_the_authors_distributions(path):
    case, meta, _ = read_case(path)
    config = authors.model_config(meta)
    theirs = authors.model(authors.read(case, "init"), config)
    make = partial(jax.jit, compiler_options=QUICK_COMPILE)(
        lambda key: Decoder(config, rngs=nnx.Rngs(key))
    )
    ours = make(jax.random.key(0))
    ours, theirs = (
        jax.tree_util.tree_leaves_with_path(tree)
        for tree in (to_nested_dict(ours), theirs)
    )
    assert [path for path, _ in ours] == [path for path, _ in theirs]
    for (path, mine), (_, want) in zip(ours, theirs, strict=True):
        name = path[-1].key
        mine, want = np.asarray(mine), np.asarray(want)
        assert mine.shape == want.shape
        if name == "scale":
            np.testing.assert_array_equal(mine, want)
        elif name == "b_forget":
            # log U(1, C - 1): between 0 and the same end, uniform in its exponential.
            horizon = meta["chunk_size"] if "rat" in meta["kind"] else meta.get("T", 32)
            for bias in (mine, want):
                assert bias.min() >= 0 and bias.max() <= np.log(horizon - 1) + 1e-6
                middle = 1 + (horizon - 2) / 2
                assert np.exp(bias).mean() == pytest.approx(middle, rel=0.15)
        else:
            assert np.std(mine) == pytest.approx(np.std(want), rel=0.05)
            assert np.std(mine) == pytest.approx(0.02, rel=0.05)


def read_case(path):
    case = load(path)
    meta = authors.meta_of(case)
    return case, meta, authors.build_model(case, meta)
