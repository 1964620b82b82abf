"""Cases of one position, made from the equations: there attention is its own value."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

SIZES = {"B": 2, "N": 1, "d_model": 8, "n_heads": 2, "mlp_hidden_size": 12}
SWITCHES = {
    **{"n_layers": 1, "alibi": True, "alibi_bias_max": 8.0, "norm": "default"},
    **{"eps": 1e-5, "qk_norm": True, "norm_after": False, "activation": "gelu"},
    **{"clip_qkv": None, "include_bias": False, "dtype": "float64"},
}


def write_one_position(path: Path, block: str) -> Path:
    """Writes a layer of either kind in the authors' format and returns the path.

    The softmax over one position is 1, so the layer of the Recurrent Transformer and
    the Transformer's are the same; queries and keys have gradients of zero.
    """
    draw = np.random.default_rng(0).normal
    B, D, F = SIZES["B"], SIZES["d_model"], SIZES["mlp_hidden_size"]
    weights = {
        **{f"{name}.weight": draw(size=(D, D)) for name in ("q", "k", "v", "attn_out")},
        **{"ff_proj.weight": draw(size=(F, D)), "ff_out.weight": draw(size=(D, F))},
        **{
            f"{name}_norm.weight": 1 + 0.3 * draw(size=D)
            for name in ("attn", "ff", "q", "k")
        },
    }
    x, g = draw(size=(2, B, 1, D))
    with jax.enable_x64(True):
        (loss, z), (dw, dx) = jax.value_and_grad(_loss, argnums=(0, 1), has_aux=True)(
            weights, jnp.asarray(x), g
        )
    case = {"x": x, "g": g, "z": z, "loss": loss, "grad.x": dx}
    for kind, values in (("param", weights), ("grad", jax.device_get(dw))):
        for name, value in _authors(values, block).items():
            case[f"{kind}.layer0.{name}"] = value
    case["bias"] = np.zeros((1, SIZES["n_heads"], 1, 1))
    meta = {"block": block, **SIZES, **SWITCHES}
    np.savez(path, meta_json=json.dumps(meta), **case)
    return path


def _loss(w, x, g):
    y = x + _norm(x, w["attn_norm.weight"]) @ w["v.weight"].T @ w["attn_out.weight"].T
    up = _norm(y, w["ff_norm.weight"]) @ w["ff_proj.weight"].T
    z = y + jax.nn.gelu(up, approximate=False) @ w["ff_out.weight"].T
    return jnp.sum(z * g), z


def _norm(x, scale):
    x = x - x.mean(-1, keepdims=True)
    return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + SWITCHES["eps"]) * scale


def _authors(w, block: str) -> dict[str, np.ndarray]:
    q, k, v = (w[f"{name}.weight"] for name in "qkv")
    rest = {name: array for name, array in w.items() if name[1:] != ".weight"}
    if block == "sequential":
        return {"att_proj.weight": np.concatenate([q, k, v]), **rest}
    return {"q_proj.weight": q, "kv_proj.weight": np.concatenate([k, v]), **rest}
