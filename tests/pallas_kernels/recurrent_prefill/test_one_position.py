"""A decode step against the loop over tiles, by what CPUs and accelerators multiply."""

import math
import re
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import jaxprs_in_params
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels.recurrent_prefill import recurrent_prefill
from pallas_kernels.recurrent_prefill.call import Rows, Stages, empty_cache
from pallas_kernels.recurrent_prefill.xla import one_position
from pallas_kernels.target import Target, as_if
from recurjax.sharding import MeshConfig, make_mesh
from tests.compiling import QUICK_COMPILE
from tests.pallas_kernels.recurrent_prefill.layer_cases import WIDTH, Case, quick_jit
from tests.tolerances import assert_gradients_close, assert_values_close

PLAIN = Case(positions=1, layers=2, batch=3)
SWITCHES = PLAIN._replace(
    key_heads=1,
    norm="layer",
    gated=True,
    biases=True,
    activation="silu",
    normed_persistent=False,
)
H100 = Target(platform="gpu", kind="NVIDIA H100 80GB HBM3", compute_capability="9.0")


def step(case: Case, slots: int = 8):
    """Returns the function of one step, and its arguments: rows at three places."""
    x, weights, _ = case.inputs()
    old = empty_cache(case.layers, case.batch, slots, case.width, case.spec)
    keys = jax.random.split(jax.random.key(1), 2)
    old = old._replace(
        keys=jax.random.normal(keys[0], old.keys.shape),
        values=jax.random.normal(keys[1], old.values.shape),
        source=jax.random.normal(jax.random.key(2), old.source.shape),
        position=jnp.asarray([7, 4, 0], jnp.int32)[: case.batch],
        # The first row's last pair is not written yet.
        written=jnp.asarray([6, 4, 0], jnp.int32)[: case.batch],
    )
    rows = Rows(lengths=jnp.asarray([1, 0, 1])[: case.batch])
    return partial(recurrent_prefill, spec=case.spec), (x, weights, old), rows


def test_what_is_no_step_of_one_position_goes_to_the_loop_over_tiles():
    x, weights, _ = PLAIN.inputs()
    cache = empty_cache(PLAIN.layers, PLAIN.batch, 8, PLAIN.width, PLAIN.spec)
    step = PLAIN.call(x, weights, cache)
    options = step.options
    others = {
        "two positions": step._replace(x=jnp.concatenate([x, x], axis=1)),
        "no slots": PLAIN.call(x, weights),
        "blocks": step._replace(
            options=replace(options, spec=replace(options.spec, block=2))
        ),
        "stages": step._replace(options=replace(options, stages=Stages(2, "stage"))),
    }
    with as_if(H100):
        assert one_position.serves(step)
        for name, call in others.items():
            assert not one_position.serves(call), name


@cache
def loop_over_tiles(case):
    run, arguments, rows = step(case)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(one_position, "serves", lambda *_: False)
        return quick_jit(run)(*arguments, rows=rows)


@pytest.mark.parametrize("device", [None, H100], ids=["products", "sums"])
@pytest.mark.parametrize(
    "case",
    [PLAIN, SWITCHES, PLAIN._replace(batch=1, layers=1)],
    ids=["plain", "switches", "one row"],
)
def test_a_step_is_that_of_the_loop_over_tiles(case, device, monkeypatch):
    want_z, want = loop_over_tiles(case)
    run, arguments, rows = step(case)
    served, serves = [], one_position.serves
    monkeypatch.setattr(
        one_position, "serves", lambda *a: served.append(serves(*a)) or served[-1]
    )
    with nullcontext() if device is None else as_if(device):
        z, new = quick_jit(run)(*arguments, rows=rows)
    assert served and all(served)
    # The second row has no token: what it computes has no meaning.
    assert_values_close(z[::2], want_z[::2])
    assert new.position.tolist() == [8, 4, 1][: case.batch]
    # The new pairs are made by the next call.
    assert new.written.tolist() == [7, 4, 0][: case.batch]
    new = one_position.write_pending(arguments[1], new, spec=case.spec)
    assert_values_close((new.keys, new.values), (want.keys, want.values))
    assert new.written.tolist() == want.written.tolist() == new.position.tolist()


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(PLAIN, id="plain", marks=pytest.mark.sweep),
        pytest.param(SWITCHES, id="switches"),
    ],
)
def test_steps_have_the_gradient_of_the_loop_over_tiles(case, monkeypatch):
    """Of two steps and a longer call behind them, which meets a pair that is left."""
    run, (x, weights, old), rows = step(case, slots=12)

    def loss(x, weights, keys, values, source):
        cache, total = old._replace(keys=keys, values=values, source=source), 0.0
        for length in (1, 1, 2):
            z, cache = run(jnp.repeat(x, length, axis=1), weights, cache, rows=rows)
            # Of the row that has no token z has no meaning.
            total += jnp.sum(z[::2, 0] ** 2)
        return total

    arguments = (x, weights, old.keys, old.values, old.source)
    gradient = lambda *a: jax.grad(loss, argnums=range(5))(*a)  # noqa: E731
    got = quick_jit(gradient)(*arguments)
    monkeypatch.setattr(one_position, "serves", lambda *_: False)
    want = quick_jit(lambda *a: gradient(*a))(*arguments)
    assert_gradients_close(got, want)
    assert all(jnp.any(leaf) for leaf in jax.tree.leaves(want))


def test_what_a_step_leaves_is_written_on_a_mesh_without_gathering_the_cache():
    case = PLAIN._replace(batch=2, positions=2)
    run, (x, weights, old), rows = step(case, slots=256)
    want_z, want = quick_jit(run)(x, weights, old, rows=rows)
    mesh = make_mesh(MeshConfig(data=2), jax.devices()[:2])

    def laid(part):
        return jax.device_put(part, NamedSharding(mesh, P(None, "data")))

    cut = old._replace(
        keys=laid(old.keys), values=laid(old.values), source=laid(old.source)
    )
    with jax.set_mesh(mesh):
        jitted = jax.jit(run, compiler_options=QUICK_COMPILE)
        compiled = jitted.lower(x, weights, cut, rows=rows).compile()
        z, new = compiled(x, weights, cut, rows=rows)
    assert "all-gather" not in compiled.as_text()
    assert_values_close(
        (z[:1], new.keys, new.values), (want_z[:1], want.keys, want.values)
    )


def test_a_step_makes_no_copy_of_its_weights_side_by_side():
    run, arguments, rows = step(PLAIN)
    with as_if(H100):
        traced = str(jax.make_jaxpr(partial(run, rows=rows))(*arguments))
    # Weights [.., D, N]: a stack with indices is a concatenation too.
    assert "dot_general" in traced
    assert not re.findall(rf"\[(?:\d+,)*{WIDTH},\d+\] = concatenate", traced)


def turned(jaxpr) -> Iterator[int]:
    """Yields the elements of each array that is transposed, loops' bodies too."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "transpose":
            yield math.prod(equation.invars[0].aval.shape)
        for inner in jaxprs_in_params(equation.params):
            yield from turned(inner)


def test_a_step_on_a_cpu_turns_no_cache(monkeypatch):
    """In the program as it is traced; XLA may lay out copies of its own."""
    case = PLAIN._replace(layers=3)
    run, (x, weights, _), rows = step(case)
    empty = empty_cache(case.layers, case.batch, 512, case.width, case.spec)
    of_a_layer = empty.keys.size // case.layers

    def largest() -> int:
        traced = jax.make_jaxpr(lambda *a: run(*a, rows=rows))(x, weights, empty)
        return max(turned(traced.jaxpr))

    with as_if(Target(platform="cpu", kind="cpu")):
        assert largest() < of_a_layer
        monkeypatch.setattr(one_position, "serves", lambda *_: False)
        assert largest() >= of_a_layer


# A CPU's products by heads still gather the values: its devices share one memory.
@pytest.mark.parametrize(
    "key_heads, device",
    [(4, H100), (1, H100), (1, None)],
    ids=["sums by heads", "sums by slots", "products by slots"],
)
def test_a_step_on_a_mesh_gathers_no_cache(key_heads, device):
    """A layout constraint that the compiler must shard makes it gather the cache."""
    case = PLAIN._replace(heads=4, key_heads=key_heads, batch=2)
    run, arguments, rows = step(case, slots=256)
    want_z, want = quick_jit(run)(*arguments, rows=rows)
    mesh = make_mesh(MeshConfig(data=2, tensor=4), jax.devices()[:8])
    cut = P(None, "data", *((None, "tensor") if key_heads > 1 else ("tensor", None)))

    def laid(pairs):
        return jax.device_put(pairs, NamedSharding(mesh, cut))

    x, weights, old = arguments
    old = old._replace(keys=laid(old.keys), values=laid(old.values))
    with jax.set_mesh(mesh), nullcontext() if device is None else as_if(device):
        jitted = jax.jit(run, compiler_options=QUICK_COMPILE)
        compiled = jitted.lower(x, weights, old, rows=rows).compile()
        z, new = compiled(x, weights, old, rows=rows)
    text = compiled.as_text()
    assert "all-reduce" in text
    gathered = re.findall(r"= \w+\[([\d,]+)\]\S* all-gather\(", text)
    sizes = [math.prod(map(int, shape.split(","))) for shape in gathered]
    of_a_device = arguments[2].keys[0].size // 8
    assert max(sizes, default=0) < of_a_device
    assert_values_close(
        (z[:1], new.keys, new.values), (want_z[:1], want.keys, want.values)
    )
