"""The benches of RAT's, long attention's and Mamba's ops: rows, and sizes tuned."""

import json
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import cast

import jax
import pytest

from pallas_kernels.measured_sizes import VARIABLE
from pallas_kernels.target import Target, as_if
from recurjax.bench import chunk_attention, gated_scan, op_by_backend, selective_scan
from recurjax.cli.bench import TUNED
from recurjax.cli.main import main
from recurjax.errors import UserError
from recurjax.experiment import Experiment
from recurjax.run_table import load_experiment
from recurjax.sharding import MeshConfig
from recurjax.variants.transformer import TransformerConfig
from tests.training.compilation import unoptimized

__all__ = ["unoptimized"]

GPU = Target(platform="gpu", kind="a GPU", compute_capability="9.0", cudnn=False)
TINY = {
    "chunk_attention": {"B": 1, "T": 8, "H": 2, "N": 1, "E": 4, "C": 2},
    "gated_scan": {"B": 1, "T": 8, "D": 8, "W": 4, "E": 2, "C": 4},
    "selective_scan": {"B": 1, "T": 16, "I": 4, "N": 2},
}
SIZES = {"chunk_attention": "block_k", "selective_scan": "unroll"}
"""What XLA on a CPU has a size for."""


@pytest.fixture
def tiny(unoptimized, monkeypatch):
    for op, shape in TINY.items():
        bench = import_module(f"recurjax.bench.{op}")
        monkeypatch.setattr(bench, "SMALL", (shape,))
        tried = {SIZES.get(op, "stretch"): (4,)}
        monkeypatch.setitem(bench.CANDIDATES, "xla", tried)


@pytest.mark.parametrize("op", TINY)
def test_every_backend_that_serves_has_both_passes(op, tiny):
    bench = import_module(f"recurjax.bench.{op}")
    rows = list(bench.rows(large=False, dtype="float32", repeats=1))
    names = [f"{op}/xla/{what}" for what in op_by_backend.PASSES]
    assert [row.name for row in rows] == names
    assert rows[0].shape.items() >= TINY[op].items()
    assert bench.summary(rows) == ""


@pytest.mark.parametrize("op", SIZES)
def test_tuned_sizes_go_into_a_file_that_programs_read(op, tiny, tmp_path, monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    bench, file = import_module(f"recurjax.bench.{op}"), tmp_path / "tiles.json"
    # No clock: blocks of 4 are fastest.
    times = {None: [1.0], 4: [0.5], "heuristic": [1.0], "best": [0.5]}
    monkeypatch.setattr(
        op_by_backend, "in_turns", lambda calls, **_: {n: times[n] for n in calls}
    )
    assert main(["bench", op, "--tune", str(file)]) == 0
    (entry,) = json.loads(file.read_text())["sizes"]
    assert (entry["op"], entry["backend"]) == (op, "xla")
    assert entry["sizes"] == {SIZES[op]: 4}
    (call,) = bench._calls(False, "float32")
    # Traced anew: jax knows a function again.
    free = str(jax.make_jaxpr(partial(call.function))(*call.arrays))
    monkeypatch.setenv(VARIABLE, str(file))
    assert str(jax.make_jaxpr(partial(call.function))(*call.arrays)) != free


def test_a_size_that_a_device_has_no_use_for_is_told(tiny, tmp_path, capsys):
    file = tmp_path / "tiles.json"
    assert main(["bench", "gated_scan", "--tune", str(file), "--repeats", "1"]) == 0
    told = capsys.readouterr().err
    assert "gated_scan: stretch=4 cannot be: queried_scan: xla: takes of the" in told
    (entry,) = json.loads(file.read_text())["sizes"]
    assert entry["sizes"] == {}


def test_every_size_of_a_kernel_is_tried():
    for op in TINY:
        bench = import_module(f"recurjax.bench.{op}")
        backends = set(import_module(f"pallas_kernels.{op}.api").OP.backends)
        assert set(bench.CANDIDATES) == backends
        fields = set(bench.BlockSizes.__dataclass_fields__)
        assert set(bench.CANDIDATES["triton"]) == fields
    assert set(TUNED) == {*TINY, "recurrent_prefill"}


def calls_of(bench, experiment: Experiment | str, tensor: int = 1):
    """Returns what a device has of a run of two rows for each."""
    if isinstance(experiment, str):
        experiment = load_experiment(experiment)
    rows = 2 * jax.device_count() // tensor
    training = replace(experiment.training, batch=rows, accumulation=1)
    mesh = MeshConfig(tensor=tensor)
    return bench.calls_of_run(replace(experiment, training=training, mesh=mesh))


def test_a_rat_s_run_has_its_scan_and_its_attention():
    run = "rat:shakespeare_rat16"
    sizes = {"B": 2, "T": 256}
    (call,) = calls_of(chunk_attention, run)
    assert call.shape == sizes | {"H": 4, "N": 2, "E": 16, "C": 16}
    (of_op,) = call.arrays
    assert of_op.ends.keys.shape == (2, 4, 16, 16)
    assert of_op.first is of_op.documents is None
    (call,) = calls_of(gated_scan, run)
    assert call.shape == sizes | {"D": 64, "W": 32, "E": 16, "C": 16}
    assert call.shape_class["logits"] and call.shape_class["streams"] == 2


def test_a_device_s_part_of_the_heads_is_tuned():
    (call,) = calls_of(chunk_attention, "rat:shakespeare_rat16", tensor=2)
    assert call.shape == {"B": 2, "T": 256, "H": 2, "N": 2, "E": 16, "C": 16}
    experiment = load_experiment("rat:shakespeare_rat16")
    apart = replace(experiment, mesh=MeshConfig(sequence=2))
    with pytest.raises(UserError, match="set --mesh.sequence 1"):
        gated_scan.calls_of_run(apart)


def test_a_run_s_attention_has_the_op_where_it_takes_it():
    run = "rat:shakespeare_attention"
    with pytest.raises(UserError, match="no layer has the op chunk_attention here"):
        calls_of(chunk_attention, run)
    with as_if(GPU):
        (call,) = calls_of(chunk_attention, run)
        assert call.shape["C"] == 1 and call.shape["H"] == call.shape["N"]
    # A Transformer's own stack, of layers without ALiBi.
    experiment = load_experiment("recurrent_transformer:shakespeare_transformer")
    stack = cast(TransformerConfig, experiment.model.stack)
    plain = replace(stack, attention=replace(stack.attention, position=None))
    experiment = replace(
        experiment,
        model=replace(experiment.model, stack=plain),
        training=replace(experiment.training, length=256),
    )
    with as_if(GPU):
        (call,) = calls_of(chunk_attention, experiment)
        assert call.arrays[0].ends.keys.shape[2] == call.shape["T"] == 256
        assert call.backends()[0] == "triton"


def test_a_recurformer_s_run_has_a_scan_for_each_number_of_heads():
    run = "recurformer:small_mqar_beta_50"
    stack = load_experiment(run).model.stack
    widths = {stack.heads(layer).mamba_width for layer in range(stack.layers)} - {0}
    found = {call.shape["I"] for call in calls_of(selective_scan, run)}
    assert found == {stack.mamba.expand * width for width in widths}


@pytest.mark.parametrize("bench", [chunk_attention, gated_scan, selective_scan])
@pytest.mark.parametrize("variant", ["recurrent", "latent_recurrent"])
def test_a_run_without_the_op_is_told(bench, variant):
    runs = {"recurrent": "shakespeare_recurrent", "latent_recurrent": "base_20"}
    experiment = load_experiment(f"{variant}_transformer:{runs[variant]}")
    with pytest.raises(UserError, match="trains a .*RecurrentTransformer.*Config"):
        bench.calls_of_run(experiment)


def test_an_rnn_s_run_has_one_scan_of_the_whole_row():
    (call,) = calls_of(gated_scan, "rat:shakespeare_rnn")
    assert call.shape == {"B": 2, "T": 256, "D": 64}
    assert call.shape_class["chunk"] is None
