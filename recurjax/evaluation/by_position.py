"""The loss at each position of a row: how a model reads what is longer than it knew."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float

from recurjax.files.atomic import write_figure
from recurjax.losses.cross_entropy import token_losses
from recurjax.model import Decoder
from recurjax.sharding import replicated
from recurjax.types import IGNORED, Array, Batch, Tokens


class Stretch(NamedTuple):
    """The positions start, ..., stop - 1 of all rows.

    Attributes:
      start, stop: in tokens from the row's first.
      loss: mean over the tokens predicted there, in nats.
      tokens: how many they are.
    """

    start: int
    stop: int
    loss: float
    tokens: int


def loss_by_position(
    model: Decoder,
    batches: Iterable[Batch],
    *,
    stretch: int,
    chunks: int = 1,
    between: Callable[[], None] = lambda: None,
    mesh: Mesh | None = None,
) -> list[Stretch]:
    """Scores rows that each start without context, stretch by stretch.

    Args:
      model: any variant.
      batches: rows of one length, on the model's mesh.
      stretch: positions that share one figure; the last may have fewer.
      chunks: see `token_losses`.
      between: called after each batch.
      mesh: the mesh that the sums are gathered over; None: one device.

    Raises:
      ValueError: stretch < 1, or there is nothing to predict.
    """
    if stretch < 1:
        raise ValueError(f"loss_by_position: stretch must be at least 1, got {stretch}")
    sums = None
    for batch in batches:
        # Summed in float64 on the host: means of many batches keep their digits.
        new = np.asarray(_sums(model, batch, chunks=chunks, mesh=mesh), np.float64)
        sums = new if sums is None else sums + new
        between()
    if sums is None or sums[1].sum() == 0:
        raise ValueError(
            "loss_by_position: the text must have at least one token to predict"
        )
    # Axis 0 holds nats and tokens, axis 1 the positions.
    starts = range(0, sums.shape[1], stretch)
    parts = [(start, sums[:, start : start + stretch]) for start in starts]
    # Places at which nothing is ever predicted have no mean, and are left out.
    return [
        Stretch(
            start=start,
            stop=start + part.shape[1],
            loss=float(part[0].sum() / part[1].sum()),
            tokens=int(part[1].sum()),
        )
        for start, part in parts
        if part[1].sum() > 0
    ]


def plot_by_position(
    curves: Mapping[str, Sequence[Stretch]], png: Path, *, trained: int
) -> None:
    """Draws one curve per model, and a line at the training length.

    Args:
      curves: by the name that the legend shows.
      png: written atomically.
      trained: tokens per row in training.
    """
    from matplotlib.figure import Figure  # slow to import, and needed here only

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for name, stretches in curves.items():
        middles = [(part.start + part.stop) / 2 for part in stretches]
        losses = [part.loss for part in stretches]
        axes.plot(middles, losses, "o-", label=name, markersize=3, linewidth=1.2)
    axes.axvline(trained, color="gray", linestyle=":", label="length of training")
    axes.set_xlabel("position in the row (tokens)")
    axes.set_ylabel("loss (nats per token)")
    axes.legend(fontsize=8)
    write_figure(figure, png)


@partial(jax.jit, static_argnames=("chunks", "mesh"))
def _sums(
    model: Decoder, batch: Batch, *, chunks: int, mesh: Mesh | None
) -> Float[Array, "2 T"]:
    """Returns nats and predicted tokens of one batch, for each position."""
    cache = model.init_cache(batch.ids.shape[0], 0)
    x, _ = model.hidden(Tokens(batch.ids, batch.segments), cache)
    nats = token_losses(model, x, batch.targets, chunks=chunks).nats
    counted = (batch.targets != IGNORED).astype(jnp.float32)
    # The batch's rows vanish here; only sums by position leave the device.
    sums = jnp.stack([nats.astype(jnp.float32).sum(0), counted.sum(0)])
    if mesh is None:
        return sums
    return jax.lax.with_sharding_constraint(sums, replicated(mesh))
