"""What a model keeps of a text, in bytes, beside what attention would keep."""

from typing import NamedTuple

import jax

from recurjax.inference.decoding import cache_dtype
from recurjax.model import Decoder


class StateSize(NamedTuple):
    """Bytes for one text of so many tokens.

    Attributes:
      state: the model's own cache.
      attention: keys and values of every token in every layer, at the model's width:
        what a Transformer of this size holds whose keys are not shared by heads.
    """

    tokens: int
    state: int
    attention: int


def state_size(model: Decoder, tokens: int) -> StateSize:
    """Counts the bytes for a text, from shapes: nothing is allocated."""
    dtype = cache_dtype(model)
    cache = jax.eval_shape(lambda: model.init_cache(1, max(tokens, 1), dtype))
    stack = model.config.stack
    a_token = 2 * stack.layers * stack.width * jax.numpy.dtype(dtype).itemsize
    return StateSize(
        tokens=tokens,
        state=sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache)),
        attention=a_token * tokens,
    )


def state_sizes(model: Decoder, length: int) -> list[StateSize]:
    """Counts for texts of 1, 2, 4, ... tokens, the last one of `length`."""
    counts = [1 << power for power in range(length.bit_length())]
    return [state_size(model, tokens) for tokens in sorted({*counts, length})]


def in_words(size: StateSize) -> str:
    """Says both in a line."""
    return (
        f"{size.tokens:,} tokens in {_bytes(size.state)} "
        f"(attention of this width: {_bytes(size.attention)})"
    )


def _bytes(count: int) -> str:
    for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if count >= 1 << shift:
            return f"{count / (1 << shift):,.1f} {unit}"
    return f"{count} bytes"
