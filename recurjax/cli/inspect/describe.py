"""`recurjax describe EXPERIMENT|RUN`: parameters, sharding, FLOPs and cache bytes."""

import re
from pathlib import Path
from typing import Any, NamedTuple

import jax

from recurjax.cli.inspect.runs import CONFIG, find_run
from recurjax.cli.options import override, shows_usage
from recurjax.experiment import Experiment, read_experiment
from recurjax.inference.engine.memory import in_words, state_size
from recurjax.machine import terminal
from recurjax.parameters import Rule, parameter_name, rule_of
from recurjax.run_table import load_experiment
from recurjax.sharding import MeshConfig, make_mesh
from recurjax.surgery.adapters import adapted
from recurjax.training.optimizers import Adam, AdamW, OptimizerConfig
from recurjax.training.program import model_shapes
from recurjax.training.step import trained_part

_USAGE = """usage: recurjax describe EXPERIMENT|RUN [--field value]

Prints the parameters of a model with their shapes in letters, the mesh axis of each
dimension and the optimizer's group, then FLOPs per token and the bytes of the cache at
1k, 4k and 64k tokens. It computes shapes only, so any size fits this machine.

example: recurjax describe rat:fineweb_4k_rat16 --model.stack.layers 12"""

CACHE_LENGTHS = (1024, 4096, 65_536)
"""Tokens of the texts whose caches are counted."""


class ParameterRow(NamedTuple):
    """Arrays of one shape whose names differ in numbers only.

    Attributes:
      name: name of the arrays, with `*` for the numbers that differ.
      shape: shape of each, such as "L=2 D=96 F=384".
      sharding: mesh axis of each letter: "D:fsdp F:tensor". A
        dimension that the axis does not divide is replicated.
      group: group of the optimizer.
      dtype: dtype of the parameters.
      arrays: how many there are.
      size: numbers in all of them.
    """

    name: str
    shape: str
    sharding: str
    group: str
    dtype: str
    arrays: int
    size: int


def run(argv: list[str]) -> int:
    """Runs the command."""
    if shows_usage(argv, _USAGE):
        return 0
    experiment = override(_load(argv[0]), argv[1:], prog=f"recurjax describe {argv[0]}")
    model = _shapes(experiment)
    rows = parameter_rows(
        model, experiment.optimizer, trained=experiment.training.trained
    )
    header = ("parameter", "shape", "sharding", "group", "dtype", "arrays", "size")
    cells = [(*row[:5], f"{row.arrays:,}", f"{row.size:,}") for row in rows]
    total = sum(row.size for row in rows)
    count = sum(row.arrays for row in rows)
    cells.append(("total", "", "", "", "", f"{count:,}", f"{total:,}"))
    print(terminal.aligned([header, *cells], right=(5, 6)))
    length, flops = experiment.training.length, experiment.flops_per_token
    tokens = experiment.training.steps * experiment.training.tokens_per_step
    print(
        f"\ntraining: {flops:,.0f} FLOPs per token at length {length:,}; "
        f"{flops * tokens:.3g} FLOPs for {tokens:,} tokens"
    )
    most = experiment.model.max_length
    for tokens in CACHE_LENGTHS:
        if most is not None and tokens > most:
            print(f"cache: {tokens:,} tokens exceed the model's {most:,} positions")
        else:
            print(f"cache: {in_words(state_size(model, tokens))}")
    return 0


def parameter_rows(
    model: Any, optimizer: OptimizerConfig, *, trained: str | None = None
) -> list[ParameterRow]:
    """Describes the parameters of a model, or of its shapes, by their rules.

    Args:
      trained: a regular expression: the group of all other parameters is "frozen".
    """
    paths = jax.tree_util.tree_leaves_with_path(trained_part(model, trained))
    names = {parameter_name(path) for path, _ in paths}
    grouped: dict[tuple[str, ...], list[tuple[str, int]]] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(model):
        name = parameter_name(path)
        rule = rule_of(name)
        letters = _letters(rule, leaf.ndim)
        shape = " ".join(f"{a}={n}" for a, n in zip(letters, leaf.shape, strict=True))
        spec = (None,) * (leaf.ndim - len(rule.spec)) + tuple(rule.spec)
        sharding = " ".join(
            f"{letter}:{axis}"
            for letter, axis in zip(letters, spec, strict=True)
            if axis is not None
        )
        key = (
            re.sub(r"\.\d+\.", ".*.", name),
            *(shape or "1", sharding or "-"),
            _group(rule, optimizer) if name in names else "frozen",
            str(leaf.dtype),
        )
        grouped.setdefault(key, []).append((name, leaf.size))
    return [
        ParameterRow(
            leaves[0][0] if len(leaves) == 1 else name,
            *key,
            arrays=len(leaves),
            size=sum(size for _, size in leaves),
        )
        for (name, *key), leaves in grouped.items()
    ]


def _load(where: str) -> Experiment:
    path = Path(where).expanduser()
    if (path / CONFIG).is_file():
        return read_experiment(path / CONFIG)
    # A folder's name that is not a run gets the closest run; any other the experiments.
    if path.parent != Path() and not path.suffix and ":" not in path.name:
        find_run(path)
    return load_experiment(where)


def _shapes(experiment: Experiment) -> Any:
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    model = model_shapes(experiment.model, mesh)
    return jax.eval_shape(lambda model: adapted(model, experiment.training), model)


def _letters(rule: Rule, rank: int) -> list[str]:
    """Returns a letter for each axis; those of stacked layers are in front."""
    letters = rule.axes.replace("->", " ").split()
    leading = rank - len(letters)
    return ["R", "L"][2 - leading :] + letters if leading else letters


def _group(rule: Rule, optimizer: OptimizerConfig) -> str:
    if isinstance(optimizer, Adam):
        return "adam"
    if isinstance(optimizer, AdamW):
        decays = rule.is_weight or optimizer.decay == "all"
        return "adamw, decay" if decays and optimizer.weight_decay else "adamw"
    return rule.group
