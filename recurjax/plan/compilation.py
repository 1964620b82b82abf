"""Has a program compiled by a child process that can reach the target's compiler.

The plugins of TPUs and GPUs disturb a process that runs on the CPU (noise at every
start), so they live in a folder apart (`compilers.places`) and only children see them.
"""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from recurjax.config_json import to_json
from recurjax.errors import UserError
from recurjax.experiment import Experiment
from recurjax.plan.compilers import find_compilers, places
from recurjax.plan.programs import ProgramName
from recurjax.plan.topology import Topology

ROOT = Path(__file__).parents[2]
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
      program: of the experiment.
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
    """Raises UserError when the target's compiler is not here."""
    plugin = _PLUGINS.get(topology.platform)
    if plugin is not None and find_compilers(plugin) is None:
        looked = ", ".join(map(str, places()))
        raise UserError(
            f"planning for {topology.name} needs its compiler, which is not in "
            f"{looked}: run `recurjax compilers` (in a clone: make compilers)"
        )


def environment(topology: Topology) -> dict[str, str]:
    """Returns the environment of a process that may load the target's compiler."""
    paths = [str(ROOT)]
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
