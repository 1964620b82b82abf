"""What `pip install` gives: wheel and sdist, used outside the clone."""

import os
import shutil
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

from recurjax.version import VERSION
from tests.packaging.wheel import BUILD, built, copy_of_tree, run
from tests.source_tree import ROOT

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def distributions(tmp_path_factory):
    """The sdist of a copy of the tree, and the wheel that is built from the sdist."""
    return built(tmp_path_factory)[:2]


def test_both_hold_what_is_used_without_a_clone(distributions):
    sdist, wheel = distributions
    assert VERSION in sdist.name and VERSION in wheel.name
    with zipfile.ZipFile(wheel) as packed:
        names = set(packed.namelist())
        [about] = [name for name in names if name.endswith("METADATA")]
        text = packed.read(about).decode()
    ours = [p.relative_to(ROOT) for p in (ROOT / "experiments").rglob("*.py")]
    wanted = {f"recurjax_{p.as_posix()}" for p in ours if p.parent.name != "hopper"}
    assert not [name for name in names if "hopper" in name]
    wanted |= {"recurjax/py.typed", "pallas_kernels/py.typed"}
    wanted |= {"recurjax/data/text/shakespeare.txt", "recurjax_experiments/README.md"}
    wanted |= {"recurjax_experiments/launch/tpu_vm.sh"}
    for package in ("recurjax", "pallas_kernels"):
        files = (ROOT / package).rglob("*.py")
        wanted |= {file.relative_to(ROOT).as_posix() for file in files}
    assert wanted - names == set()
    assert not [n for n in names if n.startswith(("tests/", "experiments/", "build/"))]
    for line in ("Project-URL: ", "Classifier: ", "Author: ", "License-File: LICENSE"):
        assert line in text, line
    with tarfile.open(sdist) as packed:
        inside = {name.partition("/")[2] for name in packed.getnames()}
    assert {"CHANGELOG.md", "LICENSE", "experiments/rat/runs.py"} <= inside


def test_a_wheel_has_the_cpu_kernels_where_they_compile(distributions):
    with zipfile.ZipFile(distributions[1]) as packed:
        names = packed.namelist()
    kernels = [n for n in names if n.startswith("pallas_kernels/cpu/kernels.")]
    if shutil.which("g++") is None:
        pytest.skip("there is no g++")
    assert len(kernels) == 1 and kernels[0].endswith(".so")
    assert "none-any" not in distributions[1].name


def test_a_wheel_without_a_compiler_has_all_else(tmp_path_factory, tmp_path):
    tools = built(tmp_path_factory).tools
    copy_of_tree(tmp_path / "tree")
    absent = dict.fromkeys(("CC", "CXX", "LDSHARED", "LDCXXSHARED"), "no-compiler-here")
    env = {**os.environ, **absent, "PYTHONPATH": str(tools)}
    build = (sys.executable, "-c", BUILD, "build_wheel", tmp_path)
    run(*build, cwd=tmp_path / "tree", env=env)
    [wheel] = tmp_path.glob("*.whl")
    run(sys.executable, "-m", "zipfile", "-e", wheel, tmp_path / "site")
    code = (
        "import jax.numpy as jnp; from pallas_kernels import cpu;"
        "from recurjax.layers.attention import attend; q = jnp.ones((1, 80, 2, 8));"
        "print(attend(q, q, q, scale=1.0, causal=True).sum(), cpu.refusal())"
    )
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "site"), "JAX_PLATFORMS": "cpu"}
    out = run(sys.executable, "-c", code, cwd=tmp_path, env=env)
    assert out.startswith("1280.0 the C++ kernels are not built")


def test_the_registry_would_take_both(distributions):
    pytest.importorskip("twine", reason="twine is not installed: pip install twine")
    done = run(sys.executable, "-m", "twine", "check", "--strict", *distributions)
    assert done.count("PASSED") == 2


def test_a_fresh_environment_trains_generates_evaluates_and_plans(
    distributions, tmp_path
):
    environment, work = tmp_path / "environment", tmp_path / "work"
    work.mkdir()
    run(sys.executable, "-m", "venv", "--without-pip", environment)
    python = environment / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet")
    run(*pip, "--no-deps", "--no-index", distributions[1])
    # The dependencies are the suite's. A line of a .pth adds a folder and reads none of
    # the .pth files in it, so that the suite's own editable recurjax stays out.
    [site] = (environment / "lib").glob("python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    recurjax = environment / "bin" / "recurjax"
    plain = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    here = {"cwd": work, "env": {**plain, "JAX_PLATFORMS": "cpu"}}

    where = run(python, "-c", "import recurjax; print(recurjax.__file__)", **here)
    assert Path(where.strip()).is_relative_to(site)
    assert run(recurjax, "--version", **here) == f"recurjax {VERSION}\n"
    assert " Quickstart: a small" in run(recurjax, "experiments", **here)
    run(recurjax, "new", "mine", "--from", "rat:shakespeare_rat16", **here)
    assert (work / "mine.py").is_file()
    # A small layer, as what is tried is the package and not the model.
    small = ("--model.stack.layers", 1, "--model.stack.width", 32)
    small += ("--model.stack.heads", 2, "--model.stack.key-heads", 2)
    short = ("--training.steps", 20, "--schedule.warmup-steps", 5)
    short += ("--evaluation.batches", 4, "--evaluation.sample-tokens", 20)
    out = run(recurjax, "train", "quickstart", *small, *short, **here)
    assert "finished at step 20: runs/quickstart" in out
    words = ("--prompt", "HAMLET", "--max-new-tokens", 8)
    assert run(recurjax, "generate", "runs/quickstart", *words, **here)
    (work / "my.txt").write_text("To be, or not to be, that is the question.\n" * 20)
    out = run(recurjax, "evaluate", "runs/quickstart", "--text", "my.txt", **here)
    assert "bits_per_byte" in out
    words = ("--topology", "cpu", *small)
    assert "FLOPs" in run(recurjax, "plan", "quickstart", *words, **here)
