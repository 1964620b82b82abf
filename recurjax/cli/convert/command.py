"""`recurjax convert`: models from elsewhere, to elsewhere, into another variant."""

import sys
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import tyro

from recurjax.cli.convert.surgery import (
    run_to_recurformer,
    run_to_recursive,
    run_to_transformer,
    write_changed_run,
)
from recurjax.cli.options import Command, parse, run_command
from recurjax.convert.authors import as_trained, from_authors
from recurjax.convert.hub import fetched_checkpoint
from recurjax.convert.hugging_face import from_hf
from recurjax.convert.imported_run import new_experiment, write_run
from recurjax.convert.parity import TOLERANCE, NotMeasured, Parity
from recurjax.convert.peft import from_peft, to_peft
from recurjax.convert.torch import (
    compare_with_export,
    compare_with_hf,
    from_torch,
    to_torch,
)
from recurjax.data.tokenizers import load_tokenizer
from recurjax.errors import UserError
from recurjax.files.arrays import Expected, read_array
from recurjax.files.atomic import refuse_existing
from recurjax.files.storage import fetched_folder, sent_folder, url_of
from recurjax.model import IntegerDtype
from recurjax.ranges import NonNegativeFloat, NonNegativeInt, RangeChecks
from recurjax.run_table import load_experiment
from recurjax.training.run import load_run

USAGE = """usage: recurjax convert COMMAND SOURCE OUT [options]

  recurjax convert from-hf OWNER/NAME runs/name        import from the Hugging Face Hub
  recurjax convert from-hf SmolLM2.gguf runs/smollm2   import a GGUF file or a folder
  recurjax convert to-torch RUN OUT                    export to PyTorch, transformers
  recurjax convert from-torch OUT RUN                  import such an export again
  recurjax convert from-authors FILE RUN               import a paper's own checkpoint
  recurjax convert to-recursive RUN OUT                loop a Transformer, with LoRA
  recurjax convert to-recurformer RUN OUT              replace local heads by Mamba
  recurjax convert to-transformer RUN OUT              unroll a recursive model
  recurjax convert merge RUN OUT                       merge adapters into their base
  recurjax convert quantize RUN OUT --weights int8     store weights in 8 or 4 bits
  recurjax convert from-peft ADAPTERS OUT --base RUN   import adapters from PEFT
  recurjax convert to-peft RUN OUT                     export adapters to PEFT

recurjax convert COMMAND --help lists the options of each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Checked(RangeChecks):
    """Options of every command that compares with PyTorch."""

    check: bool = True
    torch_python: str | None = None
    ids: Path | None = None
    tolerance: NonNegativeFloat = TOLERANCE

    def options(self) -> dict[str, Any]:
        """Returns the arguments of `compare`."""
        return {
            "python": self.torch_python,
            "ids": None if self.ids is None else _read_ids(self.ids),
            "tolerance": self.tolerance,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class FromHf(_Checked):
    """Imports a Hugging Face model into a run directory.

    Families: Llama 2 and 3, Mistral, Qwen2, Qwen3, Gemma 1 to 3, Phi-3, SmolLM3,
    OLMo-2, GPT-NeoX, GPT-2.

    Attributes:
      source: a directory with config.json and safetensors, a .gguf file, or
        OWNER/NAME[@REVISION] of the Hugging Face Hub (hf:OWNER/NAME if a folder has
        that name).
      out: the new run directory, written atomically.
      tokenizer: a tokenizer.json or its folder, instead of the model's own; None: the
        model's own.
      ignore_key: a key of config.json that recurjax does not know but may ignore,
        because it does not change the model; may be given several times.
      dtype: dtype of parameters and activations: float32 holds every checkpoint exactly
        and suits training; bfloat16 takes half the memory; keep is bfloat16 if the
        checkpoint's matrices are, the integers of a GGUF file in Q8_0, Q4_0 or Q4_1,
        else float32.
      check: compare with transformers, if it is installed, and write parity.json.
      torch_python: an interpreter with torch and transformers; None: this one.
      ids: a .npy file with token ids [B, T] for the comparison.
      tolerance: largest accepted difference of logits, as a share of the largest logit.
    """

    source: Annotated[Path, tyro.conf.Positional]
    out: Annotated[Path, tyro.conf.Positional]
    tokenizer: Path | None = None
    ignore_key: tuple[str, ...] = ()
    dtype: Literal["float32", "bfloat16", "keep"] = "float32"


@dataclass(frozen=True, kw_only=True, slots=True)
class ToTorch(_Checked):
    """Writes a run's model for PyTorch.

    Attributes:
      run: the run directory.
      out: the new directory, written atomically.
      format: torch: weights, config and a module file that needs only torch,
        safetensors and numpy; hf: a checkpoint of transformers, for models of from-hf's
        families.
      step: training step of the checkpoint; None: the newest.
      check: compare both sides, if torch is installed, and write parity.json.
      torch_python: an interpreter with torch; None: this one.
      ids: a .npy file with token ids [B, T] for the comparison.
      tolerance: largest accepted difference of logits, as a share of the largest logit.
    """

    run: Annotated[Path, tyro.conf.Positional]
    out: Annotated[Path, tyro.conf.Positional]
    format: Literal["torch", "hf"] = "torch"
    step: NonNegativeInt | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class FromTorch(_Checked):
    """Imports an export of `to-torch`, also after training in PyTorch.

    Attributes:
      source: the exported directory, or OWNER/NAME[@REVISION] of the Hugging Face Hub.
      out: the new run directory, written atomically.
      check: compare both sides, if torch is installed, and write parity.json.
      torch_python: an interpreter with torch; None: this one.
      ids: a .npy file with token ids [B, T] for the comparison.
      tolerance: largest accepted difference of logits, as a share of the largest logit.
    """

    source: Annotated[Path, tyro.conf.Positional]
    out: Annotated[Path, tyro.conf.Positional]


@dataclass(frozen=True, kw_only=True, slots=True)
class FromAuthors:
    """Imports a checkpoint of a paper's authors (RT, RAT, LRT).

    Attributes:
      source: a .safetensors file, a directory of them, or a torch.save file.
      out: the new run directory, written atomically.
      experiment: a Python file whose config() describes the checkpoint's model.
      tokenizer: a tokenizer.json or the folder of a tokenizer.
    """

    source: Annotated[Path, tyro.conf.Positional]
    out: Annotated[Path, tyro.conf.Positional]
    experiment: Path
    tokenizer: Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Merge(RangeChecks):
    """Merges a run's adapters into their base model.

    Attributes:
      run: the run directory; its training.start_from must still hold the base model.
      out: the new run directory, written atomically.
      step: training step of the checkpoint; None: the newest.
    """

    run: Annotated[Path, tyro.conf.Positional]
    out: Annotated[Path, tyro.conf.Positional]
    step: NonNegativeInt | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantize(RangeChecks):
    """Quantizes a run's weights, for inference and for training adapters.

    Attributes:
      run: the run directory.
      out: the new run directory, written atomically.
      weights: int8: one scale per output; int4: one scale per 64 inputs, embeddings
        and head in int8; q8_0, q4_0, q4_1: as GGUF files have them, one scale (q4_1:
        and an offset) per 32 inputs, embeddings and head in q8_0; with -layers,
        embeddings and head stay in float32.
      step: training step of the checkpoint; None: the newest.
    """

    run: Annotated[Path, tyro.conf.Positional]
    out: Annotated[Path, tyro.conf.Positional]
    weights: IntegerDtype
    step: NonNegativeInt | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class FromPeft:
    """Imports adapters saved by PEFT into a run directory.

    Attributes:
      source: a folder with adapter_config.json and adapter_model.safetensors.
      out: the new run directory, written atomically.
      base: the run directory of the model that the adapters belong to.
    """

    source: Annotated[Path, tyro.conf.Positional]
    out: Annotated[Path, tyro.conf.Positional]
    base: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ToPeft:
    """Exports a run's adapters to the files that PEFT loads.

    Attributes:
      run: the run directory of adapters; its base is of one of from-hf's families.
      out: the new directory, written atomically.
    """

    run: Annotated[Path, tyro.conf.Positional]
    out: Annotated[Path, tyro.conf.Positional]


def run(argv: list[str]) -> int:
    """Runs `recurjax convert ARGV`.

    Returns:
      0; 1 when both sides were compared and differ by more than the tolerance: the
      result is on this machine then, and not in a store that OUT names.

    Raises:
      UserError: a mistake that the user can correct.
    """
    commands: dict[str, Command] = {
        "from-hf": _from_hf,
        "to-torch": _to_torch,
        "from-torch": _from_torch,
        "from-authors": _from_authors,
        # From here on both sides are runs of ours: one variant becomes another.
        "to-recurformer": run_to_recurformer,
        "to-recursive": run_to_recursive,
        "to-transformer": run_to_transformer,
        "merge": _merge,
        "quantize": _quantize,
        "from-peft": _from_peft,
        "to-peft": _to_peft,
    }
    commands = {
        name: partial(_with_stores, name, command) for name, command in commands.items()
    }
    return run_command(argv, commands, prog="recurjax convert", usage=USAGE)


def _with_stores(name: str, command: Command, argv: list[str]) -> int:
    """Runs a command, whose SOURCE and OUT may be URLs."""
    url = url_of(argv[1]) if argv[1:] else None
    if url is None:
        with ExitStack() as stack:
            return command(_here(name, argv, stack))
    try:
        with ExitStack() as stack:
            words = _here(name, argv, stack)
            # An error ends the block without anything being sent.
            if code := command(words):
                raise _Differs(code, words[1])
    except _Differs as differs:
        _say(f"nothing was sent to {url}: the output is in {differs.folder}")
        return differs.code
    _say(f"sent to {url}")
    return 0


class _Differs(Exception):  # noqa: N818 (no error: both sides were compared)
    """The converted model differs from its source."""

    def __init__(self, code: int, folder: str):
        super().__init__(code, folder)
        self.code, self.folder = code, folder


def _here(command: str, words: list[str], stack: ExitStack) -> list[str]:
    """Puts folders of this machine in the place of SOURCE and OUT in a store.

    A run to convert stays as it is: of it only one checkpoint is fetched.
    """
    words = list(words)
    # Only there are they known: an option before them may have a value or none.
    first = [word.startswith("-") for word in words[:2]]
    if any(first) and any(url_of(word) for word in words):
        raise UserError(
            "SOURCE and OUT must come before the options when one of them is a URL"
        )
    for at, word in enumerate(words[:2]):
        url = None if word.startswith("-") else url_of(word)
        if url is None:
            continue
        if at == 1:
            # Of a run the config comes last, of an export what it is loaded by.
            words[1] = str(stack.enter_context(sent_folder(url, last="config.json")))
        elif command.startswith("from-"):
            words[0] = str(stack.enter_context(fetched_folder(url)))
    return words


def _from_hf(argv: list[str]) -> int:
    options = parse(FromHf, argv, prog="recurjax convert from-hf")
    # Check before reading a model of many gigabytes.
    refuse_existing(options.out)
    source = fetched_checkpoint(options.source, report=_say)
    # All in one go: the model's vocabulary is what its tokenizer has.
    converted = from_hf(
        source,
        tokenizer=options.tokenizer,
        dtype=options.dtype,
        ignored_keys=options.ignore_key,
        report=_say,
    )
    if converted.tokenizer is None:
        raise UserError(
            f"{options.source} has no tokenizer.json: name a file with --tokenizer"
        )
    # Compared before anything is written: a wrong conversion should show at once.
    parity = (
        compare_with_hf(
            converted.model,
            source,
            # Keep the directory's tokenizer unless --tokenizer replaces it.
            tokenizer=converted.tokenizer if options.tokenizer is None else None,
            **options.options(),
        )
        if options.check
        else _NOT_ASKED
    )
    experiment = new_experiment(
        options.out, converted.model.config, length=converted.length
    )
    write_run(
        options.out,
        converted.model,
        experiment,
        converted.tokenizer,
        parity=parity.to_json(),
    )
    return _end(options.out, parity)


def _to_torch(argv: list[str]) -> int:
    options = parse(ToTorch, argv, prog="recurjax convert to-torch")
    refuse_existing(options.out)
    loaded = load_run(options.run, step=options.step, report=_say)
    parity = to_torch(
        loaded,
        options.out,
        format=options.format,
        check=options.check,
        **options.options(),
    )
    return _end(options.out, parity)


def _from_torch(argv: list[str]) -> int:
    options = parse(FromTorch, argv, prog="recurjax convert from-torch")
    refuse_existing(options.out)
    source = fetched_checkpoint(options.source, report=_say)
    loaded = from_torch(source, report=_say)
    parity = (
        compare_with_export(loaded, source, **options.options())
        if options.check
        else _NOT_ASKED
    )
    write_run(
        options.out,
        loaded.model,
        loaded.experiment,
        loaded.tokenizer,
        step=loaded.step,
        parity=parity.to_json(),
    )
    return _end(options.out, parity)


def _from_authors(argv: list[str]) -> int:
    options = parse(FromAuthors, argv, prog="recurjax convert from-authors")
    refuse_existing(options.out)
    experiment = load_experiment(options.experiment)
    # The authors' tokenizers as their training used them, with the tokens that the
    # model's table has rows for.
    tokenizer = as_trained(load_tokenizer(options.tokenizer), experiment.model)
    if tokenizer.vocabulary != experiment.model.vocabulary:
        raise UserError(
            f"--tokenizer has {tokenizer.vocabulary} tokens and the model of "
            f"{options.experiment} {experiment.model.vocabulary}: name the "
            "model's own"
        )
    model = from_authors(options.source, experiment.model, report=_say)
    write_run(options.out, model, experiment, tokenizer)
    print(options.out)
    return 0


def _merge(argv: list[str]) -> int:
    options = parse(Merge, argv, prog="recurjax convert merge")
    refuse_existing(options.out)
    # Whatever reads a run merges its adapters.
    loaded = load_run(options.run, step=options.step, report=_say)
    write_changed_run(options.out, loaded, loaded.model, lambda folder: None)
    print(f"{options.out}: the model of step {loaded.step}")
    return 0


def _quantize(argv: list[str]) -> int:
    options = parse(Quantize, argv, prog="recurjax convert quantize")
    refuse_existing(options.out)
    loaded = load_run(
        options.run, step=options.step, weights=options.weights, report=_say
    )
    write_changed_run(options.out, loaded, loaded.model, lambda folder: None)
    print(options.out)
    return 0


def _from_peft(argv: list[str]) -> int:
    options = parse(FromPeft, argv, prog="recurjax convert from-peft")
    refuse_existing(options.out)
    from_peft(options.source, options.out, options.base, report=_say)
    print(options.out)
    return 0


def _to_peft(argv: list[str]) -> int:
    options = parse(ToPeft, argv, prog="recurjax convert to-peft")
    refuse_existing(options.out)
    to_peft(options.run, options.out, report=_say)
    print(options.out)
    return 0


_NOT_ASKED = NotMeasured(reason="not asked for")


def _end(out: Path, parity: Parity | NotMeasured) -> int:
    print(f"{out}: {parity.sentence()}")
    if isinstance(parity, NotMeasured) and parity != _NOT_ASKED:
        _say("--torch-python PYTHON compares both sides: name one that has torch")
    if parity.within_tolerance:
        # Written anyway: parity.json next to the model shows where the two differ.
        return 0
    _say(f"recurjax: both sides differ beyond the tolerance: see {out}/parity.json")
    return 1


def _read_ids(file: Path) -> np.ndarray:
    ids = read_array(file, Expected("iu", (None, None)), f"--ids: {file}")
    if ids.size == 0:
        raise UserError(
            f"--ids: {file} holds no tokens: name a file with a list of ids"
        )
    return ids


def _say(text: str) -> None:
    print(text, file=sys.stderr)
