"""`recurjax plan`: its table and JSON, what it refuses, planned against measured."""

import json
import subprocess
import sys
from dataclasses import replace

import jax
import pytest
from rich.console import Console

from recurjax.cli.options import override
from recurjax.errors import UserError
from recurjax.plan import compilers
from recurjax.plan.changes import _other_meshes, find_changes
from recurjax.plan.child import read_failure
from recurjax.plan.compilers import compile_elsewhere
from recurjax.plan.planning import Plan, make_plan
from recurjax.plan.programs import build_program
from recurjax.plan.report import show_plan
from recurjax.plan.topology import parse_topology
from recurjax.sharding import AXES, MeshConfig, make_mesh
from tests.cli.commands import recurjax
from tests.plan import measured_step, small_experiments
from tests.source_tree import ROOT
from tests.training import tiny_experiment

TINY = tiny_experiment.__file__


@pytest.mark.slow
def test_a_plan_for_two_cpus_tells_sizes_counts_and_collectives(tmp_path, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=0")
    file = tmp_path / "plan.json"
    code, said, wrong = recurjax(
        *("plan", TINY, "--topology", "cpu:2", "--mesh", "fsdp=2"),
        *("--json", file, "--cache", tmp_path / "cache", "--training.length", 8),
    )
    assert (code, wrong) == (0, "")
    assert "tiny: train on cpu:2 (2 devices; mesh fsdp 2)" in said
    plan = json.loads(file.read_text())
    assert plan["fits"] and plan["mesh"]["fsdp"] == 2
    assert plan["tokens"] == 8 * 8
    # On CPU one table of sines and cosines for q and k of all layers meets an identity,
    # [8, 4] times [4, 4], on each of the two devices (layers/position.py).
    rotation = 2 * (2 * 8 * 4 * 4)
    assert plan["flops"]["products"] == plan["own_flops"] + rotation
    # Half of the parameters, whose every matrix is cut, and of AdamW's two moments.
    memory = plan["memory"]
    assert 2 * memory["parameters"] <= memory["optimizer"]
    assert memory["optimizer"] < 2.2 * memory["parameters"]
    kinds = {item["kind"] for item in plan["traffic"]["collectives"]}
    assert "all-gather" in kinds and kinds & {"all-reduce", "reduce-scatter"}
    assert {
        axis for item in plan["traffic"]["collectives"] for axis in item["axes"]
    } == {"fsdp"}
    (stored,) = (tmp_path / "cache").iterdir()
    assert json.loads(stored.read_text())["memory"] == memory


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), "--topology is missing"),
        (("--topology", "v9:2x2"), "must be one of v4, v5e, v5p, v6e, tpu7x, a100"),
        (("--topology", "cpu", "--mesh", "data=two"), "--mesh data=two: write it like"),
        (("--topology", "cpu", "--mesh", "row=2"), "with axes of data, fsdp"),
        (("--topology", "cpu", "--mesh", "data=-1,fsdp=-1"), "one of them may be -1"),
        (("--topology", "cpu", "--price", "-3"), "--price: must be >= 0, got -3.0"),
        (("--topology", "cpu", "--price", "nan"), "--price: must be finite"),
        (
            ("--topology", "cpu", "--sweep", "--memory-limit", "nan"),
            "--memory-limit: must be finite and at most 3.4e38 in size, got nan",
        ),
        (("--topology", "cpu", "--memory-limit", "8"), "--memory-limit is for --sweep"),
        (("--topology", "cpu", "--workers", "1"), "--workers is for --sweep"),
        (("--topology", "cpu", "--rows", "4"), "--rows and --length are for"),
        (("--topology", "cpu", "--json", "/nowhere/p.json"), "no directory /nowhere"),
        (
            ("--topology", "cpu", "--training.bach", "4"),
            "did you mean --training.batch",
        ),
        (
            ("--topology", "cpu", "--sweep", "--program", "decode"),
            "--sweep plans train",
        ),
    ],
)
def test_a_mistake_is_told_in_one_sentence(options, said):
    code, _, wrong = recurjax("plan", TINY, *options)
    assert code == 2
    assert said in wrong and wrong.count("\n") == 1


def test_without_compilers_the_command_to_fetch_them_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("RECURJAX_COMPILERS", str(tmp_path))
    for topology in ("v5e:2x2", "h100"):
        code, _, wrong = recurjax("plan", TINY, "--topology", topology)
        assert code == 2
        assert f"planning for {topology} needs its compiler" in wrong
        assert f"not in {tmp_path}: run `recurjax compilers`" in wrong


def test_what_does_not_fit_gets_three_changes_that_are_planned_again(monkeypatch):
    experiment = tiny_experiment.config()
    training = replace(experiment.training, batch=64)
    experiment = replace(experiment, training=training)
    topology = parse_topology("v5e:2x2")

    def plan(experiment) -> Plan:
        parts = experiment.training.accumulation
        needed = 64 * 2**30 // parts
        answer = {
            "failed": "RESOURCE_EXHAUSTED",
            "failed_by": "memory",
            "needed": needed,
        }
        if needed <= 16 * 2**30:
            answer = {"memory": {"temporaries": needed}}
        return Plan(
            experiment="tiny",
            program="train",
            topology=topology,
            mesh={"data": 4, "fsdp": 1, "stage": 1, "sequence": 1, "tensor": 1},
            answer=answer,
            bounds=None,
            steps=1,
            price=None,
            seconds=0.0,
        )

    result = find_changes(experiment, plan(experiment), plan)
    assert [(item.option, item.plan.fits) for item in result] == [
        ("--training.accumulation 4", True),
        ("--model.stack.remat block", False),
        ("--mesh.data 1 --mesh.fsdp 2 --mesh.tensor 2", False),
    ]


@pytest.mark.parametrize(
    ("mesh", "batch", "tried"),
    [
        ((4, 1, 1), 64, ["fsdp=4,tensor=1", "fsdp=2,tensor=2"]),
        ((1, 2, 4), 64, ["fsdp=8,tensor=1", "fsdp=1,tensor=8"]),
        ((2, 1, 2), 2, ["fsdp=2,tensor=2", "fsdp=1,tensor=4"]),  # 2 rows, not over 4
    ],
)
def test_meshes_that_may_help_cut_rows_first(mesh, batch, tried):
    meshes_tried(mesh, batch, tried, tiny_experiment.config())


def test_no_mesh_is_tried_that_does_not_divide_evaluations():
    run = tiny_experiment.changed(tiny_experiment.config(), evaluation={"batch": 2})
    meshes_tried((4, 1, 1), 64, ["fsdp=2,tensor=2"], run)


def meshes_tried(mesh, batch, tried, run):
    run = replace(run, training=replace(run.training, batch=batch))
    sizes = dict(zip(("data", "fsdp", "tensor"), mesh, strict=True))
    plan = Plan(
        experiment="tiny",
        program="train",
        topology=parse_topology("h100:8"),
        mesh={"stage": 1, "sequence": 1, **sizes},
        answer={"failed": "", "failed_by": "memory", "needed": None},
        bounds=None,
        steps=1,
        price=None,
        seconds=0.0,
    )
    result = list(_other_meshes(run, plan))
    meshes = [one.mesh for _, one in result]
    assert [f"fsdp={mesh.fsdp},tensor={mesh.tensor}" for mesh in meshes] == tried
    # Fields of the experiment, which `train` takes as `plan` does.
    for option, one in result:
        assert override(run, option.split(), prog="train") == one


@pytest.mark.parametrize(
    ("text", "needed", "kind"),
    [
        (
            "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in "
            "memory space hbm. Used 20.50G of 15.75G hbm. Exceeded hbm by 4.75G.",
            int(20.5 * 2**30),
            "memory",
        ),
        (
            "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required "
            "for HLO temporaries (215.25G) exceeds available HBM (95.74G).",
            int(215.25 * 2**30) + 7,
            "memory",
        ),
        ("Mosaic kernels cannot be automatically partitioned.", None, "ValueError"),
    ],
)
def test_a_compilers_refusal_is_read_for_its_bytes(text, needed, kind):
    result = read_failure(ValueError(f"{text}\n\nmore"), {"parameters": 4, "data": 3})
    assert (result["needed"], result["failed_by"]) == (needed, kind)
    assert result["failed"] == text


@pytest.mark.parametrize(
    "code, said",
    [
        (-11, "crashed on this program (SIGSEGV in xla::Repacker::Finish()): another"),
        (-9, "was killed (SIGKILL), most likely for want of this machine's memory"),
    ],
)
def test_a_compiler_that_crashes_is_an_answer(code, said, monkeypatch):
    known = {
        "mesh": dict.fromkeys(AXES, 1) | {"data": 2},
        "devices": 2,
        "versions": {},
        "notes": [],
        "tokens": 64,
        "own_flops": 1e6,
        "parts": {"parameters": 1000, "optimizer": 2000},
    }
    trace = """*** SIGSEGV (@(nil)) received by PID 1 ***
PC: @     0x7f624e117bc0  (unknown)  xla::Repacker::Finish()
    @     0x7f625b40cfd3       1888  FailureSignalHandler()
"""
    died = subprocess.CompletedProcess([], code, f"{json.dumps(known)}\n", trace)
    monkeypatch.setattr(compilers.subprocess, "run", lambda *_, **__: died)
    plan = make_plan(tiny_experiment.config(), parse_topology("cpu:2"))
    assert not plan.fits
    console = Console(record=True, width=200)
    show_plan(plan, console)
    assert said in console.export_text()


def test_a_mesh_that_does_not_divide_is_refused_by_the_child():
    code, _, wrong = recurjax("plan", TINY, "--topology", "cpu:2", "--mesh", "fsdp=3")
    assert code == 2
    assert "the mesh (data=-1, fsdp=3" in wrong and "does not fit 2 devices" in wrong


@pytest.mark.slow
@pytest.mark.parametrize(
    "program", ["evaluate", pytest.param("prefill", marks=pytest.mark.sweep), "decode"]
)
def test_the_other_programs_are_planned_too(program):
    topology = parse_topology("cpu:2")
    plan = make_plan(tiny_experiment.config(), topology, program)
    assert plan.fits
    memory = plan.answer["memory"]
    assert memory["optimizer"] == 0 and memory["parameters"] > 0
    assert (memory["caches"] > 0) == (program != "evaluate")
    own, counted = plan.answer["own_flops"], plan.answer["flops"]["products"]
    # Prefill's head reads the last position only; a cache is longer than causal.
    assert 0.5 * own < counted < 2.5 * own


@pytest.mark.sweep
def test_a_tick_is_planned_as_one_pass_of_the_block():
    run = small_experiments.experiment("relaxed_recursive_transformer", "float32")
    sizes = {"rows": 4, "length": 128}
    plan = make_plan(run, parse_topology("cpu"), "tick", **sizes)
    whole = make_plan(run, parse_topology("cpu"), "decode", **sizes)
    assert plan.fits and plan.answer["memory"]["caches"] > 0
    own, counted = plan.answer["own_flops"], plan.answer["flops"]["products"]
    # Adapters of both loops are multiplied, and what leaving tokens lack is made.
    assert own < counted < whole.answer["flops"]["products"]


def test_a_tick_is_refused_where_no_engine_runs_one():
    run = small_experiments.experiment("transformer")
    with pytest.raises(
        UserError, match="TransformerConfig lacks: use --program decode"
    ):
        build_program(run, "tick", make_mesh(MeshConfig(data=1), jax.devices()[:1]))
    run = small_experiments.experiment("relaxed_recursive_transformer")
    mesh = make_mesh(MeshConfig(data=2), jax.devices()[:2])
    with pytest.raises(UserError, match="early exits run on one device: plan for"):
        build_program(run, "tick", mesh)


@pytest.mark.slow
def test_planned_memory_is_that_of_a_measured_step_within_a_tenth():
    file = measured_step.__file__
    child = subprocess.run(
        [sys.executable, file, file],
        env=compilers.environment(parse_topology("cpu")),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode == 0, child.stderr[-3000:]
    measured = json.loads(child.stdout.splitlines()[-1])["peak"]
    answer = compile_elsewhere(measured_step.config(), parse_topology("cpu"), "train")
    assert sum(answer["memory"].values()) == pytest.approx(measured, rel=0.1)
