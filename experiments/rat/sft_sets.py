"""data/sft/TASK/train.jsonl for the fine-tuning rows, from the public sets.

Reads files as they are published and writes a prompt and an answer a line, as the
authors write them (see `prompt_of`):

    python experiments/rat/sft_sets.py --narrativeqa 'narrativeqa/train-*.parquet' \
        --qmsum qmsum/data/ALL/jsonl/train.jsonl --wikisum wikisum/train.jsonl

NarrativeQA (deepmind/narrativeqa) gives three tasks: its questions about a summary, the
summary and the text, and the text alone; each question is two rows, one an answer.
QMSum is Yale-LILY/QMSum, WikiSum that of Cohen et al. 2021. Rows are as long as their
sources: training cuts the middle out of a prompt that its row does not hold.
"""

import glob
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recurjax.cli.options import parse, run_script
from recurjax.errors import UserError
from recurjax.files.atomic import write_atomic

Row = dict[str, Any]
Task = Callable[[Row], Iterator[tuple[str, str]]]
"""Makes the prompts and answers of a set's row; its name is the task's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Writes the tasks whose sets are named.

    Attributes:
      narrativeqa, qmsum, wikisum: .parquet or JSON lines, a pattern.
      out: gets a folder a task.
    """

    narrativeqa: str | None = None
    qmsum: str | None = None
    wikisum: str | None = None
    out: Path = Path("data/sft")

    def __post_init__(self):
        if (self.narrativeqa, self.qmsum, self.wikisum) == (None, None, None):
            raise UserError(
                "name at least one set: --narrativeqa, --qmsum or --wikisum FILES"
            )


def prompt_of(kind: str, context: str, question: str) -> str:
    """Returns "KIND: ...", "Question: ..." and "Answer:", empty lines between."""
    return f"{kind}: {context}\n\nQuestion: {question}\n\nAnswer:"


def narrativeqa_summary(row: Row) -> Iterator[tuple[str, str]]:
    """Questions about the summary: Table 4's first setting."""
    return _narrativeqa(row, row["document"]["summary"]["text"])


def narrativeqa_full(row: Row) -> Iterator[tuple[str, str]]:
    """Questions about the summary and the text after it: Table 4's second setting."""
    document = row["document"]
    return _narrativeqa(row, f"{document['summary']['text']}\n\n{document['text']}")


def narrativeqa_passage(row: Row) -> Iterator[tuple[str, str]]:
    """Questions about the text alone: Table 11's setting."""
    return _narrativeqa(row, row["document"]["text"])


def _narrativeqa(row: Row, story: str) -> Iterator[tuple[str, str]]:
    prompt = prompt_of("Story", story, row["question"]["text"])
    for answer in row["answers"]:
        yield prompt, answer["text"]


def qmsum(row: Row) -> Iterator[tuple[str, str]]:
    """General and specific queries about a meeting."""
    turns = row["meeting_transcripts"]
    transcript = "\n".join(f"{turn['speaker']}: {turn['content']}" for turn in turns)
    for query in [*row["general_query_list"], *row["specific_query_list"]]:
        yield prompt_of("Transcript", transcript, query["query"]), query["answer"]


def wikisum(row: Row) -> Iterator[tuple[str, str]]:
    """An article, whose title is the question, and its summary."""
    yield prompt_of("Article", row["article"], row["title"]), row["summary"]


TASKS: dict[str, tuple[Task, ...]] = {
    "narrativeqa": (narrativeqa_summary, narrativeqa_full, narrativeqa_passage),
    "qmsum": (qmsum,),
    "wikisum": (wikisum,),
}


def read(pattern: str) -> Iterator[Row]:
    """Yields the rows of a set's files, in order.

    Raises:
      UserError: no file matches.
    """
    files = sorted(glob.glob(pattern))
    if not files:
        raise UserError(f"no file matches {pattern}")
    for file in files:
        if not file.endswith(".parquet"):
            with Path(file).open(encoding="utf-8") as lines:
                yield from map(json.loads, lines)
            continue
        from pyarrow import parquet  # of the extra `parquet`

        for batch in parquet.ParquetFile(file).iter_batches(batch_size=16):
            yield from batch.to_pylist()


def write(
    pattern: str, task: Callable[[Row], Iterator[tuple[str, str]]], out: Path
) -> int:
    """Writes a task's examples and returns their count."""
    lines = [
        json.dumps({"prompt": prompt, "answer": f" {answer}"}) + "\n"
        for row in read(pattern)
        for prompt, answer in task(row)
    ]
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(out, "".join(lines))
    return len(lines)


def main(argv: list[str] | None = None) -> int:
    """Writes what is named and prints how many examples each task has."""
    argv = sys.argv[1:] if argv is None else argv
    options = parse(Options, argv, prog="sft_sets.py")
    for name, tasks in TASKS.items():
        if (pattern := getattr(options, name)) is None:
            continue
        for task in tasks:
            file = options.out / task.__name__ / "train.jsonl"
            print(f"{file}: {write(pattern, task, file):,} examples")
    return 0


if __name__ == "__main__":
    run_script(main)
