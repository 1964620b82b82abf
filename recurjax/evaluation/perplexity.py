"""Loss, perplexity and bits per byte of a text."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float, Int, Real

from recurjax.data.tasks import RowLabels
from recurjax.evaluation.accuracy import (
    Accuracy,
    AnswerCounts,
    accuracy,
    answers_of,
)
from recurjax.losses.cross_entropy import token_losses
from recurjax.model import Decoder
from recurjax.training.objective import NextToken, Objective
from recurjax.types import IGNORED, Array, Batch

AS_CALLED = NextToken()
"""The model as it is called, its logits in one piece."""


class Score(NamedTuple):
    """A model's losses on a text.

    Attributes:
      loss: nats per token.
      perplexity: exp(loss).
      bits_per_byte: nats of the tokens that stand for text, over ln 2 times their
        bytes. Special tokens count no bytes, and their nats are left out.
      tokens: predicted.
      bytes: bytes that they stand for.
      accuracy: how often the likeliest token is the answer, of a task's rows.
      passes: bits per byte of each pass of an objective that makes several over the
        text, the first over all of it, the others each over a part; else none.
      parts: scores of the parts of a mixture, by name.
    """

    loss: float
    perplexity: float
    bits_per_byte: float
    tokens: int
    bytes: int
    accuracy: Accuracy | None = None
    passes: tuple[float, ...] = ()
    parts: Mapping[str, "Score"] | None = None

    def metrics(self) -> dict[str, float]:
        """Returns the figures that a metrics file has: of symbols, no bits per byte."""
        named = {"loss": self.loss, "perplexity": self.perplexity}
        # Symbols stand for no text: a loss a byte would mean nothing.
        if self.bytes:
            named["bits_per_byte"] = self.bits_per_byte
            for number, bits in enumerate(self.passes):
                named[f"bits_per_byte_pass_{number}"] = bits
        for part, score in (self.parts or {}).items():
            named |= {f"{name}/{part}": x for name, x in score.metrics().items()}
        return named if self.accuracy is None else named | self.accuracy.metrics()

    def sentence(self) -> str:
        """Returns the main figures for a log line."""
        figures = [f"validation loss {self.loss:.4f}"]
        if self.bytes:
            figures.append(f"{self.bits_per_byte:.4f} bits per byte")
        if self.accuracy is not None:
            figures.append(
                f"accuracy {self.accuracy.token:.4f} (floor "
                f"{self.accuracy.floor:.4f}), "
                f"{self.accuracy.sequence:.4f} of complete rows"
            )
        figures += [
            f"{name} {part.loss:.4f}" for name, part in (self.parts or {}).items()
        ]
        return ", ".join(figures)


def joined(parts: Mapping[str, Score]) -> Score:
    """Returns the score of several texts together, which keeps theirs."""
    scores = list(parts.values())
    tokens, size = sum(s.tokens for s in scores), sum(s.bytes for s in scores)
    loss = sum(s.loss * s.tokens for s in scores) / tokens
    # Weighted by bytes, as the loss is by tokens: the same as one text of all parts.
    bits = sum(s.bits_per_byte * s.bytes for s in scores if s.bytes)
    return Score(
        loss=loss,
        # exp(710) overflows a float: a diverged loss keeps a finite perplexity.
        perplexity=math.exp(min(loss, 700.0)),
        bits_per_byte=bits / size if size else math.nan,
        tokens=tokens,
        bytes=size,
        parts=parts,
    )


def score(
    model: Decoder,
    batches: Iterable[Batch],
    *,
    token_bytes: Real[np.ndarray, " V"],
    objective: Objective = AS_CALLED,
    between: Callable[[], None] = lambda: None,
    labels: Iterable[Sequence[RowLabels]] | None = None,
    mesh: Mesh | None = None,
) -> Score:
    """Scores rows that each start without context.

    Args:
      model: any variant.
      batches: from `Dataset.loader("validation", ...)`, on the model's mesh.
      token_bytes: bytes that each token counts for: `Dataset.token_bytes`.
      objective: how the model is run: of an experiment's, the states and the pieces of
        the vocabulary.
      between: called after each batch.
      labels: labels of a task's rows, batch by batch, whose answers are then counted
        too. None: the rows are text.
      mesh: the mesh that the answers' counts are gathered over.
    """
    counts: list[AnswerCounts] = []
    # Bytes by token on the device, so that a batch's sums come back as four numbers.
    sizes = jnp.asarray(token_bytes)
    of_passes = np.zeros((1, 4), np.float64)
    for batch in batches:
        if labels is None:
            of_batch = batch_sums(model, batch, sizes, objective=objective)
        else:
            of_batch, counted = _sums_and_answers(
                model, batch, sizes, objective=objective, mesh=mesh
            )
            counts.append(jax.device_get(counted))
        of_passes = of_passes + np.asarray(of_batch, np.float64)
        between()
    # Each token counts by its last pass: after the first they cover the text once.
    sums = of_passes[1:].sum(0) if len(of_passes) > 1 else of_passes[0]
    nats, tokens, text_nats, text_bytes = (float(x) for x in sums)
    if tokens == 0:
        raise ValueError("score: the text must have at least one token to predict")
    loss = nats / tokens
    return Score(
        loss=loss,
        perplexity=math.exp(min(loss, 700.0)),
        bits_per_byte=bits_per_byte(text_nats, text_bytes),
        tokens=int(tokens),
        bytes=round(text_bytes),
        accuracy=None if labels is None else accuracy(counts, labels),
        passes=tuple(
            bits_per_byte(float(part[2]), float(part[3])) for part in of_passes
        )
        if len(of_passes) > 1
        else (),
    )


def bits_per_byte(nats: float, text_bytes: float) -> float:
    """Computes nats / (ln 2 * bytes), of `text_sums`; NaN of no text."""
    return nats / math.log(2) / text_bytes if text_bytes else math.nan


def text_sums(
    nats: Float[Array, "*B"], targets: Int[Array, "*B"], sizes: Real[Array, " V"]
) -> tuple[Float[Array, ""], Real[Array, ""]]:
    """Sums the nats of the targets that stand for text, and their bytes.

    Source: nanochat's count. Special tokens have no bytes, and their nats, as those of
    targets that are IGNORED, are left out.

    Args:
      sizes: bytes of each token's text.
    """
    counted = targets != IGNORED
    # IGNORED would be an index from the end.
    size = jnp.where(counted, sizes[jnp.where(counted, targets, 0)], 0)
    return jnp.where(size > 0, nats, 0).sum(), size.sum()


@partial(jax.jit, static_argnames="objective")
def batch_sums(
    model: Decoder, batch: Batch, sizes: Real[Array, " V"], *, objective: Objective
) -> Float[Array, "P 4"]:
    """Returns nats, tokens, nats of tokens with bytes, bytes; over one batch.

    A row for each pass of an objective that makes several, else one.
    """
    return _sums(model, objective.each_pass(model, batch), sizes, objective)


@partial(jax.jit, static_argnames=("objective", "mesh"))
def _sums_and_answers(
    model: Decoder,
    batch: Batch,
    sizes: Real[Array, " V"],
    *,
    objective: Objective,
    mesh: Mesh | None,
) -> tuple[Float[Array, "P 4"], AnswerCounts]:
    """Returns `batch_sums` and the answers' counts: the model reads a task's rows once.

    The last passes of an objective that makes several are parts, which its `states`
    puts together.
    """
    passes = objective.each_pass(model, batch)
    x = passes[0][1] if len(passes) == 1 else objective.states(model, batch)
    counts = answers_of(model, x, batch, mesh=mesh)
    return _sums(model, passes, sizes, objective), counts


def _sums(
    model: Decoder,
    passes: list[tuple[Array, Array]],
    sizes: Real[Array, " V"],
    objective: Objective,
) -> Float[Array, "P 4"]:
    rows = []
    for targets, x in passes:
        nats = token_losses(model, x, targets, chunks=objective.vocabulary_chunks).nats
        counted = targets != IGNORED
        sums = [nats.sum(), counted.sum(), *text_sums(nats, targets, sizes)]
        rows.append(jnp.stack([x.astype(jnp.float32) for x in sums]))
    return jnp.stack(rows)
