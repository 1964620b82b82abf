"""RAT: recurrence inside chunks, attention across them; and its baselines.

v~_t = g_t v~_{t-1} + (1 - g_t) v_t from zero in every chunk, k~_t with the same g
y_t  = softmax([q_t k~_end(c'), c' < c; q_t k~_t] / sqrt(E)) [v~_end(c'); v~_t]
"""

import math

import torch
from gated_scan import gated_scan
from layers import (
    Attention,
    Config,
    Layers,
    Mlp,
    Norm,
    State,
    Tokens,
    attend,
    is_kind,
    put,
    recalled,
    room,
    rotate,
    rotation,
    visible_keys,
    wide,
)
from mamba import Mamba
from pattern_memory import PatternWithMemory
from recurrent_block import RecurrentBlock
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
    """The parts that gated mixers share: gates, values, heads, the output."""

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

    def forward(self, x: Tensor, tokens: Tokens, state: State | None) -> Tensor:
        y = self.mixed(x, tokens, {} if state is None else state)
        return self.out((self.output_gate(x) * y).to(x.dtype))

    def mixed(self, x: Tensor, tokens: Tokens, state: State) -> Tensor:
        """Returns what the output gate multiplies, [B, T, H E]."""
        raise NotImplementedError

    def heads(self, y: Tensor) -> Tensor:
        return y.unflatten(-1, (-1, self.config["head_width"]))

    def tiled(self, y: Tensor) -> Tensor:
        """Head h takes group h mod N: [B, T, N E] to [B, T, H, E]."""
        # Groups repeat over the heads, in this order: 0 1 0 1, not 0 0 1 1.
        return self.heads(y.repeat(1, 1, self.inner // y.shape[-1]))


class RnnMixer(Mixer):
    """The recurrence over the full sequence."""

    def mixed(self, x: Tensor, tokens: Tokens, state: State) -> Tensor:
        # A gate of 1 keeps the state as it is.
        gate = tokens.only_real(self.forget_gate(x), 1)
        before = state.get("h", torch.zeros_like(gate[:, 0]))
        (y,) = gated_scan(gate, [self.v(x)], [before])
        state["h"] = y[:, -1]
        return y


class RatMixer(Mixer):
    """Attention to the chunks' ends and the own running state."""

    def __init__(self, config: Config, width: int):
        super().__init__(config, width)
        grouped = config["groups"] * config["head_width"]
        self.q = nn.Linear(width, grouped, bias=False)
        self.k = nn.Linear(width, grouped, bias=False)

    def mixed(self, x: Tensor, tokens: Tokens, state: State) -> Tensor:
        C, positions = self.config["chunk"], tokens.positions
        q, number = self.tiled(self.q(x)), positions // C
        # A gate of 1 keeps the state as it is; at a chunk's first position it begins
        # from zero.
        gate = tokens.only_real(self.forget_gate(x), 1)
        begins = (tokens.places >= 0) & (tokens.places % C == 0)
        zeros = torch.zeros_like(gate[:, 0])
        before = [state.get(name, zeros) for name in ("k", "v")]
        scanned = gated_scan(gate, [self.k(x), self.v(x)], before, begins)
        state["k"], state["v"] = (y[:, -1] for y in scanned)
        k, v = (self.heads(y) for y in scanned)
        # A chunk's key is rotated by its end's position, or by its number.
        turned_q, turned_k = q, k
        if self.config["position"] is not None:
            place = positions if self.config["position_of"] == "token" else number
            turn = rotation(place, self.config["position"], q.shape[-1])
            turned_q, turned_k = rotate(q, turn), rotate(k, turn)
        end_keys, end_values = self.ends(turned_k, v, tokens, state)
        # Only finished chunks are attended to; the own one is the running state.
        chunks = torch.arange(end_keys.shape[1], device=x.device)
        earlier = chunks < number[..., None]  # [B, T, G]
        return self.attended(q, turned_q, k, v, end_keys, end_values, earlier)

    def ends(
        self, k: Tensor, v: Tensor, tokens: Tokens, state: State
    ) -> tuple[Tensor, Tensor]:
        """Returns keys and values [B, G, H, E] at the ends of chunks, by their number.

        The last position of each chunk represents all of it.
        """
        C, size = self.config["chunk"], tokens.capacity // self.config["chunk"] + 1
        places = tokens.places.expand(k.shape[:2])
        is_end = (places >= 0) & (places % C == C - 1)
        slots = (places // C).masked_fill(~is_end, size)
        for name, x in (("end_keys", k), ("end_values", v)):
            state[name] = put(room(state, name, size, x), slots, x)
        if tokens.first:
            return k[:, C - 1 :: C], v[:, C - 1 :: C]
        return state["end_keys"][:, :size], state["end_values"][:, :size]

    def attended(
        self,
        q: Tensor,
        queries: Tensor,
        k: Tensor,
        v: Tensor,
        end_keys: Tensor,
        end_values: Tensor,
        earlier: Tensor,
    ) -> Tensor:
        """Softmax over chunk ends and the own state, whose rotations cancel."""
        dtype = wide(q.dtype)
        across = torch.einsum("bthe,bghe->bthg", queries.to(dtype), end_keys.to(dtype))
        across = across.masked_fill(~earlier[:, :, None], float("-inf"))
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

    def mixed(self, x: Tensor, tokens: Tokens, state: State) -> Tensor:
        C, positions, places = self.config["chunk"], tokens.positions, tokens.places
        q, k, v = self.tiled(self.q(x)), self.heads(self.k(x)), self.heads(self.v(x))
        if self.config["position"] is not None:
            turn = rotation(positions, self.config["position"], q.shape[-1])
            q, k = rotate(q, turn), rotate(k, turn)
        # The first position of a chunk starts with no keys but its own.
        k, v, at = recalled(k, v, tokens, state, C - 1)
        same = (positions // C)[:, :, None] == (at // C)[:, None, :]
        visible = visible_keys(positions, at, None) & same
        a = attend(q, k, v, visible=visible, scale=1 / math.sqrt(q.shape[-1])).flatten(
            2
        )
        gate = self.forget_gate(x)
        # What a chunk ends with enters the next one's recurrence: between two ends the
        # state stays as it is, by a gate of 1.
        is_end = ((places >= 0) & (places % C == C - 1))[..., None]
        before = state.get("end", torch.zeros_like(gate[:, 0]))
        (ends,) = gated_scan(gate.masked_fill(~is_end, 1), [a], [before])
        state["end"] = ends[:, -1]
        earlier = torch.cat([before[:, None], ends[:, :-1]], dim=1)
        return gate * earlier + (1 - gate) * a


class MambaMixer(nn.Module):
    """Mamba over the model width."""

    def __init__(self, config: Config, width: int):
        super().__init__()
        self.mamba = Mamba(config, width)

    def forward(self, x: Tensor, tokens: Tokens, state: State | None) -> Tensor:
        return self.mamba(x, tokens, {} if state is None else state)


class AttentionMixer(nn.Module):
    """Attention over all tokens or a window of them."""

    def __init__(self, config: Config, width: int):
        super().__init__()
        self.attention = Attention(config["attention"], width, config["window"])

    def forward(self, x: Tensor, tokens: Tokens, state: State | None) -> Tensor:
        return self.attention(x, tokens, state)


MIXERS = {
    "RatMixerConfig": RatMixer,
    "RnnMixerConfig": RnnMixer,
    "ReversedRatMixerConfig": ReversedRatMixer,
    "AttentionMixerConfig": AttentionMixer,
    "MambaMixerConfig": MambaMixer,
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

    def forward(self, x: Tensor, tokens: Tokens, state: State | None) -> Tensor:
        y = x + self.mixer(self.mixer_norm(x), tokens, state)
        return y + self.mlp(self.mlp_norm(y))


def build_layers(stack: Config) -> nn.Module:
    """Builds all layers, the first one first."""
    pattern = stack["pattern"]
    places = (pattern[layer % len(pattern)] for layer in range(stack["layers"]))
    layers = Layers(
        # The Recurrent Transformer's layer has the stack's norms and MLP inside.
        RecurrentBlock(stack | place)
        if is_kind(place, "RecurrentLayerConfig")
        else RatBlock(stack, place)
        for place in places
    )
    return layers if stack["memory"] is None else PatternWithMemory(stack, layers)


def position_of(stack: Config) -> Config | None:
    """Returns the config of positions; the decoder adds learned ones."""
    return None
