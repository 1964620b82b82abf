"""The latent golden cases' configs and weights as ours; gradients turn over alike."""

import json
from dataclasses import replace

import numpy as np

from recurjax.layers.norm import NormConfig
from recurjax.model import ModelConfig
from recurjax.variants.latent_recurrent_transformer import (
    LatentRecurrentTransformerConfig,
    MemoryConfig,
)
from tests.golden.cases import assert_known
from tests.golden.torch_layout import into_heads, out_of_heads

FLOAT32_EPS = float(np.finfo(np.float32).eps)


KNOWN = {
    *("sequence_len", "vocab_size", "n_layer", "n_head", "n_kv_head", "n_embd"),
    *("window_pattern", "rope_base", "use_value_embeds", "ve_every_layer"),
    *("use_x0_residual", "use_resid_lambdas", "ve_gate_channels", "ve_gate_scale"),
    *("use_interleaved", "interleaved_num_passes"),
    *("proj", "residual_inject", "kv_inject", "memory_norm"),
    *("src_layer", "memory_source"),
}


def settings(case) -> dict:
    """Reads the switches and refuses those that the model does not have."""
    settings = json.loads(str(case["config"]))
    assert_known(settings, KNOWN)
    return settings


def backbone(c: dict, rows: int) -> ModelConfig:
    """The nanochat backbone of a case; `rows` of the padded vocabulary."""
    channels = c.get("ve_gate_channels", 32)
    every, used = c.get("ve_every_layer", True), c.get("use_value_embeds", True)
    stack = LatentRecurrentTransformerConfig(
        layers=c["n_layer"],
        width=c["n_embd"],
        heads=c["n_head"],
        key_heads=c["n_kv_head"],
        head_width=c["n_embd"] // c["n_head"],
        mlp_width=4 * c["n_embd"],
        vocabulary=rows,
        length=c["sequence_len"],
        windows=c["window_pattern"],
        rope_base=c.get("rope_base", 10000.0),
        value_embeddings=("all" if every else "alternating") if used else "none",
        value_gate_channels=channels,
        value_gate_scale=c.get("ve_gate_scale", 2.0),
        residual_scales=c.get("use_resid_lambdas", True),
        input_mixing="input" if c.get("use_x0_residual", True) else "none",
    )
    return ModelConfig(
        vocabulary=c["vocab_size"],
        pad_vocabulary_to=rows,
        stack=stack,
        final_norm=NormConfig(scale=False, eps=FLOAT32_EPS),
        logit_soft_cap=15.0,
    )


def official(c: dict, rows: int) -> ModelConfig:
    """The authors' release: layerwise, from the last layer, gates of all channels."""
    model = backbone(c | {"ve_every_layer": True, "use_value_embeds": True}, rows)
    memory = MemoryConfig(sources=(c["n_layer"],), projection="layerwise")
    stack = replace(model.stack, memory=memory, value_gate_channels=0)
    return replace(model, stack=stack)


def reference(c: dict, rows: int) -> ModelConfig:
    """The independent reference of the other variants."""
    model = backbone(c, rows)
    source, inject = c["memory_source"], c["kv_inject"]
    lags, combine = lags_of(source)
    sources = c["src_layer"]
    memory = MemoryConfig(
        sources=tuple(sources) if isinstance(sources, list) else (sources,),
        normed=c["memory_norm"],
        lags=lags,
        combine=combine,
        projection=c["proj"],
        keys=inject in ("k", "kv"),
        values=inject in ("v", "kv"),
        residual=c["residual_inject"],
    )
    return replace(model, stack=replace(model.stack, memory=memory))


def lags_of(source: str) -> tuple[tuple[int, ...], str]:
    """From lag2 to (2,), from avg4 to the learned average of 1..4, from self to 0."""
    if source.startswith("avg"):
        return tuple(range(1, int(source.removeprefix("avg")) + 1)), "average"
    parts = source.split("+")
    lags = [0 if p == "self" else int(p.removeprefix("lag")) for p in parts]
    return tuple(lags), "sum"


def nested(read, model: ModelConfig, names) -> dict:
    """Builds the parameters: `names(l)` gives layer l's, `names(None)` the others'."""
    stack = model.stack
    P, R = stack.pattern, stack.layers // stack.pattern
    layers = [names(read, l, stack) for l in range(stack.layers)]
    tree = names(read, None, stack)
    blocks = {}
    for p in range(P):
        group = layers[p::P]
        assert len(group) == R
        blocks[str(p)] = _stacked(group)
    stack_tree = {"blocks": blocks} | tree.pop("stack", {})
    return tree | {"stack": stack_tree}


def _stacked(trees: list) -> dict:
    first = trees[0]
    if isinstance(first, dict):
        return {name: _stacked([tree[name] for tree in trees]) for name in first}
    return np.stack(trees)


def official_names(read, layer: int | None, stack) -> dict:
    """nanochat's names; with a memory those of the authors' release."""
    H, K = stack.heads, stack.key_heads
    if layer is None:
        head = read("lm_head.weight").T
        return {"w_embedding": read("transformer.wte.weight"), "w_head": head}
    at = f"transformer.h.{layer}."
    tree = _block(
        {
            name: read(f"{at}{path}.weight")
            for name, path in {
                "q": "attn.c_q",
                "k": "attn.c_k",
                "v": "attn.c_v",
                "o": "attn.c_proj",
                "fc": "mlp.c_fc",
                "pr": "mlp.c_proj",
            }.items()
        },
        H,
        K,
    )
    if stack.residual_scales:
        tree["residual_scale"] = read("resid_lambdas")[layer]
    if stack.input_mixing != "none":
        tree["input_scale"] = read("x0_lambdas")[layer]
    if stack.memory is None:
        if stack.layer_value_embeddings[layer]:
            table = read(f"value_embeds.{layer}.weight")
            tree["w_value_embedding"] = table.reshape(len(table), K, -1)
            tree["w_value_gate"] = read(f"{at}attn.ve_gate.weight").T
        return tree
    table = read(f"interleaved_init_value_embeds.{layer}.weight")
    gates = read(f"{at}attn.triple_gate.weight")  # [3 K, D]: local, memory, value
    tree["w_value_embedding"] = table.reshape(len(table), K, -1)
    tree["w_mix"] = gates[: 2 * K].T.reshape(-1, 2, K)
    tree["w_value_gate"] = gates[2 * K :].T
    tree["memory_scale"] = read("interleaved_lambdas")[layer]
    tree["memory"] = {
        "w_k": into_heads(read(f"interleaved_key_projections.{layer}.W_v.weight"), K),
        "w_v": into_heads(read(f"interleaved_projections.{layer}.W_v.weight"), K),
    }
    return tree


def reference_names(read, layer: int | None, stack) -> dict:
    """The names of the independent reference."""
    H, K, memory = stack.heads, stack.key_heads, stack.memory
    if layer is None:
        tree = {"w_embedding": read("wte"), "w_head": read("lm_head").T, "stack": {}}
        if memory.gated and memory.projection == "shared":
            tree["stack"]["memory"] = _sides(read, memory, K, "")
        if len(memory.lags) > 1 and memory.combine == "average":
            tree["stack"]["lag_logits"] = read("lag_w")
        if len(memory.sources) > 1:
            tree["stack"]["source_logits"] = read("src_w")
        return tree
    sides = ("q", "k", "v", "o", "fc", "pr")
    tree = _block({name: read(f"{name}{layer}") for name in sides}, H, K)
    tree["residual_scale"] = read("resid")[layer]
    tree["input_scale"] = read("x0")[layer]
    if stack.layer_value_embeddings[layer]:
        table = read(f"ve{layer}")
        tree["w_value_embedding"] = table.reshape(len(table), K, -1)
        tree["w_value_gate"] = read(f"vg{layer}").T
    if memory.residual:
        tree["memory_scale"] = read("gamma")[layer]
    if memory.gated:
        tree["w_mix"] = read(f"g{layer}").T.reshape(-1, 2, K)
        if memory.projection == "layerwise":
            tree["memory"] = _sides(read, memory, K, str(layer))
    return tree


def _sides(read, memory, K: int, layer: str) -> dict:
    wanted = {"k": memory.keys, "v": memory.values}
    return {
        f"w_{side}": into_heads(read(f"rec_{side}{layer}"), K)
        for side, there in wanted.items()
        if there
    }


def _block(w: dict, H: int, K: int) -> dict:
    return {
        "w_q": into_heads(w["q"], H),
        "w_k": into_heads(w["k"], K),
        "w_v": into_heads(w["v"], K),
        "w_out": out_of_heads(w["o"], H),
        "mlp": {"w_up": w["fc"].T, "w_down": w["pr"].T},
    }
