"""A GGUF file as if it were a Hugging Face directory: config keys, names, weights.

Quantised weights are expanded to float32 by the package `gguf` (the extra of that
name). Of the architectures that llama.cpp writes, llama and qwen2 are read.
"""

from pathlib import Path
from typing import Any

import numpy as np

from recurjax.convert.gguf_tokenizer import gguf_tokenizer
from recurjax.convert.tensors import TensorInfo
from recurjax.data.tokenizers import Tokenizer
from recurjax.errors import UserError

_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_IN_BLOCK = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Key of a GGUF file without its architecture, and the key of config.json.
_KEYS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
# Said again by the tensors' shapes.
_REPEATED = {"vocab_size", "rope.dimension_count", "attention.value_length"}
_ARCHITECTURES = ("llama", "qwen2")


def open_gguf(
    path: Path, *, with_tokenizer: bool
) -> tuple[dict[str, Any], "GgufFile", Tokenizer | None]:
    """Opens a file.

    Returns:
      What its config.json would say, its weights, and its tokenizer if asked for.

    Raises:
      UserError: the package is missing, the file is damaged, of another architecture or
        its tokenizer of a kind that is not known.
    """
    try:
        from gguf import GGUFReader  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise UserError(
            "reading GGUF files needs the package gguf: pip install 'recurjax[gguf]'"
        ) from error
    try:
        reader = GGUFReader(path)
        fields = {key: field.contents() for key, field in reader.fields.items()}
        reader.fields.clear()  # a view for every token: a third of the memory
    except Exception as error:  # the package raises what numpy happens to
        raise UserError(
            f"{path} is not a whole GGUF file: {str(error).splitlines()[0]}"
        ) from error
    architecture = fields.get("general.architecture")
    if architecture not in _ARCHITECTURES:
        raise UserError(
            f"{path}: architecture {architecture!r} is not supported: known are "
            f"{', '.join(_ARCHITECTURES)}"
        )
    keys = _config_keys(fields, architecture)
    source = GgufFile(path, reader, keys, permuted=architecture == "llama")
    embedding = source.tensors.get("model.embed_tokens.weight")
    keys["vocab_size"] = None if embedding is None else embedding.shape[0]
    keys["tie_word_embeddings"] = "lm_head.weight" not in source.tensors
    found = gguf_tokenizer(fields, where=str(path)) if with_tokenizer else None
    return keys, source, found


class GgufFile:
    """The weights under Hugging Face's names; see `TensorSource`."""

    def __init__(
        self, path: Path, reader: Any, keys: dict[str, Any], *, permuted: bool
    ):
        """Reads the names and shapes.

        Args:
          path: for messages.
          reader: gguf's.
          keys: config.json's keys.
          permuted: whether rows of q and k lie in llama.cpp's order.
        """
        self.where = str(path)
        self._heads = {
            "q_proj": keys.get("num_attention_heads"),
            "k_proj": keys.get("num_key_value_heads", keys.get("num_attention_heads")),
        }
        self._permuted = permuted
        self._tensors = {_hf_name(t.name): t for t in reader.tensors}
        self.tensors = {
            # GGUF counts dimensions from the innermost, and expands to float32.
            name: TensorInfo(tuple(int(n) for n in reversed(tensor.shape)), "F32")
            for name, tensor in self._tensors.items()
        }

    def read(self, name: str) -> np.ndarray:
        from gguf.quants import dequantize  # pyright: ignore[reportMissingImports]

        tensor = self._tensors[name]
        try:
            values = dequantize(tensor.data, tensor.tensor_type)
        except (NotImplementedError, ValueError) as error:
            raise UserError(
                f"{self.where}: {name} cannot be expanded: {error}"
            ) from error
        values = np.asarray(values, np.float32).reshape(self.tensors[name].shape)
        projection = name.split(".")[-2]
        if self._permuted and projection in self._heads:
            return unpermute(values, self._heads[projection] or 1)
        return values


def unpermute(rows: np.ndarray, heads: int) -> np.ndarray:
    """Undoes llama.cpp's order of q's and k's rows.

    It rotates neighbours (2 i, 2 i + 1), Hugging Face and we rotate (i, i + E/2): its
    row 2 i + s of a head is our row s E/2 + i.
    """
    folded = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    return folded.swapaxes(1, 2).reshape(rows.shape)


def _config_keys(fields: dict[str, Any], architecture: str) -> dict[str, Any]:
    keys: dict[str, Any] = {"model_type": architecture, "rope_theta": 10000.0}
    prefix = f"{architecture}."
    for key, value in fields.items():
        short = key.removeprefix(prefix)
        if short != key and short not in _REPEATED:
            # An unknown key keeps its name, so that the reader of configs refuses it.
            keys[_KEYS.get(short, key)] = value
    return keys


def _hf_name(name: str) -> str:
    parts = name.split(".")
    if parts[0] == "blk" and len(parts) == 4 and parts[2] in _IN_BLOCK:
        return f"model.layers.{parts[1]}.{_IN_BLOCK[parts[2]]}.{parts[3]}"
    if parts[0] in _TOP and len(parts) == 2:
        return f"{_TOP[parts[0]]}.{parts[1]}"
    return name
