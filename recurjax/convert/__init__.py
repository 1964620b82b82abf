"""Checkpoints of others into recurjax, and recurjax models out to PyTorch.

    from recurjax.convert import from_hf
    made = from_hf("SmolLM2-135M")
    print(made.model.config, made.tokenizer.vocabulary)

Names are imported when they are first used.
"""

from typing import TYPE_CHECKING

from recurjax.lazy_names import lazy_names

if TYPE_CHECKING:
    from recurjax.convert.authors import from_authors
    from recurjax.convert.hub import from_hub
    from recurjax.convert.hugging_face import from_hf
    from recurjax.convert.imported_run import new_experiment, write_run
    from recurjax.convert.padding import from_left_padding, to_left_padding
    from recurjax.convert.torch import from_torch, to_torch

__all__ = [
    "from_authors",
    "from_hf",
    "from_hub",
    "from_left_padding",
    "from_torch",
    "new_experiment",
    "to_left_padding",
    "to_torch",
    "write_run",
]

__getattr__, __dir__ = lazy_names(__name__)
