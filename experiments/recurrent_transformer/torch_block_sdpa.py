"""A Transformer block with ALiBi in plain PyTorch; `torch_block.py` calls it."""

import torch  # pyright: ignore[reportMissingImports]

F = torch.nn.functional


def peer(arrays: dict, heads: int) -> tuple:
    """Returns what is timed, for `recurjax/bench/torch_side.py`."""
    x, z, slopes = (arrays.pop(name) for name in ("x", "z", "slopes"))
    block = Block(arrays, heads, slopes, x.shape[1])
    return block, x, z, lambda z: z.square().sum(), {}


class Block(torch.nn.Module):
    """y = x + attention(rmsnorm(x)), z = y + mlp(rmsnorm(y)), q and k normed whole."""

    def __init__(self, weights: dict, heads: int, slopes, length: int):
        """Takes the weights by their paths in recurjax; the bias is made once."""
        super().__init__()
        width, self.heads = weights["attention_norm.scale"].shape[0], heads
        qkv = [weights[f"attention.w_{letter}"].reshape(width, -1) for letter in "qkv"]
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
