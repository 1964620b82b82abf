"""Hugging Face's config.json as a ModelConfig, by the row of its family.

Keys are those of transformers 5 (`rope_parameters`) and of older versions
(`rope_theta`, `rotary_pct`, `rotary_emb_base`). What is not understood is an error.
"""

import dataclasses
from collections.abc import Collection
from typing import Any, NamedTuple

from recurjax.convert.hugging_face.families import FAMILIES
from recurjax.convert.hugging_face.keys import Keys
from recurjax.convert.hugging_face.values import model_of
from recurjax.errors import UserError
from recurjax.model import ModelConfig


class HfModel(NamedTuple):
    """A config.json as a model config.

    Attributes:
      architecture: its `model_type`, or that of its text model.
      config: the model.
      length: the longest sequence it was trained on.
      read_over: keys of trainers and older files that do not change the model.
      text_of: the `model_type` of the model that reads images too, of which this is the
        part that reads text; None: there is none.
    """

    architecture: str
    config: ModelConfig
    length: int
    read_over: tuple[str, ...] = ()
    text_of: str | None = None


_TEXT_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": (
        "gemma3_text",
        {
            "vocab_size": 262208,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
        },
    )
}
"""Models that read images too: the family of their `text_config`, and the sizes of its
class, which published files leave out."""


def model_from_keys(
    values: dict[str, Any], *, where: str, ignored: Collection[str] = ()
) -> HfModel:
    """Reads the contents of a config.json.

    Args:
      values: the contents.
      where: what to call the file in messages.
      ignored: keys that are left out, on the user's word.

    Raises:
      UserError: another architecture, or keys that are not understood; the
        first few are named.
    """
    architecture: Any = values.get("model_type")
    text_of = architecture if architecture in list(_TEXT_MODELS) else None
    if text_of is not None:
        architecture, sizes = _TEXT_MODELS[text_of]
        inner = values.get("text_config")
        if not isinstance(inner, dict):
            raise UserError(f"{where}: {text_of} must have an object text_config")
        # Of what is around it only the tie concerns the text model.
        tied = {key: values[key] for key in ("tie_word_embeddings",) if key in values}
        values = sizes | tied | inner
    if architecture not in list(FAMILIES):  # a list compares also what has no hash
        raise UserError(
            f"{where}: model_type must be one of "
            f"{', '.join([*FAMILIES, *_TEXT_MODELS])}, got {architecture!r}"
        )
    family = FAMILIES[architecture]
    # Keys are taken as they are understood; what is left at the end is an error.
    keys = Keys(values, where=where, ignored=ignored)
    keys.any("model_type")
    model = dict(family.fixed)
    try:
        for rule in family.rules:
            rule.read(keys, model)
        config = dataclasses.replace(model_of(model), hf_family=architecture)
    except UserError:
        raise
    except ValueError as error:  # sizes that our configs refuse, say why with the rest
        keys.wrong(str(error))
        config = None
    keys.finish()
    assert config is not None
    read_over = tuple(keys.read_over)
    return HfModel(architecture, config, model["length"], read_over, text_of)
