"""`recurjax train EXPERIMENT [--field value ...]`: train, or resume.

--corpus and --tokenizer put somebody's own text in the place of the experiment's.
"""

import dataclasses
import os
from pathlib import Path
from typing import Any

from recurjax.cli.options import override, parse, shows_usage
from recurjax.data.config import Prepared
from recurjax.data.corpus_options import (
    CorpusOptions,
    name_of,
    own_tokenizer,
    vocabulary_of,
)
from recurjax.data.tasks.dataset import TaskData
from recurjax.errors import UserError
from recurjax.experiment import Experiment
from recurjax.files.storage import url_of
from recurjax.machine import host, process_group
from recurjax.machine.distributed import start_processes
from recurjax.run_table import load_experiment

_USAGE = """usage: recurjax train EXPERIMENT [--option value ...]

  recurjax train quickstart --training.steps 500 --optimizer.learning-rate 1e-3
  recurjax train quickstart --corpus 'books/*.txt' --tokenizer bpe:4096

EXPERIMENT is one of
  NAME          an experiment that `recurjax experiments` lists, such as quickstart or
                rat:fineweb_4k_rat16
  FILE.py       a Python file with a function config()
  FILE.py:NAME  a row of the table RUNS of a Python file (FILE.py alone lists the rows)

Every field of the experiment is an option; `recurjax train EXPERIMENT --help` lists
them. The run is written to runs/<name>, or DIR/<name> with --runs DIR. The same command
resumes a run that was stopped.

Train on your own text:
  --corpus FILES    text, JSON lines, Parquet or ArrayRecord files (.gz too), quoted
                    globs, a folder, the output of `recurjax data prepare`, or files of
                    the Hugging Face Hub ('hf://datasets/OWNER/NAME/**/*.parquet')
  --tokenizer NAME  bpe:4096, bytes, a tokenizer.json or a folder with a tokenizer
  --field NAME      the field or column with the text
  --separator TEXT  the string between two documents of a text file
  --format, --split as in `recurjax data prepare`
The run's name and the model's vocabulary follow from these, unless --name and
--model.vocabulary set them."""


def run(argv: list[str]) -> int:
    """Runs the command."""
    if shows_usage(argv, _USAGE):
        return 0
    file = argv[0]
    if file.startswith("-"):
        raise UserError(
            f"name the experiment before {file}: recurjax train EXPERIMENT [options]"
        )
    # First of all: what one process is refused from here on, all learn at once.
    start_processes()
    try:
        return _train(file, argv[1:])
    except (Exception, KeyboardInterrupt) as error:
        process_group.leave(error)
        raise


def _train(file: str, options: list[str]) -> int:
    # Own options first: what is left are fields of the experiment.
    runs, options = _take_runs(options)
    prog = f"recurjax train {file}"
    default, options = with_own_text(load_experiment(file), options, prog=prog)
    if "--help" in options or "-h" in options:
        print(_most_used(default))
    experiment = override(default, options, prog=prog)
    experiment = _with_fitting_warmup(experiment, default, options)
    if experiment.training.deterministic:
        # An XLA flag, which counts only before devices are looked for.
        flags = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = f"{flags} --xla_gpu_deterministic_ops=true".strip()
    host.start_cpu_devices(experiment.mesh.least_devices)
    # Imported late: the settings above count only before jax looks for devices.
    import recurjax.data.pipeline  # noqa: F401  slow: before the run's folder is made
    from recurjax.training.loop import train

    # One slash, whether a path or a URL. No shell expands the ~ of --runs=~/x.
    root = f"{os.path.expanduser(runs) or '.'}/{experiment.name}"
    if (url := url_of(root)) is not None:
        result = _train_in_bucket(experiment, url)
    else:
        result = train(experiment, Path(root))
    if result.outcome == "finished":
        print(f"finished at step {result.step}: {root}")
        return 0
    print(
        f"{result.outcome} at step {result.step}, saved in {root}: run the same "
        "command again to resume"
    )
    return 130 if result.outcome == "interrupted" else 0


MOST_USED = (
    *("name", "training.steps", "training.batch", "training.length"),
    *("training.accumulation", "optimizer.learning_rate", "schedule.warmup_steps"),
    *("model.stack.layers", "model.stack.width", "model.dtype", "evaluation.every"),
    *("mesh.data", "mesh.fsdp", "mesh.tensor"),
)
"""Fields that `--help` lists before all others, where the experiment has them."""


def _most_used(experiment: Experiment) -> str:
    lines = ["most used options, with this experiment's values (all options below)"]
    for path in MOST_USED:
        value: Any = experiment
        for name in path.split("."):
            value = getattr(value, name, None)
        if value is not None:
            lines.append(f"  --{path.replace('_', '-'):<28} {value}")
    lines.append("  --corpus FILES, --tokenizer bpe:4096  train on your own text")
    return "\n".join([*lines, f"  {'--runs DIR':<30} where runs are written", ""])


def _with_fitting_warmup(
    experiment: Experiment, default: Experiment, options: list[str]
) -> Experiment:
    """Shortens the warm-up of a run of fewer steps in proportion, unless it is given.

    Args:
      experiment: the default with the options' values.
    """
    steps, full = experiment.training.steps, default.training.steps
    warmup = experiment.schedule.warmup_steps
    named = {word.split("=", 1)[0].replace("_", "-") for word in options}
    if steps >= full or not warmup or "--schedule.warmup-steps" in named:
        return experiment
    shorter = round(warmup * steps / full)
    print(
        f"{steps} steps instead of {full}: the warm-up takes {shorter} instead of "
        f"{warmup} (--schedule.warmup-steps sets it)"
    )
    schedule = dataclasses.replace(experiment.schedule, warmup_steps=shorter)
    return dataclasses.replace(experiment, schedule=schedule)


def _train_in_bucket(experiment: Experiment, url: str) -> Any:
    import jax

    from recurjax.training.loop import train
    from recurjax.training.run import mirrored

    with mirrored(url) as mirror:
        result = train(experiment, mirror.folder, mirror=mirror)
    # Only now: the block's end sends what came after the last save.
    if jax.process_index() == 0:
        print(mirror.sentence())
    return result


def _take_runs(options: list[str]) -> tuple[str, list[str]]:
    """Removes --runs DIR from the options, since it is no field of an experiment."""
    for at, word in enumerate(options):
        if word.startswith("--runs="):
            return word.removeprefix("--runs="), options[:at] + options[at + 1 :]
        if word == "--runs":
            if at + 1 == len(options):
                raise UserError("--runs needs a directory")
            return options[at + 1], options[:at] + options[at + 2 :]
    return "runs", options


def with_own_text(
    experiment: Experiment, words: list[str], *, prog: str
) -> tuple[Experiment, list[str]]:
    """Applies the options of this file to an experiment and removes them.

    Returns:
      The experiment with that text, its tokenizer, its vocabulary and a name of its
      own, and the options that are left.

    Raises:
      UserError: the words name no corpus or tokenizer, or the experiment reads none.
    """
    text_words, rest = _split(words)
    if not text_words:
        return experiment, rest
    options = parse(CorpusOptions, text_words, prog=prog)
    data = experiment.data
    if isinstance(data, TaskData):
        raise UserError(
            "--corpus and --tokenizer are for experiments on text, and "
            f"{experiment.name} is trained on a task that makes its own rows: "
            "leave them out"
        )
    # The name follows what changed, so that runs on different texts do not collide.
    corpus, name = data.corpus, experiment.name
    if options.corpus:
        corpus = options.corpus_config()
        name += f"_{name_of(corpus)}"
    elif options.describes_files():
        raise UserError(
            "--format, --field, --split and --separator describe --corpus "
            "FILES, which is missing: add it"
        )
    prepared = own_tokenizer(corpus)
    tokenizer = options.tokenizer_config()
    if options.tokenizer is not None:
        if prepared not in (None, tokenizer):
            raise UserError(
                f"--tokenizer {options.tokenizer} cannot replace the tokenizer of "
                "a prepared corpus: leave it out, or prepare the corpus again"
            )
        name += f"_{_short(options.tokenizer)}"
    tokenizer = tokenizer or prepared or data.tokenizer
    # A prepared corpus brings the share that it was prepared with.
    held_out = None if isinstance(corpus, Prepared) else data.validation_fraction
    model = experiment.model
    # The same tokenizer has the same vocabulary, and the model stays as it is.
    if tokenizer != data.tokenizer:
        model = model.with_vocabulary(vocabulary_of(tokenizer))
    # Every check of the config runs again on what it has become.
    data = dataclasses.replace(
        data, corpus=corpus, tokenizer=tokenizer, validation_fraction=held_out
    )
    return dataclasses.replace(experiment, name=name, data=data, model=model), rest


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    """Splits the words into options of `CorpusOptions`, with values, and the others."""
    names = {f"--{field.name}" for field in dataclasses.fields(CorpusOptions)}
    options: list[str] = []
    rest: list[str] = []
    # A word belongs to the option before it, until the next option.
    into = rest
    for word in words:
        if word.startswith("--"):
            into = options if word.partition("=")[0] in names else rest
        into.append(word)
    return options, rest


def _short(tokenizer: str) -> str:
    """Returns a tokenizer's word as a part of a name: bpe4096, bytes, gpt2."""
    kind, colon, size = tokenizer.partition(":")
    if colon and size.isdecimal():
        # "bpe:4096" becomes bpe4096; a path becomes its last part.
        return f"{kind.replace('-', '_')}{size}"
    word = tokenizer.removesuffix("/tokenizer.json").removesuffix(".json")
    return "".join(c if c.isalnum() else "_" for c in word.rstrip("/").split("/")[-1])
