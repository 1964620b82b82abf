"""PyTorch's sides of `compare_with_torch.py`, which runs this file in its interpreter.

    python torch_peers.py PEER QUESTION

That interpreter has torch and numpy and nothing of recurjax, so this file imports none
of it. A function of `PEERS` makes a module from our arrays; the last line of standard
output is JSON: milliseconds by pass, and how far the output is from ours.
"""

import contextlib
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]

F = torch.nn.functional
FEWEST_STEPS = 20
"""How often a decode step is timed at least: it is over too soon for fewer."""

LONGEST_BACKWARD = 256
"""Positions of transformers' mixer: each one's gradient fills arrays of all, minutes a
call at 2,048."""

Answer = tuple[dict[str, Any], dict[str, Callable[[], object]]]
"""What is compared, and calls by pass."""


def main() -> None:
    """Answers one question."""
    peer, question = sys.argv[1], json.loads(sys.argv[2])
    torch.set_num_threads(question["threads"])
    torch.manual_seed(0)
    loaded = np.load(question["arrays"]).items()
    arrays = {name: torch.from_numpy(array) for name, array in loaded}
    answer, calls = PEERS[peer](arrays, question)
    for what, call in calls.items():
        fewest = FEWEST_STEPS if what == "decode" else 1
        answer[what] = fastest(call, max(question["repeats"], fewest))
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


def layer_calls(module, x, y, loss=torch.sum) -> Answer:
    """Compares a layer's output with ours; `loss` None: no backward pass is timed."""
    forward = torch.no_grad()(lambda: module(x))
    answer = {"difference": (forward() - y).abs().max().item()}
    calls: dict[str, Callable[[], object]] = {"forward": forward}
    with_gradient = x.clone().requires_grad_()

    def forward_backward() -> None:
        module.zero_grad()
        with_gradient.grad = None
        loss(module(with_gradient)).backward()

    if loss is not None:
        calls["forward_backward"] = forward_backward
    return answer, calls


def attention(arrays: dict, question: dict) -> Answer:
    """An attention layer, forward and backward, and one token after T - 1."""
    x, y = arrays.pop("x"), arrays.pop("y")
    layer = AttentionLayer(arrays, question["shape"]["H"])
    answer, calls = layer_calls(layer, x, y)
    return answer, calls | {"decode": layer.step_after(x)}


class AttentionLayer(torch.nn.Module):
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
        return self.close(x, F.scaled_dot_product_attention(q, k, v, is_causal=True))

    @torch.no_grad()
    def step_after(self, x):
        """Returns a call that adds the last position to a cache of those before it."""
        _, keys, values = (part.contiguous() for part in self.project(x, 0))
        token, last = x[:, :1].contiguous(), x.shape[1] - 1

        @torch.no_grad()
        def step():
            q, k, v = self.project(token, last)
            keys[:, :, last:], values[:, :, last:] = k, v
            return self.close(token, F.scaled_dot_product_attention(q, keys, values))

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


def transformer(arrays: dict, question: dict) -> Answer:
    """A Transformer block with ALiBi."""
    x, y, slopes = (arrays.pop(name) for name in ("x", "y", "slopes"))
    block = TransformerBlock(arrays, question["shape"]["H"], slopes, x.shape[1])
    return layer_calls(block, x, y, squares)


def squares(y):
    """A loss whose gradient is not the same everywhere."""
    return y.square().sum()


class TransformerBlock(torch.nn.Module):
    """y = x + attention(rmsnorm(x)), z = y + mlp(rmsnorm(y)), normed q, k."""

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


def tiled(arrays: dict, question: dict) -> Answer:
    """The authors' tiled layer, from a checkout of their code on the module path.

    It is not a copy of anything of theirs: the layer is made by their class, from their
    configuration, with our weights put in.
    """
    x, y = arrays.pop("x"), arrays.pop("y")
    layer = TiledLayer(arrays, question["shape"]["H"], x.shape[1])
    return layer_calls(layer, x, y, squares)


class TiledLayer(torch.nn.Module):
    """Their layer of one input, [B, T, D] to [B, T, D]."""

    def __init__(self, weights: dict, heads: int, length: int):
        """Takes the weights by their paths in recurjax."""
        from olmo.config import (  # pyright: ignore[reportMissingImports]
            ActivationType,
            BlockType,
            LayerNormType,
            ModelConfig,
        )
        from olmo.model import (  # pyright: ignore[reportMissingImports]
            BufferCache,
            OLMoRecurrentBlockTiled,
            alibi_attention_bias,
        )

        super().__init__()
        width, inner = weights["mlp.w_up"].shape
        config = ModelConfig(
            d_model=width,
            n_heads=heads,
            n_kv_heads=heads,
            mlp_hidden_size=inner,
            n_layers=1,
            max_sequence_length=length,
            alibi=True,
            activation_type=ActivationType.gelu,
            block_type=BlockType.recurrent,
            layer_norm_type=LayerNormType.rms,
            layer_norm_eps=1e-6,
            attention_layer_norm=True,
            include_bias=False,
            bias_for_layer_norm=False,
            attention_dropout=0.0,
            residual_dropout=0.0,
            # As their configurations have it: MLPs recomputed in four parts.
            bwd_mlp_chunks=4,
            init_device="cpu",
        )
        self.block = OLMoRecurrentBlockTiled(0, config, BufferCache())
        flat = lambda name: weights[name].reshape(width, -1).T  # noqa: E731
        theirs = {
            "q_proj": flat("attention.w_q"),
            "kv_proj": torch.cat([flat("attention.w_k"), flat("attention.w_v")]),
            "attn_out": weights["attention.w_out"].reshape(-1, width).T,
            "ff_proj": weights["mlp.w_up"].T,
            "ff_out": weights["mlp.w_down"].T,
            "attn_norm": weights["attention_norm.scale"],
            "ff_norm": weights["mlp_norm.scale"],
            "q_norm": weights["attention.q_norm.scale"],
            "k_norm": weights["attention.k_norm.scale"],
        }
        for name, weight in theirs.items():
            target = getattr(self.block, name).weight
            target.data.copy_(weight.reshape(target.shape))
        self.bias = alibi_attention_bias(length, config, torch.device("cpu"))

    def forward(self, x):
        """Runs all positions."""
        return self.block(x, attention_bias=self.bias)[0]


def mamba(arrays: dict, question: dict) -> Answer:
    """Transformers' Mamba mixer with our weights."""
    from transformers.models.mamba.configuration_mamba import (  # pyright: ignore[reportMissingImports]
        MambaConfig,
    )
    from transformers.models.mamba.modeling_mamba import (  # pyright: ignore[reportMissingImports]
        MambaMixer,
    )

    x, y = arrays.pop("x"), arrays.pop("y")
    taps, channels = arrays["w_conv"].shape
    width = x.shape[-1]
    config = MambaConfig(
        hidden_size=width,
        state_size=arrays["a_log"].shape[1],
        conv_kernel=taps,
        expand=channels // width,
        time_step_rank=len(arrays["w_dt"]),
        use_conv_bias=True,
        use_bias=False,
    )
    mixer = MambaMixer(config, layer_idx=0)
    mixer.load_state_dict(
        {
            # PyTorch's Linear keeps [out, in]; the first half goes to the recurrence.
            "in_proj.weight": torch.cat([arrays["w_u"], arrays["w_z"]], dim=1).T,
            "conv1d.weight": arrays["w_conv"].T[:, None],
            "conv1d.bias": arrays["b_conv"],
            "x_proj.weight": arrays["w_x"].T,
            "dt_proj.weight": arrays["w_dt"].T,
            "dt_proj.bias": arrays["b_dt"],
            "A_log": arrays["a_log"],
            "D": arrays["skip"],
            "out_proj.weight": arrays["w_back"].T,
        }
    )
    loss = torch.sum if x.shape[1] <= LONGEST_BACKWARD else None
    return layer_calls(mixer, x, y, loss)


def nanochat(arrays: dict, question: dict) -> Answer:
    """Nanochat's model and training step, from a checkout on the module path."""
    shape, heads = question["shape"], int(arrays["heads"])
    with contextlib.redirect_stdout(sys.stderr):  # It prints when imported.
        from nanochat.gpt import (  # pyright: ignore[reportMissingImports]
            GPT,
            GPTConfig,
        )

        model = GPT(
            GPTConfig(
                sequence_len=shape["T"],
                vocab_size=shape["V"],
                n_layer=shape["L"],
                n_head=heads,
                n_kv_head=heads,
                n_embd=shape["D"],
            )
        )
        model.init_weights()
        optimizer = model.setup_optimizer()
    compiled = model if question["eager"] else torch.compile(model, dynamic=False)
    ids = torch.randint(shape["V"], (shape["B"], shape["T"] + 1))
    inputs, targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    def forward_backward() -> None:
        compiled(inputs, targets).backward()
        model.zero_grad(set_to_none=True)

    def train_step() -> None:
        compiled(inputs, targets).backward()
        optimizer.step()
        model.zero_grad(set_to_none=True)

    parameters = sum(weight.numel() for weight in model.parameters())
    calls: dict[str, Callable[[], object]] = {
        "forward_backward": forward_backward,
        "train_step": train_step,
    }
    return {"parameters": parameters}, calls


PEERS = {
    "attention": attention,
    "transformer": transformer,
    "tiled": tiled,
    "mamba": mamba,
    "nanochat": nanochat,
}


if __name__ == "__main__":
    main()
