"""Names of parameters, and nested dicts there and back."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from recurjax.parameters import from_nested_dict, parameter_name, to_nested_dict
from tests.variants.transformer.switches import SWITCHES, build, small

NAMES = {
    "final_norm.scale",
    "stack.blocks.0.attention.w_k",
    "stack.blocks.0.attention.w_out",
    "stack.blocks.0.attention.w_q",
    "stack.blocks.0.attention.w_v",
    "stack.blocks.0.attention_norm.scale",
    "stack.blocks.0.mlp.w_down",
    "stack.blocks.0.mlp.w_up",
    "stack.blocks.0.mlp_norm.scale",
    "w_embedding",
    "w_head",
}


@pytest.fixture(scope="module")
def model():
    return build(small())


def names_of(tree) -> set[str]:
    return {parameter_name(p) for p, _ in jax.tree_util.tree_leaves_with_path(tree)}


def test_names_say_where_a_parameter_is(model):
    assert names_of(model) == NAMES


def test_an_optimizer_state_has_the_parameters_names_inside(model):
    state = jax.eval_shape(optax.adam(1e-3).init, model)
    names = names_of(state)
    for moment in ("mu", "nu"):
        assert {f"0.{moment}.{name}" for name in NAMES} <= names
    assert "0.count" in names


@pytest.mark.parametrize("switch", SWITCHES)
def test_a_nested_dict_holds_plain_arrays_and_comes_back(switch):
    model = build(SWITCHES[switch])
    nested = to_nested_dict(model)
    assert all(type(leaf) is type(jnp.ones(1)) for leaf in jax.tree.leaves(nested))
    assert names_of(nested) == names_of(model)
    abstract = jax.eval_shape(lambda: build(SWITCHES[switch]))
    back = from_nested_dict(abstract, nested)
    assert jax.tree.structure(back) == jax.tree.structure(model)
    for got, want in zip(jax.tree.leaves(back), jax.tree.leaves(model), strict=True):
        np.testing.assert_array_equal(got, want)


def test_every_difference_is_named(model):
    nested = to_nested_dict(model)
    del nested["w_head"]
    nested["final_norm"]["scale"] = jnp.ones(3)
    nested["stack"]["extra"] = jnp.ones(1)
    with pytest.raises(ValueError) as error:
        from_nested_dict(model, nested)
    assert "w_head is missing" in str(error.value)
    assert "final_norm.scale has shape (3,), not (8,)" in str(error.value)
    assert "stack.extra is not a parameter of the model" in str(error.value)
