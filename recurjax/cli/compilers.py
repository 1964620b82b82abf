"""`recurjax compilers`: fetches what `recurjax plan` compiles with."""

from dataclasses import dataclass
from pathlib import Path

from recurjax.cli.options import parse
from recurjax.plan import compilers


@dataclass(frozen=True, kw_only=True, slots=True)
class CompilersOptions:
    """Fetches the TPU and CUDA compilers that go with this jax (2.2 GB on disk).

    Fetches nothing that is there already. `recurjax plan` looks in
    $RECURJAX_COMPILERS, in .compilers here, and in the user's cache.

    Attributes:
      into: the folder; default: $RECURJAX_COMPILERS, else a folder in the user's cache.
      constraint: a file of version pins in pip's format.
    """

    into: Path | None = None
    constraint: Path | None = None


def run(argv: list[str]) -> int:
    """Runs the command."""
    options = parse(CompilersOptions, argv, prog="recurjax compilers")
    needed = compilers.requirements(options.constraint)
    folders = [options.into] if options.into else compilers.places()
    # Use whatever is installed in fitting versions, in any folder.
    for folder in folders:
        if compilers.are_there(folder, needed):
            print(f"the compilers are in {folder}")
            return 0
    # The last place is the user's own cache, or the one that was named.
    names = ", ".join(map(str, needed))
    unknown = compilers.hashed(needed) is None
    note = ", of which recurjax knows no checksums" if unknown else ""
    print(f"fetching {names}{note} into {folders[-1]}", flush=True)
    folders[-1].expanduser().absolute().parent.mkdir(parents=True, exist_ok=True)
    compilers.fetch(folders[-1], needed)
    return 0
