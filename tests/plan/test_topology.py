"""Names of topologies, their bandwidths, and bounds by hand."""

import pytest

from pallas_kernels.target import Target, as_if, shared_memory_bytes
from recurjax.errors import UserError
from recurjax.machine.devices import HARDWARE
from recurjax.plan.gpus import GPUS, MULTIPROCESSORS
from recurjax.plan.planning import find_bounds
from recurjax.plan.topology import (
    CORES,
    DIMENSIONS,
    EXAMPLES,
    PLANNED,
    parse_topology,
)


def test_every_example_reads():
    assert {parse_topology(name).kind for name in EXAMPLES} == set(PLANNED)
    assert parse_topology("v5e:16x16").devices == 256
    assert parse_topology("v5p:4x4x2").devices == 32
    assert parse_topology("tpu7x:2x2x1").devices == 8  # two cores a chip
    assert parse_topology("h100").shape == (1,)
    assert parse_topology("rtx5090").platform == "cuda"


@pytest.mark.parametrize(
    ("kind", "teraflops", "gibibytes", "gigabytes_a_second", "interconnect", "ring"),
    [
        ("v4", 275, 32, 1200, 2 * 3 * 2 * 50, 4),
        ("v5e", 197, 16, 819, 400, 16),
        ("v5p", 459, 95, 2765, 1200, 4),
        ("v6e", 918, 32, 1638, 800, 16),
        ("tpu7x", 2307, 192, 7380, 1200, 4),
        ("h100", 989, None, 3352, 900, 0),
        ("h200", 989, None, 4800, 900, 0),
        ("b200", 2250, None, 7672, 1800, 0),
        ("a100", 312, None, 2039, 600, 0),
    ],
)
def test_the_table_of_hardware_is_that_of_the_data_sheets(
    kind, teraflops, gibibytes, gigabytes_a_second, interconnect, ring
):
    """bfloat16 without sparsity; all links of a chip together, in both directions."""
    device, cores = HARDWARE[kind], CORES.get(kind, 1)
    assert device.flops is not None and cores * device.flops == teraflops * 1e12
    assert device.memory is not None and device.memory_bandwidth is not None
    if gibibytes is not None:
        assert cores * device.memory == gibibytes * 2**30
    assert cores * device.memory_bandwidth == gigabytes_a_second * 1e9
    ports = device.links_per_axis * DIMENSIONS.get(kind, 1)
    assert device.link is not None
    assert 2 * cores * ports * device.link == interconnect * 1e9
    assert device.ring == ring
    if kind == "h100":  # 80 GiB, less what the driver keeps
        assert 79 < device.memory / 2**30 < 80


def test_peaks_of_devices_that_only_train_are_their_makers_too():
    peaks = {"h100_pcie": 756, "l40": 181, "t4": 65}
    for kind, teraflops in peaks.items():
        assert HARDWARE[kind].flops == teraflops * 1e12
    assert set(HARDWARE) == set(PLANNED) | set(peaks)


@pytest.mark.parametrize(
    ("kind", "teraflops", "gigabytes", "gigabytes_a_second"),
    [
        ("l4", 121, 24, 300),
        ("l40s", 362, 48, 864),
        ("rtx4090", 165, 24, 1008),
        ("rtx5090", 209, 32, 1792),
    ],
)
def test_gpus_without_nvlink_are_those_of_the_data_sheets(
    kind, teraflops, gigabytes, gigabytes_a_second
):
    device = HARDWARE[kind]
    assert device.flops == teraflops * 1e12 and device.link is None
    assert device.memory_bandwidth == gigabytes_a_second * 1e9
    assert device.memory is not None  # less what error correction and the driver keep
    assert 0.93 < device.memory / (gigabytes * 2**30) < 1


def test_a_block_of_every_planned_gpu_has_the_shared_memory_of_its_target():
    for gpu in GPUS.values():
        target = Target(
            platform="gpu", kind=gpu.name, compute_capability=gpu.capability
        )
        with as_if(target):
            core = MULTIPROCESSORS[gpu.capability]
            assert core.shared_bytes_of_block == shared_memory_bytes()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("v7x:2x2", "must be one of v4, v5e, v5p, v6e, tpu7x, a100, l4, l40s"),
        ("v5e", "v5e has 2 axes of chips: write it like v5e:1x1"),
        ("v5e:4", "v5e has 2 axes"),
        ("v5p:4x4", "v5p has 3 axes of chips: write it like v5p:2x2x1"),
        ("v5e:0x2", "v5e has 2 axes"),
        ("h100:", "write h100 for one device or h100:8"),
        ("h100:2x4", "write h100 for one device or h100:8"),
        ("h100:16", "use at most h100:8"),
        ("l4:2", "l4 has no NVLink, and other networks are not planned: use l4"),
        ("", "got ''"),
    ],
)
def test_a_wrong_name_is_told_in_a_sentence(name, said):
    with pytest.raises(UserError, match=r"topology") as error:
        parse_topology(name)
    assert said in str(error.value)


def test_a_short_axis_is_a_chain_and_carries_half():
    assert parse_topology("v5e:16x16").collective_bandwidth == 100e9
    assert parse_topology("v5e:4x4").collective_bandwidth == 50e9
    assert parse_topology("v5p:4x4x4").collective_bandwidth == 200e9
    assert parse_topology("h100:8").collective_bandwidth == 450e9
    assert parse_topology("l40s").collective_bandwidth is None
    assert parse_topology("cpu:8").collective_bandwidth is None


def test_the_largest_bound_binds():
    topology = parse_topology("v5e:16x16")
    answer = {
        "flops": {"products": 256 * 197e12},
        "traffic": {
            "bytes": 2 * 819e9,
            "collectives": [{"sent": 150e9}, {"sent": 150e9}],
            "launches": 1000,
        },
    }
    bounds = find_bounds(answer, topology)
    assert bounds is not None
    assert bounds.compute == pytest.approx(1)
    assert bounds.memory == pytest.approx(2)
    assert bounds.interconnect == pytest.approx(3)
    assert (bounds.binding, bounds.launch) == ("interconnect", 0)
    assert bounds.seconds == pytest.approx(3)
    on_gpu = find_bounds(answer, parse_topology("h100:8"))
    assert on_gpu is not None and on_gpu.launch == pytest.approx(2e-3)
    on_cpu = find_bounds(answer, parse_topology("cpu"))
    assert on_cpu is not None and on_cpu.seconds is None and on_cpu.binding is None
    assert find_bounds({"failed": "no room"}, topology) is None
