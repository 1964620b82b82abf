"""What to fine-tune on: examples of which a part is learned, and how rows hold them."""

from dataclasses import dataclass
from typing import Literal

from recurjax.errors import UserError


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptAnswer:
    """Prompts with answers, a JSON object a line (`.gz` too): the answers are learned.

    Loss counts on the answer's tokens and on the EOS that ends it. An example that is
    longer than a row loses the middle of its prompt, so that its beginning and its end
    stay, as RAT's fine-tuning does. An epoch is every example once.

    Attributes:
      patterns: paths or globs.
      prompt, answer: the fields with the two texts, which are joined as they stand: a
        space between them is part of one of them. A line may have `messages` instead,
        objects with role and content, the last one the assistant's answer.
      template: a Jinja file that writes a conversation for the model, such as a chat
        tokenizer's; BOS is read where it writes one. None: BOS, if there is one, and
        "role: content" a line. Needs pip install jinja2.
      rows: "one": an example a row, filled up; "packed": as many as fit into a row,
        which do not see each other.
    """

    patterns: tuple[str, ...]
    prompt: str = "prompt"
    answer: str = "answer"
    template: str | None = None
    rows: Literal["one", "packed"] = "one"

    def __post_init__(self):
        require_patterns(self, self.patterns)
        _require_rows(self, self.rows)


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversations:
    """Conversations with an assistant, a line or a Parquet row each.

    Loss counts on all that the assistant says and on the token that ends each of its
    turns; what the template writes around them is read. One that is longer than a row
    loses its end; a beginning that leaves an answer less than half of the row loses its
    middle. An epoch is every conversation once.

    Attributes:
      patterns: paths or globs of JSON lines (`.gz` too) or of .parquet files.
      field: holds the messages, objects with role and content.
      template: a Jinja file that writes them for the model; None: the one that came
        with the tokenizer. Needs pip install jinja2.
      rows: "packed": as many as fit into a row, which do not see each other; "one": a
        conversation a row, filled up.
    """

    patterns: tuple[str, ...]
    field: str = "messages"
    template: str | None = None
    rows: Literal["one", "packed"] = "packed"

    def __post_init__(self):
        require_patterns(self, self.patterns)
        _require_rows(self, self.rows)


Examples = PromptAnswer | Conversations


def require_patterns(corpus: object, patterns: tuple[str, ...]) -> None:
    """Refuses patterns that name no file."""
    # One string would be read as a list of patterns of one letter each.
    if isinstance(patterns, str) or not patterns or not all(patterns):
        raise UserError(
            f"{type(corpus).__name__}: patterns must name at least one file or glob, "
            f"got {patterns!r}"
        )


def _require_rows(corpus: object, rows: str) -> None:
    if rows not in ("one", "packed"):
        raise UserError(
            f"{type(corpus).__name__}: rows must be one or packed, got {rows!r}"
        )
