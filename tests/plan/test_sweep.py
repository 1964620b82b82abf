"""A sweep lists what divides, keeps what nothing beats, and draws it."""

import json
from dataclasses import replace

import pytest

from recurjax.errors import UserError
from recurjax.plan import sweep
from recurjax.plan.planning import Plan, find_bounds
from recurjax.plan.report import plot_roofline
from recurjax.plan.sweep import candidates, pareto, run_sweep
from recurjax.plan.topology import parse_topology
from tests.cli.commands import recurjax
from tests.training import tiny_experiment

V5E = parse_topology("v5e:2x2")


def planned(gibibytes: float, seconds: float, *, failed: str | None = None) -> Plan:
    """A plan that needs so much memory and has such a compute bound."""
    products = int(4 * 197e12 * seconds)
    answer = {
        "tokens": 1000,
        "own_flops": products / 2,
        "flops": {"products": products, "other": 0, "unknown_loops": 0},
        "memory": {"temporaries": int(gibibytes * 2**30)},
        "traffic": {"bytes": int(1e9), "collectives": [], "launches": 1},
    }
    if failed is not None:
        answer = {"failed": failed, "failed_by": "memory", "needed": None}
    return Plan(
        experiment="tiny",
        program="train",
        topology=V5E,
        mesh={},
        answer=answer,
        bounds=find_bounds(answer, V5E),
        steps=10,
        price=1.0,
        seconds=0.0,
    )


def test_candidates_are_all_meshes_that_divide_with_every_remat_policy():
    result = candidates(tiny_experiment.config(), V5E, (8, 6))
    meshes = {(item.mesh, item.batch) for item in result}
    # 8 rows over 4, 2 or 1 shards; 6 rows over 2 or 1.
    assert {mesh for mesh, batch in meshes if batch == 8} == {
        *((4, 1, 1), (2, 2, 1), (1, 4, 1), (2, 1, 2), (1, 2, 2), (1, 1, 4)),
    }
    assert {mesh for mesh, batch in meshes if batch == 6} == {
        *((2, 1, 2), (1, 2, 2), (1, 1, 4)),
    }
    assert {item.remat for item in result} == {"nothing", "dots", "block"}
    assert len(result) == 3 * len(meshes)
    assert all(item.experiment.training.batch == item.batch for item in result)


def test_a_mesh_that_does_not_divide_evaluations_is_no_candidate():
    run = tiny_experiment.changed(tiny_experiment.config(), evaluation={"batch": 2})
    rows = {item.mesh[0] * item.mesh[1] for item in candidates(run, V5E, (8,))}
    assert rows == {1, 2}


def test_batches_that_no_mesh_divides_are_told():
    experiment = tiny_experiment.config()
    training = replace(experiment.training, accumulation=4)
    with pytest.raises(UserError, match="divides them: name others"):
        candidates(replace(experiment, training=training), V5E, (6,))


def test_what_another_beats_in_memory_and_speed_is_left_out():
    one = candidates(tiny_experiment.config(), V5E, (8,))[0]
    fast, small, worse = planned(8, 0.1), planned(2, 0.4), planned(9, 0.2)
    large, none = planned(17, 0.05), planned(1, 0.1, failed="no room")
    pairs = [(one, plan) for plan in (small, worse, large, fast, none)]
    assert [plan for _, plan in pareto(pairs)] == [fast, small]
    assert [plan for _, plan in pareto(pairs, limit=4 * 2**30)] == [small]
    assert fast.utilisation == pytest.approx(0.5)
    assert fast.run_cost == pytest.approx(10 * 0.1 / 3600 * 4)
    assert "17.0 GiB of the device's 16.0 GiB" in str(large.reason)


def test_a_sweep_gives_every_candidate_its_own_plan(monkeypatch):
    def plan(experiment, topology, **options) -> Plan:
        assert topology is V5E and options == {"cache": None, "price": 2.0}
        return planned(experiment.mesh.fsdp, 0.1)

    monkeypatch.setattr(sweep, "make_plan", plan)
    listed = candidates(tiny_experiment.config(), V5E, (8,))
    done = list(run_sweep(listed, V5E, workers=3, cache=None, price=2.0))
    assert {item.name for item, _ in done} == {item.name for item in listed}
    for first, result in done:
        assert result.needed == first.mesh[1] * 2**30


def test_a_roofline_is_drawn_where_there_are_peaks(tmp_path):
    file = tmp_path / "roofline.png"
    plot_roofline([("a", planned(1, 0.1)), ("b", planned(1, 0.2))], file)
    assert file.read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(UserError, match="has no bound to draw"):
        plot_roofline([("a", planned(1, 0.1, failed="no room"))], file)


@pytest.mark.sweep
def test_the_command_sweeps_two_cpus(tmp_path, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=0")
    file = tmp_path / "sweep.json"
    code, said, wrong = recurjax(
        *("plan", tiny_experiment.__file__, "--topology", "cpu:2", "--sweep"),
        *("--json", file, "--cache", tmp_path / "cache"),
        *("--training.length", 4, "--model.stack.layers", 1),
    )
    assert code == 0, wrong
    rows = json.loads(file.read_text())
    assert len(rows) == 9 and all(row["fits"] for row in rows)
    assert wrong.count("fits") == 9
    assert "(9 fit the device)" in said
