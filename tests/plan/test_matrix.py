"""Every variant compiles for devices that are not here, with the kernels it should.

The ops' own kernels are compiled by tests/pallas_kernels/*/test_compiles.py.
"""

import pytest

from recurjax.plan.compilation import COMPILERS
from tests.plan.matrix import Case, compile_case, differences, figures, golden

pytestmark = pytest.mark.skipif(
    not (COMPILERS / "jax_plugins").is_dir(),
    reason="no compilers for GPU and TPU here: run make compilers",
)

# What runs on every check; what `make test-slow` adds; `python -m tests.plan.matrix`
# has the rest, which would take longer than the whole suite.
FAST = [Case("rat", "decode", "h100")]
SLOW = [
    Case("transformer", "train", "h100"),
    Case("rat", "train", "h100"),
    Case("recurrent_transformer", "decode", "h100"),
    Case("latent_recurrent_transformer", "decode", "h100"),
    Case("rat", "decode", "v5e:2x2"),
    Case("transformer", "decode", "v6e:2x2"),
]


@pytest.mark.parametrize(
    "case",
    [*FAST, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)],
    ids=lambda case: case.name,
)
def test_a_variant_compiles_with_its_kernels_into_its_memory(case):
    assert differences(case, figures(compile_case(case))) == []


def test_every_training_step_in_the_figures_runs_the_kernels_of_its_variant():
    for name, figure in golden().items():
        variant, program, _ = name.split()
        if program == "train" and variant in EXPECTED:
            kernels = " ".join(figure["kernels"])
            assert all(part in kernels for part in EXPECTED[variant]), name


EXPECTED = {
    "transformer": ("chunk_attention",),
    "rat": ("chunk_attention", "forward_kernel", "backward_kernel"),
}
