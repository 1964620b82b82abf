"""Kernels and bytes of the compiled scans: the tables of docs/design/scans.md.

    JAX_PLATFORMS=cpu PYTHONPATH=.compilers python -m \
        tests.pallas_kernels.moved_table OP TARGET [CASE ...]

OP is "gated_scan" or "selective_scan", TARGET "h100" or a TPU topology; a CASE is a
name in the op's `compile_cases`, and without one all of the target's are meant.
"""

import sys
from importlib import import_module
from types import ModuleType

from tests.compile_target import compile_for
from tests.moved_bytes import launches


def rows(target: str, op: str, *cases: str) -> list[dict]:
    """Returns the rows of some cases of an op, by default of all of the target's."""
    compile_cases = import_module(f"tests.pallas_kernels.{op}.compile_cases")
    prefix = "gpu_" if target == "h100" else "tpu_"
    known = [name for name in vars(compile_cases) if name.startswith(prefix)]
    return [row(compile_cases, target, case) for case in cases or known]


def row(compile_cases: ModuleType, target: str, case: str) -> dict:
    """Compiles a case and returns what it launches."""
    function, arguments = getattr(compile_cases, case)()
    compiled = compile_for(target, function, arguments)
    memory = compiled.memory_analysis()
    launched = launches(compiled.as_text())
    ours = [
        item for item in launched if "pallas_call" in item[0] or "kernel" in item[0]
    ]
    others = [item for item in launched if item not in ours]
    return {
        "case": case,
        "kernels": [name for name, _ in ours],
        "others": [name for name, _ in others],
        "kernel_bytes": sum(moved for _, moved in ours),
        "other_bytes": sum(moved for _, moved in others),
        "least_bytes": memory.argument_size_in_bytes + memory.output_size_in_bytes,
    }


def main(*words: str) -> None:
    """Prints the table."""
    op, target, *cases = words
    print("| call | our kernels | others | GB moved | least | ratio |")
    print("|---|---|---|---|---|---|")
    for item in rows(target, op, *cases):
        moved = item["kernel_bytes"] + item["other_bytes"]
        print(
            f"| {item['case'][4:]} | {len(item['kernels'])} | {len(item['others'])} | "
            f"{moved / 1e9:.3f} | {item['least_bytes'] / 1e9:.3f} | "
            f"{moved / item['least_bytes']:.2f} |"
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
