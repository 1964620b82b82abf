"""Accuracy: how often a model's likeliest token is the target."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float, Int, Shaped

from recurjax.data.tasks import RowLabels
from recurjax.files.atomic import write_figure
from recurjax.model import Decoder
from recurjax.sharding import replicated
from recurjax.training.objective import NextToken, Objective
from recurjax.types import IGNORED, Array, Batch

LOGITS_AT_ONCE = 2**25
"""How many logits are held at a time; the longest rows of MQAR would make 2^29."""

AS_CALLED = NextToken()
"""The model as it is called, its logits in one piece."""


Curve = tuple[Sequence[int], Sequence[float]]
"""Values and the accuracy at each."""


class AnswerCounts(NamedTuple):
    """Correct and total answers of a batch, counted three ways.

    Attributes:
      right, total: right answers and all answers of each row.
      position_right, position_total: right answers and all answers at each position,
        over the rows.
      class_right, class_total: right answers and all answers by the token that was the
        answer, over the rows.
    """

    right: Int[Array, " B"]
    total: Int[Array, " B"]
    position_right: Int[Array, " T"]
    position_total: Int[Array, " T"]
    class_right: Int[Array, " V"]
    class_total: Int[Array, " V"]


@partial(jax.jit, static_argnames=("objective", "mesh"))
def count_answers(
    model: Decoder,
    batch: Batch,
    *,
    objective: Objective = AS_CALLED,
    mesh: Mesh | None = None,
) -> AnswerCounts:
    """Counts a batch's right answers: places whose likeliest token is the target.

    Args:
      objective: how the model is run.
      mesh: every process of it gets the counts of all rows; None: one device.
    """
    return answers_of(model, objective.states(model, batch), batch, mesh=mesh)


def answers_of(
    model: Decoder, x: Float[Array, "B T D"], batch: Batch, *, mesh: Mesh | None
) -> AnswerCounts:
    """Counts as `count_answers` does, from states `x` that the head reads."""
    scored = batch.targets != IGNORED
    right = scored & (likeliest(model, x) == batch.targets)
    # An ignored place adds 0 to class 0, so no mask is needed in the scatter.
    answers = jnp.where(scored, batch.targets, 0)

    def by_class(classes: Array) -> Array:
        zeros = jnp.zeros(model.config.vocabulary, jnp.int32)
        return zeros.at[answers].add(classes.astype(jnp.int32))

    counts = AnswerCounts(
        right=right.sum(1),
        total=scored.sum(1),
        position_right=right.sum(0),
        position_total=scored.sum(0),
        class_right=by_class(right),
        class_total=by_class(scored),
    )
    # On one device there is nothing to gather.
    if mesh is None:
        return counts
    return jax.lax.with_sharding_constraint(counts, replicated(mesh))


def likeliest(model: Decoder, x: Float[Array, "B T D"]) -> Int[Array, "B T"]:
    """Returns the token of the largest logit at each place, a few places at a time."""
    return by_pieces(model, lambda piece: model.logits(piece).argmax(-1), x)


def by_pieces(
    model: Decoder, read: Callable[..., Any], *arrays: Shaped[Array, "B T ..."]
) -> Any:
    """Applies `read` to a few places of all rows at a time, as many as logits fit.

    Args:
      read: function of as many arrays, which returns a tree of arrays [B, places].
      arrays: alike in B and T; the first ones are states that become logits.
    """
    B, T = arrays[0].shape[:2]
    # Places at a time, so that B width V logits stay below the limit; at least one.
    width = max(1, min(T, LOGITS_AT_ONCE // (B * model.config.vocabulary)))
    pieces = -(-T // width)

    def cut(x: Array) -> Array:
        # The last piece is filled up; what comes of the padding is cut off below.
        padding = ((0, 0), (0, pieces * width - T), *([(0, 0)] * (x.ndim - 2)))
        shape = (B, pieces, width, *x.shape[2:])
        return jnp.moveaxis(jnp.pad(x, padding).reshape(shape), 1, 0)

    mapped = jax.lax.map(lambda cuts: read(*cuts), tuple(map(cut, arrays)))
    return jax.tree.map(
        lambda x: jnp.moveaxis(x, 0, 1).reshape(B, pieces * width)[:, :T], mapped
    )


class Accuracy(NamedTuple):
    """Shares of right answers.

    Attributes:
      token: over all targets.
      mean_of_classes: over the tokens that were an answer, the mean of each one's
        share. MAD's published figure (the default average of torchmetrics).
      sequence: rows whose every answer is right; the Recurrent Transformer's figure.
      floor: `token` of the best answer without matching keys.
      slices: `token` of the rows of each slice, by names such as "pairs=8", in the
        order of their numbers.
      slice_floors: the floor of each slice.
      answers: targets of each slice, by the same names.
      positions: `token` by position; None without a target there.
      rows: rows with at least one target.
    """

    token: float
    mean_of_classes: float
    sequence: float
    floor: float
    slices: dict[str, float]
    slice_floors: dict[str, float]
    answers: dict[str, int]
    positions: list[float | None]
    rows: int

    def metrics(self) -> dict[str, float]:
        """Returns the figures under the names that metrics files have."""
        named = {
            "accuracy": self.token,
            "class_accuracy": self.mean_of_classes,
            "sequence_accuracy": self.sequence,
            "accuracy_floor": self.floor,
        }
        return named | {f"accuracy/{name}": x for name, x in self.slices.items()}

    def floors(self) -> dict[str, float]:
        """Returns the floors of the metrics that have one, by the metrics' names."""
        slices = {f"accuracy/{name}": x for name, x in self.slice_floors.items()}
        return {"accuracy": self.floor} | slices

    def is_at_floor(self, answers: int) -> bool:
        """Returns whether `token` is within the standard error of the floor."""
        error = (self.floor * (1 - self.floor) / answers) ** 0.5
        return self.token <= self.floor + 3 * error


def accuracy(
    counts: Iterable[AnswerCounts], labels: Iterable[Sequence[RowLabels]]
) -> Accuracy:
    """Adds batches up.

    Args:
      counts: counts of each batch.
      labels: labels of each batch's rows; rows beyond those given are padding, which
        has no answers.

    Raises:
      ValueError: no row has a target.
    """
    classes = positions = np.zeros((2, 0), np.int64)
    rows: list[_RowCounts] = []
    by_slice: dict[tuple[str, int], list[_RowCounts]] = {}
    for batch, of_rows in zip(counts, labels, strict=False):
        classes = _added(classes, batch.class_right, batch.class_total)
        positions = _added(positions, batch.position_right, batch.position_total)
        pairs = zip(np.asarray(batch.right), np.asarray(batch.total), strict=True)
        for (right, total), row in zip(pairs, of_rows, strict=False):
            if not total:
                continue
            rows.append(_RowCounts(int(right), int(total), row.floor))
            for label in row.slices.items():
                by_slice.setdefault(label, []).append(rows[-1])
    if not rows:
        raise ValueError("accuracy: rows must have at least one target")
    # A class that was never an answer has no share; it is left out of the mean.
    total = classes[1] > 0
    places = [right / count if count else None for right, count in positions.T.tolist()]
    several = {
        f"{name}={value}": counts
        for (name, value), counts in sorted(by_slice.items())
        # The rows' own label would repeat the total.
        if len(counts) < len(rows)  # a slice of all rows says nothing new
    }
    return Accuracy(
        token=_share(rows),
        mean_of_classes=float((classes[0][total] / classes[1][total]).mean()),
        sequence=sum(row.right == row.total for row in rows) / len(rows),
        floor=_floor(rows),
        slices={name: _share(counts) for name, counts in several.items()},
        slice_floors={name: _floor(counts) for name, counts in several.items()},
        answers={name: _total(counts) for name, counts in several.items()},
        positions=places,
        rows=len(rows),
    )


def curves_of(
    slices: Mapping[str, float], positions: Sequence[float | None]
) -> dict[str, Curve]:
    """Returns the curves to draw: values and their accuracies by the name of the axis.

    Args:
      slices: accuracies by names such as "pairs=8".
      positions: by position; drawn where nearly every position has a target.
    """
    by: dict[str, dict[int, float]] = {}
    for name, share in slices.items():
        kind, _, value = name.partition("=")
        by.setdefault(kind, {})[int(value)] = share
    curves: dict[str, Curve] = {
        kind: (sorted(shares), [shares[value] for value in sorted(shares)])
        for kind, shares in sorted(by.items(), reverse=True)
    }
    known = {at: share for at, share in enumerate(positions) if share is not None}
    # A curve over few places would look like one over all of them.
    if len(known) > 0.9 * len(positions):
        curves["position"] = (list(known), list(known.values()))
    return curves


def plot_by_slice(
    curves: Mapping[str, Mapping[str, Curve]], png: Path, *, trained: int
) -> None:
    """Draws a field for each kind of slice, with a curve for each model.

    Args:
      curves: the result of `curves_of` for each model, by name; all of the same kinds.
      png: written atomically.
      trained: tokens per row in training, a line where places or lengths are drawn.
    """
    from matplotlib.figure import Figure  # slow to import, and needed here only

    kinds = list(dict.fromkeys(kind for by_kind in curves.values() for kind in by_kind))
    figure = Figure(figsize=(1 + 4.5 * max(1, len(kinds)), 4), layout="constrained")
    fields = figure.subplots(1, max(1, len(kinds)), squeeze=False)[0]
    for kind, axes in zip(kinds, fields, strict=False):
        for name, by_kind in curves.items():
            values, shares = by_kind[kind]
            marker = "o" if len(values) < 20 else None
            axes.plot(values, shares, marker=marker, label=name, linewidth=1.2)
            # Numbers of pairs and lengths double from one to the next: even steps on a
            # log axis.
            if marker and min(values) > 0 and max(values) > 8 * min(values):
                axes.set_xscale("log", base=2)
        if kind in ("length", "position"):
            axes.axvline(trained, color="gray", linestyle=":", label="training")
        axes.set_xlabel(kind)
        axes.set_ylabel("accuracy")
        # The same scale in every field, and room for curves at 0 or 1.
        axes.set_ylim(-0.02, 1.02)
        axes.legend(fontsize=8)
    write_figure(figure, png)


class _RowCounts(NamedTuple):
    right: int
    total: int
    floor: float


def _share(rows: list[_RowCounts]) -> float:
    return sum(row.right for row in rows) / _total(rows)


def _floor(rows: list[_RowCounts]) -> float:
    return sum(row.floor for row in rows) / _total(rows)


def _total(rows: list[_RowCounts]) -> int:
    return sum(row.total for row in rows)


def _added(sums: np.ndarray, right: Any, total: Any) -> np.ndarray:
    # 64 bits: counts of a large test do not fit 32.
    more = np.stack([np.asarray(right), np.asarray(total)]).astype(np.int64)
    return more if sums.shape[1] == 0 else sums + more
