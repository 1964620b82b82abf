"""Fills a model from a checkpoint, one tensor at a time, straight onto its mesh."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from typing import Any, cast, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from recurjax.convert.formats.tensors import (
    Part,
    QuantizedSource,
    TensorSource,
    count_not_finite,
    empty_for_jax,
)
from recurjax.convert.pieces import Piece, check_tensors, indices
from recurjax.evaluation.progress import progress_bar
from recurjax.model import Decoder, ModelConfig
from recurjax.parameters import parameter_name, rule_of
from recurjax.sharding import MeshConfig, make_mesh, shardings

_ON_HOST = 1 << 26
"""Bytes of a stack that is put together on the host: nothing is compiled for it."""


def load_model(
    config: ModelConfig,
    pieces: Sequence[Piece],
    source: TensorSource,
    *,
    mesh: Mesh | None = None,
    ignored: Iterable[str] = (),
    report: Callable[[str], None] = print,
) -> Decoder:
    """Reads a model.

    In addition to the parameters, memory holds one tensor of the checkpoint and one
    layer's array, or 64 MiB of small layers; on a CPU a parameter that is an entire
    tensor shares its memory. A tensor of several parameters is read once for each.

    Args:
      config: config of the model.
      pieces: where its parameters are on disk.
      source: the checkpoint.
      mesh: devices that hold the parameters; None: one device.
      ignored: see `check_tensors`.
      report: called with a message if weights are not finite.

    Raises:
      UserError: the checkpoint does not fit; the first few differences are named.
    """
    check_tensors(pieces, source, ignored=ignored)
    # One device where nothing else is said: a mesh of one.
    if mesh is None:
        mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    abstract = jax.eval_shape(
        lambda key: Decoder(config, rngs=nnx.Rngs(key)), jax.random.key(0)
    )
    # Where each parameter will be, so that a tensor goes there without a copy in
    # between.
    places = jax.tree.leaves(shardings(abstract, mesh))
    paths, structure = jax.tree_util.tree_flatten_with_path(abstract)
    of_parameter: dict[str, list[Piece]] = defaultdict(list)
    for piece in pieces:
        of_parameter[piece.parameter].append(piece)
    bad: dict[str, int] = {}
    filled = []
    with progress_bar("tensors read", len(pieces)) as advance:

        def read(part: Part | None, piece: Piece, leaf: Any) -> np.ndarray:
            advance(part in (None, "values"))
            if part is None:
                return _read(piece, source, leaf.dtype, bad)
            assert isinstance(source, QuantizedSource)
            shape = leaf.shape[len(indices(piece.layer)) :]
            return _read_part(piece, source, part, shape, leaf.dtype, bad)

        for (path, leaf), sharding in zip(paths, places, strict=True):
            weight, _, word = (name := parameter_name(path)).rpartition(".")
            part = cast(Part, word) if word in get_args(Part) else None
            pieces_of_leaf = of_parameter[name if part is None else weight]
            filled.append(_fill(pieces_of_leaf, leaf, sharding, partial(read, part)))
    _warn(bad, source, report)
    return jax.tree_util.tree_unflatten(structure, filled)


def _fill(
    pieces: list[Piece],
    leaf: jax.ShapeDtypeStruct,
    sharding: NamedSharding,
    read: Callable[[Piece, jax.ShapeDtypeStruct], np.ndarray],
) -> jax.Array:
    # A parameter that is not stacked is one tensor.
    if pieces[0].layer is None:
        [piece] = pieces
        return _place(read(piece, leaf), sharding)
    shape, dtype = leaf.shape, leaf.dtype
    if dtype.itemsize * math.prod(shape) <= _ON_HOST:
        layers = empty_for_jax(shape, dtype)
        for piece in pieces:
            layers[piece.layer] = read(piece, leaf)
        return _place(layers, sharding)
    # A large stack is made on its devices and written layer by layer: the host holds
    # one layer at a time.
    leading = len(indices(pieces[0].layer))
    layer_sharding = NamedSharding(sharding.mesh, P(*sharding.spec[leading:]))
    stacked = jax.jit(partial(jnp.zeros, shape, dtype), out_shardings=sharding)()
    put = _writer(sharding)
    for piece in pieces:
        layer = _place(read(piece, leaf), layer_sharding)
        stacked = put(stacked, layer, np.asarray(indices(piece.layer), np.int32))
    return stacked


@cache
def _writer(sharding: NamedSharding) -> Callable[..., jax.Array]:
    """Returns a function that writes one layer into the donated stack."""

    def put(stacked: jax.Array, layer: jax.Array, index: jax.Array) -> jax.Array:
        block = layer.reshape((1,) * index.size + layer.shape)
        starts = [*index, *(np.int32(0) for _ in layer.shape)]
        return jax.lax.dynamic_update_slice(stacked, block, starts)

    return jax.jit(put, donate_argnums=0, out_shardings=sharding)


def _read(
    piece: Piece, source: TensorSource, dtype: np.dtype, bad: dict[str, int]
) -> np.ndarray:
    disk = source.read(piece.tensor, dtype)
    # Report at the end, do not raise: the user may want to inspect a diverged
    # checkpoint.
    if count := count_not_finite(disk):
        bad[piece.tensor] = count
    ours = piece.take(disk)
    # jax may keep a CPU array's memory: what is a part of the tensor gets its own.
    contiguous = ours.size == disk.size and ours.flags.c_contiguous
    return ours if contiguous else np.array(ours, order="C")


def _read_part(
    piece: Piece,
    source: QuantizedSource,
    part: Part,
    shape: tuple[int, ...],
    dtype: np.dtype,
    bad: dict[str, int],
) -> np.ndarray:
    """Reads a part of a quantized weight, in the shape that it has in one layer."""
    disk = source.read(piece.tensor, np.int8 if part == "values" else dtype, part=part)
    ours = piece.take(disk)
    if part == "values":
        return ours.astype(dtype)
    if count := count_not_finite(disk):
        bad[piece.tensor] = count
    # That of a group is there for each of its inputs, which are the axes in front, of
    # a table the last.
    if rule_of(piece.parameter).role == "table":
        return ours.reshape(*shape, -1)[..., 0].copy()
    return ours.reshape(shape[0], -1, *shape[1:])[:, 0].copy()


def _place(array: np.ndarray, sharding: Any) -> jax.Array:
    # Each device takes its part of the array on the host.
    return jax.make_array_from_callback(array.shape, sharding, lambda i: array[i])


def _warn(
    bad: dict[str, int], source: TensorSource, report: Callable[[str], None]
) -> None:
    if bad:
        names = ", ".join(list(bad)[:3]) + (", ..." if len(bad) > 3 else "")
        report(
            f"warning: {sum(bad.values()):,} weights of {source.where} are NaN or "
            f"infinite, in {len(bad)} tensors ({names})"
        )
