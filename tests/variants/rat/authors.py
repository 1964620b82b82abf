"""The authors' weights as ours, and our layers and models for their cases."""

import json

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from recurjax.layers.initialization import InitConfig
from recurjax.layers.norm import Norm, NormConfig
from recurjax.model import Decoder, ModelConfig
from recurjax.parameters import from_nested_dict
from recurjax.variants.rat import MixerConfig, presets
from recurjax.variants.rat.mixers import RatMixer, RnnMixer
from tests.golden.cases import assert_known
from tests.golden.torch_layout import into_heads, out_of_heads, rat_attention

MIXERS = {"rat": RatMixer, "rnn": RnnMixer}
KNOWN = {
    *("kind", "B", "T", "d_model", "num_head", "d_head", "chunk_size", "window"),
    *("ngroups", "vocab", "num_layers", "n_prefill", "tie_embedding"),
}


def meta_of(case) -> dict:
    """Reads the switches and refuses those that no mixer has."""
    meta = json.loads(str(case["meta"]))
    assert_known(meta, KNOWN)
    return meta


def read(case, kind: str) -> dict[str, np.ndarray]:
    """Returns the arrays under `kind/` by the authors' names."""
    prefix = f"{kind}/"
    return {
        name.removeprefix(prefix): array
        for name, array in case.items()
        if name.startswith(prefix)
    }


def mixer_config(kind: str, meta) -> MixerConfig:
    """Returns the preset of one of their kinds of layer."""
    size = {"width": meta["d_model"], "heads": meta["num_head"]}
    if kind == "rat":
        return presets.rat(**size, chunk=meta["chunk_size"], groups=meta["ngroups"])
    if kind == "rnn":
        return presets.rnn(**size, length=meta.get("T", 32))
    assert kind in ("attention", "swa"), kind
    window = meta["window"] if kind == "swa" else None
    return presets.attention(**size, window=window)


def mixer(weights: dict[str, np.ndarray], config) -> dict:
    """Converts a RAT or RNN layer; rows of in_proj are gates z, value, gate g, q, k."""
    H, E = config.heads, config.head_width
    I, N = H * E, getattr(config, "groups", 0)
    z, v, g, q, k = np.split(
        weights["in_proj.weight"], np.cumsum([I, I, I, N * E]), axis=0
    )
    assert len(k) == N * E
    nested = {
        "output_gate": {"w_full": into_heads(z, H)},
        "forget_gate": {
            "w_full": into_heads(g, H),
            "b_forget": weights["gate_bias"].reshape(H, E),
        },
        "w_v": into_heads(v, H),
        "w_out": out_of_heads(weights["out_proj.weight"], H),
    }
    if N:
        nested |= {"w_q": into_heads(q, N), "w_k": into_heads(k, N)}
    return nested


def layer(weights: dict[str, np.ndarray], config) -> dict:
    """Converts one full layer: pre-norm and mixer."""
    scale = {"scale": weights["input_norm.weight"]}
    if not hasattr(config, "gate_horizon"):
        converted = rat_attention(weights.get, heads=config.heads)
        return {"mixer_norm": scale, "mixer": {"attention": converted["attention"]}}
    return {"mixer_norm": scale, "mixer": mixer(weights, config)}


def build_layer(case, meta) -> nnx.Dict:
    """Returns {mixer_norm, mixer} with the case's weights."""
    config = mixer_config(meta["kind"], meta)
    width = meta["d_model"]

    def make() -> nnx.Dict:
        module = MIXERS[meta["kind"]](
            config, width, InitConfig(), layer=0, layers=1, rngs=nnx.Rngs(0)
        )
        return nnx.Dict(mixer_norm=Norm(NormConfig(), width), mixer=module)

    nested = jax.tree.map(jnp.asarray, layer(read(case, "param"), config))
    return from_nested_dict(jax.eval_shape(make), nested)


def model_config(meta) -> ModelConfig:
    """Returns the preset of one of their models."""
    kinds = meta["kind"].split("_")
    pattern = [mixer_config(kind, meta) for kind in kinds]
    stack = presets.stack(*pattern, layers=meta["num_layers"], width=meta["d_model"])
    return ModelConfig(
        vocabulary=meta["vocab"], stack=stack, tied_head=meta["tie_embedding"]
    )


def model(weights: dict[str, np.ndarray], config: ModelConfig) -> dict:
    """Converts a full model."""
    P = len(config.stack.pattern)
    layers = []
    for number in range(config.stack.layers):
        prefix = f"backbone.layers.{number}."
        own = {
            name.removeprefix(prefix): array
            for name, array in weights.items()
            if name.startswith(prefix)
        }
        part = "seq_layer."
        mixing = {n.removeprefix(part): a for n, a in own.items() if n.startswith(part)}
        converted = layer(mixing, config.stack.pattern[number % P])
        converted["mlp_norm"] = {"scale": own["hidden_layer.ln.weight"]}
        converted["mlp"] = {
            "w_up": own["hidden_layer.fc1.weight"].T,
            "w_down": own["hidden_layer.fc2.weight"].T,
        }
        layers.append(converted)
    blocks = {
        str(place): jax.tree.map(lambda *x: np.stack(x), *layers[place::P])
        for place in range(P)
    }
    return {
        "w_embedding": weights["embedding.wte.weight"],
        "final_norm": {"scale": weights["backbone.ln.weight"]},
        "stack": {"blocks": blocks},
    }


def build_model(case, meta) -> Decoder:
    """Returns the decoder with the case's weights."""
    config = model_config(meta)
    nested = jax.tree.map(jnp.asarray, model(read(case, "param"), config))
    like = jax.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    return from_nested_dict(like, nested)
