"""States of earlier tokens as a memory: the exact recurrence over tokens."""

import torch
from layers import Config, State, Tokens, wide
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def rms(x: Tensor) -> Tensor:
    """Computes x / sqrt(mean(x^2) + eps), eps float32's epsilon in every dtype."""
    y = x.to(wide(x.dtype))
    # float32's epsilon whatever the dtype, as nanochat has it.
    eps = torch.finfo(torch.float32).eps
    return (y * torch.rsqrt((y * y).mean(-1, keepdim=True) + eps)).to(x.dtype)


def factor(there: bool, size: int = 1) -> nn.Parameter | None:
    """Makes learned factors, or none."""
    return nn.Parameter(torch.ones(size)) if there else None


class MemoryLayers(nn.Module):
    """Layers, numbered from 0, into which states of earlier tokens enter.

    The last of its states holds `recent` [B, M, D]: what the last M tokens left, newest
    first.
    """

    gradient_checkpointing = False
    """Whether training computes a token's layers again in the backward pass."""

    def __init__(self, stack: Config):
        super().__init__()
        self.stack, memory, lags, sources = stack, stack["memory"], 0, 0
        if memory is not None:
            lags = len(memory["lags"]) if memory["combine"] == "average" else 0
            sources = len(memory["sources"])
        self.lag_logits = factor(lags > 1, lags)
        self.source_logits = factor(sources > 1, sources)

    def run(
        self,
        x: Tensor,
        tokens: Tokens,
        memory: Tensor | None,
        states: list[State] | None,
    ) -> list[Tensor]:
        """Makes one pass and returns x after each layer."""
        raise NotImplementedError

    def new_states(self) -> list[State]:
        """Returns what the layers know before the first token."""
        return [{} for _ in range(self.stack["layers"] + 1)]

    def forward(
        self,
        x: Tensor,
        tokens: Tokens,
        states: list[State] | None,
        streams: list[Tensor] | None,
    ) -> Tensor:
        """Runs the tokens; `streams` gets x after each layer."""
        if self.stack["memory"] is None:
            outputs = self.run(x, tokens, None, states)
        else:
            outputs = self.one_by_one(x, tokens, states)
        if streams is not None:
            streams.extend(outputs)
        return outputs[-1]

    def one_by_one(
        self, x: Tensor, tokens: Tokens, states: list[State] | None
    ) -> list[Tensor]:
        """Runs a token through all layers, then the next; returns x after each layer.

        The recurrence needs states even where the caller keeps none.
        """
        again = self.gradient_checkpointing and self.training and states is None
        after = self.new_states() if states is None else states
        columns = []
        for t in range(x.shape[1]):
            arguments = (x[:, t : t + 1], tokens.column(t), after)
            if again:
                outputs, after = checkpoint(self.step, *arguments, use_reentrant=False)
            else:
                outputs, after = self.step(*arguments)
            columns.append(outputs)
        if states is not None:
            for state, new in zip(states, after, strict=True):
                state.update(new)
        return [torch.cat(column, dim=1) for column in zip(*columns, strict=True)]

    def step(
        self, x: Tensor, tokens: Tokens, states: list[State]
    ) -> tuple[list[Tensor], list[State]]:
        """Runs one token; returns x after each layer, and the states after it."""
        memory, nothing = self.stack["memory"], torch.zeros_like(x)
        states = [dict(state) for state in states]
        recent = states[-1].get("recent", nothing.repeat(1, max(memory["lags"]), 1))
        entering = recent
        # A token that starts a document sees no memory of the one before.
        if memory["reset_token"] is not None:
            resets = tokens.ids == memory["reset_token"]
            entering = recent.masked_fill(resets[..., None], 0)
        upper = nothing
        if 0 in memory["lags"]:
            # The token's own upper state takes a pass without memory first, whose keys
            # and values are not kept.
            aside = [dict(state) for state in states]
            upper = self.left(self.run(x, tokens, nothing, aside))
        line = torch.cat([upper, entering], dim=1)
        parts = [line[:, lag : lag + 1] for lag in memory["lags"]]
        if self.lag_logits is not None:
            weights = self.lag_logits.softmax(dim=0)
            parts = [w * part for w, part in zip(weights, parts, strict=True)]
        outputs = self.run(x, tokens, sum(parts[1:], parts[0]), states)
        # Newest first, and no more of them than the largest lag asks for.
        newer = torch.cat([self.left(outputs), entering], dim=1)[:, : recent.shape[1]]
        if tokens.real is not None:
            newer = torch.where(tokens.real[..., None], newer, recent)
        states[-1]["recent"] = newer
        return outputs, states

    def left(self, outputs: list[Tensor]) -> Tensor:
        """Returns what a pass leaves for later tokens: of one or several layers."""
        # Layers count from 1 in the config: source l is the output of layer l.
        memory = self.stack["memory"]
        parts = [outputs[layer - 1] for layer in memory["sources"]]
        if self.source_logits is not None:
            shares = self.source_logits.softmax(dim=0)
            parts = [share * part for share, part in zip(shares, parts, strict=True)]
        state = sum(parts[1:], parts[0])
        return rms(state) if memory["normed"] else state
