"""How an answer is scored: RULER's way, and RAT's."""

from collections.abc import Sequence


def string_match(answer: str, wanted: Sequence[str]) -> float:
    """Returns the share of wanted strings that an answer contains, case aside.

    Source: Hsieh et al. 2024, RULER's `string_match_all`, of one item and from 0 to 1.
    """
    said = answer.lower()
    return sum(one.lower() in said for one in wanted) / len(wanted)


def rat_share(answer: str, wanted: Sequence[str]) -> float:
    """Returns the share of wanted strings among an answer's parts between commas.

    Exact match, as a set: what is said twice counts once, and a number with a digit
    too many is wrong. Source: RAT, appendix C.4. A sentence's end and an "and" before
    the last part do not count as part of it.
    """
    # Only the first line is the answer; models often go on to a next question.
    parts = {
        part.strip().removeprefix("and ").strip().rstrip(".").lower()
        for part in answer.strip().split("\n")[0].split(",")
    }
    asked = {one.lower() for one in wanted}
    return len(asked & parts) / len(asked)
