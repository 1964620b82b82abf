"""Layers that several variants share: norms, attention, MLP, recurrences."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Config = dict[str, Any]
State = dict[str, Tensor]
"""What one layer keeps between calls, by name; the rows of the batch come first."""


class Tokens:
    """The tokens of one call. Pads come after a row's tokens and leave no trace.

    Attributes:
      ids: [B, T].
      real: [B, T], False at pads; None: there are no pads.
      positions: [B, T], or [1, T] where all rows agree; 0 at pads.
      start, end: [B] or [1], the position of each row before the call and after it.
      first: whether the rows begin with this call.
      capacity: the positions that a state has room for.
    """

    def __init__(
        self,
        ids: Tensor,
        start: Tensor,
        real: Tensor | None,
        *,
        first: bool,
        capacity: int,
    ):
        self.ids, self.real, self.first, self.capacity = ids, real, first, capacity
        self.start = start
        steps = torch.arange(ids.shape[1], device=ids.device)
        self.positions = start[:, None] + steps
        self.end = start + (ids.shape[1] if real is None else real.sum(dim=1))
        if real is not None:
            self.positions = self.positions.masked_fill(~real, 0)

    @property
    def places(self) -> Tensor:
        """Returns the positions, with -1 at pads."""
        if self.real is None:
            return self.positions
        return self.positions.masked_fill(~self.real, -1)

    def only_real(self, x: Tensor, otherwise: float) -> Tensor:
        """Puts a number in the place of what pads have in x [B, T, ...]."""
        if self.real is None:
            return x
        pads = ~self.real.reshape(*self.real.shape, *[1] * (x.dim() - 2))
        return x.masked_fill(pads, otherwise)

    def column(self, t: int) -> "Tokens":
        """Returns the tokens of one column as a call of their own."""
        real = None if self.real is None else self.real[:, t : t + 1]
        before = t if self.real is None else self.real[:, :t].sum(dim=1)
        return Tokens(
            self.ids[:, t : t + 1],
            self.start + before,
            real,
            first=self.first and t == 0,
            capacity=self.capacity,
        )


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
        norm = F.layer_norm if self.kind == "layer" else F.rms_norm
        y = norm(y, y.shape[-1:], eps=self.eps)
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


Rotation = tuple[Tensor, Tensor, Tensor]
"""Cosine and sine [B, T, 1, E] of angles, and with which dimension each one turns."""


def rotation(positions: Tensor, rope: Config, width: int) -> Rotation:
    """Returns how positions [B, T] rotate pairs (x[i], x[i + r/2]) of E = `width`."""
    r = int(width * rope["fraction"])
    theta, amplitude = frequencies(rope, r)
    # Dimensions beyond r stay.
    rest = [0.0] * (width - r)
    half, device = r // 2, positions.device
    table = torch.tensor(theta + theta + rest, dtype=torch.float32, device=device)
    signs = [-amplitude] * half + [amplitude] * (width - half)
    # The half-split form: dimension i turns with i + r/2.
    partner = [*range(half, r), *range(half), *range(r, width)]
    angles = (positions[..., None] * table)[:, :, None]
    cos = angles.cos()
    if amplitude != 1.0:
        gains = [amplitude] * r + [1.0] * (width - r)
        cos = cos * torch.tensor(gains, dtype=torch.float32, device=device)
    return (
        cos,
        angles.sin() * torch.tensor(signs, dtype=torch.float32, device=device),
        torch.tensor(partner, device=device),
    )


def frequencies(rope: Config, r: int) -> tuple[list[float], float]:
    """Returns theta of the r / 2 pairs, and what multiplies cosine and sine."""
    # In float64, as the JAX side makes them.
    theta = [rope["base"] ** (-i / r) for i in range(0, r, 2)]
    scaling = rope.get("scaling")
    if scaling is None:
        return theta, 1.0
    kind, amplitude = scaling["type"], scaling.get("amplitude", 1.0)
    if kind == "LongScaling":
        # The same for short and long sequences: others are not exported.
        pairs = zip(theta, scaling["short"], strict=True)
        return [angle / factor for angle, factor in pairs], amplitude
    factor = scaling["factor"]
    if kind == "LinearScaling":
        return [angle / factor for angle in theta], amplitude
    if kind == "Llama3Scaling":
        # Slow dimensions are divided by the factor, fast ones stay.
        low, high = scaling["low"], scaling["high"]
        turns = [scaling["length"] * angle / (2 * math.pi) for angle in theta]
        stay = [(turn - low) / (high - low) for turn in turns]
    else:
        assert kind == "YarnScaling", kind

        def pair_of(turns: float) -> float:
            wavelength = scaling["length"] / (turns * 2 * math.pi)
            return r * math.log(wavelength) / (2 * math.log(rope["base"]))

        low, high = pair_of(scaling["fast"]), pair_of(scaling["slow"])
        if scaling["truncate"]:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, r - 1)
        high = high + 0.001 if low == high else high
        stay = [1 - (number - low) / (high - low) for number in range(r // 2)]
    shares = [min(max(share, 0.0), 1.0) for share in stay]
    pairs = zip(theta, shares, strict=True)
    scaled = [angle * (share + (1 - share) / factor) for angle, share in pairs]
    return scaled, amplitude


def rotate(x: Tensor, turn: Rotation) -> Tensor:
    """Rotates x [B, T, H, E]."""
    cos, sin, partner = turn
    return torch.addcmul(x * cos, x.index_select(-1, partner), sin).to(x.dtype)


def alibi_bias(heads: int, queries: Tensor, keys: Tensor, config: Config) -> Tensor:
    """-slope_h |i - j| as [B, H, T, S], slope_h = 2^(-max_bias (h + 1) / H)."""
    slopes = [2.0 ** (-config["max_bias"] * (h + 1) / heads) for h in range(heads)]
    distance = (queries[:, None, :, None] - keys[:, None, None, :]).abs()
    factors = torch.tensor(slopes, dtype=torch.float32, device=queries.device)
    return -factors[:, None, None] * distance


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    visible: Tensor,
    bias: Tensor | None = None,
    scale: float,
    soft_cap: float | None = None,
) -> Tensor:
    """softmax(cap(scale q k) + bias) v for q [B, T, H, E] and k, v [B, S, K, E]."""
    # Each key head serves H / K neighbouring query heads.
    q = q.unflatten(2, (k.shape[2], -1))
    # Logits and softmax in at least float32; values are multiplied in their own dtype.
    dtype = wide(q.dtype)
    logits = torch.einsum("btkge,bske->bkgts", q.to(dtype), k.to(dtype)) * scale
    logits = logits.flatten(1, 2)
    if soft_cap is not None:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    # ALiBi comes after the cap: it is not a part of what is capped.
    if bias is not None:
        logits = logits + bias
    # Not -inf: a pad may see no key, and its output has to be a number.
    logits = logits.masked_fill(~visible[:, None], torch.finfo(dtype).min)
    weights = logits.softmax(dim=-1).to(v.dtype).unflatten(1, (k.shape[2], -1))
    return torch.einsum("bkgts,bske->btkge", weights, v).flatten(2, 3)


def put(buffer: Tensor, slots: Tensor, values: Tensor) -> Tensor:
    """Writes values [B, T, ...] to slots [B, T] of a buffer [B, S, ...].

    In place, but where gradients are recorded, which need the buffer as it was.
    """
    slots = slots.reshape(*slots.shape, *[1] * (values.dim() - 2)).expand_as(values)
    if torch.is_grad_enabled():
        return buffer.scatter(1, slots, values)
    return buffer.scatter_(1, slots, values)


def room(state: State, name: str, size: int, like: Tensor, fill: int = 0) -> Tensor:
    """Returns a state's buffer [B, size + 1, ...] for what is `like` [B, T, ...].

    The slot after the last takes what is to be forgotten.
    """
    old = state.get(name, like[:, :0])
    shape = (like.shape[0], size + 1 - old.shape[1], *like.shape[2:])
    if shape[1] <= 0:
        return old
    return torch.cat([old, like.new_full(shape, fill)], dim=1)


def recalled(
    k: Tensor,
    v: Tensor,
    tokens: Tokens,
    state: State | None,
    window: int | None,
    name: str = "",
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns keys, values and their positions [B, S], those of the state among them.

    A position of -1 marks a slot without a token. The state is a ring: position p is in
    slot p mod its size, which is the window's where there is one.
    """
    places = tokens.places
    if state is None:
        return k, v, places
    # A key `window` positions back is still seen; older ones are dropped.
    size = tokens.capacity if window is None else min(window + 1, tokens.capacity)
    places = places.expand(k.shape[:2])
    dropped = (places < 0) | (places < tokens.end[:, None] - size)
    slots = (places % size).masked_fill(dropped, size)
    buffers = (
        room(state, name + "k", size, k),
        room(state, name + "v", size, v),
        room(state, name + "at", size, places, fill=-1),
    )
    new, seen = (k, v, places), (k, v, places)
    # In a window, early tokens of the call see keys that its late ones push out.
    at_once = window is None or k.shape[1] == 1
    if not (tokens.first or at_once):
        pairs = zip(buffers, new, strict=True)
        seen = tuple(torch.cat([old[:, :size], x], dim=1) for old, x in pairs)
    written = (k, v, places.masked_fill(dropped, -1))
    buffers = tuple(put(old, slots, x) for old, x in zip(buffers, written, strict=True))
    state.update(zip((name + "k", name + "v", name + "at"), buffers, strict=True))
    if at_once and not tokens.first:
        seen = tuple(buffer[:, :size] for buffer in buffers)
    return seen


def visible_keys(queries: Tensor, keys: Tensor, window: int | None) -> Tensor:
    """Returns which keys [B, S] queries [B, T] see: their own, `window` back.

    Keys at -1 are seen by none.
    """
    distance = queries[:, :, None] - keys[:, None, :]
    visible = (distance >= 0) & (keys >= 0)[:, None]
    return visible if window is None else visible & (distance <= window)


STRETCH = 64
"""Positions of a recurrence that are computed together."""


def recurrence(decay: Tensor, x: Tensor, h: Tensor) -> Tensor:
    """h_t = decay_t h_(t-1) + x_t along axis 1, from the state h before the first.

    In stretches, and within each by doubling: after step s a position has met the last
    2^s (Hillis and Steele 1986).
    """
    outputs = []
    for a, b in zip(decay.split(STRETCH, 1), x.split(STRETCH, 1), strict=True):
        reach = 1
        while reach < a.shape[1]:
            b = torch.cat(
                [b[:, :reach], b[:, reach:] + a[:, reach:] * b[:, :-reach]], 1
            )
            a = torch.cat([a[:, :reach], a[:, reach:] * a[:, :-reach]], 1)
            reach *= 2
        outputs.append(b + a * h[:, None])
        h = outputs[-1][:, -1]
    return torch.cat(outputs, dim=1)


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

    def forward(self, x: Tensor, tokens: Tokens, state: State | None) -> Tensor:
        """Runs the tokens; `state` gets their keys and values."""
        config, positions = self.config, tokens.positions
        q = self.heads(self.q(x), config["heads"], self.q_norm)
        k = self.heads(self.k(x), config["key_heads"], self.k_norm)
        v = self.heads(self.v(x), config["key_heads"], None)
        position, bias = config["position"], None
        if is_kind(position, "Rope"):
            turn = rotation(positions, position, config["head_width"])
            q, k = rotate(q, turn), rotate(k, turn)
        k, v, at = recalled(k, v, tokens, state, self.window)
        if is_kind(position, "Alibi"):
            bias = alibi_bias(config["heads"], positions, at, position)
        scale = config["scale"]
        o = attend(
            q,
            k,
            v,
            visible=visible_keys(positions, at, self.window),
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


def kind_of(base: Config, layer: int) -> tuple[Config, int | None]:
    """Returns the attention of a Transformer's layer, and how far it sees."""
    windows, positions = base["windows"], base["positions"]
    attention = base["attention"]
    # Windows and positions repeat over the layers as a pattern does.
    if positions is not None:
        position = positions[layer % len(positions)]
        attention = attention | {"position": position}
    return attention, windows[layer % len(windows)]


class Norms(nn.Module):
    """The norms of a Transformer's layer: before its branches, after them, or both."""

    def __init__(self, base: Config, *, there: bool = True):
        super().__init__()

        def norm(side: str) -> Norm | None:
            is_there = there and base["norms"] in (side, "both")
            return Norm(base["norm"], base["width"]) if is_there else None

        self.attention_norm, self.mlp_norm = norm("before"), norm("before")
        self.attention_post_norm, self.mlp_post_norm = norm("after"), norm("after")


class ResidualBlock(Norms):
    """y = x + s attention(norm(x)), z = y + s mlp(norm'(y)), or both from x."""

    attention: nn.Module

    def __init__(self, base: Config):
        super().__init__(base)
        self.parallel = base["parallel_residual"]
        unscaled = base["residual_scale"] == "one"
        # Both branches are scaled down by the root of the depth.
        self.scale = 1.0 if unscaled else base["layers"] ** -0.5
        self.mlp = Mlp(base["mlp"], base["width"])

    def forward(self, x: Tensor, tokens: Tokens, state: State | None) -> Tensor:
        """Runs the tokens; `state` gets what the attention keeps."""
        mixed = self.attention(normed(self.attention_norm, x), tokens, state)
        y = x + self.scale * normed(self.attention_post_norm, mixed)
        # Both branches read x where the residual is parallel; else the MLP reads y.
        source = x if self.parallel else y
        fed = self.mlp(normed(self.mlp_norm, source))
        return y + self.scale * normed(self.mlp_post_norm, fed)


class Layers(nn.ModuleList):
    """Layers one above the other, each with a state of its own."""

    gradient_checkpointing = False
    """Whether training computes a layer again in the backward pass."""

    def new_states(self) -> list[State]:
        """Returns what the layers know before the first token."""
        return [{} for _ in self]

    def forward(
        self,
        x: Tensor,
        tokens: Tokens,
        states: list[State] | None,
        streams: list[Tensor] | None,
    ) -> Tensor:
        """Runs the tokens; `streams` gets x after each layer."""
        again = self.gradient_checkpointing and self.training and states is None
        for number, layer in enumerate(self):
            if again:
                x = checkpoint(layer, x, tokens, None, use_reentrant=False)
            else:
                x = layer(x, tokens, None if states is None else states[number])
            if streams is not None:
                streams.append(x)
        return x
