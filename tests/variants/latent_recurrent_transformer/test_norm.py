"""The norm without parameters against float64, where activations are small."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recurjax.layers.norm import Norm
from recurjax.variants.latent_recurrent_transformer.presets import FINAL_NORM
from recurjax.variants.latent_recurrent_transformer.recurrence import rms

D = 64
ROUNDING = {"bfloat16": 2.0**-8, "float32": 1e-6, "float64": 1e-14}
NORMS = {"in the blocks": rms, "before the head": Norm(FINAL_NORM, D)}


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("place", NORMS)
def test_eps_is_that_of_float32_in_every_dtype(place, dtype):
    noise = np.random.default_rng(0).normal(size=(3, D))
    noise /= np.sqrt(np.mean(noise**2, -1, keepdims=True))
    with jax.enable_x64(True):
        squares = jnp.asarray([[1e-2], [1e-3], [1e-4]])
        x = (jnp.sqrt(squares) * noise).astype(dtype)
        got = NORMS[place](x)
        assert got.dtype == x.dtype
        x, got = np.asarray(x, np.float64), np.asarray(got, np.float64)
    want = x / np.sqrt(np.mean(x**2, -1, keepdims=True) + 2.0**-23)
    np.testing.assert_allclose(got, want, rtol=ROUNDING[dtype])
