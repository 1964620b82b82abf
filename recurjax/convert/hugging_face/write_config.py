"""A recurjax model that is an ordinary Llama, Gemma, GPT-NeoX or Qwen2 as its config.

Keys are written and read again by `read_config`: what comes back different is what such
a checkpoint cannot say.
"""

import dataclasses
from typing import Any, get_args

from recurjax.convert.hugging_face.read_config import Architecture, model_from_keys
from recurjax.errors import UserError
from recurjax.experiment import model_differences
from recurjax.layers.position import Rope
from recurjax.model import ModelConfig
from recurjax.variants.transformer import TransformerConfig

_CLASSES = {
    "llama": "LlamaForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gpt_neox": "GPTNeoXForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
}


def hf_keys(
    config: ModelConfig,
    *,
    length: int,
    bos: int | None = None,
    eos: int | None = None,
    pad: int | None = None,
) -> dict[str, Any]:
    """Returns the config.json of a model.

    Args:
      config: the model.
      length: becomes `max_position_embeddings`.
      bos, eos, pad: token ids; without a pad the key is left out.

    Raises:
      UserError: none of the architectures can be this model; the differences from the
        nearest one are listed.
    """
    if not isinstance(config.stack, TransformerConfig):
        raise UserError(
            f"{type(config.stack).__name__} is no architecture of Hugging Face: leave "
            "--format at torch"
        )
    refusals: dict[Architecture, list[str]] = {}
    # Each architecture is tried: written, read back and compared.
    for architecture in get_args(Architecture):
        keys = _keys(architecture, exported(config), length)
        try:
            back = model_from_keys(keys, where="config.json").config
        except UserError as error:
            refusals[architecture] = [str(error)]
            continue
        refusals[architecture] = model_differences(exported(config), back)
        if not refusals[architecture]:
            names = {"bos_token_id": bos, "eos_token_id": eos}
            return keys | names | ({} if pad is None else {"pad_token_id": pad})
    # The one with fewest differences, so that the reader sees what is in the way.
    nearest = min(refusals, key=lambda name: len(refusals[name]))
    raise UserError(
        f"this model is no Llama, Gemma, GPT-NeoX or Qwen2; from {nearest} it differs "
        f"in {'; '.join(refusals[nearest])}: leave --format at torch"
    )


def exported(config: ModelConfig) -> ModelConfig:
    """Returns the config of the exported model, whose table has no padding.

    Other software samples from every row of the table, so the padding that was made
    here stays out. The padding of an imported table is the checkpoint's own and stays,
    as vocabulary, which is all that a config.json can say.
    """
    rows = config.padded_vocabulary if imported_rows(config) else config.vocabulary
    return dataclasses.replace(config, vocabulary=rows, pad_vocabulary_to=1)


def imported_rows(config: ModelConfig) -> bool:
    """Whether the rows beyond the vocabulary came with a checkpoint: see `from_hf`."""
    return config.pad_vocabulary_to == config.padded_vocabulary


def _keys(
    architecture: Architecture, config: ModelConfig, length: int
) -> dict[str, Any]:
    stack = config.stack
    assert isinstance(stack, TransformerConfig)
    a = stack.attention
    rope = a.position if isinstance(a.position, Rope) else Rope()
    keys = {
        "architectures": [_CLASSES[architecture]],
        "model_type": architecture,
        "dtype": "float32",
        "vocab_size": config.vocabulary,
        "hidden_size": stack.width,
        "intermediate_size": stack.mlp.width,
        "num_hidden_layers": stack.layers,
        "num_attention_heads": a.heads,
        "max_position_embeddings": length,
        "tie_word_embeddings": config.tied_head,
    }
    # GPT-NeoX has names of its own for the same things.
    if architecture == "gpt_neox":
        tanh = stack.mlp.kind == "gelu_tanh"
        return keys | {
            "hidden_act": "gelu_pytorch_tanh" if tanh else "gelu",
            "layer_norm_eps": stack.norm.eps,
            "use_parallel_residual": stack.parallel_residual,
            "attention_bias": a.qkv_bias,
            # Both spellings: transformers 5 reads the second, older ones the first.
            "rotary_emb_base": rope.base,
            "rotary_pct": rope.fraction,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": rope.base,
                "partial_rotary_factor": rope.fraction,
            },
        }
    keys |= {
        "hidden_act": "gelu_pytorch_tanh" if architecture == "gemma" else "silu",
        "rms_norm_eps": stack.norm.eps,
        "num_key_value_heads": a.key_heads,
        "head_dim": a.head_width,
        "rope_theta": rope.base,
        "rope_parameters": {"rope_type": "default", "rope_theta": rope.base},
    }
    if architecture == "llama":
        keys |= {"attention_bias": a.qkv_bias, "mlp_bias": stack.mlp.bias}
    if architecture == "qwen2":
        # Qwen2's config has no key for a head's width.
        del keys["head_dim"]
        keys |= _sliding(stack)
    return keys


def _sliding(stack: TransformerConfig) -> dict[str, Any]:
    # Layer by layer, as the config lists them.
    windows = stack.windows * (stack.layers // len(stack.windows))
    widths = {window + 1 for window in windows if window is not None}
    return {
        "use_sliding_window": bool(widths),
        "sliding_window": max(widths, default=None),
        "layer_types": [
            "full_attention" if window is None else "sliding_attention"
            for window in windows
        ],
    }
