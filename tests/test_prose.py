"""Comments, docstrings and documents avoid words that a stranger stumbles over."""

import re
from collections import Counter

from tests.source_tree import FOLDERS, ROOT, documents

MOST = 4.0
"""Occurrences of one marker per 10,000 words."""
MARKERS = {
    "told": "say who says it: prints, reports, returns, is passed",
    "asked": "requested, checked, required",
    "beside": "next to, alongside, compared with, in addition to",
    "anew": "again, or the verb with re-: rewrites, recomputes",
    "whole": "full, entire, complete; an integer is no whole number",
    "lies": "is; on a mesh: is sharded",
    "stands": "is, means, replaces",
    "so many": "name the argument that has the number",
    "what there is": "name it",
}
"""Each marker, and what the field writes instead."""
LONGEST_HEADING = 120
"""Characters; headings of measurements hold their command."""
PROSE = re.compile(r'"""(.*?)"""|(?:^|\s)#:? ([^\n]*)', re.DOTALL | re.MULTILINE)


def prose() -> dict[str, str]:
    """Returns documents, and the docstrings and comments of code, by file."""
    texts = {str(path.relative_to(ROOT)): path.read_text() for path in documents()}
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            pieces = PROSE.findall(path.read_text())
            texts[str(path.relative_to(ROOT))] = "\n".join(a or b for a, b in pieces)
    return texts


def test_no_marker_word_is_frequent():
    texts = prose()
    words = sum(len(text.split()) for text in texts.values())
    for marker, instead in MARKERS.items():
        pattern = re.compile(rf"\b{marker}\b", re.IGNORECASE)
        counts = Counter({name: len(pattern.findall(x)) for name, x in texts.items()})
        rate = 1e4 * counts.total() / words
        most = ", ".join(f"{name} {n}" for name, n in counts.most_common(5))
        assert rate <= MOST, f"{marker}: {rate:.1f} of 10,000 words ({instead}): {most}"


def test_headings_and_tables_have_lines_of_their_own():
    """Joined to the paragraph or the row behind them they are not rendered as such."""
    for path in documents():
        for line in path.read_text().splitlines():
            joined = "|---|" in line and re.search(r"[a-z]", line)
            long = re.match("#+ ", line) and len(line) > LONGEST_HEADING
            assert not joined and not long, f"{path.relative_to(ROOT)}: {line[:100]}"
