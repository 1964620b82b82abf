"""Every key of a config.json is understood, harmless, or named in one error."""

import dataclasses
import json
import math

import pytest

from recurjax.convert.hugging_face.families import FAMILIES
from recurjax.convert.hugging_face.read_config import model_from_keys
from recurjax.convert.hugging_face.write_config import hf_keys
from recurjax.errors import UserError
from recurjax.layers.norm import NormConfig
from recurjax.layers.position import LinearScaling, Llama3Scaling, LongScaling, Rope
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


LLAMA_32 = TINY_LLAMA | {
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "head_dim": 64,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "vocab_size": 128256,
}
MISTRAL = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "vocab_size": 32000,
}
QWEN3 = {
    "attention_bias": False,
    "head_dim": 128,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
GEMMA2 = {
    "attn_logit_softcapping": 50.0,
    "cache_implementation": "hybrid",
    "final_logit_softcapping": 30.0,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "max_position_embeddings": 8192,
    "model_type": "gemma2",
    "num_attention_heads": 8,
    "num_hidden_layers": 26,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "vocab_size": 256000,
}
GEMMA3 = {
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "model_type": "gemma3_text",
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "vocab_size": 262144,
}
PHI3 = {
    "attention_bias": False,
    "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"},
    "embd_pdrop": 0.0,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "model_type": "phi3",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "original_max_position_embeddings": 4096,
    "resid_pdrop": 0.0,
    "rope_scaling": {
        "long_factor": [2.0] * 48,
        "short_factor": [1.0] * 48,
        "type": "su",
    },
    "sliding_window": 262144,
    "vocab_size": 32064,
}
PHI4_MINI = PHI3 | {
    "vocab_size": 200064,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "tie_word_embeddings": True,
    "partial_rotary_factor": 0.75,
    "interpolate_factor": 1,
    "full_attn_mod": 1,
    "lm_head_bias": False,
    "mlp_bias": False,
    "rope_scaling": {
        "type": "longrope",
        "long_factor": [1.0] * 48,
        "short_factor": [1.0] * 48,
    },
}
SMOLLM3 = {
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "max_window_layers": 28,
    "model_type": "smollm3",
    "no_rope_layer_interval": 4,
    "num_attention_heads": 16,
    "num_hidden_layers": 36,
    "num_key_value_heads": 4,
    "pretraining_tp": 2,
    "rope_theta": 5000000.0,
    "use_sliding_window": False,
    "vocab_size": 128256,
}
OLMO2 = {
    "attention_bias": False,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 4096,
    "model_type": "olmo2",
    "num_attention_heads": 16,
    "num_hidden_layers": 16,
    "num_key_value_heads": 16,
    "rms_norm_eps": 1e-06,
    "rope_theta": 500000,
    "vocab_size": 100352,
}
GPT2 = {
    "activation_function": "gelu_new",
    "attn_pdrop": 0.1,
    "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2",
    "n_ctx": 1024,
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "summary_type": "cls_index",
    "task_specific_params": {"text-generation": {"do_sample": True}},
    "vocab_size": 50257,
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
        (LLAMA_32, 1_235_814_400),
        (MISTRAL, 7_241_732_096),
        (QWEN3, 596_049_920),
        (GEMMA2, 2_614_341_888),
        (GEMMA3, 999_885_952),
        (PHI3, 3_821_079_552),
        (PHI4_MINI, 3_836_021_760),
        (SMOLLM3, 3_075_098_624),
        (OLMO2, 1_484_916_736),
        (GPT2, 124_439_808),
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
    with pytest.raises(UserError, match=f"model_type must be .* got {kind!r}"):
        read(TINY_LLAMA, model_type=kind)


@pytest.mark.parametrize("directory", CASES)
def test_a_config_written_for_transformers_reads_back_the_same(directory):
    keys = json.loads((directory / "config.json").read_text())
    hf = model_from_keys(keys, where="config.json")
    written = hf_keys(hf.config, length=hf.length)
    assert model_from_keys(written, where="config.json") == hf


def test_a_model_that_is_none_of_them_lists_the_differences():
    with pytest.raises(UserError, match="it differs from .*logit_soft_cap: 30.0"):
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


def test_rules_of_ropes_are_read_from_old_and_new_keys():
    scaling = LLAMA_32["rope_scaling"]
    new = {k: v for k, v in LLAMA_32.items() if not k.startswith("rope")}
    new |= {"rope_parameters": scaling | {"rope_theta": 500000.0}}
    want = Llama3Scaling(factor=32.0, low=1.0, high=4.0, length=8192)
    assert read(LLAMA_32) == read(new)
    assert read(LLAMA_32).stack.attention.position.scaling == want
    # LongRoPE's amplitude follows from both lengths; "su" is its older name.
    position = read(PHI3).stack.attention.position
    assert position.scaling == LongScaling(
        short=(1.0,) * 48,
        long=(2.0,) * 48,
        length=4096,
        amplitude=math.sqrt(1 + math.log(32) / math.log(4096)),
    )
    # Of both kinds of layers of Gemma 3 only those that see everything are scaled.
    linear = {"rope_type": "linear", "factor": 8.0}
    stack = read(GEMMA3, rope_scaling=linear).stack
    wide = Rope(base=1e6, scaling=LinearScaling(factor=8.0))
    assert stack.positions == (Rope(),) * 5 + (wide,)
    assert stack.windows == (511,) * 5 + (None,)


@pytest.mark.parametrize(
    "keys, amplitude",
    [
        ({}, 0.1 * math.log(4) + 1),
        ({"attention_factor": 1.25}, 1.25),
        ({"mscale": 0.7}, 0.1 * math.log(4) + 1),
        # DeepSeek's: one for the rotation over one for all of the head.
        (
            {"mscale": 0.7, "mscale_all_dim": 0.5},
            (0.07 * math.log(4) + 1) / (0.05 * math.log(4) + 1),
        ),
        ({"mscale": 0.7, "mscale_all_dim": 0.5, "attention_factor": 1.25}, 1.25),
    ],
)
def test_the_amplitude_of_yarn_is_stated_or_follows_from_its_factor(keys, amplitude):
    rope = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4} | keys
    scaling = read(TINY_LLAMA, rope_parameters=rope).stack.attention.position.scaling
    assert scaling.amplitude == pytest.approx(amplitude, rel=1e-12)


def test_keys_of_a_rope_that_its_rule_does_not_know_are_errors():
    for wrong in ({"factor": 2.0}, {"rope_type": "ntk"}, {"rope_type": "linear"}):
        with pytest.raises(UserError, match="factor|ntk"):
            read(TINY_LLAMA, rope_parameters=wrong)
    with pytest.raises(UserError, match="partial_rotary_factor 0.5 is not"):
        read(TINY_LLAMA, partial_rotary_factor=0.5)
    with pytest.raises(UserError, match="rope_scaling .* and rope_parameters"):
        read(
            TINY_LLAMA,
            rope_scaling={"type": "linear", "factor": 2.0},
            rope_parameters={"type": "linear", "factor": 4.0},
        )


def test_the_text_model_is_read_out_of_one_that_reads_images():
    """As Gemma 3 4B: its text_config leaves out the sizes of the class."""
    inner = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    keys = {"model_type": "gemma3", "text_config": inner, "vision_config": {"a": 1}}
    hf = model_from_keys(keys, where="config.json")
    assert (hf.architecture, hf.text_of) == ("gemma3_text", "gemma3")
    assert count_parameters(hf.config).total == 3_880_263_168
    with pytest.raises(UserError, match="must have an object text_config"):
        model_from_keys({"model_type": "gemma3"}, where="config.json")


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
FULL, SLIDING = "full_attention", "sliding_attention"
GPT2_SIZES = {"n_embd": 256, "n_layer": 32, "n_head": 32, "vocab_size": 64}
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
        "layer_types": [FULL] * 32,
    },
    "mistral": SHARED
    | {
        "num_key_value_heads": 8,
        "head_dim": 8,
        "max_position_embeddings": 131072,
        "rope_parameters": ROPE,
        "sliding_window": 4096,
    },
    "qwen3": SHARED
    | {
        "num_key_value_heads": 32,
        "head_dim": 128,
        "max_position_embeddings": 32768,
        "rope_parameters": ROPE,
        "attention_bias": False,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": 28,
        "layer_types": [FULL] * 32,
    },
    "gemma2": {
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "rope_parameters": ROPE,
        "attention_bias": False,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "layer_types": [SLIDING, FULL] * 16,
        "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": 50.0,
        "use_bidirectional_attention": None,
    },
    "gemma3_text": {
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "rope_parameters": {
            SLIDING: ROPE,
            FULL: {"rope_type": "default", "rope_theta": 1000000.0},
        },
        "attention_bias": False,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "layer_types": ([SLIDING] * 5 + [FULL]) * 5 + [SLIDING] * 2,
        "final_logit_softcapping": None,
        "attn_logit_softcapping": None,
        "use_bidirectional_attention": False,
        "_sliding_window_pattern": 6,
    },
    "phi3": SHARED
    | {
        "num_key_value_heads": 32,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_parameters": ROPE | {"partial_rotary_factor": 1.0},
        "sliding_window": None,
    },
    "smollm3": SHARED
    | {
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "rope_parameters": ROPE | {"rope_theta": 2000000.0},
        "use_sliding_window": False,
        "sliding_window": None,
        "no_rope_layers": [1, 1, 1, 0] * 8,
        "no_rope_layer_interval": 4,
        "layer_types": [FULL] * 32,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
    },
    "olmo2": SHARED
    | {
        "num_key_value_heads": 32,
        "max_position_embeddings": 2048,
        "rope_parameters": ROPE,
        "attention_bias": False,
        "rms_norm_eps": 1e-5,
    },
    "gpt2": {
        "n_positions": 1024,
        "n_inner": None,
        "activation_function": "gelu_new",
        "resid_pdrop": 0.1,
        "embd_pdrop": 0.1,
        "attn_pdrop": 0.1,
        "layer_norm_epsilon": 1e-5,
        "summary_type": "cls_index",
        "summary_use_proj": True,
        "summary_activation": None,
        "summary_proj_to_labels": True,
        "summary_first_dropout": 0.1,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "reorder_and_upcast_attn": False,
        "add_cross_attention": False,
        "tie_word_embeddings": True,
    },
}


def test_every_family_has_its_defaults_here():
    assert set(DEFAULTS) == set(FAMILIES)


@pytest.mark.parametrize("kind", DEFAULTS)
def test_a_missing_key_has_the_default_of_transformers_class(kind):
    base = (GPT2_SIZES if kind == "gpt2" else SIZES) | {"model_type": kind}
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


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"num_hidden_layers": 10**30}, "num_hidden_layers must be an integer from 1"),
        ({"hidden_size": 2**31}, "hidden_size must be an integer from 1 to 2147483647"),
        ({"vocab_size": True}, "vocab_size must be an integer from 1"),
    ],
)
def test_sizes_have_a_bound(changes, sentence):
    """Sizes in the `config.json` of a Hugging Face checkpoint have a bound."""
    with pytest.raises(UserError, match=sentence):
        model_from_keys(TINY_LLAMA | changes, where="config.json")
