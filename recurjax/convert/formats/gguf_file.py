"""A GGUF file as if it were a Hugging Face directory: config keys, names, weights.

Quantised weights are expanded to float32 by the package `gguf` (the extra of that
name), some rows at a time. Of the architectures that llama.cpp writes, llama and qwen2
are read.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np

from recurjax.convert.formats.gguf_header import GgufTensor, read_header
from recurjax.convert.formats.gguf_tokenizer import gguf_text_settings, gguf_tokenizer
from recurjax.convert.formats.tensors import TensorInfo, empty_for_jax
from recurjax.data.tokenizers import TextSettings, Tokenizer
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
_AT_ONCE = 1 << 20
"""Weights that are expanded at a time."""


def open_gguf(
    path: Path, *, with_tokenizer: bool
) -> tuple[dict[str, Any], "GgufFile", Tokenizer | None, TextSettings]:
    """Opens a file.

    Returns:
      What its config.json would say, its weights, its tokenizer if asked for, and what
      it says of chats.

    Raises:
      UserError: the package is missing, the file is damaged, of another architecture or
        its tokenizer of a kind that is not known.
    """
    try:
        import gguf  # noqa: F401 # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise UserError(
            "reading GGUF files needs the package gguf: pip install 'recurjax[gguf]'"
        ) from error
    try:
        # Where the tensors lie and how long they are, before one byte of them is read.
        fields, tensors = read_header(path)
        tensor_bytes = [_bytes_of(tensor) for tensor in tensors]
        ends = [t.offset + n for t, n in zip(tensors, tensor_bytes, strict=True)]
        if max(ends, default=0) > path.stat().st_size:
            raise ValueError("it ends inside its tensors")
    except (ValueError, OSError, RecursionError) as error:
        raise UserError(f"{path} is not a whole GGUF file: {error}") from error
    architecture = fields.get("general.architecture")
    if architecture not in _ARCHITECTURES:
        raise UserError(
            f"{path}: architecture {architecture!r} is not supported: known are "
            f"{', '.join(_ARCHITECTURES)}"
        )
    # Keys of config.json, so that the reader of Hugging Face's serves.
    keys = _config_keys(fields, architecture)
    source = GgufFile(path, tensors, keys, permuted=architecture == "llama")
    embedding = source.tensors.get("model.embed_tokens.weight")
    keys["vocab_size"] = None if embedding is None else embedding.shape[0]
    # A GGUF file names no tie: it simply lacks the head.
    keys["tie_word_embeddings"] = "lm_head.weight" not in source.tensors
    tokenizer = gguf_tokenizer(fields, where=str(path)) if with_tokenizer else None
    return keys, source, tokenizer, gguf_text_settings(fields)


class GgufFile:
    """The weights under Hugging Face's names; see `TensorSource`."""

    def __init__(
        self,
        path: Path,
        tensors: list[GgufTensor],
        keys: dict[str, Any],
        *,
        permuted: bool,
    ):
        """Takes the names and shapes; weights are read when they are asked for.

        Args:
          path: the file.
          tensors: from its header.
          keys: config.json's keys.
          permuted: whether rows of q and k lie in llama.cpp's order.
        """
        self.where = str(path)
        self._heads = {
            "q_proj": keys.get("num_attention_heads"),
            "k_proj": keys.get("num_key_value_heads", keys.get("num_attention_heads")),
        }
        self._permuted = permuted
        self._path = path
        self._tensors = {_hf_name(tensor.name): tensor for tensor in tensors}
        self.tensors = {
            # What is expanded, is expanded to float32.
            name: TensorInfo(tensor.shape, "F32")
            for name, tensor in self._tensors.items()
        }

    def read(self, name: str) -> np.ndarray:
        values = empty_for_jax(self.tensors[name].shape)
        try:
            self._expand(self._tensors[name], values.reshape(-1, values.shape[-1]))
        except (NotImplementedError, ValueError) as error:
            raise UserError(
                f"{self.where}: {name} cannot be expanded: {error}"
            ) from error
        projection = name.split(".")[-2]
        if self._permuted and projection in self._heads:
            # Only q and k are rotated, so only their rows are in llama.cpp's order.
            return unpermute(values, self._heads[projection] or 1)
        return values

    def _expand(self, tensor: GgufTensor, rows: np.ndarray) -> None:
        """Fills [rows, width]; the package needs room for a copy of what it is given.

        Raises:
          ValueError: the file ends before the tensor.
        """
        from gguf.constants import (  # pyright: ignore[reportMissingImports]
            GGMLQuantizationType,
        )
        from gguf.quants import dequantize  # pyright: ignore[reportMissingImports]

        kind = GGMLQuantizationType(tensor.kind)
        width = _bytes_of(tensor) // len(rows)
        # Rows at a time, about a million weights: the expanded copy is what takes room.
        step = max(1, _AT_ONCE // rows.shape[1])
        with self._path.open("rb") as stream:
            stream.seek(tensor.offset)
            for start in range(0, len(rows), step):
                part = rows[start : start + step]
                raw = np.fromfile(stream, np.uint8, count=len(part) * width)
                np.copyto(part, dequantize(raw.reshape(len(part), width), kind))


def _bytes_of(tensor: GgufTensor) -> int:
    """Counts the bytes of a tensor in the file.

    Raises:
      ValueError: its kind is not known, or its rows are no whole blocks.
    """
    from gguf.constants import (  # pyright: ignore[reportMissingImports]
        GGML_QUANT_SIZES,
        GGMLQuantizationType,
    )

    block, size = GGML_QUANT_SIZES[GGMLQuantizationType(tensor.kind)]
    # Quantised weights come in blocks that share a scale.
    if tensor.shape[-1] % block:
        raise ValueError(f"a row of {tensor.name} is no whole number of blocks")
    return math.prod(tensor.shape) // block * size


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
