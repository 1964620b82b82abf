"""RecurFormer: some heads attend, one Mamba a layer replaces the others."""

import math

import torch
from layers import (
    Attention,
    Config,
    Layers,
    ResidualBlock,
    State,
    Tokens,
    attend,
    is_kind,
    kind_of,
    norm_or_none,
    normed,
    recalled,
    rotate,
    rotation,
    visible_keys,
)
from mamba import Mamba
from torch import Tensor, nn


class PartialAttention(nn.Module):
    """Attention of the heads that are left, Mamba over the others' values, W_out."""

    def __init__(self, config: Config, mamba: Config, replaced: list[int], width: int):
        super().__init__()
        self.config, self.replaced = config, replaced
        H, K, E = config["heads"], config["key_heads"], config["head_width"]
        # Query heads of a group share one key head.
        self.group = H // K
        self.remaining = [head for head in range(H) if head not in replaced]
        self.key_heads = sorted({head // self.group for head in self.remaining})
        heads, bias = len(self.remaining), config["qkv_bias"]
        self.v = nn.Linear(width, K * E, bias=bias)
        self.out = nn.Linear(H * E, width, bias=config["out_bias"])
        self.mamba = Mamba(mamba, len(replaced) * E)
        self.q = nn.Linear(width, heads * E, bias=bias) if heads else None
        self.k = nn.Linear(width, len(self.key_heads) * E, bias=bias) if heads else None
        self.q_norm = norm_or_none(config["qk_norm"] if heads else None, E)
        self.k_norm = norm_or_none(config["qk_norm"] if heads else None, E)

    def forward(self, x: Tensor, tokens: Tokens, state: State | None) -> Tensor:
        B, T = x.shape[:2]
        E = self.config["head_width"]
        v = self.v(x).reshape(B, T, -1, E)
        # Mamba reads the values that the replaced heads would have averaged.
        theirs = [head // self.group for head in self.replaced]
        values = v[:, :, theirs].flatten(2)
        mixed = self.mamba(values, tokens, {} if state is None else state)
        mixed = mixed.reshape(B, T, -1, E)
        heads: dict[int, Tensor] = {}
        for number, head in enumerate(self.replaced):
            heads[head] = mixed[:, :, number]
        if self.remaining:
            attended = self.attended(x, v[:, :, self.key_heads], tokens, state)
            for number, head in enumerate(self.remaining):
                heads[head] = attended[:, :, number]
        # Heads in their old order: the output matrix is the base's own.
        return self.out(torch.cat([heads[head] for head in sorted(heads)], dim=-1))

    def attended(
        self, x: Tensor, v: Tensor, tokens: Tokens, state: State | None
    ) -> Tensor:
        """Returns what the remaining heads read, [B, T, heads, E]."""
        config, positions = self.config, tokens.positions
        shape, position = (*x.shape[:2], -1, config["head_width"]), config["position"]
        q = normed(self.q_norm, self.q(x).reshape(shape))
        k = normed(self.k_norm, self.k(x).reshape(shape))
        if is_kind(position, "Rope"):
            turn = rotation(positions, position, config["head_width"])
            q, k = rotate(q, turn), rotate(k, turn)
        k, v, at = recalled(k, v, tokens, state, None)
        # Groups may have lost different numbers of heads: a key head for each query.
        indices = [self.key_heads.index(head // self.group) for head in self.remaining]
        scale = config["scale"]
        return attend(
            q,
            k[:, :, indices],
            v[:, :, indices],
            visible=visible_keys(positions, at, None),
            scale=1 / math.sqrt(config["head_width"]) if scale is None else scale,
            soft_cap=config["soft_cap"],
        )


class RecurFormerBlock(ResidualBlock):
    """A layer of the residual stream, whose attention may have given up heads."""

    def __init__(self, stack: Config, layer: int):
        base, replaced = stack["transformer"], stack["replaced"][layer]
        super().__init__(base)
        attention, window = kind_of(base, layer)
        width = base["width"]
        if replaced:
            self.attention = PartialAttention(
                attention, stack["mamba"], replaced, width
            )
        else:
            self.attention = Attention(attention, width, window)


def build_layers(stack: Config) -> Layers:
    """Builds all layers, the first one first."""
    layers = stack["transformer"]["layers"]
    return Layers(RecurFormerBlock(stack, layer) for layer in range(layers))


def position_of(stack: Config) -> Config | None:
    """Returns the config of positions; the decoder adds learned ones."""
    return stack["transformer"]["attention"]["position"]
