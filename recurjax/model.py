"""The decoder: embedding, stack, final norm, head; it knows a variant by protocol."""

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, Protocol, get_args, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, Mesh
from jax.typing import DTypeLike
from jaxtyping import Bool, Float, Int, PyTree

from recurjax.errors import UserError
from recurjax.layers.embedding import look_up
from recurjax.layers.initialization import draw_embedding, draw_head
from recurjax.layers.linear import (
    GRIDS,
    QuantizedWeight,
    is_composed,
    plain,
    product_in,
    quantize,
)
from recurjax.layers.mesh import keep_rows_apart
from recurjax.layers.norm import Norm, NormConfig
from recurjax.layers.row_decoder import RowDecoder
from recurjax.parameters import is_layer_matrix, parameter_name, rule_of
from recurjax.ranges import PositiveFloat, PositiveInt, check_ranges
from recurjax.types import Array, Cache, LoopPositions, Missing, Tokens
from recurjax.variants.latent_recurrent_transformer import (
    LatentRecurrentTransformerConfig,
    LatentRecurrentTransformerStack,
    MemoryStack,
)
from recurjax.variants.rat import MemoryRatStack, RatConfig, RatStack
from recurjax.variants.recurformer import RecurFormerConfig, RecurFormerStack
from recurjax.variants.recurrent_transformer import (
    RecurrentTransformerConfig,
    RecurrentTransformerStack,
)
from recurjax.variants.relaxed_recursive_transformer import (
    RelaxedRecursiveTransformerConfig,
    RelaxedRecursiveTransformerStack,
)
from recurjax.variants.transformer import TransformerConfig, TransformerStack


@runtime_checkable
class Stack(Protocol):
    """The interface of every variant: training, prefill and decode in one call.

    The facts that belong to its config are in `StackFacts`; what only some variants can
    do is a protocol of its own with one accessor, such as `as_exits`.
    """

    def init_cache(self, batch: int, length: int, dtype: DTypeLike) -> Cache:
        """Creates an empty cache for `length` tokens per row; 0 keeps nothing."""
        ...

    def refuses(self, mesh: Mesh | AbstractMesh, length: int) -> str | None:
        """Returns why rows of `length` tokens cannot run on a mesh, or None.

        Training and every plan call it. It reads only the config, so it works on an
        abstract model. None: they can.
        """
        ...

    def __call__(
        self, x: Float[Array, "B T D"], cache: Cache, tokens: Tokens
    ) -> tuple[Float[Array, "B T D"], Cache]:
        """Runs T more positions of every row."""
        ...

    def reset(self, cache: Cache, rows: Bool[Array, " B"]) -> Cache:
        """Empties the chosen rows, recurrent states too: see `CacheRows`."""
        ...

    def insert(self, cache: Cache, row: Int[Array, ""] | int, other: Cache) -> Cache:
        """Puts the one row of another cache into place `row`."""
        ...

    def take(self, cache: Cache, rows: Int[Array, " N"]) -> Cache:
        """Returns a cache of these rows of another one; a row may repeat."""
        ...

    def row_axes(self, cache: Cache) -> PyTree[int]:
        """Returns the axis of each array that counts rows; -1 where none does."""
        ...

    def layer_states(
        self, x: Float[Array, "B T D"], tokens: Tokens
    ) -> Iterator[Float[Array, "B T D"]]:
        """Yields what enters the first of the L layers, then what leaves each.

        Layer by layer, for comparisons: another implementation of the model parts from
        this one at the first state that differs.
        """
        ...


@runtime_checkable
class SupportsExits(Stack, Protocol):
    """A stack of loops that tokens can leave early: see `as_exits`.

    Two groups of methods compute the same function: of all tokens of a row at once
    (`states`, `leaving`), and for rows that stand at different loops (the ticks).
    """

    @property
    def exits(self) -> int:
        """R, the number of loops: a token leaves after loop 1, 2, ... or R."""
        ...

    @property
    def missing(self) -> Missing:
        """How keys and values of loops that a token skips are filled, as trained."""
        ...

    def refuses_exits(self, missing: Missing) -> str | None:
        """Returns why tokens cannot leave early, or not with these keys and values."""
        ...

    def refuses_ticks(self, *, rollback: bool) -> str | None:
        """Returns why rows cannot run at different loops at once, or None."""
        ...

    def states(
        self, x: Float[Array, "B T D"], cache: Cache, tokens: Tokens
    ) -> tuple[Float[Array, "R B T D"], Cache]:
        """Runs all loops and returns the states after each."""
        ...

    def leaving(
        self,
        x: Float[Array, "B T D"],
        tokens: Tokens,
        leave: Callable[[int, Array, Array], Bool[Array, "B T"]],
    ) -> tuple[Float[Array, "B T D"], Int[Array, "B T"]]:
        """Runs entire rows, in which each token leaves when a rule says so."""
        ...

    def repeating(
        self,
        x: Float[Array, "B T D"],
        tokens: Tokens,
        loops: Int[Array, ""],
        *,
        last: int,
    ) -> Float[Array, "B T D"]:
        """Runs entire rows for a number of loops that the running program knows."""
        ...

    def tick_weights(self) -> PyTree[Any]:
        """Returns what the loops own, laid out for `tick`."""
        ...

    def init_ticks(
        self, batch: int, length: int, dtype: DTypeLike, *, ahead: int = 0
    ) -> Cache:
        """Makes the ticks' empty cache."""
        ...

    def insert_ticks(
        self, cache: Cache, row: Int[Array, ""] | int, other: Cache
    ) -> Cache:
        """Puts a prompt that was read on a cache of one row into a row of ticks."""
        ...

    def enter_ticks(
        self, x: Float[Array, "B 1 D"], position: Int[Array, " B"]
    ) -> Float[Array, "B 1 D"]:
        """Returns what loop 1 reads at each row's own position."""
        ...

    def tick(
        self,
        x: Float[Array, "B T D"],
        lanes: LoopPositions,
        cache: Cache,
        weights: PyTree[Any],
        *,
        loop: int | None = None,
        ran: Int[Array, "B P"] | None = None,
    ) -> tuple[Float[Array, "B T D"], Cache]:
        """Runs every lane through its current loop."""
        ...

    def fill_ticks(
        self,
        x: Float[Array, "B 1 D"],
        leaving: LoopPositions,
        cache: Cache,
        weights: PyTree[Any],
    ) -> Cache:
        """Writes the keys and values that tokens which leave lack."""
        ...


@runtime_checkable
class SupportsLatentMemory(Stack, Protocol):
    """A stack that hands each token states of earlier ones: see `as_latent_memory`."""

    def without_memory(
        self, x: Float[Array, "B T D"], tokens: Tokens
    ) -> Float[Array, "B T D"]:
        """Runs all positions of entire rows at once, with a memory of zero."""
        ...

    def prefill(
        self, x: Float[Array, "B T D"], cache: Cache, tokens: Tokens, *, by: str
    ) -> tuple[Float[Array, "B T D"], Cache, dict[str, Float[Array, ""]]]:
        """Reads prompts approximately, and reports how well, in numbers by name."""
        ...

    def refuses_prefill(self, by: str) -> str | None:
        """Returns why prompts cannot be read in a way, or None when they can."""
        ...


StackConfig = (
    TransformerConfig
    | RecurrentTransformerConfig
    | RatConfig
    | LatentRecurrentTransformerConfig
    | RelaxedRecursiveTransformerConfig
    | RecurFormerConfig
)
"""Every variant's configuration: a closed union; JSON names the class."""


def make_stack(config: StackConfig, *, rngs: nnx.Rngs) -> Stack:
    """Makes the stack of a variant: the one place where a config becomes its class."""
    match config:
        case TransformerConfig():
            return TransformerStack(config, rngs=rngs)
        case RecurrentTransformerConfig():
            return RecurrentTransformerStack(config, rngs=rngs)
        case RatConfig():
            kind = RatStack if config.memory is None else MemoryRatStack
            return kind(config, rngs=rngs)
        case LatentRecurrentTransformerConfig():
            return LatentRecurrentTransformerStack(config, rngs=rngs)
        case RelaxedRecursiveTransformerConfig():
            return RelaxedRecursiveTransformerStack(config, rngs=rngs)
        case RecurFormerConfig():
            return RecurFormerStack(config, rngs=rngs)


def as_exits(stack: Stack) -> SupportsExits | None:
    """Returns the stack as one that tokens can leave early; None: it is no such one."""
    return stack if isinstance(stack, RelaxedRecursiveTransformerStack) else None


def as_latent_memory(stack: Stack) -> SupportsLatentMemory | None:
    """Returns the stack as one with a latent memory; None: it has none."""
    if not isinstance(stack, MemoryStack):
        return None
    return None if stack.config.memory is None else stack


IntegerDtype = Literal[
    "int8",
    "int4",
    "q8_0",
    "q4_0",
    "q4_1",
    "int8-layers",
    "int4-layers",
    "q8_0-layers",
    "q4_0-layers",
    "q4_1-layers",
]
"""Integers that weights are stored as: see `ModelConfig`."""

WeightDtype = Literal["float32", "bfloat16", IntegerDtype]
"""How weights are stored: see `ModelConfig`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """A complete language model.

    Attributes:
      vocabulary: V, the number of tokens of the tokenizer.
      stack: the variant's layers; their `width` is D.
      pad_vocabulary_to: round the rows of the embedding and of the head up to a
        multiple of this number; padding rows are never predicted.
      final_norm: the norm between the last layer and the head.
      tied_head: use the transposed embedding as the head.
      embedding_scale: factor of the embeddings, but not of a tied head: "one", or
        "sqrt_width" for sqrt(D), as in Gemma.
      logit_soft_cap: c in c tanh(logit / c), as in Gemma 2; None: no cap.
      row_decoder: add the parameters with which the objective `Compress` reconstructs a
        row from its last state.
      dtype: dtype of activations and matrix products.
      weight_dtype: dtype in which matrices and tables are stored; training needs
        float32. bfloat16 halves the memory of a model that is only read. int8 has one
        scale per output; int4 has one per 64 inputs and leaves tables and head in int8;
        q8_0, q4_0 and q4_1 are those of GGUF files, with one scale, and of q4_1 an
        offset, per 32 inputs, and tables and head in q8_0. With -layers, tables and
        head stay in float32. Norms, biases and other vectors are always float32.
      hf_family: `model_type` of the Hugging Face checkpoint that the model came from,
        which an export writes again; None: the export chooses one that fits.
    """

    vocabulary: PositiveInt
    stack: StackConfig
    pad_vocabulary_to: PositiveInt = 1
    final_norm: NormConfig = field(default_factory=NormConfig)
    tied_head: bool = False
    embedding_scale: Literal["one", "sqrt_width"] = "one"
    logit_soft_cap: PositiveFloat | None = None
    row_decoder: bool = False
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    weight_dtype: WeightDtype = "float32"
    hf_family: str | None = None

    def __post_init__(self):
        check_ranges(self)
        rows = self.stack.table_rows
        if rows not in (None, self.padded_vocabulary):
            raise ValueError(
                f"ModelConfig: stack.vocabulary must be {self.padded_vocabulary}, "
                f"the padded vocabulary, got {rows}"
            )
        reset = self.stack.reset_token
        if reset is not None and reset >= self.vocabulary:
            raise ValueError(
                "ModelConfig: stack.memory.reset_token must be an id below vocabulary="
                f"{self.vocabulary}, got {reset}"
            )

    @property
    def padded_vocabulary(self) -> int:
        """Rows of the embedding table."""
        multiple = self.pad_vocabulary_to
        return -(-self.vocabulary // multiple) * multiple

    @property
    def max_length(self) -> int | None:
        """Most tokens of a sequence; None: no limit."""
        return self.stack.max_length

    def refuses_length(
        self, length: int, what: str, *, fix: str = "shorten it"
    ) -> str | None:
        """Returns why a sequence is too long for the learned positions, or None.

        Args:
          length: length of the sequence, in tokens.
          what: names it and its length, such as "--length 600".
          fix: what the user can do.
        """
        if self.max_length is None or length <= self.max_length:
            return None
        return f"{what} exceeds the model's {self.max_length} learned positions: {fix}"

    @property
    def training_length(self) -> int | None:
        """The length of training that the model's windows come from; None: any."""
        return self.stack.training_length

    @property
    def takes_segments(self) -> bool:
        """Whether it supports document segments in full rows."""
        return self.stack.takes_segments

    def with_vocabulary(self, vocabulary: int) -> "ModelConfig":
        """Returns the config for another number of tokens, the stack's tables too."""
        multiple = self.pad_vocabulary_to
        rows = -(-vocabulary // multiple) * multiple
        stack = self.stack.with_table_rows(rows)
        return replace(self, vocabulary=vocabulary, stack=stack)

    def flops_per_token(self, length: int) -> float:
        """Counts training FLOPs per token: the stack's count and 6 D V for the head."""
        # Two FLOPs a multiply-add, and the backward pass makes two products of each: 6.
        head = 6.0 * self.stack.width * self.padded_vocabulary
        return self.stack.flops_per_token(length) + head


class Decoder(nnx.Module):
    """logits = head(norm(stack(embed(ids)))).

    Training, prefill and decode are the same call at another T:

        model = Decoder(config, rngs=nnx.Rngs(0))
        logits, _ = model(Tokens(ids), model.init_cache(batch, 0))
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        if config.dtype == "float64" and not jax.config.jax_enable_x64:  # pyright: ignore[reportAttributeAccessIssue]
            raise UserError(
                "model.dtype float64 needs 64-bit types: set JAX_ENABLE_X64=1"
            )
        self.config = config
        V, D = config.padded_vocabulary, config.stack.width
        init = config.stack.init
        self.w_embedding = nnx.Param(draw_embedding(rngs.params(), (V, D), config=init))
        self.stack = make_stack(config.stack, rngs=rngs)
        self.final_norm = Norm(config.final_norm, D)
        head = (
            None if config.tied_head else draw_head(rngs.params(), (D, V), config=init)
        )
        self.w_head = None if head is None else nnx.Param(head)
        # Drawn last: the other parameters start as without it.
        self.row_decoder = (
            RowDecoder(D, config.final_norm, init, rngs=rngs)
            if config.row_decoder
            else None
        )
        if config.weight_dtype != "float32":
            nnx.update(self, _with_weights_in(config.weight_dtype, nnx.state(self)))

    def init_cache(
        self, batch: int, length: int, dtype: DTypeLike | None = None
    ) -> Cache:
        """Creates an empty cache.

        Args:
          batch: B.
          length: how many tokens a row can hold; 0 for training, which keeps nothing.
          dtype: dtype of the cached arrays; None: the model's.
        """
        return self.stack.init_cache(batch, length, dtype or self.config.dtype)

    def __call__(
        self, tokens: Tokens, cache: Cache
    ) -> tuple[Float[Array, "B T V"], Cache]:
        """Returns logits in at least float32, without the padded vocabulary."""
        x, cache = self.hidden(tokens, cache)
        return self.logits(x), cache

    def hidden(
        self, tokens: Tokens, cache: Cache
    ) -> tuple[Float[Array, "B T D"], Cache]:
        """Returns the states that the head reads: after the final norm."""
        x, cache = self.stack(self.embed(tokens.ids), cache, tokens)
        return self.final_norm(x), cache

    def prefill(
        self, tokens: Tokens, cache: Cache, *, by: str = "exact"
    ) -> tuple[Float[Array, "B T D"], Cache, dict[str, Float[Array, ""]]]:
        """Reads prompts, exactly or in a way of the variant's own.

        Args:
          by: "exact": as `hidden`; else what the stack knows, such as "sweeps:4".

        Returns:
          As `hidden`, and what the way of reading has to report: numbers by the words
          that say what they are.

        Raises:
          UserError: the stack does not know this way.
        """
        reason = self.refuses_prefill(by)
        if reason is not None:
            raise UserError(reason)
        if by == "exact":
            return *self.hidden(tokens, cache), {}
        stack = as_latent_memory(self.stack)
        assert stack is not None
        x, cache, aux = stack.prefill(self.embed(tokens.ids), cache, tokens, by=by)
        return self.final_norm(x), cache, aux

    def refuses_prefill(self, by: str) -> str | None:
        """Returns why prompts cannot be read in a way, or None when they can."""
        if by == "exact":
            return None
        if (stack := as_latent_memory(self.stack)) is not None:
            return stack.refuses_prefill(by)
        return f'prefill must be "exact" for this model, got {by!r}'

    def embed(self, ids: Int[Array | np.ndarray, "B T"]) -> Float[Array, "B T D"]:
        """Returns what the stack reads."""
        table: Any = self.w_embedding[...]
        if isinstance(table, QuantizedWeight):
            x = table.rows(jnp.asarray(ids)).astype(self.config.dtype)
        else:
            x = look_up(table, ids, self.config.dtype)
        if self.config.embedding_scale == "sqrt_width":
            x = x * jnp.asarray(self.config.stack.width**0.5, x.dtype)
        return keep_rows_apart(x)

    def logits(self, x: Float[Array, "... D"]) -> Float[Array, "... V"]:
        """Applies the head to states from `hidden`; float32 or wider."""
        dtype = jnp.promote_types(x.dtype, jnp.float32)
        logits = product_in(x, self._head(), dtype, transposed=self.w_head is None)
        return self.cap(logits[..., : self.config.vocabulary])

    def head_weight(self) -> Float[Array, "D W"]:
        """Returns the head of W = padded vocabulary columns."""
        return plain(self._head())

    def _head(self) -> Array | QuantizedWeight:
        return self.w_embedding[...].T if self.w_head is None else self.w_head[...]

    def cap(self, logits: Float[Array, "..."]) -> Float[Array, "..."]:
        """Applies the soft cap, if the config has one."""
        cap = self.config.logit_soft_cap
        return logits if cap is None else cap * jnp.tanh(logits / cap)


def in_weight_dtype(model: Decoder, dtype: WeightDtype) -> Decoder:
    """Returns the model with its matrices and tables stored in a dtype.

    Raises:
      UserError: a matrix has inputs that groups of the dtype do not divide.
    """
    if model.config.weight_dtype == dtype:
        return model
    config = replace(model.config, weight_dtype=dtype)
    like = jax.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    cast = jax.tree.leaves(_with_weights_in(dtype, model))
    return jax.tree.unflatten(jax.tree.structure(like), cast)


def is_integer(dtype: WeightDtype) -> bool:
    """Returns whether matrices are stored as integers."""
    return dtype in get_args(IntegerDtype)


def _with_weights_in(dtype: WeightDtype, tree: PyTree[Any]) -> PyTree[Any]:
    kind, _, layers_only = dtype.partition("-")
    of_table = GRIDS["q8_0" if kind.startswith("q") else "int8"]

    def cast(path: tuple[Any, ...], weight: Any) -> Any:
        name = parameter_name(path)
        rule = rule_of(name)
        if not rule.is_weight:
            return weight
        weight = plain(weight)
        if not is_integer(dtype):
            return weight.astype(kind)
        weight = weight.astype("float32")
        if is_layer_matrix(name):
            grid, inputs = GRIDS[kind], rule.inputs
            first = -len(rule.outputs) - inputs
        elif layers_only or name not in ("w_embedding", "w_head"):
            return weight
        else:
            grid, inputs = of_table, 1
            first = -1 if rule.role == "table" else -2
        at = weight.ndim + first
        width = math.prod(weight.shape[at : at + inputs])
        if grid.group is not None and width % grid.group:
            raise UserError(
                f"--weights {dtype} needs widths that are multiples of {grid.group}, "
                f"and {name} has {width} inputs: use int8"
            )
        return _quantize(weight, grid, first=first, inputs=inputs)

    return jax.tree_util.tree_map_with_path(cast, tree, is_leaf=is_composed)


_quantize = jax.jit(quantize, static_argnames=("grid", "first", "inputs"))


class ParameterCount(NamedTuple):
    """The number of parameters of a model."""

    total: int
    embedding: int

    @property
    def outside_embedding(self) -> int:
        """All but the embedding table and an untied head."""
        return self.total - self.embedding


@functools.cache
def count_parameters(config: ModelConfig) -> ParameterCount:
    """Counts a model's parameters without making them."""
    plain_config = replace(config, weight_dtype="float32")  # scales are not parameters
    model = jax.eval_shape(
        lambda key: Decoder(plain_config, rngs=nnx.Rngs(key)), jax.random.key(0)
    )
    total = sum(leaf.size for leaf in jax.tree.leaves(model))
    # An untied head is a second table of the same size.
    tables = 1 if config.tied_head else 2
    embedding = tables * config.padded_vocabulary * config.stack.width
    return ParameterCount(total=total, embedding=embedding)
