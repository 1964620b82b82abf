import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from recurjax.training.checkpoint.checksum import checksums

MASK = 0xFFFFFFFF


def mix(h):
    h = ((h ^ (h >> 16)) * 0x7FEB352D) & MASK
    h = ((h ^ (h >> 15)) * 0x846CA68B) & MASK
    return h ^ (h >> 16)


def definition(array) -> str:
    """The documented sum, word by word, in unbounded integers."""
    array = np.asarray(array)
    if array.dtype == np.bool_:
        array = array.astype(np.uint8)
    size = min(array.dtype.itemsize, 4)
    words = np.frombuffer(array.tobytes(), f"<u{size}")
    first = second = 0
    for index, word in enumerate(map(int, words)):
        key = mix((index + 0x9E3779B9) & MASK)
        other = (key * 0xC2B2AE35 + 1) & MASK
        first += mix(word ^ key)
        second += mix(((word + 0x85EBCA6B) & MASK) ^ other)
    return f"{first & MASK:08x}{second & MASK:08x}"


def arrays_of_all_dtypes():
    values = np.linspace(-3, 5, 24).reshape(4, 6)
    dtypes = "float32 bfloat16 float16 float8_e4m3fn float64 int32 uint32 int8 bool"
    named = {name: jnp.asarray(values, name) for name in dtypes.split()}
    named["scalar"] = jnp.float32(3.5)
    named["empty"] = jnp.zeros((0, 3))
    named["line"] = jnp.arange(17, dtype=jnp.int32)
    named["cube"] = jnp.arange(30, dtype=jnp.uint16).reshape(2, 3, 5)
    named["special"] = jnp.array([0.0, -0.0, np.nan, -np.nan, np.inf], jnp.float32)
    return named


def test_checksums_of_all_dtypes_are_those_of_the_definition():
    with jax.enable_x64(True):
        arrays = arrays_of_all_dtypes()
        assert arrays["float64"].dtype == jnp.float64
        want = {name: definition(array) for name, array in arrays.items()}
        assert checksums(arrays) == want


def test_checksums_do_not_depend_on_the_sharding():
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    whole = jnp.arange(8 * 6 * 4, dtype=jnp.float32).reshape(8, 6, 4)
    specs = P(), P("a"), P(None, "b"), P("b", None, "a"), P(("a", "b"))
    places = [NamedSharding(mesh, spec) for spec in specs]
    places.append(SingleDeviceSharding(jax.devices()[3]))
    placed = {str(i): jax.device_put(whole, p) for i, p in enumerate(places)}
    assert set(checksums(placed).values()) == {definition(whole)}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bool"])
def test_any_change_of_one_element_changes_both_lanes(dtype):
    start = np.asarray(jnp.asarray(np.arange(16).reshape(4, 4) % 3, dtype))
    variants = {"start": start}
    for index in np.ndindex(start.shape):
        changed = start.copy()
        changed[index] = not changed[index] if dtype == "bool" else changed[index] + 1
        variants[str(index)] = changed
    sums = checksums({name: jnp.asarray(v) for name, v in variants.items()})
    for lane in (slice(0, 8), slice(8, 16)):
        assert all(sums[n][lane] != sums["start"][lane] for n in sums if n != "start")


def test_swapping_any_two_elements_changes_the_checksum():
    start = np.arange(7, dtype=np.int32)
    variants = {"start": start}
    for i in range(7):
        for j in range(i):
            swapped = start.copy()
            swapped[[i, j]] = swapped[[j, i]]
            variants[f"{i},{j}"] = swapped
    sums = checksums({name: jnp.asarray(v) for name, v in variants.items()})
    assert len(set(sums.values())) == len(variants)


def test_a_second_call_compiles_nothing():
    arrays = {"a": jnp.ones((3, 5)), "b": jnp.arange(4)}
    first = checksums(arrays)
    changed = {"a": arrays["a"] + 1, "b": arrays["b"] + 1}
    with jax.no_tracing():
        assert checksums(changed) != first


def test_a_complex_array_is_refused():
    with pytest.raises(ValueError, match="dtype=complex64"):
        checksums({"c": jnp.zeros(2, jnp.complex64)})
