"""The Recurrent Transformer: keys and values of earlier positions are of the output.

    q_i = qknorm(Q n(x_i)),  kt_i = qknorm(K n(x_i)),  vt_i = V n(x_i)
    a_i = attention over the earlier (k, v) and the own (kt_i, vt_i)
    z_i = x_i + s (a_i + mlp(n'(x_i + s a_i)))
    k_i = qknorm(K n(z_i)),  v_i = V n(z_i)

One position after another, in the order of these lines.
"""

import math

import torch
from layers import (
    Config,
    Layers,
    Mlp,
    Norm,
    State,
    alibi_bias,
    attend,
    is_kind,
    norm_or_none,
    normed,
    rotate,
)
from torch import Tensor, nn


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

    def place(self, y: Tensor, norm: Norm | None, position: int) -> Tensor:
        y = normed(norm, y).unflatten(-1, (-1, self.stack["head_width"]))
        if not is_kind(self.stack["position"], "Rope"):
            return y
        return rotate(
            y, torch.tensor([position], device=y.device), self.stack["position"]
        )

    def query(self, n: Tensor, position: int) -> Tensor:
        return self.place(self.q(n), self.q_norm, position)

    def pair(self, n: Tensor, position: int) -> tuple[Tensor, Tensor]:
        v = self.v(n).unflatten(-1, (-1, self.stack["head_width"]))
        return self.place(self.k(n), self.k_norm, position), v

    def forward(self, q: Tensor, k: Tensor, v: Tensor, position: int) -> Tensor:
        """Attends from one position to all given pairs, which end at it."""
        bias = None
        if is_kind(self.stack["position"], "Alibi"):
            here = torch.tensor([position], device=q.device)
            keys = torch.arange(k.shape[1], device=q.device)
            # Distances to all earlier positions; the pairs end at this one.
            bias = alibi_bias(self.stack["heads"], here, keys, self.stack["position"])
        scale = 1 / math.sqrt(self.stack["head_width"])
        o = attend(q, k, v, visible=None, bias=bias, scale=scale)
        return self.out(o.flatten(2))


def joined(pairs: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Joins keys [B, S, K, E] and values of several stretches of positions."""
    k, v = zip(*pairs, strict=True)
    return torch.cat(k, dim=1), torch.cat(v, dim=1)


class RecurrentBlock(nn.Module):
    """One layer. Pairs are temporary inside a block of c positions (c = 1: the paper).

    Its state: `pairs`, the persistent pairs of finished blocks, joined; `new`, those of
    the running block, which later blocks will see; `own`, its temporary pairs.
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

    def forward(self, x: Tensor, start: int, state: State | None) -> Tensor:
        state = {} if state is None else state
        # One position after another: each needs the outputs of those before it.
        outputs = [
            self.step(x[:, t : t + 1], start + t, state) for t in range(x.shape[1])
        ]
        return torch.cat(outputs, dim=1)

    def step(self, x: Tensor, position: int, state: State) -> Tensor:
        # A new block begins: the finished one's persistent pairs join the earlier ones,
        # and its temporary pairs are forgotten.
        if position % self.stack["block"] == 0:
            pairs = [*state.get("pairs", []), *state.get("new", [])]
            state["pairs"] = [joined(pairs)] if pairs else []
            state["new"], state["own"] = [], []
        n = normed(self.attention_norm, x)
        # The own temporary pair first, so that the query sees its own position.
        state["own"].append(self.attention.pair(n, position))
        # Persistent pairs of finished blocks, then this block's temporary ones.
        k, v = joined([*state["pairs"], *state["own"]])
        a = self.attention(self.attention.query(n, position), k, v, position)
        y = x + self.scale * a
        z = y + self.scale * self.mlp(normed(self.mlp_norm, y))
        # The persistent pair is of the layer's output, normed again where the config
        # says so.
        source = z
        if self.stack["normed_persistent"]:
            source = normed(self.attention_norm, z)
        state["new"].append(self.attention.pair(source, position))
        return z


def build_layers(stack: Config) -> Layers:
    """Builds all layers, the first one first."""
    return Layers(RecurrentBlock(stack) for _ in range(stack["layers"]))


def position_of(stack: Config) -> Config | None:
    """Returns the config of positions; the decoder adds learned ones."""
    return stack["position"]
