"""All tests: 8 forced CPU devices, and every annotated shape checked at run time.

`JAX_PLATFORMS=cuda,cpu pytest ...` runs the tests of devices too.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["RECURJAX_CACHE"] = (
    ""  # Commands that tests start use no cache of the user's.
)

import jax  # noqa: E402
import pytest  # noqa: E402
from jaxtyping import install_import_hook  # noqa: E402

jax.config.update("jax_num_cpu_devices", 8)
install_import_hook(["recurjax", "pallas_kernels"], "beartype.beartype")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Marks sweeps slow, so that nobody who leaves out slow tests runs them."""
    for item in items:
        if item.get_closest_marker("sweep"):
            item.add_marker("slow")
