"""Every `Experiment` that experiments/ can make is the one that was recorded.

`experiments.json` holds a SHA-256 of each one's JSON by folder and run directory. A
commit that changes an experiment on purpose rewrites the file and says why:

    python -m tests.experiments.test_experiments_stay_equal

A field that a config class has got since the recording counts once it is set to other
than its default, so that new switches leave old runs alone; a changed default does not.
The file names the fields of that time for this.
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from recurjax.config_json import from_json, to_json
from recurjax.experiment import Experiment
from recurjax.run_table import load_experiment, load_runs

ROOT = Path(__file__).parents[2] / "experiments"
RECORD = Path(__file__).with_name("experiments.json")


def every_experiment() -> Iterator[tuple[str, Experiment]]:
    """Yields (folder/name, experiment): of each row, and of files with one run."""
    for file in sorted(ROOT.rglob("*.py")):
        text = file.read_text()
        if "\ndef config()" in text:
            yield _named(file.parent, load_experiment(file))
        elif "\nRUNS" in text:
            for name, run in load_runs(file).items():
                yield _named(file.parent, run.make(name))


def _named(folder: Path, experiment: Experiment) -> tuple[str, Experiment]:
    return (folder.relative_to(ROOT) / experiment.name).as_posix(), experiment


def fingerprint(experiment: Experiment, known: dict[str, list[str]]) -> str:
    """Hashes an experiment's JSON, less unknown fields that are at their default."""
    message = json.dumps(_known_part(experiment, known), sort_keys=True)
    return hashlib.sha256(message.encode()).hexdigest()


def _known_part(value: Any, known: dict[str, list[str]]) -> Any:
    if isinstance(value, tuple):
        return [_known_part(item, known) for item in value]
    if not dataclasses.is_dataclass(value):
        return to_json(value)
    kind = type(value).__name__
    kept = {
        field.name: _known_part(getattr(value, field.name), known)
        for field in dataclasses.fields(value)
        if field.name in known.get(kind, ())
        or getattr(value, field.name) != _default(field)
    }
    return {"type": kind, **kept}


def _default(field: dataclasses.Field) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def fields_met(value: Any) -> dict[str, list[str]]:
    """Returns the field names of every config class inside a config."""
    if isinstance(value, tuple):
        return {k: v for item in value for k, v in fields_met(item).items()}
    if not dataclasses.is_dataclass(value):
        return {}
    names = [field.name for field in dataclasses.fields(value)]
    met = {type(value).__name__: sorted(names)}
    for name in names:
        met |= fields_met(getattr(value, name))
    return met


def test_every_experiment_is_the_recorded_one():
    record = json.loads(RECORD.read_text())
    result = {}
    for name, experiment in every_experiment():
        assert from_json(Experiment, json.loads(json.dumps(to_json(experiment)))) == (
            experiment
        )
        assert name not in result, f"two runs would share the directory of {name}"
        result[name] = fingerprint(experiment, record["fields"])
    changed = {n for n in result if record["sha256"].get(n) != result[n]}
    gone = set(record["sha256"]) - set(result)
    assert not changed and not gone, (
        f"changed or new: {sorted(changed)}; gone: {sorted(gone)}; if that is meant, "
        f"run python -m {__spec__.name} and say why"
    )


def test_a_changed_value_and_a_changed_default_are_seen():
    @dataclasses.dataclass(frozen=True)
    class One:
        rate: float
        old: int = 1
        new: int = 2

    known: dict[str, list[str]] = {"One": ["old", "rate"]}
    plain = _known_part(One(rate=0.1), known)
    assert plain == {"type": "One", "rate": 0.1, "old": 1}
    assert _known_part(One(rate=0.1, new=3), known) == plain | {"new": 3}
    assert _known_part(One(rate=0.1, old=7), known) == plain | {"old": 7}


def main() -> None:
    """Records every experiment as it is now."""
    by_name = dict(every_experiment())
    known = {k: v for item in by_name.values() for k, v in fields_met(item).items()}
    record = {
        "fields": dict(sorted(known.items())),
        "sha256": {name: fingerprint(by_name[name], known) for name in sorted(by_name)},
    }
    lines = [
        f" {json.dumps(part)}: {{\n"
        + ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in rows.items())
        + "\n }"
        for part, rows in record.items()
    ]
    RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
