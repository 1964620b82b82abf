"""Which instructions of a compiled program run, and how often."""

import re
from collections.abc import Iterator
from typing import NamedTuple

from recurjax.plan.hlo import Instruction, Module


class Run(NamedTuple):
    """An instruction that is executed.

    Attributes:
      instruction: what runs; never a loop, a call or a branch itself.
      computation: the name of the one that it stands in.
      times: how often in one call of the program.
    """

    instruction: Instruction
    computation: str
    times: int


class Unknown(NamedTuple):
    """A loop whose trip count the program does not show; taken as one trip."""

    name: str


def executed(module: Module) -> Iterator[Run | Unknown]:
    """Yields what runs, loops' bodies with their trip counts multiplied.

    Of a conditional's branches the one with most instructions counts.
    """
    yield from _walk(module, module.entry, 1)


def _walk(module: Module, name: str, times: int) -> Iterator[Run | Unknown]:
    for instruction in module.computations[name].values():
        opcode = instruction.opcode
        if opcode == "while":
            trips = trip_count(module, instruction)
            if trips is None:
                yield Unknown(instruction.name)
            body = instruction.attribute("body")
            assert body is not None
            yield from _walk(module, body, times * (1 if trips is None else trips))
        elif opcode == "conditional":
            branches = [list(_walk(module, b, times)) for b in _branches(instruction)]
            yield from max(branches, key=len, default=[])
        elif opcode == "call":
            called = instruction.attribute("to_apply")
            assert called is not None
            yield from _walk(module, called, times)
        elif opcode.endswith("-start") and instruction.attribute("calls"):
            called = instruction.attribute("calls")
            assert called is not None
            yield from _walk(module, called, times)
        else:
            yield Run(instruction, name, times)


def trip_count(module: Module, loop: Instruction) -> int | None:
    """Returns the trips that the compiler noted, or those of `i < constant`."""
    noted = re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes)
    if noted:
        return int(noted[1])
    condition = loop.attribute("condition")
    assert condition is not None
    constants, less = _integers(module, condition)
    # A loop of jax's starts at 0 and goes up by 1.
    return constants[0] if less and len(constants) == 1 else None


def _integers(module: Module, name: str) -> tuple[list[int], bool]:
    """Returns a condition's constants, and whether it asks `less than`."""
    constants, less = [], False
    for instruction in module.computations[name].values():
        if instruction.opcode == "constant" and instruction.type.startswith("s32[]"):
            constants.append(int(instruction.literal))
        if instruction.opcode == "compare":
            less |= "direction=LT" in instruction.attributes
        if called := instruction.attribute("calls"):
            more, inner = _integers(module, called)
            constants, less = constants + more, less or inner
    return constants, less


def _branches(instruction: Instruction) -> list[str]:
    listed = re.search(r"branch_computations=\{([^}]*)\}", instruction.attributes)
    if listed:
        return re.findall(r"%?([\w.\-]+)", listed[1])
    named = (instruction.attribute(f"{side}_computation") for side in ("true", "false"))
    return [name for name in named if name is not None]
