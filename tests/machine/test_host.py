"""What the command line sets for XLA on CPU before jax starts."""

import os
import subprocess
import sys

import pytest

_PROGRAM = """
from recurjax.machine import host
host.prepare()
import os, jax, jax.numpy as jnp
x = jnp.arange(6.0).reshape(2, 3)
print(os.environ["XLA_FLAGS"], jax.jit(lambda x: x @ x.T)(x).tolist())
"""


@pytest.mark.parametrize("flags", ["", "--xla_cpu_experimental_ynn_fusion_type=dot"])
def test_jax_starts_and_a_choice_already_made_stands(flags):
    """Jax takes the flag in the installed version, and computes the same."""
    environment = os.environ | {"XLA_FLAGS": flags}
    child = subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    expected = flags or "--xla_cpu_experimental_ynn_fusion_type="
    assert child.stdout.strip() == f"{expected} [[5.0, 14.0], [14.0, 50.0]]"
