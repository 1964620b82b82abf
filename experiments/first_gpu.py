"""The first minutes on a GPU: are the kernels right, then how fast are they.

    pip install -c constraints.txt '.[cuda,test]'
    python experiments/first_gpu.py --out gpu --seconds 400 probe right flags scans
    python experiments/first_gpu.py --out gpu --seconds 240 layer profile pair hopper

Steps:

- `probe`: versions, the copy bandwidth, cuDNN's attention against XLA's.
- `right`: the tests `on_gpu` of all ops; the Recurrent Transformer's layers against
  their definition.
- `flags`: a Recurrent Transformer layer under four settings of command buffers.
- `scans`: selective_scan, gated_scan and chunk_attention by backend, both passes; plain
  attention by cuDNN and PyTorch; packed rows by our kernel and cuDNN's packed layout.
- `layer`: a Recurrent Transformer layer at the paper's shapes, and a Transformer's.
- `profile`: the kernels of one Recurrent Transformer layer, by total time.
- `pair`: training steps of the paper's 300M pair.
- `hopper`: the persistent kernel of `recurrent_transformer/hopper`, last: it can hang.

Each step runs in processes of its own, which compile in parallel and take turns to
measure. A process that passes its limit is killed and the others continue. Every row is
appended to OUT/rows.jsonl when it is measured, so that nothing is lost when the machine
goes. `--tiny` runs the same code on a CPU.
"""

import argparse
import dataclasses
import fcntl
import glob
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.recurrent_prefill import (
    LayerSpec,
    LayerWeights,
    empty_cache,
    recurrent_prefill,
)
from pallas_kernels.recurrent_prefill.reference import recurrent_prefill_reference
from pallas_kernels.target import Target
from recurjax.bench.ops import BENCHES, PASSES
from recurjax.bench.recurrent_transformer import layers, programs
from recurjax.bench.report import device_name
from recurjax.experiment import Experiment
from recurjax.layers.attention.softmax import attend
from recurjax.run_table import load_experiment
from recurjax.sharding import MeshConfig, make_mesh
from recurjax.training.program import build_step
from recurjax.types import Batch

ROOT = Path(__file__).resolve().parents[1]
RT_RUNS = ROOT / "experiments/recurrent_transformer/runs.py"
STEPS = ("probe", "right", "flags", "scans", "layer", "profile", "pair", "hopper")

PAPER_MS = (38.85, 42.28, 48.95, 61.39, 81.73, 134.09, 240.83)
"""The paper's layer forward on one H100 with CUDA graphs, batch 32 to 2048."""

PAPER_TOKENS_PER_S = {"recurrent_12": 42e3, "transformer_12": 132e3}
"""By rows c4_300m_* of runs.py; appendix "C4 pretraining experiments"."""

TOLERANCES = {"float32": 1e-4, "bfloat16": 5e-2}
"""Largest error as a share of the largest value."""

FLAGS = {
    "default": "",
    "off": "--xla_gpu_enable_command_buffer=",
    "while": "--xla_gpu_enable_command_buffer=+WHILE",
    "unrolled": "--xla_gpu_enable_command_buffer=+WHILE "
    "--xla_gpu_command_buffer_unroll_loops=true",
}
"""Whether loops become CUDA graphs, and whether their turns are unrolled in them."""

SCANS = {
    "selective_scan": (
        {"B": 8, "T": 4096, "I": 2048, "N": 16},
        {"B": 1, "T": 65536, "I": 4096, "N": 16},
    ),
    "gated_scan": (
        {"B": 64, "T": 4096, "D": 2048, "W": 256, "E": 128, "C": 16},
        {"B": 1, "T": 262144, "D": 2048},
    ),
    "chunk_attention": (
        {"B": 4, "T": 8192, "H": 16, "N": 16, "E": 128, "C": 1},
        {"B": 64, "T": 4096, "H": 16, "N": 2, "E": 128, "C": 16},
    ),
}
PLAIN = SCANS["chunk_attention"][0]
"""Plain causal attention, which cuDNN and PyTorch have too."""


class Inputs(NamedTuple):
    """Random weights and rows of L layers with heads of D / H channels and F = 4 D."""

    spec: LayerSpec
    weights: LayerWeights
    x: jax.Array
    for_z: jax.Array


def draw_inputs(L: int, B: int, T: int, D: int, H: int, dtype: Any) -> Inputs:
    """Draws a stack and its input."""
    E, F = D // H, 4 * D
    spec = LayerSpec(
        heads=H,
        key_heads=H,
        head_width=E,
        alibi_max_bias=8.0,
        logit_scale=E**-0.5,
        residual_scale=L**-0.5,
        dtype=dtype,
    )
    draw = np.random.default_rng(0).standard_normal
    shapes = {"w_q": (D, H, E), "w_k": (D, H, E), "w_v": (D, H, E)}
    shapes |= {"w_out": (H, E, D), "w_up": (D, F), "w_down": (F, D)}
    w: dict[str, Any] = {n: D**-0.5 * draw((L, *s)) for n, s in shapes.items()}
    for name in ("attention_norm", "mlp_norm", "q_norm", "k_norm"):
        w[f"{name}_scale"] = 1 + 0.1 * draw((L, D))
    weights = LayerWeights(**{n: jnp.asarray(a, "float32") for n, a in w.items()})
    x, for_z = (jnp.asarray(draw((B, T, D)), "float32") for _ in range(2))
    return Inputs(spec, weights, x, for_z)


def draw_layer(shape: dict[str, int], dtype: Any) -> Inputs:
    """Draws one layer by its letters B, T, D and H."""
    return draw_inputs(1, shape["B"], shape["T"], shape["D"], shape["H"], dtype)


def run_layers(
    x: jax.Array, weights: LayerWeights, spec: LayerSpec, **options: Any
) -> jax.Array:
    """Runs layers from position 0, without a cache to fill."""
    cache = empty_cache(weights.w_q.shape[0], x.shape[0], 0, x.shape[2], spec)
    return recurrent_prefill(x, weights, cache, spec=spec, **options)[0]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """The file and the sizes of a process' measurements."""

    out: Path
    tiny: bool
    flags: str = "default"

    def write(self, step: str, **row: Any) -> None:
        """Prints a row and appends it to the file."""
        for name, value in row.items():
            if isinstance(value, float):
                row[name] = float(f"{value:.4g}")
        line = json.dumps({"step": step, "flags": self.flags, **row})
        print(line, flush=True)
        with (self.out / "rows.jsonl").open("a") as file:
            file.write(line + "\n")

    def time(
        self, step: str, calls: dict[str, Callable[[], Any]], **row: Any
    ) -> dict[str, float]:
        """Writes a row for each call in milliseconds; returns the best times.

        The first and the second call stand apart: graphs are made in them.
        """
        best = {}
        with alone(self.out):
            for name, call in calls.items():
                times = []
                for _ in range(3 if self.tiny else 8):
                    began = time.perf_counter()
                    jax.block_until_ready(call())
                    times.append(1e3 * (time.perf_counter() - began))
                first, second, *rest = times
                best[name] = min(rest)
                measured = {
                    "best_ms": min(rest),
                    "median_ms": sorted(rest)[len(rest) // 2],
                }
                self.write(
                    step, name=name, **row, **measured, first_ms=first, second_ms=second
                )
        return best

    @property
    def dtype(self) -> Any:
        return "float32" if self.tiny else "bfloat16"

    def layer_shapes(self, *batches: int) -> list[dict[str, int]]:
        """Returns the paper's layer at these batches."""
        if self.tiny:
            return [{"B": 2, "T": 8, "D": 16, "H": 2}]
        return [{"B": B, "T": 512, "D": 1024, "H": 16} for B in batches]


@contextmanager
def alone(out: Path) -> Iterator[None]:
    """Holds the device: one process measures at a time, and all may compile."""
    with (out / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def compiled(programs: dict[str, tuple[Callable, tuple]]) -> dict[str, Callable]:
    """Compiles functions for their arguments in parallel; the results run them."""

    def build(program: tuple[Callable, tuple]) -> Callable:
        function, arguments = program
        return partial(jax.jit(function).lower(*arguments).compile(), *arguments)

    with ThreadPoolExecutor(16) as pool:
        return dict(zip(programs, pool.map(build, programs.values()), strict=True))


def probe(m: Measurement) -> None:
    """Reports the device, its copy bandwidth, and cuDNN's attention against XLA's."""
    names = ("jax", "jaxlib", "flax", "triton", "jax-triton", "torch")
    versions = {}
    for name in names:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = None
    target = str(Target.of(jax.devices()[0]))
    m.write("probe", device=device_name(), target=target, versions=versions)
    x = jnp.ones((1 << (16 if m.tiny else 30),), jnp.bfloat16)
    best = m.time("probe", compiled({"copy": (lambda x: x + 1, (x,))}))
    m.write("probe", copy_terabytes_per_s=4 * x.size / best["copy"] / 1e9)
    q = jax.random.normal(jax.random.key(0), (2, 512, 8, 64), jnp.bfloat16)
    slopes = 2.0 ** -np.arange(1, 9)
    for name, options in {
        "plain": {},
        "window": {"window": 100},
        "alibi": {"slopes": slopes},
    }.items():

        def loss(q: jax.Array, implementation: Any, options: Any = options) -> Any:
            options = {"scale": 0.125, "causal": True, **options}
            out = attend(q, q, q, implementation=implementation, **options)
            return jnp.sum(out.astype(jnp.float32) ** 2)

        gradient = jax.jit(jax.grad(loss), static_argnums=1)
        want, got = gradient(q, "xla"), gradient(q, None if m.tiny else "cudnn")
        gap = float(jnp.abs(got - want).max() / jnp.abs(want).max())
        m.write("probe", name=f"attention/{name}", gradient_gap=gap)


def right(m: Measurement) -> None:
    """Checks the Recurrent Transformer's values and gradients against the definition.

    Raises:
      AssertionError: an error is above the tolerance, after all rows are written.
    """
    cases = (("float32", "prefix"), ("float32", "wavefront"), ("bfloat16", None))
    above = []
    for dtype, schedule in cases[:1] if m.tiny else cases:
        options = {"schedule": schedule, "implementation": None if m.tiny else "triton"}
        error = error_of(draw_inputs(2, 3, 37, 64, 4, dtype), **options)
        m.write("right", dtype=dtype, schedule=schedule, error=error)
        if not error <= TOLERANCES[dtype]:
            above.append((dtype, schedule, error))
    assert not above, above


def error_of(case: Inputs, **options: Any) -> float:
    """Returns the largest error of values and gradients, as a share of the largest."""
    spec, weights, x, for_z = case

    def both(run: Callable) -> Any:
        z, back = jax.vjp(run, x, weights)
        return z, back(for_z)

    got = jax.jit(lambda: both(partial(run_layers, spec=spec, **options)))()
    with jax.default_matmul_precision("highest"):
        definition = partial(recurrent_prefill_reference, spec=spec)
        want = jax.jit(lambda: both(definition))()
    return max(
        float(jnp.abs(a - b).max() / jnp.abs(b).max())
        for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True)
    )


def recurrent(m: Measurement, step: str, passes: str, *batches: int) -> None:
    """Times one Recurrent Transformer layer, next to the paper's milliseconds."""
    work: dict[str, tuple[Callable, tuple]] = {}
    for shape in m.layer_shapes(*batches):
        spec, weights, x, for_z = draw_layer(shape, m.dtype)

        def forward(x: Any, w: Any, spec: Any = spec) -> Any:
            return run_layers(x, w, spec=spec)

        def both(x: Any, w: Any, z: Any, forward: Any = forward) -> Any:
            out, back = jax.vjp(forward, x, w)
            return out, back(z.astype(out.dtype))

        trains = passes == "both"
        arguments = (x, weights, for_z) if trains else (x, weights)
        work[f"B{shape['B']}"] = (both if trains else forward, arguments)
    paper = {f"B{32 << i}": ms for i, ms in enumerate(PAPER_MS)}
    for name, call in compiled(work).items():
        known = (
            {"paper_ms": paper[name]} if passes == "forward" and name in paper else {}
        )
        m.time(step, {f"recurrent/{passes}/{name}": call}, **known)


def transformer(m: Measurement, *batches: int) -> None:
    """Times a Transformer layer with ALiBi and, on a GPU, cuDNN's attention."""
    work: dict[str, tuple[Callable, tuple]] = {}
    for shape in m.layer_shapes(*batches):
        config: Any = layers(shape)["transformer"]
        attention = dataclasses.replace(
            config.attention, implementation=None if m.tiny else "cudnn"
        )
        layer = programs(
            dataclasses.replace(config, attention=attention), shape, m.dtype
        )
        for name in ("forward", "forward_backward"):
            function = getattr(layer, name)
            work[f"transformer/{name}/B{shape['B']}"] = function, (layer.stack, layer.x)
    m.time("layer", compiled(work))


def scan(m: Measurement, name: str) -> None:
    """Times an op by backend; a backend that fails is a row with its error."""
    bench = BENCHES[name]
    for shape in list(bench.small)[:1] if m.tiny else SCANS[name]:
        call = bench.make(shape, m.dtype)
        inputs = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(call.arrays))
        row = {"shape": dict(shape), "inputs_gigabytes": inputs / 1e9}
        for backend in bench.serving(call):
            for passes in PASSES[:1] if m.tiny else PASSES:
                title = f"{name}/{backend}/{passes}"
                try:
                    run = call.program(passes, implementation=backend)
                    m.time("scans", {title: run}, **row)
                except Exception as error:
                    m.write("scans", name=title, **row, error=str(error)[:300])


def attention(m: Measurement) -> None:
    """Times plain causal attention by jax's cuDNN and by PyTorch's SDPA."""
    shape = {"B": 1, "T": 64, "H": 2, "N": 2, "E": 16, "C": 1} if m.tiny else PLAIN
    B, T, H, E = (shape[letter] for letter in "BTHE")
    q = jax.random.normal(jax.random.key(0), (B, T, H, E), m.dtype)

    def forward(q: jax.Array) -> jax.Array:
        implementation = None if m.tiny else "cudnn"
        return jax.nn.dot_product_attention(
            q, q, q, is_causal=True, implementation=implementation
        )

    work = {"forward": (forward, (q,)), "forward_backward": (gradient(forward), (q,))}
    calls = {f"cudnn/{name}": call for name, call in compiled(work).items()}
    m.time("scans", calls, shape=shape)
    if find_spec("torch") is None:
        m.write("scans", name="torch", error="torch is not installed")
        return
    import torch  # pyright: ignore[reportMissingImports]

    device = "cpu" if m.tiny else "cuda"
    kind = torch.float32 if m.tiny else torch.bfloat16
    rows = torch.randn(B, H, T, E, device=device, dtype=kind, requires_grad=True)
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    def torch_forward() -> None:
        with torch.no_grad():
            sdpa(rows, rows, rows, is_causal=True)
        wait()

    def torch_both() -> None:
        sdpa(rows, rows, rows, is_causal=True).float().square().sum().backward()
        wait()

    calls = {"torch/forward": torch_forward, "torch/forward_backward": torch_both}
    m.time("scans", calls, shape=shape)


def gradient(forward: Callable[[jax.Array], jax.Array]) -> Callable:
    """Returns the gradient of the sum of squares of an attention's output."""
    return jax.grad(lambda q: jnp.sum(forward(q).astype("float32") ** 2))


def packed(m: Measurement) -> None:
    """Times rows of eight documents by our kernel, by cuDNN and by tokamax.

    Both of the others take documents below their public functions, and neither can be
    lowered without a GPU: a failure is a row with its error. tokamax needs Python 3.12
    (`pip install tokamax`).
    """
    B, T, H, E = (1, 64, 2, 16) if m.tiny else (PLAIN[letter] for letter in "BTHE")
    q = jax.random.normal(jax.random.key(0), (B, T, H, E), m.dtype)
    size, options = T // 8, {"scale": E**-0.5}
    segments = jnp.broadcast_to(jnp.arange(T, dtype="int32") // size, (B, T))

    def ours(q: jax.Array, implementation: Any = None) -> jax.Array:
        hidden = {"causal": True, "segments": segments}
        return attend(q, q, q, implementation=implementation, **hidden, **options)

    def by_cudnn(q: jax.Array) -> Any:  # that module has no types
        if m.tiny:
            return ours(q, "xla")
        from jax._src.cudnn import fused_attention_stablehlo as fused

        lengths = jnp.full((B, 8), size, "int32")
        offsets = jnp.broadcast_to(jnp.arange(0, T + 1, size, dtype="int32"), (B, 9))
        packing = {"q_seqlen": lengths, "kv_seqlen": lengths}
        packing |= {"q_offsets": offsets, "kv_offsets": offsets}
        mask = fused.MaskType.PADDING_CAUSAL
        return fused.dot_product_attention(
            q, q, q, mask_type=mask, **packing, **options
        )

    def by_tokamax(q: jax.Array) -> Any:
        # Not among the packages that are checked: it needs Python 3.12.
        from tokamax._src.ops.attention import (  # pyright: ignore[reportMissingImports]
            api,
            base,
        )

        op = api.IMPLEMENTATIONS["xla_chunked" if m.tiny else "mosaic_gpu"]
        starts = jnp.arange(T, dtype="int32")[None, None] // size * size
        mask = base.Mask(k_start=starts, is_causal=True)
        return op(q, q, q, mask=mask, logits_scale=options["scale"])

    row = {"shape": {"B": B, "T": T, "H": H, "E": E, "documents": 8}}
    results = {}
    ways = {"ours": ours, "cudnn": by_cudnn, "tokamax": by_tokamax}
    for name, forward in ways.items():
        work = {"forward": (forward, (q,)), "both": (gradient(forward), (q,))}
        try:
            calls = compiled(work)
            m.time("scans", {f"packed/{name}/{k}": c for k, c in calls.items()}, **row)
            results[name] = calls["both"]().astype("float32")
        except Exception as error:
            m.write("scans", name=f"packed/{name}", **row, error=str(error)[:300])
    for name in results.keys() - {"ours"} if "ours" in results else ():
        want, got = results["ours"], results[name]
        gap = float(jnp.abs(got - want).max() / jnp.abs(want).max())
        m.write("scans", name=f"packed/{name}", **row, gradient_gap=gap)


def profile(m: Measurement) -> None:
    """Writes the 30 kernels of one layer's two passes that take most of the time."""
    [shape] = m.layer_shapes(512)
    spec, weights, x, for_z = draw_layer(shape, m.dtype)

    def both(x: Any, w: Any) -> Any:
        z, back = jax.vjp(partial(run_layers, spec=spec), x, w)
        return z, back(for_z.astype(z.dtype))

    run = compiled({"both": (both, (x, weights))})["both"]
    jax.block_until_ready(run())
    folder = str(m.out / "trace")
    with alone(m.out), jax.profiler.trace(folder):
        jax.block_until_ready(run())
    [*_, newest] = sorted(glob.glob(f"{folder}/**/*.xplane.pb", recursive=True))
    total, count = Counter(), Counter()
    for plane in jax.profiler.ProfileData.from_file(newest).planes:
        if "GPU" not in plane.name and not m.tiny:
            continue
        for event in (event for line in plane.lines for event in line.events):
            name = event.name.split(".")[0][:60]
            total[name] += event.duration_ns / 1e6
            count[name] += 1
    for name, ms in total.most_common(30):
        m.write("profile", name=name, ms=ms, launches=count[name])


def pair(m: Measurement, name: str) -> None:
    """Times training steps of one of the 300M models at batch 64 x 512."""
    experiment = load_experiment(f"{RT_RUNS}:c4_300m_{name}")
    if m.tiny:
        run = shrunk(experiment)
    else:
        training = dataclasses.replace(experiment.training, batch=64, accumulation=1)
        objective = dataclasses.replace(experiment.objective, vocabulary_chunks=8)
        run = dataclasses.replace(experiment, training=training, objective=objective)
    step = build_step(run, make_mesh(MeshConfig(), jax.devices()[:1]))
    shape = (run.training.batch, run.training.length)
    ids = jax.random.randint(jax.random.key(1), shape, 0, run.model.vocabulary)
    batch = Batch(ids, jnp.roll(ids, -1, axis=1))
    state = [step.initialise(jax.random.key(0))]

    def advance() -> Any:
        state[0], metrics = step(state[0], batch)
        return metrics

    known = {} if m.tiny else {"paper_tokens_per_s": PAPER_TOKENS_PER_S[name]}
    best = m.time("pair", {name: advance}, batch=shape[0], **known)
    m.write("pair", name=name, tokens_per_s=1e3 * ids.size / best[name])


def shrunk(experiment: Experiment) -> Experiment:
    """Shrinks a run to what a CPU compiles and trains in seconds."""
    stack: Any = experiment.model.stack
    small: dict[str, Any] = {"layers": 1, "width": 16}
    small["mlp"] = dataclasses.replace(stack.mlp, width=32)
    heads = {"heads": 2, "key_heads": 2, "head_width": 8}
    if "transformer_" in experiment.name:
        small["attention"] = dataclasses.replace(stack.attention, **heads)
    else:
        small |= heads
    stack = dataclasses.replace(stack, **small)
    model = dataclasses.replace(
        experiment.model, vocabulary=64, stack=stack, dtype="float32"
    )
    training = dataclasses.replace(experiment.training, batch=2, length=8)
    return dataclasses.replace(experiment, model=model, training=training)


WORKERS = {
    f.__name__: f
    for f in (
        *(probe, right, recurrent, transformer, scan, attention, packed),
        *(profile, pair),
    )
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Process:
    """A process of a step.

    Attributes:
      words: a worker and its arguments; or a command.
      seconds: its limit.
      flags: a key of `FLAGS`.
      command: whether the words are a command.
    """

    words: tuple[Any, ...]
    seconds: float
    flags: str = "default"
    command: bool = False


def processes(step: str, *, tiny: bool) -> list[Process]:
    """Returns what a step runs, all at once."""
    match step:
        case "probe":
            return [Process(words=("probe",), seconds=60)]
        case "right":
            # Later versions of jax deprecate what they still run: no failure here.
            options = "-k on_gpu -n 10 -W default -p no:cacheprovider -q"
            tests = (sys.executable, "-m", "pytest", "tests/pallas_kernels")
            tests += tuple(options.split())
            ours = Process(words=("right",), seconds=170)
            theirs = Process(words=tests, seconds=170, command=True)
            return [ours] if tiny else [ours, theirs]
        case "flags":
            names = list(FLAGS)[:1] if tiny else FLAGS
            words = ("recurrent", "flags", "forward", 32, 512)
            return [Process(words=words, seconds=230, flags=name) for name in names]
        case "scans":
            ops = [Process(words=("scan", name), seconds=120) for name in SCANS]
            plain = ("attention", "packed")
            return [*ops, *(Process(words=(word,), seconds=120) for word in plain)]
        case "layer":
            forward = ("recurrent", "layer", "forward", 32, 128, 512, 2048)
            both = ("recurrent", "layer", "both", 32, 512)
            words = forward, both, ("transformer", 32, 512)
            return [Process(words=each, seconds=120) for each in words]
        case "profile":
            return [Process(words=("profile",), seconds=120)]
        case "pair":
            names = PAPER_TOKENS_PER_S
            return [Process(words=("pair", name), seconds=150) for name in names]
        case "hopper":
            module = "experiments.recurrent_transformer.hopper.run"
            words = (sys.executable, "-m", module, "--out", "{out}/hopper.json")
            words += ("--tiny",) if tiny else ("--repeats", "3")
            return [Process(words=words, seconds=170 if tiny else 60, command=True)]
    raise ValueError(f"step must be one of {', '.join(STEPS)}, got {step!r}")


class Running(NamedTuple):
    """A process that was started, where it writes, and until when it may run."""

    child: subprocess.Popen
    log: Path
    until: float
    title: str


def start(process: Process, options: argparse.Namespace) -> Running:
    """Starts a process in a session of its own, so that all of it can be killed."""
    words = [str(word).format(out=options.out) for word in process.words]
    title = "_".join(words[2:4] if process.command else [*words, process.flags])
    log = options.out / (title.replace("/", "_") + ".log")
    if not process.command:
        worker = json.dumps([*process.words])
        words = [sys.executable, str(Path(__file__).resolve())]
        words += ["--out", str(options.out), "--worker", worker]
        words += ["--flags", process.flags] + ["--tiny"] * options.tiny
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    if not options.tiny:
        environment |= {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        environment |= {"JAX_PLATFORMS": "cuda,cpu", "XLA_FLAGS": FLAGS[process.flags]}
    with log.open("w") as file:
        child = subprocess.Popen(
            words,
            cwd=ROOT,
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    # A dry run is not a test of the machine's speed.
    seconds = float("inf") if options.tiny else process.seconds
    return Running(child, log, time.monotonic() + seconds, title)


def finish(running: Running, deadline: float) -> bool:
    """Waits for a process up to its limit; if it fails, prints its last lines."""
    left = min(running.until, deadline) - time.monotonic()
    try:
        code = running.child.wait(None if left == float("inf") else max(0.1, left))
    except subprocess.TimeoutExpired:
        os.killpg(running.child.pid, signal.SIGKILL)
        running.child.wait()
        code = "killed at its limit"
    if code != 0:
        lines = running.log.read_text(errors="replace").splitlines()
        print(f"{running.title}: {code}", *lines[-8:], sep="\n  ", flush=True)
    return code == 0


def run_steps(options: argparse.Namespace) -> int:
    """Runs the steps one after the other within the budget; returns the failures."""
    seconds = float("inf") if options.tiny else options.seconds
    deadline = time.monotonic() + seconds
    failures = 0
    for step in options.steps or STEPS:
        if time.monotonic() > deadline - 10:
            print(f"{step}: not started, the budget is spent", flush=True)
            failures += 1
            continue
        began = time.monotonic()
        children = [start(each, options) for each in processes(step, tiny=options.tiny)]
        failed = sum(not finish(child, deadline) for child in children)
        failures += failed
        seconds = time.monotonic() - began
        print(f"{step}: {len(children)} processes, {failed} failed, {seconds:.0f} s")
    return failures


def main(arguments: list[str] | None = None) -> int:
    """Runs steps, or one worker of a step."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("steps", nargs="*", metavar="STEP", help=", ".join(STEPS))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=840.0, help="for all steps")
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU")
    parser.add_argument("--worker", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--flags", default="default", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if unknown := set(options.steps) - set(STEPS):
        parser.error(f"no step {sorted(unknown)[0]!r}: they are {', '.join(STEPS)}")
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.worker:
        name, *rest = options.worker
        measurement = Measurement(
            out=options.out, tiny=options.tiny, flags=options.flags
        )
        WORKERS[name](measurement, *rest)
        return 0
    return 1 if run_steps(options) else 0


if __name__ == "__main__":
    sys.exit(main())
