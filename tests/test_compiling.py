"""How tests compile, seen by a value that XLA refuses."""

import jax
import jax.numpy as jnp
import pytest
from jaxtyping import TypeCheckError

from recurjax.layers.linear import apart
from recurjax.layers.norm import rms_norm
from tests.compiling import QUICK_COMPILE, all_compiled_quickly, quick_options
from tests.conftest import SHAPES_CHECKED

LEVEL = "xla_backend_optimization_level"


def test_operations_outside_jit_are_compiled_quickly_too(monkeypatch):
    monkeypatch.setitem(QUICK_COMPILE, LEVEL, "none")
    refused = pytest.raises(jax.errors.JaxRuntimeError, match=LEVEL)
    with all_compiled_quickly(), refused:
        jnp.sin(jnp.float32(3)) / 23


def test_what_a_program_says_itself_stands(monkeypatch):
    monkeypatch.setitem(QUICK_COMPILE, LEVEL, "none")
    own = jax.jit(lambda: 7, compiler_options={LEVEL: 1})
    with all_compiled_quickly():
        result = own()
    assert int(result) == 7


def test_kernels_on_a_gpu_are_compiled_as_users_compile_them():
    assert quick_options("cpu")[LEVEL] == 0
    assert quick_options("gpu") == quick_options("tpu") == {}


@pytest.mark.skipif(not SHAPES_CHECKED, reason="shapes are not checked in this run")
def test_an_array_of_another_shape_or_dtype_is_refused():
    with pytest.raises(TypeCheckError):
        apart(jnp.zeros((2, 4)), 2)
    with pytest.raises(TypeCheckError):
        rms_norm(jnp.zeros(4, int), eps=1e-6)
