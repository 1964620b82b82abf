"""Checkpoints of a run: asynchronous, atomic, verified when they are read."""

import json
import math
import threading
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from os import PathLike
from typing import Any, NamedTuple, TypeVar

import jax

from recurjax.config_json import from_json, to_json
from recurjax.errors import UserError, first_few
from recurjax.experiment import model_differences
from recurjax.model import ModelConfig
from recurjax.training.agreement import each_process, every_process, first_process
from recurjax.training.checkpoint.array_store import ArrayStore, reason
from recurjax.training.checkpoint.checksum import checksums
from recurjax.training.checkpoint.manifest import ArrayEntry, Manifest, filled, named
from recurjax.training.checkpoint.step_directory import StepDirectory

T = TypeVar("T")


class NoGoodCheckpoint(UserError):
    """Every checkpoint that was looked at is damaged."""


class Restored(NamedTuple):
    """A verified checkpoint.

    Attributes:
      step: training steps done.
      tree: the arrays, placed as in `abstract`.
      data_states: the data iterator's state in each process of the run that saved.
      digest: digest of the arrays' values, see `Manifest.digest`.
      base: see `Manifest`.
    """

    step: int
    tree: dict[str, Any]
    data_states: list[dict[str, Any]]
    digest: str = ""
    base: dict[str, Any] | None = None

    @property
    def data_state(self) -> dict[str, Any]:
        """The data iterator's state for this process.

        Raises:
          UserError: another number of processes saved, and their states differ.
        """
        if len(self.data_states) == jax.process_count():
            return self.data_states[jax.process_index()]
        # Saved by another number of processes: valid only if all read the same data.
        if any(state != self.data_states[0] for state in self.data_states):
            raise UserError(
                f"checkpoint {self.step} was saved by {len(self.data_states)} "
                f"processes that read different data, so {jax.process_count()} "
                f"processes cannot resume it: start {len(self.data_states)}."
            )
        return self.data_states[0]


class Checkpoints:
    """The checkpoints of one run in one directory.

    The newest `keep` steps stay, and so does the best one: the step saved with the
    lowest loss. Only a step whose caller evaluated has a loss, so most steps are never
    the best. A caller who saves first and evaluates later calls `save` again at the
    same step with the loss, which writes the loss only.

    Reading changes nothing on disk; the first save takes the directory over and removes
    what a killed save left there. In a run of several processes every process calls
    every method at the same point; all see one directory, or each has one (`apart`).
    """

    def __init__(
        self,
        directory: PathLike[str] | str,
        *,
        keep: int = 3,
        keep_best: bool = True,
        model: ModelConfig | None = None,
        after_write: Callable[[], None] | None = None,
        before_read: Callable[[int], None] | None = None,
        apart: bool = False,
    ):
        """Touches nothing on disk.

        Args:
          directory: made by the first save.
          keep: how many of the newest steps stay, at least 1.
          keep_best: whether the step of the lowest loss stays however old it is.
          model: what the arrays are the parameters of: saved with them, and compared
            when they are restored; None: neither.
          after_write: is called in the background whenever a step is on disk. Its
            UserError comes out where the next save waits.
          before_read: is called with a step before it is read; its arrays need not be
            there until then.
          apart: whether each process of the run has a directory of its own, which holds
            its part of the arrays of each step it saved, and all of a step to read.

        Raises:
          ValueError: keep < 1.
        """
        if keep < 1:
            raise ValueError(f"Checkpoints: keep must be at least 1, got {keep}")
        # Kept in memory only: reading must not change what is on disk.
        self._directory = StepDirectory(directory)
        self._keep = keep
        self._keep_best = keep_best
        self._model = model
        self._store = ArrayStore(apart=apart)
        self._apart = apart
        self._before_read = before_read
        self._writing: int | None = None
        self._after_write = after_write
        self._follower: threading.Thread | None = None
        self._fault: Exception | None = None

    def save(
        self,
        step: int,
        tree: Mapping[str, Any],
        *,
        data_state: dict[str, Any],
        loss: float | None = None,
        base: dict[str, Any] | None = None,
    ) -> None:
        """Copies the arrays off the devices and writes them in the background.

        Waits for the save before it. Saving the newest step once more, with the same
        arrays, writes nothing but the loss.

        Args:
          step: not earlier than any step on disk.
          tree: nested dicts of jax.Array; the buffers may be donated afterwards.
          data_state: small, plain JSON; each process gives its own.
          loss: validation loss at this step, if it was measured.
          base: see `Manifest`.

        Raises:
          UserError: the save before this one failed, the directory cannot be written,
            or it holds a later step or other arrays at this step.
          ValueError: a leaf that is not a jax.Array, or a data_state that is not JSON.
        """
        # One save at a time: the last one is on disk before the next begins.
        self.wait()
        arrays = named(tree)
        manifest = Manifest(
            step=step,
            arrays=_entries(arrays),
            data_states=_gathered(data_state),
            # A loss that is not finite can be no best.
            loss=float(loss) if loss is not None and math.isfinite(loss) else None,
            model=None if self._model is None else to_json(self._model),
            base=base,
        )
        # One answer for all, so that all save or none.
        if not self._decided(lambda: self._directory.make_way(manifest)):
            return
        self._directory.damaged.clear()
        try:
            path = self._directory.path(step)
            self._store.start_write(path, arrays, manifest.to_json())
        except OSError as error:
            raise self._not_written(step, error) from error
        self._writing = step
        # A follower that uploads steps waits for them in the background while training
        # continues.
        if self._after_write is not None:
            self._follower = threading.Thread(target=self._follow, daemon=True)
            self._follower.start()

    def restore(
        self,
        abstract: Mapping[str, Any],
        *,
        step: int | None = None,
        report: Callable[[str], None] = print,
        optional: Collection[str] = (),
    ) -> Restored | None:
        """Reads the newest step whose arrays match their checksums.

        Args:
          abstract: nested dicts of jax.ShapeDtypeStruct with shardings, on any mesh. A
            top-level part of the checkpoint that it does not name is not read.
          step: this step and no other; None for the newest good one.
          report: gets a sentence for each step that is left out.
          optional: names of leaves that a checkpoint may lack or have in another shape;
            such leaves are None in the result.

        Returns:
          None when there is no checkpoint at all.

        Raises:
          UserError: no step is good, or `step` is not there, or names, shapes or dtypes
            differ from `abstract`, or it is of another model (the first
            few differences are named).
          ValueError: a leaf of `abstract` without a sharding.
        """
        self.wait()
        expected = named(abstract)
        for name, leaf in expected.items():
            if getattr(leaf, "sharding", None) is None:
                raise ValueError(
                    f"Checkpoints.restore: {name} of abstract needs a sharding"
                )
        root = self._directory.root
        for incomplete in self._decided(self._directory.incomplete):
            report(f"Checkpoint {incomplete} in {root} is incomplete and is left out.")
        # Newest first; on damage, report it and try the next older one.
        faults: dict[int, str] = {}
        for candidate in self._candidates(step):
            # Fetch the step completely, even a damaged one, so that it is set aside as
            # it is.
            if self._before_read is not None:
                self._before_read(candidate)
            try:
                manifest = self._read_manifest(candidate)
                there = manifest.without_other(expected, optional)
                arrays = self._read_arrays(manifest, there, optional)
            except _Damaged as fault:
                faults[candidate] = str(fault)
                self._directory.damaged.add(candidate)
                report(
                    f"Checkpoint {candidate} in {root} is damaged and is left out:"
                    f" {fault}."
                )
                continue
            return Restored(
                candidate,
                filled(abstract, {**dict.fromkeys(expected), **arrays}),
                manifest.data_states,
                manifest.digest(there),
                manifest.base,
            )
        if not faults:
            return None
        reasons = "; ".join(f"{number}: {fault}" for number, fault in faults.items())
        raise NoGoodCheckpoint(f"{root} holds no good checkpoint ({reasons}).")

    def steps(self) -> list[int]:
        """Lists the complete steps, oldest first, without those found damaged."""
        return self._decided(self._directory.complete)

    def best_step(self) -> int | None:
        """Names the step saved with the lowest loss; None when none has a loss."""
        return self._decided(self._directory.best)

    def wait(self) -> None:
        """Waits until the last save is on disk, then removes the steps not kept.

        Raises:
          UserError: that save failed. What it had written is removed; the
            checkpoints before it are as they were.
        """
        if self._writing is None:
            return
        step = self._writing
        try:
            self._finish_write()
        except UserError:  # of what follows a write: the step itself is on disk
            self._writing = None
            raise
        except Exception as error:  # Tensorstore's errors have no class of their own.
            self._writing = None
            raise self._not_written(step, error) from error
        self._writing = None
        # A newer step is complete, so older ones may be removed.
        prune = self._directory.prune
        self._decided(lambda: prune(keep=self._keep, keep_best=self._keep_best))

    def finish(self) -> None:
        """Waits until the last save is on disk, and asks no other process for anything.

        For the end of a run whose processes no longer agree: nothing can follow.
        """
        if self._writing is not None:
            self._finish_write()

    def close(self) -> None:
        """Waits like `wait` and ends the background threads."""
        try:
            self.wait()
        finally:
            self._store.close()

    def _finish_write(self) -> None:
        if self._follower is None:
            return self._store.wait()
        # The follower has waited for the write and done what comes after it.
        self._follower.join()
        fault, self._fault, self._follower = self._fault, None, None
        if fault is not None:
            raise fault

    def _follow(self) -> None:
        """Waits for the write and does what follows it; a thread's own function."""
        assert self._after_write is not None
        try:
            self._store.wait()
            self._after_write()
        except Exception as error:  # raised where the run waits for the write
            self._fault = error

    def _decided(self, action: Callable[[], T]) -> T:
        """Has those who see a directory of their own act on it, with one answer."""
        return each_process(action) if self._apart else first_process(action)

    def _not_written(self, step: int, error: Exception) -> UserError:
        if self._apart or jax.process_index() == 0:
            with suppress(OSError):
                self._directory.remove_leftovers()
        good = self._directory.complete()
        rest = "there is no earlier checkpoint"
        if good:
            rest = f"the last good checkpoint is {good[-1]}"
        return UserError(
            f"checkpoint {step} could not be written to {self._directory.root}:"
            f" {reason(error)}; {rest}."
        )

    def _candidates(self, step: int | None) -> list[int]:
        steps = self.steps()[::-1]
        if step is None:
            return steps
        if step not in steps:
            there = ", ".join(map(str, steps[::-1])) or "none"
            raise UserError(
                f"{self._directory.root} has no checkpoint {step}; it has {there}."
            )
        return [step]

    def _read_manifest(self, step: int) -> Manifest:
        def read() -> list[str]:
            try:
                return [self._directory.manifest_text(step), ""]
            except (OSError, UnicodeDecodeError) as error:
                return ["", f"its manifest cannot be read, {reason(error)}"]

        text, fault = first_process(read)
        if fault:
            raise _Damaged(fault)
        try:
            manifest = Manifest.from_text(text)
        except ValueError as error:
            raise _Damaged(str(error)) from error
        if manifest.step != step:
            raise _Damaged(f"its manifest is a copy of that of step {manifest.step}")
        return manifest

    def _read_arrays(
        self,
        manifest: Manifest,
        shapes: Mapping[str, Any],
        optional: Collection[str] = (),
    ) -> dict[str, jax.Array]:
        path = self._directory.path(manifest.step)
        differences = manifest.differences(shapes, optional)
        differences = differences or self._other_values(manifest)
        if differences:
            raise UserError(
                f"checkpoint {manifest.step} in {self._directory.root} does not fit"
                f" this configuration: {first_few(differences)}."
            )
        arrays, fault = {}, ""
        try:
            arrays = self._store.read(path, shapes)
        except (MemoryError, jax.errors.JaxRuntimeError):
            raise  # The device's fault, not the checkpoint's.
        except Exception as error:  # Tensorstore's errors have no class of their own.
            fault = f"its arrays cannot be read, {reason(error)}"
        # One process may have read its part of a step that another could not.
        if fault := next(filter(None, every_process(fault)), ""):
            raise _Damaged(fault)
        sums = checksums(arrays)
        wrong = [name for name in sums if sums[name] != manifest.arrays[name].checksum]
        if wrong:
            names = first_few(wrong, most=3, separator=", ")
            raise _Damaged(f"wrong checksum of {names}")
        return arrays

    def _other_values(self, manifest: Manifest) -> list[str]:
        """Lists what makes the same arrays another function."""
        if self._model is None or manifest.model is None:
            return []
        # Decoded, so that a field which is newer than the checkpoint has its default.
        saved = from_json(ModelConfig, manifest.model, path="the checkpoint's model")
        different = model_differences(self._model, saved)
        return [f"model.{difference}" for difference in different]


class _Damaged(Exception):
    """A step cannot be used; an older one may be."""


def _entries(arrays: Mapping[str, Any]) -> dict[str, ArrayEntry]:
    for name, array in arrays.items():
        if not isinstance(array, jax.Array):
            raise ValueError(
                "Checkpoints.save: every leaf must be a jax.Array, got "
                f"{name}={type(array).__name__}"
            )
    sums = checksums(arrays)
    return {
        name: ArrayEntry(shape=array.shape, dtype=str(array.dtype), checksum=sums[name])
        for name, array in arrays.items()
    }


def _gathered(data_state: dict[str, Any]) -> list[dict[str, Any]]:
    try:
        text = json.dumps(data_state, allow_nan=False)
        plain = json.loads(text) == data_state
    except (TypeError, ValueError):
        text, plain = "", False
    if not plain:
        raise ValueError(
            f"Checkpoints.save: data_state must be plain JSON, got {data_state}"
        )
    return [json.loads(state) for state in every_process(text)]
