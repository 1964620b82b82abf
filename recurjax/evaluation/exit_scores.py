"""The cost and gain of early exits: scores every rule over full rows of a text.

Scoring is teacher-forced: each token leaves the loops where its rule says so and is
scored by the prediction at that loop. Its keys and values at deeper loops come from its
last state, as in decoding with `propagate`, or from loop 1 where the model was trained
so. So the figures are those of decoding the same text.
"""

import io
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Float, Int, Real

from pallas_kernels import reductions
from recurjax.errors import UserError
from recurjax.evaluation.accuracy import by_pieces, likeliest
from recurjax.evaluation.perplexity import bits_per_byte, text_sums
from recurjax.exits import (
    ExitHead,
    confidence,
    cosine,
    exits_of,
    head_logit,
    head_score,
)
from recurjax.files.arrays import Expected, read_arrays
from recurjax.files.atomic import write_atomic, write_figure
from recurjax.model import Decoder
from recurjax.types import IGNORED, Array, Batch, Tokens

Rule = Literal["static", "oracle", "confidence", "cosine", "head"]
"""static: all tokens leave after the same loop, the threshold; oracle: after the first
whose likeliest token is the full model's, which decoding cannot know; else a rule."""

THRESHOLDS: dict[str, tuple[float, ...]] = {
    "confidence": (0.1, 0.3, 0.5, 0.7, 0.9),
    "cosine": (0.9, 0.95, 0.97, 0.98, 0.99),
    "head": (0.3, 0.5, 0.7, 0.8, 0.9),
}
"""The default thresholds of each rule."""

HEAD_FILE = "exit_head.npz"


class ExitScore(NamedTuple):
    """One rule at one threshold.

    Attributes:
      threshold: threshold of the rule; for "static" the loop, for "oracle" 0.
      loops: a token, mean.
      agreement: share of tokens whose likeliest successor is the full model's.
      loss: nats per token.
      bits_per_byte: as of `Score`.
      tokens: tokens that were predicted.
    """

    rule: Rule
    threshold: float
    loops: float
    agreement: float
    loss: float
    bits_per_byte: float
    tokens: int


def score_exits(
    model: Decoder,
    batches: Callable[[], Iterable[Batch]],
    *,
    token_bytes: Real[np.ndarray, " V"],
    thresholds: dict[str, Sequence[float]],
    head: ExitHead | None = None,
    report: Callable[[str], None] = lambda text: None,
) -> list[ExitScore]:
    """Scores all rules and thresholds on a text.

    Args:
      batches: returns the text's rows; each call starts again.
      thresholds: by rule; each of them is one more reading of the text.
      head: for the rule "head".
      report: called with a sentence when a rule is done.

    Raises:
      UserError: the model has no loops to leave, or the text no tokens to predict.
    """
    stack = exits_of(model)
    # What every rule is held against: always leaving after the same loop, and the best
    # that a rule could do if it knew the full model's token.
    tries: list[tuple[Rule, Sequence[float]]] = [
        ("static", range(1, stack.exits + 1)),
        ("oracle", (0.0,)),
    ]
    named: tuple[Rule, ...] = ("confidence", "cosine", "head")
    for name in named:
        if (values := thresholds.get(name)) is not None:
            tries.append((name, values))
    sizes = jnp.asarray(token_bytes)
    scores = []
    for rule, values in tries:
        if rule == "head" and head is None:
            raise ValueError(
                "score_exits: the rule head needs a trained head, got None"
            )
        # The six figures of `_sums` in float64, so that long texts keep their digits.
        sums = np.zeros((len(values), 6))
        for batch in batches():
            # The full model's tokens, once a batch: every threshold is compared with
            # them.
            full_ids = _full(model, batch)
            for number, value in enumerate(values):
                # An argument and no constant: one program serves all thresholds of a
                # rule.
                threshold = jnp.float32(value)
                batch_sums = _sums(
                    model, batch, sizes, full_ids, threshold, head, rule=rule
                )
                sums[number] += np.asarray(batch_sums, np.float64)
        if not sums[:, 1].all():
            raise UserError(
                "the text must have at least one token to predict: use more text"
            )
        for value, (nats, tokens, text_nats, size, loops, same) in zip(
            values, sums, strict=True
        ):
            scores.append(
                ExitScore(
                    rule=rule,
                    threshold=float(value),
                    loops=loops / tokens,
                    agreement=same / tokens,
                    loss=nats / tokens,
                    bits_per_byte=bits_per_byte(text_nats, size),
                    tokens=int(tokens),
                )
            )
        report(f"{rule}: {len(values)} readings")
    return scores


def exit_trajectories(
    model: Decoder, batches: Iterable[Batch]
) -> Int[np.ndarray, "R T"]:
    """Returns the loop after which the oracle lets each token leave; 0: no token.

    That is the first loop whose likeliest token is the full model's, both of one pass
    in which every token runs all loops: the paper's oracle, of which nothing is decoded
    (appendix E). "oracle" of `score_exits` makes deeper keys of the states that leave.
    """
    return np.concatenate([np.asarray(_first_agreeing(model, b)) for b in batches])


@jax.jit
def _first_agreeing(model: Decoder, batch: Batch) -> Int[Array, "B T"]:
    stack = exits_of(model)
    cache = model.init_cache(batch.ids.shape[0], 0)
    after, _ = stack.states(model.embed(batch.ids), cache, _tokens(batch))
    ids = [likeliest(model, model.final_norm(x)) for x in after]
    same = jnp.stack([each == ids[-1] for each in ids])
    # argmax is the first True; the last loop always agrees with itself.
    return jnp.where(batch.targets != IGNORED, 1 + same.argmax(0), 0)


def cheapest(scores: Sequence[ExitScore], most: float) -> list[ExitScore]:
    """Picks, of each rule that decoding can run, the fewest loops within a loss.

    Args:
      most: nats per token.
    """
    # A dict and no set: the rules keep the order in which they were scored.
    rules = dict.fromkeys(score.rule for score in scores if score.rule != "oracle")
    good = [score for score in scores if score.loss <= most]
    by_rule = ([score for score in good if score.rule == rule] for rule in rules)
    return [min(ones, key=lambda score: score.loops) for ones in by_rule if ones]


def fit_exit_head(
    model: Decoder, batches: Iterable[Batch], *, rate: float = 1e-2
) -> ExitHead:
    """Trains a linear guess of whether a loop's likeliest token is the last one's.

    Binary cross-entropy, one head per loop, Adam, one step per batch; the model does
    not move. Source: Schuster et al. 2022 (CALM), section 3.5, with one head for each
    loop.

    Args:
      rate: Adam's learning rate.
    """
    stack = exits_of(model)
    # None for the deepest loop, after which there is nothing left to skip. From zero: a
    # linear guess has one minimum, and needs no random start.
    shape = stack.exits - 1, model.config.stack.width
    head = ExitHead(jnp.zeros(shape), jnp.zeros(shape[0]))
    optimizer = optax.adam(rate)
    moments = optimizer.init(head)
    steps = 0
    for batch in batches:
        head, moments = _fit_step(model, batch, head, moments, optimizer=optimizer)
        steps += 1
    if steps == 0:
        raise UserError(
            "--fit-head needs at least one batch of text to train on: use more text"
        )
    return head


def write_exit_head(run: Path, head: ExitHead) -> Path:
    """Writes a head into a run directory atomically."""
    data = io.BytesIO()
    np.savez(data, weight=np.asarray(head.weight), bias=np.asarray(head.bias))
    write_atomic(run / HEAD_FILE, data.getvalue())
    return run / HEAD_FILE


def read_exit_head(run: Path) -> ExitHead | None:
    """Reads a run's head; None: it has none.

    Raises:
      UserError: the file is damaged, or holds no head.
    """
    file = run / HEAD_FILE
    if not file.is_file():
        return None
    expected = {"weight": Expected("f", (None, None)), "bias": Expected("f", (None,))}
    arrays = read_arrays(file, expected, f"the exit head {file}")
    weight, bias = arrays["weight"], arrays["bias"]
    if len(weight) != len(bias):
        raise UserError(
            f"the exit head {file} has weights of {len(weight)} loops and "
            f"biases of {len(bias)}: train it again with --fit-head"
        )
    return ExitHead(jnp.asarray(weight), jnp.asarray(bias))


def plot_exits(scores: Sequence[ExitScore], png: Path) -> None:
    """Draws the trade: mean loops across, nats per token up, a line for each rule."""
    from matplotlib.figure import Figure  # slow to import, and needed here only

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for rule in dict.fromkeys(score.rule for score in scores):
        points = sorted(
            (score.loops, score.loss) for score in scores if score.rule == rule
        )
        # Dashed is what bounds the rules, and is none itself.
        style = "o--" if rule in ("static", "oracle") else "o-"
        axes.plot(*zip(*points, strict=True), style, label=rule, markersize=4)
    axes.set(xlabel="mean loops per token", ylabel="loss (nats per token)")
    axes.legend(fontsize=8)
    write_figure(figure, png)


@jax.jit
def _full(model: Decoder, batch: Batch) -> Int[Array, "B T"]:
    """Returns the likeliest token of the model that runs all loops."""
    cache = model.init_cache(batch.ids.shape[0], 0)
    return likeliest(model, model.hidden(_tokens(batch), cache)[0])


@partial(jax.jit, static_argnames="rule")
def _sums(
    model: Decoder,
    batch: Batch,
    sizes: Real[Array, " V"],
    full_ids: Int[Array, "B T"],
    threshold: Float[Array, ""],
    head: ExitHead | None,
    *,
    rule: Rule,
) -> Float[Array, " 6"]:
    """Sums nats, tokens, nats of text, its bytes, loops, and agreements."""

    def leave(loop: int, before: Array, after: Array) -> Array:
        if rule == "static":
            return jnp.full(after.shape[:2], loop >= threshold)
        if rule == "cosine":
            return cosine(before, after) > threshold
        normed = model.final_norm(after)
        if rule == "oracle":
            return likeliest(model, normed) == full_ids
        if rule == "head":
            assert head is not None
            return head_score(head, loop, normed) > threshold

        def scores(x: Array) -> Array:
            return confidence(model.logits(x))

        return by_pieces(model, scores, normed) > threshold

    stack = exits_of(model)
    x, ran = stack.leaving(model.embed(batch.ids), _tokens(batch), leave)
    counted = batch.targets != IGNORED
    # An ignored target is not an index: use token 0 and drop its nats below.
    labels = jnp.where(counted, batch.targets, 0)

    def read(x: Array, labels: Array) -> tuple[Array, Array]:
        logits = model.logits(x)
        target = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
        return reductions.logsumexp(logits) - target, logits.argmax(-1)

    nats, ids = by_pieces(model, read, model.final_norm(x), labels)
    nats = jnp.where(counted, nats, 0)
    figures = [
        nats.sum(),
        counted.sum(),
        *text_sums(nats, batch.targets, sizes),
        jnp.where(counted, ran, 0).sum(),
        (counted & (ids == full_ids)).sum(),
    ]
    return jnp.stack([figure.astype(jnp.float32) for figure in figures])


@partial(jax.jit, static_argnames="optimizer")
def _fit_step(
    model: Decoder, batch: Batch, head: ExitHead, moments: Any, *, optimizer: Any
) -> tuple[ExitHead, Any]:
    stack = exits_of(model)
    cache = model.init_cache(batch.ids.shape[0], 0)
    after, _ = stack.states(model.embed(batch.ids), cache, _tokens(batch))
    normed = [model.final_norm(after[b]) for b in range(stack.exits)]
    last = likeliest(model, normed[-1])
    # The targets of each head. They are outside `loss`, so only the head is trained.
    same = [likeliest(model, x) == last for x in normed[:-1]]
    counted = batch.targets != IGNORED

    def loss(head: ExitHead) -> Array:
        total = jnp.zeros(())
        for loop, (x, right) in enumerate(zip(normed, same, strict=False), start=1):
            nats = optax.sigmoid_binary_cross_entropy(
                head_logit(head, loop, x), right.astype(jnp.float32)
            )
            total += jnp.where(counted, nats, 0).sum()
        return total / jnp.maximum(counted.sum(), 1)

    updates, moments = optimizer.update(jax.grad(loss)(head), moments)
    updated: Any = optax.apply_updates(head, updates)
    return updated, moments


def _tokens(batch: Batch) -> Tokens:
    return Tokens(batch.ids, batch.segments)
