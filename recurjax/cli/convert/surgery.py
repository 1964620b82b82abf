"""`recurjax convert to-recurformer`, and what conversions of a run have in common."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import tyro

from recurjax.cli.options import parse
from recurjax.convert.imported_run import write_run
from recurjax.errors import UserError
from recurjax.files.atomic import refuse_existing
from recurjax.files.json_files import json_text, read_json
from recurjax.model import Decoder, ModelConfig
from recurjax.ranges import (
    Fraction,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Range,
    Seed,
    check_ranges,
)
from recurjax.surgery.recency import (
    HeadRecency,
    Scope,
    choose_heads,
    measure_recency,
    plot_heads,
)
from recurjax.surgery.recurformer import (
    MambaConfig,
    MixerFit,
    changes,
    fit_mixers,
    to_recurformer,
)
from recurjax.training.objective import NextToken, Objective
from recurjax.training.run import LoadedRun, load_run

BATCH = 4
"""Texts that are measured at once: a head's weights of so many exist together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ToRecurFormer:
    """Replaces the heads that look at what came just before, and keeps the rest.

    Writes a run directory with heads.json (each head's recency and what was chosen) and
    heads.png. Train on with --training.start-from.

    Attributes:
      run: a run or an imported directory with a Transformer.
      out: the new run directory; it appears whole or not at all.
      beta: share of the heads to replace, from 0 to 1.
      scope: heads: the most recent of the whole model; groups: whole groups of a key
        head, which frees caches under grouped queries; layer: as many in each layer.
      window: how far back counts as recent, as a share of the text's length.
      threshold: a head is recent in a text where its ratio exceeds this.
      samples: texts to measure on.
      length: tokens of a text.
      text: a UTF-8 file to cut them from.
      heads: a JSON file with a list of heads for each layer instead, or a heads.json.
      dt_rank, state, conv, expand: of Mamba.
      seed: of its first weights.
      start: plain: as Mamba's authors start it; fitted: each layer's Mamba then learns
        on --text what the replaced heads made of the same values.
      fit_samples: of the texts, the first so many: a layer's values and outputs of all
        of them are in memory at once.
      fit_steps: of each layer, on four texts.
      fit_rate: Adam's first rate there; it falls to 0.
      step: of the checkpoint; None: the newest.
    """

    run: Annotated[Path, tyro.conf.Positional]
    out: Annotated[Path, tyro.conf.Positional]
    beta: Fraction | None = None
    scope: Scope = "heads"
    window: Annotated[float, Range(above=0, below=1)] = 0.1
    threshold: Annotated[float, Range(above=0, below=1)] = 0.5
    samples: PositiveInt = 1024
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
                "say which heads go: --beta SHARE, measured on --text, or --heads FILE"
            )
        if self.beta is not None and self.text is None:
            raise UserError("--beta is measured on a text: name one with --text")
        if self.start == "fitted" and self.text is None:
            raise UserError("--start fitted needs a text: name one with --text")

    @property
    def mamba(self) -> MambaConfig:
        """Sizes of Mamba; its width follows from the heads replaced."""
        return MambaConfig(
            conv=self.conv,
            state=self.state,
            dt_rank=self.dt_rank,
            expand=self.expand,
        )


def run_to_recurformer(argv: list[str]) -> int:
    """Runs `recurjax convert to-recurformer ARGV`."""
    options = parse(ToRecurFormer, argv, prog="recurjax convert to-recurformer")
    refuse_existing(options.out)
    given = None if options.heads is None else read_heads(options.heads)
    loaded = load_run(options.run, step=options.step, report=say)
    # Only where heads are chosen by measuring is there something to show.
    recency = None
    texts = (
        None
        if options.text is None
        else cut_text(options.text, options.samples, options.length, loaded)
    )
    if given is None:
        assert texts is not None
        recency = _measured(options, loaded, texts)
        assert options.beta is not None
        given = choose_heads(recency, options.beta, scope=options.scope)
    # The model without the chosen heads, its Mambas not trained yet.
    model = to_recurformer(loaded.model, given, mamba=options.mamba, seed=options.seed)
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
    """Writes what a run has become as a run directory, whole or not at all."""
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
    found = read_json(file, "the file of --heads")
    layers = found.get("replaced") if isinstance(found, dict) else found
    if not isinstance(layers, list) or not all(
        isinstance(heads, list) and all(type(head) is int for head in heads)
        for heads in layers
    ):
        raise UserError(
            f"--heads: {file} must hold a list of heads for each layer, such as "
            "[[0, 3], []]"
        )
    return tuple(tuple(sorted(heads)) for heads in layers)


def cut_text(text: Path, samples: int, length: int, loaded: LoadedRun) -> np.ndarray:
    """Cuts a file's text into rows [samples, length], from its beginning."""
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
    # Whole rows only: in a shorter one the window would be another share.
    count = len(ids) // length
    if count < 1:
        raise UserError(
            f"{text} has {len(ids)} tokens, a sample needs {length}: "
            "use more text or a shorter --length"
        )
    if count < samples:
        say(f"{text} has {count} samples of {length} tokens only")
    count = min(count, samples)
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
    batches = [texts[n : n + BATCH] for n in range(0, len(texts), BATCH)]
    return measure_recency(
        loaded.model,
        batches,
        # In tokens, and at least one: within none, no head could be recent.
        window=max(1, int(options.window * options.length)),
        threshold=options.threshold,
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
    told: dict[str, Any] = {
        "replaced": [list(heads) for heads in changed.replaced],
        "added_parameters": changed.added_parameters,
        "training_flops_per_token": {
            str(length): {"base": changed.base_flops, "changed": changed.flops}
        },
        "cache_share": {str(length): changed.cache_share},
    }
    if recency is not None:
        told |= {
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
        told["fits"] = [fit._asdict() for fit in fits]
    write_changed_run(
        options.out,
        loaded,
        model,
        lambda folder: _write_heads(folder, told, recency, changed.replaced),
    )
    print(
        f"{options.out}: {sum(map(len, changed.replaced))} of {changed.heads} heads "
        f"replaced, cache {changed.cache_share:.3f} of the original at {length} "
        f"tokens, {changed.added_parameters:+,} parameters, "
        f"{changed.flops / changed.base_flops:.3f} of the FLOPs a token"
    )


def _write_heads(
    folder: Path, told: dict[str, Any], recency: HeadRecency | None, replaced: Any
) -> None:
    text = json_text(told, indent=1) + "\n"
    (folder / "heads.json").write_text(text, encoding="utf-8")
    if recency is not None:
        plot_heads(recency, replaced, folder / "heads.png")


def _say_fit(fit: MixerFit) -> None:
    say(
        f"layer {fit.layer}: Mamba's error, as a share of the heads' outputs, "
        f"{fit.before:.3f} before the fit and {fit.after:.3f} after"
    )


def say(text: str) -> None:
    """Tells beside the output."""
    print(text, file=sys.stderr)
