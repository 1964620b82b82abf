"""The Recurrent Transformer authors' baseline blocks: values, gradients, caches."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from recurjax.layers.attention import AttentionConfig
from recurjax.layers.mlp import MlpConfig
from recurjax.layers.norm import NormConfig
from recurjax.layers.position import Alibi, alibi_bias
from recurjax.parameters import from_nested_dict, to_nested_dict
from recurjax.types import Tokens
from recurjax.variants.transformer import TransformerConfig, TransformerStack
from tests.compiling import QUICK_COMPILE
from tests.golden.cases import golden_cases, largest_of_each, load
from tests.golden.one_position import write_one_position
from tests.golden.torch_layout import transformer_block
from tests.tolerances import assert_gradients_close, assert_values_close
from tests.variants.recurrent_transformer.golden_cases import (
    ACTIVATIONS,
    NORMS,
    meta_of,
)

quick = partial(jax.jit, compiler_options=QUICK_COMPILE)
CASES = golden_cases("recurrent_transformer/transformer_block_*.npz")


@pytest.mark.parametrize("path", CASES)
def test_values_and_gradients_are_the_authors(path):
    case = load(path)
    meta = meta_of(case, block="sequential")
    with jax.enable_x64(meta["dtype"] == "float64"):
        stack = stack_of(case, meta)

        @quick
        @partial(jax.value_and_grad, argnums=(0, 1), has_aux=True)
        def run(stack, x):
            z, _ = stack(x, stack.init_cache(x.shape[0], 0, x.dtype), tokens_of(x))
            return jnp.sum(z * case["g"]), z

        (loss, z), (for_stack, for_x) = run(stack, jnp.asarray(case["x"]))
        assert_values_close(z, case["z"], meta["dtype"])
        assert_gradients_close(loss, case["loss"], meta["dtype"])
        want, whole = (
            {"x": tensors["grad.x"], "stack": nested(tensors, meta, "grad")}
            for tensors in (case, largest_of_each(case))
        )
        got = {"x": for_x, "stack": to_nested_dict(for_stack)}
        assert_gradients_close(got, want, meta["dtype"], whole=whole)


@pytest.mark.parametrize("path", CASES)
def test_a_carried_cache_gives_the_authors_values(path):
    case = load(path)
    meta = meta_of(case, block="sequential")
    with jax.enable_x64(meta["dtype"] == "float64"):
        stack = stack_of(case, meta)
        x = jnp.asarray(case["x"])
        cut = meta["N"] // 2

        @quick
        def run(stack, x):
            cache = stack.init_cache(x.shape[0], x.shape[1], x.dtype)
            parts = []
            if cut:  # one position has nothing before it
                first, cache = stack(x[:, :cut], cache, tokens_of(x[:, :cut]))
                parts.append(first)

            def step(cache, x_t):
                z_t, cache = stack(x_t[:, None], cache, tokens_of(x_t[:, None]))
                return cache, z_t[:, 0]

            _, steps = jax.lax.scan(step, cache, x[:, cut:].swapaxes(0, 1))
            return jnp.concatenate([*parts, steps.swapaxes(0, 1)], axis=1)

        assert_values_close(run(stack, x), case["z"], meta["dtype"])


@pytest.mark.parametrize("path", CASES)
def test_the_alibi_bias_is_the_authors(path):
    case = load(path)
    meta = meta_of(case, block="sequential")
    if not meta["alibi"]:
        assert "bias" not in case
        return
    N = meta["N"]
    positions = jnp.arange(N)[None]
    ours = alibi_bias(
        meta["n_heads"], positions, positions, Alibi(max_bias=meta["alibi_bias_max"])
    )
    seen = np.tril(np.ones((N, N), bool))
    assert_values_close(
        np.where(seen, ours, 0), np.where(seen, case["bias"], 0), "float32"
    )


@pytest.mark.slow
def test_a_case_of_one_position_is_met(tmp_path):
    path = write_one_position(tmp_path / "transformer_block_one.npz", "sequential")
    test_values_and_gradients_are_the_authors(path)
    test_a_carried_cache_gives_the_authors_values(path)


def stack_of(case, meta) -> TransformerStack:
    config = config_of(case, meta)
    like = jax.eval_shape(lambda: TransformerStack(config, rngs=nnx.Rngs(0)))
    return from_nested_dict(
        like, jax.tree.map(jnp.asarray, nested(case, meta, "param"))
    )


def nested(case, meta, kind: str) -> dict:
    gated = ACTIVATIONS[meta["activation"]] == "swiglu"
    blocks = [
        transformer_block(
            lambda name, layer=layer: case.get(f"{kind}.layer{layer}.{name}"),
            heads=meta["n_heads"],
            gated=gated,
        )
        for layer in range(meta["n_layers"])
    ]
    return {"blocks": {"0": jax.tree.map(lambda *layers: np.stack(layers), *blocks)}}


def config_of(case, meta) -> TransformerConfig:
    def has(name: str) -> bool:
        return f"param.layer0.{name}" in case

    def norm_of(name: str) -> NormConfig:
        return NormConfig(
            kind=NORMS[meta["norm"]],
            eps=meta["eps"],
            scale=has(f"{name}.weight"),
            bias=has(f"{name}.bias"),
        )

    activation = ACTIVATIONS[meta["activation"]]
    attention = AttentionConfig(
        heads=meta["n_heads"],
        key_heads=meta["n_heads"],
        head_width=meta["d_model"] // meta["n_heads"],
        position=Alibi(max_bias=meta["alibi_bias_max"]) if meta["alibi"] else None,
        qk_norm=norm_of("q_norm") if meta["qk_norm"] else None,
        qk_norm_over="full",
        qkv_bias=has("att_proj.bias"),
        out_bias=has("attn_out.bias"),
    )
    hidden = case["param.layer0.ff_out.weight"].shape[1]
    return TransformerConfig(
        layers=meta["n_layers"],
        width=meta["d_model"],
        attention=attention,
        mlp=MlpConfig(kind=activation, width=hidden, bias=has("ff_proj.bias")),
        norm=norm_of("attn_norm"),
    )


def tokens_of(x) -> Tokens:
    return Tokens(ids=jnp.zeros(x.shape[:2], jnp.int32))
