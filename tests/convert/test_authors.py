"""The authors' own names: with every wrapper's prefix, and refusals."""

import dataclasses

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from recurjax.convert.authors import from_authors
from recurjax.convert.formats import torch_file
from recurjax.convert.pieces import leaves
from recurjax.data.tokenizers import load_tokenizer
from recurjax.errors import UserError
from recurjax.layers.mlp import MlpConfig
from recurjax.layers.norm import NormConfig
from recurjax.model import ModelConfig
from recurjax.parameters import to_nested_dict
from recurjax.variants.latent_recurrent_transformer import MemoryConfig
from recurjax.variants.rat import presets
from recurjax.variants.recurrent_transformer import shipped_config
from tests.cli.commands import assert_refused, experiment_file, recurjax
from tests.data.tokenizers.tokenizer_files import plain_definition
from tests.golden import latent_layout
from tests.golden.cases import golden_cases, load, own_case
from tests.training.tiny_experiment import config as tiny
from tests.training.tiny_experiment import drawn
from tests.variants.rat import authors as rat_authors
from tests.variants.recurrent_transformer.golden_cases import (
    config_of,
    meta_of,
    nested,
)

RECURRENT = golden_cases("recurrent_transformer/rt_lm_*.npz")
RAT = golden_cases("rat/lm_*.npz")
OFFICIAL = own_case("latent_recurrent_transformer/lrt_official_*.npz")
LATENT = golden_cases(
    "latent_recurrent_transformer/*_baseline_*.npz",
    "latent_recurrent_transformer/lrt_official_*.npz",
)


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
    config, _, tensors = recurrent_case(own_case("recurrent_transformer/rt_lm_*.npz"))
    copy = "blocks.0.post_attention_block.ff_proj.weight"
    tensors[copy] = tensors["blocks.0.ff_proj.weight"] + 1
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="are one parameter with two"):
        from_authors(tmp_path, config)


def test_the_gate_of_their_swiglu_is_the_second_half(tmp_path):
    """OLMo's: x, gate = ff_proj(x).chunk(2); silu(gate) * x. No golden case has one."""
    config, _, tensors = recurrent_case(own_case("recurrent_transformer/rt_lm_*.npz"))
    stack = dataclasses.replace(config.stack, mlp=MlpConfig(kind="swiglu", width=6))
    config = dataclasses.replace(config, stack=stack)
    draw = np.random.default_rng(0).standard_normal
    D = stack.width
    for layer in range(stack.layers):
        for name, shape in (("ff_proj", (12, D)), ("ff_out", (D, 6))):
            tensors[f"blocks.{layer}.{name}.weight"] = draw(shape).astype(np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    mlp = to_nested_dict(from_authors(tmp_path, config))["stack"]["blocks"]["mlp"]
    for layer in range(stack.layers):
        both = tensors[f"blocks.{layer}.ff_proj.weight"]
        np.testing.assert_array_equal(mlp["w_up"][layer], both[:6].T)
        np.testing.assert_array_equal(mlp["w_gate"][layer], both[6:].T)


@pytest.mark.parametrize("path", RAT)
def test_rats_state_dict(path, tmp_path):
    case = load(path)
    config = rat_authors.model_config(rat_authors.meta_of(case))
    weights = rat_authors.read(case, "param")
    save_file(weights, tmp_path / "rat.safetensors")
    model = from_authors(tmp_path / "rat.safetensors", config)
    assert_parameters(model, rat_authors.model(weights, config))


def rat_case():
    case = load(own_case("rat/lm_*.npz"))
    config = rat_authors.model_config(rat_authors.meta_of(case))
    return config, rat_authors.read(case, "param")


def test_an_imported_rat_begins_documents_with_their_separator(tmp_path, monkeypatch):
    """Its weights never saw <s>: neither prompts nor CORE may begin with it."""
    file = experiment_file(
        tmp_path,
        "from recurjax.variants.rat import presets\n"
        "    rat = presets.rat(width=16, heads=2, chunk=4)\n"
        "    stack = presets.stack(rat, layers=1, width=16)\n"
        "    return changed(tiny(), model={'stack': stack, 'vocabulary': 259})",
    )
    (tmp_path / "tokenizer.json").write_text(plain_definition("<unk>", "<s>", "</s>"))
    monkeypatch.setattr(
        "recurjax.cli.convert.command.from_authors",
        lambda _, model, report: drawn(model),
    )
    code, _, err = recurjax(
        *("convert", "from-authors", tmp_path / "model.pt", tmp_path / "out"),
        *("--experiment", file, "--tokenizer", tmp_path / "tokenizer.json"),
    )
    assert (code, err) == (0, "")
    assert load_tokenizer(tmp_path / "tokenizer.json").names["bos_token"] == "<s>"
    kept = load_tokenizer(tmp_path / "out" / "tokenizer")
    assert (kept.bos, kept.eos) == (2, 2)


def test_rats_tied_head_is_a_copy_and_an_untied_one_has_its_own_name(tmp_path):
    config, weights = rat_case()
    want = rat_authors.model(weights, config)
    head = weights["embedding.wte.weight"]
    save_file(
        weights | {"head.lm_head.weight": head.copy()}, tmp_path / "a.safetensors"
    )
    assert_parameters(from_authors(tmp_path / "a.safetensors", config), want)
    other = weights | {"head.lm_head.weight": head + 1}
    save_file(other, tmp_path / "b.safetensors")
    with pytest.raises(UserError, match="are one parameter with two"):
        from_authors(tmp_path / "b.safetensors", config)
    untied = dataclasses.replace(config, tied_head=False)
    model = from_authors(tmp_path / "b.safetensors", untied)
    assert_parameters(model, want | {"w_head": (head + 1).T})


def test_unknown_names_are_all_listed(tmp_path):
    config, weights = rat_case()
    first = "backbone.layers.0.seq_layer.gate_bias"
    weights["backbone.layers.0.seq_layer.bias"] = weights.pop(first)
    weights["mystery"] = np.zeros(3, np.float32)
    save_file(weights, tmp_path / "rat.safetensors")
    with pytest.raises(UserError) as error:
        from_authors(tmp_path / "rat.safetensors", config)
    for part in (
        f"{first} is missing",
        "seq_layer.bias is not a tensor of this model",
        "mystery is not a tensor of this model",
    ):
        assert part in str(error.value)


def latent_case(path):
    """Returns model config, parameters as nested dicts, tensors by nanochat's names."""
    case = load(path)
    c = latent_layout.settings(case)
    of = latent_layout.official if c["use_interleaved"] else latent_layout.backbone
    config = of(c, len(case["param/lm_head.weight"]))
    tensors = rat_authors.read(case, "param")
    names = latent_layout.official_names
    return config, latent_layout.nested(tensors.get, config, names), tensors


@pytest.mark.parametrize("path", LATENT)
def test_nanochats_names_with_and_without_a_memory(path, tmp_path):
    config, want, tensors = latent_case(path)
    compiled = {f"_orig_mod.{name}": array for name, array in tensors.items()}
    save_file(compiled, tmp_path / "model.safetensors")
    assert_parameters(from_authors(tmp_path, config), want)


@pytest.mark.parametrize("key", ["model", "state_dict", "task", None])
def test_a_file_of_torch_save_holds_the_same(key, tmp_path):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    config, want, tensors = latent_case(
        own_case("latent_recurrent_transformer/lrt_official_*.npz")
    )
    state = {name: torch.from_numpy(array) for name, array in tensors.items()}
    torch.save(state if key is None else {key: state, "step": 3}, tmp_path / "m.pt")
    assert_parameters(from_authors(tmp_path / "m.pt", config), want)


def test_files_of_torch_that_hold_code_are_not_unpickled(tmp_path):
    """Of a file of `torch.save` torch reads tensors and plain containers
    (`weights_only=True`), and a file that asks for more is refused.
    """
    torch = pytest.importorskip("torch", reason="torch is not installed")
    config, _, _ = latent_case(
        own_case("latent_recurrent_transformer/lrt_official_*.npz")
    )
    torch.save({"model": {}, "run": Touching(tmp_path / "ran")}, tmp_path / "m.pt")
    with pytest.raises(UserError, match="must be a plain state dict, because"):
        from_authors(tmp_path / "m.pt", config)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (
            "Weights only load failed. Re-run `torch.load` with `weights_only` set to "
            "`False`.\nWeightsUnpickler error: Unsupported global: GLOBAL os.system",
            "it needs os.system",
        ),
        ("Weights only load failed. Re-run with weights_only=False", "it is damaged"),
        ("PytorchStreamReader failed finding central directory", "PytorchStreamReader"),
        ("", "it is damaged"),
    ],
)
def test_torch_s_advice_to_unpickle_is_not_passed_on(error, told):
    reason = torch_file.reason_of(RuntimeError(error))
    assert reason.startswith(told) and "weights_only" not in reason


class Touching:
    """Makes a file when it is unpickled."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return open, (str(self.file), "w")


def test_models_that_the_authors_code_cannot_have_are_refused(tmp_path):
    model = latent_layout.backbone(SIZES, 12)
    memory = MemoryConfig(sources=(2,))
    stack = dataclasses.replace(model.stack, memory=memory, value_gate_channels=0)
    with pytest.raises(
        UserError, match=r"lack tensors .*stack.memory.w_k, stack.memory"
    ):
        from_authors(tmp_path, dataclasses.replace(model, stack=stack))
    stack = dataclasses.replace(stack, value_gate_channels=4)
    with pytest.raises(UserError, match="value_gate_channels must be 0"):
        from_authors(tmp_path, dataclasses.replace(model, stack=stack))
    reversed_rat = presets.reversed_rat(width=16, heads=4, chunk=4, length=8)
    stack = presets.stack(reversed_rat, layers=1, width=16)
    with pytest.raises(UserError, match="no checkpoints with a layer of ReversedRat"):
        from_authors(tmp_path, ModelConfig(vocabulary=11, stack=stack))


SIZES = {
    **{"vocab_size": 11, "n_layer": 2, "n_head": 2, "n_kv_head": 1, "n_embd": 8},
    **{"sequence_len": 8, "window_pattern": "L"},
    **{"ve_gate_channels": 4},
}


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
    named = str(error.value).count(" is missing")
    # ln_f 2; a block: four norms' 8, five matrices and their biases.
    assert str(error.value).endswith(f"; and {2 + 2 * (8 + 10) - named} more")
    assert len(leaves(config)) == 1 + 2 + 8 + 7 + 7


def test_unknown_variants_and_files_are_refused(tmp_path):
    with pytest.raises(UserError, match="of the authors for TransformerConfig"):
        from_authors(tmp_path, tiny().model)
    config, _, _ = recurrent_case(own_case("recurrent_transformer/rt_lm_*.npz"))
    with pytest.raises(UserError, match="there is no checkpoint at"):
        from_authors(tmp_path / "none", config)
    (tmp_path / "model.safetensors").write_bytes(b"\x00" * 20)
    with pytest.raises(UserError, match="is not a complete safetensors file"):
        from_authors(tmp_path / "model.safetensors", config)
    (tmp_path / "model.pt").write_bytes(b"\x80\x04.")
    with pytest.raises(UserError, match="needs torch|holds no plain state dict"):
        from_authors(tmp_path / "model.pt", config)
    answer = recurjax(
        *("convert", "from-authors", tmp_path / "model.pt", tmp_path / "out"),
        *("--experiment", tmp_path / "none.py", "--tokenizer", tmp_path),
    )
    assert_refused(answer, "no experiment file at")
