"""The configuration of a recurjax model in transformers."""

from typing import Any

from transformers import PretrainedConfig


class RecurjaxConfig(PretrainedConfig):
    """What config.json says; recurjax's own keys are the first three of these.

    Attributes:
      model: the model as decoder_recurjax.py reads it.
      experiment, step, format: where recurjax goes on from.
    """

    model_type = "recurjax"

    def __init__(
        self,
        model: dict[str, Any] | None = None,
        experiment: dict[str, Any] | None = None,
        step: int | None = None,
        format: str | None = None,
        **keys: Any,
    ):
        self.model, self.experiment = model, experiment
        self.step, self.format = step, format
        super().__init__(**keys)
