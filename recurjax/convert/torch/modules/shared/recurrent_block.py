"""The Recurrent Transformer's layer: its attention, and its columns in tiles."""

import math

import torch
from layers import (
    Config,
    Mlp,
    Norm,
    Rotation,
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

    def heads(self, y: Tensor, norm: Norm | None, turn: Rotation | None) -> Tensor:
        y = normed(norm, y).unflatten(-1, (-1, self.stack["head_width"]))
        return y if turn is None else rotate(y, turn)

    def query(self, n: Tensor, turn: Rotation | None) -> Tensor:
        """Returns queries [B, K, T, G, E]: G query heads read a key head."""
        q = self.heads(self.q(n), self.q_norm, turn)
        q = q.unflatten(2, (self.stack["key_heads"], -1)).transpose(1, 2)
        # Logits are made in at least float32.
        return q.to(wide(q.dtype)) / math.sqrt(self.stack["head_width"])

    def pair(self, n: Tensor, turn: Rotation | None) -> Pair:
        v = self.v(n).unflatten(-1, (-1, self.stack["head_width"]))
        return self.heads(self.k(n), self.k_norm, turn), v

    def bias(self, here: Tensor, at: Tensor, visible: Tensor) -> Tensor:
        """Returns ALiBi's distances, lowest where a key is hidden, as [B, K, T G, S].

        Args:
          here: positions of queries [B, T]; at: of keys [B, S].
          visible: [B, T, S].
        """
        dtype, config = wide(self.q.weight.dtype), self.stack
        bias = visible.new_zeros(visible.shape, dtype=dtype)[:, None]
        if is_kind(config["position"], "Alibi"):
            bias = alibi_bias(config["heads"], here, at, config["position"]).to(dtype)
        # Not -inf: a pad may see no key, and its output has to be a number.
        bias = bias.masked_fill(~visible[:, None], torch.finfo(dtype).min)
        bias = bias.expand(-1, config["heads"], -1, -1)
        bias = bias.unflatten(1, (config["key_heads"], -1)).transpose(2, 3)
        return bias.flatten(2, 3)


class RecurrentBlock(nn.Module):
    """One layer: keys and values of earlier positions are of its output.

        q_i = qknorm(Q n(x_i)),  kt_i = qknorm(K n(x_i)),  vt_i = V n(x_i)
        a_i = attention over the earlier (k, v) and the own (kt_i, vt_i)
        z_i = x_i + s (a_i + mlp(n'(x_i + s a_i)))
        k_i = qknorm(K n(z_i)),  v_i = V n(z_i)

    In blocks of c positions a query sees the persistent pairs (k, v) of finished blocks
    and the temporary ones (kt, vt) of its own, so that a block's positions run
    together; c = 1 is the equation above. Blocks run one after another, in tiles: all
    queries of a tile read what was there before it in one product, and each block adds
    the tile's new pairs.

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
        turn: Rotation | None,
        tile: slice,
        step: int,
        tokens: Tokens,
        state: State,
    ) -> Tensor:
        """Runs the columns of a tile, `step` of them together; returns z."""
        attention, c = self.attention, self.stack["block"]
        here, places = tokens.positions[:, tile], tokens.places[:, tile]
        block = here - here % c
        turn = None if turn is None else (turn[0][:, tile], turn[1][:, tile], turn[2])
        # Temporary pairs: those that earlier calls left, and a block's to the end.
        early = own[0].shape[1] - x.shape[1]
        late = slice(early + max(0, tile.start - c + 1), early + tile.stop)
        own = tuple(torch.cat([y[:, :early], y[:, late]], dim=1) for y in own)
        x, q = x[:, tile], q[:, :, tile]
        old = tuple(state[name] for name in ("k", "v", "at") if name in state)
        # Where all rows begin here, slots are columns.
        there = tile.start if tokens.first else tokens.capacity
        old = tuple(y[:, :there] for y in old)
        before, lse = self.known(q, own, old, here, block)
        bias = None
        if x.shape[1] > step:
            columns = torch.arange(x.shape[1], device=x.device)
            earlier = (columns[:, None] > columns) & (here[:, None] < block[..., None])
            bias = attention.bias(here, here, earlier)
        pair = tuple(y[:, :0] for y in own[:2])
        group, outputs = q.shape[3], []
        for s in range(0, x.shape[1], step):
            part, rows = slice(s, s + step), slice(s * group, (s + step) * group)
            o = before[:, :, rows]
            if bias is not None and s:
                k, v = pair
                logits = q[:, :, part].flatten(2, 3) @ k.permute(0, 2, 3, 1).to(q.dtype)
                logits = logits + bias[:, :, rows, : k.shape[1]]
                # What was there before the tile counts as one more key.
                weights = torch.cat([lse[:, :, rows], logits], dim=-1).softmax(dim=-1)
                weights = weights.to(v.dtype)
                o = torch.addcmul(
                    weights[..., 1:] @ v.transpose(1, 2), weights[..., :1], o
                )
            # [B, K, T G, E] to [B, T, K G E].
            o = o.unflatten(2, (-1, group)).transpose(1, 2).flatten(2)
            z = self.output(x[:, part], attention.out(o))
            # The persistent pair is of the layer's output, normed again where the
            # config says so.
            source = z
            if self.stack["normed_persistent"]:
                source = normed(self.attention_norm, z)
            turned = turn and (turn[0][:, part], turn[1][:, part], turn[2])
            new = attention.pair(source, turned)
            outputs.append(z)
            pair = tuple(
                torch.cat([old, y], dim=1) for old, y in zip(pair, new, strict=True)
            )
        self.keep(*pair, places, tokens, state)
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
          q: [B, K, T, G, E].
          own: temporary keys, values and their positions.
          old: the persistent ones; empty before the first.
          here: the positions of the queries; block: where their blocks begin.

        Returns:
          The values [B, K, T G, E], and the logarithm [B, K, T G, 1] of the softmax's
          sum.
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
        logits = q.flatten(2, 3) @ k.permute(0, 2, 3, 1).to(q.dtype)
        logits = logits + self.attention.bias(here, at, visible)
        weights = logits.softmax(dim=-1)
        # The largest weight is exp(its logit - lse).
        lse = logits.amax(-1, keepdim=True) - weights.amax(-1, keepdim=True).log()
        return weights.to(v.dtype) @ v.transpose(1, 2), lse

    def output(self, x: Tensor, attended: Tensor) -> Tensor:
        """Returns z of the residual stream x and what its attention reads."""
        y = torch.add(x, attended, alpha=self.scale)
        fed = self.mlp(normed(self.mlp_norm, y))
        return torch.add(y, fed, alpha=self.scale)

    def keep(
        self, k: Tensor, v: Tensor, places: Tensor, tokens: Tokens, state: State
    ) -> None:
        """Writes a tile's persistent pairs to the state."""
        size, places = tokens.capacity, places.expand(k.shape[:2])
        slots = places.masked_fill(places < 0, size)
        for name, new, fill in (("k", k, 0), ("v", v, 0), ("at", places, -1)):
            state[name] = put(room(state, name, size, new, fill), slots, new)
