"""The only use of orbax: writes the arrays of a step and reads them again."""

import asyncio
import errno
import logging
import math
import re
import sys
import tempfile
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
import tensorstore as ts
from etils import epath

from recurjax.training.checkpoint.manifest import named, nested
from recurjax.training.checkpoint.step_directory import (
    ARRAYS,
    MANIFEST,
    MANIFEST_FILE,
    PART,
)

_INDEX = "manifest.ocdbt"
"""The index of the arrays' files, in a part and in the joined parts."""


class ArrayStore:
    """Writes steps in the background, one at a time, and reads them."""

    def __init__(self, *, apart: bool = False):
        """Writes nothing yet.

        Args:
          apart: whether the processes of a run have folders of their own. Then each
            writes a complete step there, with only its own part of the arrays; `read`
            joins the parts once they are in one folder.
        """
        _wait_after_errors()
        # In orbax' terms: each process manages its own folder.
        processes = ocp.options.MultiprocessingOptions(
            primary_host=None if apart else 0
        )
        # Orbax logs what it does, and prints tracebacks of errors that it raises as
        # well. The filter stays: threads of a failed write speak after it was closed.
        logging.getLogger("absl").addFilter(_is_not_orbax)
        # With plain arrays only, orbax needs no files on their layout and shardings.
        arrays = ocp.type_handlers.ArrayHandler(
            primary_host=processes.primary_host, enable_write_sharding_file=False
        )
        types = ocp.type_handlers.create_type_handler_registry((jax.Array, arrays))
        # Trained weights hardly compress, and trying takes half as much CPU again.
        handler = _Parts if apart else ocp.PyTreeCheckpointHandler
        self._handler = handler(
            type_handler_registry=types,
            use_compression=False,
            multiprocessing_options=processes,
        )
        registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
        registry.add(ARRAYS, ocp.args.PyTreeSave, self._handler)
        manifests = ocp.JsonCheckpointHandler(
            filename=MANIFEST_FILE, multiprocessing_options=processes
        )
        registry.add(MANIFEST, ocp.args.JsonSave, manifests)
        # Directories are made before `start_write` returns: made in the background, one
        # that cannot be made leaves its writers waiting for many minutes.
        options = ocp.AsyncOptions(create_directories_asynchronously=False)
        composite = ocp.CompositeCheckpointHandler(
            handler_registry=registry,
            composite_options=ocp.CompositeOptions(
                async_options=options, multiprocessing_options=processes
            ),
        )
        self._writer = ocp.AsyncCheckpointer(
            composite, async_options=options, multiprocessing_options=processes
        )

    def start_write(
        self,
        path: epath.Path,
        arrays: Mapping[str, jax.Array],
        manifest: Mapping[str, Any],
    ) -> None:
        """Copies the arrays off the devices and writes them in the background."""
        # Nested, as in every step written so far: orbax finds no name of a nested step
        # by its dotted form, so another layout would need two ways to read.
        tree = nested(_with_elements(arrays))
        if not tree:
            raise ValueError(
                "ArrayStore.start_write: arrays must have at least one element"
            )
        items = {
            ARRAYS: ocp.args.PyTreeSave(tree),
            MANIFEST: ocp.args.JsonSave(manifest),
        }
        try:
            self._save(path, ocp.args.Composite(**items))
        except Exception:
            self._drop_errors()
            raise

    def wait(self) -> None:
        """Waits for the write; raises whatever made it fail."""
        try:
            self._writer.wait_until_finished()
        except Exception:
            self._drop_errors()
            raise

    def read(self, path: epath.Path, shapes: Mapping[str, Any]) -> dict[str, jax.Array]:
        """Reads the arrays that `wanted` names, in its shapes, dtypes and shardings.

        Raises:
          Exception: any exception: the data on disk cannot be read.
        """
        item = _with_elements(shapes)
        places = {
            name: ocp.ArrayRestoreArgs(sharding=leaf.sharding)
            for name, leaf in item.items()
        }
        args = ocp.args.PyTreeRestore(
            item=nested(item), restore_args=nested(places), partial_restore=True
        )
        with _joined(Path(path / ARRAYS)) as folder:
            arrays = named(self._handler.restore(epath.Path(folder), args=args))
        for name, leaf in item.items():
            # Partial restoring is silent about missing names: orbax returns the
            # requested abstract array for them.
            if not isinstance(arrays[name], jax.Array):
                raise ValueError(f"{name} is missing")
            if (arrays[name].shape, arrays[name].dtype) != (leaf.shape, leaf.dtype):
                raise ValueError(f"{name} has a different shape or dtype")
        empty = {n: leaf for n, leaf in shapes.items() if n not in item}
        return arrays | {n: _without_elements(leaf) for n, leaf in empty.items()}

    def close(self) -> None:
        """Waits for the write and ends the background threads."""
        self._writer.close()

    def _save(self, path: epath.Path, args: ocp.args.Composite) -> None:
        try:
            self._writer.save(path, args=args)
        except FileExistsError:
            # Tensorstore's threads outlive a write that failed for a full disk, and may
            # create its directory again after it was removed. Where they do so between
            # orbax's look and its mkdir, the next look finds that directory and removes
            # it.
            self._drop_errors()
            self._writer.save(path, args=args)

    def _drop_errors(self) -> None:
        """Ends a failed write's other parts, lest the next call raise their errors.

        Orbax raises one error a call: the arrays', then those of two metadata files.
        """
        for _ in range(3):
            with suppress(Exception):
                self._writer.wait_until_finished()


class _Parts(ocp.PyTreeCheckpointHandler):
    """Writes this process' part of the arrays and leaves the parts apart."""

    def finalize(self, directory: epath.Path) -> None:
        # Orbax would join the parts in this folder, which has this process' part only.
        del directory


@contextmanager
def _joined(folder: Path) -> Iterator[Path]:
    """Gives a step's arrays as one store, for the time of a block.

    Parts that several processes wrote to folders of their own are joined in a folder
    aside, of links and an index: reading changes nothing in the step's own folder.
    """
    if (folder / _INDEX).exists() or not any(folder.glob(f"{PART}*")):
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="recurjax-joined-") as temporary:
        aside = Path(temporary)
        for entry in folder.iterdir():
            (aside / entry.name).symlink_to(entry.resolve())
        context, join = ts.Context(), ts.Transaction(atomic=True)
        joined = _index(aside, context).with_transaction(join)
        # A part without an index is of a process that had nothing to write.
        parts = [p for p in sorted(aside.glob(f"{PART}*")) if (p / _INDEX).exists()]
        for part in parts:
            # The joined index names the parts' own files: no array is copied.
            _index(part, context).experimental_copy_range_to(joined).result()
        join.commit_sync()
        yield aside


def _index(folder: Path, context: ts.Context) -> ts.KvStore:
    spec = {"driver": "ocdbt", "base": f"file://{folder.as_posix()}/"}
    return ts.KvStore.open(spec, context=context).result()


def reason(error: BaseException) -> str:
    """Returns in a few words what is wrong with the disk or the files."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = str(error)
    full = errno.ENOSPC, errno.EDQUOT
    if getattr(error, "errno", None) in full or "No space left on device" in text:
        return "no space left on the device"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror + (f": {error.filename}" if error.filename else "")
    # Tensorstore appends its own state in brackets and puts the cause last.
    text = " ".join(re.split(r" \[\w+='", text)[0].split()).rstrip(".")
    text = text if len(text) <= 240 else f"{text[:100]} ... {text[-140:]}"
    return f"{type(error).__name__}: {text}"


def _is_not_orbax(record: logging.LogRecord) -> bool:
    return "orbax" not in record.pathname


def _wait_after_errors() -> None:
    """Makes orbax wait for all parts of a read or write of which one failed.

    Orbax starts an event loop for each in threads of its own and has no option to
    choose that loop; an event loop policy would change every other library's loops too.
    So its private function that runs one is replaced. An orbax without that function
    (pyproject.toml bounds the version) is left alone: a save on a full disk then prints
    tracebacks of orbax's before it ends in our sentence.
    """
    loops = sys.modules.get("orbax.checkpoint._src.asyncio_utils")
    if hasattr(loops, "_run_sync_via_new_loop"):
        setattr(loops, "_run_sync_via_new_loop", _run_to_the_end)  # noqa: B010


def _run_to_the_end(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Runs a coroutine in a new event loop; after an error, what it had started too.

    Orbax closes the loop at the first error: each read and write still under way then
    prints a traceback, and writes continue into a directory that is being removed.
    """
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    try:
        return loop.run_until_complete(coroutine)
    except Exception:
        loop.run_until_complete(_finish_all())
        raise
    finally:
        asyncio.set_event_loop(None)
        loop.close()


async def _finish_all() -> None:
    while others := asyncio.all_tasks() - {asyncio.current_task()}:
        await asyncio.gather(*others, return_exceptions=True)


def _with_elements(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Leaves out what orbax does not write: arrays of no elements."""
    return {name: array for name, array in arrays.items() if math.prod(array.shape)}


def _without_elements(abstract: Any) -> jax.Array:
    zeros = partial(jnp.zeros, abstract.shape, abstract.dtype)
    return jax.jit(zeros, out_shardings=abstract.sharding)()
