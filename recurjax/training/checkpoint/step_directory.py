"""The files of a run's checkpoints: which steps are there, kept, removed, set aside.

`ROOT/<step>/` holds `state/` (the arrays, written by orbax), `manifest/manifest.json`
(see `manifest.py`) and `commit_success.txt`, which orbax writes last: a step without
it is incomplete. A step found damaged or incomplete is never removed: a save of the
same step renames it to `<step>.damaged` or `<step>.incomplete`.
"""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from os import PathLike
from pathlib import Path

from etils import epath

from recurjax.errors import UserError
from recurjax.files.atomic import write_atomic
from recurjax.training.checkpoint.manifest import Manifest

ARRAYS = "state"
MANIFEST = "manifest"
MANIFEST_FILE = "manifest.json"
PART = "ocdbt.process_"
"""Begins the name of a process' part of the arrays; its number ends it."""
_COMMIT_FILE = "commit_success.txt"
_REMOVING = ".removing"
_UNFINISHED = ".orbax-checkpoint-tmp"


def is_set_aside(name: str) -> bool:
    """Whether a folder of this name is a step that was set aside: `3.damaged-2`."""
    return re.fullmatch(r"\d+\.(damaged|incomplete)(-\d+)?", name) is not None


class StepDirectory:
    """The steps under one root.

    In a run of several processes only one of those that see the root calls it.
    """

    def __init__(self, root: PathLike[str] | str):
        """Touches nothing on disk."""
        self.root = epath.Path(root).resolve()
        self.damaged: set[int] = set()
        """Steps that the caller found damaged: they no longer count as complete."""
        self._taken_over = False

    def path(self, step: int) -> epath.Path:
        """Returns the folder of a step."""
        return self.root / str(step)

    def complete(self) -> list[int]:
        """Lists the steps that were written to their end, oldest first."""
        return [
            step
            for step in self._listed()
            if step not in self.damaged and (self.path(step) / _COMMIT_FILE).exists()
        ]

    def incomplete(self) -> list[int]:
        """Lists the steps that were not written to their end."""
        return sorted({*self._listed()} - {*self.complete()} - self.damaged)

    def manifest_text(self, step: int) -> str:
        """Reads the manifest of a step."""
        return self._manifest_file(step).read_text()

    def best(self) -> int | None:
        """Names the complete step of the lowest loss, the newest one of ties."""
        losses: dict[float, int] = {}
        for step in self.complete():
            try:
                manifest = Manifest.from_text(self.manifest_text(step))
            except (OSError, ValueError):
                continue  # A damaged step is no best step; restoring it says so.
            if manifest.loss is not None and manifest.step == step:
                losses[manifest.loss] = step
        return losses[min(losses)] if losses else None

    def make_way(self, manifest: Manifest) -> bool:
        """Readies the root for a step; False when that step is there already.

        Then its loss is noted, if the manifest has one.

        Raises:
          UserError: the root cannot be written, or holds a later step or other arrays
            at this one.
        """
        step = manifest.step
        with self._writable():
            if not self._taken_over:
                self.root.mkdir(parents=True, exist_ok=True)
                self.remove_leftovers()
                self._taken_over = True
            for damaged in sorted(self.damaged):
                self._set_aside(damaged, "damaged")
            self.damaged.clear()
            newest = max(self.complete(), default=-1)
            if newest > step:
                raise UserError(
                    f"{self.root} holds checkpoint {newest}, which is later than step "
                    f"{step}: move the later ones away or choose another --name."
                )
            if newest == step and self._note_loss(manifest):
                return False
            if self.path(step).exists():
                self._set_aside(step, "incomplete" if newest < step else "damaged")
            return True

    def prune(self, *, keep: int, keep_best: bool) -> None:
        """Removes all complete steps but the newest `keep` and, if given, the best."""
        steps = self.complete()
        stay = {*steps[-keep:], *([self.best()] if keep_best else [])}
        with self._writable():
            for step in steps:
                if step not in stay:
                    # Renamed first: a kill halfway must not leave half a checkpoint.
                    doomed = self.root / f"{step}{_REMOVING}"
                    self.path(step).rename(doomed)
                    doomed.rmtree()

    def remove_leftovers(self) -> None:
        """Removes what a killed or failed save and a killed removal left behind."""
        for path in list(self.root.iterdir()):
            if path.name.endswith(_REMOVING) or _UNFINISHED in path.name:
                path.rmtree()

    def _listed(self) -> list[int]:
        if not self.root.exists():
            return []
        names = [path.name for path in self.root.iterdir()]
        return sorted(int(n) for n in names if n.isdecimal() and str(int(n)) == n)

    def _manifest_file(self, step: int) -> epath.Path:
        return self.path(step) / MANIFEST / MANIFEST_FILE

    def _note_loss(self, manifest: Manifest) -> bool:
        """False when the step on disk has no readable manifest."""
        file = self._manifest_file(manifest.step)
        try:
            there = Manifest.from_text(file.read_text())
        except (FileNotFoundError, ValueError):
            return False
        if there.arrays != manifest.arrays:
            raise UserError(
                f"{self.root} holds another checkpoint of step {manifest.step}: move it"
                " away or save into another directory."
            )
        if manifest.loss is not None and there.loss != manifest.loss:
            text = json.dumps(replace(there, loss=manifest.loss).to_json())
            write_atomic(Path(file), text)
        return True

    def _set_aside(self, step: int, why: str) -> None:
        taken = {path.name for path in self.root.iterdir()}
        name, count = f"{step}.{why}", 1
        while name in taken:
            count += 1
            name = f"{step}.{why}-{count}"
        self.path(step).rename(self.root / name)

    @contextmanager
    def _writable(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            reason = error.strerror or str(error)
            raise UserError(f"{self.root} cannot be written: {reason}.") from error
