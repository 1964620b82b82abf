"""The paper's speed tables on one GPU: kernels checked first, then timed.

    pip install -c constraints.txt '.[cuda]'
    python experiments/recurrent_transformer/one_gpu.py --out h100.json

1. The GPU kernels against the definition: values and gradients, float32 and bfloat16.
2. One layer forward at D 1024, 16 heads, N 512, batch 32 to 2048, bfloat16, beside the
   paper's table (one H100, with CUDA graphs) and a Transformer layer with ALiBi and
   cuDNN's attention.
3. Training throughput of the 300M pairs of 12 and of 6 layers at batch 512 x 512, layer
   by layer and as a wavefront; the paper has 42k and 49k tokens/s for the Recurrent
   Transformer, 132k and 153k for the Transformer.

`--tiny` runs the same code at sizes for a CPU, on the path that serves there.
`hopper/run.py` does 1 and 2 with a persistent kernel for an H100.
"""

import argparse
import dataclasses
import json
import sys
from functools import partial
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
from recurjax.bench.recurrent_transformer import LARGE, layers, programs
from recurjax.bench.report import device_name
from recurjax.bench.timing import repeat
from recurjax.experiment import Experiment
from recurjax.files.atomic import write_atomic
from recurjax.machine import host
from recurjax.run_table import load_experiment
from recurjax.sharding import MeshConfig, make_mesh
from recurjax.training.program import build_step
from recurjax.types import Batch

PAPER_MS = (38.85, 42.28, 48.95, 61.39, 81.73, 134.09, 240.83)
"""The paper's layer forward on one H100, batch 32 to 2048."""

PAPER_TOKENS_PER_S = {
    "recurrent_12": 42e3,
    "transformer_12": 132e3,
    "recurrent_6": 49e3,
    "transformer_6": 153e3,
}
"""By rows c4_300m_* of runs.py; appendix "C4 pretraining experiments"."""

TOLERANCES = {"float32": 1e-4, "bfloat16": 5e-2}
"""Largest error as a share of the largest value."""

TINY_SHAPES = tuple({"B": b, "T": 8, "D": 16, "H": 2} for b in (1, 2))


class Drawn(NamedTuple):
    """Random weights and rows of L layers with heads of D / H channels and F = 4 D."""

    spec: LayerSpec
    weights: LayerWeights
    x: jax.Array
    for_z: jax.Array


def drawn(L: int, B: int, T: int, D: int, H: int, dtype: Any) -> Drawn:
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
    return Drawn(spec, weights, x, for_z)


def run_layers(
    x: jax.Array, weights: LayerWeights, spec: LayerSpec, **options: Any
) -> jax.Array:
    """Runs layers from position 0, without a cache to fill."""
    cache = empty_cache(weights.w_q.shape[0], x.shape[0], 0, x.shape[2], spec)
    return recurrent_prefill(x, weights, cache, spec=spec, **options)[0]


def check(dtype: Any, schedule: Any, *, implementation: Any) -> float:
    """Returns the largest error of values and gradients against the definition.

    Raises:
      AssertionError: it is above the tolerance.
    """
    spec, weights, x, for_z = drawn(2, 3, 37, 64, 4, dtype)

    def both(run):
        z, back = jax.vjp(run, x, weights)
        return z, back(for_z)

    options = {"schedule": schedule, "implementation": implementation}
    got = jax.jit(lambda: both(partial(run_layers, spec=spec, **options)))()
    with jax.default_matmul_precision("highest"):
        definition = partial(recurrent_prefill_reference, spec=spec)
        want = jax.jit(lambda: both(definition))()
    error = max(
        float(jnp.abs(a - b).max() / jnp.abs(b).max())
        for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True)
    )
    assert error <= TOLERANCES[dtype], (dtype, schedule, error)
    return error


def time_layer(shape: dict[str, int], name: str, *, repeats: int, cudnn: bool) -> float:
    """Returns a layer's forward in ms, the best of some repeats."""
    config = layers(shape)["prefix" if name == "recurrent" else name]
    if name == "recurrent":  # each backend's own schedule
        config = dataclasses.replace(config, schedule=None)  # pyright: ignore[reportCallIssue]
    else:
        attention = dataclasses.replace(
            config.attention,  # pyright: ignore[reportAttributeAccessIssue]
            implementation="cudnn" if cudnn else None,
        )
        config = dataclasses.replace(config, attention=attention)
    passes = programs(config, shape, "bfloat16")
    call = partial(passes.forward, passes.stack, passes.x)
    return 1e3 * min(repeat(call, repeats=repeats))


def throughput(experiment: Experiment, *, accumulation: int, repeats: int) -> float:
    """Returns tokens/s of whole training steps on random tokens."""
    training = dataclasses.replace(experiment.training, accumulation=accumulation)
    objective = dataclasses.replace(experiment.objective, vocabulary_chunks=8)
    run = dataclasses.replace(experiment, training=training, objective=objective)
    step = build_step(run, make_mesh(MeshConfig(), jax.devices()[:1]))
    shape = (training.batch, training.length)
    ids = jax.random.randint(jax.random.key(1), shape, 0, experiment.model.vocabulary)
    held = [step.initialise(jax.random.key(0))]

    def advance():
        held[0], metrics = step(held[0], Batch(ids, jnp.roll(ids, -1, axis=1)))
        return metrics

    times = repeat(advance, repeats=repeats)
    return training.batch * training.length / min(times)


def tiny(experiment: Experiment) -> Experiment:
    """Shrinks a run to what a CPU compiles and trains in seconds."""
    stack: Any = experiment.model.stack
    small: dict[str, Any] = {"layers": 1, "width": 16}
    small["mlp"] = dataclasses.replace(stack.mlp, width=32)
    if hasattr(stack, "attention"):
        small["attention"] = dataclasses.replace(
            stack.attention, heads=2, key_heads=2, head_width=8
        )
    else:
        small |= {"heads": 2, "key_heads": 2, "head_width": 8}
    model = dataclasses.replace(
        experiment.model,
        vocabulary=64,
        stack=dataclasses.replace(stack, **small),
        dtype="float32",
    )
    training = dataclasses.replace(experiment.training, batch=2, length=8)
    return dataclasses.replace(experiment, model=model, training=training)


def wavefront(experiment: Experiment) -> Experiment:
    """Runs all layers of a Recurrent Transformer side by side."""
    stack: Any = experiment.model.stack
    stack = dataclasses.replace(stack, schedule="wavefront")
    model = dataclasses.replace(experiment.model, stack=stack)
    return dataclasses.replace(experiment, model=model)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Checks, times, writes JSON and returns it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--accumulation", type=int, default=2)
    options = parser.parse_args(arguments)
    on_gpu = jax.default_backend() == "gpu"
    if not (on_gpu or options.tiny):
        sys.exit(f"needs a GPU, found {jax.default_backend()}: try --tiny")
    report: dict[str, Any] = {"device": device_name(), "tiny": options.tiny}
    cases = (("float32", "prefix"), ("float32", "wavefront"), ("bfloat16", None))
    if options.tiny:
        cases = cases[:1]
    backend = "triton" if on_gpu else None
    report["errors"] = {
        f"{dtype}/{schedule}": check(dtype, schedule, implementation=backend)
        for dtype, schedule in cases
    }
    print(json.dumps(report), file=sys.stderr)
    report["layer_forward"] = []
    for shape, theirs in zip(
        TINY_SHAPES if options.tiny else LARGE, PAPER_MS, strict=False
    ):
        timed = partial(time_layer, shape, cudnn=on_gpu, repeats=options.repeats)
        row: dict[str, Any] = dict(shape)
        row |= {f"{name}_ms": timed(name) for name in ("recurrent", "transformer")}
        row |= {} if options.tiny else {"paper_ms": theirs}
        report["layer_forward"].append(row)
        print(json.dumps(row), file=sys.stderr)
    report |= train_pairs(options)
    write_atomic(options.out, json.dumps(report, indent=2) + "\n")
    return report


def train_pairs(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the pairs' tokens/s in training, and the shares of the Transformer's."""
    table = Path(__file__).with_name("runs.py")
    runs = {
        model: load_experiment(f"{table}:c4_300m_{model}")
        for model in PAPER_TOKENS_PER_S
        if not (options.tiny and model.endswith("_6"))  # the same as 12 layers there
    }
    if options.tiny:
        runs = {name: tiny(run) for name, run in runs.items()}
    runs |= {
        f"{name}_wavefront": wavefront(run)
        for name, run in runs.items()
        if name.startswith("recurrent")
    }
    rates: dict[str, float] = {}
    for name, run in runs.items():
        rates[name] = throughput(
            run,
            accumulation=1 if options.tiny else options.accumulation,
            repeats=min(options.repeats, 5),
        )
        print(json.dumps({name: rates[name]}), file=sys.stderr)
    ratios = {
        name.removeprefix("recurrent_"): rate
        / rates[f"transformer_{name.split('_')[1]}"]
        for name, rate in rates.items()
        if name.startswith("recurrent")
    }
    return {
        "training_tokens_per_s": rates,
        "training_ratio": ratios,
        "paper_tokens_per_s": PAPER_TOKENS_PER_S,
    }


if __name__ == "__main__":
    host.prepare()
    main()
