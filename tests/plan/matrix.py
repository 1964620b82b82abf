"""The compile matrix: small programs for absent devices, and their golden figures.

    python -m tests.plan.matrix           compiles all, shows what differs from the file
    python -m tests.plan.matrix --renew   and writes the new figures

`golden_figures.json` has a line for each program: bytes of temporaries on a device, and
how often each kernel of ours runs in a call. They belong to the versions in the file;
with others the bytes may move within `TOLERANCE`, the kernels may not.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from recurjax.plan.compilation import compile_elsewhere
from recurjax.plan.programs import ProgramName
from recurjax.plan.topology import parse_topology
from recurjax.sharding import MeshConfig
from tests.plan.small_experiments import VARIANTS, experiment

FILE = Path(__file__).parent / "golden_figures.json"
TOLERANCE = 0.25
"""Share by which bytes of temporaries may differ from the file's."""
ONE = MeshConfig(data=1)
CUT = MeshConfig(data=1, fsdp=2, tensor=2)


class Case(NamedTuple):
    """A program to compile."""

    variant: str
    program: ProgramName
    topology: str

    @property
    def name(self) -> str:
        """Its key in the file."""
        return f"{self.variant} {self.program} {self.topology}"

    @property
    def mesh(self) -> MeshConfig:
        """One GPU, or four TPUs that cut rows, parameters and heads."""
        return ONE if self.topology == "h100" else CUT


CASES = [
    Case(variant, program, topology)
    for topology in ("h100", "v5e:2x2", "v6e:2x2")
    for variant in VARIANTS
    for program in ("train", "decode")
]


def compile_case(case: Case) -> dict[str, Any]:
    """Compiles a case and returns the answer of `compile_elsewhere`."""
    run = replace(experiment(case.variant), mesh=case.mesh)
    options = {"rows": 8, "length": 128} if case.program == "decode" else {}
    topology = parse_topology(case.topology)
    return compile_elsewhere(run, topology, case.program, **options)


def figures(answer: dict[str, Any]) -> dict[str, Any]:
    """Returns what the file keeps of an answer."""
    if "failed" in answer:
        raise ValueError(f"the program does not compile: {answer['failed']}")
    kernels = answer["traffic"]["kernels"]
    ours = {k: n for k, n in sorted(kernels.items()) if is_ours(k)}
    return {"temporaries": answer["memory"]["temporaries"], "kernels": ours}


def is_ours(kernel: str) -> bool:
    """Whether a custom call is a kernel of this repository."""
    return "kernel" in kernel or kernel.startswith("chunk_attention")


def golden() -> dict[str, dict[str, Any]]:
    """Reads the file."""
    return json.loads(FILE.read_text())["programs"] if FILE.is_file() else {}


def differences(case: Case, got: dict[str, Any]) -> list[str]:
    """Lists what differs from the file beyond the tolerance."""
    want = golden().get(case.name)
    if want is None:
        return [f"{case.name} is not in {FILE.name}: python -m tests.plan.matrix"]
    found = []
    size, before = got["temporaries"], want["temporaries"]
    if abs(size - before) > TOLERANCE * before:
        found.append(f"{case.name}: {size:,} bytes of temporaries, was {before:,}")
    if got["kernels"] != want["kernels"]:
        found.append(f"{case.name}: kernels {got['kernels']}, was {want['kernels']}")
    return found


def main() -> None:
    """Compiles everything, prints differences, and renews the file if asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--renew", action="store_true")
    parser.add_argument("--only", default="", help="part of a case's name")
    options = parser.parse_args()
    programs = golden()
    versions: dict[str, str] = {}
    for case in CASES:
        if options.only not in case.name:
            continue
        answer = compile_case(case)
        try:
            got = figures(answer)
        except ValueError as error:
            print(f"{case.name}: {error}", flush=True)
            continue
        versions = answer["versions"]
        lines = differences(case, got)
        print("\n".join(lines) or f"{case.name}: as before", flush=True)
        programs[case.name] = got
        if options.renew:
            _write(programs, versions)


def _write(programs: dict[str, dict[str, Any]], versions: dict[str, str]) -> None:
    rows = ",\n".join(
        f"    {json.dumps(case.name)}: {json.dumps(programs[case.name])}"
        for case in CASES
        if case.name in programs
    )
    head = f'{{\n  "versions": {json.dumps(versions)},\n  "programs": {{\n'
    FILE.write_text(f"{head}{rows}\n  }}\n}}\n")


if __name__ == "__main__":
    main()
