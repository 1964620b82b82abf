"""The Hopper kernel in jax's interpreter of Mosaic GPU against the reference.

One instance plays all programs there: what they own, exchange and add up is tested. How
they wait for one another is played by a model of it, in turns that chance draws;
`test_compiles.py` compiles it.
"""

import dataclasses
import random
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.recurrent_prefill import recurrent_prefill
from pallas_kernels.recurrent_prefill.arrays import Rows, empty_cache
from pallas_kernels.recurrent_prefill.mosaic_gpu import backend as mosaic_gpu
from pallas_kernels.recurrent_prefill.mosaic_gpu.launch import (
    ATTENDED,
    KINDS,
    OUT,
    PAIR,
    PARTS,
    Cut,
    Launch,
    LayerWidths,
    Told,
    choose_cut,
    refusal_of_widths,
)
from pallas_kernels.target import Target, as_if
from tests.pallas_kernels.recurrent_prefill.layer_cases import (
    HOPPER_LAYER,
    Case,
    reference,
    reference_values,
    refusal,
    values,
    values_and_gradients,
)
from tests.tolerances import assert_gradients_close, assert_values_close

PLAIN = HOPPER_LAYER
PROGRAMS = 14
"""Of PLAIN at 64 columns each, the fewest: the interpreter takes its time."""
PAPER = LayerWidths(1024, 1024, 4096)
SHARED = 232_448
H100 = Target(
    platform="gpu",
    kind="NVIDIA H100 80GB HBM3",
    compute_capability="9.0",
    multiprocessors=132,
)


def on(programs: int):
    """Has layers cut into that many programs at most."""
    return as_if(Target(platform="cpu", kind="cpu", multiprocessors=programs))


def check_values(case: Case, programs: int = PROGRAMS) -> None:
    with on(programs):
        found = values(mosaic_gpu, case)
    assert_values_close(found, reference_values(case), case.dtype)


# Past a tile of 16 positions the second one meets the first through the prefix.
@pytest.mark.slow
@pytest.mark.parametrize("positions", [1, 16, 19])
def test_the_kernel_computes_what_the_reference_does(positions):
    check_values(PLAIN._replace(positions=positions))


# 56 columns do not divide the weights': a stage's last group has some of another's.
def test_columns_that_two_groups_have_count_once():
    with on(20):
        cut = choose_cut(LayerWidths(128, 128, 256), most=20, shared=SHARED)
    assert cut is not None and (cut.columns, cut.programs) == (56, 20)
    check_values(PLAIN, programs=20)


# Three blocks of 64 rows are at several stages; both parts of w_down add up.
@pytest.mark.slow
def test_several_blocks_of_rows_are_the_reference_s():
    check_values(PLAIN._replace(positions=3, batch=130))


# As at the paper's width w_down has four parts, and a block fewer than 64 rows.
@pytest.mark.sweep
def test_the_parts_of_the_papers_width_are_the_reference_s():
    check_values(PLAIN._replace(positions=2, inner=512), programs=20)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"activation": "silu", "normed_persistent": False, "layers": 2},
        {"activation": "relu_squared", "norm": "none"},
        {"activation": "gelu_tanh", "biases": True},
    ],
    ids=lambda changes: changes["activation"],
)
def test_switches_of_a_layer_are_the_reference_s(changes):
    check_values(PLAIN._replace(positions=3, **changes))


@pytest.mark.slow
def test_gradients_are_taken_from_what_the_kernel_keeps():
    case = PLAIN._replace(positions=19)
    with on(PROGRAMS):
        z, gradients = values_and_gradients(mosaic_gpu, case)
    want_z, want = reference(case)
    assert_values_close(z, want_z, case.dtype)
    assert_gradients_close(gradients, want, case.dtype)


@pytest.mark.parametrize(
    ("width", "columns", "programs"), [(1024, 88, 131), (768, 64, 132), (512, 48, 120)]
)
def test_a_layer_is_cut_into_as_many_programs_as_there_can_be(width, columns, programs):
    D, F = width, 4 * width
    cut = choose_cut(LayerWidths(D, D, F), most=132, shared=SHARED)
    assert cut is not None
    assert (cut.columns, cut.programs) == (columns, programs)
    assert cut.shared_bytes <= SHARED
    # Every column of every weight lies in a program, and every row.
    for stage, shape in zip(
        cut.stages, ((D, D), (D, F), (F, D), (D, D), (D, D)), strict=True
    ):
        held = {start + n for start in cut.starts(stage) for n in range(columns)}
        assert held == set(range(shape[1]))
        assert cut.depth * stage.parts == shape[0]


class Step(NamedTuple):
    """What a worker does once it has been told of a block so often."""

    block: int
    waits: list[Told]
    reads: dict[str, int]  # what of the block, and of which position
    writes: str
    position: int
    tells: int


def steps_of(launch: Launch, program: int, worker: int, count: int) -> Iterator[Step]:
    """Yields what `_attention_task` and `_product_task` do, tick after tick."""
    cut, heads = launch.cut, launch.spec.heads
    stages = cut.stages
    stage = max(n for n in range(5) if program >= stages[n].first)
    n, parts = program - stages[stage].first, cut.down.parts
    group, part = divmod(n, parts) if stage == 2 else (n, 0)
    kind = min(stage + OUT, PAIR)
    number = worker * cut.programs + program

    def of_all(name: str, count: int, at: int = 0) -> dict[str, int]:
        return {f"{name}{n}": at for n in range(count)}

    attended, hidden = of_all("attended", heads), of_all("hidden", cut.up.groups)
    y, z = of_all("y", cut.out.groups), of_all("z", cut.down.groups)
    pairs = of_all("key", cut.key.groups, -1) | of_all("value", cut.value.groups, -1)
    for tick in range(launch.ticks(count)):
        t, block, there = launch.task(tick, ATTENDED, count)
        if there:
            first = launch.first_head(block, number)
            for head in range(first, heads, launch.all_workers):
                waits, reads = [launch.before_attention(t)], pairs if t else {}
                reads = {name: t + at for name, at in reads.items()}
                yield Step(block, waits, reads, f"attended{head}", t, ATTENDED)
        t, block, there = launch.task(tick, kind, count)
        if not there or block % launch.workers != worker:
            continue
        waits = [launch.before_product(kind, t)]
        reads = (attended, y, hidden, z, z)[stage]
        writes, tells = ("y", "hidden", "z", "key", "value")[stage], kind
        if stage == 2 and launch.adds_up(part, block):
            waits.append(launch.before_sum(t))
            others = {f"part{group}.{n}": 0 for n in range(parts) if n != part}
            reads = reads | others | {f"y{group}": 0}
        elif stage == 2:
            writes, tells = f"part{group}.{part}", PARTS
        writes = writes if tells == PARTS else f"{writes}{group}"
        reads = {name: t + at for name, at in reads.items()}
        yield Step(block, waits, reads, writes, t, tells)


@pytest.mark.parametrize("blocks", [1, 2, 5, 9])
@pytest.mark.parametrize("parts", [1, 2, 4])
def test_no_worker_waits_for_ever_or_reads_what_is_not_there(blocks, parts):
    columns, count = 56, 4
    cut = Cut.of(LayerWidths(128, 128, parts * 128), columns)
    # Every worker attends to something.
    heads = 2 * cut.programs + 1
    spec = dataclasses.replace(PLAIN.spec, heads=heads, key_heads=heads)
    launch = Launch(spec=spec, cut=cut, blocks=blocks)
    chance = random.Random(blocks * parts)
    workers = [
        steps_of(launch, program, worker, count)
        for program in range(cut.programs)
        for worker in range(launch.workers)
    ]
    todo = [next(steps, None) for steps in workers]
    started = [False] * len(workers)
    told: Counter = Counter()
    written: dict = {}

    def ready(step: Step) -> bool:
        return all(told[step.block, kind] >= times for kind, times in step.waits)

    def as_expected(step: Step) -> bool:
        found = {name: written.get((step.block, name)) for name in step.reads}
        return found == step.reads

    while any(todo):
        able = [
            n for n, step in enumerate(todo) if step and (started[n] or ready(step))
        ]
        assert able, "all workers wait"
        n = chance.choice(able)
        step = todo[n]
        assert step is not None and as_expected(step)
        # It reads for a while, and others go on: what it reads must stay.
        if not started[n]:
            started[n] = True
            continue
        written[step.block, step.writes] = step.position
        told[step.block, step.tells] += 1
        todo[n], started[n] = next(workers[n], None), False
    assert told == Counter(
        {(r, k): count * launch.told(k) for r in range(blocks) for k in KINDS}
    )


@pytest.mark.parametrize(
    ("widths", "most"),
    [
        (LayerWidths(2048, 2048, 8192), 132),  # 92 MB of weights
        (PAPER, 114),  # an H100 on PCIe
        (LayerWidths(96, 64, 384), 132),
        (LayerWidths(128, 128, 320), 132),
    ],
)
def test_what_cannot_be_held_at_once_is_refused(widths, most):
    told = str(refusal_of_widths(widths, most=most, shared=SHARED))
    assert told.startswith(f"finds no cut of D={widths.model}, ")
    assert f"into at most {most} programs" in told


def test_what_the_kernel_cannot_do_is_refused_with_a_reason():
    spec, change = PLAIN.spec, dataclasses.replace
    refused = partial(refusal, mosaic_gpu)
    assert refused(PLAIN) is None
    assert "cache" in str(refused(PLAIN, slots=32))
    assert "wavefront" in str(refused(PLAIN, schedule="wavefront"))
    assert "float32" in str(refused(PLAIN, spec=change(spec, dtype="float32")))
    assert "key heads" in str(refused(PLAIN._replace(key_heads=1)))
    assert "heads of 64" in str(refused(PLAIN._replace(head_width=32)))
    assert "gate" in str(refused(PLAIN._replace(gated=True)))
    assert '"layer"' in str(refused(PLAIN._replace(norm="layer")))
    assert "no cut" in str(refused(PLAIN._replace(width=32)))
    # What Triton refuses it does: its kernels read the prefix and go back.
    assert "block=2" in str(refused(PLAIN, spec=change(spec, block=2)))
    documents = Rows(segments=jnp.zeros((2, 5), jnp.int32))
    assert "segments" in str(refused(PLAIN, rows=documents))


@pytest.mark.parametrize(
    ("device", "reason"),
    [
        (H100, None),
        (
            Target(platform="cpu", kind="cpu"),
            "needs an NVIDIA GPU of compute capability 9.0, found cpu",
        ),
        (
            Target(platform="gpu", kind="A100", compute_capability="8.0"),
            "needs compute capability 9.0, found 8.0",
        ),
    ],
)
def test_the_backend_asks_the_target(device, reason):
    x, weights, _ = PLAIN.inputs()
    cache = empty_cache(1, PLAIN.batch, 0, PLAIN.width, PLAIN.spec)
    with as_if(device):
        told = mosaic_gpu.supported(x, weights, cache, Rows(), **PLAIN.options)
    assert told == reason


@pytest.mark.parametrize("named", [None, "mosaic_gpu"])
def test_it_runs_only_when_it_is_named(named):
    x, weights, _ = PLAIN.inputs()
    cache = empty_cache(1, PLAIN.batch, 0, PLAIN.width, PLAIN.spec)
    call = partial(recurrent_prefill, implementation=named, **PLAIN.options)
    with as_if(H100):
        traced = str(jax.make_jaxpr(call)(x, weights, cache))
    assert ("recurrent_tile" in traced) == (named == "mosaic_gpu")
