"""What several variants share: norms, positions, attention, MLP."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Config = dict[str, Any]
State = dict[str, Any]
"""What one layer keeps between calls; every row stands at the same position."""


def wide(dtype: torch.dtype) -> torch.dtype:
    """At least float32: what norms, angles, softmax and recurrences compute in."""
    return torch.promote_types(dtype, torch.float32)


class Norm(nn.Module):
    """RMSNorm or LayerNorm over the last axis, multiplied in float32, then cast."""

    def __init__(self, config: Config, width: int):
        super().__init__()
        self.kind, self.eps = config["kind"], config["eps"]
        self.one_plus = config["one_plus"]
        self.weight = nn.Parameter(torch.ones(width)) if config["scale"] else None
        self.bias = nn.Parameter(torch.zeros(width)) if config["bias"] else None

    def forward(self, x: Tensor) -> Tensor:
        y = x.to(wide(x.dtype))
        if self.kind == "layer":
            # LayerNorm is an RMSNorm of what is left after the mean is taken away.
            y = y - y.mean(-1, keepdim=True)
        y = y * torch.rsqrt((y * y).mean(-1, keepdim=True) + self.eps)
        if self.weight is not None:
            # Gemma stores the scale less 1.
            y = y * (1 + self.weight if self.one_plus else self.weight)
        if self.bias is not None:
            y = y + self.bias
        return y.to(x.dtype)


def norm_or_none(config: Config | None, width: int) -> Norm | None:
    """Builds a norm that a config may leave out."""
    return None if config is None else Norm(config, width)


def normed(norm: Norm | None, x: Tensor) -> Tensor:
    """Applies such a norm."""
    return x if norm is None else norm(x)


def is_kind(config: Config | None, name: str) -> bool:
    """Whether a part of the config is of this class."""
    return config is not None and config["type"] == name


def rotate(x: Tensor, positions: Tensor, rope: Config) -> Tensor:
    """Rotates pairs (x[i], x[i + r/2]) of [B, T, H, E] by their positions [T]."""
    r = int(x.shape[-1] * rope["fraction"])
    # Frequencies in float64, as the JAX side makes them.
    dtype = wide(x.dtype)
    powers = torch.arange(0, r, 2, dtype=torch.float64, device=x.device) / r
    theta = (rope["base"] ** -powers).to(dtype)
    angles = positions.to(dtype)[:, None] * theta
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]  # [T, 1, r/2]
    # The half-split form: dimension i turns with i + r/2.
    x1, x2, rest = x[..., : r // 2], x[..., r // 2 : r], x[..., r:]
    y1 = (x1 * cos - x2 * sin).to(x.dtype)
    y2 = (x2 * cos + x1 * sin).to(x.dtype)
    return torch.cat([y1, y2, rest], dim=-1)


def alibi_bias(heads: int, queries: Tensor, keys: Tensor, config: Config) -> Tensor:
    """-slope_h |i - j| as [H, T, S], slope_h = 2^(-max_bias (h + 1) / H)."""
    numbers = torch.arange(1, heads + 1, dtype=torch.float64, device=queries.device)
    slopes = 2.0 ** (-config["max_bias"] * numbers / heads)
    distance = (queries[:, None] - keys[None, :]).abs()
    return (-slopes[:, None, None] * distance).to(torch.float32)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    visible: Tensor | None,
    bias: Tensor | None = None,
    scale: float,
    soft_cap: float | None = None,
) -> Tensor:
    """softmax(cap(scale q k) + bias) v for q [B, T, H, E] and k, v [B, S, K, E]."""
    group = q.shape[2] // k.shape[2]
    # Each key head serves `group` neighbouring query heads.
    k, v = k.repeat_interleave(group, dim=2), v.repeat_interleave(group, dim=2)
    # Logits and softmax in at least float32; values are multiplied in their own dtype.
    dtype = wide(q.dtype)
    logits = torch.einsum("bthe,bshe->bhts", q.to(dtype), k.to(dtype)) * scale
    if soft_cap is not None:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    # ALiBi comes after the cap: it is no part of what is capped.
    if bias is not None:
        logits = logits + bias.to(dtype)
    if visible is not None:
        logits = logits.masked_fill(~visible, float("-inf"))
    weights = logits.softmax(dim=-1).to(v.dtype)
    return torch.einsum("bhts,bshe->bthe", weights, v)


def recalled(
    k: Tensor, v: Tensor, state: State | None, window: int | None
) -> tuple[Tensor, Tensor]:
    """Puts the state's keys and values before new ones; keeps those still in sight."""
    if state is None:
        return k, v
    if "k" in state:
        k = torch.cat([state["k"], k], dim=1)
        v = torch.cat([state["v"], v], dim=1)
    # A key `window` positions back is still seen; older ones are dropped.
    oldest = 0 if window is None else max(k.shape[1] - window - 1, 0)
    state["k"], state["v"] = k[:, oldest:], v[:, oldest:]
    return k, v


def visible_keys(queries: Tensor, keys: Tensor, window: int | None) -> Tensor:
    """Says by position which keys [S] a query [T] sees: itself and `window` back."""
    distance = queries[:, None] - keys[None, :]
    visible = distance >= 0
    return visible if window is None else visible & (distance <= window)


class Attention(nn.Module):
    """Causal self-attention with grouped keys, qk-norm, a window, RoPE or ALiBi."""

    def __init__(self, config: Config, width: int, window: int | None):
        super().__init__()
        self.config, self.window = config, window
        H, K, E = config["heads"], config["key_heads"], config["head_width"]
        bias = config["qkv_bias"]
        self.q = nn.Linear(width, H * E, bias=bias)
        self.k = nn.Linear(width, K * E, bias=bias)
        self.v = nn.Linear(width, K * E, bias=bias)
        self.out = nn.Linear(H * E, width, bias=config["out_bias"])
        # Over all heads together, or head by head.
        full = config["qk_norm_over"] == "full"
        self.q_norm = norm_or_none(config["qk_norm"], H * E if full else E)
        self.k_norm = norm_or_none(config["qk_norm"], K * E if full else E)

    def heads(self, y: Tensor, count: int, norm: Norm | None) -> Tensor:
        shape = (*y.shape[:2], count, self.config["head_width"])
        # Normalised before it is cut into heads, where the norm is over all of them.
        if self.config["qk_norm_over"] == "full":
            return normed(norm, y).reshape(shape)
        return normed(norm, y.reshape(shape))

    def forward(self, x: Tensor, start: int, state: State | None) -> Tensor:
        """Runs positions start, start + 1, ...; `state` gets their keys and values."""
        config, T = self.config, x.shape[1]
        positions = torch.arange(start, start + T, device=x.device)
        q = self.heads(self.q(x), config["heads"], self.q_norm)
        k = self.heads(self.k(x), config["key_heads"], self.k_norm)
        v = self.heads(self.v(x), config["key_heads"], None)
        position = config["position"]
        if is_kind(position, "Rope"):
            q, k = rotate(q, positions, position), rotate(k, positions, position)
        k, v = recalled(k, v, state, self.window)
        # The newest T keys end at the last position; those kept before them come first.
        keys = torch.arange(start + T - k.shape[1], start + T, device=x.device)
        visible = visible_keys(positions, keys, self.window)
        bias = None
        if is_kind(position, "Alibi"):
            bias = alibi_bias(config["heads"], positions, keys, position)
        scale = config["scale"]
        o = attend(
            q,
            k,
            v,
            visible=visible,
            bias=bias,
            scale=1 / math.sqrt(config["head_width"]) if scale is None else scale,
            soft_cap=config["soft_cap"],
        )
        return self.out(o.flatten(2))


def activation(kind: str, x: Tensor) -> Tensor:
    """Applies the kind of MLP's activation."""
    if kind == "swiglu":
        return F.silu(x)
    if kind in ("gelu", "geglu"):
        return F.gelu(x)
    if kind in ("gelu_tanh", "geglu_tanh"):
        return F.gelu(x, approximate="tanh")
    assert kind == "relu_squared", kind
    return F.relu(x).square()


class Mlp(nn.Module):
    """act(up(x)), or act(gate(x)) * up(x) when gated, then down."""

    def __init__(self, config: Config, width: int):
        super().__init__()
        self.kind, bias = config["kind"], config["bias"]
        gated = self.kind in ("swiglu", "geglu", "geglu_tanh")
        self.up = nn.Linear(width, config["width"], bias=bias)
        self.gate = nn.Linear(width, config["width"], bias=bias) if gated else None
        self.down = nn.Linear(config["width"], width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is None:
            return self.down(activation(self.kind, self.up(x)))
        return self.down(activation(self.kind, self.gate(x)) * self.up(x))


class Layers(nn.ModuleList):
    """Layers one above the other, each with a state of its own."""

    def new_states(self) -> list[State]:
        """Returns what the layers know before the first token."""
        return [{} for _ in self]

    def forward(
        self,
        x: Tensor,
        ids: Tensor,
        start: int,
        states: list[State] | None,
        streams: list[Tensor] | None,
    ) -> Tensor:
        """Runs positions start, start + 1, ...; `streams` gets x after each layer."""
        for number, layer in enumerate(self):
            x = layer(x, start, None if states is None else states[number])
            if streams is not None:
                streams.append(x)
        return x
