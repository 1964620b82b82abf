"""The golden cases hold whatever the width of a CPU's vectors is."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.source_tree import ROOT

GOLDEN_TESTS = [
    "tests/variants/latent_recurrent_transformer/test_golden.py",
    "tests/variants/rat/test_golden_layers.py",
    "tests/variants/rat/test_golden_models.py",
    "tests/variants/recurrent_transformer/test_golden.py",
    "tests/variants/transformer/test_golden_block.py",
    "tests/layers/attention/test_golden_attention.py",
]


def _has_wider() -> bool:
    """Whether vectors here are wider than AVX2's; True where it is unknown."""
    try:
        return "avx512" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return True


@pytest.mark.sweep
@pytest.mark.skipif(not _has_wider(), reason="no vectors here are wider than AVX2's")
def test_the_golden_gradients_hold_with_the_vectors_of_avx2():
    """Sums of another width round otherwise; a bound that only one CPU keeps is none.

    XLA compiles for the widest vectors of the machine, AVX-512 on many. Limited to
    AVX2, the same programs give what older and other CPUs give.
    """
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_cpu_max_isa=AVX2"
    chosen = "gradients or backbone or interleaved or language_model"
    result = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
            *(*GOLDEN_TESTS, "-m", "not slow", "-k", chosen),
        ],
        env=os.environ | {"XLA_FLAGS": flags.strip()},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout[-5000:]
    assert " passed" in result.stdout
