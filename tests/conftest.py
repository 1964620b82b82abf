"""All tests: 8 forced CPU devices, and every annotated shape checked at run time.

`JAX_PLATFORMS=cuda,cpu pytest ...` runs the tests of devices too.
"""

import os
from importlib.util import find_spec
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["RECURJAX_CACHE"] = (
    ""  # Commands that tests start use no cache of the user's.
)

import jax  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_num_cpu_devices", 8)
# An image made for GPUs often has no beartype. `make test` has the checks, `make
# test-slow` and `make test-torch` do without.
SHAPES_CHECKED = (
    find_spec("beartype") is not None
    and os.environ.get("RECURJAX_TEST_SHAPES", "1") != "0"
)
if SHAPES_CHECKED:
    from tests.shapes import install_shape_checks

    install_shape_checks("recurjax", "pallas_kernels")

from tests import torch_python  # noqa: E402

# It asks XLA what it knows, which fixes the number of devices.
from tests.compiling import all_compiled_quickly  # noqa: E402

AS_USERS = (
    "layers/attention/test_few_queries.py",
    "layers/attention/test_golden_attention.py",
    "layers/test_embedding.py",
    "packaging",
    "plan",
    "variants/rat/test_golden_layers.py",
    "variants/rat/test_golden_models.py",
)
"""Folders and files that compile as users do: they read what XLA's passes leave of a
program, or hold golden numbers to it. The other golden tests compile quickly."""


def pytest_report_header():
    if not SHAPES_CHECKED:
        return (
            "annotated shapes are not checked (RECURJAX_TEST_SHAPES=0, or no beartype)"
        )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Marks sweeps slow, so that nobody who leaves out slow tests runs them."""
    for item in items:
        if item.get_closest_marker("sweep"):
            item.add_marker("slow")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Skips what is marked `torch` where no interpreter has it."""
    marker = item.get_closest_marker("torch")
    if marker is not None:
        reason = torch_python.reason_to_skip(*marker.args)
        if reason is not None:
            pytest.skip(reason)


@pytest.fixture(scope="module", autouse=True)
def programs_compiled_quickly(request):
    """Nearly all that the other tests take is compiling what runs once."""
    inside = request.path.relative_to(Path(__file__).parent)
    if any(inside.is_relative_to(path) for path in AS_USERS):
        yield
        return
    with all_compiled_quickly():
        yield
