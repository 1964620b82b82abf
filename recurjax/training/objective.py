"""Training objectives: configs that are functions of (model, batch)."""

from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

import jax.numpy as jnp
from jaxtyping import Float, Int

from recurjax.losses.cross_entropy import at_targets, token_losses
from recurjax.losses.divergence import FrozenModel
from recurjax.model import Decoder, ModelConfig
from recurjax.ranges import NonNegativeFloat, PositiveInt, RangeChecks
from recurjax.types import IGNORED, Array, Batch, Cache, Scalar, Tokens
from recurjax.variants.latent_recurrent_transformer.objectives import (
    Chunked,
    Interleaved,
)
from recurjax.variants.relaxed_recursive_transformer.objectives import (
    Distilled,
    Exits,
    RandomLoops,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class NextToken(RangeChecks):
    """Mean cross-entropy of the next token, with optional z-loss.

    loss = mean over counted targets of -log p(target) + z (log sum exp logits)^2.
    Source of the z-loss: Chowdhery et al. 2022, section 5.

    Attributes:
      z_loss: z, the weight of the z-loss; PaLM's is 1e-4.
      vocabulary_chunks: number of pieces of the vocabulary in which logits are
        computed, to lower peak memory.
      answers: upper bound on the counted targets of a row. Logits are then computed at
        these positions only, which saves time in tasks with few targets. None: at all
        positions.
    """

    z_loss: NonNegativeFloat = 0.0
    vocabulary_chunks: PositiveInt = 1
    answers: PositiveInt | None = None
    passes: ClassVar[int] = 1
    frozen: ClassVar[FrozenModel | None] = None

    def calls_model(self, model: ModelConfig) -> bool:
        """Whether a pass runs the model as a call does: it is one."""
        return True

    def refuses(self, model: ModelConfig) -> str | None:
        """Every model predicts next tokens."""
        return None

    def beside_flops(self, model: ModelConfig, length: int) -> float:
        """Returns the extra FLOPs per token on top of the model's: none."""
        return 0.0

    def __call__(
        self, model: Decoder, batch: Batch
    ) -> tuple[Scalar, dict[str, Scalar]]:
        """Returns the loss to minimise and, as metrics, its cross-entropy `loss`."""
        return self._loss(model, self.states(model, batch), batch.targets)

    def carry(
        self, model: Decoder, batch: Batch, cache: Cache
    ) -> tuple[Scalar, tuple[dict[str, Scalar], Cache]]:
        """Returns the same of rows that continue those of a cache, and the next one."""
        x, cache = model.hidden(Tokens(batch.ids), cache)
        loss, metrics = self._loss(model, x, batch.targets)
        return loss, (metrics, cache)

    def _loss(
        self, model: Decoder, x: Float[Array, "B T D"], targets: Int[Array, "B T"]
    ) -> tuple[Scalar, dict[str, Scalar]]:
        if self.answers is not None:
            x, targets = at_targets(x, targets, self.answers)
        losses = token_losses(model, x, targets, chunks=self.vocabulary_chunks)
        # A batch without targets has a loss of 0 and not NaN.
        counted = jnp.maximum(jnp.sum(targets != IGNORED), 1)
        cross_entropy = losses.nats.sum() / counted
        metrics = {"loss": cross_entropy}
        if self.z_loss == 0.0:
            return cross_entropy, metrics
        # Draws log-normalizers towards 0, which keeps long trainings steady (PaLM).
        z = jnp.square(losses.log_normalizer).sum() / counted
        return cross_entropy + self.z_loss * z, metrics | {"z_loss": self.z_loss * z}

    def states(self, model: Decoder, batch: Batch) -> Float[Array, "B T D"]:
        """Returns what the head reads in evaluations: the model as it is called."""
        tokens = Tokens(batch.ids, batch.segments)
        return model.hidden(tokens, model.init_cache(batch.ids.shape[0], 0))[0]

    def each_pass(
        self, model: Decoder, batch: Batch
    ) -> list[tuple[Int[Array, "B T"], Float[Array, "B T D"]]]:
        """Returns the one pass' targets and `states`."""
        return [(batch.targets, self.states(model, batch))]


@dataclass(frozen=True, kw_only=True, slots=True)
class Compress(NextToken):
    """Mean cross-entropy of every token of a row, predicted from its last state alone.

    MAD's compression task: the state at the last target, a sinusoid of each position
    and the model's row decoder give the logits of all positions. Each target is at its
    token's own position. Source: Poli et al. 2024, appendix.
    """

    def refuses(self, model: ModelConfig) -> str | None:
        """Returns why a model cannot be trained so."""
        if model.row_decoder:
            return None
        return (
            "the objective Compress trains a row decoder, which the model lacks: "
            "set --model.row-decoder True"
        )

    def beside_flops(self, model: ModelConfig, length: int) -> float:
        """Returns the extra FLOPs per token: two products with D by D matrices."""
        return 12.0 * model.stack.width**2

    def states(self, model: Decoder, batch: Batch) -> Float[Array, "B T D"]:
        """Returns the row decoder's states at all positions, from the last target's."""
        T = batch.ids.shape[1]
        scored = batch.targets != IGNORED
        last = jnp.max(jnp.where(scored, jnp.arange(T), 0), axis=1)
        if model.row_decoder is None:
            raise ValueError(self.refuses(model.config))
        tokens = Tokens(batch.ids, batch.segments)
        cache = model.init_cache(batch.ids.shape[0], 0)
        x, _ = model.stack(model.embed(batch.ids), cache, tokens)
        state = jnp.take_along_axis(x, last[:, None, None], axis=1)[:, 0]
        return model.final_norm(model.row_decoder(state, T))


Objective = (
    NextToken | Compress | Interleaved | Chunked | Distilled | Exits | RandomLoops
)
"""Every objective: a closed union; JSON names the class.

Each is callable as `NextToken` is, names its cross-entropy "loss" among its metrics,
and has `states`, `each_pass` and `vocabulary_chunks`, which evaluations use, `answers`,
the counted targets that a row may have (None: any number), `passes`, how often the
model reads each token, and `frozen`: None, or a `FrozenModel`. With one it is called
with that model, a `Decoder`, as its third argument. `refuses` says why a model cannot
be trained so; `beside_flops` returns the FLOPs of a step outside the model's passes;
`calls_model` says whether a pass runs a model as a call does."""


@runtime_checkable
class SupportsCarry(Protocol):
    """An objective of one pass, whose rows may go on in the next: see `as_carried`."""

    def carry(
        self, model: Decoder, batch: Batch, cache: Cache
    ) -> tuple[Scalar, tuple[dict[str, Scalar], Cache]]:
        """Returns the loss of rows that continue those of a cache.

        And with its metrics the cache of the rows' next tokens.
        """
        ...


def as_carried(objective: Objective) -> SupportsCarry | None:
    """Returns the objective as one that carries caches; None: it cannot."""
    # `Compress` predicts a row from its last state, which is not there before its end.
    if isinstance(objective, Compress) or not isinstance(objective, SupportsCarry):
        return None
    return objective


def refuses_segments(objective: Objective, model: ModelConfig) -> str | None:
    """Returns why a model cannot be trained so on rows with segments.

    Passes over parts of a sequence take them. A model that is called as it is, by an
    objective that `calls_model` or as a frozen one, may run token after token or on a
    cache: such a stack takes none.
    """
    called = [("the model", model)] if objective.calls_model(model) else []
    if objective.frozen is not None:
        called.append(("the frozen model", objective.frozen.model))
    for name, config in called:
        if not config.takes_segments:
            chunks = "" if Chunked(chunk=1).calls_model(config) else " or Chunked"
            return (
                f"{name} of {type(objective).__name__} passes its latent memory on "
                "through a cache and cannot separate a row's documents: leave "
                "data.document_segments off (for prompts with answers: rows one), "
                f"or train with Interleaved{chunks}"
            )
    return None
