"""Objectives of uptraining: distillation from a teacher, losses at the exits."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from recurjax.exits import exits_of
from recurjax.losses.cross_entropy import token_losses
from recurjax.losses.divergence import (
    Divergence,
    ExitLosses,
    FrozenModel,
    Teacher,
    exit_losses,
)
from recurjax.model import Decoder, ModelConfig
from recurjax.ranges import (
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Range,
    RangeChecks,
)
from recurjax.types import IGNORED, Array, Batch, Scalar, Tokens
from recurjax.variants.relaxed_recursive_transformer import (
    RelaxedRecursiveTransformerConfig,
)


class _Uptraining(RangeChecks):
    """The part that uptraining objectives share: the call of the model."""

    __slots__ = ()
    passes = 1
    answers = None

    def calls_model(self, model: ModelConfig) -> bool:
        """Whether a pass runs the model as a call does: it is one."""
        return True

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
class Distilled(_Uptraining):
    """Cross-entropy, and the divergence from a teacher: section 3.6.

    loss = CE + weight t^2 KL(teacher || student), both at softmax(logits / t). Weight
    and temperature are in no paper: 1 and 1 are this project's choice. Table I.1
    compares other divergences.

    Attributes:
      teacher: a trained model of any variant with the same vocabulary and tokenizer.
      divergence: the divergence from the teacher, of which KL(teacher || student) is
        "forward_kl".
      weight: factor of the divergence.
      temperature: t, the temperature of both distributions.
      vocabulary_chunks: number of pieces of the vocabulary in which logits are
        computed, to lower peak memory.
    """

    teacher: FrozenModel
    divergence: Divergence = "forward_kl"
    weight: NonNegativeFloat = 1.0
    temperature: PositiveFloat = 1.0
    vocabulary_chunks: PositiveInt = 1

    @property
    def frozen(self) -> FrozenModel:
        """The teacher."""
        return self.teacher

    def refuses(self, model: ModelConfig) -> str | None:
        """Returns why a model cannot be trained so."""
        return _refuses_teacher(self.teacher, model)

    def beside_flops(self, model: ModelConfig, length: int) -> float:
        """Returns the extra FLOPs per token: the teacher's forward pass."""
        return _forward_flops(self.teacher, length)

    def __call__(
        self, model: Decoder, batch: Batch, teacher: Decoder
    ) -> tuple[Scalar, dict[str, Scalar]]:
        """Returns the loss; as metrics `loss`, the cross-entropy, and `divergence`."""
        # All logits in one walk over the vocabulary: the student's head is read once.
        losses = exit_losses(
            model,
            [self.states(model, batch)],
            batch.targets,
            teacher=self.view(teacher, batch),
            chunks=self.vocabulary_chunks,
        )
        assert losses.from_teacher is not None
        loss, divergence = (
            _mean(values[0], batch) for values in (losses.nats, losses.from_teacher)
        )
        metrics = {"loss": loss, "divergence": divergence}
        # Both losses are means over the same targets, so `weight` compares like with
        # like.
        return loss + self.weight * divergence, metrics

    def view(self, teacher: Decoder, batch: Batch) -> Teacher:
        """Returns what the teacher says of a batch."""
        x = self.states(teacher, batch)
        return Teacher(teacher, x, self.temperature, self.divergence)


@dataclass(frozen=True, kw_only=True, slots=True)
class Exits(_Uptraining):
    """Cross-entropies after every loop, and each one's divergence from the last.

    loss = sum_i a_i (CE_i + s KL(p_B || p_i)), p_B without gradient. Source: section
    3.7's ablation, appendix J. A teacher joins each loop's cross-entropy with the same
    a_i, which is this project's reading.

    Attributes:
      weights: weight a_i of loop i = 1 .. B: "weighted", i / (1 + ... + B);
        "aggressive", `coefficient` for all loops but the last, whose weight is 1.
      coefficient: weight of the loops before the last, if weights is "aggressive".
      self_distillation: s, the factor of the divergence of each exit from the last
        loop.
      distilled: a teacher to distill from; None: none. Its own `vocabulary_chunks` is
        ignored.
      vocabulary_chunks: number of pieces of the vocabulary in which logits are
        computed, to lower peak memory.
    """

    weights: Literal["weighted", "aggressive"] = "aggressive"
    coefficient: NonNegativeFloat = 0.1
    self_distillation: NonNegativeFloat = 1.0
    distilled: Distilled | None = None
    vocabulary_chunks: PositiveInt = 1

    @property
    def frozen(self) -> FrozenModel | None:
        """The teacher, if there is one."""
        return None if self.distilled is None else self.distilled.teacher

    def refuses(self, model: ModelConfig) -> str | None:
        """Returns why a model cannot be trained so."""
        stack = model.stack
        if not isinstance(stack, RelaxedRecursiveTransformerConfig):
            return (
                "Exits is for a recursive model, which has loops to leave after, not "
                f"for {type(stack).__name__}: use NextToken or Distilled"
            )
        if stack.sharing != "cycle" and stack.loops > 1:
            return (
                "Exits needs model.stack.sharing 'cycle', where fewer loops are a "
                f"model too, got {stack.sharing!r}"
            )
        return None if self.frozen is None else _refuses_teacher(self.frozen, model)

    def beside_flops(self, model: ModelConfig, length: int) -> float:
        """Returns the extra FLOPs per token: the exits' heads and the teacher."""
        stack = model.stack
        recursive = isinstance(stack, RelaxedRecursiveTransformerConfig)
        loops = stack.loops if recursive else 1
        # Each loop but the last adds one product with the head.
        heads = 6.0 * (loops - 1) * model.stack.width * model.padded_vocabulary
        teacher = self.frozen
        return heads + (0.0 if teacher is None else _forward_flops(teacher, length))

    def coefficients(self, loops: int) -> list[float]:
        """Returns a_1 .. a_B."""
        # The last exit is the model itself; earlier ones must not outweigh it.
        if self.weights == "aggressive":
            return [self.coefficient] * (loops - 1) + [1.0]
        total = loops * (loops + 1) / 2
        return [loop / total for loop in range(1, loops + 1)]

    def __call__(
        self, model: Decoder, batch: Batch, teacher: Decoder | None = None
    ) -> tuple[Scalar, dict[str, Scalar]]:
        """Returns the loss; as metrics the cross-entropies, and the divergences.

        They are `loss`, of the last loop, `exit_1` .. of the others, `self_divergence`
        and `divergence`, summed over loops with a_i.
        """
        view = None
        # The teacher is an argument, so that no gradient is made for it.
        if self.distilled is not None:
            assert teacher is not None, "an objective with a teacher is given it"
            view = self.distilled.view(teacher, batch)
        states = exit_states(model, batch)
        losses = exit_losses(
            model,
            states,
            batch.targets,
            # Without self-distillation the earlier exits are compared with nothing.
            to_last=self.self_distillation > 0,
            teacher=view,
            chunks=self.vocabulary_chunks,
        )
        return self._joined(losses, self.coefficients(len(states)), batch)

    def _joined(
        self, losses: ExitLosses, coefficients: Sequence[float], batch: Batch
    ) -> tuple[Scalar, dict[str, Scalar]]:
        entropies = [_mean(nats, batch) for nats in losses.nats]
        metrics = {"loss": entropies[-1]}
        metrics |= {f"exit_{i}": e for i, e in enumerate(entropies[:-1], start=1)}
        # Coefficients of all loops; of divergences there is one fewer, none for the
        # last.
        total = _weighted(coefficients, entropies)
        if losses.from_last is not None:
            apart = [_mean(values, batch) for values in losses.from_last]
            metrics["self_divergence"] = _weighted(coefficients, apart)
            total += self.self_distillation * metrics["self_divergence"]
        if losses.from_teacher is not None:
            assert self.distilled is not None
            apart = [_mean(values, batch) for values in losses.from_teacher]
            metrics["divergence"] = _weighted(coefficients, apart)
            total += self.distilled.weight * metrics["divergence"]
        return total, metrics


@dataclass(frozen=True, kw_only=True, slots=True)
class RandomLoops(_Uptraining):
    """Cross-entropy after a random number of loops, one number per step.

    r = 1 + Poisson(mean - 1), at most `most`, is the same for all rows of a step. It is
    drawn from the batch's ids, so that a resumed run draws the same numbers. The model
    can then run with other numbers of loops. Source of the idea: Geiping et al. 2025,
    who draw r from a log-normal Poisson distribution; none of the five papers has it.

    Attributes:
      mean: mean of r before the limit.
      most: largest r, which also bounds the cost of a step.
      truncate: number of last loops that gradients pass through; None: all. In steps
        with more loops the embedding gets no gradient.
      vocabulary_chunks: number of pieces of the vocabulary in which logits are
        computed, to lower peak memory.
    """

    mean: Annotated[float, Range(least=1)] = 4.0
    most: PositiveInt = 8
    truncate: PositiveInt | None = None
    vocabulary_chunks: PositiveInt = 1

    @property
    def frozen(self) -> None:
        """No other model."""
        return None

    def refuses(self, model: ModelConfig) -> str | None:
        """Returns why a model cannot be trained so."""
        stack = model.stack
        if not isinstance(stack, RelaxedRecursiveTransformerConfig):
            return (
                "RandomLoops is for a recursive model, whose block can run more often, "
                f"not for {type(stack).__name__}: use NextToken"
            )
        if (stack.sharing, stack.loop_cache) != ("cycle", "own"):
            return (
                "RandomLoops needs model.stack.sharing 'cycle' and loop_cache 'own', "
                f"got {stack.sharing!r} and {stack.loop_cache!r}"
            )
        if stack.transformer.residual_scale != "one":
            return (
                "RandomLoops needs model.stack.transformer.residual_scale 'one': a "
                "scale by depth would differ by the number of loops"
            )
        return None

    def beside_flops(self, model: ModelConfig, length: int) -> float:
        """Returns the extra FLOPs per token of more (or fewer) loops than its own."""
        stack = model.stack
        assert isinstance(stack, RelaxedRecursiveTransformerConfig)
        each = stack.flops_per_token(length) / stack.loops
        last = min(self.most, self.truncate or self.most)
        # Loops before those with a gradient are a third: they run forward alone.
        early = max(self.mean - last, 0.0) / 3
        return (last + early - stack.loops) * each

    def loops(self, batch: Batch) -> Int[Array, ""]:
        """Draws r from the batch."""
        odd = 2 * jnp.arange(batch.ids.size, dtype=jnp.uint32) + 1
        seed = jnp.sum(batch.ids.reshape(-1).astype(jnp.uint32) * odd)
        drawn = jax.random.poisson(jax.random.key(seed), self.mean - 1)
        return jnp.minimum(1 + drawn, self.most).astype(jnp.int32)

    def __call__(
        self, model: Decoder, batch: Batch
    ) -> tuple[Scalar, dict[str, Scalar]]:
        """Returns the loss after r loops; as metrics `loss` and `loops`."""
        loops = self.loops(batch)
        tokens = Tokens(batch.ids, batch.segments)
        x = exits_of(model).repeating(
            model.embed(batch.ids),
            tokens,
            loops,
            last=min(self.most, self.truncate or self.most),
        )
        losses = token_losses(
            model, model.final_norm(x), batch.targets, chunks=self.vocabulary_chunks
        )
        loss = _mean(losses.nats, batch)
        return loss, {"loss": loss, "loops": loops.astype(loss.dtype)}


def exit_states(model: Decoder, batch: Batch) -> list[Float[Array, "B T D"]]:
    """Returns the head's inputs after each loop, for full rows."""
    tokens = Tokens(batch.ids, batch.segments)
    cache = model.init_cache(batch.ids.shape[0], 0)
    after, _ = exits_of(model).states(model.embed(batch.ids), cache, tokens)
    # Every exit reads through the same final norm and head.
    return [model.final_norm(after[b]) for b in range(after.shape[0])]


def _mean(values: Float[Array, "B T"], batch: Batch) -> Scalar:
    return values.sum() / jnp.maximum(jnp.sum(batch.targets != IGNORED), 1)


def _weighted(coefficients: Sequence[float], values: Sequence[Scalar]) -> Scalar:
    """Sums a_i v_i; of divergences from the last loop there is one fewer."""
    # zip stops at the shorter list.
    pairs = zip(coefficients, values, strict=False)
    return jnp.stack([weight * value for weight, value in pairs]).sum()


def _refuses_teacher(teacher: FrozenModel, model: ModelConfig) -> str | None:
    if teacher.model.vocabulary == model.vocabulary:
        return None
    return (
        f"objective.frozen {teacher.run} predicts {teacher.model.vocabulary} tokens "
        f"and the model {model.vocabulary}: only a teacher of the same vocabulary can "
        "be compared with"
    )


def _forward_flops(teacher: FrozenModel, length: int) -> float:
    # A pass forward is a third of what training's three take.
    return teacher.model.flops_per_token(length) / 3
