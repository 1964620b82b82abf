"""Losses of several predictions of the same tokens, and how far apart they are.

A model with exits predicts each token after every loop, and a teacher predicts it too.
All their logits are made together, in one piece or in chunks of the vocabulary, so that
each product with a head is made once whatever is compared with what.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from pallas_kernels import reductions
from recurjax.layers.mesh import as_matrix
from recurjax.model import Decoder, ModelConfig
from recurjax.types import IGNORED, Array

S = TypeVar("S")

Divergence = Literal["forward_kl", "reverse_kl", "jensen_shannon", "total_variation"]
"""Of a prediction p from a teacher's q, with m = (p + q) / 2:

forward_kl: KL(q || p); reverse_kl: KL(p || q); jensen_shannon: (KL(q || m) +
KL(p || m)) / 2; total_variation: sum |p - q| / 2."""


class Teacher(NamedTuple):
    """Another model's view of the same tokens.

    Attributes:
      model: gives head, padding and soft cap; of the same vocabulary.
      x: its states, from `model.hidden`; their width may be another.
      temperature: t of softmax(logits / t), on both sides of the comparison.
      divergence: see `Divergence`. Every one but the forward KL reads the heads twice.
    """

    model: Decoder
    x: Float[Array, "B T W"]
    temperature: float
    divergence: Divergence = "forward_kl"


class ExitLosses(NamedTuple):
    """Per-position values, 0 where the target is `IGNORED`; N predictions of one model.

    Attributes:
      nats: -log p_i(target).
      from_last: KL(p_N || p_i) of all but the last, no gradient in p_N; None unless
        requested.
      from_teacher: t^2 times the teacher's divergence of p_i from q, both at its
        temperature t; None without one.
    """

    nats: Float[Array, "N B T"]
    from_last: Float[Array, "M B T"] | None
    from_teacher: Float[Array, "N B T"] | None


def exit_losses(
    model: Decoder,
    states: Sequence[Float[Array, "B T D"]],
    targets: Int[Array, "B T"],
    *,
    to_last: bool = False,
    teacher: Teacher | None = None,
    chunks: int = 1,
) -> ExitLosses:
    """Computes cross-entropies of several states, and divergences between them.

    KL(q || p) = sum_v q_v (log q_v - log p_v): the forward one, of Hinton et al. 2015,
    whose factor t^2 keeps the gradient's size apart from the temperature. At least
    float32. Nothing here has a gradient in the teacher.

    Args:
      model: gives head, padding and soft cap.
      states: states of N predictions, after the final norm; the last is the model's
        own.
      targets: token ids, or IGNORED.
      to_last: compare each earlier prediction with the last.
      teacher: compare every prediction with this one.
      chunks: pieces of the vocabulary, as of `token_losses`: the logits of all
        predictions then exist for one piece at a time.
    """
    N = len(states)
    views = [_View(model, as_matrix(x)) for x in states]
    # Pairs of views, near first: the last exit is what earlier exits approach, and the
    # teacher, view N, is what all of them approach.
    pairs = [_Pair(N - 1, i, 1.0) for i in range(N - 1)] if to_last else []
    if teacher is not None:
        x = jax.lax.stop_gradient(teacher.x)
        views.append(_View(teacher.model, as_matrix(x)))
        pairs += [_Pair(N, i, teacher.temperature) for i in range(N)]
    counted = targets != IGNORED
    labels = jnp.where(counted, targets, 0).reshape(views[0].x.shape[:-1])
    sums = _streamed(views, pairs, labels, N, chunks)

    def where_counted(values: list[Array]) -> Array:
        shaped = jnp.stack([value.reshape(targets.shape) for value in values])
        return jnp.where(counted, shaped, 0)

    # The log-normalizer at temperature 1 is cross-entropy's; divergences have their own
    # at the teacher's temperature.
    nats = [sums.normalizer(i, 1.0) - sums.chosen[i] for i in range(N)]
    if teacher is None or teacher.divergence == "forward_kl":
        apart = [sums.divergence(pair) for pair in pairs]
    else:
        near_last = len(pairs) - N
        apart = [sums.divergence(pair) for pair in pairs[:near_last]]
        apart += _second_walk(
            views, pairs[near_last:], sums, teacher.divergence, chunks
        )
    apart = [
        each * pair.temperature**2 for each, pair in zip(apart, pairs, strict=True)
    ]
    inner, outer = (apart[: N - 1], apart[N - 1 :]) if to_last else ([], apart)
    return ExitLosses(
        nats=where_counted(nats),
        from_last=where_counted(inner) if inner else None,
        from_teacher=where_counted(outer) if outer else None,
    )


class _View(NamedTuple):
    """A model's head and the states [..., D] that it reads."""

    model: Decoder
    x: Array


class _Pair(NamedTuple):
    """KL(near || far) at a temperature; both are numbers of views."""

    near: int
    far: int
    temperature: float


class _Sums(NamedTuple):
    """Running sums over the vocabulary.

    Attributes:
      peaks, totals: by (i, t), for view i at temperature t: the largest z = logit / t,
        and the sum of exp(z - peak).
      chosen: the target's logit, of each view with targets.
      apart: for each pair, the sum of exp(z_near - peak) (z_near - z_far).
    """

    peaks: dict[tuple[int, float], Array]
    totals: dict[tuple[int, float], Array]
    chosen: list[Array]
    apart: dict[_Pair, Array]

    def normalizer(self, view: int, temperature: float) -> Array:
        """Returns log sum exp of a view's z."""
        key = view, temperature
        return self.peaks[key] + jnp.log(self.totals[key])

    def divergence(self, pair: _Pair) -> Array:
        """Returns KL: the mean of z_near - z_far under near, and the normalizers."""
        # KL = sum p_near (z_near - z_far) - logZ_near + logZ_far, where `apart` is that
        # sum before the division by near's total. near is a constant of the comparison.
        total = jax.lax.stop_gradient(self.totals[pair.near, pair.temperature])
        near = jax.lax.stop_gradient(self.normalizer(pair.near, pair.temperature))
        far = self.normalizer(pair.far, pair.temperature)
        return self.apart[pair] / total - near + far


def _streamed(
    views: list[_View], pairs: list[_Pair], labels: Array, predictions: int, chunks: int
) -> _Sums:
    """Sums over the vocabulary, the logits of one piece at a time."""
    dtype = jnp.promote_types(views[0].x.dtype, jnp.float32)
    # One running sum for each view and each requested temperature, shared by all pairs
    # that read it.
    scales = {(i, 1.0) for i in range(predictions)}
    for pair in pairs:
        scales |= {(pair.near, pair.temperature), (pair.far, pair.temperature)}

    def add(
        sums: _Sums, logits: list[Array], known: Array, number: Array | int
    ) -> _Sums:
        peaks, totals, fading = {}, {}, {}
        for key in scales:
            i, temperature = key
            z = jnp.where(known, logits[i] / temperature, -jnp.inf)
            # Only columns of the vocabulary count: padding of the head is -inf here,
            # and gets the weight 0 below, as -inf - -inf would be NaN.
            # The peak only keeps the exponentials in range: it cancels.
            peaks[key] = jax.lax.stop_gradient(
                jnp.maximum(sums.peaks[key], reductions.largest(z))
            )
            fading[key] = jnp.exp(sums.peaks[key] - peaks[key])
            added = jnp.exp(z - peaks[key][..., None]).sum(-1)
            totals[key] = sums.totals[key] * fading[key] + added
        apart = {}
        for pair in pairs:
            key = pair.near, pair.temperature
            near = jax.lax.stop_gradient(logits[pair.near]) / pair.temperature
            far = logits[pair.far] / pair.temperature
            weight = jnp.where(known, jnp.exp(near - peaks[key][..., None]), 0)
            added = (weight * (near - far)).sum(-1)
            apart[pair] = sums.apart[pair] * fading[key] + added
        # Column v is in piece v mod chunks, at v // chunks.
        here = labels % chunks == number
        at = (labels // chunks)[..., None]
        targets = [
            jnp.take_along_axis(z, at, axis=-1)[..., 0] for z in logits[:predictions]
        ]
        chosen = [
            jnp.where(here, new, old)
            for new, old in zip(targets, sums.chosen, strict=True)
        ]
        return _Sums(peaks, totals, chosen, apart)

    zeros = jnp.zeros(labels.shape, dtype)
    least = jnp.full(labels.shape, jnp.finfo(dtype).min, dtype)
    start = _Sums(
        peaks=dict.fromkeys(scales, least),
        totals=dict.fromkeys(scales, zeros),
        chosen=[zeros] * predictions,
        apart=dict.fromkeys(pairs, zeros),
    )
    return _walk(views, add, start, chunks)


def _second_walk(
    views: list[_View],
    pairs: list[_Pair],
    sums: _Sums,
    divergence: Divergence,
    chunks: int,
) -> list[Array]:
    """Sums a divergence that needs both normalizers before its first term."""

    def term(q: Array, p: Array) -> Array:
        """Returns one token's part, from log-probabilities."""
        if divergence == "reverse_kl":
            return jnp.exp(p) * (p - q)
        if divergence == "total_variation":
            return jnp.abs(jnp.exp(q) - jnp.exp(p)) / 2
        m = jnp.logaddexp(q, p) - jnp.log(2.0)
        return (jnp.exp(q) * (q - m) + jnp.exp(p) * (p - m)) / 2

    def add(
        totals: list[Array], logits: list[Array], known: Array, number: Array | int
    ) -> list[Array]:
        def of_view(view: int, temperature: float) -> Array:
            normalizer = sums.normalizer(view, temperature)
            return logits[view] / temperature - normalizer[..., None]

        terms = [
            term(
                jax.lax.stop_gradient(of_view(pair.near, pair.temperature)),
                of_view(pair.far, pair.temperature),
            )
            for pair in pairs
        ]
        return [
            total + jnp.where(known, each, 0).sum(-1)
            for total, each in zip(totals, terms, strict=True)
        ]

    first = pairs[0]
    zeros = jnp.zeros_like(sums.totals[first.near, first.temperature])
    return _walk(views, add, [zeros] * len(pairs), chunks)


def _walk(
    views: list[_View],
    add: Callable[[S, list[Array], Array, Array | int], S],
    start: S,
    chunks: int,
) -> S:
    """Walks over the vocabulary, the logits of one piece at a time.

    Args:
      add: (sums, logits of each view, which of them the vocabulary has, number of the
        piece); piece i has the columns i, i + chunks, ...
      start: the sums before the first piece.
    """
    V = views[0].model.config.vocabulary
    heads = [view.model.head_weight() for view in views]  # [D, W]
    # Heads may be padded differently; the widest decides, and the rest is padding.
    width = -(-max(head.shape[1] for head in heads) // chunks)
    dtype = jnp.promote_types(views[0].x.dtype, jnp.float32)

    def turn(sums: S, pieces: list[Array], number: Array | int) -> S:
        logits = []
        for view, piece in zip(views, pieces, strict=True):
            product = jnp.einsum(
                "...d,dv->...v",
                view.x,
                piece.astype(view.x.dtype),
                preferred_element_type=dtype,
            )
            logits.append(view.model.cap(product))
        known = number + chunks * jnp.arange(width) < V
        return add(sums, logits, known, number)

    # Chunk i holds the columns i, i + chunks, ...: the long axis stays the sharded one.
    def cut(head: Array) -> Array:
        D, W = head.shape
        padded = jnp.pad(head, ((0, 0), (0, width * chunks - W)))
        return jnp.moveaxis(padded.reshape(D, width, chunks), 2, 0)  # [chunks, D, V/n]

    pieces = [cut(head) for head in heads]
    # In one piece there is nothing to make again: the logits stay for the backward
    # pass.
    if chunks == 1:
        return turn(start, [piece[0] for piece in pieces], 0)

    @jax.checkpoint
    def body(sums: S, inputs: tuple[list[Array], Array]) -> tuple[S, None]:
        return turn(sums, *inputs), None

    return jax.lax.scan(body, start, (pieces, jnp.arange(chunks)))[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class FrozenModel:
    """A trained model that an objective reads and no step changes, such as a teacher.

    Its parameters are an argument of the step. They are sharded like the trained
    model's and are in no checkpoint.

    Attributes:
      run: run directory whose newest valid checkpoint has the parameters.
      model: config of the model, with which a step is built, so that planning reads no
        files.
    """

    run: str
    model: ModelConfig
