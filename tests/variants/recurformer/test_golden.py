"""Mixers and full blocks against independent references, every file of the folder."""

import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from recurjax.layers.attention import AttentionConfig
from recurjax.layers.mamba import MambaCache, MambaWeights, mix
from recurjax.layers.mlp import MlpConfig
from recurjax.layers.position import Rope
from recurjax.parameters import from_nested_dict, to_nested_dict
from recurjax.types import Tokens
from recurjax.variants.recurformer import MambaConfig, RecurFormerConfig
from recurjax.variants.recurformer.block import PartialAttention
from recurjax.variants.recurformer.stack import layer_cache
from recurjax.variants.transformer import TransformerConfig
from tests.compiling import QUICK_COMPILE
from tests.golden.cases import golden_cases, largest_of_each, load
from tests.golden.torch_layout import into_heads, out_of_heads

MIXERS = golden_cases("recurformer/mixer*.npz")
BLOCKS = golden_cases("recurformer/block_*.npz")
quick = partial(jax.jit, compiler_options=QUICK_COMPILE)


class Tolerance:
    """Of the format: shares of the largest value of the authors' tensor."""

    def __init__(self, dtype: str):
        self.value, self.gradient = (
            (1e-11, 1e-10) if dtype == "float64" else (1e-5, 1e-4)
        )

    def values(self, got, want, whole=None):
        self._close(got, want, self.value, whole)

    def gradients(self, got, want, whole=None):
        self._close(got, want, self.gradient, whole)

    def _close(self, got, want, tolerance, whole):
        whole = want if whole is None else whole
        assert jax.tree.structure(got) == jax.tree.structure(want)
        for mine, theirs, scale in zip(
            *map(jax.tree.leaves, (got, want, whole)), strict=True
        ):
            size = np.max(np.abs(scale), initial=1e-30)
            np.testing.assert_allclose(mine, theirs, rtol=0, atol=tolerance * size)


def mixer_weights(read, prefix: str = "") -> dict:
    """torch's names and layouts to ours."""
    w_in = read(f"{prefix}in_proj.weight")
    u, z = np.split(w_in, 2)
    return {
        "w_u": u.T,
        "w_z": z.T,
        "w_conv": read(f"{prefix}conv1d.weight")[:, 0].T,
        "b_conv": read(f"{prefix}conv1d.bias"),
        "w_x": read(f"{prefix}x_proj.weight").T,
        "w_dt": read(f"{prefix}dt_proj.weight").T,
        "b_dt": read(f"{prefix}dt_proj.bias"),
        "a_log": read(f"{prefix}A_log"),
        "skip": read(f"{prefix}D"),
        "w_back": read(f"{prefix}out_proj.weight").T,
    }


def of(case, kind):
    return lambda name: case[f"{kind}/{name}"]


def empty(weights: dict, batch: int) -> MambaCache:
    I, N = weights["a_log"].shape
    taps, dtype = len(weights["w_conv"]), weights["w_u"].dtype
    return MambaCache(
        jnp.zeros((batch, I, taps), dtype), jnp.zeros((batch, I, N), dtype)
    )


@pytest.mark.parametrize("path", MIXERS)
def test_a_mixer_is_the_references(path):
    case = load(path)
    dtype = str(case["x"].dtype)
    with jax.enable_x64(dtype == "float64"):
        close = Tolerance(dtype)
        weights = jax.tree.map(jnp.asarray, mixer_weights(of(case, "p")))
        x, starts = jnp.asarray(case["x"]), case.get("segment_starts")
        starts = None if starts is None else jnp.asarray(starts != 0)
        cache = empty(weights, len(x))

        def run(weights, x):
            return mix(x, MambaWeights(**weights), cache, starts=starts)

        y, after = quick(run)(weights, x)
        close.values(y, case["y"])
        close.values(after.conv, case["conv_state"])
        close.values(after.state, case["ssm_state"])

        @quick
        @partial(jax.grad, argnums=(0, 1))
        def pull(weights, x):
            return jnp.sum(run(weights, x)[0] * case["loss_weights"])

        of_weights, of_x = pull(weights, x)
        want, whole = (
            mixer_weights(of(tensors, "g")) for tensors in (case, largest_of_each(case))
        )
        close.gradients(of_x, case["grad_x"])
        close.gradients(of_weights, want, whole)
        if "y_step" not in case:
            return

        @quick
        def steps(weights, x):
            def step(cache, x_t):
                y, cache = mix(x_t[:, None], MambaWeights(**weights), cache)
                return cache, y[:, 0]

            return jax.lax.scan(step, cache, x.swapaxes(0, 1))

        after, stepped = steps(weights, x)
        close.values(stepped.swapaxes(0, 1), case["y_step"])
        close.values(after.state, case["ssm_state"])
        close.values(after.conv, case["conv_state"])


def block_of(case) -> tuple[RecurFormerConfig, dict]:
    meta = json.loads(str(case["meta_json"]))
    H, K, E = (
        meta[name]
        for name in ("num_attention_heads", "num_key_value_heads", "head_dim")
    )
    base = TransformerConfig(
        layers=1,
        width=meta["hidden_size"],
        attention=AttentionConfig(
            heads=H,
            key_heads=K,
            head_width=E,
            position=Rope(base=meta["rope_theta"]),
            qkv_bias="p/v_proj.bias" in case,
        ),
        mlp=MlpConfig(width=1),
    )
    mamba = MambaConfig(
        conv=meta["d_conv"],
        state=meta["d_state"],
        dt_rank=meta["dt_rank"],
        expand=meta["expand"],
    )
    config = RecurFormerConfig(
        transformer=base, replaced=(tuple(meta["replaced"]),), mamba=mamba
    )
    heads = config.heads(0)
    assert list(heads.remaining) == meta["remaining"]
    assert list(heads.key_heads) == meta["kept_kv"]
    return config, meta


def block_weights(read, case, config: RecurFormerConfig) -> dict:
    heads, a = config.heads(0), config.transformer.attention
    counts = {"q": len(heads.remaining), "k": len(heads.key_heads), "v": a.key_heads}
    nested = {
        "w_out": out_of_heads(read("o_proj.weight"), a.heads),
        "mamba": mixer_weights(read, "mamba."),
    }
    for name, count in counts.items():
        if count:
            nested[f"w_{name}"] = into_heads(read(f"{name}_proj.weight"), count)
            if a.qkv_bias:
                nested[f"b_{name}"] = read(f"{name}_proj.bias").reshape(count, -1)
    return nested


@pytest.mark.parametrize("path", BLOCKS)
def test_a_block_is_the_references(path):
    case = load(path)
    config, meta = block_of(case)
    with jax.enable_x64(True):
        close = Tolerance("float64")
        like = jax.eval_shape(
            lambda: PartialAttention(config, layer=0, rngs=nnx.Rngs(0))
        )
        block = from_nested_dict(
            like,
            jax.tree.map(jnp.asarray, block_weights(of(case, "p"), case, config)),
        )
        x, loss = jnp.asarray(case["x"]), case["loss_weights"]
        B, T = x.shape[:2]

        @quick
        @partial(jax.value_and_grad, argnums=(0, 1), has_aux=True)
        def run(block, x):
            tokens = Tokens(jnp.zeros((B, T), jnp.int32))
            y, _ = block(x, layer_cache(config, 0, B, 0, x.dtype), tokens)
            return jnp.sum(y * loss), y

        (_, y), (of_block, of_x) = run(block, x)
        close.values(y, case["y"])
        close.gradients(of_x, case["grad_x"])
        want, whole = (
            block_weights(of(tensors, "g"), tensors, config)
            for tensors in (case, largest_of_each(case))
        )
        close.gradients(to_nested_dict(of_block), want, whole)

        @quick
        def steps(block, x):
            def step(cache, at):
                t, x_t = at
                tokens = Tokens(jnp.zeros((B, 1), jnp.int32))
                # A block whose heads are all replaced has no keys and values.
                if cache.keys_values is not None:
                    position = jnp.full(B, t, jnp.int32)
                    held = cache.keys_values._replace(position=position)
                    cache = cache._replace(keys_values=held)
                y, cache = block(x_t[:, None], cache, tokens)
                return cache, y[:, 0]

            start = layer_cache(config, 0, B, T, x.dtype)
            return jax.lax.scan(step, start, (jnp.arange(T), x.swapaxes(0, 1)))

        after, stepped = steps(block, x)
        close.values(stepped.swapaxes(0, 1), case["y_step"])
        close.values(after.mamba.conv, case["conv_state"])
        close.values(after.mamba.state, case["ssm_state"])
        held = after.keys_values
        assert (held is not None) == bool(meta["remaining"]) == ("k_cache" in case)
        if held is not None:
            for name, array in (("k", held.keys), ("v", held.values)):
                close.values(array[0].swapaxes(1, 2), case[f"{name}_cache"])
