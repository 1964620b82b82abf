"""Objectives of the Latent Recurrent Transformer: passes over parts of a sequence."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from recurjax.losses.cross_entropy import at_targets, token_losses
from recurjax.model import Decoder, ModelConfig, StackConfig
from recurjax.ranges import PositiveInt, RangeChecks
from recurjax.types import IGNORED, Array, Batch, Cache, Scalar, Tokens
from recurjax.variants.latent_recurrent_transformer import (
    LatentRecurrentTransformerConfig,
    LatentRecurrentTransformerStack,
    MemoryStack,
)
from recurjax.variants.latent_recurrent_transformer.recurrence import (
    Positions,
    put,
    strided_partition,
    take,
    tokens_since,
)
from recurjax.variants.rat import RatConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Interleaved(RangeChecks):
    """Interleaved parallel training: one pass over all, one over each of S subsets.

    loss = mean over the S + 1 passes of each one's mean cross-entropy, eq. (6); nothing
    is detached. Source: section 3.1, algorithm 1.

    Attributes:
      subsets: S; subset s has the positions s, s + S, s + 2 S, ...
      refresh: before each subset, recompute the memory in keys and values of positions
        not yet visited from the latest states. An option of the authors' release, not
        of the paper; its matrix products are not counted in the FLOPs.
      vocabulary_chunks: number of pieces of the vocabulary in which logits are
        computed, to lower peak memory.
      answers: upper bound on the counted targets of a row, so that logits are computed
        at these positions only; None: at all positions.
    """

    subsets: PositiveInt = 2
    refresh: bool = False
    vocabulary_chunks: PositiveInt = 1
    answers: PositiveInt | None = None
    passes: ClassVar[int] = 2
    frozen: ClassVar[None] = None

    def calls_model(self, model: ModelConfig) -> bool:
        """Whether a pass runs the model as a call does: no."""
        return False

    def refuses(self, model: ModelConfig) -> str | None:
        """Returns why a model cannot be trained so: its memory, or its length."""
        stack = model.stack
        if (reason := _refuses(stack)) is not None:
            return reason
        assert isinstance(stack, LatentRecurrentTransformerConfig | RatConfig)
        assert stack.memory is not None
        if isinstance(stack, RatConfig):
            if self.subsets > 1:
                return (
                    "objective: a pattern of mixers runs all positions at once, and "
                    f"cannot be cut into {self.subsets} subsets: set "
                    "objective.subsets 1, a second pass over all"
                )
        elif self.subsets > stack.length:
            return (
                f"objective: {stack.length} tokens (model.stack.length) cannot be cut "
                f"into {self.subsets} subsets: set fewer objective.subsets"
            )
        if self.refresh and not stack.memory.gated:
            return (
                "objective: nothing can be refreshed where no key and no value takes "
                "the memory: set model.stack.memory.keys or values, or leave "
                "objective.refresh off"
            )
        return None

    def beside_flops(self, model: ModelConfig, length: int) -> float:
        """Returns the extra FLOPs per token on top of the model's passes: none."""
        return 0.0

    def counts(self, batch: Batch) -> Float[Array, " passes"]:
        """Counts the targets of each pass: the loss is the mean of as many means."""
        partition = strided_partition(batch.ids.shape[1], self.subsets)
        scored = (batch.targets != IGNORED).astype(jnp.float32)
        refined = [take(scored, positions).sum() for positions in partition]
        return jnp.stack([scored.sum(), *refined])

    def __call__(
        self,
        model: Decoder,
        batch: Batch,
        *,
        shares: Float[Array, " passes"] | None = None,
    ) -> tuple[Scalar, dict[str, Scalar]]:
        """Returns the loss; as metrics `loss`, `initial` and `refined`.

        Args:
          shares: a part's fraction of each pass' targets in the batch, so that the
            parts' losses add up to the batch's.
        """
        partition = strided_partition(batch.ids.shape[1], self.subsets)
        passes = interleaved_passes(model, batch, partition, refresh=self.refresh)
        means = jnp.stack(
            [
                _mean(
                    model,
                    x,
                    batch,
                    positions,
                    chunks=self.vocabulary_chunks,
                    answers=self.answers,
                )
                for positions, x in passes
            ]
        )
        means = means if shares is None else means * shares
        loss = means.mean()
        return loss, {"loss": loss, "initial": means[0], "refined": means[1:].mean()}

    def each_pass(
        self, model: Decoder, batch: Batch
    ) -> list[tuple[Int[Array, "B n"], Float[Array, "B n D"]]]:
        """Returns each pass' targets and what the head reads to predict them.

        First the initialization pass, over all positions; the refinements after it
        cover each position once: together they are what `states` merges.
        """
        partition = strided_partition(batch.ids.shape[1], self.subsets)
        return [
            (take(batch.targets, positions), x)
            for positions, x in interleaved_passes(
                model, batch, partition, refresh=self.refresh
            )
        ]

    def states(self, model: Decoder, batch: Batch) -> Float[Array, "B T D"]:
        """Returns what the head reads in evaluations: each position's last pass."""
        partition = strided_partition(batch.ids.shape[1], self.subsets)
        (_, merged), *refined = interleaved_passes(
            model, batch, partition, refresh=self.refresh
        )
        for positions, x in refined:
            merged = put(merged, positions, x)
        return merged


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunked(RangeChecks):
    """Chunked training: chunks one after another, parallel within.

    All positions of a chunk have the same memory, the state before the chunk. Source:
    appendix D.1.

    Attributes:
      chunk: C, the tokens of a chunk.
      memory: positions of a chunk that read the memory: "broadcast", all; "first", the
        first only.
      vocabulary_chunks: number of pieces of the vocabulary in which logits are
        computed, to lower peak memory.
    """

    chunk: PositiveInt
    memory: Literal["broadcast", "first"] = "broadcast"
    vocabulary_chunks: PositiveInt = 1
    answers: ClassVar[None] = None
    passes: ClassVar[int] = 1
    frozen: ClassVar[None] = None

    def calls_model(self, model: ModelConfig) -> bool:
        """Whether a pass runs the model as a call does: a pattern of mixers."""
        return isinstance(model.stack, RatConfig)

    def refuses(self, model: ModelConfig) -> str | None:
        """Returns why a model cannot be trained so: no memory of earlier tokens."""
        stack = model.stack
        if (reason := _refuses(stack)) is not None:
            return reason
        assert isinstance(stack, LatentRecurrentTransformerConfig | RatConfig)
        assert stack.memory is not None
        # A chunk is computed once: its own states are not there when it begins.
        if 0 in stack.memory.lags:
            return (
                "objective: Chunked is for a memory of earlier tokens, and "
                "model.stack.memory.lags has 0, a token's own state: use Interleaved"
            )
        return None

    def beside_flops(self, model: ModelConfig, length: int) -> float:
        """Returns the extra FLOPs per token on top of the model's passes: none."""
        return 0.0

    def __call__(
        self, model: Decoder, batch: Batch
    ) -> tuple[Scalar, dict[str, Scalar]]:
        """Returns the mean cross-entropy, as the loss and as the metric `loss`."""
        return self._loss(model, batch, self.states(model, batch))

    def carry(
        self, model: Decoder, batch: Batch, cache: Cache
    ) -> tuple[Scalar, tuple[dict[str, Scalar], Cache]]:
        """Returns the same of rows that continue those of a cache, and the next one."""
        x, cache = self._on_cache(model, batch, cache)
        loss, metrics = self._loss(model, batch, x)
        return loss, (metrics, cache)

    def _on_cache(
        self, model: Decoder, batch: Batch, cache: Any
    ) -> tuple[Float[Array, "B T D"], Any]:
        """Runs rows chunk by chunk after those of a cache; returns what the head reads.

        Each chunk's tokens wait for the one before, as a cache hands its states on.
        """
        stack, x, parts = _stack_of(model), model.embed(batch.ids), []
        for start in range(0, x.shape[1], self.chunk):
            part = x[:, start : start + self.chunk]
            ids = batch.ids[:, start : start + self.chunk]
            first = stack.memory_of_token(part[:, :1], cache, Tokens(ids[:, :1]))
            memory = self._over_chunk(first, Tokens(ids), stack)
            y, cache = stack.on_cache(part, memory, cache, Tokens(ids))
            parts.append(y)
        return model.final_norm(jnp.concatenate(parts, axis=1)), cache

    def _loss(
        self, model: Decoder, batch: Batch, x: Float[Array, "B T D"]
    ) -> tuple[Scalar, dict[str, Scalar]]:
        loss = _mean(model, x, batch, slice(0, None, 1), chunks=self.vocabulary_chunks)
        return loss, {"loss": loss}

    def states(self, model: Decoder, batch: Batch) -> Float[Array, "B T D"]:
        """Returns what the head reads, of all positions."""
        stack, x = _stack_of(model), model.embed(batch.ids)
        T = x.shape[1]
        if not isinstance(stack, LatentRecurrentTransformerStack):
            # Mixers' states have no buffer of all positions.
            if batch.segments is not None:
                raise NotImplementedError(
                    "Chunked: a pattern of mixers reads chunks from its cache, which "
                    "takes no segments: use Interleaved"
                )
            return self._on_cache(model, batch, stack.init_cache(len(x), T, x.dtype))[0]
        tokens = Tokens(batch.ids, batch.segments)
        buffer = stack.empty_buffer(x)
        parts = []
        for start in range(0, T, self.chunk):
            positions = slice(start, min(start + self.chunk, T), 1)
            first = stack.memory_of(buffer.states, tokens)[:, start : start + 1]
            chunk = jax.tree.map(lambda of, at=positions: of[:, at], tokens)
            memory = self._over_chunk(first, chunk, stack)
            y, buffer = stack.refine(x, tokens, positions, buffer, memory=memory)
            parts.append(y)
        return model.final_norm(jnp.concatenate(parts, axis=1))

    def _over_chunk(
        self,
        first: Float[Array, "B 1 D"],
        tokens: Tokens,
        stack: MemoryStack,
    ) -> Float[Array, "B n D"]:
        """Returns a chunk's memory from the one that enters its first token.

        It is one for the entire chunk, so that the chunk's tokens need not wait for
        each other.
        """
        n = tokens.ids.shape[1]
        memory = jnp.repeat(first, n, axis=1)
        assert stack.config.memory is not None
        reset = stack.config.memory.reset_token
        if reset is not None:  # zero from a reset token inside the chunk on
            near = tokens_since(tokens.ids, reset) >= np.arange(n)
            memory = jnp.where(near[..., None], memory, 0)
        if tokens.segments is not None:  # the first token's document alone
            same = tokens.segments == tokens.segments[:, :1]
            memory = jnp.where(same[..., None], memory, 0)
        if self.memory == "first":
            memory = jnp.where(np.arange(n)[None, :, None] == 0, memory, 0)
        return memory

    def each_pass(
        self, model: Decoder, batch: Batch
    ) -> list[tuple[Int[Array, "B T"], Float[Array, "B T D"]]]:
        """Returns the one pass' targets and `states`."""
        return [(batch.targets, self.states(model, batch))]


def interleaved_passes(
    model: Decoder,
    batch: Batch,
    partition: tuple[Positions, ...],
    *,
    refresh: bool = False,
) -> list[tuple[Positions, Float[Array, "B n D"]]]:
    """Runs the initialization pass and one refinement for each subset, in turn.

    Args:
      refresh: see `Interleaved`.

    Returns:
      The positions of each pass and, at them, the states that the head reads.
    """
    stack = _stack_of(model)
    tokens = Tokens(batch.ids, batch.segments)
    x = model.embed(batch.ids)
    y, buffer = stack.initial(x, tokens, origins=refresh)
    passes: list[tuple[Positions, Array]] = [
        (slice(0, None, 1), model.final_norm(y)),
    ]
    visited = jnp.zeros(x.shape[1], bool)
    for positions in partition:
        if refresh:
            assert isinstance(stack, LatentRecurrentTransformerStack)
            buffer = stack.refreshed(buffer, tokens, visited=visited)
            visited = visited.at[positions].set(True)
        # Each subset sees the states of those refined before it, so that the last one
        # has seen every neighbour's refined state.
        y, buffer = stack.refine(x, tokens, positions, buffer)
        passes.append((positions, model.final_norm(y)))
    return passes


def _stack_of(model: Decoder) -> MemoryStack:
    reason = _refuses(model.config.stack)
    if reason is not None:
        raise ValueError(reason)
    assert isinstance(model.stack, MemoryStack)
    return model.stack


def _refuses(stack: StackConfig) -> str | None:
    what = "objective: passes over parts of a sequence are for a latent memory"
    if not isinstance(stack, LatentRecurrentTransformerConfig | RatConfig):
        return f"{what}, not for {type(stack).__name__}; use NextToken"
    if stack.memory is None:
        return f"{what}: set model.stack.memory, or use NextToken"
    return None


def _mean(
    model: Decoder,
    x: Array,
    batch: Batch,
    positions: Positions,
    *,
    chunks: int,
    answers: int | None = None,
) -> Scalar:
    targets = take(batch.targets, positions)
    if answers is not None:
        x, targets = at_targets(x, targets, answers)
    nats = token_losses(model, x, targets, chunks=chunks).nats
    return nats.sum() / jnp.maximum(jnp.sum(targets != IGNORED), 1)
