"""A checksum per array that is the same under any sharding."""

from collections.abc import Mapping
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Shaped, UInt32


def checksums(arrays: Mapping[str, Shaped[Array, "..."]]) -> dict[str, str]:
    """Computes the checksum of each array on its own devices.

    sum over i of mix(word[i], i), modulo 2^32, in two independent lanes: word[i] are
    the bits of element i (two words for 64-bit elements), i its row-major index in the
    full array. An integer sum has no order, so the result is the same under any
    sharding and any number of processes. Each mix is a bijection of the word: a change
    of one element of at most 32 bits always shows; any other change (two swapped
    elements, say) escapes with probability 2^-64. Shape and dtype are not part of it.

    All arrays go through one compiled program, which reads each of them once. In a run
    of several processes each process must call this at the same point.

    Args:
      arrays: by name, of any real dtype; those on the same devices are handled
        together.

    Returns:
      Sixteen hexadecimal digits per name.

    Raises:
      ValueError: a complex or otherwise extended dtype.
    """
    # Arrays on other devices (of a pipeline's stages) need a program of their own.
    groups: dict[frozenset, list[str]] = {}
    for name, array in sorted(arrays.items()):
        groups.setdefault(frozenset(array.sharding.device_set), []).append(name)
    sums: dict[str, str] = {}
    for names in groups.values():
        leaves = [arrays[name] for name in names]
        lanes = np.asarray(_all_sums(leaves, mesh=_mesh(leaves)))
        sums |= {
            name: f"{a:08x}{b:08x}" for name, (a, b) in zip(names, lanes, strict=True)
        }
    return sums


def _mesh(leaves: list[Array]) -> Mesh | None:
    shardings = (leaf.sharding for leaf in leaves)
    meshes = (s.mesh for s in shardings if isinstance(s, NamedSharding))
    mesh = next(meshes, None)
    return mesh if isinstance(mesh, Mesh) else None


@partial(jax.jit, static_argnames="mesh")
def _all_sums(leaves: list[Array], *, mesh: Mesh | None) -> UInt32[Array, "N 2"]:
    sums = jnp.stack([_sum(leaf) for leaf in leaves])
    if mesh is None:
        return sums
    # Replicated, so that every process can read all of it.
    return lax.with_sharding_constraint(sums, NamedSharding(mesh, P()))


@jax.jit  # Traced once per shape and dtype, not once per array.
def _sum(x: Shaped[Array, "..."]) -> UInt32[Array, " 2"]:
    words = _words(x)
    key = _mix(_row_major_index(words.shape) + jnp.uint32(0x9E3779B9))
    # The second key is another bijection of the first: the lanes share one hashing of
    # the index and stay independent.
    second = key * jnp.uint32(0xC2B2AE35) + jnp.uint32(1)
    lanes = (_mix(words ^ key), _mix((words + jnp.uint32(0x85EBCA6B)) ^ second))
    zero = jnp.uint32(0)
    # One reduction of pairs reads the array once; two sums would read it twice.
    pair = lax.reduce(
        lanes,
        (zero, zero),
        lambda a, b: (a[0] + b[0], a[1] + b[1]),
        tuple(range(words.ndim)),
    )
    return jnp.stack(pair)


def _words(x: Shaped[Array, "..."]) -> UInt32[Array, "..."]:
    """Gives the bits of each element; 64-bit elements get a last axis of two words."""
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    if jnp.issubdtype(x.dtype, jnp.integer):
        bits = jnp.iinfo(x.dtype).bits
    elif jnp.issubdtype(x.dtype, jnp.floating):
        bits = jnp.finfo(x.dtype).bits
    else:
        raise ValueError(f"checksums: arrays must be real, got dtype={x.dtype}")
    word = jnp.dtype(f"uint{min(bits, 32)}")
    return lax.bitcast_convert_type(x, word).astype(jnp.uint32)


def _row_major_index(shape: tuple[int, ...]) -> UInt32[Array, "..."]:
    index, stride = jnp.zeros(shape, jnp.uint32), 1
    for axis in reversed(range(len(shape))):
        count = lax.broadcasted_iota(jnp.uint32, shape, axis)
        index = index + count * jnp.uint32(stride % 2**32)
        # Modulo 2^32, as the index itself: large arrays repeat keys after 4e9 elements.
        stride *= shape[axis]
    return index


def _mix(h: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """Scrambles 32 bits: a bijection in which each input bit moves about half of all.

    Xor-shifts and odd factors in turn, with the constants that C. Wellons' search for
    low-bias integer hashes found ("Prospecting for Hash Functions", 2018).
    """
    h = (h ^ (h >> 16)) * jnp.uint32(0x7FEB352D)
    h = (h ^ (h >> 15)) * jnp.uint32(0x846CA68B)
    return h ^ (h >> 16)
