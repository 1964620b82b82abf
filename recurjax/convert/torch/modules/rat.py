"""RAT: recurrence inside chunks, attention across them; and its baselines.

    v~_t = g_t v~_{t-1} + (1 - g_t) v_t from zero in every chunk, k~_t with the same g
    y_t  = softmax([q_t k~_end(c'), c' < c; q_t k~_t] / sqrt(E)) [v~_end(c'); v~_t]

Without a state a layer runs whole sequences, chunks side by side; with one, it goes on
token by token.
"""

import math

import torch
from layers import (
    Attention,
    Config,
    Layers,
    Mlp,
    Norm,
    State,
    attend,
    rotate,
    wide,
)
from torch import Tensor, nn


class Gate(nn.Module):
    """sigmoid(x W + b) in at least float32, W full or of low rank."""

    def __init__(self, width: int, inner: int, rank: int | None, bias: bool):
        super().__init__()
        # Full, or of low rank: one matrix or two.
        self.full = nn.Linear(width, inner, bias=False) if rank is None else None
        self.reduce = None if rank is None else nn.Linear(width, rank, bias=False)
        self.expand = None if rank is None else nn.Linear(rank, inner, bias=False)
        self.bias = nn.Parameter(torch.zeros(inner)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        logits = self.full(x) if self.full is not None else self.expand(self.reduce(x))
        logits = logits.to(wide(logits.dtype))
        return torch.sigmoid(logits if self.bias is None else logits + self.bias)


class Mixer(nn.Module):
    """What the gated mixers share: gates, values, the output; one token at a time."""

    def __init__(self, config: Config, width: int):
        super().__init__()
        self.config = config
        self.inner = config["heads"] * config["head_width"]
        rank = config["output_rank"]
        self.output_gate = Gate(width, self.inner, rank, bias=False)
        rank = config["forget_rank"]
        self.forget_gate = Gate(width, self.inner, rank, bias=True)
        self.v = nn.Linear(width, self.inner, bias=False)
        self.out = nn.Linear(self.inner, width, bias=False)

    def forward(self, x: Tensor, start: int, state: State | None) -> Tensor:
        if state is None:
            y = self.whole(x)
        else:
            tokens = [
                self.step(x[:, t : t + 1], start + t, state) for t in range(x.shape[1])
            ]
            y = torch.cat(tokens, dim=1)
        return self.out((self.output_gate(x) * y).to(x.dtype))

    def heads(self, y: Tensor) -> Tensor:
        return y.unflatten(-1, (-1, self.config["head_width"]))

    def tiled(self, y: Tensor) -> Tensor:
        """Head h takes group h mod N: [B, T, N E] to [B, T, H, E]."""
        # Groups repeat over the heads, in this order: 0 1 0 1, not 0 0 1 1.
        return self.heads(y.repeat(1, 1, self.inner // y.shape[-1]))


def recur(gate: Tensor, x: Tensor, before: Tensor) -> Tensor:
    """h_t = g_t h_{t-1} + (1 - g_t) x_t along axis 1; `before` is the state ahead."""
    states = []
    for t in range(x.shape[1]):
        before = gate[:, t] * before + (1 - gate[:, t]) * x[:, t]
        states.append(before)
    return torch.stack(states, dim=1)


class RnnMixer(Mixer):
    """The recurrence over the whole sequence."""

    def whole(self, x: Tensor) -> Tensor:
        gate = self.forget_gate(x)
        return recur(gate, self.v(x), torch.zeros_like(gate[:, 0]))

    def step(self, x: Tensor, position: int, state: State) -> Tensor:
        gate = self.forget_gate(x)
        before = state.get("h", torch.zeros_like(gate[:, 0]))
        y = recur(gate, self.v(x), before)
        state["h"] = y[:, -1]
        return y


class RatMixer(Mixer):
    """Attention to the chunks' ends and the own running state."""

    def __init__(self, config: Config, width: int):
        super().__init__(config, width)
        grouped = config["groups"] * config["head_width"]
        self.q = nn.Linear(width, grouped, bias=False)
        self.k = nn.Linear(width, grouped, bias=False)

    def turned(self, x: Tensor, positions: Tensor) -> Tensor:
        rope = self.config["position"]
        return x if rope is None else rotate(x, positions, rope)

    def whole(self, x: Tensor) -> Tensor:
        B, T, _ = x.shape
        # A row shorter than a chunk is one chunk of its own length.
        C = min(self.config["chunk"], T)
        G = -(-T // C)
        # The last chunk is filled up; its padding comes after every real position.
        x = torch.nn.functional.pad(x, (0, 0, 0, G * C - T))
        gate = self.forget_gate(x)
        k = self.tiled(self.k(x)).flatten(2)

        def scanned(stream: Tensor) -> Tensor:
            # Chunks become rows of a batch: the recurrence begins from zero in each.
            fold = gate.reshape(B * G, C, -1), stream.reshape(B * G, C, -1)
            states = recur(*fold, torch.zeros_like(fold[0][:, 0]))
            return self.heads(states.reshape(B, G * C, -1))

        k, v, q = scanned(k), scanned(self.v(x)), self.tiled(self.q(x))
        number = torch.arange(G, device=x.device)
        place = torch.arange(G * C, device=x.device)
        by_token = self.config["position_of"] == "token"
        # The last position of each chunk stands for all of it.
        ends = k[:, C - 1 :: C], v[:, C - 1 :: C]
        end_keys = self.turned(ends[0], (number + 1) * C - 1 if by_token else number)
        queries = self.turned(q, place if by_token else place // C)
        # Only finished chunks are attended to; the own one is the running state.
        earlier = number[None, :] < (place // C)[:, None]  # [T, G]
        return self.attended(q, queries, k, v, end_keys, ends[1], earlier)[:, :T]

    def step(self, x: Tensor, position: int, state: State) -> Tensor:
        C = self.config["chunk"]
        gate = self.forget_gate(x)
        k = self.tiled(self.k(x)).flatten(2)
        for name, stream in (("k", k), ("v", self.v(x))):
            # At a chunk's first position the state begins anew.
            fresh = position % C == 0
            before = torch.zeros_like(gate[:, 0]) if fresh else state[name]
            state[name] = recur(gate, stream, before)[:, -1]
        k, v = (self.heads(state[name])[:, None] for name in ("k", "v"))
        q = self.tiled(self.q(x))
        by_token = self.config["position_of"] == "token"
        here = torch.tensor([position if by_token else position // C], device=x.device)
        end_keys = state.get("end_keys", k[:, :0])
        end_values = state.get("end_values", v[:, :0])
        y = self.attended(q, self.turned(q, here), k, v, end_keys, end_values, None)
        # The chunk is finished: its end can be attended to from now on.
        if position % C == C - 1:
            state["end_keys"] = torch.cat([end_keys, self.turned(k, here)], dim=1)
            state["end_values"] = torch.cat([end_values, v], dim=1)
        return y

    def attended(
        self,
        q: Tensor,
        queries: Tensor,
        k: Tensor,
        v: Tensor,
        end_keys: Tensor,
        end_values: Tensor,
        earlier: Tensor | None,
    ) -> Tensor:
        """Softmax over chunk ends and the own state, whose rotations cancel."""
        dtype = wide(q.dtype)
        across = torch.einsum("bthe,bghe->bthg", queries.to(dtype), end_keys.to(dtype))
        if earlier is not None:
            across = across.masked_fill(~earlier[:, None], float("-inf"))
        # Query and key of the own state stand at one position: their rotations cancel,
        # so the unrotated ones are multiplied.
        self_logit = (q.to(dtype) * k.to(dtype)).sum(-1, keepdim=True)
        logits = torch.cat([across, self_logit], dim=-1) / math.sqrt(q.shape[-1])
        weights = logits.softmax(dim=-1)
        y = torch.einsum("bthg,bghe->bthe", weights[..., :-1], end_values.to(dtype))
        return (y + weights[..., -1:] * v).flatten(2)


class ReversedRatMixer(Mixer):
    """Attention inside chunks, recurrence across: v~_t = g_t v~_end + (1 - g_t) a_t."""

    def __init__(self, config: Config, width: int):
        super().__init__(config, width)
        self.q = nn.Linear(width, config["groups"] * config["head_width"], bias=False)
        self.k = nn.Linear(width, self.inner, bias=False)

    def whole(self, x: Tensor) -> Tensor:
        state: State = {}
        tokens = [self.step(x[:, t : t + 1], t, state) for t in range(x.shape[1])]
        return torch.cat(tokens, dim=1)

    def step(self, x: Tensor, position: int, state: State) -> Tensor:
        C = self.config["chunk"]
        q, k, v = self.tiled(self.q(x)), self.heads(self.k(x)), self.heads(self.v(x))
        if self.config["position"] is not None:
            here = torch.tensor([position], device=x.device)
            rope = self.config["position"]
            q, k = rotate(q, here, rope), rotate(k, here, rope)
        # The first position of a chunk starts with no keys but its own.
        if position % C:
            k = torch.cat([state["k"], k], dim=1)
            v = torch.cat([state["v"], v], dim=1)
        state["k"], state["v"] = k, v
        a = attend(q, k, v, visible=None, scale=1 / math.sqrt(q.shape[-1])).flatten(2)
        gate = self.forget_gate(x)
        end = state.get("end", torch.zeros_like(gate))
        y = gate * end + (1 - gate) * a
        # What the chunk ends with enters the next one's recurrence.
        if position % C == C - 1:
            state["end"] = y
        return y


class AttentionMixer(nn.Module):
    """Attention over all tokens or a window of them."""

    def __init__(self, config: Config, width: int):
        super().__init__()
        self.attention = Attention(config["attention"], width, config["window"])

    def forward(self, x: Tensor, start: int, state: State | None) -> Tensor:
        return self.attention(x, start, state)


MIXERS = {
    "RatMixerConfig": RatMixer,
    "RnnMixerConfig": RnnMixer,
    "ReversedRatMixerConfig": ReversedRatMixer,
    "AttentionMixerConfig": AttentionMixer,
}


class RatBlock(nn.Module):
    """y = x + mixer(norm(x)), z = y + mlp(norm'(y))."""

    def __init__(self, stack: Config, mixer: Config):
        super().__init__()
        width = stack["width"]
        self.mixer_norm = Norm(stack["norm"], width)
        self.mixer = MIXERS[mixer["type"]](mixer, width)
        self.mlp_norm = Norm(stack["norm"], width)
        self.mlp = Mlp(stack["mlp"], width)

    def forward(self, x: Tensor, start: int, state: State | None) -> Tensor:
        y = x + self.mixer(self.mixer_norm(x), start, state)
        return y + self.mlp(self.mlp_norm(y))


def build_layers(stack: Config) -> Layers:
    """Builds all layers, the first one first."""
    pattern = stack["pattern"]
    return Layers(
        RatBlock(stack, pattern[layer % len(pattern)])
        for layer in range(stack["layers"])
    )


def position_of(stack: Config) -> Config | None:
    """Returns the config of positions; the decoder adds learned ones."""
    return None
