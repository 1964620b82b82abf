"""What is read back of a checkpoint."""

from typing import Any, NamedTuple

import jax

from recurjax.errors import UserError


class Restored(NamedTuple):
    """A verified checkpoint.

    Attributes:
      step: training steps done.
      tree: the arrays, placed as `abstract` asked.
      data_states: the data iterator's state in each process of the run that saved.
      digest: of the arrays' values, see `Manifest.digest`.
    """

    step: int
    tree: dict[str, Any]
    data_states: list[dict[str, Any]]
    digest: str = ""

    @property
    def data_state(self) -> dict[str, Any]:
        """The data iterator's state for this process.

        Raises:
          UserError: another number of processes saved, and their states differ.
        """
        if len(self.data_states) == jax.process_count():
            return self.data_states[jax.process_index()]
        # From another number of processes: their places agree only where all read the
        # same.
        if any(state != self.data_states[0] for state in self.data_states):
            raise UserError(
                f"checkpoint {self.step} was saved by {len(self.data_states)} processes"
                f" that had read different data, and {jax.process_count()} cannot go on"
                " from there: start as many as had saved."
            )
        return self.data_states[0]
