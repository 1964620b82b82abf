"""A GGUF file as if it were a Hugging Face directory: config keys, names, weights.

Quantised weights are expanded to float32 by the package `gguf` (the extra of that
name), some rows at a time. So are the integers, scales and offsets of those that stay
quantised: each is the weight that a block stands for whose other parts are neutral.
Names and keys follow from the rows of the families.
"""

import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import DTypeLike

from recurjax.convert.formats.gguf_header import GgufTensor, read_header
from recurjax.convert.formats.gguf_tokenizer import gguf_text_settings, gguf_tokenizer
from recurjax.convert.formats.tensors import (
    FLOATS,
    Part,
    TensorInfo,
    empty_for_jax,
)
from recurjax.convert.hugging_face.families import FAMILIES, Family
from recurjax.data.tokenizers import TextSettings, Tokenizer
from recurjax.errors import UserError
from recurjax.model import WeightDtype

# Modules of a GGUF file, which all architectures name alike, and what they are of ours.
_TOP = {
    "token_embd": ("embedding",),
    "position_embd": ("stack.position.position",),
    "output_norm": ("final_norm",),
    "output": ("head",),
}
_IN_BLOCK = {
    "attn_norm": ("attention_norm",),
    "post_attention_norm": ("attention_post_norm",),
    "ffn_norm": ("mlp_norm",),
    "post_ffw_norm": ("mlp_post_norm",),
    "attn_q": ("attention.q",),
    "attn_k": ("attention.k",),
    "attn_v": ("attention.v",),
    "attn_qkv": ("attention.q attention.k attention.v",),
    "attn_output": ("attention.out",),
    "attn_q_norm": ("attention.q_norm",),
    "attn_k_norm": ("attention.k_norm",),
    "ffn_gate": ("mlp.gate",),
    # Of Phi-3 gate and up in one.
    "ffn_up": ("mlp.up", "mlp.gate mlp.up"),
    "ffn_down": ("mlp.down",),
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
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "rope.freq_base": "rope_theta",
    "rope.freq_base_swa": "rope_local_base_freq",
}
# Keys that repeat the tensors' shapes, or describe how a model was scaled.
_REPEATED = {"vocab_size", "attention.value_length", "rope.scaling.finetuned"}
_ARCHITECTURES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "phi3": "phi3",
}
"""llama.cpp's name, and the family's."""
# Tensors of factors of a rope, which belong to the config.
_FACTORS = ("rope_freqs", "rope_factors_short", "rope_factors_long")
_AT_ONCE = 1 << 20
"""Weights that are expanded at a time."""
_ONE, _MINUS_EIGHT, _ZERO = (0x00, 0x3C), (0x00, 0xC8), (0, 0)  # float16
_NEUTRAL: dict[str, dict[Part, tuple[tuple[int, int, Any], ...]]] = {
    "Q8_0": {"values": ((0, 2, _ONE),), "scales": ((2, 34, 1),)},
    "Q4_0": {"values": ((0, 2, _ONE),), "scales": ((2, 18, 0x99),)},
    "Q4_1": {
        "values": ((0, 2, _ONE), (2, 4, _MINUS_EIGHT)),
        "scales": ((2, 4, _ZERO), (4, 20, 0x11)),
        "offsets": ((4, 20, 0x88),),
    },
}
"""Of each type that stays quantised, and of each part, the bytes of a block that the
other parts have: its scale, its offset, then its values. Q4_1's values count from 0 in
the file, and from -8 here."""


def open_gguf(
    path: Path, *, with_tokenizer: bool
) -> tuple[dict[str, Any], "GgufFile", Tokenizer | None, TextSettings]:
    """Opens a file.

    Returns:
      What its config.json would say, its weights, its tokenizer if requested, and its
      chat settings.

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
        # Where the tensors are and how long they are, before one byte of them is read.
        fields, tensors = read_header(path)
        tensor_bytes = [_bytes_of(tensor) for tensor in tensors]
        ends = [t.offset + n for t, n in zip(tensors, tensor_bytes, strict=True)]
        if max(ends, default=0) > path.stat().st_size:
            raise ValueError("it ends inside its tensors")
    except (ValueError, OSError, RecursionError) as error:
        raise UserError(f"{path} is not a complete GGUF file: {error}") from error
    architecture: Any = fields.get("general.architecture")
    if architecture not in list(_ARCHITECTURES):
        raise UserError(
            f"{path}: architecture must be one of {', '.join(_ARCHITECTURES)}, "
            f"got {architecture!r}"
        )
    # Keys of config.json, so that the reader of Hugging Face's serves.
    factors = {
        name: tensor
        for tensor in tensors
        if (name := tensor.name.removesuffix(".weight")) in _FACTORS
    }
    tables = GgufFile(path, list(factors.values()), {}, architecture)
    keys = _config_keys(
        fields,
        architecture,
        {name: tables.read(tensor.name).tolist() for name, tensor in factors.items()},
    )
    weights = [tensor for tensor in tensors if tensor not in factors.values()]
    source = GgufFile(path, weights, keys, architecture)
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
        architecture: str,
    ):
        """Takes the names and shapes; weights are read on demand.

        Args:
          path: the file.
          tensors: from its header.
          keys: config.json's keys.
          architecture: llama.cpp's. Of llama, rows of q and k have its own order; of
            Gemma, norms hold 1 + scale.
        """
        self.where = str(path)
        self._heads = {
            "q_proj": keys.get("num_attention_heads"),
            "k_proj": keys.get("num_key_value_heads", keys.get("num_attention_heads")),
        }
        self._permuted = architecture == "llama"
        family = FAMILIES[_ARCHITECTURES[architecture]]
        self._one_more = bool(family.fixed.get("one_plus"))
        self._path = path
        self._tensors = {_hf_name(tensor.name, family): tensor for tensor in tensors}
        self.tensors = {
            # What is expanded, is expanded to float32.
            name: TensorInfo(tensor.shape, "F32")
            for name, tensor in self._tensors.items()
        }

    def weight_dtype(self, tables: Collection[str]) -> WeightDtype:
        from gguf.constants import (  # pyright: ignore[reportMissingImports]
            GGMLQuantizationType,
        )

        layers: set[str] = set()
        others: set[str] = set()
        for name, tensor in self._tensors.items():
            kind = GGMLQuantizationType(tensor.kind).name
            if len(tensor.shape) > 1:
                (others if name in tables else layers).add(kind)
        if layers <= set(FLOATS):
            return "bfloat16" if layers | others == {"BF16"} else "float32"
        if len(layers) > 1 or not layers <= set(_NEUTRAL):
            raise UserError(
                f"{self.where}: --dtype keep needs layers of Q8_0, Q4_0 or Q4_1, and "
                f"they are {', '.join(sorted(layers))}: leave it out to expand them"
            )
        # Tables of other types are expanded.
        suffix = "" if others <= {"Q8_0", "Q4_0"} else "-layers"
        return cast(WeightDtype, layers.pop().lower() + suffix)

    def read(
        self, name: str, dtype: DTypeLike = np.float32, *, part: Part | None = None
    ) -> np.ndarray:
        values = empty_for_jax(self.tensors[name].shape, dtype)
        rows = values.reshape(-1, values.shape[-1])
        try:
            self._expand(self._tensors[name], part, rows)
        except (NotImplementedError, ValueError) as error:
            raise UserError(
                f"{self.where}: {name} cannot be dequantized: {error}"
            ) from error
        if self._one_more and values.ndim == 1 and "norm" in name:
            values -= 1
        projection = name.split(".")[-2]
        if self._permuted and projection in self._heads:
            # Only q and k are rotated, so only their rows are in llama.cpp's order.
            return unpermute(values, self._heads[projection] or 1)
        return values

    def _expand(self, tensor: GgufTensor, part: Part | None, rows: np.ndarray) -> None:
        """Fills [rows, width]; the package needs room for a copy of what it is given.

        Args:
          part: with this part of the weights; None: with the weights.

        Raises:
          ValueError: the file ends before the tensor.
        """
        from gguf.constants import (  # pyright: ignore[reportMissingImports]
            GGML_QUANT_SIZES,
            GGMLQuantizationType,
        )
        from gguf.quants import dequantize  # pyright: ignore[reportMissingImports]

        kind = GGMLQuantizationType(tensor.kind)
        width, neutral = _bytes_of(tensor) // len(rows), _NEUTRAL.get(kind.name, {})
        # Rows at a time, about a million weights: the expanded copy is what takes room.
        step = max(1, _AT_ONCE // rows.shape[1])
        with self._path.open("rb") as stream:
            stream.seek(tensor.offset)
            for start in range(0, len(rows), step):
                some = rows[start : start + step]
                raw = np.fromfile(stream, np.uint8, count=len(some) * width)
                for first, last, value in () if part is None else neutral[part]:
                    blocks = raw.reshape(-1, GGML_QUANT_SIZES[kind][1])
                    blocks[:, first:last] = value
                raw = raw.reshape(len(some), width)
                np.copyto(some, dequantize(raw, kind), casting="unsafe")


def _bytes_of(tensor: GgufTensor) -> int:
    """Counts the bytes of a tensor in the file.

    Raises:
      ValueError: its kind is not known, or its rows are not full blocks.
    """
    from gguf.constants import (  # pyright: ignore[reportMissingImports]
        GGML_QUANT_SIZES,
        GGMLQuantizationType,
    )

    block, size = GGML_QUANT_SIZES[GGMLQuantizationType(tensor.kind)]
    # Quantised weights come in blocks that share a scale.
    if tensor.shape[-1] % block:
        raise ValueError(f"a row of {tensor.name} is not a multiple of the block size")
    return math.prod(tensor.shape) // block * size


def unpermute(rows: np.ndarray, heads: int) -> np.ndarray:
    """Undoes llama.cpp's order of q's and k's rows.

    It rotates neighbours (2 i, 2 i + 1), Hugging Face and we rotate (i, i + E/2): its
    row 2 i + s of a head is our row s E/2 + i.
    """
    folded = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    return folded.swapaxes(1, 2).reshape(rows.shape)


def _config_keys(
    fields: dict[str, Any], architecture: str, factors: dict[str, list[float]]
) -> dict[str, Any]:
    keys: dict[str, Any] = {
        "model_type": _ARCHITECTURES[architecture],
        "rope_theta": 1e6 if architecture == "gemma3" else 1e4,
    }
    prefix = f"{architecture}."
    short = {
        key.removeprefix(prefix): value
        for key, value in fields.items()
        if key.startswith(prefix) and key.removeprefix(prefix) not in _REPEATED
    }
    if scaling := _rope_scaling(short, factors):
        keys["rope_scaling"] = scaling
    rotated = short.pop("rope.dimension_count", None)
    # Keep an unknown key's name, so that the config reader refuses it by name.
    keys |= {_KEYS.get(key, prefix + key): value for key, value in short.items()}
    width, heads = keys.get("hidden_size"), keys.get("num_attention_heads")
    if not (isinstance(width, int) and isinstance(heads, int) and heads):
        return keys
    head_width = keys.get("head_dim", width // heads)
    if architecture == "phi3" and rotated is not None:
        keys["partial_rotary_factor"] = rotated / head_width
    if architecture in ("gemma2", "gemma3"):
        # llama.cpp knows the two models of 27B, whose scale is not that of their heads.
        large = (keys["model_type"], keys.get("num_hidden_layers")) in _LARGE
        keys["query_pre_attn_scalar"] = width // heads if large else head_width
    return keys


_LARGE = (("gemma2", 46), ("gemma3_text", 62))


def _rope_scaling(
    short: dict[str, Any], factors: dict[str, list[float]]
) -> dict[str, Any] | None:
    """Removes the keys of a rope's scaling and returns them; None: it has none."""
    kind = short.pop("rope.scaling.type", None)
    stated = {
        "factor": short.pop("rope.scaling.factor", None),
        "original_max_position_embeddings": short.pop(
            "rope.scaling.original_context_length", None
        ),
        "attention_factor": short.pop("rope.scaling.attn_factor", None),
    }
    stated = {key: value for key, value in stated.items() if value is not None}
    if "rope_freqs" in factors:
        # Llama 3's rule, as the factors that it has led to.
        both = dict.fromkeys(("short_factor", "long_factor"), factors["rope_freqs"])
        return {"rope_type": "longrope", "attention_factor": 1.0} | both
    if len(factors) == 2:
        return stated | {
            "rope_type": "longrope",
            "short_factor": factors["rope_factors_short"],
            "long_factor": factors["rope_factors_long"],
        }
    if kind in (None, "none"):
        return None
    if kind != "yarn":
        stated.pop("attention_factor", None)
    return stated | {"rope_type": kind}


def _hf_name(name: str, family: Family) -> str:
    parts = name.split(".")
    if parts[0] == "blk" and len(parts) == 4:
        [number, module, suffix] = parts[1:]
        theirs = _module(family.inner, _IN_BLOCK.get(module, ()))
        prefix = f"{family.layer.format(number)}."
    else:
        [module, suffix] = parts if len(parts) == 2 else ("", "")
        theirs, prefix = _module(family.outer, _TOP.get(module, ())), ""
    # Keep an unknown tensor's name, so that it is refused by name.
    return name if theirs is None else f"{prefix}{theirs}.{suffix}"


def _module(modules: Mapping[str, str], ours: tuple[str, ...]) -> str | None:
    return next((theirs for theirs, name in modules.items() if name in ours), None)
