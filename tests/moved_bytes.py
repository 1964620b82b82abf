"""What a compiled program launches outside its loops, and the bytes that it moves."""

from recurjax.plan.hlo import array_bytes, parse
from tests.compile_target import NOT_LAUNCHED


def launches(hlo: str) -> list[tuple[str, int]]:
    """Returns (name, bytes of operands and results) of what the entry launches.

    An operand that a kernel is given twice counts once: the second is a view of a few
    of its rows.
    """
    module = parse(hlo)
    entry = module.computations[module.entry]
    sizes = {
        name: array_bytes(instruction.type, on_chip=True)
        for name, instruction in entry.items()
    }
    return [
        (
            name,
            sizes[name] + sum(sizes[operand] for operand in set(instruction.operands)),
        )
        for name, instruction in entry.items()
        if instruction.opcode not in NOT_LAUNCHED
    ]
