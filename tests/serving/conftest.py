"""The model whose next token is known, which the engine's tests have too."""

from tests.inference.conftest import cycle, model

__all__ = ["cycle", "model"]
