"""RAT's equations: recurrence inside chunks, attention across them; and reversed.

Writing [G, C] for chunk and place, in every chunk from a zero state,

    v~_l = g_l v~_{l-1} + (1 - g_l) v_l        k~_l likewise, with the same g
    y_t = softmax([q_t k~_end(c'), c' < c; q_t k~_t] / sqrt(E)) [v~_end(c'); v~_t]

and the layer gives x + (z * y) W_out. Source: the RAT paper, eqs. (2) to (5).
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int, Shaped

from pallas_kernels.chunk_attention import ChunkEnds, chunk_attention
from pallas_kernels.gated_scan import add_at_ends, ends_of, gated_scan
from recurjax.layers.attention import attend
from recurjax.layers.position import Rope, document_starts, rotate
from recurjax.types import Array


def rotate_chunks(
    q: Float[Array, "B P N E"], numbers: Int[Array, "#B G"], rope: Rope
) -> Float[Array, "B P N E"]:
    """Rotates all queries of a chunk by the chunk's number: sines once a chunk."""
    # Sines and cosines are those of G chunks instead of T tokens.
    B, G = q.shape[0], numbers.shape[1]
    folded = q.reshape(B, G, -1, q.shape[-1])
    return rotate(folded, numbers, rope).reshape(q.shape)


def attend_across_chunks(
    own_logits: Float[Array, "B P H"],
    rotated: Float[Array, "B P N E"],
    v: Float[Array, "B P H E"],
    ends: ChunkEnds,
    *,
    size: int,
    first: Int[Array, " B"] | None = None,
    documents: Int[Array, "B P"] | None = None,
) -> Float[Array, "B P H E"]:
    """Computes y: softmax over the ends of earlier chunks and the own state.

    Query and own key stand at the same place, so their product is the same rotated or
    not: only chunk ends are ever rotated.

    Args:
      own_logits: q_t k~_t, of queries and keys that are not rotated.
      rotated: the queries in the frame of `ends`.
      size: places in a chunk.
      first: see `chunk_attention`.
    """
    return chunk_attention(
        rotated,
        own_logits,
        v,
        ends,
        chunk=size,
        scale=rotated.shape[-1] ** -0.5,
        first=first,
        documents=documents,
    )


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def with_ends(
    states: Float[Array, "B P I"], size: int
) -> tuple[Float[Array, "B P I"], Float[Array, "B G I"]]:
    """Returns the states, and those at the ends of chunks of `size` places.

    The ends' gradient is added where the ends stand; jax would pad it to all positions
    and read and write the gradient of every state once more.
    """
    return states, ends_of(states, size)


def _with_ends_back(size: int, _: None, d: tuple[Array, Array]) -> tuple[Array]:
    d_states, d_ends = d
    return (add_at_ends(d_states, d_ends, size),)


with_ends.defvjp(lambda states, size: (with_ends(states, size), None), _with_ends_back)


def attend_within_chunks(
    q: Float[Array, "B P N E"],
    k: Float[Array, "B P H E"],
    v: Float[Array, "B P H E"],
    *,
    size: int,
    documents: Int[Array, "B P"] | None = None,
) -> Float[Array, "B P H E"]:
    """Computes the reversed design's a_t = softmax(q_t k_s / sqrt(E)) v_s, chunk-wise.

    s runs over t's own chunk up to t (and over its own document).
    """
    B, P, H, E = k.shape
    # Chunks become rows of the batch: inside one, attention is plain and causal.
    q = jnp.tile(q, (1, 1, H // q.shape[2], 1))
    q, k, v = (x.reshape(-1, size, H, E) for x in (q, k, v))
    folded = None if documents is None else documents.reshape(-1, size)
    a = attend(q, k, v, scale=E**-0.5, causal=True, segments=folded)
    return a.reshape(B, P, H, E)


def recur_across_chunks(
    gate: Float[Array, "B P I"],
    a: Float[Array, "B P I"],
    initial: Float[Array, "B I"],
    *,
    size: int,
    documents: Int[Array, "B P"] | None = None,
) -> tuple[Float[Array, "B P I"], Float[Array, "B G I"]]:
    """Computes the reversed design's v~_t = g_t v~_end(c - 1) + (1 - g_t) a_t.

    Source: our reading of the RAT paper, appendix C.1, which gives no equation: one
    chunk (C = T) leaves attention, and C = 1 the RNN, as the paper asks.

    Args:
      initial: v~ at the end of the chunk before the first one.

    Returns:
      v~ and its values at the chunks' ends, in at least float32.
    """
    B, P, I = gate.shape
    # Only chunk ends recur: a scan over T / C of them, which resets where the ends'
    # documents differ.
    end_documents = None if documents is None else documents[:, size - 1 :: size]
    ends, _ = gated_scan(
        gate[:, size - 1 :: size],
        (a[:, size - 1 :: size].astype(gate.dtype),),
        initial=(initial,),
        starts=document_starts(end_documents),
    )
    # Every position of a chunk reads the same state, that of the chunk before.
    before = jnp.concatenate([initial[:, None], ends[0][:, :-1]], axis=1)
    before = jnp.repeat(before, size, axis=1)
    if documents is not None and end_documents is not None:
        # A position whose document began after the last chunk's end sees nothing of it.
        # The first chunk's state comes from the caller and belongs to it.
        first_end = end_documents[:, :1]
        previous = jnp.concatenate([first_end, end_documents[:, :-1]], axis=1)
        same = documents == jnp.repeat(previous, size, axis=1)
        first = (jnp.arange(P) < size)[None]
        before = jnp.where((same | first)[..., None], before, 0)
    return gate * before + (1 - gate) * a, ends[0]


class Alignment(NamedTuple):
    """Places of T new tokens of each row, laid out so that the rows' chunks line up.

    A row that continues at offset o = position mod C lays its tokens at places o, o +
    1, ... of full chunks, so that place i is in chunk position // C + i // C in every
    row. Other places are padding: a gate of 1 carries the state across them. A single
    token needs no layout: it is a chunk of one place.

    Attributes:
      position: position of the first token.
      count: how many are real.
      chunk: C.
      size: places in a chunk: C, or 1 for a single token.
      places: in all; a multiple of `size`.
    """

    position: Int[Array, " B"]
    count: Int[Array, " B"]
    chunk: int
    size: int
    places: int

    @property
    def first(self) -> Int[Array, " B"]:
        """Number of the chunk that place 0 is in."""
        return self.position // self.chunk

    @property
    def offset(self) -> Int[Array, " B"]:
        """How many tokens of the first chunk came before."""
        return self.position % self.chunk

    @property
    def shift(self) -> Int[Array, " B"]:
        """The place of the first token."""
        return jnp.zeros_like(self.position) if self.size == 1 else self.offset

    @property
    def numbers(self) -> Int[Array, "B G"]:
        """Numbers of the chunks laid out."""
        return self.first[:, None] + jnp.arange(self.places // self.size)

    @property
    def positions(self) -> Int[Array, "B P"]:
        """Position of each place in its sequence."""
        return (self.position - self.shift)[:, None] + jnp.arange(self.places)

    @property
    def real(self) -> Bool[Array, "B P"]:
        """Which places hold new tokens."""
        # Counted from the first new token: negative before it, `count` after the last.
        place = jnp.arange(self.places) - self.shift[:, None]
        return (place >= 0) & (place < self.count[:, None])

    @property
    def ended(self) -> Bool[Array, "B G"]:
        """Which chunks have their last token among the new ones."""
        # Where each laid-out chunk ends, counted in places; a row without new tokens
        # completes nothing.
        ends = self.chunk * (1 + jnp.arange(self.places // self.size))
        return (self.count > 0)[:, None] & (ends <= (self.offset + self.count)[:, None])

    def lay(self, x: Shaped[Array, "B T *rest"]) -> Shaped[Array, "B P *rest"]:
        """Moves new tokens to their places, zeros elsewhere."""
        if self.size == 1:
            return x
        index = jnp.clip(
            jnp.arange(self.places) - self.shift[:, None], 0, x.shape[1] - 1
        )
        laid = x[jnp.arange(x.shape[0])[:, None], index]
        real = self.real.reshape(*self.real.shape, *[1] * (x.ndim - 2))
        return jnp.where(real, laid, 0)

    def pick(
        self, laid: Shaped[Array, "B P *rest"], length: int
    ) -> Shaped[Array, "B T *rest"]:
        """Moves T tokens back from their places."""
        if self.size == 1:
            return laid
        index = self.shift[:, None] + jnp.arange(length)
        return laid[jnp.arange(laid.shape[0])[:, None], index]


def align(
    position: Int[Array, " B"], length: int, lengths: Array | None, chunk: int
) -> Alignment:
    """Lays out T = `length` tokens, the first `lengths` of each row real."""
    count = jnp.full_like(position, length) if lengths is None else lengths
    # One token needs no layout. More of them: the worst offset is C - 1, so T + C - 1
    # places, rounded up to complete chunks, are enough for every row.
    size = 1 if length == 1 else chunk
    places = 1 if length == 1 else -(-(length + chunk - 1) // chunk) * chunk
    return Alignment(position, count, chunk, size, places)
