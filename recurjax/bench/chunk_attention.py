"""The op of RAT's attention by backend, and of long plain one; block sizes tuned."""

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.chunk_attention import BlockSizes, ChunkEnds, chunk_attention
from pallas_kernels.chunk_attention.api import OP
from pallas_kernels.chunk_attention.call import (
    ChunkAttentionCall,
    ChunkAttentionOptions,
)
from recurjax.bench.op_by_backend import (
    Call,
    Candidates,
    Dtype,
    OpBench,
    as_one_device_has_it,
    drawn,
    rows_of_step,
    summary,
)
from recurjax.errors import UserError
from recurjax.experiment import Experiment
from recurjax.layers.attention import AttentionConfig
from recurjax.layers.attention.blocked import runs_as_chunks_of_one
from recurjax.layers.attention.implementation import AttentionCall, choose
from recurjax.layers.position import Alibi
from recurjax.variants.rat import AttentionMixerConfig, RatConfig, RatMixerConfig
from recurjax.variants.transformer import TransformerConfig

SMALL = (
    {"B": 1, "T": 4096, "H": 4, "N": 2, "E": 64, "C": 16},
    {"B": 1, "T": 4096, "H": 4, "N": 4, "E": 64, "C": 1},
)
"""RAT(16) and plain attention for two CPU cores."""

LARGE = (
    {"B": 64, "T": 4096, "H": 16, "N": 2, "E": 128, "C": 16},
    {"B": 1, "T": 262144, "H": 16, "N": 2, "E": 128, "C": 16},
    {"B": 8, "T": 4096, "H": 16, "N": 16, "E": 128, "C": 1},
)
"""Those of the 1.3B model for one accelerator, and RAT(16) on one long row."""

_GPU_BLOCKS = (16, 32, 64, 128, 256)
CANDIDATES: Candidates = {
    "triton": {
        "block_q": _GPU_BLOCKS,
        "block_k": _GPU_BLOCKS,
        "backward_block_k": _GPU_BLOCKS,
        "backward_block_q": _GPU_BLOCKS,
        "warps": (4, 8),
        "stages": (1, 2, 3, 4),
        "splits": (1, 2, 4, 8),
    },
    "mosaic_tpu": {
        "block_q": (128, 256, 512, 1024, 2048),
        "block_k": (128, 256, 512, 1024, 2048),
    },
    "xla": {"block_k": (128, 256, 512, 1024), "block_q": (128, 256, 512, 1024)},
}


def calls_of_run(experiment: Experiment) -> list[Call]:
    """Returns the calls that one device has in a step of the run."""
    stack = experiment.model.stack
    found: list[dict[str, int]] = []
    if isinstance(stack, RatConfig):
        for mixer in dict.fromkeys(stack.pattern):
            if isinstance(mixer, RatMixerConfig):
                found.append(_of_rat(experiment, mixer))
            elif isinstance(mixer, AttentionMixerConfig):
                found += _of_attention(experiment, mixer.attention, mixer.window)
    if isinstance(stack, TransformerConfig):
        for window in dict.fromkeys(stack.windows):
            found += _of_attention(experiment, stack.attention, window)
    if not found:
        raise UserError(
            f"{experiment.name} trains a {type(stack).__name__}, of which no layer has "
            "the op chunk_attention here: RAT has, and a Transformer where neither "
            "windows nor biases nor another kernel serve its attention"
        )
    calls = []
    for sizes in found:
        shapes = _shapes(sizes, experiment.model.dtype, experiment.has_segments)
        shapes = as_one_device_has_it(OP, shapes, experiment)
        calls.append(call_of(shapes))
    return calls


def call_of(shapes: ChunkAttentionCall) -> Call:
    """Makes a call of random arrays, as the op's backends take them."""
    call = drawn(shapes)
    (B, T, N, E), H = call.q.shape, call.own_logits.shape[2]
    chunk, scale = call.options.chunk, call.options.scale

    def run(call, **options):
        q, own_logits, own_values, ends, first, documents, _ = call
        options |= {"first": first, "documents": documents}
        return chunk_attention(
            q, own_logits, own_values, ends, chunk=chunk, scale=scale, **options
        )

    return Call(
        op=OP,
        function=run,
        arrays=(call,),
        shape={"B": B, "T": T, "H": H, "N": N, "E": E, "C": chunk},
        shape_class=call.shape_class,
        sized=lambda sizes: {"blocks": BlockSizes(**sizes)},
    )


def _calls(large: bool, dtype: Dtype) -> Iterator[Call]:
    for sizes in LARGE if large else SMALL:
        yield call_of(_shapes(sizes, dtype, packed=False))


def _shapes(sizes: Mapping[str, int], dtype: str, packed: bool) -> ChunkAttentionCall:
    B, T, H, N, E, C = (sizes[letter] for letter in "BTHNEC")
    # As RAT's training: every chunk's end, none where there is one chunk only.
    S = -(-T // C)
    S = S if S > 1 else 0
    shape = jax.ShapeDtypeStruct
    wide = jnp.promote_types(dtype, jnp.float32)
    ends = shape((B, H, S, E), dtype)
    known = shape((B, S), jnp.int32) if packed else None
    arrays: dict[str, Any] = {
        "q": shape((B, T, N, E), dtype),
        "own_logits": shape((B, T, H), wide),
        "own_values": shape((B, T, H, E), dtype),
        "ends": ChunkEnds(ends, ends, known),  # pyright: ignore[reportArgumentType]
        "first": None,
        "documents": shape((B, T), jnp.int32) if packed else None,
    }
    options = ChunkAttentionOptions(chunk=C, scale=E**-0.5)
    return ChunkAttentionCall(**arrays, options=options)


def _of_rat(experiment: Experiment, mixer: RatMixerConfig) -> dict[str, int]:
    length = experiment.training.length
    C = min(mixer.chunk, length)
    sizes = {"H": mixer.heads, "N": mixer.groups, "E": mixer.head_width, "C": C}
    # Whole chunks: the mixer adds what is missing.
    return {"B": rows_of_step(experiment), "T": length + -length % C, **sizes}


def _of_attention(
    experiment: Experiment, attention: AttentionConfig, window: int | None
) -> list[dict[str, int]]:
    """Returns the call of a layer that attends to all tokens, if it has the op."""
    B, T = rows_of_step(experiment), experiment.training.length
    H, E = attention.heads, attention.head_width
    call = AttentionCall(
        shape=(B, T, H, E),
        key_heads=attention.key_heads,
        dtype=jnp.dtype(experiment.model.dtype),
        causal=True,
        window=window,
        dense=False,
        segments=experiment.has_segments,
        alibi=isinstance(attention.position, Alibi),
        soft_cap=attention.soft_cap,
    )
    serves = choose(call, attention.implementation) == "blocks"
    if not (serves and call.plain and runs_as_chunks_of_one(T)):
        return []
    return [{"B": B, "T": T, "H": H, "N": H, "E": E, "C": 1}]


__all__ = ["rows", "summary", "tune"]
_BENCH = OpBench(calls=_calls, calls_of_run=calls_of_run, candidates=CANDIDATES)
rows, tune = _BENCH.rows, _BENCH.tune
