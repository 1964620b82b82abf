"""Collectives of a compiled program: kind, bytes, and the axes of the mesh."""

import math
import re
from dataclasses import dataclass, replace

import numpy as np

from recurjax.plan.hlo import Instruction, array_bytes

KINDS = (
    *("all-reduce", "all-gather", "reduce-scatter", "all-to-all"),
    *("collective-permute", "ragged-all-to-all", "collective-broadcast"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Collective:
    """Collectives of one kind over one set of axes, in one call of the program.

    Attributes:
      kind: one of `KINDS`.
      axes: of the mesh, along which devices exchange something; empty: not known.
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
      around: the computation that it stands in, for the types of its operands.
      axes, sizes: of the mesh; partition i is device i of the mesh in row-major order.
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


def _is_scattered(around: dict[str, Instruction], one: Instruction) -> bool:
    """Whether a fused all-reduce hands on only a slice: a TPU's reduce-scatter."""
    users = [user for user in around.values() if one.name in user.operands]
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
    chosen = [list(sizes).index(name) for name in re.findall(r"'(\w+)'", named["axes"])]
    last = np.moveaxis(ids, chosen, range(-len(chosen), 0))
    return last.reshape(-1, math.prod(ids.shape[axis] for axis in chosen)).tolist()


def _lists(text: str) -> list[list[int]]:
    return [_numbers(one) for one in re.findall(r"\{([\d,]+)\}", text)]


def _numbers(text: str) -> list[int]:
    return [int(one) for one in text.split(",") if one]


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
