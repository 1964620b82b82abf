"""`recurjax COMMAND ...`: finds the command and turns errors into one sentence."""

import difflib
import os
import select
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from importlib import import_module
from multiprocessing import active_children
from pathlib import Path

from recurjax.errors import UserError
from recurjax.machine import compiled_programs, early_interrupt, host, process_group
from recurjax.version import REPORTS, VERSION

COMMANDS = {
    "train": "train an experiment, or resume it",
    "generate": "continue prompts with a trained model",
    "chat": "talk with a trained model in the terminal",
    "serve": "serve trained models over HTTP with OpenAI's API",
    "evaluate": "score a model on texts, tasks, CORE or lm-evaluation-harness",
    "push": "send a run's model and its card to the Hugging Face Hub",
    "card": "print a run's model card",
    "convert": "import and export Hugging Face and PyTorch checkpoints; surgery",
    "plan": "compile for TPUs and GPUs that are not here: memory, time, cost",
    "data": "tokenize a corpus into shards; merge, show or verify shards",
    "bench": "time a model, an op, the trainer or the data pipeline",
    "describe": "print a model's parameters, FLOPs and cache sizes",
    "runs": "list run directories with step, loss, age and size",
    "report": "write an HTML file that compares runs",
    "experiments": "list the experiments that come with recurjax",
    "new": "write an experiment into a file to edit",
    "compilers": "fetch the compilers that plan uses",
    "doctor": "show versions, devices, backends, and why others are unavailable",
}

_FOLDERS = {
    **{"card": "push.card", "new": "experiments.new"},
    **{name: f"inspect.{name}" for name in ("describe", "runs", "report")},
}
"""Commands whose file is in another command's folder."""

_DEBUG = "--debug"
_OWN_FLAGS = "--own-xla-flags"
_PIPE_CLOSED = 128 + 13
"""Exit code of a command whose output nobody reads, as shells give SIGPIPE."""
_PACKAGE = Path(__file__).parents[1]
_READ_PROGRAMS = ("generate", "chat", "serve", "evaluate")
_KEEP_PROGRAMS = ("train", *_READ_PROGRAMS)
"""What XLA compiles for these is kept for the next time; `bench` times compilation."""

_RUN_PROGRAMS = (*_KEEP_PROGRAMS, "bench")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    With `--debug` anywhere among the arguments an error that nobody foresaw keeps its
    traceback.

    Returns:
      0; 2 after a mistake of the user's, said in one sentence; 130 after Ctrl-C; 70
      after an error of recurjax' own, which is said in one sentence too; 141 where
      nobody reads standard output to its end, as in `recurjax --help | head -3`.
    """
    # Called with words it is a part of another program, which has its own signals.
    watch = early_interrupt.watched if argv is None else nullcontext
    try:
        with watch():
            code = _answer(argv)
    except BaseException:
        if process_group.is_leaving():
            traceback.print_exc()
            process_group.end(1)
        raise
    if argv is None and _reader_left():
        code = code or _PIPE_CLOSED
    process_group.end(code)
    if code == early_interrupt.CODE and argv is None and not active_children():
        _end_at_once(code)
    return code


def _end_at_once(code: int) -> None:
    # What compiles or reads in native threads can crash while Python takes itself
    # apart; everything that must be written is by now.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _answer(argv: Sequence[str] | None) -> int:
    # Called from a program, the process and its settings belong to the caller.
    owns_process = argv is None
    argv = list(sys.argv[1:] if argv is None else argv)
    debug = _DEBUG in argv
    argv = [word for word in argv if word != _DEBUG]
    try:
        # Names that are not UTF-8 fail far from here, in a file or a message.
        _check_text(argv)
        if not argv or argv[0] in ("-h", "--help"):
            print(_usage())
            return 0
        if argv[0] == "--version":
            print(f"recurjax {VERSION}")
            return 0
        host.check_flags()
        # Allocator and XLA flags count only before jax is imported.
        if argv[0] in _RUN_PROGRAMS:
            leaves_flags = _OWN_FLAGS in argv
            argv = [word for word in argv if word != _OWN_FLAGS]
            if owns_process:
                reading = argv[0] in _READ_PROGRAMS
                host.prepare(flags=not leaves_flags, reading=reading)
        keep = argv[0] in _KEEP_PROGRAMS and "--no-cache" not in argv
        if argv[0] in _KEEP_PROGRAMS:
            argv = [word for word in argv if word != "--no-cache"]
        _check_options(argv[0], argv[1:])
        # Imported by name: `recurjax --version` should not wait for jax.
        command = _find(argv[0])
        if argv[0] != "train":  # which says so itself, after it has opened its run
            early_interrupt.work_begins()
        if owns_process and keep:
            compiled_programs.keep()
        return command(argv[1:])
    except UserError as error:
        print(f"recurjax: {error}", file=sys.stderr)
        return 2
    except OSError as error:  # a full disk, a file that cannot be read or written
        if isinstance(error, BrokenPipeError) and _reader_left():
            return _PIPE_CLOSED
        print(f"recurjax: {error}", file=sys.stderr)
        return 2
    except Exception as error:
        if early_interrupt.was_noted() and not debug:
            return _interrupted()  # native code makes an error of its own of it
        if isinstance(error, MemoryError):
            print(
                "recurjax: this machine's memory is full: make the batch, the length "
                "or the lines of the files that are read smaller",
                file=sys.stderr,
            )
            return 2
        if not _is_out_of_memory(error):
            if debug:
                raise
            print(f"recurjax: {_unforeseen(error)}", file=sys.stderr)
            return 70
        print(
            "recurjax: the device has not enough memory for this: make the batch or "
            "length smaller; in training, raise --training.accumulation, "
            "--objective.vocabulary-chunks or --model.stack.remat",
            file=sys.stderr,
        )
        return 2
    except KeyboardInterrupt:
        return _interrupted()
    except SystemExit as end:  # tyro prints what is wrong with an option's value
        return end.code if isinstance(end.code, int) else int(end.code is not None)


def _reader_left() -> bool:
    """Whether standard output is a pipe that nobody reads; then no more is written."""
    output = select.poll()
    output.register(1, 0)
    if not any(event & select.POLLERR for _, event in output.poll(0)):
        return False
    # Python flushes as it ends, and would report an error.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return True


def _interrupted() -> int:
    print(early_interrupt.SENTENCE, file=sys.stderr)
    return early_interrupt.CODE


def _find(name: str) -> Callable[[list[str]], int]:
    if name not in COMMANDS:
        # A slip of the finger is answered with the nearest command.
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(COMMANDS)}"
        raise UserError(f"there is no command {name!r}: {hint}")
    return import_module(module_of(name)).run


def _check_options(name: str, argv: Sequence[str]) -> None:
    """Refuses wrong options of the slowest imports before them."""
    if name in ("generate", "chat", "serve"):
        # Imported here: `recurjax --version` should not wait for tyro.
        from recurjax.cli.options import check_before_import

        check_before_import(module_of(name), argv)


def module_of(name: str) -> str:
    """Returns the module that runs a command."""
    return f"recurjax.cli.{_FOLDERS.get(name, name)}"


def _check_text(argv: Sequence[str]) -> None:
    """Refuses arguments that no file of ours could hold: those that are not UTF-8.

    Python hands such bytes on as half characters, which fail wherever they are written.
    """
    for number, word in enumerate(argv, 1):
        try:
            word.encode("utf-8")
        except UnicodeEncodeError:
            raise UserError(
                f"argument {number} is not UTF-8 text: {ascii(word)}"
            ) from None
        if "\0" in word:
            raise UserError(f"argument {number} contains a NUL character: {word!r}")


def _unforeseen(error: Exception) -> str:
    """Returns what happened, where in the code, and what would help to mend it."""
    # The first frame is this file's own call of the command.
    frames = traceback.extract_tb(error.__traceback__)
    files = [(Path(frame.filename), frame.lineno) for frame in frames[1:]]
    package_frames = [(file, line) for file, line in files if _PACKAGE in file.parents]
    place = ""
    if package_frames:
        file, line = package_frames[-1]
        place = f" in {file.relative_to(_PACKAGE.parent)}, line {line}"
    message = str(error).strip().partition("\n")[0][:300]
    return (
        f"stopped by an error of its own{place} ({type(error).__name__}: {message}): "
        f"please report it to {REPORTS} with what the same command prints with {_DEBUG}"
    )


def _is_out_of_memory(error: Exception) -> bool:
    # By name: commands that need no device do not import jax.
    return type(error).__name__ == "JaxRuntimeError" and "RESOURCE_EXHAUSTED" in str(
        error
    )


def _usage() -> str:
    lines = ["usage: recurjax COMMAND [ARGUMENTS]   (recurjax COMMAND --help)", ""]
    lines += [f"  {name:<11} {text}" for name, text in COMMANDS.items()]
    lines += [
        "",
        f"  {_DEBUG}    with any command: show tracebacks of unexpected errors",
    ]
    lines += [
        "",
        "train, generate, chat, serve and evaluate cache compiled programs in",
        "$RECURJAX_CACHE, by default in the user's cache folder; --no-cache turns that",
        "off. They and bench add XLA flags that XLA_FLAGS does not set;",
        f"{_OWN_FLAGS} leaves XLA_FLAGS unchanged.",
    ]
    return "\n".join(lines)
