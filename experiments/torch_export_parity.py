"""Compares PyTorch exports of small trained models with the models: one row each.

The small models of the other folders, trained for a few steps on the embedded text, and
the small Transformer looped twice with LoRA of rank 8 and with half of its heads
replaced by Mamba, are exported and run on both sides on rows of the validation
split: logits, layers and 64 greedy tokens. The PyTorch side runs in --torch-python, or
in a virtual environment made here with nothing but torch, numpy, safetensors and their
dependencies. Expect about 8 minutes on two cores, and differences of float32's
rounding.

    python experiments/torch_export_parity.py --out runs/torch_export_parity
"""

import argparse
import dataclasses
import subprocess
import tempfile
import venv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from recurjax.convert.torch import to_torch
from recurjax.data.dataset import open_dataset
from recurjax.files.atomic import write_atomic
from recurjax.files.json_files import json_text
from recurjax.layers.position import Rope
from recurjax.model import StackConfig, count_parameters
from recurjax.run_table import load_experiment
from recurjax.training.loop import train
from recurjax.training.run import LoadedRun, load_run
from recurjax.variants.recurformer import MambaConfig, RecurFormerConfig
from recurjax.variants.relaxed_recursive_transformer import (
    RelaxedRecursiveTransformerConfig,
)
from recurjax.variants.transformer import TransformerConfig

FOLDER = Path(__file__).parent
TRANSFORMER = "recurrent_transformer/runs.py:shakespeare_transformer"
MODELS = {
    "transformer": TRANSFORMER,
    "recurrent_transformer": "recurrent_transformer/runs.py:shakespeare_recurrent",
    "rat": "rat/runs.py:shakespeare_rat16",
    "latent_recurrent_transformer": (
        "latent_recurrent_transformer/runs.py:shakespeare_shared"
    ),
    "relaxed_recursive_transformer": TRANSFORMER,
    "recurformer": TRANSFORMER,
}
PACKAGES = ("torch==2.13.0", "numpy", "safetensors")
ROWS, LENGTH = 4, 64


def looped(base: TransformerConfig) -> StackConfig:
    """Returns the base with one block of half its layers, run twice."""
    return RelaxedRecursiveTransformerConfig(
        transformer=base, loops=2, rank=8, tie_norms=False
    )


def with_mamba(base: TransformerConfig) -> StackConfig:
    """Returns the base with the even heads of each layer replaced."""
    # A layer whose heads are replaced knows positions by rotation only, and has norms
    # by head.
    attention = dataclasses.replace(
        base.attention, position=Rope(), qk_norm_over="head"
    )
    base = dataclasses.replace(base, attention=attention)
    even = tuple(range(0, attention.heads, 2))
    return RecurFormerConfig(
        transformer=base, replaced=(even,) * base.layers, mamba=MambaConfig(dt_rank=16)
    )


STACKS: dict[str, Callable[[TransformerConfig], StackConfig]] = {
    "relaxed_recursive_transformer": looped,
    "recurformer": with_mamba,
}
"""Stacks that are made of the Transformer's."""


def trained(name: str, steps: int, runs: Path) -> LoadedRun:
    """Trains a model, or finds it trained."""
    experiment = load_experiment(FOLDER / MODELS[name])
    if (make := STACKS.get(name)) is not None:
        base = experiment.model.stack
        assert isinstance(base, TransformerConfig)
        model = dataclasses.replace(experiment.model, stack=make(base))
        experiment = dataclasses.replace(experiment, model=model)
    experiment = dataclasses.replace(
        experiment,
        name=name,
        training=dataclasses.replace(
            experiment.training, steps=steps, checkpoint_every=steps
        ),
        evaluation=dataclasses.replace(experiment.evaluation, batches=1),
    )
    train(experiment, runs / name)
    return load_run(runs / name)


def rows_of_text(run: LoadedRun) -> np.ndarray:
    """Returns token ids [ROWS, LENGTH] of the validation split."""
    dataset = open_dataset(run.experiment.data, tokenizer=run.tokenizer)
    loader = dataset.loader("validation", length=LENGTH, batch=ROWS)
    return np.asarray(next(iter(loader))["ids"], np.int32)


def fresh_environment(folder: Path) -> Path:
    """Makes a virtual environment with `PACKAGES` and returns its interpreter."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    subprocess.run(
        [python, "-m", "pip", "install", "--quiet", *PACKAGES],
        check=True,
    )
    return python


def installed(python: str) -> list[str]:
    """Lists the packages of an interpreter."""
    command = [python, "-m", "pip", "list", "--format=freeze"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout.split()


def measure(run: LoadedRun, out: Path, python: str) -> dict[str, Any]:
    """Exports a run and compares both sides."""
    parity = to_torch(run, out, python=python, ids=rows_of_text(run))
    total = count_parameters(run.model.config).total
    return {"parameters": total, **parity.to_json()}


def table(results: dict[str, dict[str, Any]]) -> str:
    """Returns the figures in markdown."""
    lines = [
        "| model | parameters | logits, largest difference | of the largest logit | "
        "layers, largest share | KL, nats | top-1 | greedy tokens |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, row in results.items():
        lines.append(
            f"| {name} | {row['parameters']:,} | {row['max_abs_difference']:.1e} | "
            f"{row['relative_difference']:.1e} | {max(row['layer_differences']):.1e} | "
            f"{row['kl']:.1e} | {100 * row['top1_agreement']:.1f} % | "
            f"{row['greedy_agreement']} of {row['greedy_tokens']} |"
        )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> dict[str, dict[str, Any]]:
    """Trains, exports, compares; writes parity.json and prints a table."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/torch_export_parity"))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--torch-python")
    options = parser.parse_args(argv)
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        python = options.torch_python or str(fresh_environment(Path(folder) / "venv"))
        print("\n".join(installed(python)))
        for name in options.models:
            run = trained(name, options.steps, options.out / "runs")
            results[name] = measure(run, Path(folder) / name, python)
    write_atomic(options.out / "parity.json", json_text(results, indent=1) + "\n")
    print(table(results))
    return results


if __name__ == "__main__":
    main()
