"""Prints what the compiled calls launch and move, a Markdown row each.

    JAX_PLATFORMS=cpu PYTHONPATH=.compilers python -m \
        tests.pallas_kernels.chunk_attention.traffic TARGET CASE...

TARGET and CASE as in `tests.compile_target` and `compile_cases`. Bytes are those of the
launched programs' operands and results, each once a launch; the bound has every input
of the call read once and every result written once.
"""

import sys

from tests.compile_target import compile_for
from tests.moved_bytes import launches
from tests.pallas_kernels.chunk_attention import compile_cases


def traffic(target: str, case: str) -> dict:
    """Returns the launches, the bytes that they move and the bound of one case."""
    function, arguments = getattr(compile_cases, case)()
    compiled = compile_for(target, function, arguments)
    result = launches(compiled.as_text())
    memory = compiled.memory_analysis()
    bound = memory.argument_size_in_bytes + memory.output_size_in_bytes
    return {
        "launched": [name for name, _ in result],
        "bytes": sum(size for _, size in result),
        "bound": bound,
    }


def main(target: str, *cases: str) -> None:
    """Prints the rows."""
    for case in cases:
        row = traffic(target, case)
        moved, bound = row["bytes"] / 2**20, row["bound"] / 2**20
        count = len(row["launched"])
        print(
            f"| {target} | {case} | {count} | {moved:.0f} | {bound:.0f} | "
            f"{moved / bound:.2f} |"
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
