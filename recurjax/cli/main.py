"""`recurjax COMMAND ...`: finds the command and turns errors into one sentence."""

import difflib
import sys
from collections.abc import Callable, Sequence
from importlib import import_module

from recurjax import host
from recurjax.errors import UserError

COMMANDS = {
    "train": "train an experiment, or resume it",
    "generate": "continue prompts with a trained model",
    "evaluate": "loss, perplexity and bits per byte of a text; CORE",
    "convert": "checkpoints in from Hugging Face and PyTorch, and out to them",
    "plan": "compile for TPUs and GPUs that are not here: memory, bounds, cost",
    "data": "prepare token shards (recurjax data prepare)",
    "bench": "time a model's or an operation's passes",
}

_RUN_PROGRAMS = ("train", "generate", "evaluate", "bench")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Returns:
      0; 2 after a mistake of the user's, said in one sentence; 130 after Ctrl-C.
    """
    owns_process = argv is None
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        if not argv or argv[0] in ("-h", "--help"):
            print(_usage())
            return 0
        if owns_process and argv[0] in _RUN_PROGRAMS:
            host.prepare()
        return _find(argv[0])(argv[1:])
    except UserError as error:
        print(f"recurjax: {error}", file=sys.stderr)
        return 2
    except OSError as error:  # a full disk, a file that cannot be read or written
        print(f"recurjax: {error}", file=sys.stderr)
        return 2
    except Exception as error:
        if not _is_out_of_memory(error):
            raise
        print(
            "recurjax: the device has not enough memory for this: make the batch or "
            "length smaller; in training, raise --training.accumulation, "
            "--objective.vocabulary-chunks or --model.stack.remat",
            file=sys.stderr,
        )
        return 2
    except KeyboardInterrupt:
        print("recurjax: interrupted", file=sys.stderr)
        return 130
    except SystemExit as end:  # tyro prints what is wrong with an option's value
        return end.code if isinstance(end.code, int) else int(end.code is not None)


def _find(name: str) -> Callable[[list[str]], int]:
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(COMMANDS)}"
        raise UserError(f"there is no command {name!r}: {hint}")
    return import_module(f"recurjax.cli.{name}").run


def _is_out_of_memory(error: Exception) -> bool:
    # By name: commands that need no device do not import jax.
    return type(error).__name__ == "JaxRuntimeError" and "RESOURCE_EXHAUSTED" in str(
        error
    )


def _usage() -> str:
    lines = ["usage: recurjax COMMAND [ARGUMENTS]   (recurjax COMMAND --help)", ""]
    lines += [f"  {name:<10} {text}" for name, text in COMMANDS.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
