"""The Recurrent Transformer: keys and values of earlier positions are of the output.

    q_i = qknorm(Q n(x_i)),  kt_i = qknorm(K n(x_i)),  vt_i = V n(x_i)
    a_i = attention over the earlier (k, v) and the own (kt_i, vt_i)
    z_i = x_i + s (a_i + mlp(n'(x_i + s a_i)))
    k_i = qknorm(K n(z_i)),  v_i = V n(z_i)

In blocks of c positions a query sees the persistent pairs (k, v) of finished blocks and
the temporary ones (kt, vt) of its own, so that a block's positions run together; c = 1
is the equation above. Blocks run one after another, in tiles: all queries of a tile
read what was there before it in one product, and each block adds the tile's new pairs.
"""

import math

import torch
from layers import (
    Config,
    Layers,
    Mlp,
    Norm,
    State,
    Tokens,
    alibi_bias,
    is_kind,
    norm_or_none,
    normed,
    put,
    recalled,
    room,
    rotate,
    rotation,
    visible_keys,
    wide,
)
from torch import Tensor, nn

TILE = 32
"""Positions of a tile, about."""

Turn = tuple[Tensor, Tensor] | None
Pair = tuple[Tensor, Tensor]
"""Keys and values [B, S, K, E]."""


class RecurrentAttention(nn.Module):
    """The attention's weights; qk-norm acts on all heads together."""

    def __init__(self, stack: Config):
        super().__init__()
        self.stack = stack
        D, E = stack["width"], stack["head_width"]
        H, K, bias = stack["heads"], stack["key_heads"], stack["qkv_bias"]
        self.q = nn.Linear(D, H * E, bias=bias)
        self.k = nn.Linear(D, K * E, bias=bias)
        self.v = nn.Linear(D, K * E, bias=bias)
        self.out = nn.Linear(H * E, D, bias=stack["out_bias"])
        self.q_norm = norm_or_none(stack["qk_norm"], H * E)
        self.k_norm = norm_or_none(stack["qk_norm"], K * E)

    def heads(self, y: Tensor, norm: Norm | None, turn: Turn) -> Tensor:
        y = normed(norm, y).unflatten(-1, (-1, self.stack["head_width"]))
        return y if turn is None else rotate(y, turn)

    def query(self, n: Tensor, turn: Turn) -> Tensor:
        return self.heads(self.q(n), self.q_norm, turn)

    def pair(self, n: Tensor, turn: Turn) -> Pair:
        v = self.v(n).unflatten(-1, (-1, self.stack["head_width"]))
        return self.heads(self.k(n), self.k_norm, turn), v

    def logits(self, q: Tensor, k: Tensor, here: Tensor, at: Tensor) -> Tensor:
        """Returns q k / sqrt(E), less ALiBi's distances, as [B, H, T, S].

        Args:
          q: [B, T, H, E]; here: its positions [B, T].
          k: [B, S, K, E]; at: its positions [B, S].
        """
        dtype = wide(q.dtype)
        # [B, K, G T, E] by [B, K, E, S]: the queries of a key head in one product.
        T, K = q.shape[1], k.shape[2]
        grouped = q.transpose(1, 2).unflatten(1, (K, -1)).flatten(2, 3).to(dtype)
        logits = grouped @ k.permute(0, 2, 3, 1).to(dtype)
        logits = logits.unflatten(2, (-1, T)).flatten(1, 2)
        logits = logits / math.sqrt(self.stack["head_width"])
        position = self.stack["position"]
        if is_kind(position, "Alibi"):
            logits = logits + alibi_bias(self.stack["heads"], here, at, position)
        return logits

    def read(self, weights: Tensor, v: Tensor) -> Tensor:
        """Returns weights [B, H, T, S] times values [B, S, K, E] as [B, H, T, E]."""
        K, T = v.shape[2], weights.shape[2]
        grouped = weights.unflatten(1, (K, -1)).flatten(2, 3)
        o = grouped.to(v.dtype) @ v.transpose(1, 2)
        return o.unflatten(2, (-1, T)).flatten(1, 2)


class RecurrentBlock(nn.Module):
    """One layer.

    Its state: `k`, `v`, the persistent pairs by position, and `at`, their positions;
    `own_k`, `own_v` and `own_at`, the temporary ones of the running block.
    """

    def __init__(self, stack: Config):
        super().__init__()
        self.stack = stack
        unscaled = stack["residual_scale"] == "one"
        self.scale = 1.0 if unscaled else stack["layers"] ** -0.5
        self.attention_norm = norm_or_none(stack["norm"], stack["width"])
        self.attention = RecurrentAttention(stack)
        self.mlp_norm = norm_or_none(stack["norm"], stack["width"])
        self.mlp = Mlp(stack["mlp"], stack["width"])

    def forward(self, x: Tensor, tokens: Tokens, state: State | None) -> Tensor:
        state, c = {} if state is None else state, self.stack["block"]
        n, turn = normed(self.attention_norm, x), None
        if is_kind(self.stack["position"], "Rope"):
            rope, width = self.stack["position"], self.stack["head_width"]
            turn = rotation(tokens.positions, rope, width)
        # What does not depend on earlier outputs: all queries and temporary pairs.
        q, pair = self.attention.query(n, turn), self.attention.pair(n, turn)
        own = recalled(*pair, tokens, state, c - 1, "own_") if c > 1 else None
        if own is None:
            own = (*pair, tokens.places)
        # Where all rows begin here, blocks are columns that run together.
        step = c if tokens.first else 1
        size, outputs = step * max(1, TILE // step), []
        for start in range(0, x.shape[1], size):
            tile = slice(start, min(start + size, x.shape[1]))
            outputs.append(self.tile(x, q, own, turn, tile, step, tokens, state))
        return torch.cat(outputs, dim=1)

    def tile(
        self,
        x: Tensor,
        q: Tensor,
        own: tuple[Tensor, Tensor, Tensor],
        turn: Turn,
        tile: slice,
        step: int,
        tokens: Tokens,
        state: State,
    ) -> Tensor:
        """Runs the columns of a tile, `step` of them together; returns z."""
        attention, c = self.attention, self.stack["block"]
        here, places = tokens.positions[:, tile], tokens.places[:, tile]
        block = here - here % c
        turn = None if turn is None else (turn[0][:, tile], turn[1][:, tile])
        # Temporary pairs: those that earlier calls left, and a block's to the end.
        early = own[0].shape[1] - x.shape[1]
        late = slice(early + max(0, tile.start - c + 1), early + tile.stop)
        own = tuple(torch.cat([y[:, :early], y[:, late]], dim=1) for y in own)
        x, q = x[:, tile], q[:, tile]
        old = tuple(state[name] for name in ("k", "v", "at") if name in state)
        # Where all rows begin here, slots are columns.
        there = tile.start if tokens.first else tokens.capacity
        old = tuple(y[:, :there] for y in old)
        before, lse = self.known(q, own, old, here, block)
        pairs: list[Pair] = []
        outputs = []
        for s in range(0, x.shape[1], step):
            part = slice(s, s + step)
            o = before[:, :, part]
            if pairs:
                k, v = (torch.cat(side, dim=1) for side in zip(*pairs, strict=True))
                at = here[:, : k.shape[1]]
                logits = attention.logits(q[:, part], k, here[:, part], at)
                if step < c:
                    # Those of the running block are not to be seen yet.
                    hidden = at[:, None] >= block[:, part, None]
                    logits = logits.masked_fill(hidden[:, None], float("-inf"))
                # What was there before the tile counts as one more key.
                logits = torch.cat([lse[:, :, part, None], logits], dim=-1)
                weights = logits.softmax(dim=-1)
                o = weights[..., :1].to(o.dtype) * o
                o = o + attention.read(weights[..., 1:], v)
            z = self.output(x[:, part], attention.out(o.transpose(1, 2).flatten(2)))
            outputs.append(z)
            # The persistent pair is of the layer's output, normed again where the
            # config says so.
            source = z
            if self.stack["normed_persistent"]:
                source = normed(self.attention_norm, z)
            at_step = None if turn is None else (turn[0][:, part], turn[1][:, part])
            pairs.append(attention.pair(source, at_step))
        self.keep(pairs, places, tokens, state)
        return torch.cat(outputs, dim=1)

    def known(
        self,
        q: Tensor,
        own: tuple[Tensor, ...],
        old: tuple[Tensor, ...],
        here: Tensor,
        block: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Reads what is there before a tile.

        Args:
          q: [B, T, H, E].
          own: temporary keys, values and their positions.
          old: the persistent ones; empty before the first.
          here: the positions of the queries; block: where their blocks begin.

        Returns:
          The values [B, H, T, E], and the logarithm [B, H, T] of the softmax's sum.
        """
        k, v, at = own
        visible = visible_keys(here, at, None) & (at[:, None] >= block[..., None])
        if old:
            earlier = visible_keys(here, old[2], None)
            earlier = earlier & (old[2][:, None] < block[..., None])
            k, v = (
                torch.cat(pair, dim=1) for pair in zip(old[:2], (k, v), strict=True)
            )
            at = torch.cat([old[2], at.expand(len(old[2]), -1)], dim=1)
            visible = visible.expand(len(earlier), -1, -1)
            visible = torch.cat([earlier, visible], dim=-1)
        logits = self.attention.logits(q, k, here, at)
        lowest = torch.finfo(logits.dtype).min
        logits = logits.masked_fill(~visible[:, None], lowest)
        lse = logits.logsumexp(dim=-1)
        return self.attention.read((logits - lse[..., None]).exp(), v), lse

    def output(self, x: Tensor, attended: Tensor) -> Tensor:
        """Returns z of the residual stream x and what its attention reads."""
        y = x + self.scale * attended
        return y + self.scale * self.mlp(normed(self.mlp_norm, y))

    def keep(
        self, pairs: list[Pair], places: Tensor, tokens: Tokens, state: State
    ) -> None:
        """Writes a tile's persistent pairs to the state."""
        k, v = (torch.cat(side, dim=1) for side in zip(*pairs, strict=True))
        size, places = tokens.capacity, places.expand(k.shape[:2])
        slots = places.masked_fill(places < 0, size)
        for name, new, fill in (("k", k, 0), ("v", v, 0), ("at", places, -1)):
            state[name] = put(room(state, name, size, new, fill), slots, new)


def build_layers(stack: Config) -> Layers:
    """Builds all layers, the first one first."""
    return Layers(RecurrentBlock(stack) for _ in range(stack["layers"]))


def position_of(stack: Config) -> Config | None:
    """Returns the config of positions; the decoder adds learned ones."""
    return stack["position"]
