"""`recurjax convert to-recursive | to-transformer`: one block looped, and back."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jax.sharding import Mesh

from recurjax.cli.convert.surgery import cut_text, say, write_changed_run
from recurjax.cli.options import parse
from recurjax.evaluation.perplexity import score
from recurjax.files.atomic import refuse_existing
from recurjax.files.json_files import json_text
from recurjax.model import Decoder, count_parameters
from recurjax.ranges import NonNegativeInt, PositiveInt, Range, RangeChecks, Seed
from recurjax.sharding import MeshConfig, reading_mesh
from recurjax.surgery.fewer_layers import with_evenly_kept_layers
from recurjax.surgery.relaxed_recursive import (
    BlockInit,
    TiedNorms,
    kept_energy,
    plot_energy,
    recursive_stack,
    to_recursive,
    to_transformer,
)
from recurjax.training.run import LoadedRun, load_run
from recurjax.types import Batch

ROWS = 4
"""Of the text that are scored at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ToRecursive(RangeChecks):
    """Makes a Transformer recursive: one block, run several times.

    Writes a run directory with report.json and energy.png: for each matrix how far it
    lay from the shared one, and how much of that its addition makes up for. Train on
    with --training.start-from.

    Attributes:
      run: a run or an imported directory with a Transformer.
      out: the new run directory; it appears whole or not at all.
      loops: how often the block runs; divides the layers.
      init: which layers the block starts from: stepwise, average, lower, upper,
        fixed_start, or random: none.
      rank: of the additions at each depth; 0: none.
      adapters: svd: the best of their rank; zero: they add nothing yet.
      sharing: cycle, sequence or cycle_rev.
      tie_norms: one loop's norms and biases serve all (the paper's).
      loop_cache: own, or first: deeper loops read the first one's keys and values.
      fused_qkv: q, k and v share the first factor.
      norms: how norms that the loops share start: average, choice (one layer's) or
        zero; None: as the matrices do.
      keep: evenly: where the loops do not divide the layers, first leave some out at
        equal steps; all: refuse.
      text: a UTF-8 file; report.json then has the loss on it before and after.
      samples, length: how much of that text: rows, and tokens of each.
      seed: of a random block, and of additions that start from nothing.
      step: of the checkpoint; None: the newest.
      mesh: devices that both models lie on.
    """

    run: Annotated[Path, tyro.conf.Positional]
    out: Annotated[Path, tyro.conf.Positional]
    loops: PositiveInt
    init: BlockInit = "stepwise"
    rank: NonNegativeInt = 0
    adapters: Literal["svd", "zero"] = "svd"
    sharing: Literal["cycle", "sequence", "cycle_rev"] = "cycle"
    tie_norms: bool = True
    loop_cache: Literal["own", "first"] = "own"
    fused_qkv: bool = False
    norms: TiedNorms | None = None
    keep: Literal["all", "evenly"] = "all"
    text: Path | None = None
    samples: PositiveInt = 64
    length: Annotated[int, Range(least=2)] = 512
    seed: Seed = 0
    step: NonNegativeInt | None = None
    mesh: MeshConfig = MeshConfig(data=1)


def run_to_recursive(argv: list[str]) -> int:
    """Runs `recurjax convert to-recursive ARGV`."""
    options = parse(ToRecursive, argv, prog="recurjax convert to-recursive")
    refuse_existing(options.out)
    mesh = reading_mesh(options.mesh)
    loaded = load_run(options.run, step=options.step, mesh=mesh, report=say)
    # The text first: a file that cannot be read should stop it before the work.
    rows = (
        None
        if options.text is None
        else cut_text(options.text, options.samples, options.length, loaded)
    )
    # The model whose layers the loops take; the loss is told of the whole one.
    base = loaded.model
    if options.keep == "evenly":
        base = with_evenly_kept_layers(base, options.loops, mesh=mesh)
    stack = recursive_stack(
        base,
        loops=options.loops,
        sharing=options.sharing,
        rank=options.rank,
        tie_norms=options.tie_norms,
        loop_cache=options.loop_cache,
    )
    model = to_recursive(
        base,
        stack,
        init=options.init,
        adapters=options.adapters,
        fused_qkv=options.fused_qkv,
        norms=options.norms,
        seed=options.seed,
        mesh=mesh,
    )
    # Measured between the matrices of the two models, not by training.
    energies = kept_energy(base, model)
    before, after = (
        count_parameters(one.config).total for one in (loaded.model, model)
    )
    told: dict[str, Any] = {
        "parameters": after,
        "parameters_before": before,
        "matrices": [energy._asdict() for energy in energies],
    }
    if rows is not None:
        told["text"] = str(options.text)
        told["tokens"] = int(rows[:, 1:].size)
        told["loss_before"], told["loss_after"] = (
            _loss(one, rows, loaded, mesh) for one in (loaded.model, model)
        )

    def report(folder: Path) -> None:
        # Written with the run, whole or not at all.
        text = json_text(told, indent=1) + "\n"
        (folder / "report.json").write_text(text, encoding="utf-8")
        plot_energy(energies, folder / "energy.png")

    write_changed_run(options.out, loaded, model, report)
    print(f"{options.out}: {after:,} parameters, {before:,} before")
    if rows is not None:
        change = f"{told['loss_before']:.4f} to {told['loss_after']:.4f}"
        print(f"loss on {options.text}: {change} nats a token")
    return 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ToTransformer(RangeChecks):
    """Writes a recursive model out as an ordinary Transformer of all its layers.

    Attributes:
      run: the run directory of a recursive model.
      out: the new run directory; it appears whole or not at all.
      step: of the checkpoint; None: the newest.
      mesh: devices that both models lie on.
    """

    run: Annotated[Path, tyro.conf.Positional]
    out: Annotated[Path, tyro.conf.Positional]
    step: NonNegativeInt | None = None
    mesh: MeshConfig = MeshConfig(data=1)


def run_to_transformer(argv: list[str]) -> int:
    """Runs `recurjax convert to-transformer ARGV`."""
    options = parse(ToTransformer, argv, prog="recurjax convert to-transformer")
    refuse_existing(options.out)
    mesh = reading_mesh(options.mesh)
    loaded = load_run(options.run, step=options.step, mesh=mesh, report=say)
    # Every depth gets matrices of its own, with its addition multiplied out.
    model = to_transformer(loaded.model, mesh=mesh)
    write_changed_run(options.out, loaded, model, lambda folder: None)
    layers = model.config.stack.layers
    print(f"{options.out}: a Transformer of {layers} layers")
    return 0


def _loss(model: Decoder, rows: np.ndarray, loaded: LoadedRun, mesh: Mesh) -> float:
    """Returns nats a token; every row starts without context."""
    # Inputs and their next tokens, a few rows at a time.
    batches = (
        Batch(jnp.asarray(part[:, :-1]), jnp.asarray(part[:, 1:]))
        for part in np.array_split(rows, -(-len(rows) // ROWS))
    )
    sizes = loaded.tokenizer.token_bytes
    with jax.set_mesh(mesh):
        return score(model, batches, token_bytes=sizes).loss
