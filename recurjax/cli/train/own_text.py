"""Options that put somebody's own text in the place of an experiment's corpus."""

import dataclasses
from dataclasses import dataclass

from recurjax.cli.options import parse
from recurjax.data.config import Prepared, TokenizerConfig
from recurjax.data.described import (
    Format,
    describe_corpus,
    describe_tokenizer,
    name_of,
    own_tokenizer,
    vocabulary_of,
)
from recurjax.data.tasks.dataset import TaskData
from recurjax.errors import UserError
from recurjax.experiment import Experiment

USAGE = """\
--corpus FILES trains on your own text: text files, JSON lines, Parquet, ArrayRecord
(.gz too), quoted globs, a folder, one that `recurjax data prepare` wrote, or files of
the Hugging Face hub such as 'hf://datasets/OWNER/NAME/**/*.parquet'. --tokenizer
bpe:4096 (or bytes, a tokenizer.json, a folder with one) replaces the experiment's.
--field NAME has the text of a row, --separator TEXT cuts text files into documents,
--format and --split are those of `recurjax data prepare`. The model's vocabulary and
the run's name follow; --name and --model.vocabulary say otherwise."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TextOptions:
    """One's own text; each as in `recurjax data prepare`."""

    corpus: tuple[str, ...] = ()
    tokenizer: str | None = None
    bos: str | None = None
    eos: str | None = None
    format: Format = "auto"
    field: str = "text"
    split: str = "train"
    separator: str | None = None


def with_own_text(
    experiment: Experiment, options: list[str], *, prog: str
) -> tuple[Experiment, list[str]]:
    """Takes the options of this file out and does what they say.

    Returns:
      The experiment with that text, its tokenizer, its vocabulary and a name of its
      own, and the options that are left.

    Raises:
      UserError: the words name no corpus or tokenizer, or the experiment reads none.
    """
    own, left = _taken(options)
    if not own:
        return experiment, left
    words = parse(TextOptions, own, prog=prog)
    data = experiment.data
    if isinstance(data, TaskData):
        raise UserError(
            f"{experiment.name} is trained on a task, which makes its rows itself: "
            "--corpus and --tokenizer are for experiments on text"
        )
    # The name follows what changed, so that runs on different texts do not collide.
    corpus, name = data.corpus, experiment.name
    if words.corpus:
        corpus = describe_corpus(
            words.corpus,
            format=words.format,
            field=words.field,
            split=words.split,
            separator=words.separator,
        )
        name += f"_{name_of(corpus)}"
    # They describe files that nobody named.
    elif (words.format, words.field, words.split) != ("auto", "text", "train") or (
        words.separator is not None
    ):
        raise UserError(
            "--format, --field, --split and --separator say how to read "
            "--corpus FILES: name the files too"
        )
    tokenizer = _tokenizer(words, data.tokenizer, own_tokenizer(corpus))
    if words.tokenizer is not None:
        name += f"_{_short(words.tokenizer)}"
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
    return dataclasses.replace(experiment, name=name, data=data, model=model), left


def _taken(options: list[str]) -> tuple[list[str], list[str]]:
    """Parts the options: those of `TextOptions` with their values, and the others."""
    names = {f"--{field.name}" for field in dataclasses.fields(TextOptions)}
    own: list[str] = []
    left: list[str] = []
    # A word belongs to the option before it, until the next option.
    into = left
    for word in options:
        if word.startswith("--"):
            # A plain word belongs to whichever side the last option went.
            into = own if word.partition("=")[0] in names else left
        into.append(word)
    return own, left


def _tokenizer(
    words: TextOptions, usual: TokenizerConfig, prepared: TokenizerConfig | None
) -> TokenizerConfig:
    if words.tokenizer is None:
        if (words.bos, words.eos) != (None, None):
            raise UserError("--bos and --eos name tokens of a --tokenizer: name it too")
        return prepared or usual
    chosen = describe_tokenizer(words.tokenizer, bos=words.bos, eos=words.eos)
    if prepared not in (None, chosen):
        raise UserError(
            f"the corpus is prepared, with a tokenizer of its own, and --tokenizer "
            f"{words.tokenizer} cannot replace it: leave it out, or prepare again"
        )
    return chosen


def _short(tokenizer: str) -> str:
    """Returns a tokenizer's word as a part of a name: bpe4096, bytes, gpt2."""
    kind, colon, size = tokenizer.partition(":")
    if colon and size.isdecimal():
        # "bpe:4096" becomes bpe4096; a path becomes its last part.
        return f"{kind.replace('-', '_')}{size}"
    word = tokenizer.removesuffix("/tokenizer.json").removesuffix(".json")
    return "".join(c if c.isalnum() else "_" for c in word.rstrip("/").split("/")[-1])
