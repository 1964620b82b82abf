"""The Hopper kernel in jax's interpreter of Mosaic GPU against the reference.

One instance plays all programs there: what they own, exchange and add up is tested. How
they wait for one another is played by a model of it, in turns that chance draws. The
kernel also compiles for an H100, and on an H100 these tests run it.
"""

import dataclasses
import json
import random
import shutil
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest

from experiments.recurrent_transformer.hopper import run as script
from experiments.recurrent_transformer.hopper.launch import (
    ATTENDED,
    KINDS,
    OUT,
    PAIR,
    PARTS,
    Arrivals,
    Launch,
    LayerWidths,
    WidthCut,
    choose_cut,
    refusal_of_widths,
    slopes_of,
)
from experiments.recurrent_transformer.hopper.layer import (
    hopper_layers,
    refusal,
    refusal_of_device,
)
from pallas_kernels.recurrent_prefill.equations import prepare
from pallas_kernels.recurrent_prefill.tiles.layout import queries_and_pairs
from pallas_kernels.target import Target, as_if
from tests.absent_compilers import COMPILERS, ask
from tests.pallas_kernels.recurrent_prefill.layer_cases import (
    Case,
    quick_jit,
    reference_values,
)
from tests.tolerances import assert_values_close

# w_down has two parts. Slopes are steep, so that a wrong distance shows in bfloat16.
PLAIN = Case(
    positions=5,
    heads=2,
    key_heads=2,
    head_width=64,
    width=128,
    inner=256,
    dtype="bfloat16",
    alibi=1.0,
)
PROGRAMS = 14
"""Of PLAIN at 64 columns each, the fewest: the interpreter takes its time."""
PAPER = LayerWidths(1024, 1024, 4096)
SHARED = 232_448
CASES = "tests.experiments.hopper_compilation"


def interpreted(case: Case, programs: int = PROGRAMS):
    """Runs a case's layers in the interpreter, in tiles of up to 16 positions."""
    # Not above: jax has no public name of it.
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

    x, weights, _ = case.inputs()
    run = partial(
        hopper_layers,
        spec=case.spec,
        tile=16,
        programs=programs,
        # What a program reads before another wrote it shows.
        interpret=InterpretGPUParams(uninitialized_memory="nan"),
    )
    return quick_jit(run)(x, weights)


def check_values(case: Case, programs: int = PROGRAMS) -> None:
    z, _ = interpreted(case, programs)
    assert_values_close(z, reference_values(case), case.dtype)


# 19 positions are two tiles: the second meets the first through the prefix.
@pytest.mark.sweep
@pytest.mark.parametrize("positions", [1, 16, 19])
def test_the_kernel_computes_what_the_reference_does(positions):
    check_values(PLAIN._replace(positions=positions))


# 56 columns do not divide the weights': a stage's last group has some of another's.
@pytest.mark.sweep
def test_columns_that_two_groups_have_count_once():
    cut = choose_cut(LayerWidths(128, 128, 256), most=20, shared=SHARED)
    assert cut is not None and (cut.columns, cut.programs) == (56, 20)
    check_values(PLAIN, programs=20)


# Three blocks of 64 rows are at several stages; both parts of w_down add up.
@pytest.mark.sweep
def test_several_blocks_of_rows_are_the_reference_s():
    check_values(PLAIN._replace(positions=3, batch=130))


# As at the paper's width w_down has four parts, and a block fewer than 64 rows.
@pytest.mark.sweep
def test_the_parts_of_the_papers_width_are_the_reference_s():
    check_values(PLAIN._replace(positions=2, inner=512), programs=20)


@pytest.mark.sweep
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


@pytest.mark.sweep
def test_what_a_backward_pass_reads_is_left():
    """Attention over z's pairs and the own one, as one dense product."""
    case = PLAIN._replace(positions=19)
    z, residuals = interpreted(case)
    x, weights, _ = case.inputs()
    w, spec = prepare(weights, jnp.float32), case.spec

    @quick_jit
    def attention(x, z):
        rows = (x.swapaxes(0, 1)[None], z.swapaxes(0, 1)[None])
        (q, own_k, own_v), (_, k, v) = (
            [
                part[0].reshape(*part.shape[1:3], spec.heads, -1).astype(jnp.float32)
                for part in queries_and_pairs(row, w, spec)
            ]
            for row in rows
        )
        t = jnp.arange(x.shape[1])
        distance = t[:, None] - t
        logits = spec.logit_scale * jnp.einsum("tbhe,sbhe->bths", q, k)
        logits -= slopes_of(spec)[:, None] * distance[:, None]
        logits = jnp.where(distance[:, None] > 0, logits, -jnp.inf)
        own = spec.logit_scale * jnp.einsum("tbhe,tbhe->bth", q, own_k)
        lse = jax.nn.logsumexp(
            jnp.concatenate([logits, own[..., None]], axis=-1), axis=-1
        )
        attended = jnp.einsum("bths,sbhe->bthe", jnp.exp(logits - lse[..., None]), v)
        weight = jnp.exp(own - lse)[..., None]
        return attended + weight * own_v.swapaxes(0, 1), lse

    attended, lse = attention(x, z)
    assert_values_close(residuals.z[0], z, case.dtype)
    assert_values_close(residuals.attended[0], attended, case.dtype)
    assert_values_close(residuals.lse[0], lse, case.dtype)


@pytest.mark.parametrize(
    ("width", "columns", "programs"), [(1024, 88, 131), (768, 64, 132), (512, 48, 120)]
)
def test_a_layer_is_cut_into_as_many_programs_as_there_can_be(width, columns, programs):
    D, F = width, 4 * width
    cut = choose_cut(LayerWidths(D, D, F), most=132, shared=SHARED)
    assert cut is not None
    assert (cut.columns, cut.programs) == (columns, programs)
    assert cut.shared_bytes <= SHARED
    # Every column of every weight belongs to a program, and every row.
    for stage, shape in zip(
        cut.stages, ((D, D), (D, F), (F, D), (D, D), (D, D)), strict=True
    ):
        held = {start + n for start in cut.starts(stage) for n in range(columns)}
        assert held == set(range(shape[1]))
        assert cut.depth * stage.parts == shape[0]


class Step(NamedTuple):
    """What a worker does once a block's counter reaches a value."""

    block: int
    waits: list[Arrivals]
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
    cut = WidthCut.of(LayerWidths(128, 128, parts * 128), columns)
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
    message: Counter = Counter()
    written: dict = {}

    def ready(step: Step) -> bool:
        return all(message[step.block, kind] >= times for kind, times in step.waits)

    def as_expected(step: Step) -> bool:
        result = {name: written.get((step.block, name)) for name in step.reads}
        return result == step.reads

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
        message[step.block, step.tells] += 1
        todo[n], started[n] = next(workers[n], None), False
    assert message == Counter(
        {(r, k): count * launch.arrivals(k) for r in range(blocks) for k in KINDS}
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
    reason = str(refusal_of_widths(widths, most=most, shared=SHARED))
    assert reason.startswith(f"finds no cut of D={widths.model}, ")
    assert f"into at most {most} programs" in reason


def test_what_the_kernel_cannot_do_is_refused_with_a_reason():
    def refused(case: Case = PLAIN, **changes) -> str | None:
        x, weights, _ = jax.eval_shape(case.inputs)
        return refusal(x, weights, dataclasses.replace(case.spec, **changes), 132)

    assert refused() is None
    assert "float32" in str(refused(dtype="float32"))
    assert "block=2" in str(refused(block=2))
    assert "rotary" in str(refused(PLAIN._replace(rope_width=32)))
    assert "key heads" in str(refused(PLAIN._replace(key_heads=1)))
    assert "heads of 64" in str(refused(PLAIN._replace(head_width=32)))
    assert "gate" in str(refused(PLAIN._replace(gated=True)))
    assert '"layer"' in str(refused(PLAIN._replace(norm="layer")))
    assert "no cut" in str(refused(PLAIN._replace(width=32)))


@pytest.mark.parametrize(
    ("device", "reason"),
    [
        (Target(platform="gpu", kind="H100", compute_capability="9.0"), None),
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
def test_the_device_is_an_h100_or_refused(device, reason):
    x, weights, _ = jax.eval_shape(PLAIN.inputs)
    with as_if(device):
        assert refusal_of_device() == reason
        if reason is not None:
            with pytest.raises(NotImplementedError, match=reason):
                hopper_layers(x, weights, spec=PLAIN.spec)


@pytest.mark.sweep
def test_the_script_runs_at_its_smallest_here(tmp_path):
    out = tmp_path / "report.json"
    script.main(["--out", str(out), "--tiny", "--repeats", "1"])
    report = json.loads(out.read_text())
    assert 0 < report["checked"][0]["error"] < 5e-2
    assert report["layer_forward"][0]["hopper_ms"] > 0


# Programs wait for one another, which no interpreter runs.
@pytest.mark.parametrize("shape", script.CHECKED, ids=str)
def test_the_kernel_agrees_with_the_reference_on_gpu(shape):
    reason = refusal_of_device()
    if reason is not None:
        pytest.skip(reason)
    script.check(shape)


@pytest.fixture
def compilers():
    if not (COMPILERS / "jax_plugins").is_dir():
        pytest.skip("no compilers for GPU and TPU here: run make compilers")
    if shutil.which("ptxas") is None:
        pytest.skip("Mosaic GPU kernels need a ptxas on PATH to compile")


@pytest.mark.sweep
def test_a_tile_on_h100_is_one_kernel(compilers):
    summary = ask("h100", "tests.compile_target:summary_of", f"{CASES}:layer")
    kernels = [
        sum("mosaic_gpu_v2" in name for name in loop["launched"])
        for loop in summary["loops"]
    ]
    assert sorted(filter(None, kernels)) == [1]


@pytest.mark.sweep
@pytest.mark.parametrize("batch", [32, 1024])
def test_the_kernel_spills_nothing_and_waits_where_it_must(batch, compilers):
    resources = ask("h100", f"{CASES}:resources", batch)
    assert 0 < resources["registers"] <= 255
    assert resources["spilled_bytes"] == 0
    # A head signals what it attended to, a stage what it wrote.
    assert resources["signals"] == 2
    # For a block's pair, for a stage's rows, for the other parts of a sum.
    assert resources["waits"] == 3
    # Before each of the ones, behind each of the others.
    assert resources["fences"] == 2 + 3
    assert resources["read_only_loads"] == 0
