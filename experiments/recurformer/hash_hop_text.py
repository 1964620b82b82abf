"""HashHop's problems as text, for models whose tokens are not bytes.

One JSON object a line with "text": prompt and answer, of the paper's size (strings of
8, chains of 16, 6,144 characters), drawn from the rows to learn from, so that
`recurjax evaluate` on the task's own test meets none of them.

    python experiments/recurformer/hash_hop_text.py --out hash_hop.jsonl --rows 100000
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from recurjax.cli.options import parse, run_script
from recurjax.data.tasks import HashHop, row_of
from recurjax.errors import UserError
from recurjax.files.atomic import refuse_existing, write_atomic


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Writes problems of HashHop.

    Attributes:
      out: the file.
      rows: how many.
      seed: seed of the rows.
      size, hops, length: size, hops and length of the task, in characters.
    """

    out: Path
    rows: int
    seed: int = 0
    size: int = 8
    hops: int = 16
    length: int = 6144

    def __post_init__(self):
        if self.rows < 1:
            raise UserError("--rows must be at least 1")


def main(argv: list[str] | None = None) -> int:
    """Writes the file."""
    argv = sys.argv[1:] if argv is None else argv
    options = parse(Options, argv, prog="hash_hop_text.py")
    refuse_existing(options.out)
    task = HashHop(size=options.size, hops=options.hops, length=options.length)
    filled = task.length_of(task.pairs)
    lines = []
    for number in range(options.rows):
        row = row_of(task, seed=options.seed, split="train", number=number)
        text = row.ids[:filled].astype("uint8").tobytes().decode()
        lines.append(json.dumps({"text": text}) + "\n")
    write_atomic(options.out, "".join(lines))
    return 0


if __name__ == "__main__":
    run_script(main)
