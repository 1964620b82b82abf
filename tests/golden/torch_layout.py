"""From torch's weights [out, in] to ours; gradients turn over the same way."""

from collections.abc import Callable

import numpy as np

Read = Callable[[str], np.ndarray | None]
"""Gives an array by its name in torch, or None where the case has none."""


def into_heads(weight: np.ndarray, heads: int) -> np.ndarray:
    """[H E, D] to [D, H, E]: head h owns rows h E to (h + 1) E."""
    return weight.T.reshape(weight.shape[1], heads, -1)


def out_of_heads(weight: np.ndarray, heads: int) -> np.ndarray:
    """[D, H E] to [H, E, D]."""
    return weight.T.reshape(heads, -1, weight.shape[0])


def transformer_block(read: Read, *, heads: int, gated: bool) -> dict:
    """Converts the Recurrent Transformer authors' baseline block."""
    attention = {"w_out": out_of_heads(_present(read("attn_out.weight")), heads)}
    weights = np.split(_present(read("att_proj.weight")), 3)
    for name, weight in zip("qkv", weights, strict=True):
        attention[f"w_{name}"] = into_heads(weight, heads)
    if (bias := read("att_proj.bias")) is not None:
        for name, part in zip("qkv", np.split(bias, 3), strict=True):
            attention[f"b_{name}"] = part.reshape(heads, -1)
    if (bias := read("attn_out.bias")) is not None:
        attention["b_out"] = bias
    for name in ("q_norm", "k_norm"):
        if scale_and_bias := _norm(read, name):
            attention[name] = scale_and_bias
    mlp = {"w_down": _present(read("ff_out.weight")).T}
    # The authors' SwiGLU is silu(second half) * first half.
    ups = ("up", "gate") if gated else ("up",)
    for name, weight in zip(
        ups, np.split(_present(read("ff_proj.weight")), len(ups)), strict=True
    ):
        mlp[f"w_{name}"] = weight.T
    if (bias := read("ff_proj.bias")) is not None:
        for name, part in zip(ups, np.split(bias, len(ups)), strict=True):
            mlp[f"b_{name}"] = part
    if (bias := read("ff_out.bias")) is not None:
        mlp["b_down"] = bias
    block = {"attention": attention, "mlp": mlp}
    for ours, theirs in (("attention_norm", "attn_norm"), ("mlp_norm", "ff_norm")):
        if scale_and_bias := _norm(read, theirs):
            block[ours] = scale_and_bias
    return block


def rat_attention(read: Read, *, heads: int) -> dict[str, dict[str, np.ndarray]]:
    """Converts RAT's attention layer: rows of in_proj are values, queries, keys."""
    v, q, k = np.split(_present(read("in_proj.weight")), 3)
    return {
        "norm": {"scale": _present(read("input_norm.weight"))},
        "attention": {
            "w_q": into_heads(q, heads),
            "w_k": into_heads(k, heads),
            "w_v": into_heads(v, heads),
            "w_out": out_of_heads(_present(read("out_proj.weight")), heads),
        },
    }


def _norm(read: Read, name: str) -> dict[str, np.ndarray]:
    parts = {"scale": read(f"{name}.weight"), "bias": read(f"{name}.bias")}
    return {part: array for part, array in parts.items() if array is not None}


def _present(array: np.ndarray | None) -> np.ndarray:
    assert array is not None, "the golden case lacks a weight that every case has"
    return array
