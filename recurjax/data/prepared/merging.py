"""Joins the parts that several machines prepared to what one would have written."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from recurjax.data.prepared.directory import (
    TOKENIZER,
    Manifest,
    PreparedStream,
    read_manifest,
    verify_checksums,
)
from recurjax.data.prepared.shard_writer import BLOCK, ShardWriter, records_of
from recurjax.data.prepared.writing import (
    BYTES,
    PART,
    Progress,
    Written,
    stored_type,
    write_manifest,
    written_to,
)
from recurjax.data.tokenizers import load_tokenizer
from recurjax.errors import UserError
from recurjax.files.json_files import read_json_object

_AT_ONCE = BLOCK << 10
"""Tokens of a part that are copied at a time."""


def merge(
    parts: Sequence[str | Path],
    out: str | Path,
    *,
    progress: Callable[[Progress], None] = lambda _: None,
) -> Manifest:
    """Joins the parts that `prepare` wrote to what it would have written at once.

    The tokens, the files they lie in and the manifest are the same, byte for byte.

    Args:
      parts: the directories, in any order.
      out: the new directory; it appears whole or not at all.
      progress: is called now and then.

    Raises:
      UserError: `out` is taken, a directory is no part, one is missing or there twice,
        or they are parts of different preparations.
    """
    out = Path(out).expanduser()
    found = _parts([Path(part).expanduser() for part in parts])
    manifests = [read_manifest(folder) for folder, _ in found]
    of = found[0][1]
    tokenizer = load_tokenizer(found[0][0] / TOKENIZER)
    # One part's serves for all: that they name the same one was checked with the rest.
    if tokenizer.hash != of["tokenizer"]:
        raise UserError(
            f"{found[0][0] / TOKENIZER} is not the tokenizer that made the tokens: "
            "prepare that part again"
        )
    total = sum(manifest.tokens for manifest in manifests)
    with written_to(out, {"merged": [m.index_sha256 for m in manifests]}) as partial:
        folder = partial.folder
        tokenizer.save(folder / TOKENIZER)
        writer = ShardWriter(folder, records_of(of["shard_tokens"]))
        dtype = stored_type(tokenizer.vocabulary)
        # A part may end inside a record, which the next part's first tokens then fill.
        pending = b""
        before, starts, sizes = 0, [], []
        for (part, _), manifest in zip(found, manifests, strict=True):
            # A damaged part would be written with new checksums, and never be found.
            verify_checksums(part)
            stream = PreparedStream(part, manifest)
            for begin in range(0, stream.tokens, _AT_ONCE):
                end = min(begin + _AT_ONCE, stream.tokens)
                [ids] = stream.read([(begin, end)])
                pending = writer.write_whole_records(
                    pending + ids.astype(dtype).tobytes(), BLOCK * dtype.itemsize
                )
                documents = int(np.searchsorted(stream.starts, end))
                told = sum(map(len, starts)) + documents
                progress(Progress(before + end, total, told, before + end))
            # Begins count from the first token of all parts.
            starts.append(stream.starts + before)
            sizes.append(np.load(part / BYTES, allow_pickle=False))
            before += stream.tokens
        if pending:
            writer.write(pending)
        written = Written(
            starts=np.concatenate(starts),
            document_bytes=np.concatenate(sizes),
            tokens=total,
            text_bytes=sum(manifest.text_bytes for manifest in manifests),
            shards=writer.finish(),
        )
        return write_manifest(
            folder,
            written,
            corpus=of["corpus"],
            tokenizer=tokenizer,
            validation_fraction=of["validation_fraction"],
        )


def _parts(folders: list[Path]) -> list[tuple[Path, dict[str, Any]]]:
    """Reads what parts are of, and puts them in their order."""
    found: dict[int, tuple[Path, dict[str, Any]]] = {}
    first: tuple[Path, dict[str, Any]] | None = None
    count = 0
    for folder in folders:
        if not (folder / PART).is_file():
            raise UserError(
                f"{folder} is no part: make parts with `recurjax data prepare --part`"
            )
        of = read_json_object(folder / PART, "what a part is of")
        number, count = of.pop("part")
        first = first or (folder, {**of, "parts": count})
        # All but the number of the part itself must be alike.
        mine = {**of, "parts": count}
        differing = [name for name in mine if mine[name] != first[1].get(name)]
        if differing:
            raise UserError(
                f"{folder} and {first[0]} are parts of different preparations (other "
                f"{', '.join(differing)}): prepare them in the same way"
            )
        if number in found:
            raise UserError(
                f"{folder} and {found[number][0]} are both part {number}/{count}"
            )
        found[number] = folder, mine
    missing = [str(n) for n in range(1, count + 1) if n not in found]
    if missing or not found:
        raise UserError(
            f"part {', '.join(missing)} of {count} is missing: name all of them"
            if found
            else "name the parts to merge"
        )
    return [found[number] for number in sorted(found)]
