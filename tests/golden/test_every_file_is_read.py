"""Every file of a built variant's folder is met; what no test knows is a failure."""

import json
import os
import shutil
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import numpy as np
import pytest

from tests.golden import latent_layout
from tests.golden.cases import BESIDE, FOLDERS, FORMATS, GOLDEN, OWN, load, own_case
from tests.source_tree import ROOT
from tests.variants.rat import authors
from tests.variants.recurrent_transformer.golden_cases import meta_of
from tests.variants.recurrent_transformer.test_golden import TILES


def test_every_file_is_of_one_format():
    files = [
        path.relative_to(GOLDEN).as_posix()
        for folder in sorted(FOLDERS)
        for path in (GOLDEN / folder).rglob("*")
        if path.is_file()
    ]
    for file in files:
        matches = [pattern for pattern in FORMATS if fnmatch(file, pattern)]
        if not matches:
            matches = [beside for beside in BESIDE if fnmatch(file, beside)]
        assert len(matches) == 1, (
            f"{file} is of the formats {matches}: name one in FORMATS"
        )


@pytest.mark.parametrize(
    ("one", "key", "read"),
    [
        ("recurrent_transformer/rt_block_*.npz", "meta_json", meta_of),
        ("rat/rat_*.npz", "meta", authors.meta_of),
        (
            "latent_recurrent_transformer/*_baseline_*.npz",
            "config",
            latent_layout.settings,
        ),
    ],
)
def test_an_unknown_switch_fails_if_it_is_on(one, key, read):
    case = load(own_case(one))
    switches = json.loads(str(case[key]))
    assert read(case) == switches
    for value in (None, False):
        read(case | {key: np.asarray(json.dumps(switches | {"sinks": value}))})
    with pytest.raises(AssertionError, match=r"unknown switches: \['sinks'\]"):
        read(case | {key: np.asarray(json.dumps(switches | {"sinks": 4}))})


@pytest.mark.slow  # A process that imports a dozen of test files.
def test_a_dropped_file_is_met_and_by_every_schedule(tmp_path):
    """With other names than the repository's files have, and more of them."""
    dropped = {pattern: [drop(pattern, tmp_path, "dropped")] for pattern in FORMATS}
    blocks = "recurrent_transformer/rt_block_*.npz"
    dropped[blocks] += [drop(blocks, tmp_path, f"more{n}") for n in range(5)]
    readers = [
        str(file.relative_to(ROOT))
        for file in sorted((ROOT / "tests").rglob("test_*.py"))
        if "golden_cases" in file.read_text() or "hf_directories" in file.read_text()
    ]
    child = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "--collect-only", "-q"),
            *("-p", "no:cacheprovider", *readers),
        ],
        cwd=ROOT,
        env={**os.environ, "RECURJAX_GOLDEN": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode == 0, child.stdout[-3000:] + child.stderr[-3000:]
    met = child.stdout.splitlines()
    for first, names in dropped.items():
        for name in names:
            ids = [line.partition("[")[2] for line in met if name in line]
            assert ids, f"no test reads {name}, a file of {first}"
            if "/rt_" in first:
                for schedule in TILES:
                    assert any(f"-{schedule}-" in id for id in ids), (name, schedule)


def drop(one: str, folder: Path, word: str) -> str:
    """Copies a case of the format under another name; returns the case's id."""
    # No attention layer is among the files; its format is the window's.
    source = own_case(one.replace("attention*", "swa*"))
    beside = [own for own, of in BESIDE.items() if of == one]
    if source.name == "config.json":
        shutil.copytree(source.parent, folder / "hf" / word)
        return f"hf/{word}"
    stem = "attention" if "attention" in one else source.stem
    to = folder / source.relative_to(OWN).with_name(f"{stem}_{word}{source.suffix}")
    to.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(source, to)
    for other in beside:
        [file] = OWN.glob(other)
        shutil.copy(file, to.with_name(f"{file.stem}_{word}{file.suffix}"))
    return f"{to.parent.name}/{to.stem}"
