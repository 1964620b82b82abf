"""Every variant compiles for devices that are not here, with the kernels it should.

The ops' own kernels are compiled by tests/pallas_kernels/*/test_compiles.py.
"""

from dataclasses import replace

import pytest

from recurjax.config_json import to_json
from recurjax.plan.compilers import find_compilers
from recurjax.sharding import MeshConfig
from tests.absent_compilers import ask
from tests.plan.matrix import (
    CASES,
    Case,
    compile_cases,
    differences,
    figures,
    golden,
    request,
)
from tests.plan.small_experiments import (
    VARIANTS,
    WIDTH,
    experiment,
    wide_experiment,
)

needs_compilers = pytest.mark.skipif(
    find_compilers("jax_plugins") is None,
    reason="no compilers for GPU and TPU here: run make compilers",
)

FAST = [Case("rat", "decode", "h100")]
"""What `make test` compiles."""
SLOW = [
    Case("recurrent_transformer", "train", "h100"),
    Case("rat", "train", "h100"),
    Case("transformer", "train", "v5e:2x2"),
    Case("latent_recurrent_transformer", "train", "v6e:2x2"),
    Case("relaxed_recursive_transformer", "train", "v5e:2x2"),
]
"""What `make test-slow` compiles: each variant, GPU's compiler and TPU's.

The rest sweeps devices, dtypes and decoding; every op has its own tests of both
compilers beside its kernels. Who changes a kernel or a plan runs `-m sweep` here.
"""
TOPOLOGIES = dict.fromkeys(case.topology for case in CASES)


def assert_as_before(cases: list[Case]) -> None:
    """Compiles the cases and holds each against the file; all differences at once."""
    found = []
    for case, answer in compile_cases(cases):
        found += differences(case, figures(answer))
    assert found == []


@needs_compilers
def test_a_variant_compiles_with_its_kernels_into_its_memory():
    assert_as_before(FAST)


@needs_compilers
@pytest.mark.slow
def test_each_variant_compiles_with_its_kernels_into_its_memory():
    assert {case.variant for case in SLOW} == set(VARIANTS)
    assert_as_before(SLOW)


@needs_compilers
@pytest.mark.slow
@pytest.mark.parametrize("axis", ["data", "tensor"])
def test_decoding_on_two_gpus_sends_no_cache(axis):
    """The layout that chunks' ends keep there gathered them at every token."""
    rows, length, chunk = 8, 4096, 16
    mesh = replace(MeshConfig(data=1), **{axis: 2})
    run = replace(experiment("rat"), mesh=mesh)
    wanted = {
        **request(Case("rat", "decode", "h100")),
        "experiment": to_json(run),
        "topology": "h100:2",
        "length": length,
    }
    told = ask("h100:2", "tests.plan.matrix:answer", wanted)
    keys_of_a_layer = 2 * rows * WIDTH * length // chunk  # bytes in bfloat16
    assert sum(one["sent"] for one in told["traffic"]["collectives"]) < keys_of_a_layer


@needs_compilers
@pytest.mark.slow
@pytest.mark.parametrize("variant", ["rat", "transformer"])
def test_a_decode_step_moves_little_beside_its_weights_and_cache(variant):
    """Of a whole stack, with the head and the most costly way to draw a token.

    With products that share an input joined, RAT moved 1.81 times them and the
    Transformer 1.52 times.
    """
    wanted = {
        **request(Case(variant, "decode", "h100")),
        "experiment": to_json(wide_experiment(variant)),
        "length": 1024,
    }
    told = ask("h100", "tests.plan.matrix:answer", wanted)
    assert told["traffic"]["bytes"] < 1.2 * sum(told["parts"].values())


@needs_compilers
@pytest.mark.sweep
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_every_program_compiles_with_its_kernels_into_its_memory(topology):
    rest = [case for case in CASES if case not in (*FAST, *SLOW)]
    assert_as_before([case for case in rest if case.topology == topology])


def test_the_file_has_every_case():
    assert list(golden()) == [case.name for case in CASES]


def test_every_training_step_in_the_figures_runs_the_kernels_of_its_variant():
    for case in CASES:
        if case.program == "train":
            kernels = " ".join(golden()[case.name]["kernels"])
            assert all(part in kernels for part in EXPECTED[case.variant]), case.name


EXPECTED = {
    "transformer": ("chunk_attention",),
    "relaxed_recursive_transformer": ("chunk_attention",),
    "latent_recurrent_transformer": ("chunk_attention",),
    "recurrent_transformer": ("kernel",),
    "rat": ("chunk_attention", "forward_kernel", "backward_kernel"),
}
