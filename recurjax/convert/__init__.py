"""Checkpoints of others into recurjax, and recurjax models out to PyTorch.

    from recurjax.convert import from_hf
    made = from_hf("SmolLM2-135M")
    print(made.model.config, made.tokenizer.vocabulary)

Names are imported when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from recurjax.convert.authors import from_authors
    from recurjax.convert.hugging_face import from_hf
    from recurjax.convert.imported_run import new_experiment, write_run
    from recurjax.convert.padding import from_left_padding, to_left_padding
    from recurjax.convert.torch import from_torch, to_torch

_HOME = {
    "from_authors": "recurjax.convert.authors",
    "from_hf": "recurjax.convert.hugging_face",
    "from_left_padding": "recurjax.convert.padding",
    "from_torch": "recurjax.convert.torch",
    "new_experiment": "recurjax.convert.imported_run",
    "to_left_padding": "recurjax.convert.padding",
    "to_torch": "recurjax.convert.torch",
    "write_run": "recurjax.convert.imported_run",
}

__all__ = [
    "from_authors",
    "from_hf",
    "from_left_padding",
    "from_torch",
    "new_experiment",
    "to_left_padding",
    "to_torch",
    "write_run",
]


def __getattr__(name: str) -> Any:
    # A caller needs one of these doors: the readers of all other formats stay unloaded.
    if name not in _HOME:
        raise AttributeError(f"module 'recurjax.convert' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
