"""The language model around a variant's layers, loading it, and a check from outside.

model = load("the directory of this file")
logits = model(ids)                    # [B, T] to [B, T, V]
logits = model(ids, mask=mask)         # [B, T], False or 0 at pads, wherever they are
ids = model.generate(ids, 64)          # greedy, with a cache

python decoder_recurjax.py --ids ids.npy --out result.npz --new-tokens 64
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from layers import Config, Norm, Tokens, is_kind, wide
from safetensors.torch import load_file
from torch import Tensor, nn
from variant import build_layers, position_of


class Cache:
    """Each row's position, and what each layer keeps of its tokens.

    Attributes:
      states: one for each layer.
      position: [B], the tokens that each row has read; None: before the first call.
      columns: those and the pads among them.
      capacity: positions that the states have room for; it doubles when they are full.
    """

    def __init__(self, states: list[dict[str, Tensor]], capacity: int = 0):
        self.states, self.capacity = states, capacity
        self.position: Tensor | None = None
        self.columns = 0

    def extend(self, count: int) -> None:
        """Makes room for `count` further columns and counts them."""
        self.columns += count
        if self.columns > self.capacity:
            self.capacity = max(self.columns, 2 * self.capacity, 64)

    def reset(self) -> None:
        """Forgets all tokens."""
        self.position, self.columns = None, 0
        for state in self.states:
            state.clear()

    def take(self, rows: Tensor) -> None:
        """Puts the given rows in the place of all rows, as beams are reordered."""
        if self.position is not None:
            self.position = self.position.index_select(0, rows)
        for state in self.states:
            for name, value in state.items():
                state[name] = value.index_select(0, rows)


class Decoder(nn.Module):
    """logits = head(norm(layers(embedding(ids)))) in the dtype of the parameters."""

    def __init__(self, config: Config):
        super().__init__()
        self.config, stack = config, config["stack"]
        multiple = config["pad_vocabulary_to"]
        # Rows are padded to a multiple; predictions leave the padding out below.
        rows = -(-config["vocabulary"] // multiple) * multiple
        # A stack made of a Transformer keeps its full config inside its own.
        width = stack.get("transformer", stack)["width"]
        self.embedding = nn.Embedding(rows, width)
        position = position_of(stack)
        learned = is_kind(position, "LearnedPositions")
        self.position = nn.Embedding(position["length"], width) if learned else None
        self.layers = build_layers(stack)
        self.final_norm = Norm(config["final_norm"], width)
        tied = config["tied_head"]
        self.head = None if tied else nn.Linear(width, rows, bias=False)

    def new_cache(self, capacity: int = 0) -> Cache:
        """Returns what the model knows before the first token; see `Cache`."""
        return Cache(self.layers.new_states(), capacity)

    def forward(
        self,
        ids: Tensor,
        cache: Cache | None = None,
        states: list[Tensor] | None = None,
        *,
        mask: Tensor | None = None,
        last: int = 0,
    ) -> Tensor:
        """Returns logits in at least float32; a pad has those of the token before it.

        Args:
          ids: [B, T]; with a cache, the next T columns of every row.
          cache: from `new_cache`; it is moved on.
          states: gets the residual stream before the first layer and after each.
          mask: [B, T] or more, of which the last T count: 0 at pads, which may be
            anywhere, advance no state and have no position; None: no pads.
          last: columns that logits are wanted of, the last ones; 0: all.
        """
        back = None
        if mask is not None:
            mask = mask[:, -ids.shape[1] :].bool()
            # The tokens of each row move to its front, in order, and the pads behind.
            order = mask.logical_not().byte().argsort(dim=1, stable=True)
            ids, real = ids.gather(1, order), mask.gather(1, order)
            back = (mask.cumsum(dim=1) - 1).clamp(min=0)
            tokens = self.tokens(ids, cache, real)
        else:
            tokens = self.tokens(ids, cache)
        x = self.embedded(tokens)
        streams = None if states is None else [x]
        x = self.layers(x, tokens, None if cache is None else cache.states, streams)
        streams = [x] if streams is None else [*streams, x]
        if back is not None:
            streams = [y.gather(1, back[..., None].expand_as(y)) for y in streams]
        if states is not None:
            states.extend(streams[:-1])
        return self.logits(streams[-1][:, -last:])

    def tokens(
        self, ids: Tensor, cache: Cache | None, real: Tensor | None = None
    ) -> Tokens:
        """Returns the tokens of a call at their positions; a cache is moved on."""
        if cache is None:
            start = torch.zeros(1, dtype=torch.long, device=ids.device)
            return Tokens(ids, start, real, first=True, capacity=ids.shape[1])
        first = cache.position is None
        start = ids.new_zeros(len(ids)) if first else cache.position
        cache.extend(ids.shape[1])
        tokens = Tokens(ids, start, real, first=first, capacity=cache.capacity)
        cache.position = tokens.end
        return tokens

    def embedded(self, tokens: Tokens) -> Tensor:
        """Returns what the first layer reads."""
        x = self.embedding(tokens.ids)
        if self.config["embedding_scale"] == "sqrt_width":
            # The factor is rounded to the activations' dtype first, as Gemma does.
            x = x * torch.tensor(x.shape[-1] ** 0.5, dtype=x.dtype)
        return x if self.position is None else x + self.position(tokens.positions)

    def logits(self, x: Tensor) -> Tensor:
        """Returns head(norm(x)) in at least float32."""
        x = self.final_norm(x)
        # A tied head multiplies by the rows of the embedding itself.
        head = self.embedding if self.head is None else self.head
        logits = torch.nn.functional.linear(x, head.weight)
        logits = logits.to(wide(logits.dtype))[..., : self.config["vocabulary"]]
        cap = self.config["logit_soft_cap"]
        return logits if cap is None else cap * torch.tanh(logits / cap)

    @torch.no_grad()
    def generate(self, ids: Tensor, count: int, mask: Tensor | None = None) -> Tensor:
        """Appends the `count` likeliest tokens, one after another."""
        cache, columns = self.new_cache(ids.shape[1] + count), [ids]
        for _ in range(count):
            # The first turn reads the prompt, each later one the newest token alone.
            logits = self(columns[-1], cache, mask=mask, last=1)
            columns.append(logits[:, -1].argmax(dim=-1, keepdim=True))
            mask = None
        return torch.cat(columns, dim=1)


def load(directory: str | Path, device: Any = "cpu") -> Decoder:
    """Builds the model of a directory that recurjax wrote, in its matrices' dtype."""
    directory = Path(directory)
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    # Without cache of its own: the file's tensors take the parameters' places.
    with torch.device("meta"):
        model = Decoder(config["model"])
    weights = load_file(directory / "model.safetensors", device=str(device))
    # transformers writes the names of the model that it has around this one.
    weights = {name.removeprefix("model."): w for name, w in weights.items()}
    model.load_state_dict(weights, strict=True, assign=True)
    # Vectors are stored in float32 next to matrices in bfloat16.
    return model.to(model.embedding.weight.dtype).eval()


def main() -> None:
    """Writes logits, hidden states and greedy tokens for ids [B, T] of a file."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--directory", default=str(Path(__file__).parent))
    parser.add_argument("--ids", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--new-tokens", type=int, default=64)
    options = parser.parse_args()
    # Rounding to bfloat16 would hide a wrong layer.
    model = load(options.directory).float()
    ids = torch.from_numpy(np.load(options.ids)).long()
    states: list[Tensor] = []
    with torch.no_grad():
        logits = model(ids, states=states)
        # As transformers counts them: the last one is after the final norm.
        states[-1] = model.final_norm(states[-1])
    np.savez(
        options.out,
        logits=logits.numpy(),
        states=torch.stack(states).numpy(),
        greedy=model.generate(ids, options.new_tokens)[:, ids.shape[1] :].numpy(),
        version=torch.__version__,
    )


if __name__ == "__main__":
    main()
