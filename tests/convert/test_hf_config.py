"""Every key of a config.json is understood, harmless, or named in one error."""

import dataclasses
import json

import pytest

from recurjax.convert.hugging_face.read_config import model_from_keys
from recurjax.convert.hugging_face.write_config import hf_keys
from recurjax.errors import UserError
from recurjax.layers.norm import NormConfig
from recurjax.layers.position import Rope
from recurjax.model import count_parameters
from tests.convert.hf_directories import CASES
from tests.training.tiny_experiment import config as tiny

TINY_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 5632,
    "max_position_embeddings": 2048,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 22,
    "num_key_value_heads": 4,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "transformers_version": "4.35.0",
    "use_cache": True,
    "vocab_size": 32000,
}
PYTHIA = {
    "architectures": ["GPTNeoXForCausalLM"],
    "bos_token_id": 0,
    "eos_token_id": 0,
    "hidden_act": "gelu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 8192,
    "layer_norm_eps": 1e-05,
    "max_position_embeddings": 2048,
    "model_type": "gpt_neox",
    "num_attention_heads": 8,
    "num_hidden_layers": 16,
    "rotary_emb_base": 10000,
    "rotary_pct": 0.25,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "use_parallel_residual": True,
    "vocab_size": 50304,
}
GEMMA = {
    "hidden_act": "gelu",
    "hidden_activation": None,
    "head_dim": 256,
    "hidden_size": 2048,
    "intermediate_size": 16384,
    "max_position_embeddings": 8192,
    "model_type": "gemma",
    "num_attention_heads": 8,
    "num_hidden_layers": 18,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "vocab_size": 256000,
}
QWEN2 = {
    "hidden_act": "silu",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 131072,
    "max_window_layers": 24,
    "model_type": "qwen2",
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": True,
    "use_mrope": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def read(keys, **changes):
    return model_from_keys(keys | changes, where="config.json").config


@pytest.mark.parametrize(
    ("keys", "parameters"),
    [
        (TINY_LLAMA, 1_100_048_384),
        (PYTHIA, 1_011_781_632),
        (GEMMA, 2_506_172_416),
        (QWEN2, 494_032_768),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_published_configs_have_the_published_number_of_parameters(keys, parameters):
    assert count_parameters(read(keys)).total == parameters


def test_old_and_new_keys_say_the_same():
    old = {"rotary_emb_base": 5000, "rotary_pct": 0.5}
    new = {"rope_theta": 5000.0, "partial_rotary_factor": 0.5, "rope_type": "default"}
    keys = {k: v for k, v in PYTHIA.items() if not k.startswith("rotary")}
    assert read(keys, **old) == read(keys, rope_parameters=new)
    assert read(keys, **old).stack.attention.position == Rope(base=5e3, fraction=0.5)


def test_sequential_gpt_neox_and_gemmas_norm():
    assert not read(PYTHIA, use_parallel_residual=False).stack.parallel_residual
    assert read(GEMMA).stack.norm == NormConfig(one_plus=True, eps=1e-6)
    assert read(GEMMA).stack.mlp.kind == "geglu_tanh"


def test_windows_of_qwen2_count_the_token_itself():
    sliding = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 22}
    windows = read(QWEN2, **sliding).stack.windows
    assert windows == (None,) * 22 + (4,) * 2
    kinds = ["full_attention", "sliding_attention"] * 12
    assert read(QWEN2, layer_types=kinds, sliding_window=8).stack.windows == (None, 7)


def test_all_that_is_wrong_is_said_at_once():
    wrong = {
        "rope_scaling": {"type": "linear", "factor": 2.0},
        "quantization_config": {"bits": 4},
        "hidden_act": "relu",
        "num_hidden_layers": "many",
        "attention_bias": 1,
        "rms_norm_eps": None,
        "rope_parameters": {"rope_type": "yarn", "factor": 8.0},
    }
    with pytest.raises(UserError) as error:
        read(TINY_LLAMA, **wrong)
    for key in (*wrong, "yarn", "factor"):
        assert key in str(error.value), key


def test_sizes_that_do_not_go_together_are_refused():
    with pytest.raises(UserError, match="key_heads must divide heads"):
        read(TINY_LLAMA, num_key_value_heads=5)


@pytest.mark.parametrize("kind", ["mamba", None])
def test_other_architectures_are_refused_by_name(kind):
    with pytest.raises(UserError, match=f"model_type {kind!r} is not supported"):
        read(TINY_LLAMA, model_type=kind)


@pytest.mark.parametrize("directory", CASES)
def test_a_config_written_for_transformers_reads_back_the_same(directory):
    keys = json.loads((directory / "config.json").read_text())
    hf = model_from_keys(keys, where="config.json")
    written = hf_keys(hf.config, length=hf.length)
    assert model_from_keys(written, where="config.json") == hf


def test_a_model_that_is_none_of_them_lists_the_differences():
    with pytest.raises(UserError, match="it differs in .*logit_soft_cap: 30.0"):
        hf_keys(dataclasses.replace(tiny().model, logit_soft_cap=30.0), length=16)


@pytest.mark.parametrize(
    "keys",
    [
        {"unsloth_version": "2025.1", "unsloth_fixed": True},
        {"quantization_config": None, "some_new_key": None},
        {"max_length": 4096, "temperature": 0.9, "do_sample": True, "num_beams": 4},
        {"output_attentions": False, "return_dict": True, "use_return_dict": True},
        {"gradient_checkpointing": False, "_flash_attn_2_enabled": True},
        {"model_max_length": 2048, "sliding_window": None, "is_encoder_decoder": False},
    ],
)
def test_keys_of_trainers_and_neutral_values_are_read_over_and_named(keys):
    hf = model_from_keys(TINY_LLAMA | keys, where="config.json")
    assert hf.config == read(TINY_LLAMA)
    assert set(hf.read_over) == set(keys)


def test_a_default_rope_rule_is_no_rule():
    for rule in ({"rope_type": "default"}, {"type": "default"}):
        assert read(TINY_LLAMA, rope_scaling=rule) == read(TINY_LLAMA)


def test_an_unknown_key_is_an_error_that_the_user_can_overrule():
    keys = TINY_LLAMA | {"attention_sinks": 4, "is_encoder_decoder": True}
    with pytest.raises(UserError, match="attention_sinks 4 .*--ignore-key"):
        model_from_keys(keys, where="config.json")
    ignored = ("attention_sinks", "is_encoder_decoder")
    hf = model_from_keys(keys, where="config.json", ignored=ignored)
    assert hf.read_over == ("attention_sinks", "is_encoder_decoder")
    assert hf.config == read(TINY_LLAMA)


SIZES = {
    "hidden_size": 256,
    "intermediate_size": 128,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "vocab_size": 64,
}
# What transformers' config classes take for keys that a file leaves out (5.23), for the
# sizes above: `CLASS(**SIZES, ...).to_dict()`.
SHARED = {"rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False}
ROPE = {"rope_theta": 10000.0, "rope_type": "default"}
DEFAULTS = {
    "llama": SHARED
    | {
        "num_key_value_heads": 32,
        "max_position_embeddings": 2048,
        "rope_parameters": ROPE,
        "attention_bias": False,
        "mlp_bias": False,
        "head_dim": 8,
    },
    "gemma": SHARED
    | {
        "num_key_value_heads": 16,
        "head_dim": 256,
        "hidden_act": "gelu_pytorch_tanh",
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "rope_parameters": ROPE,
        "attention_bias": False,
        "use_bidirectional_attention": None,
    },
    "gpt_neox": {
        "hidden_act": "gelu",
        "max_position_embeddings": 2048,
        "layer_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "use_parallel_residual": True,
        "rope_parameters": ROPE | {"partial_rotary_factor": 0.25},
        "attention_bias": True,
    },
    "qwen2": SHARED
    | {
        "num_key_value_heads": 32,
        "max_position_embeddings": 32768,
        "rope_parameters": ROPE,
        "use_sliding_window": False,
        "max_window_layers": 28,
    },
}


@pytest.mark.parametrize("kind", DEFAULTS)
def test_a_missing_key_has_the_default_of_transformers_class(kind):
    base = SIZES | {"model_type": kind}
    without = model_from_keys(base, where="config.json")
    for key, value in DEFAULTS[kind].items():
        stated = model_from_keys(base | {key: value}, where="config.json")
        assert stated == without, key


@pytest.mark.parametrize(
    ("keys", "last"),
    [
        ({"sliding_window": 8, "max_window_layers": 28}, 7),
        ({"sliding_window": 8}, 7),
        ({"max_window_layers": 28}, 4095),
        ({}, 4095),
        ({"sliding_window": None}, None),
    ],
)
def test_qwen2_slides_from_layer_28_by_4096_where_it_says_nothing_else(keys, last):
    base = SIZES | {"model_type": "qwen2", "use_sliding_window": True}
    stack = model_from_keys(base | keys, where="config.json").config.stack
    windows = list(stack.windows) * (32 // len(stack.windows))
    assert windows == [None] * 28 + [last] * 4


def test_padding_that_was_made_here_stays_out_of_an_export():
    model = dataclasses.replace(read(TINY_LLAMA), vocabulary=257, pad_vocabulary_to=64)
    assert hf_keys(model, length=16)["vocab_size"] == 257
    # An imported table's padding is the checkpoint's own: see `from_hf`.
    own = dataclasses.replace(model, pad_vocabulary_to=320)
    assert hf_keys(own, length=16)["vocab_size"] == 320
