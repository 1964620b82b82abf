"""The authors' models and an independent reference: losses, logits, gradients."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from recurjax.losses.cross_entropy import token_losses
from recurjax.model import Decoder
from recurjax.parameters import from_nested_dict, to_nested_dict
from recurjax.training.objective import NextToken
from recurjax.types import IGNORED, Batch, Tokens
from recurjax.variants.latent_recurrent_transformer import objectives
from recurjax.variants.latent_recurrent_transformer.objectives import (
    Chunked,
    Interleaved,
)
from recurjax.variants.latent_recurrent_transformer.recurrence import (
    put,
    strided_partition,
)
from tests.compiling import QUICK_COMPILE
from tests.golden.cases import golden_cases, largest_of_each, load
from tests.golden.latent_layout import (
    backbone,
    nested,
    official,
    official_names,
    reference,
    reference_names,
    settings,
)
from tests.tolerances import assert_gradients_close

FOLDER = "latent_recurrent_transformer"
BASELINES = golden_cases(f"{FOLDER}/*_baseline_*.npz")
OFFICIAL = golden_cases(f"{FOLDER}/lrt_official_*.npz")
REFERENCE = golden_cases(f"{FOLDER}/lrtref_*.npz")
ABSOLUTE = 5e-5
quick = partial(jax.jit, compiler_options=QUICK_COMPILE)
slow = partial(pytest.param, marks=pytest.mark.slow)
sweep = partial(pytest.param, marks=pytest.mark.sweep)


@pytest.fixture(autouse=True)
def passes_once(monkeypatch):
    """Lets a loss, states and passes of one program share the passes they ask for.

    Each pass is a second of compilation; XLA does not see that two are the same.
    """
    make, results = objectives.interleaved_passes, []

    def once(model, batch, partition, *, refresh=False):
        assert not refresh  # no golden case has it
        for key, passes in results:
            if key[0] is model and key[1] is batch and key[2] == partition:
                return passes
        results.append(((model, batch, partition), make(model, batch, partition)))
        return results[-1][1]

    monkeypatch.setattr(objectives, "interleaved_passes", once)


def read(case, kind):
    return lambda name: case[f"{kind}/{name}"]


def model_of(case, config, names):
    like = jax.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    weights = nested(read(case, "param"), config, names)
    return from_nested_dict(like, jax.tree.map(jnp.asarray, weights))


def batch_of(case):
    ids = jnp.asarray(case["idx"], jnp.int32)
    targets = np.where(case["targets"] < 0, IGNORED, case["targets"])
    return Batch(ids, jnp.asarray(targets, jnp.int32))


def assert_gradients_are(case, gradients, config, names):
    """Compares on the scale of their tensors: the scales are one vector over layers."""
    want, whole = (
        nested(read(tensors, "grad"), config, names)
        for tensors in (case, largest_of_each(case))
    )
    assert_gradients_close(gradients, want, whole=whole)


def close(got, want):
    np.testing.assert_allclose(got, want, rtol=0, atol=ABSOLUTE)


@pytest.mark.slow
@pytest.mark.parametrize("path", BASELINES)
def test_the_backbone_is_nanochats(path):
    case = load(path)
    c = settings(case)
    config = backbone(c, len(case["param/lm_head.weight"]))
    model, batch = model_of(case, config, official_names), batch_of(case)

    @quick
    @partial(jax.value_and_grad, has_aux=True)
    def run(model):
        x, _ = model.hidden(Tokens(batch.ids), model.init_cache(len(batch.ids), 0))
        nats = token_losses(model, x, batch.targets).nats
        return NextToken()(model, batch)[0], (model.logits(x), x, nats)

    (loss, (logits, x, nats)), gradients = run(model)
    close(logits, case["logits"])
    close(x, case["h_final"])
    close(nats, case["loss_none"])
    np.testing.assert_allclose(loss, case["loss"], rtol=1e-5)
    assert_gradients_are(case, to_nested_dict(gradients), config, official_names)
    T = c["sequence_len"]
    windows = [min(w, T) for w in config.stack.layer_windows]
    assert windows == case["window_sizes"][:, 0].tolist()
    assert config.flops_per_token(T) == case["flops_per_token"]


@pytest.mark.slow
@pytest.mark.parametrize("path", OFFICIAL)
def test_interleaved_training_is_the_authors(path):
    case = load(path)
    c = settings(case)
    config = official(c, len(case["param/lm_head.weight"]))
    model, batch = model_of(case, config, official_names), batch_of(case)
    objective = Interleaved(subsets=c["interleaved_num_passes"])

    @quick
    @partial(jax.value_and_grad, has_aux=True)
    def run(model):
        loss, metrics = objective(model, batch)
        passes = objectives.interleaved_passes(model, batch, partition)
        merged = objective.states(model, batch)
        return loss, (metrics, merged, [x for _, x in passes])

    partition = strided_partition(batch.ids.shape[1], objective.subsets)
    (loss, (metrics, merged, passes)), gradients = run(model)
    np.testing.assert_allclose(loss, case["loss"], rtol=1e-5)
    np.testing.assert_allclose(metrics["initial"], case["per_pass_loss"][0], rtol=1e-5)
    close(merged, case["h_final"])
    close(model.logits(passes[0]), case["init_logits"])
    everything = (slice(0, None, 1), *partition)
    for number, (positions, x) in enumerate(zip(everything, passes, strict=True)):
        nats = token_losses(model, x, batch.targets[:, positions]).nats
        close(nats, case["per_pass_loss_none"][number][:, positions])
    assert_gradients_are(case, to_nested_dict(gradients), config, official_names)
    logits, x = exact(model, batch)
    close(logits, case["seq_logits"])
    close(x, case["seq_h_final"])


@quick
def exact(model, batch):
    x, _ = model.hidden(Tokens(batch.ids), model.init_cache(len(batch.ids), 0))
    return model.logits(x), x


@pytest.mark.slow
@pytest.mark.parametrize("path", REFERENCE)
def test_every_memory_is_the_reference_s(path):
    case = load(path)
    c = settings(case)
    config = reference(c, len(case["param/lm_head"]))
    model, batch = model_of(case, config, reference_names), batch_of(case)
    S, T = int(case["S"]), batch.ids.shape[1]

    @quick
    @partial(jax.value_and_grad, has_aux=True)
    def run(model):
        loss, _ = Interleaved(subsets=S)(model, batch)
        passes = objectives.interleaved_passes(model, batch, partition)
        return loss, [x for _, x in passes]

    partition = strided_partition(T, S)
    (loss, passes), gradients = run(model)
    np.testing.assert_allclose(loss, case["loss"], rtol=1e-5)
    merged, *refined = passes
    for positions, x in zip(partition, refined, strict=True):
        merged = put(merged, positions, x)
    everything = (slice(0, None, 1), *partition)
    for positions, x, mean in zip(everything, passes, case["means"], strict=True):
        nats = token_losses(model, x, batch.targets[:, positions]).nats
        counted = (batch.targets[:, positions] != IGNORED).sum()
        np.testing.assert_allclose(nats.sum() / counted, mean, rtol=1e-5)
    close(token_losses(model, merged, batch.targets).nats, case["merged_loss"])
    close(model.logits(merged), case["merged_logits"])
    assert_gradients_are(case, to_nested_dict(gradients), config, reference_names)
    close(exact(model, batch)[0], case["seq_logits"])


@pytest.mark.slow
@pytest.mark.parametrize("path", REFERENCE)
def test_the_buffer_and_what_flows_through_it_are_the_reference_s(path):
    case = load(path)
    config = reference(settings(case), len(case["param/lm_head"]))
    model, batch = model_of(case, config, reference_names), batch_of(case)
    tokens, T = Tokens(batch.ids), batch.ids.shape[1]

    @partial(quick, static_argnames="detached")
    @partial(jax.grad, has_aux=True)
    def run(model, detached):
        x = model.embed(batch.ids)
        y, buffer = model.stack.initial(x, tokens)
        first = token_losses(model, model.final_norm(y), batch.targets).nats
        means = [first.sum() / (batch.targets != IGNORED).sum()]
        for positions in strided_partition(T, 2):
            if detached:
                buffer = jax.lax.stop_gradient(buffer)
            y, buffer = model.stack.refine(x, tokens, positions, buffer)
            targets = batch.targets[:, positions]
            nats = token_losses(model, model.final_norm(y), targets).nats
            means.append(nats.sum() / (targets != IGNORED).sum())
        return sum(means) / 3, (first, buffer.states)

    for detached in (False, True):
        name = f"extra/{'detached' if detached else 'full'}_S2_gnorm"
        gradients, (first, states) = run(model, detached)
        if name in case:
            np.testing.assert_allclose(
                optax.tree.norm(gradients), case[name], rtol=1e-4
            )
    if "extra/init_only" in case:
        close(first, case["extra/init_only"])
    if int(case["S"]) == 2:
        close(states, case["final_states"])


@pytest.mark.parametrize("path", REFERENCE)
@pytest.mark.parametrize("subsets", [1, 4, sweep(32)])
def test_other_partitions_are_the_reference_s(path, subsets):
    case = load(path)
    if f"extra/loss_S{subsets}" not in case:
        pytest.skip(f"{path.name} has no losses of S = {subsets}")
    config = reference(settings(case), len(case["param/lm_head"]))
    model, batch = model_of(case, config, reference_names), batch_of(case)
    objective = Interleaved(subsets=subsets)

    @quick
    def run(model):
        x = objective.states(model, batch)
        return objective(model, batch)[0], token_losses(model, x, batch.targets).nats

    loss, nats = run(model)
    np.testing.assert_allclose(loss, case[f"extra/loss_S{subsets}"], rtol=1e-5)
    close(nats, case[f"extra/merged_S{subsets}"])


@pytest.mark.parametrize("path", REFERENCE)
@pytest.mark.parametrize(
    ("chunk", "memory"),
    [
        *((8, "broadcast"), (8, "first"), slow(1, "broadcast")),
        *(sweep(n, m) for n in (16, 32) for m in ("broadcast", "first")),
        sweep(1, "first"),
    ],
)
def test_chunked_training_is_the_reference_s(path, chunk, memory):
    case = load(path)
    name = f"extra/chunk{chunk}_{memory}"
    if name not in case:
        pytest.skip(f"{path.name} has no {name}")
    config = reference(settings(case), len(case["param/lm_head"]))
    model, batch = model_of(case, config, reference_names), batch_of(case)

    def run(model):
        x = Chunked(chunk=chunk, memory=memory).states(model, batch)
        return token_losses(model, x, batch.targets).nats

    # Chunks of 1 make a pass a token, all of one shape: as one program they compile
    # for a minute, one operation after another each is compiled once.
    with jax.disable_jit(chunk == 1):
        close(quick(run)(model), case[name])
