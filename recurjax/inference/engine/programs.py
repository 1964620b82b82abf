"""An engine's programs, each compiled when a shape first needs it."""

import time
from contextlib import nullcontext
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Bool, Int, Int32

from pallas_kernels import target, uncopied_weights
from recurjax.exits import ExitHead
from recurjax.inference.compute_dtype import cache_dtype
from recurjax.inference.engine.config import EngineConfig, RequestSettings
from recurjax.inference.engine.host_scan import HostScan, scans_weights
from recurjax.inference.engine.slots import (
    DecodeStrategy,
    Outputs,
    SamplingParams,
    SequenceWise,
    Slots,
    admit,
    decode_slots,
    empty_slots,
    read_piece,
    read_slots,
    sampling_params,
)
from recurjax.layers.linear import count_adapters
from recurjax.model import Decoder
from recurjax.sharding import laid_out, replicated
from recurjax.types import Array, Cache

_WORTH_A_CALL = 64
"""Tokens of padding that take about as long as a call reads weights (on two cores)."""

Report = dict[str, Any]
"""What a way of reading prompts reports, by name: see `Decoder.prefill`."""


class Programs:
    """The device programs of one model at fixed sizes.

    Engines of the same abstract model, config and mesh share compiled programs: jax
    finds them by the function, its static options and the shapes. An argument of
    another shape is an error and not another compilation.

    Attributes:
      adapters: how many the model has, none of them included; 0: it has not several.
      widths: widths of the pieces in which prompts are read, rising.
      compile_seconds: spent on compiling so far.
    """

    def __init__(
        self,
        model: Decoder,
        config: EngineConfig,
        *,
        strategy: DecodeStrategy,
        slots: int,
        head: ExitHead | None,
        mesh: Mesh | None,
    ):
        """Lays weights out as a step wants them; compiles nothing else.

        Args:
          strategy: how slots move on.
          slots: how many.
          head: exit head, for a strategy whose rule needs one.
          mesh: mesh of the model; its data and fsdp axes shard the slots if they divide
            them. None: one device.
        """
        self.compile_seconds = 0.0
        self.adapters = count_adapters(model)
        self._model, self._config, self._strategy = model, config, strategy
        self._slots, self._mesh = slots, mesh
        self._compiled: dict[Any, Any] = {}
        # A piece is never longer than a slot.
        widths = {min(width, config.length) for width in config.widths}
        self.widths = tuple(sorted(widths))
        shards = 1 if mesh is None else mesh.shape["data"] * mesh.shape["fsdp"]
        self._shards = shards if slots % shards == 0 else 1
        # On a mesh: the shardings of a row and of the slots, as the compiler first
        # chooses.
        self._row_layout: Any = None
        self._slots_layout: Any = None
        # A model on several devices without a named mesh: jit takes arrays with their
        # shardings, and compiles again for other shardings.
        where = getattr(jax.tree.leaves(model)[0], "sharding", None)
        devices = 1 if where is None else len(where.device_set)
        self._spread = mesh is None and devices > 1
        self._weights: Any = None
        self._dry = False
        if not isinstance(strategy, SequenceWise):  # whose step needs nothing else
            self._weights = self._call(
                "weights", _weights, model, head, strategy=strategy
            )

    def compile(self) -> None:
        """Compiles all that a request can need, so that none waits for it later."""
        if self._spread:  # shardings are known once arrays exist
            return
        self._dry = True  # the methods then compile, and return shapes
        slots, row, last = self.empty(), self.fresh(), None
        settings = RequestSettings(max_new_tokens=1)
        params = sampling_params(settings, (), 0.0, adapters=self.adapters)
        for width in self.widths:
            ids = np.zeros(width, np.int32)
            row, last, _ = self.read(row, ids, adapter=0)
            if self.reads_together(self._slots, width):
                rows = range(self._slots)
                self.read_together(slots, {n: (ids, params) for n in rows})
        assert last is not None
        self.admit(slots, 0, row, last, np.zeros(1, np.int32), params)
        self.decode(slots, np.zeros(self._slots, bool), until_free=False)
        if self._config.states_gib:
            self.copy(row)
            if self._config.keeps_texts:
                self.take(slots, 0)
        self._dry = False

    def empty(self) -> Slots:
        """Makes slots that are all free."""
        sizes = {
            "strategy": self._strategy,
            "rows": self._slots,
            "length": self._config.length,
        }
        if self._mesh is not None and self._slots_layout is None:
            everywhere = replicated(self._mesh)
            shape = jax.eval_shape(partial(empty_slots, **sizes), self._model)
            layout = jax.tree.map(lambda _: everywhere, shape)
            # A slot's row has the sharding of the row that is read: the other axes are
            # the same.
            self.fresh()
            self._slots_layout = layout._replace(cache=self._row_layout)
        return self._call(
            "empty", empty_slots, self._model, out=self._slots_layout, **sizes
        )

    def fresh(self) -> Cache:
        """Creates an empty cache of one row; a cache of zeros is not copied there."""
        sizes: Any = {"length": self._config.length}
        if self._mesh is not None and self._row_layout is None:
            # Let the compiler choose the cache's sharding.
            width = self.widths[-1]
            text = self._text(np.zeros((1, width), np.int32), 0, 0)
            free = self._compile(
                _read_first,
                self._model,
                *text,
                by=self._config.prefill,
                **sizes,
            )
            self._row_layout = free.output_shardings[0]
        return self._call("fresh", _fresh, self._model, out=self._row_layout, **sizes)

    def width_of(self, count: int) -> int:
        """Returns the narrowest piece that holds `count` tokens."""
        return next(width for width in self.widths if width >= count)

    def first_part(self, count: int) -> int:
        """Returns how many of `count` tokens to read first.

        Fewer than all where the padding of one call would cost more than another call.
        """
        fits = next(n for n, width in enumerate(self.widths) if width >= count)
        if not fits or self.widths[fits] - count < _WORTH_A_CALL:
            return count
        return self.widths[fits - 1]

    def reads_together(self, prompts: int, width: int) -> bool:
        """Returns whether one call for all slots reads prompts sooner than a call each.

        Args:
          prompts: how many; the call pads to all slots.
          width: width of the longest prompt's piece.
        """
        if not isinstance(self._strategy, SequenceWise) or self._config.states_gib:
            return False
        if self._slots * width > self._config.prefill_tokens:
            return False
        rows = self._slots // self._shards
        return rows * width + _WORTH_A_CALL <= prompts * (width + _WORTH_A_CALL)

    def read(
        self, row: Cache, ids: Int32[np.ndarray, " T"], *, adapter: int
    ) -> tuple[Cache, Any, Report]:
        """See `read_piece`: at most the largest width of tokens; `row` is donated."""
        # The narrowest program that the piece fits; the rest of it is padding.
        width = self.width_of(len(ids))
        padded = np.zeros((1, width), np.int32)
        padded[0, : len(ids)] = ids
        return self._call(
            ("read", width),
            read_piece,
            self._model,
            row,
            *self._text(padded, len(ids), adapter),
            donate=(1,),
            out=self._out(self._row_layout, 2),
            by=self._config.prefill,
        )

    def _text(self, ids: Int32[np.ndarray, "1 W"], count: int, adapter: int) -> Any:
        """Returns the arguments of `read_piece` that are not the model's."""
        numbers = (count, adapter) if self.adapters else (count,)
        return self._place((ids, *(np.array([n], np.int32) for n in numbers)))

    def read_together(
        self, slots: Slots | None, prompts: dict[int, tuple[np.ndarray, SamplingParams]]
    ) -> tuple[Slots, Outputs, Report]:
        """See `read_slots`; `slots` is donated, None: all are free.

        Args:
          prompts: by their slots.
        """
        width = self.width_of(max(len(ids) for ids, _ in prompts.values()))
        ids = np.zeros((self._slots, width), np.int32)
        counts = np.zeros(self._slots, np.int32)
        for row, (prompt, _) in prompts.items():
            ids[row, : len(prompt)], counts[row] = prompt, len(prompt)
        # The values for the other slots are ignored.
        some = next(iter(prompts.values()))
        every = [prompts.get(row, some)[1] for row in range(self._slots)]
        params = jax.tree.map(lambda *rows: np.concatenate(rows), *every)
        sizes = {} if slots is not None else {"length": self._config.length}
        outputs = self._call(
            ("together", width, slots is None),
            read_slots,
            self._model,
            slots,
            *self._place((ids, counts, params), by_row=True),
            donate=(1,),
            out=self._out(self._slots_layout, 2),
            by=self._config.prefill,
            top=self._config.top_logprobs,
            **sizes,
        )
        if self._mesh is not None:
            self._slots_layout = _layout_of(outputs[0])
        return outputs

    def admit(
        self,
        slots: Slots,
        row: int,
        cache: Cache,
        last: Any,
        prompt: Int32[np.ndarray, " T"],
        params: SamplingParams,
    ) -> tuple[Slots, Outputs]:
        """See `slots.admit`; `slots` is donated."""
        # V is not a token: what is padded marks nothing as seen.
        padded = np.full(self._config.length, self._model.config.vocabulary, np.int32)
        padded[: len(prompt)] = prompt
        number, text, params = self._place((np.int32(row), padded, params))
        return self._call(
            "admit",
            admit,
            self._model,
            slots,
            number,
            cache,
            last,
            text,
            params,
            donate=(1,),
            out=self._out(self._slots_layout, 1),
            strategy=self._strategy,
            top=self._config.top_logprobs,
        )

    def decode(
        self, slots: Slots, ended: Bool[np.ndarray, " B"], *, until_free: bool
    ) -> tuple[Slots, Outputs, Any]:
        """See `decode_slots`; `slots` is donated."""
        return self._call(
            "decode",
            decode_slots,
            self._model,
            self._weights,
            slots,
            *self._place((ended, np.bool_(until_free))),
            donate=(2,),
            out=self._out(self._slots_layout, 2),
            strategy=self._strategy,
            steps=self._config.steps,
            top=self._config.top_logprobs,
        )

    def take(self, slots: Slots, row: int) -> Cache:
        """Creates a cache of one row of a slot's."""
        number = self._place(np.array([row], np.int32))
        return self._call(
            "take", _take, self._model, slots.cache, number, out=self._row_layout
        )

    def copy(self, cache: Cache) -> Cache:
        """Copies a cache of one row, for `read` to donate."""
        return self._call("copy", _copy, cache, out=self._row_layout)

    def _call(
        self, key: Any, function: Any, *arguments: Any, out: Any = None, **options: Any
    ) -> Any:
        """Runs a program, which is compiled at its first call.

        Args:
          key: names it; who calls with other shapes gives another key.
          out: shardings of the results, None where the compiler chooses.
          options: see `_compile`.
        """
        program = self._compiled.get(key)
        if program is None and self._spread:
            program = _jitted_for(function, out=out, **options)
        elif program is None:
            program = self._compile(function, *arguments, out=out, **options)
        self._compiled[key] = program
        if not self._dry:
            return program(*arguments)
        shapes = jax.tree.map(_shape_of, program.out_info)
        if self._mesh is None:
            return shapes
        return jax.tree.map(_with_sharding, shapes, program.output_shardings)

    def _compile(
        self,
        function: Any,
        *arguments: Any,
        donate: tuple[int, ...] = (),
        out: Any = None,
        **static: Any,
    ) -> Any:
        began = time.perf_counter()
        jitted = _jitted_for(function, donate=donate, out=out, **static)
        # Weights as they are: on a TPU each has a layout of its own.
        weights = self._model, self._weights
        shapes = [
            argument
            if any(argument is part for part in weights)
            else jax.tree.map(_with_sharding if self._mesh else _shape_of, argument)
            for argument in arguments
        ]
        with nullcontext() if self._mesh is None else jax.set_mesh(self._mesh):
            traced = jitted.trace(*shapes)
            known = sum(any(x is part for part in weights) for x in arguments)
            by_layer = self._mesh is None and target.copies_stacked_weights()
            if by_layer and scans_weights(traced, shapes, known=known):
                program = HostScan(traced, shapes, known=known, donate=donate)
            else:
                program = traced.lower().compile()
        self.compile_seconds += time.perf_counter() - began
        return program

    def _out(self, layout: Any, others: int) -> Any:
        """Returns the shardings of results: one that stays, others for the host."""
        if self._mesh is None:
            return None
        return (layout, *[replicated(self._mesh)] * others)

    def _place(self, tree: Any, *, by_row: bool = False) -> Any:
        """Lays arrays of the host out over a mesh, whose processes all have them."""
        if self._mesh is None:
            return tree
        spec = P(("data", "fsdp")) if by_row and self._shards > 1 else P()
        where = NamedSharding(self._mesh, spec)
        return jax.tree.map(lambda leaf: laid_out(leaf, where), tree)


def _jitted_for(
    function: Any, *, donate: tuple[int, ...] = (), out: Any = None, **static: Any
) -> Any:
    leaves, tree = jax.tree.flatten(out, is_leaf=lambda leaf: leaf is None)
    return _jitted(function, donate, tuple(leaves), tree, tuple(static.items()))


@cache
def _jitted(
    function: Any,
    donate: tuple[int, ...],
    shardings: tuple[Any, ...],
    tree: Any,
    static: tuple[tuple[str, Any], ...],
) -> Any:
    """Returns a function's one jitted form with such options, whose programs jax keeps.

    Args:
      shardings, tree: shardings and tree structure of the results, flattened so that
        they can be hashed.
    """
    out = jax.tree.unflatten(tree, shardings)
    return jax.jit(
        partial(function, **dict(static)),
        donate_argnums=donate,
        out_shardings=out,
        compiler_options=uncopied_weights.compiler_options(),
    )


def _weights(model: Decoder, head: ExitHead | None, *, strategy: DecodeStrategy) -> Any:
    return strategy.weights(model, head)


def _fresh(model: Decoder, *, length: int) -> Cache:
    return model.init_cache(1, length, cache_dtype(model))


def _read_first(model: Decoder, *text: Any, by: str, length: int) -> Any:
    return read_piece(model, _fresh(model, length=length), *text, by=by)


def _take(model: Decoder, cache: Cache, row: Int[Array, " 1"]) -> Cache:
    return model.stack.take(cache, row)


def _copy(cache: Cache) -> Cache:
    return jax.tree.map(jnp.copy, cache)


def _shape_of(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)


def _with_sharding(leaf: Any, sharding: Any = None) -> jax.ShapeDtypeStruct:
    where = leaf.sharding if sharding is None else sharding
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)


def _layout_of(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.sharding, tree)
