"""An attention model in PyTorch that shares no code with recurjax, and its training.

    python torch_peer.py inputs.npz result.npz

`inputs.npz` has the initial weights by recurjax' names, ids and targets [N, B, T] of N
steps, and `heads`. `result.npz` gets each step's loss and gradient norm. Two layers of
pre-norm attention with RoPE and a GELU MLP, RMSNorm, an untied head, Adam with a linear
warm-up, and clipping to a norm of 1.
"""

import sys

import numpy as np
import torch
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

RATE, WARMUP, BETAS = 3e-3, 10, (0.9, 0.98)


def norm(x, scale):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * scale


def rotate(x):  # [B, H, T, E]
    half = x.shape[-1] // 2
    theta = 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = (torch.arange(x.shape[2])[:, None] * theta).to(x.dtype)
    x1, x2 = x[..., :half], x[..., half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], -1)


def logits(w, ids, heads):
    x = w["w_embedding"][ids]
    B, T, D = x.shape
    prefix = "stack.blocks.0."
    blocks = {n.removeprefix(prefix): p for n, p in w.items() if n.startswith(prefix)}
    for layer in range(blocks["mlp.w_up"].shape[0]):
        p = {name: leaves[layer] for name, leaves in blocks.items()}
        h = norm(x, p["attention_norm.scale"])
        q, k, v = (
            (h @ p[f"attention.w_{name}"].reshape(D, -1))
            .reshape(B, T, heads, -1)
            .transpose(1, 2)
            for name in "qkv"
        )
        h = scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        x = x + h.transpose(1, 2).reshape(B, T, -1) @ p["attention.w_out"].reshape(
            -1, D
        )
        h = norm(x, p["mlp_norm.scale"])
        x = x + gelu(h @ p["mlp.w_up"]) @ p["mlp.w_down"]
    return norm(x, w["final_norm.scale"]) @ w["w_head"]


def main(inputs, result):
    torch.set_num_threads(1)
    data = dict(np.load(inputs))
    heads, ids, targets = int(data.pop("heads")), data.pop("ids"), data.pop("targets")
    w = {name: torch.tensor(x).requires_grad_() for name, x in data.items()}
    adam = torch.optim.Adam(w.values(), lr=RATE, betas=BETAS, eps=1e-8)
    losses, norms = [], []
    for step in range(len(ids)):
        y = logits(w, torch.tensor(ids[step]).long(), heads).flatten(0, 1)
        loss = cross_entropy(
            y, torch.tensor(targets[step]).long().flatten(), ignore_index=-1
        )
        adam.zero_grad()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(w.values(), 1.0).item())
        adam.param_groups[0]["lr"] = RATE * min(1.0, step / WARMUP)
        adam.step()
        losses.append(loss.item())
    np.savez(result, losses=losses, norms=norms)


if __name__ == "__main__":
    main(*sys.argv[1:])
