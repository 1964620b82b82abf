"""The text of one row as its tokens come, up to the first stop string."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from recurjax.data.tokenizers import Tokenizer


class Continuation:
    """Decodes what follows a prompt, and holds back what a stop string may cut.

    The pieces that `push` and `finish` return join to the text. It is decoded as the
    continuation of the prompt: some tokenizers write a first token without its space.
    A character that the prompt's last bytes begin belongs to the prompt.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Int[np.ndarray, " T"],
        stops: Sequence[str],
    ):
        """Begins after a prompt; `stops` are not empty strings."""
        self.stopped = False
        self._stops = tuple(stops)
        self._stream = tokenizer.stream()
        self._stream.skip(prompt.tolist())
        self._held = ""

    def push(self, token: int) -> str:
        """Takes a token; returns the text that is now certain. Sets `stopped`."""
        self._held += self._stream.push([token])
        # Which stop string ends first decides, wherever in the list it stands.
        found = [self._held.find(stop) for stop in self._stops if stop in self._held]
        if found:
            self.stopped = True
            return self._release(min(found))
        # Text that may turn out to begin a stop string is not shown yet.
        return self._release(len(self._held) - self._undecided())

    def finish(self) -> str:
        """Returns what was held back; nothing after a stop string."""
        if self.stopped:
            return ""
        self._held += self._stream.finish()
        return self._release(len(self._held))

    def _release(self, count: int) -> str:
        text, self._held = self._held[:count], self._held[count:]
        return text

    def _undecided(self) -> int:
        """Counts the last characters that may be the beginning of a stop string."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        # The longest possible beginning first: what it covers includes the shorter
        # ones.
        for count in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-count:]) for stop in self._stops):
                return count
        return 0
