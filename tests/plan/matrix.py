"""The compile matrix: small programs for absent devices, and their golden figures.

    python -m tests.plan.matrix           compiles all, shows what differs from the file
    python -m tests.plan.matrix --renew   and writes the new figures

`golden_figures.json` has a line for each program: bytes of temporaries on a device, and
how often each kernel of ours runs in a call. They belong to the versions in the file;
with others the bytes may move within `TOLERANCE`, the kernels may not.
"""

import argparse
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from recurjax.config_json import to_json
from recurjax.plan.child import respond
from recurjax.plan.programs import ProgramName
from recurjax.sharding import MeshConfig
from tests.absent_compilers import ask
from tests.plan.small_experiments import VARIANTS, experiment

FILE = Path(__file__).parent / "golden_figures.json"
TOLERANCE = 0.25
"""Share by which bytes of temporaries may differ from the file's."""
ONE = MeshConfig(data=1)
ROWS_CUT = MeshConfig(data=1, fsdp=4)
CUT = MeshConfig(data=1, fsdp=2, tensor=2)


class Case(NamedTuple):
    """A program to compile."""

    variant: str
    program: ProgramName
    topology: str
    dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        """Its key in the file."""
        wide = "" if self.dtype == "bfloat16" else f" {self.dtype}"
        return f"{self.variant} {self.program} {self.topology}{wide}"

    @property
    def mesh(self) -> MeshConfig:
        """One GPU, or four TPUs that cut rows, parameters and heads."""
        if self.topology == "h100":
            return ONE
        # A tensor axis cuts no kernel of the Recurrent Transformer.
        return ROWS_CUT if self.variant == "recurrent_transformer" else CUT


CASES = [
    Case(variant, program, topology, dtype)
    for topology in ("h100", "v5e:2x2", "v6e:2x2")
    for dtype in ("bfloat16", "float32")
    for variant in VARIANTS
    for program in ("train", "decode")
    # Kernels have code of their own for float32 in training: the wider blocks.
    if dtype == "bfloat16"
    or (program, topology) == ("train", "h100")
    and variant in ("rat", "recurrent_transformer")
]


def request(case: Case) -> dict[str, Any]:
    """Returns the compiling process' request for a case."""
    run = experiment(case.variant, case.dtype)
    decode = {"rows": 8, "length": 128} if case.program == "decode" else {}
    return {
        "experiment": to_json(replace(run, mesh=case.mesh)),
        "topology": case.topology,
        "program": case.program,
        **decode,
    }


def compile_cases(cases: Iterable[Case]) -> Iterator[tuple[Case, dict[str, Any]]]:
    """Compiles cases, those of a topology in one process, and yields the answers."""
    for case in cases:
        yield case, ask(case.topology, "tests.plan.matrix:answer", request(case))


def answer(target: str, wanted: dict[str, Any]) -> dict[str, Any]:
    """Compiles what a request wants, in the target's process."""
    before = _processor_seconds()
    message = respond(wanted)
    return message | {"processor_seconds": _processor_seconds() - before}


def _processor_seconds() -> float:
    """Returns what this process and those it started took, whatever else ran."""
    times = os.times()
    return sum(times[:4])


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
    matches = []
    size, before = got["temporaries"], want["temporaries"]
    if abs(size - before) > TOLERANCE * before:
        matches.append(f"{case.name}: {size:,} bytes of temporaries, was {before:,}")
    if got["kernels"] != want["kernels"]:
        matches.append(f"{case.name}: kernels {got['kernels']}, was {want['kernels']}")
    return matches


def main() -> None:
    """Compiles everything, prints differences, and updates the file on request."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--renew", action="store_true")
    parser.add_argument("--only", default="", help="part of a case's name")
    options = parser.parse_args()
    programs = golden()
    for case, result in compile_cases(c for c in CASES if options.only in c.name):
        try:
            got = figures(result)
        except ValueError as error:
            print(f"{case.name}: {error}", flush=True)
            continue
        spent = result["processor_seconds"]
        lines = differences(case, got) or [f"{case.name}: as before"]
        print("\n".join(lines), f"({spent:.1f} s of a core)", flush=True)
        programs[case.name] = got
        if options.renew:
            _write(programs, result["versions"])


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
