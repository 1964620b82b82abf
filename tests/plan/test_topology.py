"""Names of topologies, their bandwidths, and bounds by hand."""

import pytest

from recurjax.errors import UserError
from recurjax.machine.devices import HARDWARE
from recurjax.plan.planning import find_bounds
from recurjax.plan.topology import DIMENSIONS, EXAMPLES, PLANNED, parse_topology


def test_every_example_reads():
    assert {parse_topology(name).kind for name in EXAMPLES} == set(PLANNED)
    assert parse_topology("v5e:16x16").devices == 256
    assert parse_topology("v5p:4x4x2").devices == 32
    assert parse_topology("h100").shape == (1,)


@pytest.mark.parametrize(
    ("kind", "teraflops", "gibibytes", "gigabytes_a_second", "interconnect", "ring"),
    [
        ("v4", 275, 32, 1200, 2 * 3 * 2 * 50, 4),
        ("v5e", 197, 16, 819, 400, 16),
        ("v5p", 459, 95, 2765, 1200, 4),
        ("v6e", 918, 32, 1638, 800, 16),
        ("h100", 989, None, 3352, 900, 0),
    ],
)
def test_the_table_of_hardware_is_that_of_the_data_sheets(
    kind, teraflops, gibibytes, gigabytes_a_second, interconnect, ring
):
    """bfloat16 without sparsity; all links of a device together, in both directions."""
    device = HARDWARE[kind]
    assert device.flops == teraflops * 1e12
    assert device.memory is not None and device.memory_bandwidth is not None
    if gibibytes is not None:
        assert device.memory == gibibytes * 2**30
    assert device.memory_bandwidth == gigabytes_a_second * 1e9
    ports = device.links_per_axis * DIMENSIONS.get(kind, 1)
    assert device.link is not None
    assert 2 * ports * device.link == interconnect * 1e9
    assert device.ring == ring
    if kind == "h100":  # 80 GiB, less what the driver keeps
        assert 79 < device.memory / 2**30 < 80


def test_peaks_of_devices_that_only_train_are_their_makers_too():
    peaks = {"h200": 989, "h100_pcie": 756, "a100": 312, "l40s": 362}
    peaks |= {"l40": 181, "l4": 121, "t4": 65}
    for kind, teraflops in peaks.items():
        assert HARDWARE[kind].flops == teraflops * 1e12
    assert set(HARDWARE) == set(PLANNED) | set(peaks)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("v7x:2x2", "must be one of v4, v5e, v5p, v6e, h100, cpu"),
        ("v5e", "v5e has 2 axes of chips: write it like v5e:1x1"),
        ("v5e:4", "v5e has 2 axes"),
        ("v5p:4x4", "v5p has 3 axes of chips: write it like v5p:2x2x1"),
        ("v5e:0x2", "v5e has 2 axes"),
        ("h100:", "write h100 for one device or h100:8"),
        ("h100:2x4", "write h100 for one device or h100:8"),
        ("h100:16", "use at most h100:8"),
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
