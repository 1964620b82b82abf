"""Weights as integers: what they round to, and every variant on them."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import target, uncopied_weights
from recurjax.cli.inspect.describe import parameter_rows
from recurjax.convert.imported_run import new_experiment, write_run
from recurjax.data.tokenizers import ByteTokenizer
from recurjax.errors import UserError
from recurjax.layers.attention import AttentionConfig, project
from recurjax.layers.attention.heads import merge
from recurjax.layers.linear import GRIDS, linear, plain, product_in, quantize
from recurjax.layers.mlp import MlpConfig
from recurjax.model import ModelConfig, in_weight_dtype
from recurjax.parameters import parameter_name
from recurjax.sharding import MeshConfig, make_mesh, shardings
from recurjax.surgery.adapters import merged, with_adapters
from recurjax.training.config import AdapterConfig
from recurjax.training.optimizers import AdamW
from recurjax.training.run import load_run
from recurjax.variants.transformer import TransformerConfig
from tests.cli.commands import recurjax
from tests.marks import slow_except
from tests.surgery.test_adapters import VARIANTS, base_of, plain_logits
from tests.tolerances import assert_values_close
from tests.training.tiny_experiment import drawn

draw = np.random.default_rng(0).normal


@pytest.mark.parametrize(
    ("grid", "groups", "step"),
    [("int8", 1, 127), ("q8_0", 4, 127), ("int4", 2, 8), ("q4_0", 4, 8)],
)
def test_values_are_within_half_a_step(grid, groups, step):
    """But for those of 4 bits beyond 7, for the largest is -8 by its scale's sign."""
    weight = draw(size=(3, 128, 2, 5)).astype(np.float32)
    result = quantize(jnp.asarray(weight), GRIDS[grid], first=-3, inputs=1)
    assert result.values.dtype == f"int{GRIDS[grid].bits}"
    assert result.shape == weight.shape and result.offsets is None
    assert result.scales.shape == (3, groups, 2, 5)
    grouped = weight.reshape(3, groups, -1, 2, 5)
    largest = np.abs(grouped).max(2, keepdims=True)
    error = np.abs(np.asarray(plain(result)).reshape(grouped.shape) - grouped)
    values = np.asarray(result.values, np.int8).reshape(grouped.shape)
    assert np.all((error / largest * step * 2 <= 1.001) | (values == 7))
    assert np.all(error / largest * step <= 1.001)
    assert np.all(np.abs(values).max(2) == step)


def test_with_offsets_a_groups_smallest_and_largest_are_exact():
    weight = draw(size=(128, 5)).astype(np.float32) + 3
    weight[32:64] = 0.25  # all alike
    result = quantize(jnp.asarray(weight), GRIDS["q4_1"], first=-2, inputs=1)
    assert result.scales.shape == result.offsets.shape == (4, 5)
    got, want = (x.reshape(4, 32, 5) for x in (np.asarray(plain(result)), weight))
    step = (want.max(1) - want.min(1)) / 15
    assert np.all(abs(got - want) <= 0.501 * step[:, None] + 1e-6)
    for end in (np.min, np.max):
        np.testing.assert_allclose(end(got, 1), end(want, 1), atol=1e-6)


def test_four_bits_keep_what_is_rounded_to_them():
    values = np.random.default_rng(1).integers(-8, 8, size=(128, 5))
    values[::64] = -8
    scales = draw(size=(2, 5)).astype(np.float16).astype(np.float32)
    weight = values.astype(np.float32) * np.repeat(scales, 64, axis=0)
    result = quantize(jnp.asarray(weight), GRIDS["int4"], first=-2, inputs=1)
    np.testing.assert_array_equal(plain(result), weight)


@pytest.mark.parametrize("grid", GRIDS)
def test_products_read_them_as_their_matrices(grid):
    x = jnp.asarray(draw(size=(2, 3, 64)), jnp.float32)
    y = jnp.asarray(draw(size=(2, 3, 2, 64)), jnp.float32)
    flat, wide, back = (
        quantize(jnp.asarray(draw(size=shape)), GRIDS[grid], first=first, inputs=inputs)
        for shape, first, inputs in (
            ((64, 6), -2, 1),
            ((64, 2, 4), -3, 1),
            ((2, 64, 6), -3, 2),
        )
    )
    for function, argument, weight in (
        (linear, x, flat),
        (project, x, wide),
        (merge, y, back),
    ):
        got, want = function(argument, weight), function(argument, plain(weight))
        np.testing.assert_allclose(got, want, atol=1e-4)


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("platform, many", [("tpu", 0), ("gpu", 0), ("gpu", 1 << 23)])
def test_a_step_of_an_accelerator_reads_them_by_groups(
    grid, platform, many, monkeypatch
):
    """As one product a group, a single row as part of eight or as a sum."""
    monkeypatch.setattr(uncopied_weights, "_MANY", many)
    x = jnp.asarray(draw(size=(1, 1, 128)), jnp.float32)
    weight, table = (
        quantize(jnp.asarray(draw(size=shape)), GRIDS[grid], first=first, inputs=1)
        for shape, first in (((128, 6), -2), ((5, 64), -1))
    )
    ids = jnp.asarray([[3]])
    want = linear(x, plain(weight)), plain(table)[ids]
    with target.as_if(target.Target(platform=platform, kind="")):
        np.testing.assert_allclose(linear(x, weight), want[0], atol=1e-4)
        head = product_in(x[0], weight, jnp.float32)
        np.testing.assert_allclose(head, want[0][0], atol=1e-4)
        np.testing.assert_array_equal(table.rows(ids), want[1])


@pytest.mark.parametrize(
    "variant", slow_except(("recurrent_transformer", "mamba"), VARIANTS, slow=())
)
def test_a_variant_computes_as_with_the_rounded_weights(variant):
    model = in_weight_dtype(base_of(variant), "int8")
    paths = jax.tree_util.tree_leaves_with_path(model)
    integers = [parameter_name(p) for p, x in paths if x.dtype == jnp.int8]
    assert "w_embedding.values" in integers and len(integers) > 5
    got = plain_logits(model)
    assert_values_close(got, plain_logits(in_weight_dtype(model, "float32")))


def test_a_mesh_changes_nothing():
    model = in_weight_dtype(base_of("transformer"), "int8")
    mesh = make_mesh(MeshConfig(data=1, fsdp=2, tensor=4))
    placed = jax.device_put(model, shardings(model, mesh))
    with jax.set_mesh(mesh):
        assert_values_close(plain_logits(placed), plain_logits(model))


def test_adapters_of_a_quantized_base_merge_in_float32():
    base = in_weight_dtype(base_of("transformer"), "int8")
    model = with_adapters(base, AdapterConfig(rank=2), jax.random.key(0))
    whole = merged(model)
    assert whole.config.weight_dtype == "float32"
    assert_values_close(plain_logits(whole), plain_logits(model))


def test_describe_names_the_axes_of_scales():
    model = in_weight_dtype(base_of("transformer"), "int8")
    rows = parameter_rows(model, AdamW(learning_rate=1e-3))
    shapes = {row.name: re.sub(r"=\d+", "", row.shape) for row in rows}
    for name, axes in (
        ("w_embedding", "V groups"),
        ("stack.blocks.*.attention.w_q", "L groups H E"),
        ("stack.blocks.*.attention.w_out", "L groups D"),
        ("stack.blocks.*.mlp.w_down", "L groups D"),
    ):
        assert shapes[f"{name}.scales"] == axes


@pytest.mark.slow
def test_a_run_of_four_bits_is_written_read_and_expanded(tmp_path):
    model = drawn(
        ModelConfig(
            vocabulary=257,
            stack=TransformerConfig(
                layers=2,
                width=64,
                attention=AttentionConfig(heads=4, key_heads=2, head_width=16),
                mlp=MlpConfig(width=64),
            ),
        ),
        scale=0.2,
    )
    base = tmp_path / "base"
    write_run(
        base, model, new_experiment(base, model.config, length=8), ByteTokenizer()
    )
    small = tmp_path / "small"
    code, _, err = recurjax("convert", "quantize", base, small, "--weights", "int4")
    assert code == 0, err
    stored = load_run(small, weights="stored").model
    want = in_weight_dtype(model, "int4")
    jax.tree.map(np.testing.assert_array_equal, stored, want)
    kinds = {str(leaf.dtype) for leaf in jax.tree.leaves(stored)}
    assert kinds == {"int4", "int8", "float32"}
    expanded = load_run(small).model
    assert expanded.config.weight_dtype == "float32"
    jax.tree.map(
        np.testing.assert_array_equal, expanded, in_weight_dtype(want, "float32")
    )


def test_int4_needs_widths_that_64_divides():
    with pytest.raises(
        UserError, match="int4 needs widths that are multiples of 64, and .* has"
    ):
        in_weight_dtype(base_of("transformer"), "int4")


def test_each_token_of_a_table_and_of_a_head_has_a_scale_of_its_own():
    model = in_weight_dtype(base_of("transformer"), "int8")
    table, head = model.w_embedding.get_value(), model.w_head.get_value()
    tokens, width = table.shape
    assert table.scales.shape == (tokens, 1)
    assert head.shape == (width, tokens) and head.scales.shape == (1, tokens)
    assert table.inputs == head.inputs == 1


@pytest.mark.parametrize("dtype", ["int8", "int4", "bfloat16"])
def test_a_backward_pass_widens_narrow_weights_again(dtype):
    """A step on a frozen base keeps no wide copy of its layers for the way back."""
    L, N = 16, 64
    stacked = jnp.asarray(draw(scale=N**-0.5, size=(L, N, N)), jnp.float32)
    if dtype == "bfloat16":
        narrow = stacked.astype(dtype)
    else:
        narrow = quantize(stacked, GRIDS[dtype], first=-2, inputs=1)

    def loss(x, weights):
        step = lambda x, weight: (jnp.tanh(linear(x, weight)), None)  # noqa: E731
        return jnp.sum(jax.lax.scan(step, x, weights)[0] ** 2)

    x, wide = jnp.ones((1, 2, N)), narrow.astype(jnp.float32)
    backward = jax.grad(loss)
    assert_values_close(backward(x, narrow), backward(x, wide))
    # What a scan over layers keeps has the layers in front.
    kept = f"f32[{L},{N},{N}]"
    assert kept in str(jax.make_jaxpr(backward)(x, wide))
    assert kept not in str(jax.make_jaxpr(backward)(x, narrow))
