"""What a user has without a clone: names of experiments, copies, versions, doctor."""

import json
import re
import subprocess
import sys
import tomllib
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement

import recurjax as package
from recurjax.cli import doctor
from recurjax.cli.experiments.new import source_of
from recurjax.errors import UserError
from recurjax.experiment import (
    FieldChange,
    brought_up_to_date,
    read_experiment,
    write_experiment,
)
from recurjax.plan import compilers
from recurjax.run_table import (
    experiments_folder,
    load_experiment,
    load_runs,
    shipped_experiments,
)
from recurjax.version import VERSION
from tests.cli.commands import assert_refused, recurjax
from tests.training.tiny_experiment import config


def test_experiments_have_names():
    folder = experiments_folder()
    assert load_experiment("quickstart") == load_experiment(folder / "quickstart.py")
    row = "rat:fineweb_4k_rat16"
    assert load_experiment(row).name == "rat_fineweb_4k_rat16"
    with pytest.raises(UserError, match=r"runs.py has \d+ runs: name one"):
        load_experiment("rat")
    code, out, _ = recurjax("experiments")
    assert code == 0
    listed = dict(re.findall(r"^(\w+)  +(\S.*)$", out, re.MULTILINE))
    assert listed.keys() == shipped_experiments().keys() >= {"quickstart", "rat"}
    assert listed["quickstart"].startswith("Quickstart: a small byte-level")
    assert listed["rat"].startswith("RAT: Bridging RNN Efficiency and Attention")
    assert re.search(r"^ +\d+ runs, such as rat:fineweb_4k_rnn$", out, re.MULTILINE)
    _, rows, _ = recurjax("experiments", "rat")
    assert re.search(rf"{row} +Table 1: perplexity 7.67  \(1.299B parameters, ", rows)
    assert rows.count("\nrat:") == len(load_runs(folder / "rat" / "runs.py"))


def test_listing_experiments_imports_no_jax():
    lines = ["import sys", "from recurjax.cli.main import main"]
    lines += ["main(['experiments'])", "main(['experiments', 'rat'])"]
    lines += ["sys.exit('jax' in sys.modules)"]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], stdout=subprocess.DEVNULL, check=False
    )
    assert done.returncode == 0


def test_a_new_file_has_the_settings_and_a_name_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, _ = recurjax("new", "mine", "--from", "quickstart")
    assert (code, out) == (0, "recurjax train mine.py\n")
    assert load_experiment("mine.py") == replace(
        load_experiment("quickstart"), name="mine"
    )
    assert len(Path("mine.py").read_text().splitlines()) < 50
    _, out, _ = recurjax("new", "row.py", "--from=rat:shakespeare_rat16")
    assert out == "recurjax train row.py\n"
    assert_refused(recurjax("new", "mine", "--from", "quickstart"), "exists already")


@pytest.mark.slow
def test_every_experiment_written_out_is_the_same_experiment():
    count = 0
    for name, file in shipped_experiments().items():
        if file.name != "runs.py":
            made = {name: load_experiment(name)}
        else:
            made = {
                f"{name}:{row}": run.make(row) for row, run in load_runs(file).items()
            }
        for origin, experiment in made.items():
            source = source_of(experiment, origin=origin)
            module: dict = {}
            exec(compile(source, origin, "exec"), module)  # noqa: S102
            assert module["config"]() == experiment
            lines = source.splitlines()[5:]  # names in the docstring may be long
            assert max(map(len, lines)) <= 88, source
            count += 1
    assert count > 300


@pytest.mark.parametrize(
    "words, message",
    [
        (("train", "quickstrat"), "no experiment quickstrat: did you mean quickstart"),
        (("train", "rat:fineweb"), "has no run fineweb"),
        (("new", "mine"), "--from is missing: recurjax new NAME --from quickstart"),
        (
            ("new", "a-b", "--from", "rat:fineweb_4k_rat16"),
            "NAME must consist of letters, digits and _",
        ),
        (("new", "no/mine", "--from", "quickstart"), "there is no directory no"),
        (("new", "mine", "--of", "rat"), "no option --of"),
        (("experiments", "rut"), "there is no experiment rut: did you mean rat"),
        (("doctor", "now"), "recurjax doctor takes no arguments, got now"),
        (("compilers", "--constraint", "no.txt"), "no constraints file at no.txt"),
    ],
)
def test_what_cannot_be_is_one_sentence(words, message):
    assert_refused(recurjax(*words), message)


def test_the_version_has_one_source():
    assert recurjax("--version")[1] == f"recurjax {VERSION}\n"
    assert package.__version__ == VERSION
    assert metadata.version("recurjax") == VERSION


def test_a_newer_config_is_refused_and_an_older_one_read(tmp_path):
    file = tmp_path / "config.json"
    write_experiment(config(), file)
    content = json.loads(file.read_text())
    assert content.pop("recurjax") == VERSION
    file.write_text(json.dumps(content))  # as before versions were written
    assert read_experiment(file) == config()
    file.write_text(json.dumps({"recurjax": "99.1", **content}))
    with pytest.raises(UserError, match="written by recurjax 99.1, and this is 0"):
        read_experiment(file)
    file.write_text(json.dumps({"recurjax": "new", **content}))
    with pytest.raises(UserError, match="names no version: 'new'"):
        read_experiment(file)


def test_a_field_that_moved_is_read_where_it_is_now(tmp_path):
    file = tmp_path / "config.json"
    changes = (
        FieldChange(version="0.0.5", type="A", field="old", to="inner.new"),
        FieldChange(version="0.0.6", type="B", field="gone", only=1),
    )

    def read(content):
        return brought_up_to_date(content, file, changes=changes)

    old = {"type": "A", "old": 3, "inner": {"type": "B", "gone": 1}}
    now = {"type": "A", "inner": {"type": "B", "new": 3}}
    assert read(old) == read({"recurjax": "0.0.4", **old}) == now
    assert old["old"] == 3  # what was given is not changed
    # A version that has the field under this name again is left alone.
    assert read({"recurjax": VERSION, "type": "C", "old": 3}) == {"type": "C", "old": 3}
    with pytest.raises(UserError, match="B.gone was 2; since version 0.0.6 only 1 can"):
        read({"type": "A", "inner": [{"type": "B", "gone": 2}]})


def test_compilers_are_looked_for_in_order(tmp_path, monkeypatch):
    named, here, cache = tmp_path / "named", tmp_path / "here", tmp_path / "cache"
    for folder in (named, here / ".compilers", cache / "recurjax" / "compilers"):
        (folder / "libtpu").mkdir(parents=True)
    monkeypatch.chdir(here)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setattr(compilers.sys, "platform", "linux")
    monkeypatch.setattr(compilers, "_ROOT", tmp_path)  # as of an installed package
    monkeypatch.setenv(compilers.VARIABLE, str(named))
    assert compilers.find_compilers("libtpu") == named
    monkeypatch.delenv(compilers.VARIABLE)
    assert compilers.find_compilers("libtpu") == here / ".compilers"
    monkeypatch.chdir(tmp_path)
    assert compilers.find_compilers("libtpu") == cache / "recurjax" / "compilers"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert compilers.find_compilers("libtpu") is None
    assert_refused(
        recurjax("plan", "quickstart", "--topology", "v5e:2x2"),
        r"is not in .*\.compilers, .*: run `recurjax compilers`",
    )


def test_compilers_go_with_jax(tmp_path):
    pins = tmp_path / "pins.txt"
    [libtpu, plugin, pjrt, triton, jax_triton] = compilers.requirements()
    pins.write_text("# pinned\nlibtpu==9.9; python_version > '3'\nlibtpu2==1\n")
    [narrowed, *_] = compilers.requirements(pins)
    assert libtpu.specifier != narrowed.specifier and "==9.9" in str(narrowed)
    assert plugin.specifier == pjrt.specifier
    assert metadata.version("jaxlib") in plugin.specifier
    assert (triton.name, jax_triton.name) == ("triton", "jax-triton")
    folder = tmp_path / "there"
    for name in ("libtpu", "jax_cuda12_plugin", "jax_cuda12_pjrt"):
        info = folder / f"{name}.dist-info"
        info.mkdir(parents=True)
        version = metadata.version("jaxlib") if "jax" in name else "9.9"
        about = f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\n"
        (info / "METADATA").write_text(f"{about}Version: {version}\n")
    assert not compilers.are_there(folder, [libtpu, plugin, pjrt])
    assert compilers.are_there(folder, [plugin, pjrt])


def test_compilers_of_known_versions_must_have_their_hashes(monkeypatch, tmp_path):
    """The compilers of `recurjax plan` are wheels that pip unpacks: those of the
    versions in `recurjax/plan/compilers.txt` must have a SHA-256 that the file names.
    """
    calls = []

    def install(words, **options):
        file = Path(words[-1])
        calls.append((words, file.read_text() if file.is_file() else ""))
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(compilers.subprocess, "run", install)
    constraints = Path(package.__file__).parents[1] / "constraints.txt"
    needed = compilers.requirements(constraints)
    compilers.fetch(tmp_path / "known", needed)
    [(words, pins)] = calls
    assert words[-3:-1] == ["--require-hashes", "--requirement"]
    assert pins.splitlines() == compilers.hashed(needed)
    assert re.fullmatch(r"(\S+==\S+( --hash=sha256:[0-9a-f]{64})+\n){5}", pins)
    # Each version that `make` pins has hashes, for all Pythons.
    known = (constraints.parent / "recurjax" / "plan" / "compilers.txt").read_text()
    for line in constraints.read_text().splitlines():
        if line.startswith(("libtpu", "jax-cuda12-p", "triton", "jax-triton")):
            assert f"\n{line.partition(';')[0].strip()} --hash=" in known
    later = [Requirement("libtpu==9.9")]
    assert compilers.hashed(later) is None
    compilers.fetch(tmp_path / "unknown", later)
    assert calls[1][0][-1] == "libtpu==9.9"


def test_compilers_without_hashes_are_named(monkeypatch, tmp_path):
    """`recurjax compilers` says when it fetches a version without a SHA-256."""
    pins = tmp_path / "pins.txt"
    pins.write_text("libtpu==9.9\n")
    calls = []
    monkeypatch.setattr(compilers, "fetch", lambda *words: calls.append(words))
    words = ("compilers", "--into", tmp_path / "new", "--constraint", pins)
    code, out, _ = recurjax(*words)
    assert code == 0 and len(calls) == 1
    assert "libtpu" in out and "of which recurjax knows no checksums into" in out


def test_doctor_says_which_backend_each_operation_takes(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret-value")
    code, out, _ = recurjax("doctor")
    assert code == 0 and "secret-value" not in out
    assert "HF_TOKEN is set" in out and f"recurjax {VERSION}, Python 3" in out
    for op in ("recurrent_prefill", "chunk_attention", "gated_scan", "selective_scan"):
        assert re.search(rf"{op}: xla\n +not triton: .+\n +not mosaic_tpu: .+\n", out)


def test_doctor_and_the_guide_know_every_extra():
    root = Path(package.__file__).parents[1]
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    guide = (root / "docs" / "running.md").read_text()
    install = guide.split("## Install")[1].split("\n## ")[0]
    for extra in extras:
        assert f"`{extra}`" in install or f"[{extra}]" in install
    # Of one feature each; a device's, the suite's and the site's are no feature.
    others = {"cuda", "cuda13", "tpu", "notebooks", "emulators", "all", "test", "docs"}
    assert set(doctor._EXTRAS.values()) == set(extras) - others
    for name, extra in doctor._EXTRAS.items():
        assert any(wanted.startswith(f"{name}>") for wanted in extras[extra])


def test_doctor_names_the_folder_that_is_told(monkeypatch, tmp_path):
    monkeypatch.setenv("RECURJAX_CACHE", str(tmp_path / "not there yet"))
    _, out, _ = recurjax("doctor")
    assert re.search(
        rf"copies: .* GB free at {re.escape(str(tmp_path))}/not there yet\n", out
    )
    monkeypatch.setenv("RECURJAX_CACHE", "")
    assert "copies: not kept, as $RECURJAX_CACHE is empty" in recurjax("doctor")[1]


def test_a_user_without_a_home_keeps_nothing(monkeypatch):
    """As in a container that runs under a number that no user has."""

    def homeless(path):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("RECURJAX_CACHE", raising=False)
    monkeypatch.setattr(Path, "expanduser", homeless)
    code, out, _ = recurjax("doctor")
    assert code == 0 and "copies: not kept, as the user has no home" in out
