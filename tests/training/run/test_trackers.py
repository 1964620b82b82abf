"""Trackers, without their services: what they receive, and under which id."""

import dataclasses
import json
import subprocess
import sys
import types

import pytest

from recurjax.cli.main import main
from recurjax.config_json import to_json
from recurjax.errors import UserError
from recurjax.training.run import Description, MetricsWriter, RunDirectory
from recurjax.training.run import metrics as metrics_module
from recurjax.training.run.trackers import git_state, note_start, open_trackers
from tests.training.tiny_experiment import changed, config

SETTINGS = {
    "wandb_project": "papers",
    "wandb_group": "rat",
    "wandb_tags": ("a", "b"),
    "mlflow_experiment": "papers",
}


class Calls(list):
    def __getattr__(self, name):
        def call(*args, **kwargs):
            self.append((name, args, kwargs))
            info = types.SimpleNamespace(run_id=f"run{len(self)}")
            return types.SimpleNamespace(
                info=info,
                log=lambda row, step: self.append(("log", row, step)),
                finish=lambda: self.append(("finish",)),
            )

        return call

    def named(self, name):
        return [call for call in self if call[0] == name]


@pytest.fixture
def services(monkeypatch):
    both = {name: Calls() for name in ("wandb", "mlflow")}
    for name, calls in both.items():
        monkeypatch.setitem(sys.modules, name, calls)
    return both


def describe(folder, name="tiny"):
    start = {"commit": "c0ffee", "dirty": True, "time": "now"}
    experiment = changed(config(), training=SETTINGS)
    return experiment.training, Description(
        name=name,
        config=to_json(experiment),
        start=start,
        ids=folder / "trackers.json",
    )


def test_trackers_get_config_code_and_rows(services, tmp_path):
    training, description = describe(tmp_path)
    run = RunDirectory(tmp_path)
    writer = MetricsWriter(
        run.metrics,
        run.tensorboard,
        resumed_from=0,
        description=description,
        trackers=open_trackers(training, description),
    )
    writer.write(3, "train", {"loss": 2.0, "perplexity": float("nan")})
    writer.close()
    (_, _, message), log, finish = services["wandb"]
    assert message["project"] == "papers" and message["group"] == "rat"
    assert message["tags"] == ["a", "b"] and message["name"] == "tiny"
    assert message["config"]["training"]["batch"] == 8
    assert message["config"]["start"] == {
        "commit": "c0ffee",
        "dirty": True,
        "time": "now",
    }
    assert log[1]["train/loss"] == 2.0 and log[2] == 3 and finish == ("finish",)
    mlflow = services["mlflow"]
    assert mlflow.named("set_experiment")[0][1] == ("papers",)
    assert mlflow.named("set_tags")[0][1][0]["dirty"] == "True"
    assert mlflow.named("log_dict")[0][1] == (description.config, "config.json")
    assert mlflow.named("log_metrics")[0][1:] == (({"train/loss": 2.0},), {"step": 3})
    assert mlflow[-1][0] == "end_run"


def test_a_service_that_is_gone_is_left_out_and_the_run_goes_on(tmp_path):
    class Gone:
        def write(self, step, metrics):
            raise ConnectionError("no route")

        def close(self):
            raise AssertionError("it was left out")

    run, said, gone = RunDirectory(tmp_path), [], Gone()
    writer = MetricsWriter(
        run.metrics, run.tensorboard, resumed_from=0, trackers=[gone], say=said.append
    )
    for step in (1, 2):
        writer.write(step, "train", {"loss": 1.0})
    writer.close()
    assert said == [
        "step 1: Gone takes no more rows, so the run continues without it: no route"
    ]
    assert len(run.metrics.read_text().splitlines()) == 2


def test_a_service_that_refuses_is_told(services, tmp_path):
    def refuse(**_):
        raise RuntimeError("quota\nexceeded")

    services["wandb"].init = refuse
    with pytest.raises(UserError, match="Wandb refuses the run: quota exceeded"):
        open_trackers(*describe(tmp_path))


def test_a_resumed_run_keeps_its_ids_and_another_gets_its_own(services, tmp_path):
    for folder in ("one", "one", "two"):
        (tmp_path / folder).mkdir(exist_ok=True)
        open_trackers(*describe(tmp_path / folder))
    first, again, other = (call[2]["id"] for call in services["wandb"].named("init"))
    assert first == again != other
    starts = [call[2] for call in services["mlflow"].named("start_run")]
    known = json.loads((tmp_path / "one" / "trackers.json").read_text())
    assert known["wandb"] == first
    new, resumed, another = starts
    assert new == another == {"run_name": "tiny"}
    assert resumed == {"run_id": known["mlflow"]}


def test_a_damaged_file_of_ids_is_told(services, tmp_path):
    (tmp_path / "trackers.json").write_text("{")
    with pytest.raises(UserError, match=r"trackers.json is not valid JSON"):
        open_trackers(*describe(tmp_path))


@pytest.mark.parametrize("service", ["wandb", "mlflow"])
def test_a_missing_package_names_its_extra(service, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, service, None)
    training, description = describe(tmp_path)
    off = {"wandb_project": None, "mlflow_experiment": None}
    off[f"{service}_{'project' if service == 'wandb' else 'experiment'}"] = "p"
    with pytest.raises(UserError, match=rf"pip install 'recurjax\[{service}\]'"):
        open_trackers(dataclasses.replace(training, **off), description)


def test_tensorboard_has_the_config_as_text(tmp_path):
    _, description = describe(tmp_path)
    run = RunDirectory(tmp_path)
    writer = MetricsWriter(
        run.metrics, run.tensorboard, resumed_from=0, description=description
    )
    writer.close()
    (events,) = run.tensorboard.iterdir()
    data = events.read_bytes()
    assert b"config/text_summary" in data and b'"commit": "c0ffee"' in data


def test_the_state_of_git_is_recorded(tmp_path):
    def git(*words):
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", "-C", tmp_path, *identity, *words], check=True)

    assert git_state(tmp_path) == (None, None)
    git("init", "-q")
    (tmp_path / "file").write_text("one")
    git("add", "file")
    git("commit", "-qm", "first")
    commit, dirty = git_state(tmp_path)
    assert commit is not None and len(commit) == 40 and dirty is False
    (tmp_path / "untracked").write_text("")
    assert git_state(tmp_path) == (commit, False)
    (tmp_path / "file").write_text("two")
    assert git_state(tmp_path) == (commit, True)


def test_every_start_is_a_row(tmp_path):
    for step in (0, 9):
        row = note_start(tmp_path / "starts.jsonl", step=step)
    lines = (tmp_path / "starts.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 9]
    assert row["devices"].endswith("x cpu") and row["processes"] == 1


class Device:
    def __init__(self, **stats):
        self.memory_stats = lambda: stats or None


@pytest.mark.parametrize(
    ("devices", "told"),
    [
        ([Device()], {}),
        (
            [
                Device(bytes_in_use=5, peak_bytes_in_use=9),
                Device(bytes_in_use=7, peak_bytes_in_use=8),
            ],
            {"device_memory_bytes": 7.0, "device_memory_peak_bytes": 9.0},
        ),
        ([Device(bytes_in_use=5), Device()], {}),
    ],
)
def test_memory_of_the_fullest_device_is_a_metric(devices, told, monkeypatch):
    monkeypatch.setattr(metrics_module.jax, "local_devices", lambda: devices)
    assert metrics_module.device_memory() == told


@pytest.mark.slow
def test_wandb_itself_goes_on_offline(tmp_path, monkeypatch, capsys):
    pytest.importorskip("wandb", reason="the wandb extra is not installed")
    from tests.training import tiny_experiment

    monkeypatch.setenv("WANDB_MODE", "offline")
    words = ["train", tiny_experiment.__file__, "--runs", str(tmp_path)]
    assert main([*words, "--training.wandb-project", "papers"]) == 0
    result = list((tmp_path / "tiny" / "wandb").glob("offline-run-*"))
    known = json.loads((tmp_path / "tiny" / "trackers.json").read_text())["wandb"]
    assert len(result) == 1 and result[0].name.endswith(known)
