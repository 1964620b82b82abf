"""What `make test-lowering` lowers, and that a warning ends it."""

import warnings

import jax
import pytest

from tests.lowering import H100, V5E, cases, lower


def quiet():
    """Returns a program that lowers without a warning, as compile cases are written."""
    return lambda x: x + 1, (jax.ShapeDtypeStruct((8,), "float32"),)


def warns():
    def run(x):
        warnings.warn("load is deprecated", DeprecationWarning, stacklevel=2)
        return x

    return run, quiet()[1]


def test_every_op_has_cases_for_gpus_and_tpus():
    ops = {(case.split(".")[2], target.platform) for case, target in cases()}
    names = ("chunk_attention", "gated_scan", "recurrent_prefill", "selective_scan")
    assert ops == {(name, platform) for name in names for platform in ("gpu", "tpu")}


@pytest.mark.parametrize("target", [H100, V5E])
def test_a_warning_is_an_error(target):
    lower(f"{__name__}:quiet", target)
    with pytest.raises(DeprecationWarning, match="load is deprecated"):
        lower(f"{__name__}:warns", target)
