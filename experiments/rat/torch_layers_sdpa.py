"""An attention layer in plain PyTorch; `torch_layers.py` calls it and says what for."""

import json
import sys
import time
from collections.abc import Callable

import numpy as np
import torch  # pyright: ignore[reportMissingImports]

attend = torch.nn.functional.scaled_dot_product_attention


def main() -> None:
    """Reads a question as JSON and answers it on the last line of standard output."""
    question = json.loads(sys.argv[1])
    torch.set_num_threads(question["threads"])
    arrays = {
        name: torch.from_numpy(array)
        for name, array in np.load(question["arrays"]).items()
    }
    x, y = arrays.pop("x"), arrays.pop("y")
    layer = Layer(arrays, question["heads"])
    repeats = question["repeats"]

    def forward_backward() -> None:
        layer.zero_grad()
        x.grad = None
        layer(x).sum().backward()

    with torch.no_grad():
        answer = {"difference": (layer(x) - y).abs().max().item()}
        answer["forward"] = fastest(lambda: layer(x), repeats)
        step = layer.step_after(x)
        answer["decode"] = fastest(step, max(repeats, 20))
    x.requires_grad_()
    answer["forward_backward"] = fastest(forward_backward, repeats)
    print(json.dumps(answer))


def fastest(call: Callable[[], object], repeats: int, warmup: int = 5) -> float:
    """Returns the milliseconds of the fastest call."""
    times = []
    for number in range(warmup + repeats):
        began = time.perf_counter()
        call()
        if number >= warmup:
            times.append(time.perf_counter() - began)
    return 1e3 * min(times)


class Layer(torch.nn.Module):
    """x + SDPA(rmsnorm(x)) w_out, rotated by position in the half-split order."""

    def __init__(self, weights: dict, heads: int):
        """Takes w_q, w_k, w_v [D, H, E], w_out [H, E, D] and the norm's scale [D]."""
        super().__init__()
        width = len(weights["scale"])
        qkv = [weights[name].reshape(width, -1) for name in ("w_q", "w_k", "w_v")]
        self.scale = torch.nn.Parameter(weights["scale"])
        self.w_qkv = torch.nn.Parameter(torch.cat(qkv, dim=1).contiguous())
        self.w_out = torch.nn.Parameter(weights["w_out"].reshape(-1, width))
        self.heads = heads

    def forward(self, x):
        """Attends causally: [B, T, D] to [B, T, D]."""
        q, k, v = self.project(x, 0)
        return self.close(x, attend(q, k, v, is_causal=True))

    def step_after(self, x):
        """Returns a call that adds the last position to a cache of those before it."""
        _, keys, values = (part.contiguous() for part in self.project(x, 0))
        token, last = x[:, :1].contiguous(), x.shape[1] - 1

        def step():
            q, k, v = self.project(token, last)
            keys[:, :, last:], values[:, :, last:] = k, v
            return self.close(token, attend(q, keys, values))

        return step

    def project(self, x, start: int):
        """Returns q, k, v [B, H, T, E] of tokens at positions from `start`."""
        normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.scale
        parts = (normed @ self.w_qkv).chunk(3, dim=-1)
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts
        )
        return rotate(q, start), rotate(k, start), v

    def close(self, x, o):
        """Puts heads together, projects and adds the input."""
        return x + o.transpose(1, 2).flatten(2) @ self.w_out


def rotate(x, start: int):
    """Rotates pairs half a head apart, base 10000."""
    length, width = x.shape[-2:]
    theta = 10000.0 ** (-torch.arange(0, width, 2) / width)
    angles = torch.arange(start, start + length)[:, None] * theta
    cos, sin = angles.cos(), angles.sin()
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], dim=-1)


if __name__ == "__main__":
    main()
