"""Every variant compiles for devices that are not here, with the kernels it should.

The ops' own kernels are compiled by tests/pallas_kernels/*/test_compiles.py.
"""

from dataclasses import replace

import pytest

from recurjax.config_json import to_json
from recurjax.layers.mlp import MlpConfig
from recurjax.plan.compilers import find_compilers
from recurjax.sharding import MeshConfig
from tests.absent_compilers import ask
from tests.plan.matrix import (
    CASES,
    ONE,
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
compilers next to its kernels. Who changes a kernel or a plan runs `-m sweep` here.
"""
TOPOLOGIES = dict.fromkeys(case.topology for case in CASES)


def assert_as_before(cases: list[Case]) -> None:
    """Compiles the cases and holds each against the file; all differences at once."""
    matches = []
    for case, answer in compile_cases(cases):
        matches += differences(case, figures(answer))
    assert matches == []


@pytest.mark.slow
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
@pytest.mark.parametrize(
    "axis", [pytest.param("data", marks=pytest.mark.sweep), "tensor"]
)
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
    answer = ask("h100:2", "tests.plan.matrix:answer", wanted)
    keys_of_a_layer = 2 * rows * WIDTH * length // chunk  # bytes in bfloat16
    assert (
        sum(item["sent"] for item in answer["traffic"]["collectives"]) < keys_of_a_layer
    )


def in_rows(*taken: tuple[str, int]) -> pytest.MarkDecorator:
    """Runs a test for each variant with 8 rows and with one; all but `taken` sweep."""
    cases = [
        (variant, rows, (variant, rows) in taken)
        for variant in MOST_BYTES
        for rows in (8, 1)
    ]
    return pytest.mark.parametrize(
        ("variant", "rows"),
        [
            pytest.param(variant, rows, marks=[] if taken else pytest.mark.sweep)
            for variant, rows, taken in cases
        ],
    )


MOST_BYTES = {
    "transformer": {8: 1.2, 1: 1.2},
    "rat": {8: 1.2, 1: 1.2},
    "latent_recurrent_transformer": {8: 1.2, 1: 1.2},
    "recurformer": {8: 1.2, 1: 1.2},
    "recurrent_transformer": {8: 1.2, 1: 1.2},
    # Each of two loops reads the shared block, which no cache on the chip holds, and
    # needs what the loop before it made: 0.49 of all with 8 rows, 0.87 with one.
    "relaxed_recursive_transformer": {8: 1.66, 1: 2.09},
}
"""What a decode step may move, over its weights and cache, by rows."""


@needs_compilers
@pytest.mark.slow
@in_rows(("latent_recurrent_transformer", 1))
def test_a_decode_step_moves_little_beside_its_weights_and_cache(variant, rows):
    """Of a full stack, with the head and the most costly way to draw a token.

    Left to XLA, which joins products that share an input and takes layers out of their
    stack, eight rows moved up to 3.6 times them (two loops), a single one from 1.8
    (RecurFormer) to 5.1 times (Recurrent Transformer).
    """
    wanted = {
        "experiment": to_json(replace(wide_experiment(variant), mesh=ONE)),
        **{"topology": "h100", "program": "decode", "rows": rows, "length": 1024},
    }
    answer = ask("h100", "tests.plan.matrix:answer", wanted)
    moved, least = answer["traffic"]["bytes"], sum(answer["parts"].values())
    assert moved < MOST_BYTES[variant][rows] * least


MOST_BYTES_ON_TPU = {
    **dict.fromkeys(MOST_BYTES, {8: 1.2, 1: 1.2}),
    # As on a GPU, each loop reads the shared block: 0.49 of all with 8 rows; of one
    # row's 0.87 a part stays on the chip.
    "relaxed_recursive_transformer": {8: 1.5, 1: 1.65},
}
"""The same of a TPU's decode step."""


@needs_compilers
@pytest.mark.slow
@in_rows()
def test_a_decode_step_on_a_tpu_moves_little_beside_them_too(variant, rows):
    """Left to XLA eight rows moved up to 1.43 times them (LRT), 1.86 with two loops,
    a single one up to 1.72 (Recurrent Transformer)."""
    wanted = {
        "experiment": to_json(replace(wide_experiment(variant), mesh=ONE)),
        **{"topology": "v5e:1x1", "program": "decode", "rows": rows, "length": 1024},
    }
    answer = ask("v5e:1x1", "tests.plan.matrix:answer", wanted)
    least = sum(answer["parts"].values())
    assert answer["traffic"]["bytes"] < MOST_BYTES_ON_TPU[variant][rows] * least


@needs_compilers
@pytest.mark.sweep
@pytest.mark.parametrize("dtype", ["int4", "int8"])
def test_a_decode_step_on_a_tpu_reads_integers_where_they_lie(dtype):
    """Left to XLA a single row copied int8's table (1.4 times) and wrote the scales of
    int4 repeated over their groups (10 times, for Gemma 2B)."""
    run = replace(wide_experiment("transformer"), mesh=ONE)
    run = replace(run, model=replace(run.model, weight_dtype=dtype))
    wanted = {
        "experiment": to_json(run),
        **{"topology": "v5e:1x1", "program": "decode", "rows": 1, "length": 1024},
    }
    answer = ask("v5e:1x1", "tests.plan.matrix:answer", wanted)
    assert answer["traffic"]["bytes"] < 1.2 * sum(answer["parts"].values())


@needs_compilers
@pytest.mark.slow
@pytest.mark.parametrize(
    "dtype, most",
    [
        ("int8", 1.25),
        pytest.param("int4", 1.8, marks=pytest.mark.sweep),
        pytest.param("bfloat16", 1.15, marks=pytest.mark.sweep),
    ],
)
def test_a_decode_step_on_an_h100_reads_wide_weights_where_they_lie(dtype, most):
    """Left to XLA, it took layers out of their stack and widened int8's at every token:
    2.0 times the weights of Gemma 2B in bfloat16, 4.3 in int8 and 7.3 in int4. Small
    matrices of int4 are still widened."""
    run = replace(wide_experiment("transformer"), mesh=ONE)
    stack = replace(run.model.stack, mlp=MlpConfig(kind="geglu", width=8 * 2048))
    run = replace(run, model=replace(run.model, stack=stack, weight_dtype=dtype))
    wanted = {
        "experiment": to_json(run),
        **{"topology": "h100", "program": "decode", "rows": 1, "length": 1024},
    }
    answer = ask("h100", "tests.plan.matrix:answer", wanted)
    assert answer["traffic"]["bytes"] < most * sum(answer["parts"].values())


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
