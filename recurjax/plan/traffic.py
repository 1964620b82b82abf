"""Bytes to and from memory, launches and collectives of a compiled program."""

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from pallas_kernels.moved_bytes import told_of
from recurjax.plan.hlo import Instruction, Module, Unknown, array_bytes, executed


@dataclass(frozen=True, kw_only=True, slots=True)
class Collective:
    """Collectives of one kind over one set of axes, in one call of the program.

    Attributes:
      kind: one of `KINDS`.
      axes: axes of the mesh, along which devices exchange something; empty: not known.
      count: how many are executed.
      operand: bytes that one device gives them, all together.
      sent: bytes that one device sends in them, by the ring algorithm.
      largest: bytes of the largest array that one of them makes on a device.
    """

    kind: str
    axes: tuple[str, ...]
    count: int
    operand: int
    sent: float
    largest: int

    def times(self, count: int) -> "Collective":
        """Returns `count` executions."""
        return replace(
            self,
            count=self.count * count,
            operand=self.operand * count,
            sent=self.sent * count,
        )

    def __add__(self, more: "Collective") -> "Collective":
        return replace(
            self,
            count=self.count + more.count,
            operand=self.operand + more.operand,
            sent=self.sent + more.sent,
            largest=max(self.largest, more.largest),
        )


KINDS = (
    *("all-reduce", "all-gather", "reduce-scatter", "all-to-all"),
    *("collective-permute", "ragged-all-to-all", "collective-broadcast"),
)


# Instructions that say where data is and move none of it.
_NOTHING = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all"),
    *("partition-id", "replica-id", "opt-barrier", "add-dependency", "domain"),
}
# Custom calls that are notes to the compiler.
_NO_KERNEL = {"AllocateBuffer", "Sharding", "AssumeGatherIndicesInBound"}
_SLICES = ("dynamic-slice", "slice", "gather")
_IN_PLACE = ("dynamic-update-slice", "scatter")
_VIEWS = ("bitcast", "copy")
"""What takes no memory of its own in a fusion; TPUs read integers in another layout."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """The traffic of one device in one call of a program.

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
    """Reads memory traffic and collectives of a compiled module.

    Args:
      axes, sizes: axes and sizes of the mesh, in the order of the program's partitions.
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
        for communication, around in _communications(module, here, instruction):
            if communication is not instruction:
                # TPUs spread one over several fusions: its steps share an id.
                step = (
                    run.computation,
                    communication.attribute("channel_id") or communication.name,
                )
                if step in fused:
                    continue
                fused.add(step)
            # Once a call of the computation; a loop's trips multiply it.
            collective = read_collective(communication, around, axes=axes, sizes=sizes)
            collectives.append(collective.times(times))
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
        for inner in inside.values():
            if is_collective(inner):
                yield inner, inside


def _moved(
    module: Module, here: dict[str, Instruction], instruction: Instruction
) -> int:
    opcode = instruction.opcode
    if opcode == "custom-call" and (moved := told_of(instruction.attributes)):
        return moved
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
    return written + sum(array_bytes(operand.type) for operand in operands)


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
    written = sum(_written(module, inside, result, fusion) for result in results)
    parameters = _parameters(inside)
    read = 0
    seen: set[str] = set()
    for place, name in enumerate(fusion.operands):
        size = array_bytes(here[name].type)
        if name in seen or size == 0:
            continue
        seen.add(name)
        parameter = parameters[place]
        if any(_viewed(inside, result).name == parameter for result in results):
            read += size
            continue
        # Slices that several users read can exceed the array: then count the full
        # array.
        read += min(size, _read(module, inside, parameter, size))
    return read + min(written, array_bytes(fusion.type))


def _parameters(inside: dict[str, Instruction]) -> dict[int, str]:
    """Returns the names of a computation's parameters, by number."""
    return {
        int(instruction.literal): instruction.name
        for instruction in inside.values()
        if instruction.opcode == "parameter"
    }


def _read(module: Module, inside: dict[str, Instruction], name: str, size: int) -> int:
    """Returns the bytes that a fusion reads of one of its parameters."""
    total = 0
    for user in inside.values():
        if name not in user.operands:
            continue
        if user.opcode in _VIEWS:
            # The same numbers in another shape or layout: what reads those counts.
            total += _read(module, inside, user.name, size)
        elif user.opcode == "fusion":
            # TPUs' fusions hold fusions, which may take a slice, or be a view.
            called = user.attribute("calls") or ""
            within = module.computations[called]
            parameters = _parameters(within)
            for place, operand in enumerate(user.operands):
                if operand == name:
                    total += _read(module, within, parameters[place], size)
                    if _viewed(within, module.root(called)).name == parameters[place]:
                        total += _read(module, inside, user.name, size)
        # The slice's start indices are operands too; only the sliced array counts so.
        elif user.opcode in _SLICES and user.operands[0] == name:
            total += array_bytes(user.type, on_chip=True)
        elif user.opcode in _IN_PLACE and user.operands[0] == name:
            total += 0  # only its new part is touched
        else:
            return size  # One user that needs all of it is enough.
    return min(total, size)


def _viewed(inside: dict[str, Instruction], result: Instruction) -> Instruction:
    """Returns what views show in another shape or layout."""
    while result.opcode in _VIEWS and result.operands[0] in inside:
        result = inside[result.operands[0]]
    return result


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
    size, source = (array_bytes(side.type, on_chip=True) for side in (start, operand))
    return written + (size - source if array_bytes(operand.type) else 0)


def _kernel_name(instruction: Instruction) -> str:
    """Returns a kernel's own name, or the target of a library's call."""
    if instruction.kernel == "__gpu$xla.gpu.triton":
        # Triton's kernels share one target; the kernel's name is in its attributes.
        named = re.findall(r'\bname = "([^"]*)"', instruction.attributes)
        return named[-1] if named else "triton"
    if instruction.kernel == "triton_kernel_call":
        # jax-triton's: `pallas_kernels/triton_call.py` launches it under its name.
        named = re.search(r"/(\w+)/triton_kernel_call\b", instruction.attributes)
        return named[1] if named else "triton"
    if instruction.kernel == "tpu_custom_call":
        return re.sub(r"[.\d]+$", "", instruction.name)
    return instruction.kernel or ""


def _joined(collectives: list[Collective]) -> tuple[Collective, ...]:
    """Adds up collectives of one kind over one set of axes."""
    together: dict[tuple[str, tuple[str, ...]], Collective] = {}
    for collective in collectives:
        key = (collective.kind, collective.axes)
        together[key] = together[key] + collective if key in together else collective
    order = sorted(together.values(), key=lambda collective: -collective.sent)
    return tuple(order)


_MESH = re.compile(
    r"replica_groups=mesh\[(?P<mesh>[^\]]*)\]"
    r"(?:, device_ids=\(\[(?P<shape>[\d,]+)\](?:T\((?P<order>[\d,]+)\))?\))?"
    r" \{(?P<axes>(?:'\w+',?)+)\}"
)
"""Groups as axes of a mesh; a part of an axis, 'a':(2)4, is not understood."""


def is_collective(instruction: Instruction) -> bool:
    """Whether an instruction starts or does a collective."""
    return instruction.opcode.removesuffix("-start") in KINDS


def read_collective(
    instruction: Instruction,
    around: dict[str, Instruction],
    *,
    axes: tuple[str, ...],
    sizes: tuple[int, ...],
) -> Collective:
    """Reads one collective.

    Args:
      instruction: with `replica_groups` or `source_target_pairs`.
      around: the computation that contains it, for the types of its operands.
      axes, sizes: axes and sizes of the mesh; partition i is device i of the mesh in
        row-major order.
    """
    kind = instruction.opcode.removesuffix("-start")
    # A start's type is a tuple with the result; what a device gives is the operands'.
    operand = sum(
        array_bytes(around[name].type, on_chip=True) for name in instruction.operands
    )
    # Who talks to whom, as the program's partition numbers; the axes follow from it.
    groups = _groups(instruction.attributes, int(np.prod(sizes)))
    members = max((len(group) for group in groups), default=1)
    is_reduce_scatter = kind == "all-reduce" and _is_scattered(around, instruction)
    if is_reduce_scatter:
        # The schedule of an all-reduce whose result is sliced at once sends only the
        # half.
        kind = "reduce-scatter"
    return Collective(
        kind=kind,
        axes=_axes(groups, axes, sizes),
        count=1,
        operand=operand,
        sent=_sent(kind, operand, members),
        largest=operand * members if kind == "all-gather" else operand,
    )


def _is_scattered(around: dict[str, Instruction], instruction: Instruction) -> bool:
    """Whether a fused all-reduce hands on only a slice: a TPU's reduce-scatter."""
    users = [user for user in around.values() if instruction.name in user.operands]
    return bool(users) and all(user.opcode == "dynamic-slice" for user in users)


def _sent(kind: str, operand: int, members: int) -> float:
    if members == 1:
        return 0.0
    # A ring of n: a reduce-scatter sends n - 1 of n parts, an all-gather passes on what
    # the n - 1 others hold, and an all-reduce is one after the other.
    share = (members - 1) / members
    sent = {
        "all-reduce": 2 * share * operand,
        "all-gather": (members - 1) * operand,
        "reduce-scatter": share * operand,
        "all-to-all": share * operand,
        "ragged-all-to-all": share * operand,
    }.get(kind, operand)
    return float(sent)


def _groups(attributes: str, devices: int) -> list[list[int]]:
    """Returns the partitions that talk to each other."""
    # HLO writes groups in four ways: pairs of a permutation, an iota in short, axes of
    # a mesh by name, and lists of numbers. No groups at all: all devices together.
    pairs = re.search(r"source_target_pairs=\{([\d,{} ]*)\}", attributes)
    if pairs:
        return _lists(pairs[1])
    short = re.search(
        r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes
    )
    if short:
        # [2,4]<=[4,2]T(1,0): count up, reshape to [4, 2], transpose, rows of [2, 4].
        shape, reshaped = (_numbers(short[1]), _numbers(short[2]))
        ids = np.arange(devices).reshape(reshaped)
        if short[3]:
            ids = ids.transpose(_numbers(short[3]))
        return ids.reshape(shape).tolist()
    named = _MESH.search(attributes)
    if named:
        return _groups_of_mesh(named, devices)
    listed = re.search(r"replica_groups=\{([\d,{} ]*)\}", attributes)
    if listed is None and "replica_groups=" in attributes:
        raise ValueError(f"collectives: cannot read the groups of {attributes[:200]!r}")
    groups = _lists(listed[1]) if listed else []
    return groups or [list(range(devices))]


def _groups_of_mesh(named: re.Match[str], devices: int) -> list[list[int]]:
    """Reads groups along named axes of a mesh, whose devices may be transposed."""
    sizes = {n: int(size) for n, size in re.findall(r"'(\w+)'=(\d+)", named["mesh"])}
    ids = np.arange(devices)
    if named["shape"]:
        ids = ids.reshape(_numbers(named["shape"]))
        if named["order"]:
            ids = ids.transpose(_numbers(named["order"]))
    # From here on ids are laid out as the mesh is, one axis each.
    ids = ids.reshape(list(sizes.values()))
    # The named axes go last and are joined: each row is then one group.
    axes = [list(sizes).index(name) for name in re.findall(r"'(\w+)'", named["axes"])]
    last = np.moveaxis(ids, axes, range(-len(axes), 0))
    return last.reshape(-1, math.prod(ids.shape[axis] for axis in axes)).tolist()


def _lists(text: str) -> list[list[int]]:
    return [_numbers(numbers) for numbers in re.findall(r"\{([\d,]+)\}", text)]


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]


def _axes(
    groups: list[list[int]], axes: tuple[str, ...], sizes: tuple[int, ...]
) -> tuple[str, ...]:
    """Returns the axes along which the members of a group differ."""
    differ = np.zeros(len(axes), bool)
    for group in groups:
        # Where the members sit on the mesh: an axis along which they differ is used.
        places = np.stack(np.unravel_index(np.asarray(group), sizes), axis=-1)
        differ |= (places != places[:1]).any(axis=0)
    return tuple(axis for axis, differs in zip(axes, differ, strict=True) if differs)
