"""Needles after fine-tuning: RAT's table 12, for any model.

Makes 1,000 problems of each of RULER's eight kinds of needles with the run's own
tokenizer, continues with the run for one epoch of them (rate 1e-5, weight decay 0.01,
128 rows per step, loss on the answers) and tests on others. `share_of_set` is RAT's
score, the share of each problem's answers that stand between the commas of what is
generated; `same_characters` counts the answers' characters that stand in their places,
so that it rises before a complete answer is right. Needs pip install
'recurjax[harness,ruler]'. The needles hide in the embedded text unless --haystack says
otherwise: RULER's essays are in no package, so models compare here and not with the
paper. The same command resumes a call that was stopped.

    python experiments/rat/sft_needles.py runs/rat_fineweb_4k_rat16 --out runs/needles

A small model that never learned recall does not learn it from answers alone. `--loss
all` makes it predict the problems too, whose questions repeat a needle's words:

    python experiments/rat/sft_needles.py runs/mine --kinds niah_single_1 --loss all \
        --rows 20000 --batch 16 --rate 3e-3 --length 640 --seeds 3
"""

import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import tyro
from rich.console import Console

from recurjax.cli.options import parse, run_script
from recurjax.data.config import Bytes, DataConfig, PromptAnswer, TokenizerFile
from recurjax.data.tokenizers import Tokenizer
from recurjax.errors import UserError
from recurjax.evaluation.evaluator import Evaluator
from recurjax.evaluation.journal import Journal
from recurjax.evaluation.offline_tasks.needles import NEEDLES, NeedleTask, read_haystack
from recurjax.evaluation.rows import append_rows
from recurjax.experiment import Experiment
from recurjax.files.atomic import write_atomic
from recurjax.machine import host
from recurjax.training.config import EvaluationConfig
from recurjax.training.loop import train
from recurjax.training.optimizers import AdamW, Cosine
from recurjax.training.run import load_run
from recurjax.training.sweep import seeded, table_of, tell


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Fine-tunes a run on needles and tests it on others.

    Attributes:
      run: run directory to start from.
      out: gets the problems, a run directory `needles` for each seed, and results.md.
      kinds: kinds of needles; empty: all eight.
      length: tokens of a problem and its answer; None: as the run was trained.
      loss: what is learned of a problem: "answer" or "all" of it.
      rows: problems of each kind to learn from.
      items: items of each kind in the test.
      batch: rows per step.
      rate: peak learning rate.
      seeds: fine-tunings, each with the problems in another order.
      haystack: a text file; None: the embedded text.
    """

    run: Annotated[Path, tyro.conf.Positional]
    out: Path = Path("runs/needles")
    kinds: tuple[str, ...] = ()
    length: int | None = None
    loss: Literal["answer", "all"] = "answer"
    rows: int = 1000
    items: int = 500
    batch: int = 128
    rate: float = 1e-5
    seeds: int = 1
    haystack: Path | None = None

    def __post_init__(self):
        if min(self.rows, self.items, self.batch, self.seeds) < 1:
            raise UserError("--rows, --items, --batch and --seeds must be at least 1")
        if unknown := [kind for kind in self.kinds if kind not in NEEDLES]:
            raise UserError(
                f"--kinds must be among {', '.join(NEEDLES)}, got {', '.join(unknown)}"
            )

    @property
    def tasks(self) -> tuple[str, ...]:
        """The kinds of needles."""
        return self.kinds or tuple(NEEDLES)

    def problems(self, *, tokens: int, text: str) -> Path:
        """The file of the problems, whose name depends on what they are made of."""
        made_of = json.dumps([str(self.run), self.tasks, tokens, self.rows, text])
        digest = hashlib.sha256(made_of.encode()).hexdigest()
        return self.out / f"problems_{digest[:8]}.jsonl"


def write_problems(
    file: Path,
    tokenizer: Tokenizer,
    *,
    kinds: Sequence[str],
    tokens: int,
    rows: int,
    text: str,
) -> int:
    """Writes problems of some kinds, mixed, as JSON lines; returns how many."""
    lines = []
    for task in kinds:
        maker = NeedleTask(task=task, tokens=tokens, tokenizer=tokenizer, text=text)
        for number in range(rows):
            item = maker.item(number, split="train")
            answer = " " + ", ".join(item.answers)
            lines.append(json.dumps({"prompt": item.prompt, "answer": answer}) + "\n")
    order = np.random.default_rng(0).permutation(len(lines))
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(file, "".join(lines[at] for at in order))
    return len(lines)


def fine_tuned(run: Experiment, options: Options, problems: Path) -> Experiment:
    """Returns one epoch on the problems, from the run's newest checkpoint."""
    held_out = 0.02
    count = len(options.tasks) * options.rows
    steps = max(1, round((1 - held_out) * count / options.batch))
    tokenizer = getattr(run.data, "tokenizer", None)
    if not isinstance(tokenizer, Bytes):
        # The run's own file: one that is trained would be trained on the problems.
        tokenizer = TokenizerFile(path=str(options.run / "tokenizer"))
    return replace(
        run,
        name="needles",
        data=DataConfig(
            corpus=PromptAnswer(patterns=(str(problems),), loss=options.loss),
            tokenizer=tokenizer,
            validation_fraction=held_out,
        ),
        optimizer=AdamW(
            learning_rate=options.rate, b2=0.95, weight_decay=0.01, decay="all"
        ),
        schedule=Cosine(warmup_steps=round(0.05 * steps), end=0.1),
        training=replace(
            run.training,
            steps=steps,
            batch=options.batch,
            length=options.length or run.training.length,
            start_from=str(options.run),
        ),
        evaluation=EvaluationConfig(batches=4),
    )


def main(argv: list[str] | None = None) -> int:
    """Makes the problems, trains, tests and prints the table."""
    # Needs a package that not everybody has.
    from recurjax.evaluation.harness import HarnessModel, evaluate_harness

    argv = sys.argv[1:] if argv is None else argv
    options = parse(Options, argv, prog="sft_needles.py")
    console = Console(stderr=True)
    start = load_run(options.run, report=console.print)
    tokens = options.length or start.experiment.training.length
    files = () if options.haystack is None else (options.haystack,)
    haystack = read_haystack(files, seed=42)
    problems = options.problems(tokens=tokens, text=haystack.text)
    if not problems.is_file():
        write_problems(
            problems,
            start.tokenizer,
            kinds=options.tasks,
            tokens=tokens,
            rows=options.rows,
            text=haystack.text,
        )
    scores: dict[str, list[dict[str, float]]] = {}
    for seed in range(options.seeds):
        run = seeded(fine_tuned(start.experiment, options, problems), seed)
        root = options.out / run.name
        console.rule(run.name)
        if train(run, root, console=console).outcome != "finished":
            console.print("stopped: the same command goes on from here")
            return 130
        loaded = load_run(root, report=console.print)
        journal = Journal(root / "needles_answers.jsonl")
        evaluator = Evaluator(
            model=loaded.model,
            tokenizer=loaded.tokenizer,
            step=loaded.step,
            window=tokens,
            journal=journal,
        )
        _, rows = evaluate_harness(
            HarnessModel(evaluator),
            [f"offline_{kind}" for kind in options.tasks],
            limit=options.items,
            haystack=haystack,
        )
        append_rows(root, rows)
        journal.close()
        for row in rows:
            tell(scores, row.task, seed, {row.metric: row.value})
        table = table_of("needles", scores)
        write_atomic(options.out / "results.md", table)
    print(table, end="")
    return 0


if __name__ == "__main__":
    host.prepare()
    run_script(main)
