"""What the command line sets for XLA before jax starts."""

import os
import subprocess
import sys

import pytest

_PROGRAM = """
from recurjax.machine import host
host.prepare(reading={reading})
import os, jax, jax.numpy as jnp
x = jnp.arange(6.0).reshape(2, 3)
print(os.environ["XLA_FLAGS"], jax.jit(lambda x: x @ x.T)(x).tolist())
"""


PRODUCTS = "--xla_cpu_experimental_ynn_fusion_type"
OURS = {PRODUCTS: ""}


def run(program, environment):
    """Returns what a program prints in a process of its own."""
    child = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    return child.stdout


@pytest.mark.parametrize(
    ("flags", "reading"),
    [
        pytest.param("", False, marks=pytest.mark.sweep),
        ("", True),
        (f"{PRODUCTS}=dot --xla_gpu_enable_command_buffer=-FUSION", True),
    ],
)
def test_jax_starts_and_a_choice_already_made_stands(flags, reading):
    """Jax takes the flag in the installed version, and computes the same."""
    environment = os.environ | {"XLA_FLAGS": flags}
    said = run(_PROGRAM.format(reading=reading), environment)
    message, computed = said.strip().split(" [", 1)
    chosen = dict(flag.split("=") for flag in flags.split())
    ours = OURS | ({PRODUCTS: "individual_dot"} if reading else {})
    assert dict(flag.split("=") for flag in message.split()) == ours | chosen
    assert computed == "[5.0, 14.0], [14.0, 50.0]]"


_CORES = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
_OF_TWO_CORES = pytest.mark.skipif(
    (_CORES or 1) < 2, reason="one core has one device: needs two"
)
_CLEARED = {
    name: value
    for name, value in os.environ.items()
    if name not in ("JAX_NUM_CPU_DEVICES", "XLA_FLAGS")
} | {"JAX_PLATFORMS": "cpu"}

_DEVICES = """
from recurjax.machine import host
host.start_cpu_devices({count})
import jax
before = jax.device_count()
host.start_cpu_devices(1 + before)  # too late, and no error
print(before, jax.device_count())
"""


@_OF_TWO_CORES
@pytest.mark.parametrize(
    ("count", "given", "expected"),
    [
        pytest.param(2, {}, 2, marks=pytest.mark.sweep),
        (2, {"JAX_NUM_CPU_DEVICES": "1"}, 1),
    ],
)
def test_a_mesh_has_its_devices_unless_their_number_is_given(count, given, expected):
    said = run(_DEVICES.format(count=count), _CLEARED | given)
    assert said.split() == [str(expected)] * 2


_READING = """
from recurjax.sharding import MeshConfig, reading_mesh
print(reading_mesh(MeshConfig(data=1, tensor=2)).size)
"""


@_OF_TWO_CORES
def test_what_reads_a_model_on_a_mesh_starts_its_devices():
    """As `generate`, `evaluate`, `convert`, `chat` and `serve` do in a shell."""
    assert run(_READING, _CLEARED).split() == ["2"]


_BUFFERS = """
import ctypes, resource, threading
from recurjax.machine import host
host.prepare(flags=False)
c = ctypes.CDLL(None)
c.malloc.restype, c.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
c.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
c.free.argtypes = [ctypes.c_void_p]
def step():
    buffer = c.malloc({size})
    assert buffer
    c.memset(buffer, 1, {size})
    c.free(buffer)
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    step()
    found.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
found = []
def steps():
    for _ in range(3):
        faults()
thread = threading.Thread(target=steps)
thread.start()
thread.join()
print(*found)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
@pytest.mark.parametrize(
    "size", [2**27, pytest.param(2**31 + 2**27, marks=pytest.mark.slow)]
)
def test_a_buffer_freed_on_a_thread_is_there_for_the_next_step(size):
    first, *later = map(int, run(_BUFFERS.format(size=size), os.environ).split())
    # Once every page of it, unless pages are huge; then none.
    assert first > 50
    assert max(later) < 20


_HOLES = """
from recurjax.machine import host
import sys
host.prepare()
page = 4096
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * page
blocks = [bytearray(2**20) for _ in range(256)]
for block in blocks:
    block[::page] = b"x" * (2**20 // page)
full = resident()
# What stays lies at the end: everything before it is a hole.
del blocks[:-1]
kept = resident()
host.give_back_freed_memory()
print(full - kept, full - resident())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="what is set is glibc's")
def test_freed_memory_is_kept_until_it_is_given_back():
    kept, given_back = map(int, run(_HOLES, os.environ).split())
    assert kept < 2**24
    assert given_back > 200 * 2**20
