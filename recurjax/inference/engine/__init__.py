"""Many requests at once: slots that are filled as they become free."""

from recurjax.inference.engine.config import EngineConfig, RequestSettings
from recurjax.inference.engine.engine import Engine
from recurjax.inference.engine.request import Request

__all__ = ["Engine", "EngineConfig", "Request", "RequestSettings"]
