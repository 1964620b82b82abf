"""What the code above a model reads from the configuration of any stack."""

from typing import TypeVar

_Config = TypeVar("_Config", bound="StackFacts")


class StackFacts:
    """The facts that every stack's config states; a config overrides what differs.

    `ModelConfig` passes them on. They are properties, not fields, so that no run's
    config.json changes when a fact is added.
    """

    __slots__ = ()

    @property
    def max_length(self) -> int | None:
        """The most tokens that a sequence can have; None: no limit."""
        return None

    @property
    def training_length(self) -> int | None:
        """The length of training that the stack's windows come from; None: any."""
        return None

    @property
    def takes_segments(self) -> bool:
        """Whether, called on entire rows, the stack tells their documents apart."""
        return True

    @property
    def table_rows(self) -> int | None:
        """Rows of the stack's own tables by token id; None: it has no such table.

        They must equal the rows of the model's embedding.
        """
        return None

    def with_table_rows(self: _Config, rows: int) -> _Config:
        """Returns the config with `rows` rows in each of the stack's own tables."""
        del rows
        return self
