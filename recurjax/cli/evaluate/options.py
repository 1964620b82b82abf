"""The options of `recurjax evaluate`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from recurjax.errors import UserError
from recurjax.evaluation.exit_scores import check_thresholds
from recurjax.ranges import LARGEST_BATCH
from recurjax.sharding import MeshConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluate:
    """Scores a text or a benchmark with a trained model and prints JSON.

    Without --core, --harness, --requests or --task it is a text, or the run's own
    data. The figures are also appended to RUN/evaluations.jsonl; the same command
    resumes an evaluation that was killed.

    Attributes:
      run: the run directory, also in a bucket (gs://, s3://).
      text: a text file; without one, a split of the run's own data.
      split: of the data, without `text`.
      length: tokens a row; each row starts without context. None: as in training. Of
        the harness: what is read at once of texts that are longer; of its tasks
        offline_niah_... and offline_longbench_...: tokens of a prompt and its answer.
      batch: rows at a time.
      batches: scores the first so many batches; None: the whole split.
      tokens: or the first batches that hold so many tokens.
      positions: also the loss by position, one figure for this many positions; with
        --length beyond that of training it shows how the model generalises.
      plot: draws the loss by position, or a task's accuracies by pairs, length or
        place, into this PNG file.
      exits: of a recursive model, scores what leaving early costs: each rule at several
        thresholds, mean loops, agreement with the full model; --plot draws the trade.
      thresholds: of all rules in place of each one's own, from 0 to 1.
      most_loss: nats a token; names the threshold of each rule with the fewest loops
        that stays within it.
      fit_head: first train an exit head on so many batches of the run's training text,
        and write it into the run as exit_head.npz.
      loops: score the model of the first so many loops of a recursive one.
      core: scores no text but in-context learning: the folder of a CORE bundle as
        nanochat has it, or a folder of prepared task files, or one of them.
      core_limit: so many items of each task; None: all.
      harness: tasks of lm-evaluation-harness with commas between; those that begin
        with "offline_" need no network. Needs pip install 'recurjax[harness]'.
      fewshot: of the harness: examples shown before an item; None: as the task says.
      include: a folder with further tasks of the harness.
      requests: files of ready requests, as 'DIR/*/rc_0shot/requests.jsonl.gz'; may be
        given several times.
      haystack: text files that the needles of the tasks offline_niah_... hide in; may
        be given several times. None: the embedded text.
      longbench: the folder of the tasks offline_longbench_...: `data` in LongBench's
        data.zip. They need pip install 'recurjax[longbench]'.
      task: the test of a synthetic task: mqar, hash_hop, copy, s3, s5, parity,
        mad_noisy_recall and MAD's others; of a run that was trained on it, its own.
      seed: of needles, and of a task's rows where the run has none of its own.
      limit: so many items of each task of the harness and of requests, and rows of each
        setting of a task; None: all; of needles 500.
      bos: put the tokenizer's BOS, if it has one, before what is asked.
      table: print what RUN/evaluations.jsonl has as a Markdown table, and do no more.
      step: of the checkpoint; None: the newest.
      json: also write the JSON to this file.
      mesh: devices that the model lies on; of several processes the first one reports.
    """

    run: Annotated[Path, tyro.conf.Positional]
    text: Path | None = None
    split: Literal["validation", "train"] = "validation"
    length: int | None = None
    batch: int = 32
    batches: int | None = None
    tokens: int | None = None
    positions: int | None = None
    plot: Path | None = None
    exits: bool = False
    thresholds: tuple[float, ...] | None = None
    most_loss: float | None = None
    fit_head: int | None = None
    loops: int | None = None
    core: Path | None = None
    core_limit: int | None = None
    harness: str | None = None
    fewshot: int | None = None
    include: Path | None = None
    requests: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    haystack: tyro.conf.UseAppendAction[tuple[Path, ...]] = ()
    longbench: Path | None = None
    task: str | None = None
    seed: int = 42
    limit: int | None = None
    bos: bool = True
    table: bool = False
    step: int | None = None
    json: Path | None = None
    mesh: MeshConfig = MeshConfig(data=1)

    # What contradicts itself is told before a model is read.
    def __post_init__(self):
        if self.batch < 1 or (self.length is not None and self.length < 1):
            raise UserError(
                "--batch and --length must be at least 1, got "
                f"{self.batch} and {self.length}"
            )
        if self.batch * (self.length or 1) > LARGEST_BATCH:
            raise UserError(
                f"--batch {self.batch} x --length {self.length or 1} is more than "
                "2^28 tokens at a time: lower one of them"
            )
        if self.batches is not None and self.tokens is not None:
            raise UserError("--batches and --tokens both set an end: give one of them")
        for name in ("batches", "tokens"):
            if (given := getattr(self, name)) is not None and given < 1:
                raise UserError(f"--{name} must be at least 1, got {given}")
        if self.positions is not None and self.positions < 1:
            raise UserError(f"--positions must be at least 1, got {self.positions}")
        # A single figure makes no picture; these have a curve each.
        draws = self.positions is not None or self.task is not None or self.exits
        if self.plot is not None and not draws:
            raise UserError(
                "--plot draws the loss by position: add --positions, or --task for a "
                "task's accuracies, or --exits for their trade"
            )
        self._check_kind()
        self._check_exits()
        if self.core_limit is not None and (self.core is None or self.core_limit < 1):
            raise UserError("--core-limit must be at least 1 and goes with --core")
        # CORE has a limit of its own.
        asks = [kind for kind in self.kinds if kind != "core"]
        if self.limit is not None and (not asks or self.limit < 1):
            raise UserError(
                "--limit must be at least 1 and goes with --harness, --requests or "
                "--task"
            )
        # Options of one kind of evaluation mean nothing to the others.
        if not 0 <= self.seed < 2**32:
            raise UserError(f"--seed must be from 0 to 2^32 - 1, got {self.seed}")
        for name in ("fewshot", "include", "longbench", "haystack"):
            if getattr(self, name) not in (None, ()) and self.harness is None:
                raise UserError(f"--{name} goes with --harness")
        if self.fewshot is not None and self.fewshot < 0:
            raise UserError(f"--fewshot must be at least 0, got {self.fewshot}")
        if self.include is not None and not self.include.is_dir():
            raise UserError(f"--include: there is no directory {self.include}")
        # Asked now, not after an hour of scoring.
        for name in ("json", "plot"):
            file = getattr(self, name)
            if file is not None and not file.parent.is_dir():
                raise UserError(f"--{name}: there is no directory {file.parent}")

    @property
    def kinds(self) -> list[str]:
        """What is asked for beside a text."""
        kinds = ("core", "harness", "requests", "task")
        return [name for name in kinds if getattr(self, name)]

    def _check_exits(self) -> None:
        if self.exits and (self.kinds or self.positions is not None):
            words = [f"--{kind}" for kind in self.kinds] or ["--positions"]
            raise UserError(f"--exits scores a text: leave out {words[0]}")
        if self.exits and self.mesh != MeshConfig(data=1):
            raise UserError("--exits runs on one device: leave out --mesh")
        for name in ("thresholds", "most_loss", "fit_head"):
            if getattr(self, name) is not None and not self.exits:
                raise UserError(f"--{name.replace('_', '-')} goes with --exits")
        check_thresholds(self.thresholds or ())
        if self.fit_head is not None and self.fit_head < 1:
            raise UserError(f"--fit-head must be at least 1, got {self.fit_head}")

    def _check_kind(self) -> None:
        if len(self.kinds) > 1:
            raise UserError(
                f"--{' and --'.join(self.kinds)} are evaluations of their own: give "
                "one of them"
            )
        # They choose a text or a part of it, and a benchmark brings its own.
        of_text = ["text", "length", "positions", "batches", "tokens"]
        # For those that read long texts, length is theirs.
        if self.harness or self.task:
            of_text.remove("length")
        if self.task and self.split != "validation":
            raise UserError("--task reads the task's test: leave out --split")
        if self.kinds and any(getattr(self, name) for name in of_text):
            words = [f"--{name}" for name in of_text]
            raise UserError(
                f"--{self.kinds[0]} scores tasks: leave out {', '.join(words[:-1])} "
                f"and {words[-1]}"
            )
