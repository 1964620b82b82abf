"""What both ways over depth are given, and what they ask of a stack with loops."""

from dataclasses import dataclass
from typing import Any

from recurjax.exits import ExitHead, RuleKind, exits_of
from recurjax.model import Decoder


@dataclass(frozen=True, kw_only=True)
class OverDepth:
    """A step is one pass of the block; a rule says which tokens it trusts.

    The rule's threshold is each request's.

    Attributes:
      kind: of the rule.
    """

    kind: RuleKind

    def weights(
        self, model: Decoder, head: ExitHead | None = None
    ) -> tuple[Any, ExitHead | None]:
        """What the loops own, laid out for ticks, and the head of the rule "head"."""
        return exits_of(model).tick_weights(), head

    def loops(self, model: Decoder) -> int:
        """All that the stack has."""
        return exits_of(model).exits
