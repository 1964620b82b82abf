"""One module says what a device can do, and a target that is set decides it."""

import ast
import threading

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType

from pallas_kernels import target, triton_call
from pallas_kernels.gated_scan import mosaic_tpu, triton
from pallas_kernels.gated_scan.call import GatedScanCall, GatedScanOptions
from pallas_kernels.target import Target, as_if, current
from tests.source_tree import modules, tree_of

H100 = Target(platform="gpu", kind="NVIDIA H100 80GB HBM3", compute_capability="9.0")
T4 = Target(platform="gpu", kind="Tesla T4", compute_capability="7.5")
V5E = Target(platform="tpu", kind="TPU v5 lite")
V4 = Target(platform="tpu", kind="TPU v4")
TPU7X = Target(platform="tpu", kind="TPU7x")
V99 = Target(platform="tpu", kind="TPU v99")

ASKED_OF_JAX = {"default_backend", "compute_capability", "device_kind"}
MAY_ASK = {
    "pallas_kernels.target",
    "pallas_kernels.triton_call",  # hands on what the target has
    "recurjax.machine.devices",  # a table of peak rates, by kind
    "recurjax.bench.report",  # prints where a row was measured
    "recurjax.cli.doctor",  # prints what there is
    "recurjax.notebook",  # prints where a notebook runs
    "recurjax.training.run.trackers",  # writes down where a run started
}


def test_a_program_traced_for_one_target_is_not_used_for_another():
    traced = []

    @jax.jit
    def program(x):
        traced.append(current().platform)
        return x + 1

    for wanted in (H100, V5E, H100):
        with as_if(wanted):
            program.trace(jnp.zeros(3))
    program.trace(jnp.zeros(3))
    assert traced == ["gpu", "tpu", jax.devices()[0].platform]


def test_a_program_for_the_cpu_of_a_machine_with_a_gpu_is_made_for_the_cpu(monkeypatch):
    cpu, traced = jax.devices("cpu")[0], []
    on_cpu = Target.of(cpu)
    devices = {None: ["a GPU"], "cpu": [cpu]}
    monkeypatch.setattr(Target, "of", lambda d: H100 if d == "a GPU" else on_cpu)
    monkeypatch.setattr(jax, "devices", lambda platform=None: devices[platform])

    @jax.jit
    def program(x):
        traced.append(current().platform)
        return x + 1

    arguments = jnp.zeros(3)
    for default in (None, cpu, "cpu"):
        with jax.default_device(default):
            program.trace(arguments)
    assert traced == ["gpu", "cpu", "cpu"]


def test_a_target_is_set_in_its_own_thread_and_no_longer_than_asked():
    seen = []
    with as_if(V5E):
        thread = threading.Thread(target=lambda: seen.append(current()))
        thread.start()
        thread.join()
        with as_if(H100):
            assert current() == H100
        assert current() == V5E
    assert [current()] == seen == [Target.of(jax.devices()[0])]


@pytest.mark.parametrize(
    ("backend", "device", "reason"),
    [
        (triton, H100, None),
        (triton, T4, "needs compute capability 8.0 or higher, found 7.5"),
        (triton, V5E, "needs an NVIDIA GPU, found tpu"),
        (mosaic_tpu, V5E, None),
        (mosaic_tpu, TPU7X, None),
        (mosaic_tpu, V4, "needs 56 MiB of VMEM for a kernel, TPU v4 has 8"),
        (mosaic_tpu, V99, "needs a TPU that jax knows the VMEM of, found TPU v99"),
        (mosaic_tpu, H100, "needs a TPU, found gpu"),
    ],
)
def test_backends_ask_the_target(backend, device, reason, monkeypatch):
    monkeypatch.setattr(triton_call, "missing_package", lambda: None)
    gate = jnp.zeros((1, 3, 16))
    options = GatedScanOptions(chunk=None)
    call = GatedScanCall(gate, (gate,), (), None, None, None, options)
    with as_if(device):
        assert backend.supported(call) == reason


def test_a_kernel_s_memory_is_that_of_the_target():
    with as_if(Target(platform="tpu", kind="TPU v5p")):
        assert target.vmem_bytes() == target.LEAST_VMEM
    assert target.vmem_bytes() == target.MOST_VMEM


def test_a_mesh_that_is_set_does_not_hide_what_a_tpu_has():
    four = AbstractMesh((4,), ("data",), (AxisType.Auto,))
    target.vmem_of.cache_clear()
    with jax.sharding.use_abstract_mesh(four):
        assert target.vmem_of("TPU v6 lite") == target.MOST_VMEM
        assert jax.sharding.get_abstract_mesh() == four


@pytest.mark.parametrize(
    ("answer", "platform"),
    [
        (target.shares_host_memory, "cpu"),
        (target.computes_on_few_cores, "cpu"),
        (target.widens_bfloat16, "cpu"),
        (target.copies_stacked_weights, "cpu"),
        (target.reduces_one_by_one, "cpu"),
        (target.prefers_unrolled_decode, "gpu"),
        (target.transposes_stacked_caches, "gpu"),
        (target.tiles_memory, "tpu"),
        (target.prefetches_to_vmem, "tpu"),
        (target.slices_rows_slowly, "tpu"),
    ],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_each_property_is_that_of_one_platform(answer, platform):
    for named in ("cpu", "gpu", "tpu"):
        with as_if(Target(platform=named, kind="")):
            assert answer() == (named == platform)


def test_recurjax_compares_no_platforms():
    """It calls a function of `target` that names what the choice depends on."""
    for module, path in modules().items():
        compared = [
            node.lineno
            for node in ast.walk(tree_of(path))
            if isinstance(node, ast.Attribute)
            and node.attr == "platform"
            and ast.unparse(node.value).endswith("current()")
        ]
        assert module.split(".")[0] != "recurjax" or not compared, module


def test_nothing_else_asks_jax_what_the_device_can_do():
    for module, path in modules().items():
        if module.split(".")[0] not in ("recurjax", "pallas_kernels"):
            continue
        asked = {
            node.attr if isinstance(node, ast.Attribute) else node.value
            for node in ast.walk(tree_of(path))
            if isinstance(node, ast.Attribute | ast.Constant)
            and (isinstance(node, ast.Attribute) or isinstance(node.value, str))
        }
        assert module in MAY_ASK or not asked & ASKED_OF_JAX, module
