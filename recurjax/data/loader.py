"""Batches of one split, and the place in them that a checkpoint keeps."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import grain
import numpy as np

from recurjax.data.config import DataConfig
from recurjax.data.pipeline import (
    Batch,
    Layout,
    best_fit,
    best_fit_in_order,
    concatenated,
    count_best_fit_in_order,
    in_order,
)
from recurjax.data.shuffle import order_identity
from recurjax.data.streams import Split
from recurjax.data.tokenizers import Tokenizer
from recurjax.errors import UserError


class RowsOfText:
    """What every data set of text answers alike; a task's rows differ in each."""

    tokenizer: Tokenizer

    @property
    def vocabulary(self) -> int:
        return self.tokenizer.vocabulary

    def evaluation_length(self, length: int) -> int:
        """Returns the places of a row in evaluations: as in training."""
        return length

    def slices(self, split: str, *, batch: int) -> None:
        """Returns None: rows of text are not told apart."""


@dataclass(frozen=True, kw_only=True)
class Loader:
    """Batches of one split; each `iter` begins anew.

    Attributes:
      part: the split drawn from.
      config: how it is packed, and how far ahead batches are made.
      layout: the shape of a batch and this process' rows of it.
      in_order: one pass in order, not endless and shuffled.
      seed: of the shuffle.
      fingerprint: of the data, to refuse a place in other data.
    """

    part: Split
    config: DataConfig
    layout: Layout
    in_order: bool
    seed: int
    fingerprint: str

    def __iter__(self) -> "Batches":
        return Batches(iter(self._pipeline), self.identity)

    @property
    def order_count(self) -> int:
        """Numbers that are shuffled: documents for best fit, else rows."""
        if self.config.packing == "best_fit":
            return len(self.part.document_starts())
        return (self.part.tokens - 1) // self.layout.length

    @property
    def batches(self) -> int | None:
        """Batches in the pass; None: endless."""
        if not self.in_order:
            return None
        if self.config.packing == "best_fit":
            return count_best_fit_in_order(
                self.part, self.layout, buffer=self.config.packing_buffer
            )
        # Every token but the first is a target once; the last batch is filled up.
        return -(-(self.part.tokens - 1) // (self.layout.length * self.layout.batch))

    @cached_property
    def _pipeline(self) -> grain.IterDataset[Batch]:
        # Only best fit has a buffer of documents, and only concatenation uses threads.
        config, ahead = self.config, {"prefetch": self.config.prefetch}
        if config.packing == "best_fit":
            ahead["buffer"] = config.packing_buffer
            if self.in_order:
                return best_fit_in_order(self.part, self.layout, **ahead)
            return best_fit(self.part, self.layout, seed=self.seed, **ahead)
        ahead["threads"] = config.threads
        if self.in_order:
            return in_order(self.part, self.layout, **ahead)
        return concatenated(self.part, self.layout, seed=self.seed, **ahead)

    @cached_property
    def identity(self) -> dict[str, Any]:
        """All that the meaning of a position depends on, and not on the processes."""
        # Threads and prefetch change when a batch is made, not what it holds.
        order = {} if self.in_order else order_identity(self.order_count)
        return {
            **order,
            "data": self.fingerprint,
            "split": self.part.name,
            "in_order": self.in_order,
            "packing": self.config.packing,
            "packing_buffer": self.config.packing_buffer,
            "seed": self.seed,
            "length": self.layout.length,
            "batch": self.layout.batch,
        }


def identity_of_rows(
    fingerprint: str,
    split: str,
    layout: Layout,
    *,
    in_order: bool,
    seed: int,
    count: int | None,
) -> dict[str, Any]:
    """Returns what a position among rows made from their numbers depends on.

    Args:
      count: rows of an epoch that are shuffled; None: endless new rows.
    """
    return {
        **({} if in_order or count is None else order_identity(count)),
        "data": fingerprint,
        "split": split,
        "in_order": in_order,
        "seed": seed,
        "length": layout.length,
        "batch": layout.batch,
    }


class Batches:
    """An iterator of batches whose state is small, exact and JSON-able."""

    def __init__(
        self, iterator: grain.DatasetIterator[Batch], identity: dict[str, Any]
    ):
        self._iterator, self._identity = iterator, identity

    def __iter__(self) -> "Batches":
        return self

    def __next__(self) -> Batch:
        return next(self._iterator)

    def get_state(self) -> dict[str, Any]:
        """Returns the position after the last batch delivered, as JSON allows."""
        position = _plain(self._iterator.get_state())
        return {"loader": self._identity, "position": position}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues at a saved position, on any division of the rows.

        Raises:
          UserError: it was saved with other data, batch, length, seed or packing, or
            by a version that shuffled otherwise.
        """
        saved = state["loader"]
        if "shuffle" in self._identity and "shuffle" not in saved:
            raise UserError(
                "the saved place in the data is of an older recurjax, which shuffled "
                "these rows in another order: resume with that version, or start a new "
                "run"
            )
        for name, value in self._identity.items():
            # Compared by the saved value: a field that is missing there differs too.
            if saved.get(name) != value:
                raise UserError(
                    f"the saved place in the data was made with {name} "
                    f"{saved.get(name)}, now it is {value}: restore that setting or "
                    "start a new run"
                )
        self._iterator.set_state(state["position"])

    def close(self) -> None:
        """Ends the threads that read ahead."""
        self._iterator.close()


def _plain(state: Any) -> Any:
    """Returns a state with lists in the place of arrays."""
    if isinstance(state, dict):
        return {name: _plain(value) for name, value in state.items()}
    if isinstance(state, list | tuple):
        return [_plain(value) for value in state]
    return state.tolist() if isinstance(state, np.ndarray) else state
