"""An engine's programs, all compiled when it starts; to call one compiles nothing."""

from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Bool, Float, Int, Int32

from recurjax.inference.decoding import cache_dtype
from recurjax.inference.engine.config import EngineConfig
from recurjax.inference.engine.slots import (
    Made,
    Slots,
    Way,
    Wishes,
    admit,
    decode_slots,
    empty_slots,
    read_piece,
)
from recurjax.model import Decoder
from recurjax.sharding import replicated
from recurjax.types import Array, Cache

_WORTH_A_CALL = 64
"""Tokens of padding that take about as long as a call reads weights (on two cores)."""


class Programs:
    """What runs on the device, for a model and sizes that are fixed.

    They are compiled ahead of time: an argument of another shape is an error and not
    another compilation.
    """

    def __init__(
        self,
        model: Decoder,
        config: EngineConfig,
        *,
        way: Way,
        slots: int,
        mesh: Mesh | None,
        compiler_options: Mapping[str, Any] | None,
    ):
        """Compiles them all.

        Args:
          way: how slots move on.
          slots: how many.
          mesh: on which the model lies, with each slot's cache cut as the compiler cuts
            it in a prefill; None: one device.
        """
        self._model, self._length = model, config.length
        self._vocabulary = model.config.vocabulary
        # A piece is never longer than a slot.
        self.widths = tuple(min(w, config.length) for w in config.widths)
        self.widths = tuple(sorted(set(self.widths)))
        compile_ = partial(_compile, mesh=mesh, options=dict(compiler_options or {}))
        place = (lambda tree: tree) if mesh is None else partial(_placed, mesh=mesh)

        def start() -> Cache:
            return model.init_cache(1, config.length, cache_dtype(model))

        read = partial(read_piece, by=config.prefill)
        one = place(jax.eval_shape(start))
        count = place(_shape((1,), np.int32))
        widest = place(_shape((1, self.widths[-1]), np.int32))
        if mesh is not None:
            # The cache lies where the compiler leaves it when it may choose.
            free = compile_(lambda m, *given: read(m, start(), *given))
            found = free(model, widest, count).output_shardings
            one = _lying(one, found[0])
        # Shapes alone: the programs are compiled before any memory is taken.
        last = jax.eval_shape(read, model, one, widest, count)[1]
        last = place(last)
        whole = jax.eval_shape(lambda: empty_slots(model, way, slots, config.length))
        whole = place(whole)
        if mesh is not None:
            # A slot's row lies as the row that is read: its other axes are the same.
            where = jax.tree.map(lambda leaf: leaf.sharding, one)
            whole = whole._replace(cache=_lying(whole.cache, where))
        wishes = place(jax.eval_shape(lambda s: _row(s, 0), whole.wishes))

        out = None if mesh is None else _where
        everywhere = None if mesh is None else replicated(mesh)

        def outs(*trees: Any) -> Any:
            return None if out is None else tuple(map(out, trees))

        # Made on the device: a cache of zeros is not copied there.
        self._fresh = compile_(start, out=None if out is None else out(one))()
        self._read = {
            width: compile_(read, donate=(1,), out=outs(one, last))(
                model, one, place(_shape((1, width), np.int32)), count
            )
            for width in self.widths
        }
        row = place(_shape((), np.int32))
        prompt = place(_shape((config.length,), np.int32))
        made = None if out is None else (out(whole), everywhere)
        top = config.top_logprobs
        put = partial(_admitting, way=way, top=top)
        self._admit = compile_(put, donate=(1,), out=made)(
            model, whole, row, one, last, prompt, wishes
        )
        # Laid out once: what every step would do again is not done in a step.
        self._weights = compile_(way.weights)(model)(model)
        decode = partial(decode_slots, way=way, steps=config.steps, top=top)
        ended, until_free = place(_shape((slots,), bool)), place(_shape((), bool))
        if made is not None:
            made = (*made, everywhere)
        self._decode = compile_(decode, donate=(2,), out=made)(
            model, self._weights, whole, ended, until_free
        )
        empty = partial(empty_slots, model, way, slots, config.length)
        self.empty = compile_(empty, out=None if out is None else out(whole))()
        # Without kept states nobody takes a slot's row out, nor where tokens leave
        # early: what they leave behind is not what reading them would.
        if config.states_gib:
            to_one = None if out is None else out(one)
            if config.exit is None:
                self._take = compile_(
                    lambda m, cache, row: m.stack.take(cache, row[None]), out=to_one
                )(model, whole.cache, row)
            self._copy = compile_(
                lambda cache: jax.tree.map(jnp.copy, cache), out=to_one
            )(one)

    def fresh(self) -> Cache:
        """Makes an empty cache of one row."""
        return self._fresh()

    def first_part(self, count: int) -> int:
        """Returns how many of `count` tokens to read first.

        Fewer than all where the padding of one call would cost more than another call.
        """
        fits = next(n for n, width in enumerate(self.widths) if width >= count)
        if not fits or self.widths[fits] - count < _WORTH_A_CALL:
            return count
        return self.widths[fits - 1]

    def read(
        self, cache: Cache, ids: Int32[np.ndarray, " T"]
    ) -> tuple[Cache, Float[Array, "1 D"]]:
        """Reads a piece of at most the largest width; `cache` is donated."""
        # The narrowest program that the piece fits; the rest of it is padding.
        width = next(width for width in self.widths if width >= len(ids))
        padded = np.zeros((1, width), np.int32)
        padded[0, : len(ids)] = ids
        count = np.array([len(ids)], np.int32)
        return self._read[width](self._model, cache, padded, count)

    def admit(
        self,
        slots: Slots,
        row: int,
        cache: Cache,
        last: Float[Array, "1 D"],
        prompt: Int32[np.ndarray, " T"],
        wishes: Wishes,
    ) -> tuple[Slots, Made]:
        """See `slots.admit`; `slots` is donated."""
        # V is no token: what is padded marks nothing as seen.
        padded = np.full(self._length, self._vocabulary, np.int32)
        padded[: len(prompt)] = prompt
        number = np.asarray(row, np.int32)
        return self._admit(self._model, slots, number, cache, last, padded, wishes)

    def decode(
        self, slots: Slots, ended: Bool[np.ndarray, " B"], *, until_free: bool
    ) -> tuple[Slots, Made, Int[Array, ""]]:
        """See `decode_slots`; `slots` is donated."""
        free = np.asarray(until_free)
        return self._decode(self._model, self._weights, slots, ended, free)

    def take(self, slots: Slots, row: int) -> Cache:
        """Makes a cache of one row of a slot's."""
        return self._take(self._model, slots.cache, np.asarray(row, np.int32))

    def copy(self, cache: Cache) -> Cache:
        """Copies a cache of one row, for `read` to donate."""
        return self._copy(cache)


def _admitting(model: Decoder, slots: Slots, *given: Any, way: Way, top: int):
    return admit(model, way, slots, *given, top=top)


def _compile(function: Any, *, mesh: Mesh | None, options: dict, donate=(), out=None):
    """Returns what compiles a function for arguments or their shapes."""
    placed = {} if out is None else {"out_shardings": out}
    jitted = jax.jit(function, donate_argnums=donate, **placed)

    def compiled(*shapes: Any) -> Any:
        with nullcontext() if mesh is None else jax.set_mesh(mesh):
            return jitted.lower(*shapes).compile(compiler_options=options or None)

    return compiled


def _shape(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _placed(tree: Any, *, mesh: Mesh) -> Any:
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated(mesh)),
        tree,
    )


def _lying(tree: Any, where: Any) -> Any:
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, where
    )


def _where(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.sharding, tree)


def _row(tree: Any, row: int) -> Any:
    return jax.tree.map(lambda leaf: leaf[row : row + 1], tree)
