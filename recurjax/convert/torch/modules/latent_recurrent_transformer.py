"""The Latent Recurrent Transformer: an upper state of each token enters the next.

    x0 = rms(embedding),  x = x0,  m = the source layers' state of earlier tokens
    x <- alpha x + beta x0 + gamma m,  a = rms(x),  (g, g') = 2 sigmoid(mix(a))
    k = g K a + g' K' m,  v likewise and c sigmoid(gate(a)) times the value embedding
    q, k <- rms(RoPE_-theta(q, k)),  x += out(attention),  x += mlp(rms(x))

With a memory one token after another, through all layers: the exact recurrence.
"""

import math

import torch
from latent_memory import MemoryLayers, factor, rms
from layers import (
    Config,
    Mlp,
    State,
    Tokens,
    attend,
    recalled,
    rotate,
    rotation,
    visible_keys,
)
from torch import Tensor, nn


def scaled(scale: nn.Parameter | None, x: Tensor) -> Tensor:
    """Multiplies by a factor that a model may lack."""
    return x if scale is None else scale * x


def linear(there: bool, inputs: int, outputs: int) -> nn.Linear | None:
    """Creates a matrix that a model may lack."""
    return nn.Linear(inputs, outputs, bias=False) if there else None


class MemoryProjection(nn.Module):
    """Keys and values of the memory; a side that it does not enter has none."""

    def __init__(self, stack: Config):
        super().__init__()
        memory, width = stack["memory"], stack["key_heads"] * stack["head_width"]
        self.k = linear(memory["keys"], stack["width"], width)
        self.v = linear(memory["values"], stack["width"], width)

    def forward(self, state: Tensor) -> tuple[Tensor | None, Tensor | None]:
        keys = None if self.k is None else self.k(state)
        return keys, None if self.v is None else self.v(state)


class Pass:
    """What the layers see next to x: the same for all, and what lower ones left."""

    def __init__(self, x0: Tensor, tokens: Tokens, memory: Tensor | None):
        self.x0, self.tokens, self.memory = x0, tokens, memory
        self.pair: tuple[Tensor | None, Tensor | None] = (None, None)
        self.values: Tensor | None = None  # of the first layer
        self.history: list[Tensor] = []  # the outputs of the layers below


class LatentBlock(nn.Module):
    """One layer; `layer` counts from 0."""

    def __init__(self, stack: Config, layer: int):
        super().__init__()
        self.stack, self.layer = stack, layer
        D, E = stack["width"], stack["head_width"]
        H, K = stack["heads"], stack["key_heads"]
        L, memory = stack["layers"], stack["memory"]
        letter = (
            "L" if layer == L - 1 else stack["windows"][layer % len(stack["windows"])]
        )
        # "S" windows see half of the training length, "L" windows all of it; the last
        # layer is always long.
        self.window = stack["length"] // 2 if letter == "S" else stack["length"]
        self.q, self.k, self.v = (nn.Linear(D, n * E, bias=False) for n in (H, K, K))
        self.out = nn.Linear(H * E, D, bias=False)
        mlp = {"kind": "relu_squared", "width": stack["mlp_width"], "bias": False}
        self.mlp = Mlp(mlp, D)
        mixing = stack["input_mixing"]
        self.residual_scale = factor(stack["residual_scales"])
        self.input_scale = factor(mixing != "none")
        self.history_scale = factor(mixing == "dense", L)
        self.attention_scale = factor(stack["attention_scale"])
        self.mlp_scale = factor(stack["mlp_scale"])
        self.value_scale = factor(stack["value_residual"] == "first")
        self.input_v = linear(stack["value_residual"] == "projected", D, K * E)
        kind = stack["value_embeddings"]
        # Every second layer, counted from the last, which has one.
        embeds = kind == "all" or (kind == "alternating" and (L - 1 - layer) % 2 == 0)
        rows, channels = stack["vocabulary"], stack["value_gate_channels"] or D
        self.value_embedding = nn.Embedding(rows, K * E) if embeds else None
        self.value_gate = linear(embeds, channels, K)
        gated = memory is not None and (memory["keys"] or memory["values"])
        # Two gates a key head: one for the token's own keys and values, one for the
        # memory's.
        self.mix = linear(gated, D, 2 * K)
        per_layer = gated and memory["projection"] == "layerwise"
        self.memory = MemoryProjection(stack) if per_layer else None
        self.memory_scale = factor(memory is not None and memory["residual"])

    def forward(self, x: Tensor, seen: Pass, state: State | None) -> Tensor:
        x = self.entered(x, seen)
        q, k, v = self.projected(rms(x), seen)
        positions = seen.tokens.positions
        rope = {"base": self.stack["rope_base"], "fraction": 1.0}
        # The rotation goes the other way round than usual, and is followed by the norm.
        turn = rotation(-positions, rope, q.shape[-1])
        q, k = rms(rotate(q, turn)), rms(rotate(k, turn))
        k, v, at = recalled(k, v, seen.tokens, state, self.window)
        visible = visible_keys(positions, at, self.window)
        scale = 1 / math.sqrt(self.stack["head_width"])
        o = self.out(attend(q, k, v, visible=visible, scale=scale).flatten(2))
        x = x + scaled(self.attention_scale, o)
        x = x + scaled(self.mlp_scale, self.mlp(rms(x)))
        seen.history.append(x)
        return x

    def entered(self, x: Tensor, seen: Pass) -> Tensor:
        x = scaled(self.residual_scale, x)
        if self.input_scale is not None:
            x = x + self.input_scale * seen.x0
        if self.history_scale is not None:
            for number, earlier in enumerate(seen.history):
                x = x + self.history_scale[number] * earlier
        if self.memory_scale is not None:
            x = x + self.memory_scale * seen.memory
        return x

    def projected(self, a: Tensor, seen: Pass) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (self.heads(part(a)) for part in (self.q, self.k, self.v))
        if self.value_scale is not None:
            # The first layer's values are mixed into those of all later ones.
            if self.layer == 0:
                seen.values = v
            else:
                share = self.value_scale
                v = (1 - share) * v + share * seen.values
        if self.input_v is not None:
            v = v + self.heads(self.input_v(seen.x0))
        k, v = self.injected(a, k, v, seen)
        if self.value_embedding is not None:
            channels = self.value_gate.weight.shape[1]
            gate = torch.sigmoid(self.value_gate(a[..., :channels]))[..., None]
            gate = self.stack["value_gate_scale"] * gate
            v = v + gate * self.heads(self.value_embedding(seen.tokens.ids))
        return q, k, v

    def injected(
        self, a: Tensor, k: Tensor, v: Tensor, seen: Pass
    ) -> tuple[Tensor, Tensor]:
        memory = self.stack["memory"]
        entries = None if memory is None else memory["entry_layers"]
        outside = entries is not None and self.layer >= entries
        if self.mix is None or outside:
            return k, v
        pair = seen.pair if self.memory is None else self.memory(seen.memory)
        gates = 2 * torch.sigmoid(self.mix(a)).unflatten(-1, (2, -1))[..., None]
        # Below `replace_layers` the memory takes the place of the own keys and values.
        local_gate = 0.0 if self.layer < memory["replace_layers"] else gates[:, :, 0]
        k, v = (
            local
            if new is None
            else local_gate * local + gates[:, :, 1] * self.heads(new)
            for local, new in zip((k, v), pair, strict=True)
        )
        return k, v

    def heads(self, y: Tensor) -> Tensor:
        return y.unflatten(-1, (-1, self.stack["head_width"]))


class LatentLayers(MemoryLayers):
    """All layers, and the state of earlier tokens that enters them."""

    def __init__(self, stack: Config):
        super().__init__(stack)
        self.memory, memory = None, stack["memory"]
        for layer in range(stack["layers"]):
            self.add_module(str(layer), LatentBlock(stack, layer))
        if memory is not None:
            gated = memory["keys"] or memory["values"]
            if gated and memory["projection"] == "shared":
                self.memory = MemoryProjection(stack)

    def run(
        self,
        x: Tensor,
        tokens: Tokens,
        memory: Tensor | None,
        states: list[State] | None,
    ) -> list[Tensor]:
        """Makes one pass and returns x after each layer."""
        x = rms(x)
        seen = Pass(x, tokens, memory)
        if self.memory is not None:
            seen.pair = self.memory(memory)
        for layer in range(self.stack["layers"]):
            state = None if states is None else states[layer]
            x = self.get_submodule(str(layer))(x, seen, state)
        return seen.history


def build_layers(stack: Config) -> LatentLayers:
    """Builds all layers."""
    return LatentLayers(stack)


def position_of(stack: Config) -> Config | None:
    """Returns the config of positions; the decoder adds learned ones."""
    return None
