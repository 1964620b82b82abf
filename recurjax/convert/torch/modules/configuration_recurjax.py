"""The configuration of a recurjax model in transformers."""

from typing import Any

from transformers import PretrainedConfig


class RecurjaxConfig(PretrainedConfig):
    """What config.json says; the first four keys are recurjax's own.

    Attributes:
      model: the model as decoder_recurjax.py reads it.
      experiment, step, format: where recurjax continues from.
      use_cache: whether calls without gradients return a cache.
    """

    model_type = "recurjax"

    def __init__(
        self,
        model: dict[str, Any] | None = None,
        experiment: dict[str, Any] | None = None,
        step: int | None = None,
        format: str | None = None,
        use_cache: bool = True,
        **keys: Any,
    ):
        self.model, self.experiment = model, experiment
        self.step, self.format = step, format
        self.use_cache = use_cache
        super().__init__(**keys)
