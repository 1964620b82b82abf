"""LongBench's metrics, from 0 to 1: an answer beside one right answer.

Source: Bai et al. 2023 and the public `metrics.py`, whose figures these are, its ways
with several matches included.
"""

import difflib
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence

from recurjax.errors import UserError
from recurjax.evaluation.longbench.tasks import Metric


def f1(answer: str, right: str) -> float:
    """Returns the F1 of the words: case, punctuation and articles aside."""
    said, wanted = _words(answer), _words(right)
    # A word counts as often as both sides have it.
    common = sum((Counter(said) & Counter(wanted)).values())
    if not common:
        return 0.0
    precision, recall = common / len(said), common / len(wanted)
    return 2 * precision * recall / (precision + recall)


def rouge_l(answer: str, right: str) -> float:
    """Returns ROUGE-L's F of package `rouge`, over sentences; 0 where it has none.

    Raises:
      UserError: the package is not installed.
    """
    try:
        from rouge import Rouge  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise UserError(
            "LongBench's summaries are scored by a package: pip install "
            "'recurjax[longbench]'"
        ) from error
    try:
        return Rouge(["rouge-l"]).get_scores([answer], [right], avg=True)["rouge-l"][
            "f"
        ]
    except (ValueError, RecursionError):  # nothing was said, or one endless sentence
        return 0.0


def classification(answer: str, right: str, classes: Sequence[str]) -> float:
    """Returns 1 over the classes that are named, where the right one is among them.

    A class whose name is a part of the right one's is not counted. As in LongBench the
    one that comes after it is not looked at, and stays.
    """
    named = [one for one in classes if one in answer]
    at = 0
    while at < len(named):
        if named[at] in right and named[at] != right:
            del named[at]
        at += 1
    return 1 / len(named) if right in named else 0.0


def count(answer: str, right: str) -> float:
    """Returns the share of the numbers said that are the right one."""
    said = re.findall(r"\d+", answer)
    return said.count(right) / len(said) if said else 0.0


def retrieval(answer: str, right: str) -> float:
    """Returns the share of the numbers said that are the right paragraph's."""
    found = re.search(r"Paragraph (\d+)", right)
    return 0.0 if found is None else count(answer, found[1])


def edit_similarity(answer: str, right: str) -> float:
    """Returns how alike the first line of code and the right one are.

    Lines with a backtick, # or // are no code. The ratio is difflib's, in whole
    percent: what `fuzzywuzzy` has where no Levenshtein package is installed.
    """
    lines = answer.lstrip("\n").split("\n")
    code = [line for line in lines if not any(m in line for m in ("`", "#", "//"))]
    line = code[0] if code else ""
    if not line or not right:
        return 0.0
    matcher = difflib.SequenceMatcher(None, line, right)
    return round(100 * matcher.ratio()) / 100


SCORES: dict[Metric, Callable[[str, str], float]] = {
    "f1": f1,
    "rouge_l": rouge_l,
    "retrieval": retrieval,
    "count": count,
    "edit_similarity": edit_similarity,
}
"""All but the classification, which needs the classes."""


def best_score(
    metric: Metric, answer: str, rights: Sequence[str], classes: Sequence[str]
) -> float:
    """Returns the score beside the right answer that fits best."""
    if metric == "classification":
        return max(classification(answer, right, classes) for right in rights)
    return max(SCORES[metric](answer, right) for right in rights)


def _words(text: str) -> list[str]:
    bare = "".join(c for c in text.lower() if c not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", bare).split()
