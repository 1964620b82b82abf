"""What the TPU's compiler makes of a kernel: its bundles, loop by loop.

    JAX_PLATFORMS=cpu PYTHONPATH=.compilers:. python -m tests.tpu_bundles TARGET CASE

TARGET is a TPU topology such as "v5e:2x2"; CASE as for `tests/compile_target.py`. A
bundle is what a core issues in one cycle, so that a loop's bundles are the cycles of
one turn of it, but for what waits for memory. Prints, for each kernel and each of its
loops in the order of the program: its depth, bundles of one turn without those of the
loops inside, registers reloaded and spilled, and by unit the bundles that its
operations alone would take.
"""

import os
import re
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple


class Loop(NamedTuple):
    """One turn of a loop, without the loops inside; depth 0 is the kernel itself.

    Attributes:
      bundles: how many it has.
      fills, spills: registers reloaded from where they were spilled, and spilled.
      units: the least bundles that each unit's operations need.
    """

    depth: int
    bundles: int
    fills: int
    spills: int
    units: dict[str, int]


def kernels_of(target: str, case: str) -> dict[str, list[Loop]]:
    """Compiles a case; returns the loops of each of its kernels."""
    with tempfile.TemporaryDirectory() as folder:
        # Read when the compiler is loaded: before that import.
        os.environ["LIBTPU_INIT_ARGS"] = (
            f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true "
            "--xla_jf_dump_llo_pass_label_regex=.*final.*"
        )
        from tests.compile_target import summary_of

        summary_of(target, case)
        result = {}
        for file in sorted(Path(folder).glob("*-final_bundles.txt")):
            name = re.search(r"\d+-([\w.]+)-\d+-final_bundles", file.name)
            if name is None or not re.search(r"_kernel(\.\d+)?$", name[1]):
                continue
            (use,) = Path(folder).glob(f"*-{name[1]}-*final_hlo-static-per-bundle*")
            result[name[1]] = loops(file.read_text(), use.read_text())
        return result


def loops(bundles: str, utilization: str) -> list[Loop]:
    """Reads the compiler's two texts of one kernel: its bundles, what each uses."""
    # Lines such as "0x2a LB: >> {...}": LB begins a loop's body, and as many ">" stand
    # there as loops are around.
    lines = re.findall(r"^ *(?:0x)?[0-9a-f]+\s*(\w*)\s*: (>*) ?\{", bundles, re.M)
    # The other text names its columns, then says how many of each unit there are, then
    # has a line of counts a bundle.
    head, counts = utilization.split("== UTILIZATION:\n")
    _, names, capacities = head.strip().splitlines()
    names = names.split(", ")
    uses = [[int(number) for number in line.split()] for line in counts.splitlines()]
    sums: list[tuple[int, list[list[int]]]] = [(0, [])]
    around = [0]  # which of `sums` the loops are, by depth, that began last
    for (label, marks), use in zip(lines, uses, strict=True):
        depth = len(marks)
        if label == "LB":
            del around[depth:]
            sums.append((depth, []))
            around.append(len(sums) - 1)
        sums[around[min(depth, len(around) - 1)]][1].append(use)
    matches = []
    for depth, rows in sums:
        total = [sum(column) for column in zip(*rows, strict=True)]
        used = dict(zip(names, total, strict=True))
        units = {
            name: -(-used[name] // int(most))
            for name, most in zip(names, capacities.split(), strict=True)
        }
        spilled = used["VLOAD:FILL"], used["VSTORE:SPILL"]
        matches.append(Loop(depth, len(rows), *spilled, units))
    return matches


if __name__ == "__main__":
    for kernel, told in kernels_of(*sys.argv[1:]).items():
        units = [name for name in told[0].units if ":" not in name]
        print(kernel, "\n depth bundles fills spills", *(f"{u:>6}" for u in units))
        for loop in told:
            print(
                *(f"{n:6d}" for n in loop[:4]), *(f"{loop.units[u]:6d}" for u in units)
            )
