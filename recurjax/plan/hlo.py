"""Parses optimized HLO into instructions, and counts how often each of them runs."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

BITS = {
    **{"pred": 8, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16},
    **{"bf16": 16, "f16": 16, "s32": 32, "u32": 32, "f32": 32, "f64": 64},
    **{"s64": 64, "u64": 64, "c64": 64, "c128": 128, "f8e4m3fn": 8, "f8e5m2": 8},
}
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_START = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")
_ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\](?:\{([^}]*)\})?")
_NAME = re.compile(r"%([\w.\-]+)")


@dataclass(frozen=True, slots=True)
class Instruction:
    """One line of HLO.

    Attributes:
      name: without the percent sign.
      type: type of the result, with layout.
      opcode: what it does.
      operands: names of what it reads.
      attributes: the rest of the line.
      is_root: whether its computation returns it.
      literal: the text in the brackets of a constant or a parameter.
    """

    name: str
    type: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str
    is_root: bool
    literal: str

    def attribute(self, key: str) -> str | None:
        """Returns the computation or value that `key=` names, or None."""
        match = re.search(rf"\b{key}=%?([\w.\-]+)", self.attributes)
        return match[1] if match else None

    @property
    def kernel(self) -> str | None:
        """The target of a custom call, or None."""
        if self.opcode != "custom-call":
            return None
        match = re.search(r'custom_call_target="([^"]*)"', self.attributes)
        return match[1] if match else ""


@dataclass(frozen=True, slots=True)
class Module:
    """A compiled program: computations by name, and the one where it starts."""

    computations: dict[str, dict[str, Instruction]]
    entry: str

    def root(self, computation: str) -> Instruction:
        """Returns what a computation returns."""
        return next(i for i in self.computations[computation].values() if i.is_root)


def parse(text: str) -> Module:
    """Reads the text of `compiled.as_text()`."""
    computations: dict[str, dict[str, Instruction]] = {}
    entry, current = "", None
    for line in text.splitlines():
        # A computation's head and its closing brace start the line; what it does is
        # indented, an instruction a line.
        if not line.startswith(" "):
            header = _HEADER.match(line)
            current = None
            if header is not None:
                current = computations.setdefault(header[2], {})
                entry = header[2] if header[1] else entry
        elif current is not None and (instruction := _instruction(line)) is not None:
            current[instruction.name] = instruction
    if not entry:
        raise ValueError("parse: the text has no ENTRY computation")
    return Module(computations, entry)


def array_bytes(shape: str, *, on_chip: bool = False) -> int:
    """Sums the bytes of the arrays of a type.

    Args:
      shape: a type as HLO writes it, tuples included.
      on_chip: count arrays in a TPU's own memory, layouts with S(1), too.
    """
    total = 0
    for dtype, sizes, layout in _ARRAY.findall(shape):
        elsewhere = re.search(r"S\((\d+)\)", layout)
        if dtype not in BITS or (elsewhere and elsewhere[1] != "0" and not on_chip):
            continue
        # Elements of less than a byte are packed.
        # An empty list of sizes is a scalar: the product is 1.
        count = math.prod(int(size) for size in sizes.split(",") if size)
        total += -(-count * BITS[dtype] // 8)
    return total


class Execution(NamedTuple):
    """An instruction that is executed.

    Attributes:
      instruction: what runs; never a loop, a call or a branch itself.
      computation: the name of the one that contains it.
      times: how often in one call of the program.
    """

    instruction: Instruction
    computation: str
    times: int


class Unknown(NamedTuple):
    """A loop whose trip count the program does not show; taken as one trip."""

    name: str


def executed(module: Module) -> Iterator[Execution | Unknown]:
    """Yields what runs, loops' bodies with their trip counts multiplied.

    Of a conditional's branches the one with most instructions counts.
    """
    yield from _walk(module, module.entry, 1)


def trip_count(module: Module, loop: Instruction) -> int | None:
    """Returns the trips that the compiler noted, or those of `i < constant`.

    A loop that the compiler made of a product and what it sends, for an array of which
    each device has a part, counts in u32 and may take two parts a trip.
    """
    noted = re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes)
    if noted:
        return int(noted[1])
    condition = loop.attribute("condition")
    assert condition is not None
    constants, less = _integers(module, condition, "s32[]")
    # A loop of jax's starts at 0 and goes up by 1.
    if less and len(constants) == 1:
        return constants[0]
    constants, less = _integers(module, condition, "u32[]")
    step = _step(module, loop) if less and len(constants) == 1 else None
    return None if step is None else -(-constants[0] // step)


def _step(module: Module, loop: Instruction) -> int | None:
    """Returns by how much a loop's only u32 counter goes up, where that is plain."""
    body, condition = loop.attribute("body"), loop.attribute("condition")
    assert body is not None and condition is not None
    read = [
        re.search(r"index=(\d+)", instruction.attributes)
        for instruction in module.computations[condition].values()
        if instruction.opcode == "get-tuple-element"
        and instruction.type.startswith("u32[]")
    ]
    if len(read) != 1 or read[0] is None:
        return None
    inside, root = module.computations[body], module.root(body)
    new = inside.get(root.operands[int(read[0][1])])
    if new is None or new.opcode != "add":
        return None
    by = [inside[name] for name in new.operands if inside[name].opcode == "constant"]
    return int(by[0].literal) if len(by) == 1 else None


def _instruction(line: str) -> Instruction | None:
    start = _START.match(line)
    if start is None:
        return None
    rest = line[start.end() :]
    # `%name = type opcode(operands), attributes`: a tuple's type is in brackets.
    # Layouts of a type have brackets too, so the end is looked for by depth.
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.find(" ")
    shape, rest = rest[:end], rest[end:].lstrip()
    opening = rest.find("(")
    if opening < 0:
        return None
    closing = _closing(rest, opening)
    inside = rest[opening + 1 : closing]
    return Instruction(
        name=start[2],
        type=shape,
        opcode=rest[:opening],
        operands=tuple(_NAME.findall(inside)),
        attributes=rest[closing + 1 :],
        is_root=start[1] is not None,
        literal=inside,
    )


def _closing(text: str, opening: int) -> int:
    depth = 0
    for place in range(opening, len(text)):
        if text[place] == "(":
            depth += 1
        elif text[place] == ")":
            depth -= 1
            if depth == 0:
                return place
    return len(text)


def _walk(module: Module, name: str, times: int) -> Iterator[Execution | Unknown]:
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
            # Which branch runs is known on the device only.
            branches = [list(_walk(module, b, times)) for b in _branches(instruction)]
            yield from max(branches, key=len, default=[])
        elif opcode == "call":
            called = instruction.attribute("to_apply")
            assert called is not None
            yield from _walk(module, called, times)
        # Wraps what is to run asynchronously; a plain copy-start calls nothing.
        elif opcode.endswith("-start") and instruction.attribute("calls"):
            called = instruction.attribute("calls")
            assert called is not None
            yield from _walk(module, called, times)
        else:
            yield Execution(instruction, name, times)


def _integers(module: Module, name: str, kind: str) -> tuple[list[int], bool]:
    """Returns a condition's constants of a kind, and whether it asks `less than`."""
    constants, less = [], False
    for instruction in module.computations[name].values():
        if instruction.opcode == "constant" and instruction.type.startswith(kind):
            constants.append(int(instruction.literal))
        if instruction.opcode == "compare":
            less |= "direction=LT" in instruction.attributes
        if called := instruction.attribute("calls"):
            more, inner = _integers(module, called, kind)
            constants, less = constants + more, less or inner
    return constants, less


def _branches(instruction: Instruction) -> list[str]:
    listed = re.search(r"branch_computations=\{([^}]*)\}", instruction.attributes)
    if listed:
        return re.findall(r"%?([\w.\-]+)", listed[1])
    # A conditional of two branches names them in words.
    named = (instruction.attribute(f"{side}_computation") for side in ("true", "false"))
    return [name for name in named if name is not None]
