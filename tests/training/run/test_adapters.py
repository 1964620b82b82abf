"""Runs that train adapters of another run's model."""

import json
import math
from dataclasses import replace

import jax
import numpy as np
import pytest

from recurjax.convert.imported_run import new_experiment, write_run
from recurjax.data.tokenizers import ByteTokenizer
from recurjax.errors import UserError
from recurjax.parameters import to_nested_dict
from recurjax.sharding import MeshConfig, make_mesh
from recurjax.surgery.adapters import merged
from recurjax.training import session
from recurjax.training.checkpoint.manifest import named
from recurjax.training.run import load_adapters, load_run
from tests.cli.commands import assert_refused, recurjax
from tests.training.run_contents import arrays, assert_same_run
from tests.training.test_resume import train
from tests.training.tiny_experiment import changed, config, drawn


def imported(out, scale):
    model = drawn(config().model, scale=scale)
    write_run(out, model, new_experiment(out, model.config, length=16), ByteTokenizer())


def adapting(base):
    return changed(
        config(),
        model={"weight_dtype": "bfloat16"},
        training={
            "start_from": str(base),
            "adapters": "lora:2:4",
            "steps": 3,
            "checkpoint_every": 100,
        },
        evaluation={"every": 0},
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory, quick_compilation):
    """A base in bfloat16, a run of adapters on it, the same stopped and resumed."""
    root = tmp_path_factory.mktemp("adapters")
    imported(root / "base", 0.2)
    experiment = adapting(root / "base")
    result = train(root / "whole", experiment=experiment)
    train(root / "parts", stop_at_poll=3, experiment=experiment)
    train(root / "parts", experiment=experiment)
    return root, result.model


@pytest.mark.slow
def test_checkpoints_hold_adapters_and_which_base_they_are_of(runs):
    root, _ = runs
    step, saved = arrays(root / "whole")
    names = [name for name in saved if name.startswith(("model.", "optimizer."))]
    assert len([name for name in names if name.startswith("model.")]) == 14
    weights = [name for name in names if saved[name].ndim > 0]
    assert all(name.endswith((".lora_a", ".lora_b")) for name in weights)
    file = root / "whole" / "checkpoints" / str(step) / "manifest" / "manifest.json"
    base = load_run(root / "base", report=print)
    assert json.loads(file.read_text())["base"] == {
        "run": str(root / "base"),
        "step": 0,
        "digest": base.digest,
    }


@pytest.mark.slow
def test_a_mesh_trains_the_adapters_of_one_device(runs, tmp_path, monkeypatch):
    root, _ = runs
    trained = []
    for axes in ({"data": 1}, {"data": 2, "fsdp": 2, "tensor": 2}):
        devices = jax.devices()[: math.prod(axes.values())]
        monkeypatch.setattr(
            session,
            "make_mesh",
            lambda config, devices=devices: make_mesh(config, devices),
        )
        experiment = replace(adapting(root / "base"), mesh=MeshConfig(**axes))
        model = train(tmp_path / str(len(devices)), experiment=experiment).model
        trained.append(named(to_nested_dict(model)))
    one, several = trained
    for name, leaf in several.items():
        assert len(leaf.sharding.device_set) == 8
        scale = np.abs(np.float32(one[name])).max()
        np.testing.assert_allclose(
            np.float32(leaf), np.float32(one[name]), rtol=0, atol=1e-5 * scale
        )


def test_a_resumed_run_ends_with_the_same_bits(runs):
    root, _ = runs
    assert_same_run(root / "parts", root / "whole")


def test_what_is_read_is_the_merged_model(runs):
    root, model = runs
    loaded = load_run(root / "whole")
    assert loaded.model.config.weight_dtype == "float32"
    assert loaded.experiment.training.adapters is None
    jax.tree.map(
        np.testing.assert_array_equal,
        to_nested_dict(loaded.model),
        to_nested_dict(merged(model)),
    )


def test_merge_writes_a_run_of_its_own(runs, tmp_path):
    root, model = runs
    code, out, err = recurjax("convert", "merge", root / "whole", tmp_path / "out")
    assert (code, out) == (0, f"{tmp_path / 'out'}: the model of step 3\n"), err
    loaded = named(to_nested_dict(load_run(tmp_path / "out").model))
    want = named(to_nested_dict(merged(model)))
    assert all(np.array_equal(loaded[name], want[name]) for name in want)


def test_generate_continues_with_adapters_by_name(runs):
    root, _ = runs
    options = ["--prompt", "ab", "--max-new-tokens", "8", "--temperature", "0"]
    base = [root / "base", "--weights", "bfloat16"]  # as it was trained on
    tokens = []
    for words in ([root / "whole"], [*base, "--adapter", f"one={root / 'whole'}"]):
        code, out, err = recurjax("generate", *words, *options, "--json")
        assert code == 0, err
        (generation,) = json.loads(out)["generations"]
        tokens.append(generation["tokens"])
    assert generation["adapter"] == "one" and tokens[0] == tokens[1]
    named = ("--adapter", f"one={root / 'whole'}", "--adapter", f"two={root / 'parts'}")
    code, out, err = recurjax("generate", *base, *named, *options)
    assert code == 0 and "--- text 2 of 2, adapter two, ended by length ---" in out, err


def test_adapters_by_name_that_do_not_fit_are_refused(runs):
    root, _ = runs
    for runs_named, message in (
        (["one"], "--adapter one: must be NAME=RUN"),
        ([f"one={root / 'base'}"], "base: the run trained no adapters"),
        ([f"one={root / 'whole'}"] * 2, "one names .*whole already"),
    ):
        named = [word for name in runs_named for word in ("--adapter", name)]
        answer = recurjax("generate", root / "base", "--prompt", "a", *named)
        assert_refused(answer, message)


def test_another_base_is_refused_by_its_checksum(runs, tmp_path):
    root, _ = runs
    (root / "base").rename(tmp_path / "base")
    try:
        imported(root / "base", 0.1)
        with pytest.raises(UserError, match=r"adapters belong to .* with check"):
            load_run(root / "whole")
        with pytest.raises(UserError, match=r"another base: .* this one has [0-9a-f]"):
            load_adapters(load_run(root / "base"), {"one": root / "whole"})
    finally:
        (root / "base").rename(tmp_path / "other")
        (tmp_path / "base").rename(root / "base")


def test_adapters_without_a_base_are_refused():
    with pytest.raises(UserError, match="needs a model to adapt"):
        changed(config(), training={"adapters": "lora:2"})
