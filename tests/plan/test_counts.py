"""FLOPs, bytes and collectives of a program with loops, against the unrolled one."""

from functools import partial
from types import SimpleNamespace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.sharding import AxisType, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from recurjax.plan.child import CompiledMemory, read_memory
from recurjax.plan.flops import Flops, count_flops
from recurjax.plan.hlo import array_bytes, parse
from recurjax.plan.traffic import Traffic, _kernel_name, read_traffic

STEPS, ROWS, WIDTH = 6, 16, 32
AXES, SIZES = ("data", "tensor"), (2, 4)


def stack(x, weights, *, unroll: int, remat: bool = False):
    """Layers of two products each, the second one's result summed over devices."""

    def layer(x, w):
        return jnp.tanh(x @ w) @ w.T, None

    body = jax.checkpoint(layer, prevent_cse=False) if remat else layer
    return jax.lax.scan(body, x, weights, unroll=unroll)[0].sum()


def shapes(mesh=None):
    def shape(size, spec):
        where = None if mesh is None else NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(size, jnp.float32, sharding=where)

    return (
        shape((ROWS, WIDTH), P("data")),
        shape((STEPS, WIDTH, WIDTH), P(None, None, "tensor")),
    )


@pytest.mark.parametrize("remat", [False, True])
def test_flops_of_a_scan_are_those_of_its_unrolled_program(remat):
    def count(unroll: int) -> Flops:
        loss = partial(stack, unroll=unroll, remat=remat)
        jaxpr = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(*shapes())
        return count_flops(jaxpr, platform="cpu")

    looped, unrolled = count(1), count(STEPS)
    assert looped.products == unrolled.products
    # A layer forward, its two products' four gradients, and both again under remat.
    product = 2 * ROWS * WIDTH * WIDTH
    again = 1 if remat else 0
    assert looped.products == STEPS * product * (6 + again)


def test_flops_see_loops_branches_kernels_and_shards():
    w = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    product = 2 * 8**3

    def counted(function) -> Flops:
        return count_flops(jax.make_jaxpr(function)(w), platform="cuda")

    loop = counted(lambda w: jax.lax.fori_loop(0, 5, lambda _, x: x @ w, w))
    assert loop.products == 5 * product

    def endless(w):
        return jax.lax.while_loop(lambda x: x.sum() < 3, lambda x: x @ w, w)

    assert counted(endless).products == product
    assert counted(endless).unknown_loops == 1

    def nested(w):
        def rows(x, _):
            return jax.lax.fori_loop(0, 3, lambda _, y: y @ w, x), None

        return jax.lax.scan(rows, w, length=4)[0]

    assert counted(nested).products == 4 * 3 * product

    def by_platform(w):
        return jax.lax.platform_dependent(
            w, cpu=lambda w: w @ w @ w @ w, default=lambda w: w @ w
        )

    assert counted(by_platform).products == product

    @jax.custom_vjp
    def own(w):
        return w @ w

    own.defvjp(lambda w: (w @ w, w), lambda w, g: (g @ w @ w @ w,))
    assert counted(own).products == product
    assert counted(jax.grad(lambda w: own(w).sum())).products == 4 * product

    def kernel(w, out):
        out[...] = w[...] @ w[...]

    def gridded(w):
        return pl.pallas_call(kernel, out_shape=w, grid=(3, 2), interpret=True)(w)

    assert counted(gridded).products == 6 * product

    def told(w):
        cost = pl.CostEstimate(flops=17, transcendentals=3, bytes_accessed=0)
        return pl.pallas_call(
            kernel, out_shape=w, grid=(3, 2), interpret=True, cost_estimate=cost
        )(w)

    assert counted(told) == Flops(products=17, other=3)

    mesh = make_mesh()
    sharded = jax.shard_map(
        lambda w: w @ w.T, mesh=mesh, in_specs=P("data"), out_specs=P("data")
    )
    # Each of 8 devices multiplies 4 of 8 rows by as many columns.
    assert counted(sharded).products == 8 * (2 * 4 * 4 * 8)


def make_mesh():
    return jax.make_mesh(SIZES, AXES, axis_types=(AxisType.Auto,) * len(AXES))


@pytest.fixture(scope="module")
def compiled() -> dict[int, tuple[Traffic, object]]:
    """The looped and the unrolled program on 8 devices."""
    mesh, result = make_mesh(), {}
    for unroll in (1, STEPS):
        forward = partial(stack, unroll=unroll)
        program = jax.jit(forward).lower(*shapes(mesh)).compile()
        module = parse(program.as_text())
        result[unroll] = (read_traffic(module, axes=AXES, sizes=SIZES), program)
    return result


def test_collectives_of_a_loop_are_those_of_the_unrolled_program(compiled):
    looped, unrolled = compiled[1][0], compiled[STEPS][0]
    chex.assert_trees_all_equal(
        {
            collective.axes + (collective.kind,): (collective.count, collective.sent)
            for collective in looped.collectives
        },
        {
            collective.axes + (collective.kind,): (collective.count, collective.sent)
            for collective in unrolled.collectives
        },
    )
    layers = [
        collective
        for collective in looped.collectives
        if collective.axes == ("tensor",)
    ]
    # One sum over `tensor` a layer, of a device's [ROWS / 2, WIDTH] numbers: a ring of
    # 4 sends 3 of 4 parts, twice.
    assert [(layer.kind, layer.count) for layer in layers] == [("all-reduce", STEPS)]
    assert layers[0].operand == STEPS * ROWS // 2 * WIDTH * 4
    assert layers[0].sent == 1.5 * layers[0].operand


def test_bytes_of_a_loop_are_those_of_the_unrolled_program(compiled):
    looped, unrolled = compiled[1][0].bytes, compiled[STEPS][0].bytes
    # The loop also counts, and reads a place of each slice of the weights.
    assert unrolled <= looped <= 1.05 * unrolled
    assert unrolled == compiled[STEPS][1].cost_analysis()["bytes accessed"]
    once = compiled[1][1].cost_analysis()["bytes accessed"]
    assert once < looped / 3, "the compiler's own count takes a loop's body once"


def test_a_slice_reads_what_it_takes_and_memory_on_the_chip_counts_nothing():
    weights = jax.ShapeDtypeStruct((1000, 64), jnp.float32)
    place = jax.ShapeDtypeStruct((), jnp.int32)

    def row(w, i):
        return jnp.tanh(jax.lax.dynamic_slice_in_dim(w, i, 1)) * 2

    text = jax.jit(row).lower(weights, place).compile().as_text()
    moved = read_traffic(parse(text), axes=("data",), sizes=(1,)).bytes
    assert 2 * 64 * 4 <= moved < 1000
    assert array_bytes("(f32[8,128]{1,0:T(8,128)}, bf16[4]{0:S(1)}, pred[])") == 4097
    assert array_bytes("bf16[4]{0:T(128)S(1)}", on_chip=True) == 8


@pytest.mark.parametrize(("root", "moved_bytes"), [("copy", 8192), ("slice", 2 * 64)])
def test_a_copy_inside_a_fusion_is_another_layout_of_what_is_read(root, moved_bytes):
    """TPUs' fusions read a layer's integers so; one that ends with it is a copy."""
    types = {"copy": "s8[64,64]{1,0:T(8,128)(4,1)}", "slice": "s8[1,64]{1,0}"}
    text = f"""HloModule m

%relaid (p: s8[64,64]) -> s8[64,64] {{
  %p = s8[64,64]{{1,0:T(32,128)(4,1)}} parameter(0)
  ROOT %c = s8[64,64]{{1,0:T(8,128)(4,1)}} copy(%p)
}}

%fused (q: s8[64,64]) -> s8[1,64] {{
  %q = s8[64,64]{{1,0:T(32,128)(4,1)}} parameter(0)
  %copy = s8[64,64]{{1,0:T(8,128)(4,1)}} fusion(%q), kind=kLoop, calls=%relaid
  ROOT %slice = s8[1,64]{{1,0}} slice(%copy), slice={{[3:4], [0:64]}}
}}

ENTRY %main (w: s8[64,64]) -> {types[root]} {{
  %w = s8[64,64]{{1,0:T(32,128)(4,1)}} parameter(0)
  ROOT %r = {types[root]} fusion(%w), calls=%{"relaid" if root == "copy" else "fused"}
}}
"""
    assert read_traffic(parse(text), axes=("data",), sizes=(1,)).bytes == moved_bytes


LINE = "  %a = f32[4]{0} all-gather(%x), channel_id=1, replica_groups="
TEXT = """HloModule m

ENTRY %main (x: f32[2]) -> f32[4] {{
  %x = f32[2]{{0}} parameter(0)
  ROOT {}, dimensions={{0}}, use_global_device_ids=true
}}
"""


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        ("{{0,1,2,3},{4,5,6,7}}", ("tensor",)),
        ("[2,4]<=[8]", ("tensor",)),
        ("[4,2]<=[2,4]T(1,0)", ("data",)),
        ("[1,8]<=[8]", ("data", "tensor")),
        ("{}", ("data", "tensor")),
        ("{{0,2},{1,3},{4,6},{5,7}}", ("tensor",)),
        ("mesh['axis_0'=2,'axis_1'=4] {'axis_1'}", ("tensor",)),
        ("mesh['a'=4,'b'=1,'c'=2], device_ids=([2,4]T(1,0)) {'c'}", ("data",)),
        ("mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a'}", ("tensor",)),
        ("mesh['axis_0'=8,'axis_1'=1] {'axis_0','axis_1'}", ("data", "tensor")),
    ],
)
def test_groups_of_devices_name_axes_of_the_mesh(groups, axes):
    text = TEXT.format(LINE.strip() + groups)
    (collectives,) = read_traffic(parse(text), axes=AXES, sizes=SIZES).collectives
    members = np.prod([SIZES[AXES.index(axis)] for axis in axes])
    if groups == "{{0,2},{1,3},{4,6},{5,7}}":
        members = 2
    assert (collectives.kind, collectives.axes) == ("all-gather", axes)
    assert collectives.sent == (members - 1) * 8


def test_groups_in_an_unknown_form_are_refused():
    text = TEXT.format(LINE.strip() + "mesh['a'=8] {'a':(2)4}")
    with pytest.raises(ValueError, match="cannot read the groups"):
        read_traffic(parse(text), axes=AXES, sizes=SIZES)


IN_STEPS = """HloModule m

%first (p: f32[2]) -> f32[4] {{
  %p = f32[2]{{0}} parameter(0)
  ROOT %g = f32[4]{{0}} all-gather(%p), channel_id=7, replica_groups=[4,2]<=[8], dimensions={{0}}
}}

%second (q: f32[2]) -> f32[4] {{
  %q = f32[2]{{0}} parameter(0)
  ROOT %h = f32[4]{{0}} all-gather(%q), channel_id={}, replica_groups=[4,2]<=[8], dimensions={{0}}
}}

ENTRY %main (x: f32[2]) -> f32[4] {{
  %x = f32[2]{{0}} parameter(0)
  %one = f32[4]{{0}} fusion(%x), kind=kCustom, calls=%first
  ROOT %two = f32[4]{{0}} fusion(%x), kind=kCustom, calls=%second
}}
"""  # noqa: E501


@pytest.mark.parametrize(("channel", "count"), [(7, 1), (8, 2)])
def test_a_collective_in_steps_of_several_fusions_counts_once(channel, count):
    text = IN_STEPS.format(channel)
    (collectives,) = read_traffic(parse(text), axes=AXES, sizes=SIZES).collectives
    assert collectives.count == count


LOOPS = """HloModule m

%more (p: (s32[], f32[8])) -> pred[] {
  %p.0 = (s32[], f32[8]{0}) parameter(0)
  %i.0 = s32[] get-tuple-element(%p.0), index=0
  %n.0 = s32[] constant(5)
  ROOT %less = pred[] compare(%i.0, %n.0), direction=LT
}

%inner (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %p.1 = (s32[], f32[8]{0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%p.1), index=0
  %x.1 = f32[8]{0} get-tuple-element(%p.1), index=1
  %y.1 = f32[8]{0} add(%x.1, %x.1)
  ROOT %t.1 = (s32[], f32[8]{0}) tuple(%i.1, %y.1)
}

%outer (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %p.2 = (s32[], f32[8]{0}) parameter(0)
  %w.2 = (s32[], f32[8]{0}) while(%p.2), condition=%more, body=%inner
  %i.2 = s32[] get-tuple-element(%w.2), index=0
  %x.2 = f32[8]{0} get-tuple-element(%w.2), index=1
  %z.2 = f32[8]{0} negate(%x.2)
  ROOT %t.2 = (s32[], f32[8]{0}) tuple(%i.2, %z.2)
}

ENTRY %main (a: (s32[], f32[8])) -> (s32[], f32[8]) {
  %a = (s32[], f32[8]{0}) parameter(0)
  ROOT %w = (s32[], f32[8]{0}) while(%a), condition=%more, body=%outer, backend_config={"known_trip_count":{"n":"3"}}
}
"""  # noqa: E501


def moved(text: str) -> Traffic:
    return read_traffic(parse(text), axes=("data",), sizes=(1,))


def test_a_loop_in_a_loop_runs_as_often_as_both_together():
    result = moved(LOOPS)
    # 3 trips are noted on the outer one, 5 stand in the inner one's condition. An
    # operand that is named twice is read once: 32 bytes in, 32 out, as of the negation.
    assert result.launches == 3 * 5 + 3
    assert result.bytes == (3 * 5 + 3) * (32 + 32)
    assert result.unknown_loops == 0


IN_PLACE = {
    "dynamic-update-slice(%big, %part, %at)": 2 * 40,
    "scatter(%big, %at, %part), to_apply=%put": 2 * 40,
    "fusion(%big, %part, %at), kind=kLoop, calls=%put": 2 * 40 + 4,
    "fusion(%big, %part, %at), kind=kInput, calls=%sprinkle": 2 * 40 + 4,
    "fusion(%big, %part, %at), kind=kLoop, calls=%grow": 4000 + 40 + 4 + 4000,
    "fusion(%big, %big, %at), kind=kLoop, calls=%two": 4000 + 4000,
    # Fusions in a fusion, as TPUs have them.
    "fusion(%big, %part, %at), kind=kLoop, calls=%holds_put": 2 * 40 + 4,
    "fusion(%big, %part, %at), kind=kLoop, calls=%holds_piece": 40 + 4 + 40,
    "fusion(%big, %part, %at), kind=kLoop, calls=%holds_shape": 4000 + 4000,
    "add(%big, %big)": 4000 + 4000,
    # A kernel that says so moves less than its operands have.
    'custom-call(%big, %part), custom_call_target="k", '
    'metadata={op_name="jit(f)/moves_123_bytes/pallas_call"}': 123,
}


@pytest.mark.parametrize("call", IN_PLACE)
def test_an_update_in_place_moves_the_new_part_and_what_is_read_twice_counts_once(call):
    parameters = """  %big = f32[1000]{0} parameter(0)
  %part = f32[10]{0} parameter(1)
  %at = s32[] parameter(2)"""
    update = "f32[1000]{0} dynamic-update-slice(%big, %part, %at)"
    text = f"""HloModule m

%put (b: f32[1000], p: f32[10], i: s32[]) -> f32[1000] {{
{parameters}
  ROOT %u = {update}
}}

%sprinkle (b: f32[1000], p: f32[10], i: s32[]) -> f32[1000] {{
{parameters}
  ROOT %u = f32[1000]{{0}} scatter(%big, %at, %part), to_apply=%put
}}

%grow (b: f32[1000], p: f32[10], i: s32[]) -> f32[1000] {{
{parameters}
  %u = {update}
  ROOT %n = f32[1000]{{0}} multiply(%u, %big)
}}

%holds_put (b: f32[1000], p: f32[10], i: s32[]) -> f32[1000] {{
{parameters}
  ROOT %f = f32[1000]{{0}} fusion(%big, %part, %at), kind=kLoop, calls=%put
}}

%piece (b: f32[1000], i: s32[]) -> f32[10] {{
  %big = f32[1000]{{0}} parameter(0)
  %at = s32[] parameter(1)
  ROOT %s = f32[10]{{0}} dynamic-slice(%big, %at), dynamic_slice_sizes={{10}}
}}

%holds_piece (b: f32[1000], p: f32[10], i: s32[]) -> f32[1000] {{
{parameters}
  %s = f32[10]{{0}} fusion(%big, %at), kind=kLoop, calls=%piece
  ROOT %u = f32[1000]{{0}} dynamic-update-slice(%big, %s, %at)
}}

%shape (b: f32[1000]) -> f32[10,100] {{
  %big = f32[1000]{{0}} parameter(0)
  ROOT %s = f32[10,100]{{1,0}} bitcast(%big)
}}

%holds_shape (b: f32[1000], p: f32[10], i: s32[]) -> f32[1000] {{
{parameters}
  %s = f32[10,100]{{1,0}} fusion(%big), kind=kLoop, calls=%shape
  ROOT %n = f32[1000]{{0}} negate(%s)
}}

%two (b: f32[1000], c: f32[1000], i: s32[]) -> f32[1000] {{
  %big = f32[1000]{{0}} parameter(0)
  %same = f32[1000]{{0}} parameter(1)
  %at = s32[] parameter(2)
  ROOT %n = f32[1000]{{0}} multiply(%big, %same)
}}

ENTRY %main (b: f32[1000], p: f32[10], i: s32[]) -> f32[1000] {{
{parameters}
  ROOT %r = f32[1000]{{0}} {call}
}}
"""
    assert moved(text).bytes == IN_PLACE[call]


def test_results_that_share_a_buffer_with_an_argument_take_no_memory_twice():
    place = SingleDeviceSharding(jax.devices()[0])

    def leaf(count):
        return jax.ShapeDtypeStruct((count,), jnp.float32, sharding=place)

    parts = {
        "parameters": leaf(100),
        "optimizer": [leaf(200), leaf(1)],
        "data": leaf(9),
    }
    analysis = SimpleNamespace(
        argument_size_in_bytes=4 * 310 + 64,  # padding of tiles
        output_size_in_bytes=4 * 301 + 24,
        alias_size_in_bytes=4 * 301,
        temp_size_in_bytes=1000,
        generated_code_size_in_bytes=7,
    )
    compiled = SimpleNamespace(memory_analysis=lambda: analysis)
    memory = read_memory(compiled, parts, made_caches=False)
    assert memory == CompiledMemory(
        parameters=400,
        optimizer=804,
        caches=0,
        data=36 + 64,
        results=24,
        temporaries=1000,
        code=7,
    )
    assert memory.total == 4 * 310 + 64 + 24 + 1000 + 7
    filled = read_memory(compiled, parts, made_caches=True)
    assert (filled.caches, filled.results, filled.total) == (24, 0, memory.total)


@pytest.mark.parametrize(
    ("here", "there", "moved_bytes"), [("", "S(1)", 40), ("", "", 80), ("S(1)", "", 40)]
)
def test_a_slice_that_is_fetched_ahead_moves_the_slice(here, there, moved_bytes):
    """TPUs fetch weights so, a layer or a part of it at a time."""
    whole, part = f"f32[1000]{{0:T(8){here}}}", f"f32[10]{{0:T(8){there}}}"
    text = f"""HloModule m

ENTRY %main (b: f32[1000]) -> f32[10] {{
  %big = {whole} parameter(0)
  %go = (({whole}), {part}, s32[]{{:S(2)}}) slice-start(%big), slice={{[0:10]}}
  ROOT %s = {part} slice-done(%go)
}}
"""
    # Plus four bytes that say whether it has come.
    assert moved(text).bytes - moved_bytes in (0, 4)


@pytest.mark.parametrize(("step", "trips"), [(1, 5), (2, 3)])
def test_a_loop_over_devices_parts_takes_one_or_two_a_trip(step, trips):
    """What XLA for TPU makes of a product with an array that devices share."""
    text = f"""HloModule m

%more (p: (u32[], f32[8])) -> pred[] {{
  %p.0 = (u32[], f32[8]{{0}}) parameter(0)
  %i.0 = u32[] get-tuple-element(%p.0), index=0
  %n.0 = u32[] constant(5)
  ROOT %less = pred[] compare(%i.0, %n.0), direction=LT
}}

%parts (p: (u32[], f32[8])) -> (u32[], f32[8]) {{
  %p.1 = (u32[], f32[8]{{0}}) parameter(0)
  %i.1 = u32[]{{:S(6)}} get-tuple-element(%p.1), index=0
  %by.1 = u32[]{{:S(6)}} constant({step})
  %next.1 = u32[]{{:S(6)}} add(%i.1, %by.1)
  %x.1 = f32[8]{{0}} get-tuple-element(%p.1), index=1
  %y.1 = f32[8]{{0}} negate(%x.1)
  ROOT %t.1 = (u32[], f32[8]{{0}}) tuple(%next.1, %y.1)
}}

ENTRY %main (a: (u32[], f32[8])) -> (u32[], f32[8]) {{
  %a = (u32[], f32[8]{{0}}) parameter(0)
  ROOT %w = (u32[], f32[8]{{0}}) while(%a), condition=%more, body=%parts
}}
"""
    result = moved(text)
    assert (result.bytes, result.unknown_loops) == (trips * (32 + 32), 0)


@pytest.mark.parametrize(
    "kernel, attributes, name",
    [
        ("__gpu$xla.gpu.triton", '{name = "other", name = "forward"}', "forward"),
        ("__gpu$xla.gpu.triton", "{}", "triton"),
        ("triton_kernel_call", 'op_name="jit(f)/scan/triton_kernel_call"', "scan"),
        ("triton_kernel_call", "", "triton"),
        ("tpu_custom_call", "", "kernel"),
        ("__cublas$gemm", "", "__cublas$gemm"),
        (None, "", ""),
    ],
)
def test_kernels_have_their_own_names_and_libraries_their_targets(
    kernel, attributes, name
):
    call = SimpleNamespace(kernel=kernel, attributes=attributes, name="kernel.12")
    assert _kernel_name(call) == name
