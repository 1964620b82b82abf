"""`recurjax convert to-recurformer | to-recursive | to-transformer`.

A run's model becomes another variant: heads replaced by a recurrence, one block looped,
and back.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jax.sharding import Mesh

from recurjax.cli.options import parse
from recurjax.convert.imported_run import write_run
from recurjax.errors import UserError
from recurjax.evaluation.perplexity import score
from recurjax.evaluation.progress import progress_bar
from recurjax.files.atomic import refuse_existing
from recurjax.files.json_files import json_text, read_json
from recurjax.model import (
    Decoder,
    ModelConfig,
    count_parameters,
    in_weight_dtype,
)
from recurjax.ranges import (
    Fraction,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Range,
    RangeChecks,
    Seed,
    check_ranges,
)
from recurjax.sharding import MeshConfig, reading_mesh
from recurjax.surgery.fewer_layers import with_evenly_kept_layers
from recurjax.surgery.recency import (
    HeadRecency,
    Scope,
    choose_heads,
    measure_recency,
    plot_heads,
    settled_choice,
)
from recurjax.surgery.recurformer import (
    MambaConfig,
    MixerFit,
    changes,
    fit_mixers,
    to_recurformer,
)
from recurjax.surgery.relaxed_recursive import (
    BlockInit,
    TiedNorms,
    is_recursive,
    kept_energy,
    matrices,
    plot_energy,
    recursive_stack,
    to_recursive,
    to_transformer,
)
from recurjax.training.objective import NextToken, Objective
from recurjax.training.run import LoadedRun, load_run
from recurjax.types import Batch

BATCH = 4
"""Texts that are measured at once; their attention weights are in memory together."""
MOST_TEXTS = 256
"""Texts to measure on at most where `--samples` is left out; the paper has 1,024."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ToRecurFormer:
    """Replaces heads that attend to recent tokens with Mamba, and keeps the rest.

    Writes a run directory with heads.json (each head's recency and the choice) and
    heads.png. Continue training with --training.start-from.

    Attributes:
      run: a run or an imported directory with a Transformer, or with a recursive
        Transformer, whose loops are written out first, so that each layer has heads of
        its own.
      out: the new run directory, written atomically.
      beta: share of the heads to replace, from 0 to 1.
      scope: what is chosen by recency: heads, of all layers; groups, all query heads of
        a key head, which shrinks the cache of grouped-query attention; layer, equally
        many heads in each layer.
      window: distance that counts as recent, as a share of the text's length.
      threshold: a head is recent in a text if its ratio exceeds this.
      samples: texts to measure on. None: at most 256, but stop when the heads chosen
        after each 16 texts agree four times in a row, up to 1 % of all heads. The paper
        uses 1,024.
      length: tokens per text.
      text: a UTF-8 file that the texts are cut from.
      heads: a JSON file with a list of heads per layer, or a heads.json, in place of
        --beta.
      dt_rank: rank of the projection of Mamba's step size.
      state: states per channel of Mamba.
      conv: taps of Mamba's causal convolution.
      expand: Mamba's channels per width of the replaced heads.
      seed: seed of Mamba's initial weights.
      start: initial weights of Mamba: plain, its usual initialization; fitted, also
        trained on --text to reproduce the outputs of the heads that it replaces.
      fit_samples: number of texts to fit on; one layer's inputs and outputs of all of
        them are held in memory.
      fit_steps: steps per layer, on four texts each.
      fit_rate: Adam's initial learning rate, which decays to 0.
      step: training step of the checkpoint; None: the newest.
    """

    run: Annotated[Path, tyro.conf.Positional]
    out: Annotated[Path, tyro.conf.Positional]
    beta: Fraction | None = None
    scope: Scope = "heads"
    window: Annotated[float, Range(above=0, below=1)] = 0.1
    threshold: Annotated[float, Range(above=0, below=1)] = 0.5
    samples: PositiveInt | None = None
    length: Annotated[int, Range(least=2)] = 1024
    text: Path | None = None
    heads: Path | None = None
    dt_rank: PositiveInt = 256
    state: PositiveInt = 16
    conv: PositiveInt = 4
    expand: PositiveInt = 2
    seed: Seed = 0
    start: Literal["plain", "fitted"] = "plain"
    fit_samples: PositiveInt = 256
    fit_steps: PositiveInt = 200
    fit_rate: PositiveFloat = 3e-3
    step: NonNegativeInt | None = None

    # Which heads, and on what text they are measured, must be said in one way only.
    def __post_init__(self):
        check_ranges(self)
        if (self.heads is None) == (self.beta is None):
            raise UserError(
                "choose the heads to replace with either --beta SHARE, measured "
                "on --text, or --heads FILE"
            )
        if self.beta is not None and self.text is None:
            raise UserError("--beta is measured on a text: add --text FILE")
        if self.start == "fitted" and self.text is None:
            raise UserError("--start fitted needs a text to fit on: add --text FILE")

    @property
    def mamba(self) -> MambaConfig:
        """Sizes of Mamba; its width follows from the heads replaced."""
        return MambaConfig(
            conv=self.conv,
            state=self.state,
            dt_rank=self.dt_rank,
            expand=self.expand,
        )


def load_float32(run: Path, step: int | None, *, mesh: Mesh | None = None) -> LoadedRun:
    """Loads a run with its weights in float32, in which surgery computes."""
    loaded = load_run(run, step=step, mesh=mesh, report=say)
    model = in_weight_dtype(loaded.model, "float32")
    if model is loaded.model:
        return loaded
    say(f"{run}: the bfloat16 weights become float32, in which surgery computes")
    return loaded._replace(model=model)


def run_to_recurformer(argv: list[str]) -> int:
    """Runs `recurjax convert to-recurformer ARGV`."""
    options = parse(ToRecurFormer, argv, prog="recurjax convert to-recurformer")
    refuse_existing(options.out)
    heads = None if options.heads is None else read_heads(options.heads)
    loaded = load_float32(options.run, options.step)
    if is_recursive(loaded.model):
        loaded = loaded._replace(model=to_transformer(loaded.model))
        layers = loaded.model.config.stack.layers
        say(f"{options.run}: the loops are written out as {layers} layers")
    # Only where heads are chosen by measuring is there something to show.
    recency = None
    texts = (
        None
        if options.text is None
        else cut_text(options.text, options.samples, options.length, loaded)
    )
    if heads is None:
        assert texts is not None
        recency = _measured(options, loaded, texts)
        assert options.beta is not None
        heads = choose_heads(recency, options.beta, scope=options.scope)
    # The model without the chosen heads, its Mambas not trained yet.
    model = to_recurformer(loaded.model, heads, mamba=options.mamba, seed=options.seed)
    fits: list[MixerFit] = []
    if options.start == "fitted":
        assert texts is not None
        model, fits = fit_mixers(
            loaded.model,
            model,
            texts[: options.fit_samples],
            steps=options.fit_steps,
            rate=options.fit_rate,
            seed=options.seed,
            report=_say_fit,
        )
    _write(options, loaded, model, recency, fits)
    return 0


def write_changed_run(
    out: Path, loaded: LoadedRun, model: Decoder, extra: Callable[[Path], None]
) -> None:
    """Writes a changed run as a run directory, atomically."""
    # Data, optimizer and schedule stay, so that the same experiment trains on.
    objective = _fitting(loaded.experiment.objective, model.config)
    experiment = replace(
        loaded.experiment,
        name=out.absolute().name,
        model=model.config,
        objective=objective,
    )
    write_run(out, model, experiment, loaded.tokenizer, extra=extra)
    before, now = (
        type(each).__name__ for each in (loaded.experiment.objective, objective)
    )
    if before != now:
        say(f"{out}: its objective is {now}: {before} does not fit the new model")


def read_heads(file: Path) -> tuple[tuple[int, ...], ...]:
    """Reads which heads to replace: a list for each layer, or a heads.json.

    Raises:
      UserError: the file is missing or holds something else.
    """
    # heads.json of an earlier conversion can be used as it is.
    content = read_json(file, "the file of --heads")
    layers = content.get("replaced") if isinstance(content, dict) else content
    if not isinstance(layers, list) or not all(
        isinstance(heads, list) and all(type(head) is int for head in heads)
        for heads in layers
    ):
        raise UserError(
            f"--heads: {file} must hold a list of heads for each layer, such as "
            "[[0, 3], []]"
        )
    return tuple(tuple(sorted(heads)) for heads in layers)


def cut_text(
    text: Path, samples: int | None, length: int, loaded: LoadedRun
) -> np.ndarray:
    """Cuts a file's text into rows [samples, length], from its beginning.

    Args:
      samples: rows; None: as many as there are, `MOST_TEXTS` at most.
    """
    # A model cannot be measured on longer texts than it reads.
    reason = loaded.model.config.refuses_length(length, f"--length {length}")
    if reason is not None:
        raise UserError(reason)
    try:
        words = text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise UserError(f"--text: {text} cannot be read: {reason}") from error
    ids = loaded.tokenizer.encode(words)
    # Full rows only: in a shorter one the window would be another share.
    count = len(ids) // length
    if count < 1:
        raise UserError(
            f"--text: {text} has {len(ids)} tokens and a sample needs "
            f"{length}: use more text or a shorter --length"
        )
    if samples is not None and count < samples:
        say(f"{text} has {count} samples of {length} tokens only")
    count = min(count, samples or MOST_TEXTS)
    return ids[: count * length].reshape(count, length)


def _fitting(objective: Objective, model: ModelConfig) -> Objective:
    """Returns the objective, or the nearest to it that the changed model can have."""
    if objective.refuses(model) is None:
        return objective
    # Exits go with the loops, and what they were distilled from need not go with them.
    inner = getattr(objective, "distilled", None)
    nearest = NextToken() if inner is None or inner.refuses(model) else inner
    return replace(nearest, vocabulary_chunks=objective.vocabulary_chunks)


def _measured(
    options: ToRecurFormer, loaded: LoadedRun, texts: np.ndarray
) -> HeadRecency:
    assert options.beta is not None
    batches = [texts[n : n + BATCH] for n in range(0, len(texts), BATCH)]
    settled = (
        settled_choice(options.beta, options.scope)
        if options.samples is None
        else lambda recency: False
    )
    with progress_bar("texts measured", len(texts)) as advance:
        clock, done = time.monotonic(), 0

        def stop(recency: HeadRecency) -> bool:
            nonlocal clock, done
            advance(recency.texts - done)
            done, before, clock = recency.texts, clock, time.monotonic()
            # The first batch compiles: the second one says how long all of them take.
            if done == 2 * BATCH and len(batches) > 2:
                say(_estimate(options, texts, (clock - before) * len(batches)))
            return settled(recency)

        recency = measure_recency(
            loaded.model,
            batches,
            # In tokens, and at least one: within none, no head could be recent.
            window=max(1, int(options.window * options.length)),
            threshold=options.threshold,
            stop=stop,
        )
    if recency.texts < len(texts):
        say(f"the choice of heads has settled after {recency.texts} texts")
    return recency


def _estimate(options: ToRecurFormer, texts: np.ndarray, seconds: float) -> str:
    count = "" if options.samples is not None else "at most "
    end = "" if options.samples is not None else ", until the choice of heads settles"
    return (
        f"measuring heads on {count}{len(texts):,} texts of {options.length:,} tokens "
        f"takes {count}{seconds / 60:,.1f} minutes{end} (--samples, --length)"
    )


def _write(
    options: ToRecurFormer,
    loaded: LoadedRun,
    model: Any,
    recency: HeadRecency | None,
    fits: list[MixerFit],
) -> None:
    # The caches are compared where the model was trained to work.
    length = loaded.experiment.training.length
    changed = changes(model, length)
    report: dict[str, Any] = {
        "replaced": [list(heads) for heads in changed.replaced],
        "added_parameters": changed.added_parameters,
        "training_flops_per_token": {
            str(length): {"base": changed.base_flops, "changed": changed.flops}
        },
        "cache_share": {str(length): changed.cache_share},
    }
    if recency is not None:
        report |= {
            "beta": options.beta,
            "scope": options.scope,
            "window": max(1, int(options.window * options.length)),
            "threshold": options.threshold,
            "texts": recency.texts,
            "length": options.length,
            "recency_ratio": recency.ratio.tolist(),
            "ra_i": recency.count.tolist(),
            "first_token_share": recency.first.tolist(),
            "contribution": {
                norm: {
                    keys: recency.contributions[..., n, m].tolist()
                    for m, keys in enumerate(("first_token", "other_tokens"))
                }
                for n, norm in enumerate(("l1", "l2"))
            },
        }
    if fits:
        report["fits"] = [fit._asdict() for fit in fits]
    write_changed_run(
        options.out,
        loaded,
        model,
        lambda folder: _write_heads(folder, report, recency, changed.replaced),
    )
    print(
        f"{options.out}: {sum(map(len, changed.replaced))} of {changed.heads} heads "
        f"replaced, cache {changed.cache_share:.3f} of the original at {length} "
        f"tokens, {changed.added_parameters:+,} parameters, "
        f"{changed.flops / changed.base_flops:.3f} of the FLOPs a token"
    )


def _write_heads(
    folder: Path, report: dict[str, Any], recency: HeadRecency | None, replaced: Any
) -> None:
    text = json_text(report, indent=1) + "\n"
    (folder / "heads.json").write_text(text, encoding="utf-8")
    if recency is not None:
        plot_heads(recency, replaced, folder / "heads.png")


def _say_fit(fit: MixerFit) -> None:
    say(
        f"layer {fit.layer}: Mamba's error, as a share of the heads' outputs, "
        f"{fit.before:.3f} before the fit and {fit.after:.3f} after"
    )


def say(text: str) -> None:
    """Prints a message apart from the output."""
    print(text, file=sys.stderr)


ROWS = 4
"""Of the text that are scored at once."""
RANKS = (0, 64, 128, 256, 512)
"""The paper's ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ToRecursive(RangeChecks):
    """Converts a model into a recursive one: one block that runs several times.

    Writes a run directory with report.json and energy.png, which show for each matrix
    its distance from the shared one and the share that its LoRA recovers. Continue
    training with --training.start-from.

    Attributes:
      run: a run or an imported directory with a Transformer or a stack of RAT's mixers.
      out: the new run directory, written atomically.
      loops: how many times the block runs; must divide the layers.
      init: layers that initialize the block: stepwise, average, lower, upper or
        fixed_start; random: none.
      rank: rank of the LoRA of each depth; 0: no LoRA, so that every depth is the
        shared block. None: print the cost of each rank and end.
      adapters: initialization of the LoRA: svd, the best approximation of its rank to
        the original layer; zero, no change.
      sharing: the layer of the block that runs at each depth: cycle, sequence or
        cycle_rev.
      tie_norms: share norms and biases between loops, as in the paper.
      loop_cache: own: keys and values per loop; first: deeper loops read those of the
        first.
      fused_qkv: share the first LoRA factor between q, k and v.
      norms: initialization of shared norms: average, choice (one layer's) or zero;
        None: as the matrices.
      keep: if the loops do not divide the layers: evenly, first remove layers at equal
        distances; all, refuse.
      text: a UTF-8 file on which report.json gives the loss before and after.
      samples: rows of that text.
      length: tokens per row.
      seed: seed of a random block, and of a LoRA that starts at zero.
      step: training step of the checkpoint; None: the newest.
      mesh: devices that hold both models.
    """

    run: Annotated[Path, tyro.conf.Positional]
    out: Annotated[Path, tyro.conf.Positional]
    loops: PositiveInt
    init: BlockInit = "stepwise"
    rank: NonNegativeInt | None = None
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
    loaded = load_float32(options.run, options.step, mesh=mesh)
    # The text first: a file that cannot be read should stop it before the work.
    rows = (
        None
        if options.text is None
        else cut_text(options.text, options.samples, options.length, loaded)
    )
    # The loops take the layers of this model; the report has the full model's loss.
    base = loaded.model
    if options.keep == "evenly":
        base = with_evenly_kept_layers(base, options.loops, mesh=mesh)
    stack_of = partial(
        recursive_stack,
        base,
        loops=options.loops,
        sharing=options.sharing,
        tie_norms=options.tie_norms,
        loop_cache=options.loop_cache,
    )
    if options.rank is None:
        raise UserError(_costs(base.config, stack_of))
    stack = stack_of(rank=options.rank)
    # Each matrix of each layer gives its additions, and is compared at the end.
    count = matrices(base) * (2 if options.rank else 1)
    with progress_bar("matrices", count) as advance:
        model = to_recursive(
            base,
            stack,
            init=options.init,
            adapters=options.adapters,
            fused_qkv=options.fused_qkv,
            norms=options.norms,
            seed=options.seed,
            mesh=mesh,
            advance=advance,
        )
        # Measured between the matrices of the two models, not by training.
        energies = kept_energy(base, model, advance=advance)
    before, after = (
        count_parameters(each_model.config).total
        for each_model in (loaded.model, model)
    )
    written: dict[str, Any] = {
        "parameters": after,
        "parameters_before": before,
        "matrices": [energy._asdict() for energy in energies],
    }
    if rows is not None:
        written["text"] = str(options.text)
        written["tokens"] = int(rows[:, 1:].size)
        written["loss_before"], written["loss_after"] = (
            _loss(side, rows, loaded, mesh) for side in (loaded.model, model)
        )

    def report(folder: Path) -> None:
        # Written with the run, atomically.
        text = json_text(written, indent=1) + "\n"
        (folder / "report.json").write_text(text, encoding="utf-8")
        plot_energy(energies, folder / "energy.png")

    write_changed_run(options.out, loaded, model, report)
    print(f"{options.out}: {after:,} parameters, {before:,} before")
    if rows is not None:
        change = f"{written['loss_before']:.4f} to {written['loss_after']:.4f}"
        print(f"loss on {options.text}: {change} nats per token")
    return 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ToTransformer(RangeChecks):
    """Converts a recursive model into an ordinary one with all its layers.

    Attributes:
      run: the run directory of a recursive model.
      out: the new run directory, written atomically.
      step: training step of the checkpoint; None: the newest.
      mesh: devices that hold both models.
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
    loaded = load_float32(options.run, options.step, mesh=mesh)
    # Every depth gets matrices of its own, with its addition multiplied out.
    model = to_transformer(loaded.model, mesh=mesh)
    write_changed_run(options.out, loaded, model, lambda folder: None)
    layers = model.config.stack.layers
    print(f"{options.out}: an ordinary model of {layers} layers")
    return 0


def _costs(config: ModelConfig, stack_of: Callable[..., Any]) -> str:
    """Returns how many parameters each of the paper's ranks leaves."""
    before = count_parameters(config).total
    costs = []
    for rank in RANKS:
        size = count_parameters(replace(config, stack=stack_of(rank=rank))).total
        costs.append(f"{size / before:.0%} with --rank {rank}")
    return (
        f"--rank is missing: of {before:,} parameters there remain {', '.join(costs)}; "
        "with 0 all loops are one block, which must be trained before it predicts "
        "text, and a larger rank starts nearer to the model"
    )


def _loss(model: Decoder, rows: np.ndarray, loaded: LoadedRun, mesh: Mesh) -> float:
    """Returns nats per token; every row starts without context."""
    # Inputs and their next tokens, a few rows at a time.
    batches = (
        Batch(jnp.asarray(part[:, :-1]), jnp.asarray(part[:, 1:]))
        for part in np.array_split(rows, -(-len(rows) // ROWS))
    )
    sizes = loaded.tokenizer.token_bytes
    with jax.set_mesh(mesh):
        return score(model, batches, token_bytes=sizes).loss
