"""The authors' cases as configs and parameters of ours; an unknown switch fails."""

import json

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from recurjax.layers.mlp import MlpConfig
from recurjax.layers.norm import NormConfig
from recurjax.layers.position import Alibi, LearnedPositions
from recurjax.parameters import from_nested_dict
from recurjax.variants.recurrent_transformer import RecurrentTransformerConfig
from tests.golden.cases import assert_known
from tests.golden.torch_layout import transformer_block

ACTIVATIONS = {"gelu": "gelu", "swiglu": "swiglu"}
NORMS = {"default": "layer", "rms": "rms"}
KNOWN = {
    *("block", "B", "N", "d_model", "n_heads", "mlp_hidden_size", "n_layers", "alibi"),
    *("alibi_bias_max", "norm", "eps", "qk_norm", "norm_after", "activation", "dtype"),
    *("clip_qkv", "include_bias", "vocab", "loss"),
}


def meta_of(case: dict, block: str = "recurrent_autograd") -> dict:
    """Reads the switches and refuses those that this kind of block does not have."""
    meta = json.loads(str(case["meta_json"]))
    assert_known(meta, KNOWN)
    assert meta["block"] == block
    assert not meta["norm_after"] and meta["clip_qkv"] is None
    return meta


def config_of(case: dict, meta: dict, **changes) -> RecurrentTransformerConfig:
    """Returns the authors' switches as a config."""

    def has(name: str) -> bool:
        return f"param.layer0.{name}" in case

    def norm_of(name: str) -> NormConfig:
        scale, bias = has(f"{name}.weight"), has(f"{name}.bias")
        return NormConfig(
            kind=NORMS[meta["norm"]], eps=meta["eps"], scale=scale, bias=bias
        )

    position = None
    if meta["alibi"]:
        position = Alibi(max_bias=meta["alibi_bias_max"])
    elif "param.wpe.weight" in case:
        position = LearnedPositions(length=case["param.wpe.weight"].shape[0])
    hidden = case["param.layer0.ff_out.weight"].shape[1]
    return RecurrentTransformerConfig(
        layers=meta["n_layers"],
        width=meta["d_model"],
        heads=meta["n_heads"],
        key_heads=meta["n_heads"],
        head_width=meta["d_model"] // meta["n_heads"],
        mlp=MlpConfig(
            kind=ACTIVATIONS[meta["activation"]],
            width=hidden,
            bias=has("ff_proj.bias"),
        ),
        norm=norm_of("attn_norm"),
        position=position,
        qk_norm=norm_of("q_norm") if meta["qk_norm"] else None,
        qkv_bias=has("q_proj.bias"),
        out_bias=has("attn_out.bias"),
        residual_scale="one",
        **changes,
    )


def nested(case: dict, meta: dict, kind: str) -> dict:
    """Returns the stack's parameters, or their gradients, as a nested dict."""

    def read(layer: int, name: str):
        prefix = f"{kind}.layer{layer}."
        if name.startswith("att_proj."):
            parts = [f"{prefix}{p}_proj.{name.split('.')[1]}" for p in ("q", "kv")]
            matches = [case[part] for part in parts if part in case]
            return np.concatenate(matches) if matches else None
        return case.get(prefix + name)

    blocks = [
        transformer_block(
            lambda name, layer=layer: read(layer, name),
            heads=meta["n_heads"],
            gated=ACTIVATIONS[meta["activation"]] == "swiglu",
        )
        for layer in range(meta["n_layers"])
    ]
    stack = {"blocks": jax.tree.map(lambda *layers: np.stack(layers), *blocks)}
    if f"{kind}.wpe.weight" in case:
        stack["position"] = {"w_position": case[f"{kind}.wpe.weight"]}
    return stack


def filled(make, nested_dict: dict, dtype: str):
    """Builds a module with the case's parameters."""
    like = jax.eval_shape(lambda: make(rngs=nnx.Rngs(0)))
    cast = jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), nested_dict)
    return from_nested_dict(like, cast)
