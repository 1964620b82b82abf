"""LongBench's English tasks over a folder of its JSON lines.

Each task is the harness' own (`lm_eval/tasks/longbench`), with its prompt, length of an
answer and metric. What changes: items come from a folder, a prompt that does not fit
the window loses its middle as in Bai et al. 2023, and every answer has two figures. The
first ends an answer as LongBench does, the figure `(rat)` as RAT's evaluation does.
"""

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from recurjax.errors import UserError
from recurjax.files.json_files import parse_json

REPETITION_PENALTY = 1.2
"""Of summaries, RAT's: models that were only pretrained repeat themselves there. Ours
counts the prompt's tokens too, RAT's only new ones."""


class Ends(NamedTuple):
    """The pattern before which an answer ends; None: nowhere.

    Attributes:
      longbench: in LongBench's own evaluation, leading line breaks dropped.
      rat: in RAT's, likewise.
      summary: whether RAT's repetition penalty holds.
    """

    longbench: str | None = None
    rat: str | None = None
    summary: bool = False


_QUESTION = r"\nQuestion"
_LINE = r"\n"
_ANSWERS = Ends(rat=_QUESTION)

TASKS = {
    **dict.fromkeys(
        ("narrativeqa", "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "musique"),
        _ANSWERS,
    ),
    "gov_report": Ends(summary=True),
    "qmsum": Ends(rat=rf"{_QUESTION}|\nQuery", summary=True),
    "multi_news": Ends(summary=True),
    "trec": Ends(longbench=_LINE, rat=_QUESTION),
    "triviaqa": Ends(longbench=_LINE, rat=_QUESTION),
    "samsum": Ends(longbench=_LINE),
    "passage_count": Ends(),
    "passage_retrieval_en": Ends(),
    "lcc": Ends(),
    "repobench-p": Ends(),
}
"""By the names of LongBench's files."""


def write_tasks(folder: Path, to: Path, *, window: int) -> None:
    """Writes the definitions of all tasks that have a file in `folder`.

    Args:
      folder: `data` in LongBench's data.zip.
      to: gets one YAML file per task, "offline_longbench_NAME".
      window: tokens of a prompt and its answer.

    Raises:
      UserError: the folder has none of the files.
    """
    names = [name for name in TASKS if (folder / f"{name}.jsonl").is_file()]
    if not names:
        raise UserError(
            f"--longbench: {folder} has none of LongBench's English files, such as "
            "narrativeqa.jsonl: unpack its data.zip and name the folder data"
        )
    from lm_eval import tasks  # pyright: ignore[reportMissingImports]

    stock = Path(tasks.__path__[0]) / "longbench"
    for name in names:
        text = _definition(name, folder, stock / f"{name}.yaml", window)
        (to / f"offline_longbench_{name}.yaml").write_text(text, encoding="utf-8")


def read_items(*, file: str, **_: Any) -> dict[str, Any]:
    """Reads a file's items as the harness takes them: by the name of their split.

    Raises:
      UserError: a line has another format.
    """
    # Not splitlines, to which U+2028 ends a line: JSON has it within strings.
    lines = Path(file).read_bytes().split(b"\n")
    items = [
        _item(parse_json(line, f"line {number} of {file}"), f"line {number} of {file}")
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not items:
        raise UserError(f"{file} has no items: unpack LongBench's data.zip again")
    import datasets  # pyright: ignore[reportMissingImports]

    return {"test": datasets.Dataset.from_list(items)}


def _item(row: Any, where: str) -> dict[str, Any]:
    fields = row if isinstance(row, dict) else {}
    context, question = fields.get("context"), fields.get("input")
    answers = fields.get("answers")
    texts = isinstance(context, str) and isinstance(question, str)
    if not (texts and isinstance(answers, list) and answers):
        raise UserError(
            f"{where} must have context, input and answers, as LongBench's items do"
        )
    return {
        "context": context,
        "question": question,  # the harness' name of the field
        "answers": [str(answer) for answer in answers],
        "all_classes": fields.get("all_classes") or [],
    }


def _definition(name: str, folder: Path, stock: Path, window: int) -> str:
    text, ends = stock.read_text(encoding="utf-8"), TASKS[name]
    version = re.search(r"^\s+version: (\S+)$", text, re.MULTILINE)
    most = re.search(r"max_gen_toks: (\d+)", text)
    assert version is not None and most is not None, stock
    generation: dict[str, Any] = {
        "max_gen_toks": int(most[1]),
        "do_sample": False,
        # The filters end answers, so that both figures are of the same ones.
        "until": [],
        "truncation": "middle",
    }
    settings: dict[str, Any] = {"tokens": window}
    if ends.summary:
        penalty = {"repetition_penalty": REPETITION_PENALTY}
        generation, settings = generation | penalty, settings | penalty
    fields = {
        "include": str(stock),
        "task": f"offline_longbench_{name}",
        "tag": "offline_longbench",
        "dataset_path": None,
        "dataset_name": None,
        "generation_kwargs": generation,
        "filter_list": [
            _filter("none", ends.longbench),
            _filter("rat", ends.rat),
        ],
        "metadata": {
            "version": float(version[1]),
            "file": str(folder / f"{name}.jsonl"),
            "settings": settings,
        },
    }
    # JSON is YAML, but for the tag of a function.
    lines = [f"{key}: {json.dumps(value)}" for key, value in fields.items()]
    return "\n".join([*lines, f"custom_dataset: !function {__name__}.read_items", ""])


def _filter(name: str, end: str | None) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [{"function": "take_first"}]
    if end is not None:
        pattern = rf"\A\n*([\s\S]*?)(?={end}|\Z)"
        steps.insert(0, {"function": "regex", "regex_pattern": pattern})
    return {"name": name, "filter": steps}
