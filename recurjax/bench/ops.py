"""The ops of pallas_kernels by backend: both passes of every backend that serves."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
from flax import nnx

from pallas_kernels.chunk_attention import ChunkEnds, chunk_attention
from pallas_kernels.chunk_attention.api import OP as CHUNK_ATTENTION
from pallas_kernels.gated_scan import GateLogits, gated_scan, queried_scan
from pallas_kernels.gated_scan.api import OP as GATED_SCAN
from pallas_kernels.recurrent_prefill import empty_cache, recurrent_prefill
from pallas_kernels.recurrent_prefill.api import OP as RECURRENT_PREFILL
from pallas_kernels.selective_scan import selective_scan
from pallas_kernels.selective_scan.api import OP as SELECTIVE_SCAN
from recurjax.bench import recurrent_transformer
from recurjax.bench.timing import BenchRow, repeat, row
from recurjax.variants.recurrent_transformer import (
    RecurrentTransformerConfig,
    RecurrentTransformerStack,
)
from recurjax.variants.recurrent_transformer.block import spec_of, weights_of

Dtype = Literal["float32", "bfloat16"]
Shape = Mapping[str, int]
PASSES = ("forward", "forward_backward")


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """A call of an op.

    Attributes:
      function: (*arrays, implementation=) -> outputs.
      arrays: trees; gradients are those of their floating leaves.
    """

    function: Callable[..., Any]
    arrays: tuple[Any, ...]

    def program(self, what: str, **options: Any) -> Callable[[], Any]:
        """Compiles a pass; calling it runs it."""
        leaves, tree = jax.tree.flatten(self.arrays)
        is_float = [jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in leaves]

        def run(floating: list[jax.Array], rest: list[jax.Array]) -> Any:
            floats, others = iter(floating), iter(rest)
            merged = [next(floats if each else others) for each in is_float]
            return self.function(*jax.tree.unflatten(tree, merged), **options)

        def squares(floating: list[jax.Array], rest: list[jax.Array]) -> jax.Array:
            # A plain sum's gradient is the same everywhere: a compiler may use that.
            out = jax.tree.leaves(run(floating, rest))
            return sum((x.astype(jnp.float32) ** 2).sum() for x in out)  # pyright: ignore[reportReturnType]

        function = run if what == "forward" else jax.grad(squares)
        pairs = list(zip(leaves, is_float, strict=True))
        floating = [leaf for leaf, each in pairs if each]
        rest = [leaf for leaf, each in pairs if not each]
        compiled = jax.jit(function).lower(floating, rest).compile()
        return partial(compiled, floating, rest)


@dataclass(frozen=True, kw_only=True, slots=True)
class OpBench:
    """An op's bench.

    Attributes:
      name: name of the op.
      backends: their names, as a call prefers them.
      small: shapes by letter, B and T first, for two CPU cores.
      large: for one accelerator.
      make: (shape, dtype) -> the call.
    """

    name: str
    backends: Iterable[str]
    small: Iterable[Shape]
    large: Iterable[Shape]
    make: Callable[[Shape, Dtype], Call]

    def rows(self, *, large: bool, dtype: Dtype, repeats: int) -> Iterator[BenchRow]:
        """Measures both passes of every backend that supports a call here."""
        for shape in self.large if large else self.small:
            call = self.make(shape, dtype)
            for backend in self.serving(call):
                for what in PASSES:
                    run = call.program(what, implementation=backend)
                    name = f"{self.name}/{backend}/{what}"
                    times = repeat(run, repeats=repeats)
                    tokens = shape["B"] * shape["T"]
                    yield row(name, shape, dtype, times, tokens=tokens)

    def serving(self, call: Call) -> Iterator[str]:
        """Yields the backends that serve it on this device, as a call prefers them."""
        for name in self.backends:
            try:
                jax.eval_shape(
                    partial(call.function, implementation=name), *call.arrays
                )
            except NotImplementedError:
                continue
            yield name

    @staticmethod
    def summary(rows: list[BenchRow]) -> str:
        """Names the fastest backend of every shape where there are several."""
        lines = []
        for shape in {tuple(r.shape.items()): r.shape for r in rows}.values():
            both = {
                r.name.split("/")[1]: r.min_ms
                for r in rows
                if r.shape == shape and r.name.endswith("/forward_backward")
            }
            if len(both) > 1:
                ordered = sorted(both, key=lambda name: both[name])
                times = ", ".join(f"{name} {both[name]:,.1f} ms" for name in ordered)
                sizes = ", ".join(f"{letter} {size}" for letter, size in shape.items())
                lines.append(f"{sizes}, both passes: {times}")
        return "\n".join(lines)


def _draw(shapes: Any) -> Any:
    """Returns normal numbers of these shapes."""
    leaves, tree = jax.tree.flatten(shapes)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    arrays = [
        jax.random.normal(key, leaf.shape, leaf.dtype)
        for key, leaf in zip(keys, leaves, strict=True)
    ]
    return jax.tree.unflatten(tree, arrays)


def _layer(shape: Shape, dtype: Dtype) -> Call:
    """One layer of the variant's bench, in the default order of work."""
    config = recurrent_transformer.layers(dict(shape))["prefix"]
    config = cast(RecurrentTransformerConfig, config)
    stack = jax.jit(lambda: RecurrentTransformerStack(config, rngs=nnx.Rngs(0)))()
    B, T, D = (shape[letter] for letter in "BTD")
    # The residual stream is at least float32, as the stack gives it to the op.
    wide = jnp.promote_types(dtype, jnp.float32)
    x = jax.random.normal(jax.random.key(1), (B, T, D), wide)
    weights, spec = weights_of(stack.blocks), spec_of(config, dtype)
    cache = empty_cache(weights.w_q.shape[0], B, 0, D, spec)

    def run(x, weights, **options):
        options = {"spec": spec, "schedule": config.schedule, **options}
        return recurrent_prefill(x, weights, cache, **options)[0]

    return Call(function=run, arrays=(x, weights))


def _attention(shape: Shape, dtype: Dtype) -> Call:
    B, T, H, N, E, C = (shape[letter] for letter in "BTHNEC")
    # As RAT's training: every chunk's end, none where there is one chunk only.
    S = -(-T // C)
    S = S if S > 1 else 0
    array = jax.ShapeDtypeStruct
    wide = jnp.promote_types(dtype, jnp.float32)
    arrays = _draw(
        (
            array((B, T, N, E), dtype),
            array((B, T, H), wide),
            array((B, T, H, E), dtype),
            *(array((B, H, S, E), dtype),) * 2,
        )
    )

    def run(q, own_logits, own_values, keys, values, **options):
        ends = ChunkEnds(keys, values)
        options |= {"chunk": C, "scale": E**-0.5}
        return chunk_attention(q, own_logits, own_values, ends, **options)

    return Call(function=run, arrays=arrays)


def _gated(shape: Shape, dtype: Dtype) -> Call:
    """RAT's scan, whose queries of width E read W channels of keys, or the RNN's."""
    B, T, D = (shape[letter] for letter in "BTD")
    array = jax.ShapeDtypeStruct
    logits, bias = array((B, T, D), dtype), array((D,), jnp.float32)
    if "C" not in shape:

        def run(logits, bias, values, **options):
            return gated_scan(GateLogits(logits, bias), (values,), **options).states

        return Call(function=run, arrays=_draw((logits, bias, logits)))
    W, E, C = (shape[letter] for letter in "WEC")
    keys, queries = array((B, T, W), dtype), array((B, T, W // E, E), dtype)

    def read(logits, bias, values, keys, queries, **options):
        gate = GateLogits(logits, bias)
        out = queried_scan(gate, values, keys, queries, chunk=C, **options)
        return out.values, out.ends, out.logits

    return Call(function=read, arrays=_draw((logits, bias, logits, keys, queries)))


def _selective(shape: Shape, dtype: Dtype) -> Call:
    B, T, I, N = (shape[letter] for letter in "BTIN")
    array = jax.ShapeDtypeStruct
    wide = jnp.promote_types(dtype, jnp.float32)
    by_channel, by_state = array((B, T, I), dtype), array((B, T, N), dtype)
    row = array((I,), wide)
    arrays = {"u": by_channel, "dt": by_channel, "a": array((I, N), wide)}
    arrays |= {"b": by_state, "c": by_state, "skip": row, "z": by_channel}
    arrays |= {"dt_bias": row, "initial": array((B, I, N), wide)}
    arrays = _draw(arrays)
    # Decays that stay inside (0, 1): long rows neither vanish nor overflow.
    arrays["a"] = -jnp.exp(arrays["a"])

    def run(arrays, **options):
        return selective_scan(**arrays, **options).y

    return Call(function=run, arrays=(arrays,))


BENCHES = {
    "recurrent_prefill": OpBench(
        name="recurrent_prefill",
        backends=RECURRENT_PREFILL.backends,
        small=recurrent_transformer.SMALL,
        large=recurrent_transformer.LARGE,
        make=_layer,
    ),
    # RAT(16) and plain attention; the 1.3B model's, RAT(16) on one long row, and plain.
    "chunk_attention": OpBench(
        name="chunk_attention",
        backends=CHUNK_ATTENTION.backends,
        small=(
            {"B": 1, "T": 4096, "H": 4, "N": 2, "E": 64, "C": 16},
            {"B": 1, "T": 4096, "H": 4, "N": 4, "E": 64, "C": 1},
        ),
        large=(
            {"B": 64, "T": 4096, "H": 16, "N": 2, "E": 128, "C": 16},
            {"B": 1, "T": 262144, "H": 16, "N": 2, "E": 128, "C": 16},
            {"B": 8, "T": 4096, "H": 16, "N": 16, "E": 128, "C": 1},
        ),
        make=_attention,
    ),
    # RAT(16) and the RNN; the 1.3B model's, and the RNN on one long row.
    "gated_scan": OpBench(
        name="gated_scan",
        backends=GATED_SCAN.backends,
        small=(
            {"B": 1, "T": 4096, "D": 256, "W": 128, "E": 64, "C": 16},
            {"B": 1, "T": 4096, "D": 256},
        ),
        large=(
            {"B": 64, "T": 4096, "D": 2048, "W": 256, "E": 128, "C": 16},
            {"B": 64, "T": 4096, "D": 2048},
            {"B": 1, "T": 262144, "D": 2048},
        ),
        make=_gated,
    ),
    "selective_scan": OpBench(
        name="selective_scan",
        backends=SELECTIVE_SCAN.backends,
        small=({"B": 1, "T": 2048, "I": 512, "N": 16},),
        large=({"B": 8, "T": 4096, "I": 2048, "N": 16},),
        make=_selective,
    ),
}
"""By the name of the op."""
