"""A few hostile bodies, in two pieces: refused, in short turns of the event loop."""

import json
import random

import pytest

from tests.trials import hostile_bodies
from tests.trials.hostile_bodies import Answer, Options, main

pytest.importorskip("starlette", reason="needs recurjax[serve]")


def test_bodies_are_refused_and_a_stopped_run_goes_on(tmp_path, monkeypatch, capsys):
    draw = hostile_bodies.body

    def small(number: random.Random):
        path, kind, data = draw(number)
        return path, kind, data[: 2**16]

    monkeypatch.setattr(hostile_bodies, "body", small)
    # What a busy machine takes is no property of the server.
    monkeypatch.setattr(hostile_bodies, "_TURN_MS", float("inf"))
    into = tmp_path / "bodies.json"
    assert main(Options(bodies=30, into=into, most=10)) == 0
    assert main(Options(bodies=30, into=into)) == 0
    assert "30 bodies; memory grew" in capsys.readouterr().out
    answers = [Answer(*row) for row in json.loads(into.read_text()).values()]
    assert len(answers) == 30
    assert all(answer.status in (200, 400, 404, 413) for answer in answers)
