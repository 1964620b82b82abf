"""The Recurrent Transformer: keys and values of earlier positions are of the output.

    q_i = qknorm(Q n(x_i)),  kt_i = qknorm(K n(x_i)),  vt_i = V n(x_i)
    a_i = attention over the earlier (k, v) and the own (kt_i, vt_i)
    z_i = x_i + s (a_i + mlp(n'(x_i + s a_i)))
    k_i = qknorm(K n(z_i)),  v_i = V n(z_i)

In blocks of c positions a query sees the persistent pairs (k, v) of finished blocks and
the temporary ones (kt, vt) of its own, so that a block's positions run together; c = 1
is the equation above. Blocks run one after another, in tiles: all queries of a tile
read what was there before it in one product, and each block adds the tile's new pairs.
Small layers read a prompt side by side: while layer l runs tile t, layer l + 1 runs
tile t - 1, in the same products.
"""

import math
from typing import NamedTuple

import torch
from layers import (
    Config,
    Layers,
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
CACHED = 2**20
"""Numbers of the weights of layers that run side by side: what a core's cache holds."""

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


class Opening(NamedTuple):
    """What a layer knows of a tile before its first column.

    Attributes:
      x: [B, T, D].
      q: queries [B K, T G, E], in at least float32.
      before: what they read of earlier tiles and of temporary pairs, [B K, T G, E].
      bias: [B K, T G, T G + T]: of `before`, one of which each query sees, and of the
        tile's persistent pairs. None: the tile is one block, which sees no such pair.
      turn: how the tile's keys rotate.
    """

    x: Tensor
    q: Tensor
    before: Tensor
    bias: Tensor | None
    turn: Rotation | None


class RecurrentBlock(nn.Module):
    """One layer.

    Its state: `k`, `v`, the persistent pairs by position, and `at`, their positions;
    `own_k`, `own_v` and `own_at`, the temporary ones of the running block.
    """

    def __init__(self, stack: Config):
        super().__init__()
        self.stack = stack
        self.attention_norm = norm_or_none(stack["norm"], stack["width"])
        self.attention = RecurrentAttention(stack)
        self.mlp_norm = norm_or_none(stack["norm"], stack["width"])
        self.mlp = Mlp(stack["mlp"], stack["width"])

    def forward(self, x: Tensor, tokens: Tokens, state: State | None) -> Tensor:
        outputs, state = [], {} if state is None else state
        for tile in tiles(self.stack, tokens):
            outputs += run_tile([self], self, [x[:, tile]], [tile], tokens, [state])
        return torch.cat(outputs, dim=1)

    def opening(
        self, x: Tensor, tile: slice, whole: Tokens, state: State, step: int
    ) -> Opening:
        """Computes what does not depend on the tile's outputs.

        Args:
          x: [B, T, D] of the tile.
          tile: its columns in the call.
          whole: the call's tokens.
          state: the layer's.
          step: columns that run together.
        """
        attention, c = self.attention, self.stack["block"]
        tokens = whole.columns(tile.start, tile.stop)
        n, turn = normed(self.attention_norm, x), None
        if is_kind(self.stack["position"], "Rope"):
            rope, width = self.stack["position"], self.stack["head_width"]
            turn = rotation(tokens.positions, rope, width)
        q, pair = attention.query(n, turn), attention.pair(n, turn)
        old = tuple(state[name] for name in ("k", "v", "at") if name in state)
        # Where all rows begin with the call, slots are columns.
        seen = tile.start if whole.first else whole.capacity
        old = tuple(y[:, :seen] for y in old)
        own = recalled(*pair, tokens, state, c - 1, "own_") if c > 1 else None
        if own is None:
            own = (*pair, tokens.places)
        here = tokens.positions
        block = here - here % c
        before, lse = self.known(q, own, old, here, block)
        q, bias = q.flatten(2, 3).flatten(0, 1), None
        if x.shape[1] > step:
            columns = torch.arange(x.shape[1], device=x.device)
            earlier = (columns[:, None] > columns) & (here[:, None] < block[..., None])
            new = attention.bias(here, here, earlier)
            # What was there before the tile is one more key of each query.
            lowest = lse.new_full((), torch.finfo(lse.dtype).min)
            same = torch.eye(q.shape[1], dtype=torch.bool, device=x.device)
            first = torch.where(same, lse, lowest)
            bias = torch.cat([first, new.expand(len(x), -1, -1, -1)], dim=-1)
            bias = bias.flatten(0, 1)
        return Opening(x, q, before.flatten(0, 1), bias, turn)

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

    # Columns [L, N, D] of the layers side by side; here L is 1.

    def attended(self, o: Tensor) -> Tensor:
        """Returns what the attention adds to the residual stream."""
        return self.attention.out(o)

    def fed(self, y: Tensor) -> Tensor:
        """Returns what the MLP adds."""
        return self.mlp(normed(self.mlp_norm, y))

    def persistent(self, z: Tensor) -> Pair:
        """Returns keys, not rotated, and values of a column's output, heads joined."""
        if self.stack["normed_persistent"]:
            z = normed(self.attention_norm, z)
        attention = self.attention
        return normed(attention.k_norm, attention.k(z)), attention.v(z)

    def keep(self, k: Tensor, v: Tensor, tokens: Tokens, state: State) -> None:
        """Writes a tile's persistent pairs to the state."""
        size, places = tokens.capacity, tokens.places.expand(k.shape[:2])
        slots = places.masked_fill(places < 0, size)
        for name, new, fill in (("k", k, 0), ("v", v, 0), ("at", places, -1)):
            state[name] = put(room(state, name, size, new, fill), slots, new)


class SideBySide:
    """Layers' weights, each name's in one tensor [L, ...], for products of all layers.

    What `RecurrentBlock` computes of columns, for layers that are at different tiles.
    """

    def __init__(self, layers: list[RecurrentBlock], weights: State | None = None):
        self.layer, self.weights = layers[0], weights or {}
        if weights is None:
            for name, module in self.layer.named_modules():
                for kind, first in module.named_parameters(recurse=False):
                    path = f"{name}.{kind}"
                    new = torch.stack([layer.get_parameter(path) for layer in layers])
                    # A product with [D, F] rather than nn.Linear's [F, D] takes half
                    # the time for one row.
                    new = new.mT.contiguous() if first.dim() == 2 else new[:, None]
                    self.weights[path] = new

    def __getitem__(self, part: slice) -> "SideBySide":
        weights = {name: weight[part] for name, weight in self.weights.items()}
        return SideBySide([self.layer], weights)

    def product(self, name: str, x: Tensor) -> Tensor:
        weight, bias = (
            self.weights.get(f"{name}.{kind}") for kind in ("weight", "bias")
        )
        return torch.bmm(x, weight) if bias is None else torch.baddbmm(bias, x, weight)

    def normed(self, name: str, norm: Norm | None, x: Tensor) -> Tensor:
        if norm is None:
            return x
        weight, bias = (
            self.weights.get(f"{name}.{kind}") for kind in ("weight", "bias")
        )
        return norm.scaled(x, weight, bias)

    def attended(self, o: Tensor) -> Tensor:
        return self.product("attention.out", o)

    def fed(self, y: Tensor) -> Tensor:
        mlp, y = self.layer.mlp, self.normed("mlp_norm", self.layer.mlp_norm, y)
        gate = None if mlp.gate is None else self.product("mlp.gate", y)
        return self.product("mlp.down", mlp.hidden(self.product("mlp.up", y), gate))

    def persistent(self, z: Tensor) -> Pair:
        if self.layer.stack["normed_persistent"]:
            z = self.normed("attention_norm", self.layer.attention_norm, z)
        k = self.product("attention.k", z)
        k = self.normed("attention.k_norm", self.layer.attention.k_norm, k)
        return k, self.product("attention.v", z)


def tiles(stack: Config, tokens: Tokens) -> list[slice]:
    """Cuts a call's columns into tiles of full blocks."""
    # Where all rows begin here, blocks are columns that run together.
    step = stack["block"] if tokens.first else 1
    size, T = step * max(1, TILE // step), tokens.ids.shape[1]
    return [slice(start, min(start + size, T)) for start in range(0, T, size)]


def run_tile(
    layers: list[RecurrentBlock],
    weights: "RecurrentBlock | SideBySide",
    xs: list[Tensor],
    at: list[slice],
    tokens: Tokens,
    states: list[State],
) -> list[Tensor]:
    """Runs one tile of each layer, column by column, all layers together.

    Args:
      layers: those that run.
      weights: of these layers, for columns [L, N, D].
      xs: the residual stream [B, T, D] at each one's tile.
      at: each one's tile, all of one size.
      tokens: the call's.
      states: each layer's.

    Returns:
      The layers' outputs [B, T, D].
    """
    stack = layers[0].stack
    step = stack["block"] if tokens.first else 1
    jobs = zip(layers, xs, at, states, strict=True)
    openings = [layer.opening(x, t, tokens, state, step) for layer, x, t, state in jobs]
    x, q, before, bias, turn = zip(*openings, strict=True)
    # [L, B, T, D] and [L B K, ...].
    x, q, values = torch.stack(x), torch.cat(q), torch.cat(before)
    L, B, T, _ = x.shape
    K, E = stack["key_heads"], stack["head_width"]
    group, scale = stack["heads"] // K, 1.0
    if stack["residual_scale"] != "one":
        scale = stack["layers"] ** -0.5
    # The first keys are of `before`, and their logits the bias alone.
    keys, first = torch.zeros_like(q), q.shape[1]
    biases = [None] * T
    if bias[0] is not None:
        biases = torch.cat(bias).split(step * group, dim=1)
    turned = [None] * T
    if turn[0] is not None:
        cos, sin = (
            torch.stack(y).split(step, dim=2) for y in list(zip(*turn, strict=True))[:2]
        )
        turned = [(a, b, turn[0][2]) for a, b in zip(cos, sin, strict=True)]
    outputs = []
    parts = zip(x.split(step, 2), q.split(step * group, 1), strict=True)
    for s, (x_s, q_s) in enumerate(parts):
        if biases[s] is None:
            o = values
        else:
            seen = biases[s][..., : keys.shape[1]]
            logits = torch.baddbmm(seen, q_s, keys.mT)
            o = torch.bmm(logits.softmax(dim=-1).to(values.dtype), values)
        C = x_s.shape[2]
        # [L B K, C G, E] to [L, B C, K G E].
        o = o.view(L * B, K, C, group * E).transpose(1, 2).reshape(L, B * C, -1)
        y = torch.add(x_s.reshape(L, B * C, -1), weights.attended(o), alpha=scale)
        z = torch.add(y, weights.fed(y), alpha=scale)
        k, v = (y.view(L, B, C, K, E) for y in weights.persistent(z))
        outputs.append(z.view(L, B, C, -1))
        if turned[s] is not None:
            k = rotate(k, turned[s])
        k, v = (y.transpose(2, 3).reshape(L * B * K, C, E) for y in (k, v))
        keys = torch.cat([keys, k.to(keys.dtype)], dim=1)
        values = torch.cat([values, v], dim=1)
    z = torch.cat(outputs, dim=2)
    # [L B K, T, E] to [L, B, T, K, E].
    pairs = (y[:, first:].view(L, B, K, T, E).transpose(2, 3) for y in (keys, values))
    k, v = (y.to(x.dtype) for y in pairs)
    for layer, state, tile, k_l, v_l in zip(layers, states, at, k, v, strict=True):
        layer.keep(k_l, v_l, tokens.columns(tile.start, tile.stop), state)
    return list(z)


class RecurrentLayers(Layers):
    """Layers that read a prompt side by side: each is a tile behind the one below it.

    A product of a few layers' columns takes PyTorch the time of one layer's, as long as
    their weights are small. Only without gradients, and only layers that are as they
    were built: adapters and hooks run layer by layer.
    """

    def forward(
        self,
        x: Tensor,
        tokens: Tokens,
        states: list[State] | None,
        streams: list[Tensor] | None,
    ) -> Tensor:
        """Runs the tokens; `streams` gets x after each layer."""
        cuts = tiles(self[0].stack, tokens)
        if len(cuts) == 1 or torch.is_grad_enabled() or not all(map(is_plain, self)):
            return super().forward(x, tokens, states, streams)
        states = [{} for _ in self] if states is None else states
        count = max(1, CACHED // sum(weight.numel() for weight in self[0].parameters()))
        for low in range(0, len(self), count):
            layers, known = list(self)[low : low + count], states[low : low + count]
            weights = SideBySide(layers)
            # outputs[l][t]: tile t of what layer l reads.
            outputs = [[x[:, cut] for cut in cuts], *([] for _ in layers)]
            for turn in range(len(cuts) + len(layers) - 1):
                active = [
                    (layer, turn - layer)
                    for layer in range(len(layers))
                    if 0 <= turn - layer < len(cuts)
                ]
                # The last tile may be shorter, and its layer runs alone.
                alone = [job for job in active if job[1] == len(cuts) - 1]
                for jobs in (alone, active[len(alone) :]):
                    if not jobs:
                        continue
                    part = slice(jobs[0][0], jobs[-1][0] + 1)
                    z = run_tile(
                        layers[part],
                        weights[part],
                        [outputs[layer][tile] for layer, tile in jobs],
                        [cuts[tile] for _, tile in jobs],
                        tokens,
                        known[part],
                    )
                    for (layer, _), new in zip(jobs, z, strict=True):
                        outputs[layer + 1].append(new)
            after = [torch.cat(parts, dim=1) for parts in outputs[1:]]
            if streams is not None:
                streams.extend(after)
            x = after[-1]
        return x


def is_plain(layer: RecurrentBlock) -> bool:
    """Whether a layer computes what its weights say and nothing else."""
    kinds = (nn.Linear, Norm, Mlp, RecurrentAttention, RecurrentBlock)
    return all(
        type(module) in kinds
        and "forward" not in vars(module)
        and not (module._forward_hooks or module._forward_pre_hooks)
        for module in layer.modules()
    )


def build_layers(stack: Config) -> Layers:
    """Builds all layers, the first one first."""
    return RecurrentLayers(RecurrentBlock(stack) for _ in range(stack["layers"]))


def position_of(stack: Config) -> Config | None:
    """Returns the config of positions; the decoder adds learned ones."""
    return stack["position"]
