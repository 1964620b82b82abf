"""Bytes to and from memory, launches and collectives of a compiled program."""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from pallas_kernels.moved_bytes import told_of
from recurjax.plan.collectives import Collective, is_collective, read_collective
from recurjax.plan.hlo import Instruction, Module, Unknown, array_bytes, executed

# Instructions that say where data is and move none of it.
_NOTHING = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all"),
    *("partition-id", "replica-id", "opt-barrier", "add-dependency", "domain"),
}
# Custom calls that are notes to the compiler.
_NO_KERNEL = {"AllocateBuffer", "Sharding", "AssumeGatherIndicesInBound"}
_SLICES = ("dynamic-slice", "slice", "gather")
_IN_PLACE = ("dynamic-update-slice", "scatter")


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """What one device does in one call of a program.

    Attributes:
      bytes: read from and written to its memory: operands and results of every
        instruction that runs, of a slice only the slice; of a kernel that says what it
        moves, that (`pallas_kernels/moved_bytes.py`). An array that stays in a
        TPU's on-chip memory counts nothing, and an array that a kernel reads more than
        once counts once: the least that has to move.
      launches: instructions that run as a kernel of their own.
      kernels: executions of custom calls, by name.
      collectives: what devices send each other.
      unknown_loops: loops taken as one trip.
    """

    bytes: int
    launches: int
    kernels: dict[str, int]
    collectives: tuple[Collective, ...]
    unknown_loops: int


def read_traffic(
    module: Module, *, axes: tuple[str, ...], sizes: tuple[int, ...]
) -> Traffic:
    """Reads what a module does.

    Args:
      axes, sizes: of the mesh, in the order of the program's partitions.
    """
    moved, launches, unknown = 0, 0, 0
    kernels: Counter[str] = Counter()
    collectives: list[Collective] = []
    # Steps of one collective that were counted already.
    fused: set[tuple[str, str]] = set()
    for run in executed(module):
        if isinstance(run, Unknown):
            unknown += 1
            continue
        instruction, times = run.instruction, run.times
        if not _runs(instruction):
            continue
        here = module.computations[run.computation]
        moved += times * _moved(module, here, instruction)
        launches += times
        if instruction.kernel is not None:
            kernels[_kernel_name(instruction)] += times
        for one, around in _communications(module, here, instruction):
            if one is not instruction:
                # TPUs spread one over several fusions: its steps share an id.
                step = (run.computation, one.attribute("channel_id") or one.name)
                if step in fused:
                    continue
                fused.add(step)
            # Once a call of the computation; a loop's trips multiply it.
            found = read_collective(one, around, axes=axes, sizes=sizes)
            collectives.append(found.times(times))
    return Traffic(
        bytes=moved,
        launches=launches,
        kernels=dict(kernels),
        collectives=_joined(collectives),
        unknown_loops=unknown,
    )


def _runs(instruction: Instruction) -> bool:
    opcode = instruction.opcode
    if opcode in _NOTHING or instruction.kernel in _NO_KERNEL:
        return False
    # An asynchronous operation is counted where it starts.
    return not opcode.endswith(("-done", "-update"))


def _communications(
    module: Module, here: dict[str, Instruction], instruction: Instruction
) -> Iterator[tuple[Instruction, dict[str, Instruction]]]:
    """Yields collectives: the instruction itself, or those fused into it."""
    if is_collective(instruction):
        yield instruction, here
    called = instruction.attribute("calls")
    if instruction.opcode == "fusion" and called in module.computations:
        inside = module.computations[called]
        for one in inside.values():
            if is_collective(one):
                yield one, inside


def _moved(
    module: Module, here: dict[str, Instruction], instruction: Instruction
) -> int:
    opcode = instruction.opcode
    if opcode == "custom-call" and (told := told_of(instruction.attributes)):
        return told
    # An operand that is named twice is read once.
    operands = [here[name] for name in dict.fromkeys(instruction.operands)]
    written = array_bytes(instruction.type)
    if opcode == "fusion":
        called = instruction.attribute("calls")
        assert called is not None
        return _moved_by_fusion(module, here, instruction, called)
    if opcode == "copy-start":
        return written  # its type names both ends
    if opcode in _SLICES and operands:
        return written + _read_of_slice(operands[0], instruction)
    # Both change a part of an array in place: read the new part, write it.
    if opcode == "dynamic-update-slice":
        return 2 * array_bytes(here[instruction.operands[1]].type)
    if opcode == "scatter":
        return 2 * array_bytes(here[instruction.operands[-1]].type)
    if opcode.removesuffix("-start") in _SLICES and operands:
        return _moved_by_slice_start(operands[0], instruction)
    if opcode.endswith("-start"):  # a tuple of what goes in and what comes out
        return written
    return written + sum(array_bytes(one.type) for one in operands)


def _moved_by_fusion(
    module: Module, here: dict[str, Instruction], fusion: Instruction, called: str
) -> int:
    # A fusion keeps what it computes on the way on the chip: only its parameters are
    # read and its results written, each at most once.
    inside = module.computations[called]
    root = module.root(called)
    results = (
        [inside[name] for name in root.operands] if root.opcode == "tuple" else [root]
    )
    written = sum(_written(module, inside, one, fusion) for one in results)
    parameters = _parameters(inside)
    read = 0
    seen: set[str] = set()
    for place, name in enumerate(fusion.operands):
        whole = array_bytes(here[name].type)
        if name in seen or whole == 0:
            continue
        seen.add(name)
        # A slice that several users read can add up to more than the array: then the
        # whole.
        read += min(whole, _read(module, inside, parameters[place], whole))
    return read + min(written, array_bytes(fusion.type))


def _parameters(inside: dict[str, Instruction]) -> dict[int, str]:
    """Returns the names of a computation's parameters, by number."""
    return {
        int(one.literal): one.name
        for one in inside.values()
        if one.opcode == "parameter"
    }


def _read(module: Module, inside: dict[str, Instruction], name: str, whole: int) -> int:
    """Returns the bytes that a fusion reads of one of its parameters."""
    total = 0
    for user in inside.values():
        if name not in user.operands:
            continue
        if user.opcode == "bitcast":
            # The same bytes under another shape: what reads those counts.
            total += _read(module, inside, user.name, whole)
        elif user.opcode == "fusion":
            # TPUs' fusions hold fusions, which may take a slice, or be a bitcast.
            called = user.attribute("calls") or ""
            within = module.computations[called]
            parameters = _parameters(within)
            for place, operand in enumerate(user.operands):
                if operand == name:
                    total += _read(module, within, parameters[place], whole)
                    if _shown(within, module.root(called)).name == parameters[place]:
                        total += _read(module, inside, user.name, whole)
        # The slice's start indices are operands too; only the sliced array counts so.
        elif user.opcode in _SLICES and user.operands[0] == name:
            total += array_bytes(user.type, on_chip=True)
        elif user.opcode in _IN_PLACE and user.operands[0] == name:
            total += 0  # only its new part is touched
        else:
            return whole  # One user that needs all of it is enough.
    return min(total, whole)


def _shown(inside: dict[str, Instruction], result: Instruction) -> Instruction:
    """Returns what bitcasts show under another shape."""
    while result.opcode == "bitcast" and result.operands[0] in inside:
        result = inside[result.operands[0]]
    return result


def _written(
    module: Module,
    inside: dict[str, Instruction],
    result: Instruction,
    fusion: Instruction,
) -> int:
    # What a bitcast shows under another shape was written by what made it.
    result = _shown(inside, result)
    if result.opcode == "fusion" and not result.type.startswith("("):
        called = result.attribute("calls") or ""
        return _written(
            module, module.computations[called], module.root(called), fusion
        )
    if result.opcode == "dynamic-update-slice":
        return array_bytes(inside[result.operands[1]].type, on_chip=True)
    if result.opcode == "scatter":
        return array_bytes(inside[result.operands[-1]].type, on_chip=True)
    # Inside a fusion layouts name no memory; the fusion's own type does.
    return array_bytes(result.type) if array_bytes(fusion.type) else 0


def _read_of_slice(operand: Instruction, instruction: Instruction) -> int:
    if array_bytes(operand.type) == 0:
        return 0
    return array_bytes(instruction.type, on_chip=True)


def _moved_by_slice_start(operand: Instruction, start: Instruction) -> int:
    # Its type is a tuple of the array, the slice of it, and what waits for that.
    written = array_bytes(start.type) - array_bytes(operand.type)
    size, whole = (array_bytes(one.type, on_chip=True) for one in (start, operand))
    return written + (size - whole if array_bytes(operand.type) else 0)


def _kernel_name(instruction: Instruction) -> str:
    """Returns a kernel's own name, or the target of a library's call."""
    if instruction.kernel == "__gpu$xla.gpu.triton":
        # Triton's kernels share one target; the kernel's name is in its attributes.
        named = re.findall(r'\bname = "([^"]*)"', instruction.attributes)
        return named[-1] if named else "triton"
    if instruction.kernel == "tpu_custom_call":
        return re.sub(r"[.\d]+$", "", instruction.name)
    return instruction.kernel or ""


def _joined(found: list[Collective]) -> tuple[Collective, ...]:
    """Adds up collectives of one kind over one set of axes."""
    together: dict[tuple[str, tuple[str, ...]], Collective] = {}
    for one in found:
        key = (one.kind, one.axes)
        together[key] = together[key] + one if key in together else one
    order = sorted(together.values(), key=lambda one: -one.sent)
    return tuple(order)
