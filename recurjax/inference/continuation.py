"""Decodes one row's text as its tokens come, up to the first stop string."""

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
        """Begins after a prompt.

        Args:
          stops: strings that are not empty. One that names an added token is also that
            token, whose text the model never writes letter by letter.
        """
        self.stopped = False
        self._stops = tuple(stops)
        added = tokenizer.added_tokens
        self._stop_tokens = frozenset(added[stop] for stop in stops if stop in added)
        self._stream = tokenizer.stream()
        self._stream.skip(prompt.tolist())
        self._held = ""

    def push(self, token: int) -> str:
        """Takes a token; returns the text that is now certain. Sets `stopped`."""
        if token in self._stop_tokens:
            text = self.finish()
            self.stopped = True
            return text
        self._held += self._stream.push([token])
        if (text := self._before_stop()) is not None:
            return text
        # Hold back text that may be the beginning of a stop string.
        return self._release(len(self._held) - self._undecided())

    def finish(self) -> str:
        """Returns what was held back; nothing after a stop string."""
        if self.stopped:
            return ""
        self._held += self._stream.finish()
        text = self._before_stop()
        return self._release(len(self._held)) if text is None else text

    def _before_stop(self) -> str | None:
        """Returns the held text before the first stop string; None: there is none."""
        # Which stop string begins first decides, wherever in the list it comes.
        starts = [self._held.find(stop) for stop in self._stops if stop in self._held]
        if not starts:
            return None
        self.stopped = True
        return self._release(min(starts))

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
