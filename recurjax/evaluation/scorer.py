"""Scores the log-probability of continuations given contexts, for every evaluation.

Multiple choice, cloze tests and perplexities all need the log-probability of some
tokens after others. Pairs are sorted by length and read in batches of one shape a
bucket, so that few programs are compiled, and only the states that score a token reach
the head. A context that several continuations share is read once: its cache is repeated
for each of them, which is exact, because a sequence read in pieces gives the same
result as in one.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Bool, Float, Float32, Int, Int32

from pallas_kernels import reductions
from recurjax.errors import UserError
from recurjax.evaluation.accuracy import by_pieces
from recurjax.evaluation.journal import Journal, key_of
from recurjax.model import Decoder
from recurjax.sharding import replicated
from recurjax.types import Array, Cache, Tokens


class Reading(NamedTuple):
    """A way to read entire rows.

    Attributes:
      name: under which a journal keeps its scores.
      hidden: returns the states that the head reads.
    """

    name: str
    hidden: Callable[[Decoder, Tokens], Float[Array, "B T D"]]


def _exact(model: Decoder, tokens: Tokens) -> Float[Array, "B T D"]:
    return model.hidden(tokens, model.init_cache(tokens.ids.shape[0], 0))[0]


EXACT = Reading("as_called", _exact)
"""The model itself: the only reading that a cache can continue."""

SMALLEST_WIDTH, FEWEST_COLUMNS = 16, 4
"""The shortest padded lengths of complete rows and of continuations (a word or two)."""


class Pair(NamedTuple):
    """A context and the continuation to score; both are token ids and not empty."""

    context: tuple[int, ...]
    continuation: tuple[int, ...]


class PairScore(NamedTuple):
    """The log-probability of a continuation.

    Attributes:
      log_p: sum over its tokens of log p(token | all before), nats.
      greedy: whether each of its tokens is the likeliest one.
      nats: -log p of each token.
    """

    log_p: float
    greedy: bool
    nats: Float32[np.ndarray, " N"]


Score = Callable[[Sequence[Pair]], list[PairScore]]
"""Scores pairs, in their order. What an evaluation asks of a model."""


def _require_finite(scores: dict[int, PairScore]) -> None:
    for number, score in scores.items():
        if not math.isfinite(score.log_p):
            raise UserError(
                f"the model's log-probability of text {number + 1} is {score.log_p}: "
                "its parameters hold NaN or infinities, or its activations overflow; "
                "take a checkpoint from before it diverged"
            )


@dataclass(frozen=True, kw_only=True)
class Scorer:
    """Scores pairs with a model; callable as `Score`.

    Attributes:
      model: any variant, laid out on `mesh`.
      mesh: rows are sharded over its data and fsdp axes; None: one device.
      rows: read at a time, rounded up to what the mesh divides.
      reading: how rows are read; contexts are shared with `EXACT` only.
      share: read a context once for all its continuations. Off, each pair is a row.
      report: called with the number of pairs done since the last call.
    """

    model: Decoder
    mesh: Mesh | None = None
    rows: int = 16
    reading: Reading = EXACT
    share: bool = True
    report: Callable[[int], None] = lambda done: None

    def __post_init__(self):
        if self.rows < 1:
            raise UserError(f"rows must be at least 1, got {self.rows}")

    def __call__(
        self, pairs: Sequence[Pair], journal: Journal | None = None
    ) -> list[PairScore]:
        """Scores pairs. A pair that comes twice is read once.

        Args:
          journal: has scores of an earlier call and gets the new ones; None: none.

        Raises:
          UserError: a pair has an empty half, or is longer than the model can read, or
            the model's logits are not finite.
        """
        journal = Journal(None) if journal is None else journal
        keys = [key_of(self.reading.name, *pair) for pair in pairs]
        new = {
            key: pair
            for key, pair in zip(keys, pairs, strict=True)
            if key not in journal
        }
        names = list(new)
        self.report(len(pairs) - len(new))
        for scores in self._in_batches(list(new.values())):
            journal.add((names[at], _as_json(score)) for at, score in scores.items())
        return [_from_json(journal[key]) for key in keys]

    def _in_batches(self, pairs: Sequence[Pair]) -> Iterator[dict[int, PairScore]]:
        """Yields the scores of a few pairs at a time, by the pairs' numbers.

        Raises:
          UserError: as `__call__`, before anything is read.
        """
        for pair in pairs:
            self._check(pair)
        # Pairs by their context; a context with one continuation gains nothing by a
        # cache.
        together: dict[tuple[int, ...], list[int]] = {}
        for number, pair in enumerate(pairs):
            together.setdefault(pair.context, []).append(number)
        shares = self.share and self.reading == EXACT
        shared = [group for group in together.values() if shares and len(group) > 1]
        taken = {number for group in shared for number in group}
        single = [number for number in range(len(pairs)) if number not in taken]
        for scores in (self._singly(pairs, single), self._shared(pairs, shared)):
            while True:
                # Set the mesh for each batch: the caller's code runs in between.
                with nullcontext() if self.mesh is None else jax.set_mesh(self.mesh):
                    done = next(scores, None)
                if done is None:
                    break
                _require_finite(done)
                self.report(len(done))
                yield done

    def _check(self, pair: Pair) -> None:
        if not pair.context or not pair.continuation:
            raise UserError(
                "a context and its continuation must have at least one token "
                "each: put the tokenizer's BOS before an empty context"
            )
        # The last token is scored from the state before it, and not read.
        length = len(pair.context) + len(pair.continuation) - 1
        what = f"a continuation of {len(pair.continuation)} tokens after "
        what += f"{len(pair.context)}"
        if (reason := self.model.config.refuses_length(length, what)) is not None:
            raise UserError(reason)

    def _singly(
        self, pairs: Sequence[Pair], numbers: list[int]
    ) -> Iterator[dict[int, PairScore]]:
        """Reads each pair as one row; the longest first, which need most memory."""

        def size(number: int) -> int:
            return len(pairs[number].context) + len(pairs[number].continuation) - 1

        for batch in _batches(sorted(numbers, key=size, reverse=True), self._rows):
            rows = [
                [*pairs[number].context, *pairs[number].continuation[:-1]]
                for number in batch
            ]
            # Few widths, so that few programs are compiled; the padding has no effect.
            width = self._bucket(max(map(len, rows)))
            continuations = [pairs[number].continuation for number in batch]
            first = [len(pairs[number].context) - 1 for number in batch]
            nats, greedy = _score_rows(
                self.model,
                self._on_mesh(_padded(rows, self._rows, width)),
                self._on_mesh(_lengths(rows, self._rows)),
                self._on_mesh(_column(first, self._rows)),
                self._on_mesh(
                    _padded(
                        continuations,
                        self._rows,
                        bucket(max(map(len, continuations)), width),
                    )
                ),
                reading=self.reading,
                mesh=self.mesh,
            )
            yield _collect(batch, continuations, nats, greedy)

    def _shared(
        self, pairs: Sequence[Pair], groups: list[list[int]]
    ) -> Iterator[dict[int, PairScore]]:
        """Reads contexts once, then their continuations from repeated caches."""

        def size(group: list[int]) -> int:
            return len(pairs[group[0]].context)

        for batch in _batches(sorted(groups, key=size, reverse=True), self._rows):
            contexts = [list(pairs[group[0]].context) for group in batch]
            needed = max(
                len(pairs[number].context) + len(pairs[number].continuation) - 1
                for group in batch
                for number in group
            )
            width = self._bucket(max(map(len, contexts)))
            room = max(width, self._bucket(needed))
            state = _read_contexts(
                self.model,
                self._on_mesh(_padded(contexts, self._rows, width)),
                self._on_mesh(_lengths(contexts, self._rows)),
                length=room,
                mesh=self.mesh,
            )
            # A row of the caches for each continuation: rows may be repeated many
            # times. Continuations of similar length share a batch.
            flat = [
                (row, number) for row, group in enumerate(batch) for number in group
            ]
            flat.sort(key=lambda at: len(pairs[at[1]].continuation), reverse=True)
            for part in _batches(flat, self._rows):
                continuations = [pairs[number].continuation for _, number in part]
                columns = bucket(
                    max(map(len, continuations)), room, smallest=FEWEST_COLUMNS
                )
                nats, greedy = _score_continuations(
                    self.model,
                    state,
                    self._on_mesh(_column([row for row, _ in part], self._rows)),
                    self._on_mesh(_padded(continuations, self._rows, columns)),
                    self._on_mesh(_lengths(continuations, self._rows)),
                    mesh=self.mesh,
                )
                yield _collect(
                    [number for _, number in part], continuations, nats, greedy
                )

    @property
    def _rows(self) -> int:
        if self.mesh is None:
            return self.rows
        shards = self.mesh.shape["data"] * self.mesh.shape["fsdp"]
        return -(-self.rows // shards) * shards

    def _bucket(self, width: int) -> int:
        return bucket(width, self.model.config.max_length)

    def _on_mesh(self, rows: np.ndarray) -> Array:
        """Puts rows on the devices; every process holds all of them."""
        if self.mesh is None:
            return jnp.asarray(rows)
        where = NamedSharding(self.mesh, P(("data", "fsdp")))
        return jax.make_array_from_callback(rows.shape, where, lambda at: rows[at])


def rolling(tokens: Sequence[int], *, first: int, longest: int) -> list[Pair]:
    """Cuts a text into pairs that score each token once.

    Windows follow one another; the last one reaches back, so that its context is as
    long as the model allows.

    Args:
      tokens: tokens of the text, without BOS.
      first: the token before the first one (BOS, or EOS where there is none).
      longest: positions that the model reads at once, at least 1.
    """
    if longest < 1:
        raise ValueError(f"rolling: longest must be at least 1, got {longest}")
    text = [first, *tokens]
    pairs, done = [], 1
    while done < len(text):
        # Windows touch; the last one reaches back over tokens that were scored already,
        # which are context only.
        stop = min(done + longest, len(text))
        begin = max(0, stop - 1 - longest) if stop == len(text) else done - 1
        pairs.append(Pair(tuple(text[begin:done]), tuple(text[done:stop])))
        done = stop
    return pairs


def bucket(width: int, most: int | None, *, smallest: int = SMALLEST_WIDTH) -> int:
    """Rounds up to a power of two or one and a half of one, so that few compile."""
    # 16, 24, 32, 48, 64, ...: at most half of a row is padding.
    power = max(smallest, 1 << (width - 1).bit_length())
    rounded = 3 * power // 4 if power > smallest and width <= 3 * power // 4 else power
    return width if most is not None and rounded > most else rounded


class _Read(NamedTuple):
    """Contexts that were read: their caches, and the state after each one's last."""

    cache: Cache
    last: Float[Array, "B D"]


@partial(jax.jit, static_argnames=("reading", "mesh"))
def _score_rows(
    model: Decoder,
    ids: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    first: Int[Array, " B"],
    targets: Int[Array, "B N"],
    *,
    reading: Reading,
    mesh: Mesh | None,
) -> tuple[Float[Array, "B N"], Bool[Array, "B N"]]:
    """Scores target n of a row at position first + n; rows start without context."""
    tokens = Tokens(ids, lengths=lengths)
    x = reading.hidden(model, tokens)
    # Padding asks beyond the row's end; it reads the last state, and is cut off.
    at = jnp.minimum(first[:, None] + jnp.arange(targets.shape[1]), ids.shape[1] - 1)
    states = jnp.take_along_axis(x, at[:, :, None], axis=1)
    return _everywhere(_against(model, states, targets), mesh)


@partial(jax.jit, static_argnames=("length", "mesh"))
def _read_contexts(
    model: Decoder,
    ids: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    *,
    length: int,
    mesh: Mesh | None,
) -> _Read:
    cache = model.init_cache(ids.shape[0], length)
    x, cache = model.hidden(Tokens(ids, lengths=lengths), cache)
    # The state after the last real token predicts the continuation's first.
    last = jnp.take_along_axis(x, (lengths - 1)[:, None, None], axis=1)[:, 0]
    # Continuations pick any row of these, so that each device holds them all.
    return _everywhere(_Read(cache, last), mesh)


@partial(jax.jit, static_argnames="mesh")
def _score_continuations(
    model: Decoder,
    read: _Read,
    rows: Int[Array, " B"],
    targets: Int[Array, "B N"],
    lengths: Int[Array, " B"],
    *,
    mesh: Mesh | None,
) -> tuple[Float[Array, "B N"], Bool[Array, "B N"]]:
    """Scores continuations of the contexts `rows`; their states score the first."""
    # The first token is scored from the context's last state, the others from the
    # states that reading the continuation gives.
    states = read.last[rows][:, None]
    if targets.shape[1] > 1:
        cache = model.stack.take(read.cache, rows)
        # The last token of a continuation is scored, not read.
        tokens = Tokens(targets[:, :-1], lengths=lengths - 1)
        x, _ = model.hidden(tokens, cache)
        states = jnp.concatenate([states, x], axis=1)
    return _everywhere(_against(model, states, targets), mesh)


def _against(
    model: Decoder, states: Float[Array, "B N D"], targets: Int[Array, "B N"]
) -> tuple[Float[Array, "B N"], Bool[Array, "B N"]]:
    """Returns -log p of each target and whether it is the likeliest token."""

    def score(x: Array, targets: Array) -> tuple[Array, Array]:
        logits = model.logits(x)
        chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
        nats = reductions.logsumexp(logits) - chosen
        return nats, logits.argmax(-1) == targets

    return by_pieces(model, score, states, targets)


def _everywhere(tree: Any, mesh: Mesh | None) -> Any:
    """Returns the full result to every process, readable on the host."""
    if mesh is None:
        return tree
    return jax.lax.with_sharding_constraint(tree, replicated(mesh))


def _collect(
    numbers: list[int], continuations: list, nats: Array, greedy: Array
) -> dict[int, PairScore]:
    nats_, greedy_ = np.asarray(nats, np.float32), np.asarray(greedy)
    scores = {}
    for row, (number, tokens) in enumerate(zip(numbers, continuations, strict=True)):
        row_nats = nats_[row, : len(tokens)].copy()
        right = bool(greedy_[row, : len(tokens)].all())
        scores[number] = PairScore(
            -float(row_nats.sum(dtype=np.float64)), right, row_nats
        )
    return scores


def _as_json(score: PairScore) -> list:
    # Nats are float32: JSON holds them exactly.
    return [score.log_p, score.greedy, [float(x) for x in score.nats]]


def _from_json(value: list) -> PairScore:
    log_p, greedy, nats = value
    return PairScore(log_p, greedy, np.array(nats, np.float32))


def _batches(items: list, size: int) -> Iterator[list]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


def _padded(rows: Sequence[Sequence[int]], count: int, width: int) -> Int32[Any, "B T"]:
    ids = np.zeros((count, width), np.int32)
    for line, row in zip(ids, rows, strict=False):
        line[: len(row)] = row
    return ids


def _lengths(rows: Sequence[Sequence[int]], count: int) -> Int32[Any, " B"]:
    """Lengths of the rows; rows that fill the batch up count one token each."""
    return np.array([len(row) for row in rows] + [1] * (count - len(rows)), np.int32)


def _column(values: list[int], count: int) -> Int32[Any, " B"]:
    return np.array(values + [0] * (count - len(values)), np.int32)
