"""The linear map of the last axis, and weights that are more than an array."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Float, Int

from pallas_kernels import target, uncopied_weights
from pallas_kernels.cpu import panels
from pallas_kernels.cpu.few_rows import few_rows, serves
from recurjax.layers.mesh import as_matrix
from recurjax.ranges import RangeChecks
from recurjax.types import Array

Tree = TypeVar("Tree")

Maps = dict[str, tuple[int, int]]
"""The sizes (N, M) of linear maps, by name."""


class LinearMaps(RangeChecks):
    """What a config says of its matrices."""

    __slots__ = ()

    def maps(self, width: int) -> Maps:
        """Returns the sizes (N, M) of its linear maps, by name."""
        raise NotImplementedError

    def weights(self, width: int) -> int:
        """Counts the weights of its matrix products."""
        return sum(n * m for n, m in self.maps(width).values())


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, slots=True)
class AdaptedWeight:
    """A weight W with a low-rank adapter: x W becomes x W + s (x A) B.

    It takes the place of W's array in a Param, so that no module knows of it: `linear`
    and the projections on it read its parts, which are parameters of their own under
    the weight's name. Stacked layers lead the axes of every part. The two thin products
    are never joined to W. Source: Hu et al. 2021, section 4.1.

    A block that serves several depths of a stack tells them apart by these too. Where
    tokens stand at different depths, those of all depths are joined side by side and
    each token says which columns are active, which copies no matrix.

    Attributes:
      base: W, whose axes A and B flatten to inputs N and outputs M; it may be adapted
        itself.
      lora_a: A, [N, R].
      lora_b: B, [R, M].
      rows: the number of each row's adapter, where there are several; see `for_rows`.
      active: the columns of x A that count for each token, [B, T, R]; None: all.
      scale: s.
      several: how many adapters A and B stack in front of their axes; 0: they are one.
    """

    # Trees of parameters hold other things than arrays: shardings, names, masks.
    base: Any
    lora_a: Any
    lora_b: Any
    rows: Any = None
    active: Any = None
    scale: float = field(default=1.0, metadata={"static": True})
    several: int = field(default=0, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of W."""
        return self.base.shape

    @property
    def dtype(self) -> Any:
        """The dtype of W."""
        return self.base.dtype

    def __getitem__(self, index: Any) -> "AdaptedWeight":
        assert index is ..., "a Param's value is read by [...]"
        return self

    def reshape(self, *shape: int) -> "AdaptedWeight":
        """Flattens the axes of W; those of A and B are flat."""
        return replace(self, base=self.base.reshape(*shape))


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizedWeight:
    """A weight as integers with a scale for each group of inputs of each output.

    W = values * scales + offsets, with those of a group repeated over it. Like
    `AdaptedWeight` it takes the place of W's array in a Param, also of an adapted
    one's.

    Attributes:
      values: int8 or int4, in W's shape.
      scales: float32; the axes of the inputs have become one axis of G groups.
      offsets: as the scales; None: all are zero.
      first: the first axis of the inputs, counted from behind.
      inputs: how many axes they are.
    """

    values: Any
    scales: Any
    offsets: Any = None
    first: int = field(metadata={"static": True})
    inputs: int = field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of W."""
        return self.values.shape

    @property
    def dtype(self) -> Any:
        """The dtype of the scales, in which W is exact."""
        return self.scales.dtype

    @property
    def groups(self) -> int:
        """G, the number of groups."""
        return self.scales.shape[self.first + self.inputs - 1]

    @property
    def T(self) -> "QuantizedWeight":  # noqa: N802
        """The matrix of a table."""
        return replace(jax.tree.map(jnp.transpose, self), first=-2, inputs=1)

    def __getitem__(self, index: Any) -> "QuantizedWeight":
        return self if index is ... else jax.tree.map(lambda x: x[index], self)

    def reshape(self, *shape: int) -> "QuantizedWeight":
        """Flattens the axes of a matrix to inputs and outputs."""
        flat = jax.tree.map(lambda x: x.reshape(self.groups, -1), self)
        return replace(flat, values=self.values.reshape(*shape), first=-2, inputs=1)

    def rows(self, ids: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """Reads rows of a table: W[ids]."""
        if ids.shape[1] > 1:
            return plain(self[ids])
        # To read a single row, a TPU copies the table.
        return uncopied_weights.with_more_rows(lambda ids: plain(self[ids]), ids)

    def astype(self, dtype: Any) -> Array:
        """Computes W in a dtype."""
        shape, at = self.shape, len(self.shape) + self.first
        groups = (*shape[:at], self.groups, -1, *shape[at + self.inputs :])
        wide = jnp.promote_types(dtype, self.dtype)
        dense = self.values.reshape(groups).astype(wide)
        dense = dense * jnp.expand_dims(self.scales, at + 1)
        if self.offsets is not None:
            dense = dense + jnp.expand_dims(self.offsets, at + 1)
        return dense.reshape(shape).astype(dtype)


class Grid(NamedTuple):
    """The integers that a weight is rounded to.

    Attributes:
      bits: of a value.
      group: inputs that share a scale; None: all inputs of an output.
      offsets: whether a group also has an offset.
    """

    bits: int
    group: int | None = None
    offsets: bool = False


GRIDS = {
    "int8": Grid(8),
    "int4": Grid(4, 64),
    # Those of GGUF files.
    "q8_0": Grid(8, 32),
    "q4_0": Grid(4, 32),
    "q4_1": Grid(4, 32, offsets=True),
}


def quantize(
    weight: Float[Array, "..."], grid: Grid, *, first: int, inputs: int
) -> QuantizedWeight:
    """Rounds a weight to the integers of a grid.

    With offsets, a group's smallest weight becomes -8 and its largest 7. Without, the
    largest in absolute value becomes 127; of four bits -8, the integer without an
    opposite, and the scale has the sign for that: all 16 values are used. Axes are
    those of `QuantizedWeight`; the number of inputs is a multiple of the group.
    """
    shape, at = weight.shape, weight.ndim + first
    N = math.prod(shape[at : at + inputs])
    group = grid.group or N
    outer, rest = shape[:at], shape[at + inputs :]
    grouped = weight.astype(jnp.float32).reshape(*outer, N // group, group, *rest)
    low, high = jnp.min(grouped, axis=at + 1), jnp.max(grouped, axis=at + 1)
    largest = 2 ** (grid.bits - 1) - 1
    if grid.offsets:
        scales = (high - low) / (2**grid.bits - 1)
    elif grid.bits == 8:
        scales = jnp.maximum(-low, high) / largest
    else:
        scales = jnp.where(-low > high, low, high) / (-largest - 1)
    scales = jnp.where(scales != 0, scales, 1.0)
    offsets = low + (largest + 1) * scales if grid.offsets else None
    if offsets is not None:
        grouped = grouped - jnp.expand_dims(offsets, at + 1)
    values = jnp.round(grouped / jnp.expand_dims(scales, at + 1))
    # The largest of the other sign may round to 8.
    values = jnp.minimum(values, largest)
    return QuantizedWeight(
        values=values.astype(f"int{grid.bits}").reshape(shape),
        scales=scales,
        offsets=offsets,
        first=first,
        inputs=inputs,
    )


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, slots=True)
class PanelWeight:
    """A weight next to its panels, for a loop that reads one token of each row a step.

    Like `AdaptedWeight` it takes the place of W's array in a Param, while the loop
    runs: see `in_panels`.

    Attributes:
      weight: W.
      panels: of the matrix [N, M], see `pallas_kernels.cpu.panels`.
    """

    weight: Any
    panels: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of W."""
        return self.weight.shape

    @property
    def dtype(self) -> Any:
        """The dtype of W."""
        return self.weight.dtype

    def __getitem__(self, index: Any) -> "PanelWeight":
        assert index is ..., "a Param's value is read by [...]"
        return self

    def reshape(self, *shape: int) -> "PanelWeight":
        """Flattens the axes of W; the panels are those of a matrix."""
        return replace(self, weight=self.weight.reshape(*shape))


Weight = Array | nnx.Param | AdaptedWeight | QuantizedWeight | PanelWeight
"""What a linear map multiplies by."""


def is_composed(node: Any) -> bool:
    """Returns whether a node of a tree is a weight that is more than an array."""
    return isinstance(node, AdaptedWeight | QuantizedWeight | PanelWeight)


def plain(weight: Weight) -> Array:
    """Returns a weight as one array: W, or W + s A B in at least float32."""
    weight = weight[...]
    if isinstance(weight, QuantizedWeight):
        return weight.astype(weight.dtype)
    if isinstance(weight, PanelWeight):
        return weight.weight
    if not isinstance(weight, AdaptedWeight):
        return weight
    assert not weight.several, "several adapters make no single matrix"
    assert weight.active is None, "tokens at different depths have no single matrix"
    dtype = jnp.promote_types(weight.dtype, jnp.float32)
    a, b = weight.lora_a.astype(dtype), weight.lora_b.astype(dtype)
    added = weight.scale * jnp.matmul(a, b, precision="highest")
    return plain(weight.base).astype(dtype) + added.reshape(weight.shape)


def _adapters(tree: Any) -> Iterator[AdaptedWeight]:
    """Yields all adapters of a model's weights, those on adapted weights first."""
    for node in jax.tree.leaves(tree, is_leaf=is_composed):
        while isinstance(node, AdaptedWeight):
            yield node
            node = node.base


def count_adapters(tree: Any) -> int:
    """Returns how many adapters a model's weights stack; 0: they are not several."""
    return max((x.several for x in _adapters(tree)), default=0)


def for_rows(tree: Tree, rows: Int[Array, " B"] | None) -> Tree:
    """Returns a model of several adapters for rows that have these; None: as it is."""
    if rows is None:
        return tree

    def choose(node: Any) -> Any:
        if not isinstance(node, AdaptedWeight):
            return node
        # Stacked layers lead the axes, so that a scan over layers takes rows too.
        shape = (*node.lora_a.shape[:-3], *rows.shape)
        return replace(node, rows=jnp.broadcast_to(rows, shape))

    return jax.tree.map(choose, tree, is_leaf=is_composed)


def rows_of(tree: Any) -> Int[Array, " B"] | None:
    """Returns the rows that `for_rows` chose."""
    rows = next((x.rows for x in _adapters(tree) if x.rows is not None), None)
    return None if rows is None else rows[(0,) * (rows.ndim - 1)]


def with_adapter(tree: Tree, number: Int[Array, ""]) -> Tree:
    """Returns a model that has one of its several adapters for all rows."""

    def choose(node: Any) -> Any:
        if not isinstance(node, AdaptedWeight):
            return node
        if not node.several:
            return replace(node, base=choose(node.base))
        a, b = (
            jax.lax.dynamic_index_in_dim(x, number, x.ndim - 3, keepdims=False)
            for x in (node.lora_a, node.lora_b)
        )
        return replace(node, lora_a=a, lora_b=b, rows=None, several=0)

    return jax.tree.map(choose, tree, is_leaf=is_composed)


def in_panels(
    stacked: Float[Array, "L ..."], *, inputs: int, rows: int
) -> Array | PanelWeight:
    """Lays stacked layers' weights out where that speeds a product of few rows up.

    Args:
      inputs: how many axes after the first one are the matrix' inputs.
      rows: how many rows a loop multiplies at each step.
    """
    N = math.prod(stacked.shape[1 : 1 + inputs])
    matrices = stacked.reshape(len(stacked), N, -1)
    if not panels.serves(matrices, rows=rows):
        return stacked
    return PanelWeight(weight=stacked, panels=panels.panels_of(matrices))


def linear(
    x: Float[Array, "... N"],
    weight: Weight,
    bias: Array | nnx.Param | None = None,
) -> Float[Array, "... M"]:
    """Computes x @ weight + bias in x's dtype, with weight [N, M] cast to it.

    The bias [M] is added before its own dtype is left, so that its gradient, a sum over
    all positions, is not accumulated in bfloat16.
    """
    matrix, adapters = base_and_adapters(weight)
    x_added = x
    if adapters:
        x, x_added = apart(x, 2)
    return with_additions(_product(x, matrix), x_added, bias, adapters)


def base_and_adapters(
    weight: Weight,
) -> tuple[Array | QuantizedWeight | PanelWeight, list[AdaptedWeight]]:
    """Returns W, and the adapters on it, the outermost first."""
    value, adapters = weight[...], []
    while isinstance(value, AdaptedWeight):
        adapters.append(value)
        value = value.base
    return value, adapters


def with_additions(
    y: Float[Array, "... M"],
    x: Float[Array, "... N"],
    bias: Array | nnx.Param | None,
    adapters: Sequence[AdaptedWeight],
) -> Float[Array, "... M"]:
    """Adds to y = x W what `linear` adds to it."""
    for adapter in adapters:
        # (x A) B in this order: two thin products of rank R.
        reduced = _product_by_row(x, adapter.lora_a, adapter.rows)
        if adapter.active is not None:
            reduced = jnp.where(adapter.active, reduced, 0)
        if adapter.scale != 1.0:
            reduced = reduced * adapter.scale
        y = y + _product_by_row(reduced, adapter.lora_b, adapter.rows)
    return y if bias is None else (y + bias[...]).astype(x.dtype)


def apart(x: Float[Array, "B T N"], products: int) -> tuple[Array, ...]:
    """Gives each of several products that read x an x of its own, in a decode step.

    XLA for GPUs makes one product of those that read the same array, by joining their
    weights. Where they meet one token a row, the joined weights, written and read again
    at every step, are most of what the step moves.
    """
    if not decodes_on_gpu(x):
        return (x,) * products
    return uncopied_weights.apart(x, products)


def apart_by_layer(
    x: Float[Array, "B T N"], per_layer: Float[Array, "B T M"]
) -> Float[Array, "B T N"]:
    """Gives a layer an x of its own where the products of every layer read one x.

    As `apart` does inside a layer: left to itself, XLA for GPUs joins the weights of
    all layers.

    Args:
      per_layer: what only this layer has.
    """
    return uncopied_weights.apart_by_layer(x, per_layer) if decodes_on_gpu(x) else x


def decodes_on_gpu(x: Float[Array, "B T *rest"]) -> bool:
    """Returns whether x is one token a row, in a program for a GPU."""
    return x.ndim > 2 and x.shape[1] == 1 and uncopied_weights.pay_off()


def product_in(
    x: Array, weight: Array | QuantizedWeight, dtype: Any, *, transposed: bool = False
) -> Array:
    """Computes x W in a dtype at least as wide as x's, which it is summed in.

    Args:
      transposed: whether W is a table [M, N] that was transposed.
    """
    # Of more rows the groups' partial sums are larger than W in x's dtype.
    if x.ndim == 2 and len(x) <= 8 and (y := _by_groups(x, weight)) is not None:
        return y.astype(dtype)
    weight, scale = _scale_apart(weight)
    y = _by_kernel(x, weight, transposed=transposed)
    if y is None:
        y = jnp.einsum(
            "...d,dv->...v", x, weight.astype(x.dtype), preferred_element_type=dtype
        )
    y = y.astype(dtype)
    return y if scale is None else y * scale.astype(dtype)


def _by_kernel(
    x: Float[Array, "... N"],
    weight: Array | QuantizedWeight,
    *,
    transposed: bool = False,
) -> Float[Array, "B M"] | None:
    """Computes x W in float32 by the kernel for few rows, where it serves."""
    if isinstance(weight, QuantizedWeight) or not serves(x, weight):
        return None
    return few_rows(x, weight.T if transposed else weight, transposed=transposed)


def _scale_apart(
    weight: Array | QuantizedWeight,
) -> tuple[Array | QuantizedWeight, Array | None]:
    """Returns what x is multiplied by, and what the product is: one scale an output."""
    if not isinstance(weight, QuantizedWeight):
        return weight, None
    if weight.groups == 1 and weight.offsets is None:
        return weight.values, weight.scales[0]
    return weight, None


def _product(x: Array, weight: Array | QuantizedWeight | PanelWeight) -> Array:
    step = x.ndim > 2 and x.shape[1] == 1
    if isinstance(weight, PanelWeight):
        if step and x.dtype == jnp.float32:
            stacked, columns = weight.panels[None], weight.shape[-1]
            return panels.multiply(x[None, :, 0], stacked, columns=columns)[0][:, None]
        return _product(x, weight.weight)
    if step and (y := _by_groups(x[:, 0], weight)) is not None:
        return y[:, None].astype(x.dtype)
    weight, scale = _scale_apart(weight)
    # As one product of two matrices: with two axes in front, XLA on CPU writes a
    # transposed copy of y's gradient for the weight's (10 % of a training step).
    rows = as_matrix(x)
    if step and (y := _by_kernel(rows, weight)) is not None:
        y = y.reshape(*x.shape[:-1], -1)
        return (y if scale is None else y * scale).astype(x.dtype)
    if step:
        weight = weight.astype(x.dtype)
        y = uncopied_weights.with_more_rows(
            lambda rows: _rounded_step(rows, weight), rows
        )
    elif _is_narrow(weight, x.dtype):
        # The backward pass widens the weight again: kept, it would take more memory
        # than what its own dtype saves.
        y = jax.checkpoint(_rounded, prevent_cse=False)(rows, weight)
    else:
        y = _rounded(rows, weight)
    y = y.reshape(*x.shape[:-1], weight.shape[-1])
    return y if scale is None else (y * scale).astype(x.dtype)


def _product_by_row(x: Array, weight: Array, rows: Int[Array, " B"] | None) -> Array:
    if rows is None:
        return _product(x, weight)
    # A row's thin matrices are copied, so that the number of adapters costs no time.
    return jnp.einsum("b...n,bnm->b...m", x, weight[rows].astype(x.dtype))


def _by_groups(
    x: Float[Array, "B N"], weight: Array | QuantizedWeight
) -> Float[Array, "B M"] | None:
    """Computes x W in float32 group by group, where XLA would expand the integers."""
    if not isinstance(weight, QuantizedWeight):
        return None
    grouped = weight.groups > 1 or weight.offsets is not None
    if not uncopied_weights.expands(grouped, len(x)):
        return None
    return uncopied_weights.by_groups(x, weight.values, weight.scales, weight.offsets)


def _is_narrow(weight: Array | QuantizedWeight, dtype: Any) -> bool:
    stored = weight.values if isinstance(weight, QuantizedWeight) else weight
    return stored.dtype.itemsize < jnp.dtype(dtype).itemsize


def _rounded(rows: Float[Array, "*P N"], weight: Array | QuantizedWeight) -> Array:
    """Computes the product in the rows' dtype."""
    weight = weight.astype(rows.dtype)
    # Rows cut over devices keep their axes.
    if rows.ndim == 2 and rows.dtype == jnp.bfloat16 and target.widens_bfloat16():
        return _wide(rows, weight)
    return rows @ weight


def _rounded_step(rows: Float[Array, "*P N"], weight: Float[Array, "N M"]) -> Array:
    """Computes the same for one token each of a few rows."""
    if rows.ndim == 2 and uncopied_weights.pay_off():
        return uncopied_weights.in_halves(rows, weight)
    return _rounded(rows, weight)


@jax.custom_vjp
def _wide(rows: Array, weight: Array) -> Array:
    """Rounds a float32 result: XLA for CPUs has only these products on AMX.

    512 rows of SmolLM2's widths take a fifth of the time. A single row is multiplied as
    four: of one alone XLA widens the weight first, which takes 2 to 3 times as long.
    """
    count = rows.shape[0]
    if count == 1:
        rows = jnp.broadcast_to(rows, (4, rows.shape[1]))
    y = jax.lax.dot(rows, weight, preferred_element_type=jnp.float32)
    return y[:count].astype(rows.dtype)


def _wide_backward(operands: tuple[Array, Array], dy: Array) -> tuple[Array, Array]:
    rows, weight = operands
    return dy @ weight.T, rows.T @ dy


_wide.defvjp(lambda rows, weight: (_wide(rows, weight), (rows, weight)), _wide_backward)
