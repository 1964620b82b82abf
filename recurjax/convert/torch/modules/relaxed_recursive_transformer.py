"""The Relaxed Recursive Transformer: a block of layers, run several times.

exit_logits(model, ids)                              # after each loop, [loops, B, T, V]
ids, loops = generate_early(model, ids, 64, threshold=0.7)    # one row, tokens leave
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from layers import (
    Config,
    Norm,
    Norms,
    State,
    Tokens,
    activation,
    alibi_bias,
    attend,
    is_kind,
    kind_of,
    normed,
    recalled,
    rotate,
    rotation,
    visible_keys,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Keys = tuple[Tensor, Tensor, Tensor]
"""Keys, values and their positions, -1 where a slot has no token."""


class Map(nn.Module):
    """A linear map's matrix, its bias, or both."""

    def __init__(self, inputs: int, outputs: int, *, matrix: bool, bias: bool):
        super().__init__()
        # Not nn.Linear, which always has a matrix: an untied bias belongs to one use of
        # the layer, whose matrix is in the shared block.
        self.weight = nn.Parameter(torch.zeros(outputs, inputs)) if matrix else None
        self.bias = nn.Parameter(torch.zeros(outputs)) if bias else None


class Adapter(nn.Module):
    """The LoRA that a depth adds to a shared linear map: (x A) B."""

    def __init__(self, inputs: int, outputs: int, rank: int):
        super().__init__()
        # No matrix has a higher rank than its smaller side; the JAX side caps it alike,
        # and the tensors of the file have this shape.
        rank = min(rank, inputs, outputs)
        self.reduce = nn.Linear(inputs, rank, bias=False)
        self.expand = nn.Linear(rank, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.expand(self.reduce(x))


def linear_maps(base: Config) -> dict[str, tuple[int, int]]:
    """Returns inputs and outputs of a layer's linear maps, by name."""
    a, D, mlp = base["attention"], base["width"], base["mlp"]
    queries, keys = a["heads"] * a["head_width"], a["key_heads"] * a["head_width"]
    maps = {"q": (D, queries), "k": (D, keys), "v": (D, keys), "out": (queries, D)}
    maps |= {"up": (D, mlp["width"]), "down": (mlp["width"], D)}
    gated = mlp["kind"] in ("swiglu", "geglu", "geglu_tanh")
    return maps | {"gate": (D, mlp["width"])} if gated else maps


class Part(Norms):
    """A layer's matrices, its norms and biases, or both."""

    def __init__(self, base: Config, *, matrices: bool, vectors: bool):
        super().__init__(base, there=vectors)
        a, sizes = base["attention"], linear_maps(base)

        def maps(names: tuple[str, ...], biased: Any) -> nn.ModuleDict:
            modules = {
                name: Map(*sizes[name], matrix=matrices, bias=vectors and biased(name))
                for name in names
                if name in sizes
            }
            return nn.ModuleDict(modules)

        def attention_bias(name: str) -> bool:
            return a["out_bias"] if name == "out" else a["qkv_bias"]

        self.attention = maps(("q", "k", "v", "out"), attention_bias)
        self.mlp = maps(("up", "gate", "down"), lambda name: base["mlp"]["bias"])
        if vectors and a["qk_norm"] is not None:
            for name, heads in (("q_norm", a["heads"]), ("k_norm", a["key_heads"])):
                full = a["qk_norm_over"] == "full"
                # One norm over all heads' channels, or one of a head's width for every
                # head.
                width = a["head_width"] * (heads if full else 1)
                self.attention[name] = Norm(a["qk_norm"], width)


class Use(Part):
    """The parameters of one run of a layer: norms and biases, if untied; adapters."""

    def __init__(self, stack: Config):
        base, rank = stack["transformer"], stack["rank"]
        super().__init__(base, matrices=False, vectors=not stack["tie_norms"])
        # At rank 0 nothing is added: all runs of a layer compute the same map.
        maps = linear_maps(base) if rank else {}
        self.adapters = nn.ModuleDict(
            {name: Adapter(*size, rank) for name, size in maps.items()}
        )


class LoopedLayers(nn.Module):
    """All depths; `blocks` are shared, `uses[b][k]` is layer k's run number b."""

    gradient_checkpointing = False
    """Whether training computes a layer again in the backward pass."""

    def __init__(self, stack: Config):
        super().__init__()
        self.stack, self.base = stack, stack["transformer"]
        self.loops = stack["loops"]
        self.count = self.base["layers"] // self.loops
        self.first = stack["loop_cache"] == "first"
        self.blocks = nn.ModuleList(
            Part(self.base, matrices=True, vectors=stack["tie_norms"])
            for _ in range(self.count)
        )
        self.uses = nn.ModuleList(
            nn.ModuleList(Use(stack) for _ in range(self.count))
            for _ in range(self.loops)
        )
        unscaled = self.base["residual_scale"] == "one"
        # The depth that counts is that of the layers as they are run, not the block's.
        self.scale = 1.0 if unscaled else self.base["layers"] ** -0.5

    @property
    def order(self) -> list[tuple[int, int]]:
        """Returns the use and the layer at each depth."""
        K, B = self.count, self.loops
        if self.stack["sharing"] == "sequence":
            return [(use, layer) for layer in range(K) for use in range(B)]
        # Only the last loop is turned round: it meets the block's last layer first.
        turned = self.stack["sharing"] == "cycle_rev" and B > 1
        order = [(use, layer) for use in range(B) for layer in range(K)]
        return order[:-K] + order[-K:][::-1] if turned else order

    def new_states(self) -> list[State]:
        """Returns what is known before the first token; by use, then by layer."""
        return [{} for _ in range(self.count * (1 if self.first else self.loops))]

    def forward(
        self,
        x: Tensor,
        tokens: Tokens,
        states: list[State] | None,
        streams: list[Tensor] | None,
    ) -> Tensor:
        """Runs the tokens; `streams` gets x after each depth."""
        again = self.gradient_checkpointing and self.training and states is None
        first: dict[int, Keys] = {}
        for use, layer in self.order:
            arguments = (x, use, layer, tokens, states, first.get(layer))
            if again:
                x, keys = checkpoint(self.run, *arguments, use_reentrant=False)
            else:
                x, keys = self.run(*arguments)
            first.setdefault(layer, keys)
            if streams is not None:
                streams.append(x)
        return x

    def loop(
        self,
        x: Tensor,
        b: int,
        tokens: Tokens,
        states: list[State] | None,
        first: dict[int, Keys],
    ) -> Tensor:
        """Runs loop b alone, from 0; `first` is empty before the first, which fills it.

        It holds the keys that loop 1 saw, by the layer of the block.
        """
        for layer in range(self.count):
            x, keys = self.run(x, b, layer, tokens, states, first.get(layer))
            first.setdefault(layer, keys)
        return x

    def propagate(self, x: Tensor, b: int, tokens: Tokens, states: list[State]) -> None:
        """Writes the keys and values that tokens which left after b loops lack."""
        # The last state of a token that left is the input of every deeper layer, as in
        # CALM (Schuster et al. 2022, section 3.3).
        for deeper in range(b, self.loops):
            for layer in range(self.count):
                part = self.part_of(deeper, layer)
                y = normed(part.attention_norm, x)
                self.keys(y, deeper, layer, tokens, states)

    def run(
        self,
        x: Tensor,
        b: int,
        layer: int,
        tokens: Tokens,
        states: list[State] | None,
        first: Keys | None,
    ) -> tuple[Tensor, Keys]:
        """Runs a layer: y = x + s attention(norm(x)), z = y + s mlp(norm'(y)).

        Args:
          first: the keys that the layer saw in loop 1; None: this is loop 1.

        Returns:
          z, and the keys that it saw.
        """
        part = self.part_of(b, layer)
        y = normed(part.attention_norm, x)
        # Deeper loops read what loop 1 made in this very call, its new tokens included.
        if self.first and first is not None:
            keys = first
        else:
            keys = self.keys(y, b, layer, tokens, states)
        mixed = self.attention(y, b, layer, tokens, keys)
        y = x + self.scale * normed(part.attention_post_norm, mixed)
        source = x if self.base["parallel_residual"] else y
        fed = self.mlp(normed(part.mlp_norm, source), b, layer)
        return y + self.scale * normed(part.mlp_post_norm, fed), keys

    def part_of(self, b: int, layer: int) -> Part:
        """Returns what has the norms and biases of a run."""
        tied = self.stack["tie_norms"]
        return self.blocks[layer] if tied else self.uses[b][layer]

    def product(self, x: Tensor, part: str, name: str, b: int, layer: int) -> Tensor:
        """Computes x W + (x A) B + bias of one of the layer's linear maps."""
        y = F.linear(x, getattr(self.blocks[layer], part)[name].weight)
        adapters = self.uses[b][layer].adapters
        if name in adapters:
            y = y + adapters[name](x)
        bias = getattr(self.part_of(b, layer), part)[name].bias
        return y if bias is None else y + bias

    def heads(
        self, x: Tensor, name: str, b: int, layer: int, positions: Tensor
    ) -> Tensor:
        """Returns queries, keys or values [B, T, H, E], normed and rotated."""
        a, of_use = kind_of(self.base, layer)[0], self.part_of(b, layer).attention
        y = self.product(x, "attention", name, b, layer)
        shape = (*y.shape[:2], -1, a["head_width"])
        norm = f"{name}_norm"
        # A norm over all heads comes before the cut into heads, one for each after it.
        if norm in of_use and a["qk_norm_over"] == "full":
            y = of_use[norm](y)
        y = y.reshape(shape)
        if norm in of_use and a["qk_norm_over"] != "full":
            y = of_use[norm](y)
        if name != "v" and is_kind(a["position"], "Rope"):
            y = rotate(y, rotation(positions, a["position"], a["head_width"]))
        return y

    def keys(
        self,
        x: Tensor,
        b: int,
        layer: int,
        tokens: Tokens,
        states: list[State] | None,
    ) -> Keys:
        """Returns keys and values, those of the state among them, and positions.

        A token that left early may have none here.
        """
        k, v = (self.heads(x, name, b, layer, tokens.positions) for name in "kv")
        # By loop first, then by layer; one per layer where deeper loops read loop 1's.
        number = layer if self.first else b * self.count + layer
        state = None if states is None else states[number]
        return recalled(k, v, tokens, state, kind_of(self.base, layer)[1])

    def attention(
        self, x: Tensor, b: int, layer: int, tokens: Tokens, keys: Keys
    ) -> Tensor:
        """Attends from x to keys at given positions."""
        # The pattern divides the block, so that each loop meets the same kinds.
        a, window = kind_of(self.base, layer)
        positions, bias = tokens.positions, None
        k, v, at = keys
        q = self.heads(x, "q", b, layer, positions)
        if is_kind(a["position"], "Alibi"):
            bias = alibi_bias(a["heads"], positions, at, a["position"])
        scale = a["scale"]
        o = attend(
            q,
            k,
            v,
            visible=visible_keys(positions, at, window),
            bias=bias,
            scale=1 / math.sqrt(a["head_width"]) if scale is None else scale,
            soft_cap=a["soft_cap"],
        )
        return self.product(o.flatten(2), "attention", "out", b, layer)

    def mlp(self, x: Tensor, b: int, layer: int) -> Tensor:
        """Computes act(up(x)), or act(gate(x)) * up(x) when gated, then down."""
        up, kind = self.product(x, "mlp", "up", b, layer), self.base["mlp"]["kind"]
        if "gate" not in self.blocks[layer].mlp:
            y = activation(kind, up)
        else:
            y = activation(kind, self.product(x, "mlp", "gate", b, layer)) * up
        return self.product(y, "mlp", "down", b, layer)

    def check_exits(self, missing: str) -> None:
        """Raises ValueError where tokens cannot leave early, or not with these keys."""
        if self.stack["sharing"] != "cycle" and self.loops > 1:
            raise ValueError("early exits need sharing 'cycle'")
        allowed = ("share",) if self.first else ("propagate", "skip")
        if missing not in allowed:
            raise ValueError(f"missing must be one of {allowed}, got {missing!r}")


@torch.no_grad()
def exit_logits(model: Any, ids: Tensor) -> Tensor:
    """Returns the logits after each loop: those of the model with that many loops."""
    layers, first = model.layers, {}
    layers.check_exits("share" if layers.first else "propagate")
    tokens = model.tokens(ids, None)
    x, exits = model.embedded(tokens), []
    for b in range(layers.loops):
        # Each loop continues from the one before, so one pass makes all exits.
        x = layers.loop(x, b, tokens, None, first)
        exits.append(model.logits(x))
    return torch.stack(exits)


@torch.no_grad()
def generate_early(
    model: Any,
    ids: Tensor,
    count: int,
    *,
    threshold: float,
    missing: str | None = None,
) -> tuple[Tensor, list[int]]:
    """Appends the likeliest tokens, each from the loop that was sure enough.

    Args:
      model: a model of this file.
      ids: [1, T], read through all loops.
      count: number of new tokens.
      threshold: a token leaves once the likeliest leads the next by more than this.
      missing: the keys and values that it then lacks: "propagate": made of its last
        state; "skip": none; "share": those of loop 1, if the model was trained so.
        None: share for such a model, else propagate.

    Returns:
      The ids, and the loops that made each new token.
    """
    layers = model.layers
    missing = missing or ("share" if layers.first else "propagate")
    layers.check_exits(missing)
    if len(ids) != 1:
        raise ValueError(f"generate_early: ids must be one row, got {len(ids)}")
    # The prompt runs all loops, so that no depth lacks keys and values of it.
    cache = model.new_cache(ids.shape[1] + count)
    token = model(ids, cache)[:, -1].argmax(dim=-1, keepdim=True)
    columns, loops = [ids, token], [layers.loops]
    while len(loops) < count:
        first: dict[int, Keys] = {}
        tokens = model.tokens(token, cache)
        x, b, logits = model.embedded(tokens), 0, None
        for b in range(1, layers.loops + 1):
            x = layers.loop(x, b - 1, tokens, cache.states, first)
            logits = model.logits(x)[:, -1]
            # The confidence is the likeliest token's lead over the next, in
            # probability.
            likeliest, next_ = logits.softmax(-1).topk(2).values[0]
            if likeliest - next_ > threshold:
                break
        # With "skip" the deeper layers keep no key for this position, and see none.
        if missing == "propagate":
            layers.propagate(x, b, tokens, cache.states)
        token = logits.argmax(dim=-1, keepdim=True)
        columns.append(token)
        loops.append(b)
    return torch.cat(columns, dim=1), loops


def build_layers(stack: Config) -> LoopedLayers:
    """Builds the block and what each of its runs owns."""
    return LoopedLayers(stack)


def position_of(stack: Config) -> Config | None:
    """Returns the config of positions; the decoder adds learned ones."""
    return stack["transformer"]["attention"]["position"]
