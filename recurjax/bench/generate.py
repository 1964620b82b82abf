"""Prefill and decode of a language model of SmolLM2-135M's shape, by the engine."""

from collections.abc import Iterator
from typing import Literal

import jax
import numpy as np
from flax import nnx

from recurjax.bench.timing import BenchRow, row
from recurjax.inference.compute_dtype import in_compute_dtype
from recurjax.inference.generate import generate_tokens
from recurjax.inference.sampling import SamplingConfig
from recurjax.layers.attention import AttentionConfig
from recurjax.layers.mlp import MlpConfig
from recurjax.layers.norm import NormConfig
from recurjax.layers.position import Rope
from recurjax.model import Decoder, ModelConfig
from recurjax.variants.transformer import TransformerConfig

Dtype = Literal["float32", "bfloat16"]

_NAME = "generate"
SHAPE = {"L": 30, "D": 576, "H": 9, "K": 3, "E": 64, "F": 1536, "V": 49152}
_PROMPTS = ((1, 32), (8, 32), (1, 512))
"""Rows, and tokens of each prompt."""
_NEW = 33


def rows(*, large: bool, dtype: Dtype, repeats: int) -> Iterator[BenchRow]:
    """Times the model's prefill of a prompt, and its decode of one row and of eight."""
    del large
    model = jax.jit(lambda key: Decoder(_config(dtype), rngs=nnx.Rngs(key)))
    model = in_compute_dtype(model(jax.random.key(0)))
    greedy = SamplingConfig(temperature=0.0)
    for B, T in _PROMPTS:
        draw = np.random.default_rng(0)
        prompts = [draw.integers(SHAPE["V"], size=T) for _ in range(B)]
        timings = [
            generate_tokens(model, prompts, max_new_tokens=_NEW, sampling=greedy).timing
            for _ in range(repeats + 1)
        ][1:]  # The first one compiles.
        sizes = {"B": B, "T": T}
        prefill = [timing.prefill_seconds for timing in timings]
        yield row(f"{_NAME}/prefill", sizes, dtype, prefill, tokens=B * T)
        # Seconds a token of every row.
        decode = [timing.decode_seconds / (_NEW - 1) for timing in timings]
        yield row(f"{_NAME}/decode", sizes, dtype, decode, tokens=B)


def summary(rows: list[BenchRow]) -> str:
    """Reports the rates of the fastest repeats."""
    words = [
        f"{x.name} of {x.shape['B']} x {x.shape['T']} {x.min_ms:,.1f} ms" for x in rows
    ]
    return "; ".join(words)


def _config(dtype: Dtype) -> ModelConfig:
    L, D, H, K, E, F, V = SHAPE.values()
    norm = NormConfig(kind="rms", eps=1e-5)
    return ModelConfig(
        vocabulary=V,
        tied_head=True,
        final_norm=norm,
        dtype=dtype,
        stack=TransformerConfig(
            layers=L,
            width=D,
            norm=norm,
            attention=AttentionConfig(
                heads=H, key_heads=K, head_width=E, position=Rope(base=100000.0)
            ),
            mlp=MlpConfig(kind="swiglu", width=F),
        ),
    )
