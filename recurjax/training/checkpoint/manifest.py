"""The manifest of a checkpoint: its arrays and their checksums, data states, loss.

Arrays are named by the keys that lead to them, joined by dots.
"""

import dataclasses
import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from recurjax.files.json_files import parse_json

_FORMAT, _READABLE = 2, (1, 2)
"""Format 1 says nothing of the model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ArrayEntry:
    """One array as it was saved."""

    shape: tuple[int, ...]
    dtype: str
    checksum: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """The metadata of a step, stored next to its arrays, with a digest of itself.

    Attributes:
      step: training steps done.
      arrays: by name.
      data_states: the data iterator's state in each process of the run that saved.
      loss: validation loss at this step; None when none was measured.
      model: the model's config as JSON: the arrays' shapes do not tell a RoPE base or
        a norm's eps. None where it is not known.
      base: run, step and digest of the model that adapters adapt.
    """

    step: int
    arrays: Mapping[str, ArrayEntry]
    data_states: list[dict[str, Any]]
    loss: float | None
    model: dict[str, Any] | None = None
    base: dict[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        content = {"format": _FORMAT, **dataclasses.asdict(self)}
        if self.base is None:
            del content["base"]
        content = json.loads(json.dumps(content))
        return {**content, "digest": _digest(content)}

    @classmethod
    def from_text(cls, text: str) -> "Manifest":
        """Reads what `to_json` gave.

        Raises:
          ValueError: the text is not JSON, or is not what was written.
        """
        content = parse_json(text, "the manifest")
        if not isinstance(content, dict) or content.pop("digest", "") != _digest(
            content
        ):
            raise ValueError("the manifest's digest does not match")
        if content.pop("format") not in _READABLE:
            raise ValueError(
                "the manifest's format belongs to another version of recurjax"
            )
        arrays = {
            name: ArrayEntry(**{**entry, "shape": tuple(entry["shape"])})
            for name, entry in content.pop("arrays").items()
        }
        return cls(arrays=arrays, **content)

    def digest(self, arrays: Mapping[str, Any]) -> str:
        """Returns what names the values of these arrays: a SHA-256 of their checksums.

        It does not depend on the mesh, nor on what else the checkpoint holds.
        """
        sums = {name: self.arrays[name].checksum for name in arrays}
        return _digest(sums)

    def without_other(
        self, expected: Mapping[str, Any], optional: Collection[str]
    ) -> dict[str, Any]:
        """Returns `wanted` without the optional arrays that are not there alike."""
        return {
            name: array
            for name, array in expected.items()
            if name not in optional
            or (name in self.arrays and _kind(self.arrays[name]) == _kind(array))
        }

    def differences(
        self, expected: Mapping[str, Any], optional: Collection[str] = ()
    ) -> list[str]:
        """Lists how the saved arrays differ from the expected ones (shape, dtype).

        Arrays of a top-level part that `expected` does not name do not count, and
        neither do optional ones that it leaves out.
        """
        parts = {_part(name) for name in expected}
        saved = {n: e for n, e in self.arrays.items() if _part(n) in parts}
        lines = []
        for name in sorted(saved.keys() | expected.keys()):
            if name not in expected and name in optional:
                continue
            if name not in expected:
                lines.append(f"{name} is in the checkpoint only")
            elif name not in saved:
                lines.append(f"{name} is not in the checkpoint")
            else:
                there, here = _kind(saved[name]), _kind(expected[name])
                if there != here:
                    lines.append(f"{name} is {there} in the checkpoint, not {here}")
        return lines


def named(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Flattens nested dicts to {"a.b": leaf}, sorted by name; empty dicts vanish.

    Raises:
      ValueError: a key that is not a string, is empty or holds a dot.
    """
    leaves: dict[str, Any] = {}

    def walk(node: Any, path: tuple[str, ...]) -> None:
        if not isinstance(node, Mapping):
            leaves[".".join(path)] = node
            return
        for key, child in node.items():
            if not isinstance(key, str) or not key or "." in key:
                raise ValueError(f"named: keys must be without dots, got {key!r}")
            walk(child, (*path, key))

    walk(tree, ())
    return dict(sorted(leaves.items()))


def nested(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Undoes `named`, empty dicts excepted."""
    tree: dict[str, Any] = {}
    for name, leaf in leaves.items():
        *path, last = name.split(".")
        node = tree
        for key in path:
            node = node.setdefault(key, {})
        node[last] = leaf
    return tree


def filled(tree: Mapping[str, Any], leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Puts named leaves into the places of `tree`, empty dicts included."""

    def walk(node: Any, path: tuple[str, ...]) -> Any:
        if not isinstance(node, Mapping):
            return leaves[".".join(path)]
        return {key: walk(child, (*path, key)) for key, child in node.items()}

    return walk(tree, ())


def _digest(content: dict[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _part(name: str) -> str:
    return name.split(".", 1)[0]


def _kind(array: Any) -> str:
    return f"{array.dtype}[{','.join(map(str, array.shape))}]"
