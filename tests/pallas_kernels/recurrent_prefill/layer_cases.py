"""Tiny layers for the kernels, and the reference's answers."""

from functools import cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.recurrent_prefill.call import (
    BlockSizes,
    LayerSpec,
    LayerWeights,
    RecurrentPrefillCall,
    RecurrentPrefillOptions,
    Rows,
    empty_cache,
)
from pallas_kernels.recurrent_prefill.reference import recurrent_prefill_reference
from pallas_kernels.recurrent_prefill.triton import backend as triton
from pallas_kernels.recurrent_prefill.xla import backend as xla
from tests.compiling import QUICK_COMPILE
from tests.tolerances import assert_gradients_close

WIDTH, HEADS, HEAD_WIDTH, INNER = 32, 2, 16, 64
quick_jit = partial(jax.jit, compiler_options=QUICK_COMPILE)


class Case(NamedTuple):
    """One tiny call; hashable, so that its reference is computed once."""

    positions: int
    layers: int = 1
    batch: int = 2
    heads: int = HEADS
    key_heads: int = HEADS
    head_width: int = HEAD_WIDTH
    norm: str = "rms"
    gated: bool = False
    biases: bool = False
    activation: str = "gelu"
    normed_persistent: bool = True
    dtype: str = "float32"
    schedule: str | None = None
    width: int = WIDTH
    inner: int = INNER
    alibi: float | None = 8.0
    rope_width: int = 0

    @property
    def spec(self) -> LayerSpec:
        return LayerSpec(
            heads=self.heads,
            key_heads=self.key_heads,
            head_width=self.head_width,
            norm=self.norm,  # pyright: ignore[reportArgumentType]
            qk_norm=self.norm,  # pyright: ignore[reportArgumentType]
            normed_persistent=self.normed_persistent,
            alibi_max_bias=self.alibi,
            rope_base=100.0 if self.rope_width else None,
            rope_width=self.rope_width,
            logit_scale=self.head_width**-0.5,
            residual_scale=0.7,
            activation=self.activation,  # pyright: ignore[reportArgumentType]
            dtype=self.dtype,  # pyright: ignore[reportArgumentType]
        )

    @property
    def options(self) -> dict:
        return {"spec": self.spec, "schedule": self.schedule, "tile": 16}

    def call(self, x, weights, cache=None, rows=None, **options):
        """Returns the call as backends receive it; by default one of training."""
        if cache is None:
            cache = empty_cache(self.layers, self.batch, 0, self.width, self.spec)
        options = RecurrentPrefillOptions(**{**self.options, **options})
        rows = Rows() if rows is None else rows
        return RecurrentPrefillCall(x, weights, cache, rows, options)

    def inputs(self) -> tuple[jax.Array, LayerWeights, jax.Array]:
        """Returns x, weights and a cotangent of z."""
        keys = jax.random.split(jax.random.key(0), 3)
        shape = (self.batch, self.positions, self.width)
        x, dz = (jax.random.normal(key, shape) for key in keys[:2])
        return x, self.weights(keys[2]), dz

    def weights(self, key: jax.Array) -> LayerWeights:
        """Returns weights of the size of a usual init, norms and biases disturbed."""
        D, F = self.width, self.inner
        H, K, E = self.heads, self.key_heads, self.head_width
        matrices = {
            "w_q": (D, H, E),
            "w_k": (D, K, E),
            "w_v": (D, K, E),
            "w_out": (H, E, D),
            "w_up": (D, F),
            "w_down": (F, D),
        }
        norms = {"attention_norm": D, "mlp_norm": D, "q_norm": H * E, "k_norm": K * E}
        vectors = {f"{name}_scale": (width,) for name, width in norms.items()}
        if self.gated:
            matrices["w_gate"] = (D, F)
        if self.biases:
            vectors |= {f"{name}_bias": (width,) for name, width in norms.items()}
            vectors |= {"b_q": (H, E), "b_k": (K, E), "b_v": (K, E)}
            vectors |= {"b_out": (D,), "b_up": (F,), "b_down": (D,)}
            vectors |= {"b_gate": (F,)} if self.gated else {}
        leaves = {}
        for name, shape in (matrices | vectors).items():
            key, own = jax.random.split(key)
            leaf = jax.random.normal(own, (self.layers, *shape))
            if name in matrices:
                leaf = leaf * (2.0 / sum(shape)) ** 0.5
            else:
                leaf = 0.1 * leaf + (1.0 if name.endswith("scale") else 0.0)
            leaves[name] = leaf
        return LayerWeights(**leaves)


@cache
def reference_values(case: Case) -> jax.Array:
    """Returns z in float32."""
    x, weights, _ = case.inputs()
    return quick_jit(partial(recurrent_prefill_reference, spec=case.spec))(x, weights)


@cache
def reference(case: Case):
    """Returns z, and the cotangents of x and weights, in float32."""
    x, weights, dz = case.inputs()

    def run(x, weights, dz):
        compute = partial(recurrent_prefill_reference, spec=case.spec)
        z, back = jax.vjp(compute, x, weights)
        return z, back(dz)

    return quick_jit(run)(x, weights, dz)


def interpreted(backend) -> dict:
    """Returns the options that run a backend's kernels as plain JAX.

    Every grid cell costs time there: the GPU kernels get few of them, and still more
    than one along each contracted axis and each row of blocks.
    """
    if backend is triton:
        few = {"splits": 1, "attend_rows": 16, "keys": 16}
        small = BlockSizes(rows=16, depth=16, columns=32, **few)
        return {"interpret": True, "blocks": small}
    return {"interpret": True}


def values(backend, case: Case, **changes) -> jax.Array:
    """Returns a backend's z in interpret mode."""
    x, weights, _ = case.inputs()
    options = interpreted(backend) | changes

    def run(x, weights):
        call = case.call(x, weights, **options)
        (z, _), _ = backend.forward(call, residuals=False)
        return z

    return quick_jit(run)(x, weights)


def values_and_gradients(backend, case: Case, rows: Rows | None = None):
    """Returns what `reference` does, from a backend in interpret mode."""
    return quick_jit(both_passes(backend, case, rows))(*case.inputs())


def both_passes(backend, case: Case, rows: Rows | None = None, **changes):
    """Returns the function of a case's inputs that runs both passes."""
    options = interpreted(backend) | changes

    def run(x, weights, dz):
        call = case.call(x, weights, rows=rows, **options)
        (z, written), saved = backend.forward(call, residuals=True)
        of = backend.backward(call, saved, (dz, written))
        return z, (of.x, of.weights)

    return run


def refusal(backend, case: Case, **changes) -> str | None:
    """Returns why a backend cannot express a call, whatever the device."""
    x, weights, _ = case.inputs()
    cache = empty_cache(
        case.layers, case.batch, changes.pop("slots", 0), case.width, case.spec
    )
    return backend.expressible(case.call(x, weights, cache, **changes))


def check_gradients_of_a_filled_cache(
    backend, case: Case, *, start: tuple[int, ...], slots: int
) -> None:
    """Compares with the XLA path; rows begin at `start`, the new cache is read too."""
    x, weights, dz = case.inputs()
    keys = jax.random.split(jax.random.key(1), 4)
    cache = empty_cache(case.layers, case.batch, slots, case.width, case.spec)
    fill = [jax.random.normal(key, cache.keys.shape) for key in keys]
    position = jnp.asarray(start, jnp.int32)
    cache = cache._replace(keys=fill[0], values=fill[1], position=position)
    cotangents = cache._replace(keys=fill[2], values=fill[3])

    def run(backend, **interpret):
        call = case.call(x, weights, cache, **interpret)
        _, saved = backend.forward(call, residuals=True)
        of = backend.backward(call, saved, (dz, cotangents))
        return of.x, of.weights, of.cache.keys, of.cache.values

    got = quick_jit(lambda: run(backend, **interpreted(backend)))()
    assert_gradients_close(got, quick_jit(lambda: run(xla))())
