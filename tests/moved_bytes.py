"""What a compiled program launches outside its loops, and the bytes that it moves."""

import math
import re

from tests.compile_target import NOT_LAUNCHED

BYTES = {
    **{"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2},
    **{"s32": 4, "u32": 4, "f32": 4, "f64": 8, "s64": 8},
}
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*)$")
_OPERATION = re.compile(r"(?:^|[\s)}\]])([a-z][a-z0-9\-]*)\(([^)]*)\)")
_ARRAY = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\]")


def launches(hlo: str) -> list[tuple[str, int]]:
    """Returns (name, bytes of operands and results) of what the entry launches.

    An operand that a kernel is given twice counts once: the second is a view of a few
    of its rows.
    """
    sizes: dict[str, int] = {}
    found = []
    for line in hlo[hlo.index("ENTRY ") :].splitlines()[1:]:
        instruction = _INSTRUCTION.match(line)
        if not instruction or not (operation := _OPERATION.search(instruction[2])):
            continue
        name, (opcode, operands) = instruction[1], operation.groups()
        sizes[name] = _bytes(instruction[2][: operation.start(1)])
        if opcode not in NOT_LAUNCHED:
            read = set(re.findall(r"%([\w.\-]+)", operands))
            found.append((name, sizes[name] + sum(sizes[one] for one in read)))
    return found


def _bytes(shapes: str) -> int:
    return sum(
        BYTES[dtype] * math.prod(int(size) for size in sizes.split(",") if size)
        for dtype, sizes in _ARRAY.findall(shapes)
        if dtype in BYTES
    )
