"""The code blocks of the documents and what their marks say of them.

A comment above a block says what a test does with it, where the reader of the source
sees it:

    <!-- test: run -->                      as it is
    <!-- test: run; OLD => NEW; ... -->     with these replacements
    <!-- test: skip, REASON -->
"""

import re
import shlex
from pathlib import Path
from typing import NamedTuple

FENCE = re.compile(
    r"(?:^<!-- test: (?P<mark>[^\n]*?) -->\n)?"
    r"^ *```(?P<language>\w*)\n(?P<body>.*?)^ *```$",
    re.DOTALL | re.MULTILINE,
)
LANGUAGES = ("", "console", "python")
"""Blocks of other languages show files or results."""


class Block(NamedTuple):
    """A block of a document.

    Attributes:
      place: file and line, for messages.
      language: of the fence.
      body: its lines.
      mark: what its comment says after "test:"; None: it has none.
    """

    place: str
    language: str
    body: str
    mark: str | None

    @property
    def skip_reason(self) -> str | None:
        """Why it does not run; None: it does."""
        mark = self.mark or ""
        return mark.removeprefix("skip, ") if mark.startswith("skip, ") else None

    def text(self) -> str:
        """Returns the body with the mark's replacements.

        Raises:
          ValueError: the mark is neither of the two, or replaces what is not there.
        """
        verb, *replacements = (self.mark or "").split("; ")
        if verb != "run":
            raise ValueError(f"{self.place}: a mark is run or skip, got {self.mark!r}")
        body = self.body
        for replacement in replacements:
            old, arrow, new = replacement.partition(" => ")
            if not arrow or old not in body:
                raise ValueError(f"{self.place}: the block has no {old!r} to replace")
            body = body.replace(old, new)
        return body

    def commands(self) -> list[list[str]]:
        """Returns the words of each command; of a block with `$` only such lines."""
        lines = self.text().replace("\\\n", " ").splitlines()
        prompts = [line[2:] for line in lines if line.startswith("$ ")]
        words = [shlex.split(line, comments=True) for line in prompts or lines]
        return [each for each in words if each]


def blocks_of(document: Path) -> list[Block]:
    """Returns the blocks that a reader would run, in order."""
    text = document.read_text()
    return [
        Block(
            f"{document.name}:{text[: match.start('body')].count(chr(10))}",
            match["language"],
            match["body"],
            match["mark"],
        )
        for match in FENCE.finditer(text)
        if match["language"] in LANGUAGES
    ]
