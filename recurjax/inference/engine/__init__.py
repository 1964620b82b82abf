"""Many requests at once: slots that are filled as they become free."""

from recurjax.inference.engine.config import EngineConfig, Request, RequestSettings
from recurjax.inference.engine.engine import Engine

__all__ = ["Engine", "EngineConfig", "Request", "RequestSettings"]
