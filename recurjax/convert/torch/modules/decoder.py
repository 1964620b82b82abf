"""The language model around a variant's layers, loading it, and a check from outside.

model = load("the directory of this file")
logits = model(ids)                    # [B, T] to [B, T, V]
ids = model.generate(ids, 64)          # greedy, with a cache

python modeling_recurjax.py --ids ids.npy --out result.npz --new-tokens 64
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from layers import Config, Norm, State, is_kind, wide
from safetensors.torch import load_file
from torch import Tensor, nn
from variant import build_layers, position_of


class Cache:
    """Where all rows stand, and what each layer keeps."""

    def __init__(self, states: list[State]):
        self.position = 0
        self.states = states


class Decoder(nn.Module):
    """logits = head(norm(layers(embedding(ids)))) in the dtype of the parameters."""

    def __init__(self, config: Config):
        super().__init__()
        self.config, stack = config, config["stack"]
        multiple = config["pad_vocabulary_to"]
        # Rows are padded to a multiple; predictions leave the padding out below.
        rows = -(-config["vocabulary"] // multiple) * multiple
        # A stack made of a Transformer keeps its whole config inside its own.
        width = stack.get("transformer", stack)["width"]
        self.embedding = nn.Embedding(rows, width)
        position = position_of(stack)
        learned = is_kind(position, "LearnedPositions")
        self.position = nn.Embedding(position["length"], width) if learned else None
        self.layers = build_layers(stack)
        self.final_norm = Norm(config["final_norm"], width)
        tied = config["tied_head"]
        self.head = None if tied else nn.Linear(width, rows, bias=False)

    def new_cache(self) -> Cache:
        return Cache(self.layers.new_states())

    def forward(
        self,
        ids: Tensor,
        cache: Cache | None = None,
        states: list[Tensor] | None = None,
    ) -> Tensor:
        """Returns logits in at least float32.

        Args:
          ids: [B, T]; with a cache, the next T tokens of every row.
          cache: from `new_cache`; it is moved on.
          states: gets the residual stream before the first layer and after each.
        """
        # Learned positions and rotations count from where the cache stands.
        start = 0 if cache is None else cache.position
        x = self.embedded(ids, start)
        if states is not None:
            states.append(x)
        x = self.layers(x, ids, start, None if cache is None else cache.states, states)
        if cache is not None:
            cache.position += ids.shape[1]
        return self.logits(x)

    def embedded(self, ids: Tensor, start: int) -> Tensor:
        """Returns what the first layer reads at positions start, start + 1, ...."""
        x = self.embedding(ids)
        if self.config["embedding_scale"] == "sqrt_width":
            # The factor is rounded to the activations' dtype first, as Gemma does.
            x = x * torch.tensor(x.shape[-1] ** 0.5, dtype=x.dtype)
        if self.position is not None:
            x = x + self.position.weight[start : start + ids.shape[1]]
        return x

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
    def generate(self, ids: Tensor, count: int) -> Tensor:
        """Appends the `count` likeliest tokens, one after another."""
        cache, tokens = self.new_cache(), [ids]
        for _ in range(count):
            # The first turn reads the prompt, each later one the newest token alone.
            token = self(tokens[-1], cache)[:, -1].argmax(dim=-1, keepdim=True)
            tokens.append(token)
        return torch.cat(tokens, dim=1)


def load(directory: str | Path, device: Any = "cpu") -> Decoder:
    """Builds the model of a directory that recurjax wrote."""
    directory = Path(directory)
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    # Without memory of its own: the file's tensors take the parameters' places.
    with torch.device("meta"):
        model = Decoder(config["model"])
    weights = load_file(directory / "model.safetensors", device=str(device))
    model.load_state_dict(weights, strict=True, assign=True)
    return model.eval()


def main() -> None:
    """Writes logits, hidden states and greedy tokens for ids [B, T] of a file."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--directory", default=str(Path(__file__).parent))
    parser.add_argument("--ids", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--new-tokens", type=int, default=64)
    options = parser.parse_args()
    model = load(options.directory)
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
