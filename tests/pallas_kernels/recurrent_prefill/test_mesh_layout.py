"""One call on several devices: the same numbers, and what passes between them."""

import re
from functools import cache, partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels.recurrent_prefill import (
    LayerSpec,
    Rows,
    empty_cache,
    recurrent_prefill,
)
from pallas_kernels.recurrent_prefill.call import (
    RecurrentPrefillCall,
    RecurrentPrefillOptions,
)
from pallas_kernels.recurrent_prefill.mesh_layout import find_cut
from pallas_kernels.recurrent_prefill.reference import recurrent_prefill_reference
from pallas_kernels.recurrent_prefill.xla import one_position
from tests.compiling import QUICK_COMPILE
from tests.pallas_kernels.recurrent_prefill.layers import BATCH, WIDTH, rows, spec
from tests.pallas_kernels.recurrent_prefill.layers import weights as draw
from tests.tolerances import assert_close, assert_values_close

LAYERS, TILE = 4, 4
NORMS = spec(dtype="float32")
PLAIN = spec(dtype="float32", norm="none", qk_norm="none")  # compiles sooner
AXES = ("data", "fsdp", "stage", "tensor")
quick = partial(jax.jit, compiler_options=QUICK_COMPILE)
slow = partial(pytest.param, marks=pytest.mark.slow)


def mesh_of(**sizes: int):
    shape = [sizes.get(axis, 1) for axis in AXES]
    count = 1
    for size in shape:
        count *= size
    kinds = (AxisType.Auto,) * len(AXES)
    return jax.make_mesh(shape, AXES, axis_types=kinds, devices=jax.devices()[:count])


def loss(x, w, *, layer: LayerSpec = PLAIN, schedule: str = "wavefront"):
    training = empty_cache(w.w_q.shape[0], x.shape[0], 0, WIDTH, layer)
    tile = None if schedule == "naive" else TILE
    z, _ = recurrent_prefill(x, w, training, spec=layer, schedule=schedule, tile=tile)
    return jnp.sum(z**2)


def inputs(layer: LayerSpec = PLAIN, *, layers: int = LAYERS):
    return jnp.asarray(rows(1), jnp.float32), draw(
        layer, layers=layers, dtype="float32"
    )


@cache
def reference(layer: LayerSpec):
    """Returns loss and gradients on one device."""

    def compute(x, w):
        return jnp.sum(recurrent_prefill_reference(x, w, spec=layer) ** 2)

    return quick(jax.value_and_grad(compute, argnums=(0, 1)))(*inputs(layer))


def collectives(hlo: str) -> tuple[list[str], list[str]]:
    """Returns the collectives of the loops and of the rest: opcode and shape."""
    inside: list[str] = []
    outside: list[str] = []
    result = outside
    call = r"= (\S+|\(.*?\)) (all-\w+|reduce-scatter|collective-permute)(-start)?\("
    for line in hlo.splitlines():
        if line.endswith("{") and not line.startswith(" "):
            result = outside if line.startswith("ENTRY") else inside
        elif met := re.search(call, line):
            result.append(f"{met[2]} {met[1].split('{')[0]}")
    return inside, outside


def compiled(layer: LayerSpec, schedule: str, **sizes: int):
    """Returns the compiled gradient on a mesh, and its inputs there."""
    mesh = mesh_of(**sizes)
    put = lambda leaf, spec: jax.device_put(leaf, NamedSharding(mesh, spec))  # noqa: E731
    x, w = inputs(layer)
    x, w = put(x, P("data")), jax.tree.map(lambda leaf: put(leaf, P("stage")), w)
    compute = partial(loss, layer=layer, schedule=schedule)
    with jax.set_mesh(mesh):
        gradient = quick(jax.value_and_grad(compute, argnums=(0, 1)))
        return gradient.lower(x, w).compile(), (x, w)


def assert_same(got, want):
    assert_values_close(got[0], want[0])
    for first, other in zip(*map(jax.tree.leaves, (got[1], want[1])), strict=True):
        assert_close(first, other, dtype="float32", tolerance=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layer", "sizes"),
    [
        (PLAIN, {"data": 2, "stage": 2}),
        slow(NORMS, {"stage": 4}),
        slow(NORMS, {"data": 2, "stage": 2, "tensor": 2}),
    ],
    ids=str,
)
def test_stages_hold_their_layers_and_pass_tiles_on(layer, sizes):
    program, (x, w) = compiled(layer, "wavefront", **sizes)
    got = program(x, w)
    assert_same(got, reference(layer))
    layers = LAYERS // sizes["stage"]
    for leaf in jax.tree.leaves((w, got[1][1])):
        assert {s.data.shape[0] for s in leaf.addressable_shards} == {layers}
    inside, outside = collectives(program.as_text())
    tile = f"f32[1,{TILE},{BATCH // sizes.get('data', 1)},{WIDTH}]"
    # One a loop: forward a tile goes up, backward its gradient goes down.
    assert inside == [f"collective-permute {tile}"] * 2
    assert any("all-reduce" in line for line in outside)


@pytest.mark.slow  # The wavefront above has rows on two devices as well.
@pytest.mark.parametrize("schedule", ["prefix", "naive"])
def test_rows_on_several_devices_meet_once_a_call(schedule):
    program, (x, w) = compiled(NORMS, schedule, data=2)
    assert_same(program(x, w), reference(NORMS))
    inside, outside = collectives(program.as_text())
    assert inside == []
    assert any("all-reduce" in line for line in outside)


def test_a_batch_that_the_devices_do_not_divide_is_computed_whole():
    x, w = inputs()
    training = empty_cache(LAYERS, x.shape[0], 0, WIDTH, PLAIN)
    options = RecurrentPrefillOptions(spec=PLAIN)
    call = RecurrentPrefillCall(x, w, training, Rows(), options)
    with jax.set_mesh(mesh_of(data=2)):
        assert find_cut(call).rows == ("data",)
        assert not find_cut(call._replace(x=x[:1])).cuts
    assert find_cut(call) is None


@pytest.mark.parametrize("sizes", [{"tensor": 2}, {"data": 2, "tensor": 2}])
def test_an_axis_that_the_op_does_not_cut_leaves_no_kernel(sizes):
    x, w = inputs()
    training = empty_cache(LAYERS, x.shape[0], 0, WIDTH, PLAIN)
    run = partial(recurrent_prefill, x, w, training, spec=PLAIN)
    with (
        jax.set_mesh(mesh_of(**sizes)),
        pytest.raises(
            NotImplementedError, match="mesh's tensor does not divide the call"
        ),
    ):
        run(implementation="mosaic_tpu")


@pytest.mark.slow
def test_prefill_and_steps_on_stages_are_those_of_one_device():
    x, w = inputs()
    run = quick(partial(recurrent_prefill, spec=PLAIN, schedule="wavefront", tile=TILE))

    def values():
        cache = empty_cache(LAYERS, BATCH, x.shape[1], WIDTH, PLAIN)
        parts = []
        for start, stop in ((0, 6), (6, 12), (12, 13)):
            z, cache = run(x[:, start:stop], w, cache)
            parts.append(z)
        return jnp.concatenate(parts, axis=1), cache

    # On one device the last step leaves its pair to the next one.
    z, cache = values()
    assert cache.written.tolist() == [12] * BATCH
    want = z, one_position.write_pending(w, cache, spec=PLAIN)
    with jax.set_mesh(mesh_of(data=2, stage=2)):
        z, cache = values()
    assert {s.data.shape[:2] for s in cache.keys.addressable_shards} == {(2, 1)}
    assert_values_close((z, cache._replace(source=want[1].source)), want)


@pytest.mark.parametrize(
    ("layers", "schedule", "message"),
    [
        (3, "wavefront", "must divide the layers, got 3 layers on 2"),
        (
            4,
            "prefix",
            "needs schedule \"wavefront\" on a mesh of 2 stages, got 'prefix'",
        ),
    ],
)
def test_stages_that_do_not_fit_are_told(layers, schedule, message):
    x, w = inputs(layers=layers)
    with (
        jax.set_mesh(mesh_of(stage=2)),
        pytest.raises(ValueError, match=f"recurrent_prefill: .*{message}"),
    ):
        jax.eval_shape(partial(loss, schedule=schedule), x, w)
