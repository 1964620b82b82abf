"""The table of parameters, their names, and nested dicts there and back."""

import re
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from recurjax.model import Decoder
from recurjax.parameters import (
    RULES,
    find_rule,
    from_nested_dict,
    parameter_name,
    rule_of,
    tabulate,
    to_nested_dict,
    torch_word,
)
from tests.test_sharding import MODELS
from tests.variants.latent_recurrent_transformer.switches import SWITCHES as LATENT
from tests.variants.rat.switches import SWITCHES as RAT
from tests.variants.recurformer.switches import SWITCHES as RECURFORMER
from tests.variants.recurrent_transformer.switches import SWITCHES as RECURRENT
from tests.variants.relaxed_recursive_transformer.rat_switches import (
    SWITCHES as LOOPED_RAT,
)
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


VARIANTS = {
    f"{family}, {name}": model
    for family, switches in {
        "transformer": SWITCHES,
        "recurrent": RECURRENT,
        "rat": RAT,
        "latent": LATENT,
        "recurformer": RECURFORMER,
        "loop over rat": LOOPED_RAT,
        "sharding": MODELS,
    }.items()
    for name, model in switches.items()
}


@cache
def shapes(variant: str) -> dict[str, tuple[int, ...]]:
    model = VARIANTS[variant]
    abstract = jax.eval_shape(lambda: Decoder(model, rngs=nnx.Rngs(0)))
    leaves = jax.tree_util.tree_leaves_with_path(abstract)
    return {parameter_name(path): leaf.shape for path, leaf in leaves}


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_parameter_meets_one_rule_and_has_its_axes(variant):
    for name, shape in shapes(variant).items():
        [rule] = [rule for rule in RULES if re.search(rule.pattern, name)]
        assert rule is rule_of(name)
        stacked = leading_axes(name, VARIANTS[variant].stack)
        axes = rule.axes.replace("->", "").split()
        assert len(axes) == len(rule.spec) == len(shape) - stacked, name
        assert rule.is_weight == name.rpartition(".")[2].startswith("w_"), name


def leading_axes(name: str, stack) -> int:
    """Counts the axes of stacked layers, and of the loops that run them."""
    if name.startswith("stack.adapters."):
        return 2
    if not name.startswith("stack.blocks."):
        return 0
    untied = not getattr(stack, "tie_norms", True)
    return 2 if untied and not rule_of(name).is_weight else 1


def test_no_rule_is_dead():
    met = {rule_of(name) for variant in VARIANTS for name in shapes(variant)}
    assert met == set(RULES)


def test_only_matrices_have_inputs_and_outputs():
    for rule in RULES:
        assert ("->" in rule.axes) == (rule.role == "matrix"), rule.pattern


CUT_OVER_TENSOR = {"H", "K", "F", "I", "M"}
"""Heads, hidden widths and channels; a model's own width and ranks are not."""


def test_what_belongs_to_heads_and_channels_is_cut_where_they_are():
    """Biases and tables too: else each device would gather what it has a part of."""
    matches = [
        (rule.pattern, axis, rule.spec[at])
        for rule in RULES
        for at, axis in enumerate(rule.axes.replace("->", "").split())
        if axis in CUT_OVER_TENSOR
    ]
    # Mamba's own width M is between two channels: it is cut as a model's width is.
    wanted = [
        (p, axis, "fsdp" if axis == "M" and "mamba" in p else "tensor")
        for p, axis, _ in matches
    ]
    assert matches == wanted and len(matches) > 15


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_two_parameters_of_a_module_have_one_name_in_pytorch(variant):
    names = shapes(variant)
    words = {(name.rpartition(".")[0], torch_word(name)) for name in names}
    assert len(words) == len(names)


@pytest.mark.parametrize(
    "name",
    [
        "stack.adapters.attention.w_reduce",
        "stack.adapters.mlp.w_expand",
        "stack.blocks.0.mamba.w_out",
        "stack.blocks.0.mamba.w_in",
        "stack.blocks.0.mamba.w_up",
        "stack.blocks.0.mamba.b_out",
        "optimizer.count",
    ],
)
def test_a_last_word_of_another_part_meets_no_rule(name):
    assert find_rule(name) is None
    with pytest.raises(ValueError, match=f"{re.escape(name)} matches no rule"):
        rule_of(name)


def test_a_table_of_parameters_has_every_name_and_their_total():
    model = jax.eval_shape(lambda: Decoder(small(), rngs=nnx.Rngs(0)))
    leaves = jax.tree_util.tree_leaves_with_path(model)
    *lines, total = tabulate(model).splitlines()
    assert [line.split()[0] for line in lines] == [
        parameter_name(path) for path, _ in leaves
    ]
    assert total.split() == ["total", f"{sum(leaf.size for _, leaf in leaves):,}"]
