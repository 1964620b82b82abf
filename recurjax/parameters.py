"""One table with the properties of every parameter, by name.

Checkpoints, converters, optimizers and meshes know parameters by their dotted names
only, for example `stack.blocks.0.attention.w_q`; none of them knows flax. `RULES` says
what they do with each.
"""

import re
from collections.abc import Callable
from functools import cache
from typing import Any, Literal, NamedTuple, TypeVar

import jax
from jax.sharding import PartitionSpec as P

from recurjax.errors import first_few

Module = TypeVar("Module")

Role = Literal["matrix", "table", "vector"]
"""matrix: multiplied with activations, inputs first; table: rows looked up by token or
position; vector: added, averaged with or multiplied elementwise, always in float32.
Matrices and tables are the weights: AdamW decays them, inference holds them in the
dtype of the activations."""

Group = Literal["matrix", "embedding", "head", "scalar", "residual", "input"]
"""Of MuonAdamW, each with a rate of its own: "matrix" is Muon's, the rest AdamW's."""


class Rule(NamedTuple):
    r"""The properties of parameters whose names match a pattern at their end.

    Attributes:
      pattern: a regular expression, at the end of a name; parents belong to it where
        another part of a model may use the last word for an array of other axes.
      role: see `Role`.
      axes: axes of one layer's array; a matrix has its inputs before "->".
      spec: the mesh axis of each of them: see `recurjax.sharding`.
      group: see `Group`.
      torch: the last words of its name in a PyTorch module, \1 as the pattern caught
        it. There a matrix is [out, in], a table [rows, row], a vector flat.
    """

    pattern: str
    role: Role
    axes: str
    spec: P
    group: Group
    torch: str

    @property
    def inputs(self) -> int:
        """The number of input axes of one layer's matrix; the others are outputs."""
        return len(self.axes.partition("->")[0].split())

    @property
    def outputs(self) -> tuple[str, ...]:
        """The axes that one layer's matrix writes; none of a table or a vector."""
        return tuple(self.axes.partition("->")[2].split())

    @property
    def is_weight(self) -> bool:
        """Whether it is a matrix or a table."""
        return self.role != "vector"


def _matrix(pattern: str, axes: str, spec: P, group: Group = "matrix") -> Rule:
    return Rule(pattern, "matrix", axes, spec, group, r"\1.weight")


def _table(pattern: str, axes: str, spec: P) -> Rule:
    return Rule(pattern, "table", axes, spec, "embedding", r"\1.weight")


def _vector(
    pattern: str, axes: str, spec: P, torch: str, group: Group = "scalar"
) -> Rule:
    return Rule(pattern, "vector", axes, spec, group, torch)


RULES: tuple[Rule, ...] = (
    # Projections to heads. RAT's gates have one as well, or two by way of a low rank.
    _matrix(r"\bw_(q|k|v|input_v|full)$", "D -> H E", P("fsdp", "tensor", None)),
    _matrix(r"\bmixer\.\w+_gate\.w_(reduce)$", "D -> rank", P("fsdp", None)),
    _matrix(
        r"\bmixer\.\w+_gate\.w_(expand)$", "rank -> H E", P("fsdp", "tensor", None)
    ),
    # And back from the heads, the feed-forward width: one psum a block each.
    _matrix(
        r"\b(?:attention|mixer|blocks\.\d+)\.w_(out)$",
        "H E -> D",
        P("tensor", None, "fsdp"),
    ),
    _matrix(r"\bmlp\.w_(up|gate)$", "D -> F", P("fsdp", "tensor")),
    _matrix(r"\bmlp\.w_(down)$", "F -> D", P("tensor", "fsdp")),
    # What each depth adds to a shared linear map, by way of a low rank; flat outputs.
    _matrix(
        r"\badapters\.\d+\.(?:[qkvuz]|up|gate|\w+_gate|\w+_gate_reduce)\.w_(reduce)$",
        "D -> rank",
        P("fsdp", None),
    ),
    _matrix(
        r"\badapters\.\d+\.(?:[qkvuz]|dt|up|gate|\w+_gate|\w+_gate_expand)\.w_(expand)$",
        "rank -> M",
        P("fsdp", "tensor"),
    ),
    _matrix(
        r"\badapters\.\d+\.(?:out|down|x|back)\.w_(reduce)$",
        "N -> rank",
        P("tensor", "fsdp"),
    ),
    _matrix(
        r"\badapters\.\d+\.(?:out|down|x|back)\.w_(expand)$",
        "rank -> D",
        P(None, "fsdp"),
    ),
    # Of what goes by way of a low rank itself, the sides at that rank.
    _matrix(r"\badapters\.\d+\.dt\.w_(reduce)$", "rank -> rank", P(None, None)),
    _matrix(
        r"\badapters\.\d+\.\w+_gate_(?:reduce\.w_(?=e)|expand\.w_(?=r))(\w+)$",
        "rank -> rank",
        P(None, None),
    ),
    # Of the latent memory a local and a recurrent gate, of value embeddings one per
    # head.
    _matrix(r"\bw_(mix)$", "D -> gate K", P("fsdp", None, "tensor")),
    _matrix(r"\bw_(value_gate)$", "D -> K", P(None, "tensor")),
    # Mamba, from a width M to channels I and back, by way of steps of rank R.
    _matrix(r"\bmamba\.w_(u|z)$", "M -> I", P("fsdp", "tensor")),
    _matrix(r"\bmamba\.w_(x)$", "I -> W", P("tensor", "fsdp")),
    _matrix(r"\bmamba\.w_(dt)$", "R -> I", P("fsdp", "tensor")),
    _matrix(r"\bmamba\.w_(back)$", "I -> M", P("tensor", "fsdp")),
    _matrix(r"\bmamba\.w_(conv)$", "tap -> I", P(None, "tensor"), "scalar"),
    # A full row from one state: a hidden layer as wide as the model.
    _matrix(r"\brow_decoder\.w_(first)$", "D -> D", P("fsdp", "tensor")),
    _matrix(r"\brow_decoder\.w_(second)$", "D -> D", P("tensor", "fsdp")),
    _matrix(r"\bw_(head)$", "D -> V", P("fsdp", "tensor"), "head"),
    _table(r"\bw_(embedding)$", "V D", P("tensor", "fsdp")),
    _table(r"\bw_(value_embedding)$", "V K E", P("fsdp", "tensor", None)),
    _table(r"\bw_(position)$", "T D", P(None, "fsdp")),
    _vector(r"\battention\.b_(q|k|v)$", "H E", P("tensor", None), r"\1.bias"),
    _vector(r"_gate\.b_forget$", "H E", P("tensor", None), "bias"),
    _vector(r"\brow_decoder\.b_(first)$", "D", P("tensor"), r"\1.bias"),
    _vector(r"\brow_decoder\.b_(second)$", "D", P(None), r"\1.bias"),
    _vector(r"\bmlp\.b_(up|gate)$", "F", P("tensor"), r"\1.bias"),
    _vector(r"\b(?:attention|mlp)\.b_(out|down)$", "D", P(None), r"\1.bias"),
    _vector(r"\bmamba\.b_(conv|dt)$", "I", P("tensor"), r"\1.bias"),
    _vector(r"\bmamba\.(a_log)$", "I N", P("tensor", None), r"\1"),
    _vector(r"\bmamba\.(skip)$", "I", P("tensor"), r"\1"),
    _vector(r"_norm\.scale$", "D", P(None), "weight"),
    _vector(r"_norm\.bias$", "D", P(None), "bias"),
    # Weights of averages, one for each layer, lag or source.
    _vector(r"\b(history_scale|lag_logits|source_logits)$", "L", P(None), r"\1"),
    # One number per layer.
    _vector(r"\b(residual_scale)$", "", P(), r"\1", "residual"),
    _vector(r"\b(input_scale)$", "", P(), r"\1", "input"),
    _vector(r"\b((?:attention|mlp|value|memory)_scale)$", "", P(), r"\1"),
)
"""Every parameter of every variant meets exactly one rule; their order means nothing.
Axes are one layer's: those of stacked layers come before them."""


@cache
def find_rule(name: str) -> Rule | None:
    """Returns the rule of a parameter, also inside an optimizer's state, or None."""
    weight, _, part = name.rpartition(".")
    if part in _PARTS:
        rule = find_rule(weight)
        return None if rule is None else _PARTS[part](rule)
    return next((rule for rule in RULES if re.search(rule.pattern, name)), None)


def _of_adapter(axes: str, spec: P, rule: Rule) -> Rule:
    return rule._replace(axes=axes, spec=spec, group="matrix")


def _of_scales(rule: Rule) -> Rule:
    if rule.role == "table":
        rows = rule.axes.split()[:-1]
        return rule._replace(role="vector", axes=" ".join((*rows, "groups")))
    spec = P(rule.spec[0], *rule.spec[rule.inputs :])
    axes = " ".join(("groups", *rule.outputs))
    return rule._replace(role="vector", axes=axes, spec=spec)


_PARTS: dict[str, Callable[[Rule], Rule]] = {
    "base": lambda rule: rule,
    "values": lambda rule: rule,
    "scales": _of_scales,
    "offsets": _of_scales,
    "lora_a": lambda rule: _of_adapter("N -> rank", P(rule.spec[0], None), rule),
    "lora_b": lambda rule: _of_adapter(
        "rank -> M", P(None, rule.spec[rule.inputs]), rule
    ),
}
"""Parts of a weight that is more than an array (`recurjax.layers.linear`); those of an
adapter have flat inputs and outputs, cut as the first of the weight's own."""


def rule_of(name: str) -> Rule:
    """Returns the rule of a parameter.

    Raises:
      ValueError: the table has none.
    """
    rule = find_rule(name)
    if rule is None:
        raise ValueError(f"the parameter {name} matches no rule of recurjax.parameters")
    return rule


def is_layer_matrix(name: str) -> bool:
    """Returns whether a parameter is a matrix of a layer that `linear` multiplies by.

    RRT's own additions, and convolutions, are multiplied elsewhere.
    """
    rule = rule_of(name)
    inside = name.startswith("stack.") and ".adapters." not in name
    return inside and rule.role == "matrix" and rule.group == "matrix"


def torch_word(name: str) -> str:
    """Returns what takes the place of a parameter's last word in a PyTorch module."""
    rule = rule_of(name)
    # Only the last word is renamed; the parents keep their names in PyTorch.
    match = re.search(rule.pattern, name)
    assert match is not None
    return match.expand(rule.torch)


def parameter_name(path: tuple[Any, ...]) -> str:
    """Returns a leaf's name, such as `stack.blocks.0.attention.w_q`, from its key path.

    Works for a module's own leaves and for trees that contain modules, such as an
    optimizer state: `1.mu.stack.blocks.0.attention.w_q`.
    """
    return ".".join(_names(path))


def tabulate(model: Any) -> str:
    """Returns a table of a model's parameters: name, shape, dtype and size.

    Takes a model or its shapes (`jax.eval_shape`). flax's `nnx.tabulate` describes the
    arguments of every call and fails on NamedTuples, which tokens and caches are.
    """
    leaves = jax.tree_util.tree_leaves_with_path(model)
    rows = [
        (parameter_name(path), str(leaf.shape), str(leaf.dtype), f"{leaf.size:,}")
        for path, leaf in leaves
    ]
    rows.append(("total", "", "", f"{sum(leaf.size for _, leaf in leaves):,}"))
    name, shape, dtype, size = (
        max(map(len, column)) for column in zip(*rows, strict=True)
    )
    return "\n".join(
        f"{row[0]:<{name}}  {row[1]:<{shape}}  {row[2]:<{dtype}}  {row[3]:>{size}}"
        for row in rows
    )


def to_nested_dict(tree: Any) -> dict[str, Any]:
    """Returns the leaves of a module, or a tree of modules, as nested dicts."""
    nested: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        *parents, last = _names(path)
        inner = nested
        for name in parents:
            inner = inner.setdefault(name, {})
        inner[last] = leaf
    return nested


def from_nested_dict(like: Module, nested: dict[str, Any]) -> Module:
    """Returns `like` with its leaves taken from `nested`, as `to_nested_dict` made it.

    Args:
      like: gives the structure; its leaves may be abstract.
      nested: one leaf for each of `like`'s, neither more nor fewer.

    Raises:
      ValueError: names or shapes differ; the first few differences are named.
    """
    values = {
        parameter_name(path): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(nested)
    }
    paths, structure = jax.tree_util.tree_flatten_with_path(like)
    leaves, differences = [], []
    for path, leaf in paths:
        name = parameter_name(path)
        # Remove what is used: the rest, at the end, is what no parameter needs.
        value = values.pop(name, None)
        if value is None:
            differences.append(f"{name} is missing")
        elif value.shape != leaf.shape:
            differences.append(f"{name} has shape {value.shape}, not {leaf.shape}")
        leaves.append(value)
    differences += [f"{name} is not a parameter of the model" for name in values]
    # All differences in one message: they mostly have one cause, which the list shows.
    if differences:
        raise ValueError("from_nested_dict: " + first_few(differences))
    return jax.tree_util.tree_unflatten(structure, leaves)


def _names(path: tuple[Any, ...]) -> list[str]:
    """Names of a key path; a Param's own `value` step is left out."""
    inside = jax.tree_util.GetAttrKey("value")
    keys = [key for at, key in enumerate(path) if at == 0 or key != inside]
    return [jax.tree_util.keystr((key,), simple=True) for key in keys]
