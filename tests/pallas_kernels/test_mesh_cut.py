"""Kernels on a mesh: each device runs its rows and columns, and the values stay."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels.chunk_attention import ChunkEnds, chunk_attention
from pallas_kernels.chunk_attention import api as chunk_attention_api
from pallas_kernels.chunk_attention import triton as chunk_attention_triton
from pallas_kernels.gated_scan import GateLogits, gated_scan, queried_scan
from pallas_kernels.gated_scan import api as gated_scan_api
from pallas_kernels.gated_scan import xla as gated_scan_xla
from pallas_kernels.mesh_cut import as_it_lies
from pallas_kernels.selective_scan import api as selective_scan_api
from pallas_kernels.selective_scan import selective_scan
from pallas_kernels.selective_scan import xla as selective_scan_xla
from tests.compiling import QUICK_COMPILE
from tests.tolerances import assert_gradients_close

AXES, SIZES = ("data", "fsdp", "sequence", "tensor"), (2, 2, 1, 2)


@pytest.fixture
def mesh():
    return jax.make_mesh(SIZES, AXES, axis_types=(AxisType.Auto,) * len(AXES))


@pytest.fixture
def parts(monkeypatch):
    """Lets the ops run a kernel by name here; collects the shapes that it sees."""
    seen = []

    def stand_in(backend):
        def note(way, call, *rest, **given):
            seen.append((way, call[0].shape, call[2][0].shape))
            call = call._replace(options=replace(call.options, interpret=True))
            return getattr(backend, way)(call, *rest, **given)

        return SimpleNamespace(
            supported=lambda call: None,
            forward=partial(note, "forward"),
            backward=partial(note, "backward"),
        )

    for api, backend in (
        (gated_scan_api, gated_scan_xla),
        (chunk_attention_api, chunk_attention_triton),
        (selective_scan_api, selective_scan_xla),
    ):
        monkeypatch.setitem(api.OP.backends, "triton", stand_in(backend))
    return seen


def draw(*sizes):
    shape = np.random.default_rng(sum(sizes)).standard_normal
    return jnp.asarray(shape(sizes), jnp.float32)


def scan_loss(logits, bias, wide, narrow, start, implementation):
    gate = GateLogits(logits, bias)
    lengths = jnp.full(logits.shape[0], logits.shape[1] - 1)
    states, finals = gated_scan(
        gate,
        (wide, narrow),
        initial=(start, start),
        starts=jnp.arange(wide.shape[1]) == jnp.arange(wide.shape[0])[:, None],
        lengths=lengths,
        implementation=implementation,
    )
    return sum((x**2).sum() for x in (*states, *finals))


def queried_loss(logits, bias, wide, narrow, queries, start, implementation):
    out = queried_scan(
        *(GateLogits(logits, bias), wide, narrow, queries),
        chunk=3,
        initial=(start, start),
        implementation=implementation,
    )
    return sum((x**2).sum() for x in jax.tree.leaves(out))


def attention_loss(q, own, values, keys, ends, implementation):
    first = jnp.arange(q.shape[0]) % 2
    o = chunk_attention(
        *(q, own, values, ChunkEnds(keys, ends)),
        chunk=2,
        scale=0.25,
        first=first,
        implementation=implementation,
    )
    return (o**2).sum()


def selective_loss(u, dt, a, b, c, skip, start, implementation):
    y, final = selective_scan(
        *(u, jax.nn.softplus(dt), -jnp.exp(a), b, c),
        skip=skip,
        initial=start,
        starts=jnp.arange(u.shape[1]) == jnp.arange(u.shape[0])[:, None],
        implementation=implementation,
    )
    return (y**2).sum() + (final**2).sum()


SELECTIVE = (
    *(draw(4, 6, 8), draw(4, 6, 8), draw(8, 3), draw(4, 6, 3), draw(4, 6, 3)),
    *(draw(8), draw(4, 8, 3)),
)
SCAN = (draw(4, 6, 64), draw(64), draw(4, 6, 64), draw(4, 6, 32), draw(4, 64))
QUERIED = (*SCAN[:4], draw(4, 6, 2, 16), SCAN[4])
# Every head has queries of its own: they are cut with the channels.
OF_OWN_GROUPS = (*SCAN[:3], draw(4, 6, 64), draw(4, 6, 4, 16), SCAN[4])
ATTENTION = (
    *(draw(4, 4, 2, 16), draw(4, 4, 4), draw(4, 4, 4, 16)),
    *(draw(4, 4, 3, 16), draw(4, 4, 3, 16)),
)


@pytest.mark.parametrize(
    ("loss", "arrays", "part"),
    [
        # 4 rows over 4 devices; 64 channels, or 4 heads that read 2 groups, over 2.
        # Rows share the bias: its gradient is summed.
        (scan_loss, SCAN, ((1, 6, 32), (1, 32))),
        # Channels are cut between heads; queries of both groups are not cut.
        (queried_loss, QUERIED, ((1, 6, 32), (1, 32))),
        (queried_loss, OF_OWN_GROUPS, ((1, 6, 32), (1, 32))),
        # Rows share a and skip, channels b and c: their gradients are summed.
        (selective_loss, SELECTIVE, ((1, 6, 4), (3,))),
        (attention_loss, ATTENTION, ((1, 4, 2, 16), (4, 2, 16))),
    ],
)
def test_values_and_gradients_on_a_mesh_are_those_of_one_device(
    mesh, parts, loss, arrays, part
):
    def run(implementation):
        numbers = tuple(range(len(arrays)))
        function = partial(loss, implementation=implementation)
        return jax.jit(
            jax.value_and_grad(function, argnums=numbers),
            compiler_options=QUICK_COMPILE,
        )

    want = run("xla")(*arrays)
    assert parts == []
    by_row = NamedSharding(mesh, P(("data", "fsdp")))
    whole = NamedSharding(mesh, P())
    rows = len(arrays[0])
    placed = [jax.device_put(x, by_row if len(x) == rows else whole) for x in arrays]
    with jax.set_mesh(mesh):
        got = run("triton")(*placed)
    assert_gradients_close(got, want)
    assert parts == [("forward", *part), ("backward", *part)]


def test_a_kernel_is_refused_where_an_axis_is_left_to_the_compiler(mesh, parts):
    gate, _, wide, *_ = SCAN
    with jax.set_mesh(mesh):
        with pytest.raises(NotImplementedError, match="data and fsdp does not divide"):
            gated_scan(gate[:3], (wide[:3],), implementation="triton")
        # By default the op then takes what the compiler can cut.
        gated_scan(gate[:3], (wide[:3],))
    assert parts == []


@pytest.mark.parametrize(
    "shape, spec",
    [
        ((4, 6, 2, 3), P(("data", "fsdp"), None, "tensor")),
        ((4, 6, 1, 3), P(("data", "fsdp"), "tensor")),
        ((3, 6, 2, 3), P(None, None, "tensor")),
    ],
    ids=["by heads", "by slots", "rows whole"],
)
def test_a_layout_is_kept_part_by_part(mesh, shape, spec):
    x = jax.device_put(draw(*shape), NamedSharding(mesh, spec))
    with jax.set_mesh(mesh):
        keep = jax.jit(lambda x: as_it_lies(2 * x, rows=0, columns=(2, 1)))
        compiled = keep.lower(x).compile()
        y = compiled(x)
    np.testing.assert_array_equal(y, 2 * x)
    assert y.sharding.is_equivalent_to(x.sharding, x.ndim)
    assert "all-gather" not in compiled.as_text()


def test_a_layout_that_the_mesh_does_not_divide_is_left_alone(mesh):
    x = draw(4, 5, 1, 3)
    with jax.set_mesh(mesh):
        traced = jax.make_jaxpr(lambda x: as_it_lies(x, rows=0, columns=(2, 1)))(x)
    assert "layout_constraint" not in str(traced)
    whole = jax.make_jaxpr(lambda x: as_it_lies(x, rows=0, columns=(2, 1)))(x)
    assert "layout_constraint" in str(whole)
