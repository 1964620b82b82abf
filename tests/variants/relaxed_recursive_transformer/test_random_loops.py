"""More loops than in training: the extended model, the objective that draws them."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recurjax.data.config import Bytes, DataConfig, EmbeddedText
from recurjax.data.tokenizers import ByteTokenizer
from recurjax.errors import UserError
from recurjax.experiment import Experiment
from recurjax.surgery.fewer_layers import extended, truncated, with_loops
from recurjax.surgery.named_parameters import parameters
from recurjax.training.config import TrainingConfig
from recurjax.training.objective import NextToken, RandomLoops
from recurjax.training.optimizers import AdamW
from recurjax.training.run import RunDirectory
from recurjax.training.spikes import SpikeConfig
from recurjax.types import Batch, Tokens
from tests.compiling import QUICK_COMPILE
from tests.laws import draw_ids
from tests.tolerances import assert_gradients_close, assert_values_close
from tests.variants.relaxed_recursive_transformer.switches import (
    VOCABULARY,
    build,
    small,
)

quick = partial(jax.jit, compiler_options=QUICK_COMPILE)
CONFIG = small(loops=2, layers=4, rank=2, tie_norms=False)


@pytest.fixture(scope="module")
def batch():
    ids = jnp.asarray(draw_ids(VOCABULARY))
    return Batch(ids, jnp.roll(ids, -1, axis=1))


@quick
def logits(model, ids):
    return model(Tokens(ids), model.init_cache(ids.shape[0], 0))[0]


def test_the_extended_model_goes_on_with_the_deepest_loop(batch):
    model = build(CONFIG)
    deeper = extended(model, 4)
    assert deeper.config.stack.layers == 8 and deeper.config.stack.loops == 4
    # Its first loops are the model: an exit there, or cut back.
    back = with_loops(deeper, 2)
    for name, leaf in parameters(back).items():
        np.testing.assert_array_equal(leaf, parameters(model)[name])
    own = parameters(deeper)
    for name, leaf in parameters(model).items():
        if leaf.shape != own[name].shape:
            np.testing.assert_array_equal(own[name][:2], leaf)
            np.testing.assert_array_equal(own[name][2:], jnp.stack([leaf[1]] * 2))
    with pytest.raises(UserError, match="at least 2, got 1"):
        extended(model, 1)
    with pytest.raises(UserError, match="with sharing 'cycle' only, got 'sequence'"):
        extended(build(small(sharing="sequence")), 3)


@pytest.mark.parametrize("last", [1, 5])
def test_loops_known_at_run_time_are_those_of_the_model_with_so_many(last, batch):
    """Values for any split of the loops into those with and without a gradient."""
    model = build(CONFIG)

    @quick
    def repeated(model, loops):
        x = model.embed(batch.ids)
        x = model.stack.repeating(x, Tokens(batch.ids), loops, last=last)
        return model.logits(model.final_norm(x))

    for loops in (1, 2, 4) if last == 5 else (1, 2, 5):
        want = logits(with_loops(model, loops), batch.ids)
        assert_values_close(repeated(model, jnp.int32(loops)), want)


@pytest.mark.slow
def test_the_loss_and_its_gradients_are_those_of_the_number_drawn(batch):
    objective, model = RandomLoops(mean=3.0, most=4), build(CONFIG)
    loops = int(objective.loops(batch))
    assert 1 <= loops <= 4

    @quick
    def drawn(model):
        return jax.value_and_grad(lambda m: objective(m, batch)[0])(model)

    @quick
    def plain(model):
        return jax.value_and_grad(lambda m: NextToken()(m, batch)[0])(model)

    # Loops beyond the model's share the deepest one's parts, whose gradients add up:
    # a model of two loops is compared where two were drawn, else the values are.
    value, gradients = drawn(model)
    deeper = with_loops(model, loops)
    want, expected = plain(deeper)
    assert_values_close(value, want)
    shared = {n: g for n, g in parameters(gradients).items() if "blocks" in n}
    matrices = [n for n in shared if n.rpartition(".")[2].startswith("w_")]
    assert_gradients_close(
        {n: shared[n] for n in matrices},
        {n: parameters(expected)[n] for n in matrices},
    )


def test_each_batch_draws_its_own_number_within_the_limits():
    objective = RandomLoops(mean=4.0, most=6)
    draw = np.random.default_rng(0)
    numbers = []
    for _ in range(200):
        ids = jnp.asarray(draw.integers(17, size=(2, 8), dtype=np.int32))
        numbers.append(int(objective.loops(Batch(ids, ids))))
    assert {*numbers} == {1, 2, 3, 4, 5, 6}
    assert 3.3 < np.mean(numbers) < 4.3
    ids = jnp.zeros((2, 8), jnp.int32)
    assert objective.loops(Batch(ids, ids)) == objective.loops(Batch(ids, ids))


def test_models_whose_loops_do_not_repeat_are_refused():
    objective = RandomLoops()
    assert objective.refuses(CONFIG) is None
    assert "sharing 'cycle'" in objective.refuses(small(sharing="sequence"))
    assert "loop_cache 'own'" in objective.refuses(small(loop_cache="first"))
    scaled = CONFIG.stack.transformer
    scaled = replace(scaled, residual_scale="inverse_sqrt_depth")
    model = replace(CONFIG, stack=replace(CONFIG.stack, transformer=scaled))
    assert "residual_scale 'one'" in objective.refuses(model)
    plain = replace(CONFIG, stack=CONFIG.stack.transformer)
    assert "not for TransformerConfig" in objective.refuses(plain)
    assert truncated(build(CONFIG), 1).config.stack.loops == 1


def test_an_experiment_does_not_skip_steps_of_few_loops(tmp_path):
    """Their losses are higher, so the rule of spikes would train deep loops only.

    A run without the rule resumes.
    """
    data = DataConfig(corpus=EmbeddedText(), tokenizer=Bytes())
    training = TrainingConfig(steps=1, batch=2, length=8)
    sizes = {"name": "run", "model": CONFIG, "data": data}
    of = partial(Experiment, **sizes, optimizer=AdamW(learning_rate=1e-3))
    with pytest.raises(ValueError, match=r"set training\.spikes\.enabled to false"):
        of(objective=RandomLoops(), training=training)
    steady = replace(training, spikes=SpikeConfig(enabled=False))
    run = of(objective=RandomLoops(), training=steady)
    directory = RunDirectory(tmp_path)
    directory.claim(run, ByteTokenizer())
    directory.check_resumable(run)
