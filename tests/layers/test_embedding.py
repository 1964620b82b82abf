"""Tokens read their rows of a table alike on every mesh, and little is sent for it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from recurjax.layers.embedding import look_up
from recurjax.plan.hlo import parse
from recurjax.plan.traffic import Collective, read_traffic
from recurjax.sharding import AXES, MeshConfig, P, batch_sharding, make_mesh
from tests.compiling import QUICK_COMPILE
from tests.marks import slow_except
from tests.tolerances import assert_gradients_close

B, T, V = 8, 6, 1024
TABLES = {  # As the rules of recurjax/sharding.py lay them.
    "tokens": ((V, 16), P("tensor", "fsdp")),
    "values": ((V, 2, 8), P("fsdp", "tensor", None)),
    "odd": ((V, 3), P()),
}
MESHES = {
    "data 2, fsdp 4": MeshConfig(data=2, fsdp=4),
    "fsdp 8": MeshConfig(data=1, fsdp=8),
    "data 8": MeshConfig(data=8),
    "fsdp 4, tensor 2": MeshConfig(data=1, fsdp=4, tensor=2),
    "fsdp 4, sequence 2": MeshConfig(data=1, fsdp=4, sequence=2),
}


def loss_and_gradient(look_up, shape):
    """Returns a function of table and ids whose gradient weighs every number."""
    weights = jnp.cos(jnp.arange(B * T * np.prod(shape[1:]), dtype=jnp.float32))
    weights = weights.reshape(B, T, *shape[1:])

    def loss(table, ids):
        x = look_up(table, ids, jnp.bfloat16)
        return jnp.sum(weights * x), x

    return jax.value_and_grad(loss, has_aux=True)


def arguments(name, rows=B):
    shape, spec = TABLES[name]
    table = jax.random.normal(jax.random.key(0), shape)
    ids = jax.random.randint(jax.random.key(1), (rows, T), 0, V // 8)  # some twice
    return table, ids, spec


def compiled(name, config):
    """Returns the program on a mesh, and its arguments there."""
    table, ids, spec = arguments(name)
    mesh = make_mesh(config)
    placed = NamedSharding(mesh, spec)
    table, ids = jax.device_put((table, ids), (placed, batch_sharding(mesh)))
    function = loss_and_gradient(look_up, table.shape)
    with jax.set_mesh(mesh):
        lowered = jax.jit(function, out_shardings=(None, placed)).lower(table, ids)
        return lowered.compile(compiler_options=QUICK_COMPILE), (table, ids), mesh


@pytest.mark.parametrize(
    "mesh", slow_except(("data 2, fsdp 4", "fsdp 4, tensor 2"), MESHES, slow=())
)
@pytest.mark.parametrize("name", TABLES)
def test_a_mesh_changes_neither_what_is_read_nor_the_gradient(name, mesh):
    program, (table, ids), _ = compiled(name, MESHES[mesh])
    (_, x), gradient = program(table, ids)
    plain = lambda table, ids, dtype: table[ids].astype(dtype)  # noqa: E731
    whole = jax.device_get((table, ids))
    (_, want_x), want = loss_and_gradient(plain, table.shape)(*map(jnp.asarray, whole))
    np.testing.assert_array_equal(x, want_x)
    assert_gradients_close({"table": gradient}, {"table": want})


def test_rows_that_the_mesh_does_not_divide_are_read_too():
    table, ids, _ = arguments("tokens", rows=3)
    with jax.set_mesh(make_mesh(MESHES["fsdp 8"])):
        x = jax.jit(look_up, static_argnums=2)(table, ids, jnp.float32)
    np.testing.assert_array_equal(x, table[ids])


def sent(name: str, config: MeshConfig) -> tuple[Collective, ...]:
    program, _, mesh = compiled(name, config)
    module = parse(program.as_text())
    return read_traffic(module, axes=AXES, sizes=mesh.axis_sizes).collectives


@pytest.mark.parametrize("name", ["tokens", "values"])
@pytest.mark.parametrize("mesh", ["data 2, fsdp 4", "fsdp 8"])
def test_no_device_gathers_a_table_or_sums_its_whole_gradient(name, mesh):
    matches = sent(name, MESHES[mesh])
    assert "all-to-all" in {matche.kind for matche in matches}
    table = 4 * np.prod(TABLES[name][0])
    whole = [matche for matche in matches if matche.kind != "all-to-all"]
    assert [item for item in whole if item.largest > table / MESHES[mesh].fsdp] == []
