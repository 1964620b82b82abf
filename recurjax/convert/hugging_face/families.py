"""The families of Hugging Face's decoders that recurjax reads and writes: a row each.

A row says which keys of config.json are which of our values (`values.py`), which values
are fixed, and which module of the checkpoint holds which of our parameters. Both
directions follow from it, and GGUF files of the family too.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from recurjax.convert.hugging_face.keys import Keys
from recurjax.convert.hugging_face.rules import (
    HeadShare,
    Key,
    KeyHeads,
    KeyRule,
    Learned,
    OneWindow,
    Only,
    QueryScale,
    Ropes,
    Unread,
    UnrotatedLayers,
    WindowedLayers,
    Word,
)
from recurjax.convert.hugging_face.values import Values


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """One family of models: a row of the table.

    Attributes:
      model_class: the model's class in transformers.
      rules: the keys of its config.json, in the order in which they are read.
      fixed: values that no key states: see `values.DEFAULTS`.
      outer: modules outside the layers, and what they are of ours.
      layer: a layer's prefix, {} for its number.
      inner: modules of a layer, and what they are of ours; of several parameters in one
        tensor all of them.
      fused: layout of such a tensor: "rows", one parameter below the other; "heads",
        all of head 0, then all of head 1 (GPT-NeoX).
      inputs_first: matrices are [in, out], as in Conv1D (GPT-2).
      tables: tensors in old files that follow from the config.
    """

    model_class: str
    rules: tuple[KeyRule, ...]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    outer: Mapping[str, str]
    layer: str
    inner: Mapping[str, str]
    fused: Literal["rows", "heads"] = "rows"
    inputs_first: bool = False
    tables: tuple[str, ...] = ("self_attn.rotary_emb.inv_freq",)

    def module(self, ours: str) -> str:
        """Returns the name of the module outside the layers that is this of ours."""
        return next(theirs for theirs, name in self.outer.items() if name == ours)

    @property
    def prefix(self) -> str:
        """The prefix of every tensor name except the head's."""
        return self.layer.partition(".")[0] + "."


_GATED = {
    "silu": "swiglu",
    "gelu": "geglu",
    "gelu_pytorch_tanh": "geglu_tanh",
    "swish": "swiglu",
    "gelu_new": "geglu_tanh",
}
# Gemma 1 says "gelu" in old files and means its tanh form.
_GATED_TANH = {"gelu_pytorch_tanh": "geglu_tanh", "gelu": "geglu_tanh"}
_PLAIN = {
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
}


def _sizes(
    *,
    length: int,
    key_heads: int | None = None,
    head_width: int | None = None,
    states_head_width: bool = True,
) -> tuple[KeyRule, ...]:
    """The keys that Llama and its relatives share; defaults are their classes'."""

    def share(values: Values) -> int:
        return head_width or max(values["width"] // values["heads"], 1)

    return (
        Key("vocab_size", "vocabulary", Keys.size),
        Key("hidden_size", "width", Keys.size),
        Key("intermediate_size", "inner", Keys.size),
        Key("num_hidden_layers", "layers", Keys.layers),
        Key("num_attention_heads", "heads", Keys.size),
        KeyHeads(key_heads),
        Key("head_dim", "head_width", Keys.size, share, sparse=not states_head_width),
        Key("max_position_embeddings", "length", Keys.size, length),
    )


def _eps(default: float) -> KeyRule:
    return Key("rms_norm_eps", "eps", Keys.number, default)


def _act(name: str = "hidden_act", default: str = "silu") -> KeyRule:
    return Word(name, "activation", _GATED, default)


def _flag(name: str, value: str, default: bool) -> KeyRule:
    return Key(name, value, Keys.flag, default)


_BIAS = _flag("attention_bias", "qkv_bias out_bias", False)
_MLP_BIAS = _flag("mlp_bias", "mlp_bias", False)
_TIED = _flag("tie_word_embeddings", "tied", True)
_UNTIED = _flag("tie_word_embeddings", "tied", False)
_CAUSAL = Only("use_bidirectional_attention", (None, False))


def _late_windows(keys: Keys, values: Values) -> list[bool]:
    """Qwen: the layers from max_window_layers on slide, if any do."""
    # Absent keys have the defaults of transformers' class; null switches windows off.
    first = keys.any("max_window_layers") if keys.has("max_window_layers") else 28
    used = keys.flag("use_sliding_window", False)
    layers = values["layers"]
    slides = used and values["window"] is not None and isinstance(first, int)
    return [slides and layer >= first for layer in range(layers)]


def _uses_windows(values: Values) -> dict[str, Any]:
    return {"use_sliding_window": any(w is not None for w in values["windows"])}


def _every_other(keys: Keys, values: Values) -> list[bool]:
    """Gemma 2: the first layer slides, the second does not, and so on."""
    return [layer % 2 == 0 for layer in range(values["layers"])]


def _all_but_every_sixth(keys: Keys, values: Values) -> list[bool]:
    """Gemma 3: five layers slide, the sixth does not."""
    period = keys.size("sliding_window_pattern", 6)
    return [(layer + 1) % period != 0 for layer in range(values["layers"])]


def _unrotated_windows(keys: Keys, values: Values) -> list[bool]:
    """SmolLM3: layers without rotation slide, if any do."""
    used = keys.flag("use_sliding_window", False) and values["window"] is not None
    positioned = values["positioned"]
    return [
        used and not positioned[n % len(positioned)] for n in range(values["layers"])
    ]


_LLAMA_OUTER = {
    "model.embed_tokens": "embedding",
    "model.norm": "final_norm",
    "lm_head": "head",
}
_LLAMA_LINEAR = {
    "self_attn.q_proj": "attention.q",
    "self_attn.k_proj": "attention.k",
    "self_attn.v_proj": "attention.v",
    "self_attn.o_proj": "attention.out",
    "mlp.gate_proj": "mlp.gate",
    "mlp.up_proj": "mlp.up",
    "mlp.down_proj": "mlp.down",
}
_NORMS_BEFORE = {
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "mlp_norm",
}
_NORMS_BOTH = {
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "attention_post_norm",
    "pre_feedforward_layernorm": "mlp_norm",
    "post_feedforward_layernorm": "mlp_post_norm",
}
_NORMS_AFTER = {
    "post_attention_layernorm": "attention_post_norm",
    "post_feedforward_layernorm": "mlp_post_norm",
}
_QK_NORMS = {
    "self_attn.q_norm": "attention.q_norm",
    "self_attn.k_norm": "attention.k_norm",
}
_LLAMA: dict[str, Any] = {"outer": _LLAMA_OUTER, "layer": "model.layers.{}"}
_PLAIN_LLAMA: dict[str, Any] = _LLAMA | {"inner": _NORMS_BEFORE | _LLAMA_LINEAR}
_GEMMA = {"one_plus": True, "embedding_scale": "sqrt_width"}
_GEMMA_ACT = (
    Word("hidden_activation", "activation", _GATED, "gelu_pytorch_tanh"),
    Unread("hidden_act"),
)


FAMILIES: dict[str, Family] = {
    "llama": Family(
        model_class="LlamaForCausalLM",
        rules=(*_sizes(length=2048), _act(), _eps(1e-6), _BIAS, _MLP_BIAS, _UNTIED)
        + (Ropes(),),
        **_PLAIN_LLAMA,
    ),
    "mistral": Family(
        model_class="MistralForCausalLM",
        rules=(*_sizes(length=131072, key_heads=8), _act(), _eps(1e-6), _UNTIED)
        + (Ropes(), OneWindow(4096)),
        **_PLAIN_LLAMA,
    ),
    "qwen2": Family(
        model_class="Qwen2ForCausalLM",
        rules=(*_sizes(length=32768, key_heads=32, states_head_width=False), _act())
        + (_eps(1e-6), _UNTIED, Ropes(), Only("use_mrope", (False, None)))
        + (WindowedLayers(4096, _late_windows, _uses_windows),),
        fixed={"qkv_bias": True},
        **_PLAIN_LLAMA,
    ),
    "qwen3": Family(
        model_class="Qwen3ForCausalLM",
        rules=(*_sizes(length=32768, key_heads=32, head_width=128), _act(), _eps(1e-6))
        + (_BIAS, _UNTIED, Ropes())
        + (WindowedLayers(4096, _late_windows, _uses_windows),),
        fixed={"qk_norm": "head"},
        **_LLAMA,
        inner=_NORMS_BEFORE | _QK_NORMS | _LLAMA_LINEAR,
    ),
    "smollm3": Family(
        model_class="SmolLM3ForCausalLM",
        rules=(*_sizes(length=32768, key_heads=4, states_head_width=False), _act())
        + (_eps(1e-6), _BIAS, _MLP_BIAS, _TIED, Ropes(2000000.0), UnrotatedLayers(4))
        + (WindowedLayers(None, _unrotated_windows, _uses_windows),)
        + (Unread("max_window_layers"),),
        **_PLAIN_LLAMA,
    ),
    "phi3": Family(
        model_class="Phi3ForCausalLM",
        rules=(*_sizes(length=4096, states_head_width=False), _act(), _eps(1e-5))
        + (_UNTIED, OneWindow(None))
        + (
            Ropes(
                fraction=1.0,
                original=4096,
                aliases=(("su", "longrope"), ("yarn", "longrope")),
            ),
        )
        + tuple(
            Only(name, (False, None))
            for name in ("attention_bias", "mlp_bias", "lm_head_bias")
        )
        + (Only("interpolate_factor", (1, None)), Only("full_attn_mod", (1, None))),
        **_LLAMA,
        inner=_NORMS_BEFORE
        | {
            "self_attn.qkv_proj": "attention.q attention.k attention.v",
            "self_attn.o_proj": "attention.out",
            "mlp.gate_up_proj": "mlp.gate mlp.up",
            "mlp.down_proj": "mlp.down",
        },
    ),
    "olmo2": Family(
        model_class="Olmo2ForCausalLM",
        rules=(*_sizes(length=2048, states_head_width=False), _act(), _eps(1e-5))
        + (_BIAS, _UNTIED, Ropes()),
        fixed={"norms": "after", "qk_norm": "full"},
        **_LLAMA,
        inner=_NORMS_AFTER | _QK_NORMS | _LLAMA_LINEAR,
    ),
    "gemma": Family(
        model_class="GemmaForCausalLM",
        rules=_sizes(length=8192, key_heads=16, head_width=256)
        + (Word("hidden_act", "activation", _GATED_TANH, "gelu_pytorch_tanh"),)
        + (Only("hidden_activation", (None, *_GATED_TANH)), _CAUSAL)
        + (_eps(1e-6), _BIAS, _TIED, Ropes()),
        fixed=_GEMMA,
        **_PLAIN_LLAMA,
    ),
    "gemma2": Family(
        model_class="Gemma2ForCausalLM",
        rules=(*_sizes(length=8192, key_heads=4, head_width=256), *_GEMMA_ACT, _CAUSAL)
        + (_eps(1e-6), _BIAS, _TIED, Ropes(), QueryScale())
        + (WindowedLayers(4096, _every_other),)
        + (Key("attn_logit_softcapping", "attention_cap", Keys.optional, 50.0),)
        + (Key("final_logit_softcapping", "logit_cap", Keys.optional, 30.0),),
        fixed=_GEMMA | {"norms": "both"},
        **_LLAMA,
        inner=_NORMS_BOTH | _LLAMA_LINEAR,
    ),
    "gemma3_text": Family(
        model_class="Gemma3ForCausalLM",
        rules=_sizes(length=131072, key_heads=4, head_width=256)
        + (*_GEMMA_ACT, _CAUSAL, _eps(1e-6), _BIAS, _TIED, QueryScale())
        + (Ropes(base=1000000.0, local=10000.0),)
        + (WindowedLayers(4096, _all_but_every_sixth),)
        + (Key("final_logit_softcapping", "logit_cap", Keys.optional, None),)
        + (Unread("attn_logit_softcapping"),),
        fixed=_GEMMA | {"norms": "both", "qk_norm": "head"},
        **_LLAMA,
        inner=_NORMS_BOTH | _QK_NORMS | _LLAMA_LINEAR,
    ),
    "gpt_neox": Family(
        model_class="GPTNeoXForCausalLM",
        rules=(
            Key("vocab_size", "vocabulary", Keys.size),
            Key("hidden_size", "width", Keys.size),
            Key("intermediate_size", "inner", Keys.size),
            Key("num_hidden_layers", "layers", Keys.layers),
            Key("num_attention_heads", "heads key_heads", Keys.size),
            HeadShare(),
            Key("max_position_embeddings", "length", Keys.size, 2048),
            Word("hidden_act", "activation", _PLAIN, "gelu"),
            Key("layer_norm_eps", "eps", Keys.number, 1e-5),
            _flag("use_parallel_residual", "parallel", True),
            _flag("attention_bias", "qkv_bias out_bias", True),
            _UNTIED,
            Ropes(fraction=0.25, base_key="rotary_emb_base", fraction_key="rotary_pct"),
        ),
        fixed={"norm": "layer", "mlp_bias": True},
        outer={
            "gpt_neox.embed_in": "embedding",
            "gpt_neox.final_layer_norm": "final_norm",
            "embed_out": "head",
        },
        layer="gpt_neox.layers.{}",
        inner=_NORMS_BEFORE
        | {
            "attention.query_key_value": "attention.q attention.k attention.v",
            "attention.dense": "attention.out",
            "mlp.dense_h_to_4h": "mlp.up",
            "mlp.dense_4h_to_h": "mlp.down",
        },
        fused="heads",
        tables=(
            "attention.rotary_emb.inv_freq",
            "attention.bias",
            "attention.masked_bias",
        ),
    ),
    "gpt2": Family(
        model_class="GPT2LMHeadModel",
        rules=(
            Key("vocab_size", "vocabulary", Keys.size),
            Key("n_embd", "width", Keys.size),
            Key("n_inner", "inner", Keys.size, lambda values: 4 * values["width"]),
            Key("n_layer", "layers", Keys.layers),
            Key("n_head", "heads key_heads", Keys.size),
            HeadShare(),
            Learned("n_positions", 1024),
            Word("activation_function", "activation", _PLAIN, "gelu_new"),
            Key("layer_norm_epsilon", "eps", Keys.number, 1e-5),
            Only("scale_attn_weights", (True,)),
            Only("scale_attn_by_inverse_layer_idx", (False,)),
            Only("add_cross_attention", (False,)),
            _TIED,
        ),
        fixed={
            "norm": "layer",
            "qkv_bias": True,
            "out_bias": True,
            "mlp_bias": True,
        },
        outer={
            "transformer.wte": "embedding",
            "transformer.wpe": "stack.position.position",
            "transformer.ln_f": "final_norm",
            "lm_head": "head",
        },
        layer="transformer.h.{}",
        inner={
            "ln_1": "attention_norm",
            "attn.c_attn": "attention.q attention.k attention.v",
            "attn.c_proj": "attention.out",
            "ln_2": "mlp_norm",
            "mlp.c_fc": "mlp.up",
            "mlp.c_proj": "mlp.down",
        },
        inputs_first=True,
        tables=("attn.bias", "attn.masked_bias"),
    ),
}
"""By `model_type`. A model that several can be is written as the first of them."""
