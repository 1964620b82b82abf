"""An attention layer in plain PyTorch; `torch_layers.py` calls it and says what for."""

import torch  # pyright: ignore[reportMissingImports]

attend = torch.nn.functional.scaled_dot_product_attention


def peer(arrays: dict, heads: int) -> tuple:
    """Returns what is timed, for `recurjax/bench/torch_side.py`."""
    x, y = arrays.pop("x"), arrays.pop("y")
    layer = Layer(arrays, heads)
    return layer, x, y, torch.sum, {"decode": layer.step_after(x)}


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

    @torch.no_grad()
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
