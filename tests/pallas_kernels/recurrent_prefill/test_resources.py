"""What the GPU kernels take of devices that are not here, as Triton compiles them."""

from importlib.util import find_spec

import pytest

from pallas_kernels.recurrent_prefill.triton import backend as triton
from pallas_kernels.target import Target, as_if, shared_memory_bytes
from tests.pallas_kernels.recurrent_prefill.compile_cases import layer
from tests.triton_resources import kernels_of, resources

CALLS = {
    "bfloat16": {"batch": 128, "dtype": "bfloat16"},
    "float32": {"batch": 128, "dtype": "float32"},
    # Many layers in the grid: programs of 128 columns, the widest.
    "wavefront": {"batch": 64, "layers": 16, "schedule": "wavefront"},
}


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="needs the package triton")
@pytest.mark.parametrize("capability", ["8.6", "9.0"])
@pytest.mark.parametrize("name", CALLS)
def test_every_kernel_of_training_fits_its_device(capability, name):
    device = Target(platform="gpu", kind="a GPU", compute_capability=capability)
    with as_if(device):
        limit = shared_memory_bytes()
        kernels = kernels_of(*layer(triton, positions=64, train=True, **CALLS[name]))
    assert len(kernels) >= 13
    for kernel in kernels:
        taken = resources(kernel, int(capability.replace(".", "")))
        assert taken.shared <= limit, (kernel.name, taken)
        # Registers that do not suffice go to a stack in memory.
        assert taken.stack <= 64, (kernel.name, taken)
