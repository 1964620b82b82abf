"""A cache of prefix states, so that a text that continues one reads only the rest.

A conversation's next turn begins with the earlier turns, and many requests begin with
the same system prompt. The state of a text is its cache of one row, stored under the
hash of the text's tokens and its adapter. It serves only texts of this adapter that
begin with exactly these tokens, so it equals the state that reading them again would
give.
"""

import hashlib
from collections import Counter, OrderedDict
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float, Int32

from recurjax.types import Array, Cache


class CachedPrefix(NamedTuple):
    """The state after reading a text.

    Attributes:
      length: length of the text, in tokens.
      cache: cache of one row; other rows continue from it, so it is never written.
      last: the state from which the next token is predicted; None where the text's last
        token was read while decoding, which does not leave it.
    """

    length: int
    cache: Cache
    last: Float[Array, "1 D"] | None


class PrefixCache:
    """States by their texts; the least recently used leave first.

    Attributes:
      used_bytes: bytes of all cached states.
      hits: texts that began from a state.
    """

    def __init__(self, most_bytes: int):
        self.most_bytes = most_bytes
        self.used_bytes = 0
        self.hits = 0
        self._states: OrderedDict[bytes, tuple[CachedPrefix, int]] = OrderedDict()
        self._lengths: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._states)

    def put(
        self,
        tokens: Int32[np.ndarray, " T"],
        cache: Cache,
        last: Any = None,
        *,
        adapter: int = 0,
    ) -> None:
        """Keeps the state of a text, unless it alone exceeds the pool."""
        size = sum(leaf.nbytes for leaf in jax.tree.leaves((cache, last)))
        # One text larger than the pool would empty it and not fit.
        if size > self.most_bytes or len(tokens) == 0:
            return
        key = _digests(tokens, [len(tokens)], adapter)[len(tokens)]
        if key in self._states:
            self._drop(key)
        # The first in the order is the one that was not used for longest.
        while self.used_bytes + size > self.most_bytes:
            self._drop(next(iter(self._states)))
        self._states[key] = CachedPrefix(len(tokens), cache, last), size
        self._lengths[len(tokens)] += 1
        self.used_bytes += size

    def find(
        self, tokens: Int32[np.ndarray, " T"], adapter: int = 0
    ) -> CachedPrefix | None:
        """Returns the state of the longest prefix of a text from which it can continue.

        A match of the full text needs its `last`, from which the first new token is
        drawn.
        """
        T = len(tokens)
        # Only lengths that some kept text has: a few hashes in one walk over the
        # prompt.
        lengths = [n for n in sorted(self._lengths) if n <= T]
        keys = _digests(tokens, lengths, adapter)
        for length in sorted(keys, reverse=True):
            state, _ = self._states.get(keys[length], (None, 0))
            if state is not None and (length < T or state.last is not None):
                self._states.move_to_end(keys[length])
                self.hits += 1
                return state
        return None

    def has(self, tokens: Int32[np.ndarray, " T"], adapter: int = 0) -> bool:
        """Returns whether a text's state is kept."""
        return _digests(tokens, [len(tokens)], adapter)[len(tokens)] in self._states

    def _drop(self, key: bytes) -> None:
        state, size = self._states.pop(key)
        self.used_bytes -= size
        self._lengths[state.length] -= 1
        self._lengths += Counter()  # forgets lengths that no text has any more


def _digests(
    tokens: Int32[np.ndarray, " T"], lengths: list[int], adapter: int
) -> dict[int, bytes]:
    """Hashes prefixes of a text, of increasing lengths, in one pass."""
    # Little-endian 32 bits, so that the hash of a text is the same on every machine.
    data, start = np.ascontiguousarray(tokens, "<i4"), 0
    hashed = hashlib.sha256(adapter.to_bytes(4, "little"))
    digests = {}
    for length in lengths:
        hashed.update(data[start:length].tobytes())
        digests[length] = hashed.copy().digest()
        start = length
    return digests
