"""Distillation and exit losses against dense sums; what is refused; what is counted."""

import dataclasses
import json
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recurjax.config_json import from_json, to_json
from recurjax.convert.imported_run import new_experiment, write_run
from recurjax.data.tokenizers import ByteTokenizer
from recurjax.errors import UserError
from recurjax.experiment import Experiment
from recurjax.losses.divergence import Teacher, exit_losses
from recurjax.model import ModelConfig
from recurjax.plan.flops import count_flops
from recurjax.plan.programs import build_program
from recurjax.sharding import MeshConfig, batch_sharding, make_mesh, shardings
from recurjax.surgery.named_parameters import parameters
from recurjax.training.objective import FrozenModel, NextToken
from recurjax.training.run import RunDirectory, load_frozen
from recurjax.types import IGNORED, Batch, Tokens
from recurjax.variants.relaxed_recursive_transformer.objectives import (
    Distilled,
    Exits,
)
from tests.compiling import QUICK_COMPILE
from tests.laws import draw_ids
from tests.marks import slow_except
from tests.plan.small_experiments import experiment
from tests.tolerances import assert_gradients_close, assert_values_close
from tests.training import tiny_experiment
from tests.variants.relaxed_recursive_transformer.switches import (
    VOCABULARY,
    build,
    small,
)
from tests.variants.transformer import switches as transformer

STUDENT = replace(
    small(loops=3, layers=3, rank=2), pad_vocabulary_to=4, logit_soft_cap=3.0
)
WHO = FrozenModel(run="runs/teacher", model=transformer.small(layers=1))
SOFT = Distilled(teacher=WHO, weight=0.7, temperature=2.0)


@pytest.fixture(scope="module")
def batch():
    ids = draw_ids(VOCABULARY)
    targets = np.roll(ids, -1, axis=1)
    targets[:, -1] = IGNORED
    targets[0, :3] = IGNORED
    return Batch(jnp.asarray(ids), jnp.asarray(targets))


def dense(objective, model, batch, teacher):
    """The loss as it is written, on full tables of probabilities."""
    tokens, cache = Tokens(batch.ids), model.init_cache(len(batch.ids), 0)
    after, _ = model.stack.states(model.embed(batch.ids), cache, tokens)
    logits = [model.logits(model.final_norm(x)) for x in after]
    taught, _ = teacher(tokens, teacher.init_cache(len(batch.ids), 0))
    counted = batch.targets != IGNORED

    def mean(values):
        return jnp.where(counted, values, 0).sum() / counted.sum()

    def entropy(z):
        logs = jax.nn.log_softmax(z)
        at = jnp.where(counted, batch.targets, 0)[..., None]
        return mean(-jnp.take_along_axis(logs, at, -1)[..., 0])

    def apart(near, far, t, kind="forward_kl"):
        q = jax.nn.softmax(jax.lax.stop_gradient(near) / t)
        p = jax.nn.softmax(far / t)

        def kl(one, other):
            return (one * jnp.log(one / other)).sum(-1)

        m = (p + q) / 2
        return mean(
            {
                "forward_kl": lambda: kl(q, p),
                "reverse_kl": lambda: kl(p, q),
                "jensen_shannon": lambda: (kl(q, m) + kl(p, m)) / 2,
                "total_variation": lambda: jnp.abs(q - p).sum(-1) / 2,
            }[kind]()
        )

    if isinstance(objective, Distilled):
        kind = objective.divergence
        divergence = apart(taught, logits[-1], objective.temperature, kind)
        t = objective.temperature
        return entropy(logits[-1]) + objective.weight * t**2 * divergence
    B, total = len(logits), 0.0
    for i, z in enumerate(logits, start=1):
        last = 1.0 if i == B else objective.coefficient
        a = last if objective.weights == "aggressive" else i / (B * (B + 1) / 2)
        own = entropy(z)
        if i < B:
            own += objective.self_distillation * apart(logits[-1], z, 1.0)
        if (more := objective.distilled) is not None:
            t = more.temperature
            own += more.weight * t**2 * apart(taught, z, t, more.divergence)
        total += a * own
    return total


CASES = {
    "both": Exits(weights="weighted", self_distillation=0.5, distilled=SOFT),
    "exits": Exits(coefficient=0.3, self_distillation=0.5),
    "distilled": SOFT,
    "reverse_kl": replace(SOFT, divergence="reverse_kl"),
    "jensen_shannon": Exits(distilled=replace(SOFT, divergence="jensen_shannon")),
    "total_variation": replace(SOFT, divergence="total_variation"),
}


@pytest.mark.parametrize(
    ("name", "chunks"),
    slow_except(
        ["both-3"],
        [
            pytest.param(name, chunks, id=f"{name}-{chunks}")
            for name in CASES
            for chunks in (1, 3)
        ],
        slow=["both-1"],
    ),
)
def test_losses_and_gradients_are_those_of_dense_tables(name, chunks, batch):
    objective = replace(CASES[name], vocabulary_chunks=chunks)
    model, teacher = build(STUDENT), build(WHO.model)
    arguments = (teacher,) if objective.frozen is not None else ()

    @partial(jax.jit, compiler_options=QUICK_COMPILE)
    def both(model, teacher, arguments):
        mine = jax.value_and_grad(
            lambda m: objective(m, batch, *arguments), has_aux=True
        )
        wanted = jax.value_and_grad(lambda m: dense(objective, m, batch, teacher))
        return mine(model), wanted(model)

    ((loss, metrics), gradient), (want, wanted) = both(model, teacher, arguments)
    assert_values_close(loss, want)
    assert_gradients_close(gradient, wanted)
    if name == "both":
        by_name = {key: float(value) for key, value in metrics.items()}
        sums = (by_name["exit_1"] + 2 * by_name["exit_2"] + 3 * by_name["loss"]) / 6
        sums += 0.5 * by_name["self_divergence"] + 0.7 * by_name["divergence"]
        assert float(loss) == pytest.approx(sums, rel=1e-5)


@pytest.mark.slow
def test_eight_devices_are_taught_as_one_is(batch):
    objective = replace(CASES["both"], vocabulary_chunks=3)
    models = build(STUDENT), build(WHO.model)
    rows = jax.tree.map(lambda a: jnp.concatenate([a, a[::-1]]), batch)

    @partial(jax.jit, compiler_options=QUICK_COMPILE)
    def compute(model, rows, teacher):
        loss = jax.value_and_grad(objective, has_aux=True)
        return loss(model, rows, teacher)

    (want, message), wanted = compute(models[0], rows, models[1])
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    with jax.set_mesh(mesh):
        # The teacher is sharded by the same rules as the student.
        model, teacher = jax.device_put(models, shardings(models, mesh))
        weight = teacher.stack.blocks[0].mlp.w_up[...]
        assert weight.addressable_shards[0].data.size * 4 == weight.size
        rows = jax.device_put(rows, batch_sharding(mesh))
        (got, said), gradient = compute(model, rows, teacher)
    assert_values_close(got, want)
    assert_values_close(said, message)
    assert_gradients_close(parameters(gradient), parameters(wanted))


def test_a_teacher_has_no_gradient_and_is_nothing_apart_from_itself(batch):
    model = build(STUDENT)

    @partial(jax.jit, compiler_options=QUICK_COMPILE)
    def value_and_gradient(teacher):
        def loss(teacher):
            x = objective_states(model)
            view = Teacher(teacher, objective_states(teacher), 2.0)
            matches = exit_losses(model, [x], batch.targets, teacher=view)
            return matches.from_teacher.sum()

        def objective_states(one):
            return NextToken().states(one, batch)

        return jax.value_and_grad(loss)(teacher)

    value, gradient = value_and_gradient(model)
    np.testing.assert_allclose(value, 0, atol=1e-4)
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(gradient))


@pytest.mark.parametrize("objective", [SOFT, Exits(), Exits(distilled=SOFT)])
def test_objectives_survive_their_json(objective):
    run = of(STUDENT, objective)
    assert from_json(Experiment, json.loads(json.dumps(to_json(run)))) == run


def of(model: ModelConfig, objective) -> Experiment:
    return dataclasses.replace(
        tiny_experiment.config(), model=model, objective=objective
    )


def test_what_does_not_go_together_is_refused_by_name():
    other = replace(WHO, model=replace(WHO.model, vocabulary=VOCABULARY + 1))
    with pytest.raises(ValueError, match="predicts 18 tokens and the model 17"):
        of(STUDENT, Distilled(teacher=other))
    with pytest.raises(ValueError, match="predicts 18 tokens and the model 17"):
        of(STUDENT, Exits(distilled=Distilled(teacher=other)))
    with pytest.raises(ValueError, match=r"sharing 'cycle'.* got 'sequence'"):
        of(small(sharing="sequence"), Exits())
    with pytest.raises(ValueError, match="not for TransformerConfig"):
        of(WHO.model, Exits())
    with pytest.raises(
        UserError, match=r"Distilled\.temperature: must be > 0, got 0.0"
    ):
        Distilled(teacher=WHO, temperature=0.0)
    with pytest.raises(UserError, match=r"Exits\.coefficient: must be >= 0, got -0.1"):
        Exits(coefficient=-0.1)
    with pytest.raises(
        ValueError, match=r"Exits\.vocabulary_chunks: must be >= 1, got 0"
    ):
        Exits(vocabulary_chunks=0)


def test_flops_count_the_teachers_forward_pass_and_the_exits_heads():
    run = experiment("relaxed_recursive_transformer", "float32")
    run = replace(run, training=replace(run.training, batch=1, length=64))
    teacher = FrozenModel(run="runs/teacher", model=run.model)
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])

    def counted(objective):
        own = replace(run, objective=objective)
        program = build_program(own, "train", mesh)
        traced = program.function.trace(*program.arguments)
        products = count_flops(traced.jaxpr, platform="cpu").products
        return products, own.flops_per_token * 64

    plain, own = counted(NextToken())
    for objective in (Distilled(teacher=teacher), Exits()):
        more, message = counted(objective)
        assert message > own
        assert more - plain == pytest.approx(message - own, rel=0.1)


def test_a_run_records_its_teacher_and_refuses_another(tmp_path):
    out, model = tmp_path / "teacher", tiny_experiment.config().model

    def write(scale):
        new = new_experiment(out, model, length=16)
        write_run(out, tiny_experiment.drawn(model, scale=scale), new, ByteTokenizer())

    write(1.0)
    student = replace(
        tiny_experiment.config(),
        objective=Distilled(teacher=FrozenModel(run=str(out), model=model)),
    )
    mesh, directory = make_mesh(MeshConfig(), jax.devices()[:1]), tmp_path / "run"
    directory.mkdir()
    record = RunDirectory(directory)
    for _ in range(2):
        load_frozen(student, mesh, lambda _: None, record=record)
    report = json.loads((directory / "frozen.json").read_text())
    assert report["run"] == str(out) and len(report["digest"]) == 64
    out.rename(tmp_path / "before")
    write(0.5)
    with pytest.raises(UserError, match="began with other parameters of"):
        load_frozen(student, mesh, lambda _: None, record=record)
