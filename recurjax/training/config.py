"""Configs of training and evaluation: how long, in what batches, what to keep."""

import math
import re
from dataclasses import dataclass, field

from recurjax.errors import UserError
from recurjax.ranges import (
    LARGEST_BATCH,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    RangeChecks,
    Seed,
    check_ranges,
)
from recurjax.training.spikes import SpikeConfig

ADAPTER_PARAMETERS = r"\.lora_[ab]$"
"""Matches the names of an adapter's parameters."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterConfig(RangeChecks):
    """Adapters x W + s (x A) B: the matrices that get one, and its size.

    Attributes:
      rank: R; 0: no adapters.
      alpha: s = alpha / R; None: R, so that s = 1.
      names: names of matrices, without w_: q, k, v, out, up, gate, down, or any other
        that the stack has; (): attention's, the MLP's and Mamba's projections.
      rank_stabilized: s = alpha / sqrt(R) (Kalajdzievski 2023).
    """

    rank: NonNegativeInt
    alpha: PositiveFloat | None = None
    names: tuple[str, ...] = ()
    rank_stabilized: bool = False

    @property
    def scale(self) -> float:
        """s, the factor of (x A) B."""
        alpha, rank = self.alpha or float(self.rank), max(self.rank, 1)
        return alpha / (math.sqrt(rank) if self.rank_stabilized else rank)


def parse_adapters(text: str) -> AdapterConfig:
    """Reads `lora:16`, `lora:16:32` or `rslora:16:32:q,v`.

    Raises:
      UserError: it has another form.
    """
    match = re.fullmatch(
        r"(rs)?lora:([1-9]\d*)(?::(\d+(?:\.\d+)?)?(?::(\w+(?:,\w+)*))?)?", text
    )
    if match is None:
        raise UserError(
            "training.adapters must be lora:RANK[:ALPHA][:NAMES] or rslora:..., such "
            f"as lora:16:32:q,v, got {text!r}"
        )
    stabilized, rank, alpha, names = match.groups()
    return AdapterConfig(
        rank=int(rank),
        alpha=float(alpha) if alpha else None,
        names=tuple(names.split(",")) if names else (),
        rank_stabilized=stabilized is not None,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingConfig:
    """Length of the run, batches, what is trained, checkpoints and logging.

    Attributes:
      steps: number of optimizer steps.
      batch: rows per step, over all devices and accumulation parts.
      length: T, the tokens of a row.
      carry: steps over which a row's cache is carried. Rows have carry x length tokens,
        of which each step reads the next `length` with the cache of those before;
        gradients stop where a step begins. 1: every step reads rows of their own.
      accumulation: number of parts of the batch that go through the model one after
        another, to lower peak memory.
      gradient_clip: largest global norm of the gradient; None: no clipping.
      seed: seed of the initial parameters and of texts sampled in evaluations.
      start_from: run directory whose newest checkpoint gives the initial parameters,
        such as one that `recurjax convert` imported. Model and tokenizer must be the
        same. It is not read again once this run has a checkpoint. None: random
        parameters.
      train_only: regular expression: train only parameters whose names match, such as
        mamba for the new parameters of a RecurFormer. The others stay bit-identical and
        need no optimizer state. None: train all.
      adapters: train LoRA adapters of the model of start_from, which stays frozen:
        lora:RANK[:ALPHA][:NAMES], such as lora:16 or lora:16:32:q,v. NAMES are matrices
        without their w_, by default the projections of attention, MLP and Mamba; ALPHA
        is RANK by default. rslora:... scales by ALPHA / sqrt(RANK) instead of ALPHA /
        RANK. Parameters that match train_only are trained too. Checkpoints hold only
        what is trained and the name of start_from. None: no adapters.
      log_every: steps between rows of metrics.jsonl.
      checkpoint_every: steps between checkpoints; the last step always has one.
      keep_checkpoints: number of newest checkpoints to keep, in addition to the best.
      spikes: when to skip a step and when to stop.
      profile: first and last step of a profiler trace in the run directory; None: no
        trace.
      deterministic: request deterministic GPU operations from XLA (slower), so that
        runs and resumed runs agree bit for bit on GPUs too.
      wandb_project: Weights & Biases project to log to as well (needs the extra
        `wandb`); None: none.
      wandb_group: Weights & Biases group of the run; None: none.
      wandb_tags: Weights & Biases tags of the run.
      mlflow_experiment: MLflow experiment to log to as well (needs the extra `mlflow`);
        None: none.
    """

    steps: PositiveInt
    batch: PositiveInt
    length: PositiveInt
    carry: PositiveInt = 1
    accumulation: PositiveInt = 1
    gradient_clip: PositiveFloat | None = 1.0
    seed: Seed = 0
    start_from: str | None = None
    train_only: str | None = None
    adapters: str | None = None
    log_every: PositiveInt = 10
    checkpoint_every: PositiveInt = 1000
    keep_checkpoints: PositiveInt = 3
    spikes: SpikeConfig = field(default_factory=SpikeConfig)
    profile: tuple[PositiveInt, PositiveInt] | None = None
    deterministic: bool = False
    wandb_project: str | None = None
    wandb_group: str | None = None
    wandb_tags: tuple[str, ...] = ()
    mlflow_experiment: str | None = None

    def __post_init__(self):
        check_ranges(self)
        if self.tokens_per_step > LARGEST_BATCH:
            raise UserError(
                f"training.batch {self.batch} x training.length {self.length} "
                "exceeds 2^28 tokens per step: lower one of them"
            )
        # Every part has the same rows, or the compiled step would serve some and not
        # others.
        if self.batch % self.accumulation:
            raise ValueError(
                f"training.batch must be a multiple of training.accumulation, got "
                f"{self.batch} and {self.accumulation}"
            )
        if self.train_only is not None:
            try:
                re.compile(self.train_only)
            except re.error as error:
                raise ValueError(
                    f"training.train_only must be a regular expression: {error} in "
                    f"{self.train_only!r}"
                ) from error
        if self.adapters is not None:
            parse_adapters(self.adapters)
            if self.start_from is None:
                raise UserError(
                    "training.adapters needs a model to adapt: name its run with "
                    "--training.start-from"
                )
        # The trace ends after `last`, so both ends are in it.
        if self.profile is not None and self.profile[0] > self.profile[1]:
            raise ValueError(
                "training.profile must be (first, last) with first <= last, got "
                f"{self.profile}"
            )

    @property
    def trained(self) -> str | None:
        """A pattern of the names of what is trained; None: everything."""
        if self.adapters is None or self.train_only is None:
            return self.train_only if self.adapters is None else ADAPTER_PARAMETERS
        return f"{ADAPTER_PARAMETERS}|{self.train_only}"

    @property
    def row_length(self) -> int:
        """Tokens of a row of the data, which `carry` steps read."""
        return self.carry * self.length

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one optimizer step reads."""
        return self.batch * self.length


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationConfig(RangeChecks):
    """Validation and sampled texts, every `every` steps and after the last.

    Attributes:
      every: steps between evaluations; 0: only after the last step.
      batch: rows per batch; None: training.batch / training.accumulation.
      batches: number of batches; None: the full validation split.
      sample_prompts: prompts to continue after each evaluation; the texts go to
        samples.txt.
      sample_tokens: tokens of each continuation.
      temperature: sampling temperature of the continuations; 0: greedy.
    """

    every: NonNegativeInt = 0
    batch: PositiveInt | None = None
    batches: PositiveInt | None = None
    sample_prompts: tuple[str, ...] = ()
    sample_tokens: PositiveInt = 200
    temperature: NonNegativeFloat = 0.8
