"""The TPU and CUDA compilers: finds and fetches them, and compiles in a child process.

They are the plugins of jax, and Triton with jax-triton: 2.2 GB on disk. The plugins
disturb a process that runs on the CPU (noise at every start), so they live in a folder
apart from the environment and only children see them.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from recurjax.config_json import to_json
from recurjax.errors import UserError
from recurjax.experiment import Experiment
from recurjax.files.atomic import new_folder
from recurjax.machine.caches import user_cache
from recurjax.plan.programs import ProgramName
from recurjax.plan.topology import Topology

VARIABLE = "RECURJAX_COMPILERS"
_ROOT = Path(__file__).parents[2]
_TRITON = ("triton>=3.6", "jax-triton>=0.3.1,<0.4")  # as the extra `cuda` has it


def places() -> list[Path]:
    """Lists the folders that are looked at, in order.

    $RECURJAX_COMPILERS alone where it is set; else .compilers here, that of the clone
    which this package runs from, and the user's cache where there is one.
    """
    if os.environ.get(VARIABLE):
        return [Path(os.environ[VARIABLE]).expanduser()]
    beside = [_ROOT] if (_ROOT / "pyproject.toml").is_file() else []
    folders = [folder / ".compilers" for folder in (Path.cwd(), *beside)]
    if (cache := user_cache()) is not None:
        folders.append(cache / "compilers")
    return [*dict.fromkeys(folders)]


def find_compilers(plugin: str) -> Path | None:
    """Returns the first place with a plugin's package, or None."""
    return next((place for place in places() if (place / plugin).is_dir()), None)


def requirements(constraints: Path | None = None) -> list[Requirement]:
    """Lists what goes with the jax that is installed.

    Args:
      constraints: a file of pins, as pip reads them, which narrow it.

    Raises:
      UserError: this jax names no compilers, or there is no such file.
    """
    # jax' own metadata says which versions go with it; "cuda12-local" is the plugin
    # without CUDA's libraries, which a compiler does not need.
    wants = {
        requirement.name: requirement
        for extra in ("tpu", "cuda12-local")
        for requirement in map(Requirement, metadata.requires("jax") or ())
        if requirement.marker and requirement.marker.evaluate({"extra": extra})
    }
    try:
        plugin = wants["jax-cuda12-plugin"]
        # The plugin asks for a pjrt of its own version, but is not installed to say so.
        pjrt = Requirement(f"jax-cuda12-pjrt{plugin.specifier}")
        requirements = [wants["libtpu"], plugin, pjrt, *map(Requirement, _TRITON)]
    except KeyError as error:
        raise UserError(
            f"jax {metadata.version('jax')} does not require {error.args[0]}: "
            "install a jax that recurjax supports"
        ) from error
    pins = {} if constraints is None else _pins(constraints)
    any_ = SpecifierSet()
    return [
        Requirement(f"{package.name}{package.specifier & pins.get(package.name, any_)}")
        for package in requirements
    ]


def are_there(folder: Path, requirements: list[Requirement]) -> bool:
    """Whether a folder holds all of them in compatible versions."""
    have = {
        # Packages write their names with either sign.
        package.metadata["Name"].replace("_", "-"): package.version
        for package in metadata.distributions(path=[str(folder)])
    }
    return all(
        requirement.name in have and have[requirement.name] in requirement.specifier
        for requirement in requirements
    )


def hashed(requirements: list[Requirement]) -> list[str] | None:
    """Returns pins with the SHA-256 of their wheels, as pip reads them.

    None: of one of the packages no compatible version is in compilers.txt.
    """
    lines = (Path(__file__).with_suffix(".txt")).read_text().splitlines()
    pins = []
    for requirement in requirements:
        fitting = [
            line
            for line in lines
            if line.startswith(f"{requirement.name}==")
            and line.split()[0].partition("==")[2] in requirement.specifier
        ]
        if not fitting:
            return None
        pins.append(fitting[-1])  # the newest
    return pins


def fetch(folder: Path, requirements: list[Requirement]) -> None:
    """Installs them into a folder, which then takes the place of what was there.

    Wheels of the versions in compilers.txt must have the SHA-256 given there.

    Raises:
      UserError: pip is missing or failed.
    """
    folder = folder.expanduser()
    # Without dependencies: jax itself must not come a second time.
    words = ["--target", "", "--no-deps"]
    pip = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check"]
    ahead = folder.absolute().with_name(f".{folder.name}.new")
    shutil.rmtree(ahead, ignore_errors=True)
    pins = hashed(requirements)
    with new_folder(ahead) as aside, tempfile.TemporaryDirectory() as temporary:
        words[1] = str(aside)
        if pins is None:
            words += map(str, requirements)
        else:
            file = Path(temporary) / "compilers.txt"
            file.write_text("\n".join(pins) + "\n")
            words += ["--require-hashes", "--requirement", str(file)]
        # pip's own progress bars are shown; its last error becomes one sentence.
        done = subprocess.run(
            [*pip, *words], stderr=subprocess.PIPE, text=True, check=False
        )
        if done.returncode != 0:
            last = (done.stderr.strip().splitlines() or ["pip said nothing"])[-1]
            raise UserError(
                f"the compilers could not be fetched: {last}; with another installer, "
                f"install {' '.join(map(str, requirements))} into {folder}, without "
                "their dependencies"
            )
    # Remove the old folder only now that the new one is complete.
    shutil.rmtree(folder, ignore_errors=True)
    ahead.rename(folder)


def _pins(file: Path) -> dict[str, SpecifierSet]:
    if not file.is_file():
        raise UserError(f"no constraints file at {file}")
    lines = (line.strip() for line in file.read_text().splitlines())
    # Options of pip and comments are not requirements.
    pins = [Requirement(line) for line in lines if line and line[0] not in "#-"]
    return {
        pin.name: pin.specifier
        for pin in pins
        if pin.marker is None or pin.marker.evaluate()
    }


_PLUGINS = {"tpu": "libtpu", "cuda": "jax_plugins"}


def compile_elsewhere(
    experiment: Experiment,
    topology: Topology,
    program: ProgramName,
    *,
    rows: int | None = None,
    length: int | None = None,
    cache: Path | None = None,
) -> dict[str, Any]:
    """Compiles one program in a child process and returns what it found.

    Args:
      experiment: its mesh is that to plan for.
      topology: the devices.
      program: program of the experiment.
      rows, length: see `build_program`.
      cache: a folder of earlier results, by hash of program and versions.

    Raises:
      UserError: the compilers are missing, or the mesh does not fit.
      RuntimeError: the child failed otherwise; a compiler that a signal ended is an
        answer with the reason in "failed".
    """
    check_compilers(topology)
    request = {
        "experiment": to_json(experiment),
        "topology": topology.name,
        "program": program,
        "rows": rows,
        "length": length,
        "cache": None if cache is None else str(cache.absolute()),
    }
    child = subprocess.run(
        # A process of its own: a compiler that aborts takes down only this one, and
        # plugins of other platforms never enter the caller.
        [sys.executable, "-m", "recurjax.plan.child"],
        input=json.dumps(request),
        env=environment(topology),
        capture_output=True,
        text=True,
        check=False,
    )
    lines = child.stdout.splitlines()
    # Ended by a signal, but what it said before that still counts.
    if child.returncode < 0 and lines:
        return json.loads(lines[-1]) | _crash(child)
    if child.returncode != 0:
        raise RuntimeError(
            f"compiling for {topology.name} ended with {child.returncode}: "
            f"{child.stderr[-3000:]}"
        )
    answer = json.loads(lines[-1])
    if "error" in answer:
        raise UserError(answer["error"])
    return answer


def _crash(child: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """Returns the failure of a compiler that a signal ended."""
    name = signal.Signals(-child.returncode).name
    # glog's stack trace names the function at the top in this line.
    place = re.search(r"^PC: @ +\S+ +\S+ +(\S.*)$", child.stderr, re.MULTILINE)
    where = f" in {place[1].strip()}" if place else ""
    reason = (
        f"the compiler crashed on this program ({name}{where}): another mesh, batch or "
        "remat policy may compile"
    )
    if name == "SIGKILL":
        reason = (
            "the process that compiles was killed (SIGKILL), most likely for want of "
            "this machine's memory"
        )
    return {"failed": reason, "failed_by": "crash", "needed": None}


def check_compilers(topology: Topology) -> None:
    """Raises UserError if the target's compiler is missing."""
    plugin = _PLUGINS.get(topology.platform)
    if plugin is not None and find_compilers(plugin) is None:
        looked = ", ".join(map(str, places()))
        raise UserError(
            f"planning for {topology.name} needs its compiler, which is not in "
            f"{looked}: run `recurjax compilers` (in a clone: make compilers)"
        )


def environment(topology: Topology) -> dict[str, str]:
    """Returns the environment of a process that may load the target's compiler."""
    paths = [str(_ROOT)]
    plugin = _PLUGINS.get(topology.platform)
    if plugin is not None and (place := find_compilers(plugin)) is not None:
        paths.append(str(place.absolute()))
    if os.environ.get("PYTHONPATH"):
        paths.append(os.environ["PYTHONPATH"])
    # The child is a CPU process that owns a compiler: without these it would look for a
    # TPU's metadata server, or refuse a second user of libtpu.
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }
