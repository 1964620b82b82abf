"""Where the TPU and CUDA compilers lie, and fetching them.

They are the plugins of jax, 1.2 GB on disk, in a folder apart from the environment:
installed into it they would disturb every start on a CPU.
"""

import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from recurjax.errors import UserError
from recurjax.files.whole import new_folder
from recurjax.machine.caches import user_cache

VARIABLE = "RECURJAX_COMPILERS"
_ROOT = Path(__file__).parents[2]
_NAMES = ("libtpu", "jax-cuda12-plugin", "jax-cuda12-pjrt")


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


def wanted(constraints: Path | None = None) -> list[Requirement]:
    """Lists what goes with the jax that is installed.

    Args:
      constraints: a file of pins, as pip reads them, which narrow it.

    Raises:
      UserError: this jax names no compilers, or there is no such file.
    """
    # jax' own metadata says which versions go with it; "cuda12-local" is the plugin
    # without CUDA's libraries, which a compiler does not need.
    asked = {
        requirement.name: requirement
        for extra in ("tpu", "cuda12-local")
        for requirement in map(Requirement, metadata.requires("jax") or ())
        if requirement.marker and requirement.marker.evaluate({"extra": extra})
    }
    try:
        plugin = asked["jax-cuda12-plugin"]
        # The plugin asks for a pjrt of its own version, but is not installed to say so.
        pjrt = Requirement(f"jax-cuda12-pjrt{plugin.specifier}")
        found = [asked["libtpu"], plugin, pjrt]
    except KeyError as error:
        raise UserError(
            f"jax {metadata.version('jax')} asks for no {error.args[0]}: install a jax "
            "that recurjax supports"
        ) from error
    pins = {} if constraints is None else _pins(constraints)
    return [
        Requirement(f"{one.name}{one.specifier & pins.get(one.name, SpecifierSet())}")
        for one in found
    ]


def are_there(folder: Path, requirements: list[Requirement]) -> bool:
    """Whether a folder holds all of them, in versions that serve."""
    have = {
        # Packages write their names with either sign.
        one.metadata["Name"].replace("_", "-"): one.version
        for one in metadata.distributions(path=[str(folder)])
    }
    return all(
        one.name in have and have[one.name] in one.specifier for one in requirements
    )


def fetch(folder: Path, requirements: list[Requirement]) -> None:
    """Installs them into a folder, which then takes the place of what was there.

    Raises:
      UserError: pip is not here, or could not.
    """
    folder = folder.expanduser()
    # Without dependencies: jax itself must not come a second time.
    words = ["--target", "", "--no-deps", *map(str, requirements)]
    pip = [sys.executable, "-m", "pip", "install", "--quiet"]
    pip.append("--disable-pip-version-check")
    ahead = folder.absolute().with_name(f".{folder.name}.new")
    shutil.rmtree(ahead, ignore_errors=True)
    with new_folder(ahead) as aside:
        words[1] = str(aside)
        done = subprocess.run(
            [*pip, *words], capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            last = (done.stderr.strip().splitlines() or ["pip said nothing"])[-1]
            raise UserError(
                f"the compilers could not be fetched: {last}; with another installer, "
                f"install {' '.join(map(str, requirements))} into {folder}, without "
                "their dependencies"
            )
    # The old folder goes only now, when the new one is whole.
    shutil.rmtree(folder, ignore_errors=True)
    ahead.rename(folder)


def _pins(file: Path) -> dict[str, SpecifierSet]:
    if not file.is_file():
        raise UserError(f"no constraints file at {file}")
    lines = (line.strip() for line in file.read_text().splitlines())
    # Options of pip and comments are no requirements.
    found = [Requirement(line) for line in lines if line and line[0] not in "#-"]
    return {
        pin.name: pin.specifier
        for pin in found
        if pin.marker is None or pin.marker.evaluate()
    }
