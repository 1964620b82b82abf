"""A Transformer block with ALiBi in plain PyTorch; `torch_block.py` calls it."""

import json
import sys
import time
from collections.abc import Callable

import numpy as np
import torch  # pyright: ignore[reportMissingImports]

F = torch.nn.functional


def main() -> None:
    """Reads a question as JSON and answers it on the last line of standard output."""
    question = json.loads(sys.argv[1])
    torch.set_num_threads(question["threads"])
    arrays = {
        name: torch.from_numpy(array)
        for name, array in np.load(question["arrays"]).items()
    }
    x, z, slopes = (arrays.pop(name) for name in ("x", "z", "slopes"))
    block = Block(arrays, question["heads"], slopes, x.shape[1])

    def forward_backward() -> None:
        block.zero_grad()
        x.grad = None
        block(x).square().sum().backward()

    repeats = question["repeats"]
    with torch.no_grad():
        answer = {"difference": (block(x) - z).abs().max().item()}
        answer["forward"] = fastest(lambda: block(x), repeats)
    x.requires_grad_()
    answer["forward_backward"] = fastest(forward_backward, repeats)
    print(json.dumps(answer))


def fastest(call: Callable[[], object], repeats: int, warmup: int = 3) -> float:
    """Returns the milliseconds of the fastest call."""
    times = []
    for number in range(warmup + repeats):
        began = time.perf_counter()
        call()
        if number >= warmup:
            times.append(time.perf_counter() - began)
    return 1e3 * min(times)


class Block(torch.nn.Module):
    """y = x + attention(rmsnorm(x)), z = y + mlp(rmsnorm(y)), q and k normed whole."""

    def __init__(self, weights: dict, heads: int, slopes, length: int):
        """Takes the weights by their paths in recurjax; the bias is made once."""
        super().__init__()
        width, self.heads = weights["attention_norm.scale"].shape[0], heads
        qkv = [weights[f"attention.w_{one}"].reshape(width, -1) for one in "qkv"]
        self.w_qkv = torch.nn.Parameter(torch.cat(qkv, dim=1).contiguous())
        out = weights["attention.w_out"].reshape(-1, width)
        self.w_out = torch.nn.Parameter(out)
        self.w_up = torch.nn.Parameter(weights["mlp.w_up"])
        self.w_down = torch.nn.Parameter(weights["mlp.w_down"])
        names = ("attention_norm", "mlp_norm", "attention.q_norm", "attention.k_norm")
        self.scales = torch.nn.ParameterList([weights[f"{n}.scale"] for n in names])
        t = torch.arange(length)
        distance = t[:, None] - t
        bias = -slopes[:, None, None] * distance
        bias = bias.masked_fill(distance < 0, -torch.inf)
        self.register_buffer("bias", bias[None])

    def forward(self, x):
        """[B, T, D] to [B, T, D]."""
        before, between, of_q, of_k = self.scales
        q, k, v = (norm(x, before) @ self.w_qkv).chunk(3, dim=-1)
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in (norm(q, of_q), norm(k, of_k), v)
        )
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=self.bias)
        y = x + o.transpose(1, 2).flatten(2) @ self.w_out
        return y + F.gelu(norm(y, between) @ self.w_up) @ self.w_down


def norm(x, scale):
    """RMSNorm."""
    return F.rms_norm(x, scale.shape, scale, eps=1e-6)


if __name__ == "__main__":
    main()
