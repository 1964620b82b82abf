"""The authors' own names: with every wrapper's prefix, and refusals."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from recurjax.convert.authors import from_authors
from recurjax.convert.pieces import leaves
from recurjax.errors import UserError
from recurjax.layers.mlp import MlpConfig
from recurjax.layers.norm import NormConfig
from recurjax.model import ModelConfig
from recurjax.parameters import to_nested_dict
from recurjax.variants.recurrent_transformer import shipped_config
from tests.cli.commands import assert_refused, recurjax
from tests.golden.cases import golden_cases, load
from tests.training.tiny_experiment import config as tiny
from tests.variants.rat import authors as rat_authors
from tests.variants.recurrent_transformer.golden_cases import (
    config_of,
    meta_of,
    nested,
)

RECURRENT = golden_cases("recurrent_transformer/rt_lm_*.npz")
RAT = golden_cases("rat/lm_*.npz")


def recurrent_case(path):
    """Returns model config, parameters as nested dicts, tensors by OLMo's names."""
    case = load(path)
    meta = meta_of(case)
    final_norm = NormConfig(
        kind="layer" if meta["norm"] == "default" else "rms", eps=meta["eps"]
    )
    config = ModelConfig(
        vocabulary=meta["vocab"], stack=config_of(case, meta), final_norm=final_norm
    )
    want = {
        "w_embedding": case["param.wte.weight"],
        "w_head": case["param.ff_out.weight"].T,
        "final_norm": {"scale": case["param.ln_f.weight"]},
        "stack": nested(case, meta, "param"),
    }
    tensors = {
        name.removeprefix("param.").replace("layer", "blocks.", 1)
        if name.startswith("param.layer")
        else name.removeprefix("param."): array.astype(np.float32)
        for name, array in case.items()
        if name.startswith("param.")
    }
    return config, want, tensors


def assert_parameters(model, want):
    want = jax.tree.map(lambda x: np.asarray(x, np.float32), want)
    jax.tree.map(np.testing.assert_array_equal, to_nested_dict(model), want)


PREFIXES = {
    "plain": ("", "blocks.{}."),
    "transformer": ("transformer.", "transformer.blocks.{}."),
    "captured by layer": (
        "transformer.",
        "transformer.blocks.{}.graphed_callable.block.",
    ),
    "captured whole": (
        "transformer.",
        "transformer.blocks.0.graphed_callable.blocks.{}.",
    ),
    "wrapped": ("module._orig_mod.transformer.", "module.transformer.blocks.{}."),
}


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("path", RECURRENT)
def test_a_recurrent_transformer_under_any_prefix(path, prefix, tmp_path):
    config, want, tensors = recurrent_case(path)
    top, block = PREFIXES[prefix]
    renamed = {}
    for name, array in tensors.items():
        head, _, rest = name.partition(".")
        if head != "blocks":
            renamed[top + name] = array
            continue
        layer, _, rest = rest.partition(".")
        renamed[block.format(layer) + rest] = array
        # The halves of a block list the parameters that they share with it.
        if rest.startswith(("attn_norm", "q_proj", "kv_proj")):
            renamed[block.format(layer) + "pre_attention_block." + rest] = array.copy()
    save_file(renamed, tmp_path / "model.safetensors")
    assert_parameters(from_authors(tmp_path, config), want)


def test_copies_of_one_parameter_that_differ_are_refused(tmp_path):
    config, _, tensors = recurrent_case(RECURRENT[0].values[0])
    copy = "blocks.0.post_attention_block.ff_proj.weight"
    tensors[copy] = tensors["blocks.0.ff_proj.weight"] + 1
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="are one parameter and differ"):
        from_authors(tmp_path, config)


@pytest.mark.parametrize("path", RAT)
def test_rats_state_dict(path, tmp_path):
    case = load(path)
    config = rat_authors.model_config(json.loads(str(case["meta"])))
    weights = rat_authors.read(case, "param")
    save_file(weights, tmp_path / "rat.safetensors")
    model = from_authors(tmp_path / "rat.safetensors", config)
    assert_parameters(model, rat_authors.model(weights, config))


def test_every_switch_of_the_recurrent_transformer_has_names(tmp_path):
    norm = NormConfig(kind="layer", bias=True)
    stack = dataclasses.replace(
        shipped_config(layers=2, width=8, heads=2),
        norm=norm,
        qk_norm=norm,
        qkv_bias=True,
        out_bias=True,
        mlp=MlpConfig(kind="swiglu", width=12, bias=True),
    )
    config = ModelConfig(vocabulary=11, stack=stack, final_norm=norm, tied_head=True)
    save_file({"wte.weight": np.zeros((11, 8), np.float32)}, tmp_path / "m.safetensors")
    with pytest.raises(UserError) as error:
        from_authors(tmp_path / "m.safetensors", config)
    missing = str(error.value).count(" is missing")
    # ln_f 2; a block: four norms' 8, five matrices and their biases.
    assert missing == 2 + 2 * (8 + 10)
    assert len(leaves(config)) == 1 + 2 + 8 + 7 + 7


def test_unknown_variants_and_files_are_refused(tmp_path):
    with pytest.raises(UserError, match="names of TransformerConfig are not known"):
        from_authors(tmp_path, tiny().model)
    config, _, _ = recurrent_case(RECURRENT[0].values[0])
    with pytest.raises(UserError, match="there is no checkpoint at"):
        from_authors(tmp_path / "none", config)
    (tmp_path / "model.pt").write_bytes(b"\x80\x04.")
    with pytest.raises(UserError, match="needs torch|holds no plain state dict"):
        from_authors(tmp_path / "model.pt", config)
    answer = recurjax(
        *("convert", "from-authors", tmp_path / "model.pt", tmp_path / "out"),
        *("--experiment", tmp_path / "none.py", "--tokenizer", tmp_path),
    )
    assert_refused(answer, "no experiment file at")
