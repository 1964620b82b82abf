"""One way to build a step: train and plan refuse alike; an objective with a teacher."""

import dataclasses
import json
from dataclasses import dataclass, replace
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recurjax.convert.imported_run import new_experiment, write_run
from recurjax.data.config import PromptAnswer
from recurjax.data.tokenizers import ByteTokenizer
from recurjax.errors import UserError
from recurjax.model import StackConfig
from recurjax.parameters import to_nested_dict
from recurjax.plan.programs import build_program
from recurjax.sharding import AXES, MeshConfig, make_mesh
from recurjax.training import session as session_module
from recurjax.training.checkpoint.manifest import named
from recurjax.training.objective import (
    Chunked,
    Distilled,
    FrozenModel,
    Interleaved,
    NextToken,
)
from recurjax.training.program import build_step
from recurjax.training.run import check_frozen, load_frozen
from recurjax.training.session import Session
from recurjax.types import Batch
from recurjax.variants.recurformer import MambaConfig, RecurFormerConfig
from tests.plan.small_experiments import VARIANTS, experiment
from tests.training import tiny_experiment
from tests.training.tiny_experiment import changed, drawn

BASE = VARIANTS["transformer"][0]
STACKS = {
    **{name: stack for name, (stack, _, _) in VARIANTS.items()},
    "recurformer": RecurFormerConfig(
        transformer=BASE, replaced=((0,), ()), mamba=MambaConfig(dt_rank=4)
    ),
}
"""A small stack of every variant."""

REFUSED = {
    ("transformer", "stage"): "TransformerConfig does not have: leave it at 1, got 2",
    ("transformer", "sequence"): "TransformerConfig is not: leave it at 1, got 2",
    ("recurrent_transformer", "stage"): "set --model.stack.schedule wavefront",
    ("recurrent_transformer", "sequence"): "RecurrentTransformerConfig is not",
    ("rat", "stage"): "RatConfig does not have",
    ("latent_recurrent_transformer", "stage"): "TransformerConfig does not have",
    ("latent_recurrent_transformer", "sequence"): "TransformerConfig is not",
    ("relaxed_recursive_transformer", "stage"): "TransformerConfig does not have",
    ("relaxed_recursive_transformer", "sequence"): "TransformerConfig is not",
    ("recurformer", "stage"): "RecurFormerConfig does not have",
    ("recurformer", "sequence"): "RecurFormerConfig is not",
}
"""Variants that have no program for two devices of an axis, and why."""


def on(variant, mesh):
    """A run of a variant that the byte tokenizer fits, on a mesh."""
    run = experiment(variant if variant in VARIANTS else "transformer")
    stack, vocabulary = STACKS[variant], ByteTokenizer().vocabulary
    if hasattr(stack, "vocabulary"):
        stack = replace(stack, vocabulary=vocabulary)
    model = replace(run.model, vocabulary=vocabulary, stack=stack)
    data = replace(run.data, prefetch=0)
    return replace(run, model=model, data=data, mesh=mesh)


def told(ask):
    """Returns what a UserError says, or None when there is none."""
    try:
        ask()
    except UserError as error:
        return str(error)
    return None


def test_every_variant_is_asked():
    assert {type(stack) for stack in STACKS.values()} == set(get_args(StackConfig))


@pytest.fixture
def answers(tmp_path, monkeypatch):
    """Asks training and plan whether an experiment goes with its mesh."""

    def ask(run, count):
        devices = jax.devices()[:count]
        mesh = make_mesh(run.mesh, devices)
        monkeypatch.setattr(session_module, "make_mesh", lambda config: mesh)
        train = told(lambda: Session(run, tmp_path).close())
        return train, told(lambda: build_program(run, "train", mesh))

    return ask


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("variant", STACKS)
def test_a_plan_refuses_what_training_refuses(variant, axis, size, answers):
    run = on(variant, MeshConfig(**{"data": 1, axis: size}))
    train, plan = answers(run, size)
    assert train == plan
    want = REFUSED.get((variant, axis)) if size > 1 else None
    assert (train is None) == (want is None), train
    if want is not None:
        assert want in str(train)


@pytest.mark.parametrize(("variant", "axis"), REFUSED)
def test_no_prompt_is_planned_on_a_mesh_that_the_stack_refuses(variant, axis):
    run = on(variant, MeshConfig(**{"data": 1, axis: 2}))
    mesh = make_mesh(run.mesh, jax.devices()[:2])
    for name in ("prefill", "decode"):
        said = told(lambda name=name: build_program(run, name, mesh, length=33))
        assert REFUSED[variant, axis] in str(said)


@pytest.mark.parametrize(
    ("variant", "mesh", "change", "said"),
    [
        (
            "recurrent_transformer",
            {"stage": 2},
            {"model": {"schedule": "wavefront"}},
            None,
        ),
        (
            "recurrent_transformer",
            {"stage": 2},
            {"model": {"schedule": "wavefront", "layers": 3}},
            "mesh.stage must divide the model's 3 layers, got 2",
        ),
        (
            "rat",
            {"sequence": 2},
            {"training": {"length": 33}},
            "mesh.sequence = 2: a row of 33 tokens does not divide into 2 shards",
        ),
        (
            "rat",
            {"sequence": 2},
            {"training": {"length": 40}},
            "mesh.sequence = 2: a chunk of 16 tokens must not cross shards of 20",
        ),
        (
            "transformer",
            {"data": 2},
            {"training": {"batch": 3}},
            "make training.batch / training.accumulation a multiple of 2",
        ),
        (
            "transformer",
            {"fsdp": 2},
            {"evaluation": {"batch": 3}},
            "make evaluation.batch a multiple of 2",
        ),
    ],
)
def test_sizes_that_do_not_divide_are_refused_by_both(
    variant, mesh, change, said, answers
):
    run = on(variant, MeshConfig(**{"data": 1, **mesh}))
    stack = change.pop("model", {})
    run = replace(
        changed(run, **change),
        model=replace(run.model, stack=replace(run.model.stack, **stack)),
    )
    train, plan = answers(run, 2)
    assert train == plan
    assert (said is None and train is None) or said in str(train)


def with_segments(run, kind, folder):
    """The run on rows with separate documents."""
    if kind == "documents":
        return changed(run, data={"document_segments": True})
    file = folder / "examples.jsonl"
    lines = [json.dumps({"prompt": "a" * n, "answer": "b"}) for n in range(1, 31)]
    file.write_text("\n".join(lines) + "\n")
    corpus = PromptAnswer(patterns=(str(file),), rows="packed")
    return changed(run, data={"corpus": corpus})


@pytest.mark.parametrize("kind", ["none", "documents", "answers"])
def test_what_is_planned_is_the_batch_that_training_reads(kind, tmp_path, monkeypatch):
    run = on("transformer", MeshConfig(data=1))
    run = run if kind == "none" else with_segments(run, kind, tmp_path)
    mesh = make_mesh(run.mesh, jax.devices()[:1])
    monkeypatch.setattr(session_module, "make_mesh", lambda config: mesh)
    session = Session(run, tmp_path / "run")
    try:
        batch = session.next_batch()
    finally:
        session.close()
    assert (batch.segments is None) == (kind == "none")
    shapes = jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), batch)
    for name in ("train", "evaluate"):
        planned = build_program(run, name, mesh).arguments[1]
        assert jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), planned) == shapes


@pytest.mark.parametrize("kind", ["documents", "answers"])
def test_segments_are_refused_where_a_memory_is_read_token_after_token(kind, tmp_path):
    latent = on("latent_recurrent_transformer", MeshConfig(data=1))
    for objective in (Interleaved(), Chunked(chunk=4)):
        with_segments(replace(latent, objective=objective), kind, tmp_path)
    plain = replace(latent, objective=NextToken())
    with pytest.raises(ValueError, match="the model of NextToken passes its latent "):
        with_segments(plain, kind, tmp_path)
    stack = replace(latent.model.stack, memory=None)
    with_segments(changed(plain, model={"stack": stack}), kind, tmp_path)
    frozen = FrozenModel(run="teacher", model=latent.model)
    student = replace(
        on("transformer", MeshConfig(data=1)), objective=Distilled(teacher=frozen)
    )
    with pytest.raises(ValueError, match="the frozen model of Distilled passes its "):
        with_segments(student, kind, tmp_path)


@dataclass(frozen=True, kw_only=True, slots=True)
class Imitation(NextToken):
    """The mean squared distance between the states of a model and of its teacher."""

    frozen: FrozenModel

    def __call__(self, model, batch, teacher):
        own, other = (self.states(each, batch) for each in (model, teacher))
        loss = jnp.square(own - other).mean()
        return loss, {"loss": loss}


@pytest.fixture
def imitation(tmp_path):
    """A tiny run whose objective reads a frozen model that an import has written."""
    out, model = tmp_path / "teacher", tiny_experiment.config().model
    write_run(out, drawn(model), new_experiment(out, model, length=16), ByteTokenizer())
    objective = Imitation(frozen=FrozenModel(run=str(out), model=model))
    run = replace(tiny_experiment.config(), objective=objective)
    stack = replace(run.model.stack, layers=1)
    return changed(run, model={"stack": stack}, training={"accumulation": 2})


@pytest.mark.slow
def test_a_step_reads_a_frozen_model_and_leaves_it_alone(
    imitation, quick_compilation, monkeypatch, tmp_path
):
    devices = jax.devices()[:2]
    mesh = make_mesh(MeshConfig(data=1, fsdp=2), devices)
    monkeypatch.setattr(session_module, "make_mesh", lambda config: mesh)
    # The objectives that config.json can name are a closed union; this one is no part.
    monkeypatch.setattr(session_module, "from_json", lambda *_, **__: imitation)
    monkeypatch.setattr(session_module.RunDirectory, "claim", make_root)
    session = Session(imitation, tmp_path / "run")
    said = []
    try:
        state = session.start(said.append)
        teacher = load_frozen(imitation, mesh, lambda _: None)
        assert teacher is not None
        losses = []
        for _ in range(6):
            batch = session.next_batch()
            want = mean_of_parts(imitation, state.model, batch, teacher)
            state, metrics = session.step_on(state, batch)
            losses.append(float(metrics["loss"]))
            np.testing.assert_allclose(losses[-1], want, rtol=1e-5)
        session.save(state, 6)
        session.wait()
        kept = named(to_nested_dict(state))
    finally:
        session.close()
    assert said[0].startswith("the objective reads the frozen model of")
    assert losses[-1] < losses[0]
    # The teacher is sharded as a trained model is, and is not saved.
    weight = teacher.stack.blocks[0].mlp.w_up[...]
    assert weight.addressable_shards[0].data.size * 2 == weight.size
    manifest = (tmp_path / "run/checkpoints/6/manifest/manifest.json").read_text()
    assert all(f'"{name}"' in manifest for name in kept)
    assert "frozen" not in manifest and "teacher" not in manifest


def make_root(self, experiment, tokenizer):
    self.root.mkdir()


def mean_of_parts(run, model, batch, teacher):
    """The objective of rows 0, 2, ... and of rows 1, 3, ..., each read by itself."""
    parts = [Batch(batch.ids[a::2], batch.targets[a::2]) for a in range(2)]
    loss = jax.jit(lambda *arguments: run.objective(*arguments)[0])
    with jax.set_mesh(model.w_embedding[...].sharding.mesh):
        return np.mean([loss(model, part, teacher) for part in parts])


def test_a_plan_of_a_step_with_a_teacher_counts_its_parameters(imitation):
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    program = build_program(imitation, "train", mesh)
    own, teacher = program.parts["parameters"]
    assert program.arguments[2] is teacher
    assert len(jax.tree.leaves(teacher)) == len(jax.tree.leaves(own))
    step = build_step(imitation, mesh)
    gradient = jax.eval_shape(step.update, *program.arguments)[0].model
    assert jax.tree.structure(gradient) == jax.tree.structure(own)


def test_a_teacher_of_another_model_or_tokenizer_is_refused(imitation):
    check_frozen(imitation, ByteTokenizer())
    with pytest.raises(UserError, match="frozen.run .* has another tokenizer"):
        check_frozen(imitation, ByteTokenizer(bos=False))
    frozen = imitation.objective.frozen
    model = dataclasses.replace(frozen.model, tied_head=False)
    wrong = Imitation(frozen=replace(frozen, model=model))
    with pytest.raises(UserError, match=r"than objective.frozen.model \(tied_head"):
        check_frozen(replace(imitation, objective=wrong), ByteTokenizer())
