"""A recurjax model that one of Hugging Face's families can be, as its config.

Keys are written and read again by `read_config`: what comes back different is what such
a checkpoint cannot say.
"""

import dataclasses
from typing import Any

from recurjax.convert.hugging_face.families import FAMILIES
from recurjax.convert.hugging_face.read_config import model_from_keys
from recurjax.convert.hugging_face.values import values_of
from recurjax.errors import UserError, first_few
from recurjax.experiment import model_differences
from recurjax.model import ModelConfig
from recurjax.variants.transformer import TransformerConfig


def hf_keys(
    config: ModelConfig,
    *,
    length: int,
    bos: int | None = None,
    eos: int | None = None,
    pad: int | None = None,
) -> dict[str, Any]:
    """Returns the config.json of a model.

    Args:
      config: the model; of several families that can be it, its `hf_family` counts, or
        the first.
      length: becomes `max_position_embeddings`.
      bos, eos, pad: token ids; without a pad the key is left out.

    Raises:
      UserError: none of the families can be this model; the first few differences
        from the nearest one are named.
    """
    if not isinstance(config.stack, TransformerConfig):
        raise UserError(
            "--format hf: transformers has no architecture for "
            f"{type(config.stack).__name__}: use --format torch"
        )
    differences: dict[str, list[str]] = {}
    values = values_of(exported(config), length=length)
    # Each family is tried: written, read back and compared.
    for name in sorted(FAMILIES, key=lambda name: name != config.hf_family):
        family = FAMILIES[name]
        keys = {
            "architectures": [family.model_class],
            "model_type": name,
            "dtype": config.weight_dtype,
        }
        for rule in family.rules:
            keys |= rule.write(values)
        try:
            back = model_from_keys(keys, where="config.json").config
        except UserError as error:
            differences[name] = [str(error)]
            continue
        differences[name] = model_differences(exported(config), back)
        if not differences[name]:
            # Null where there is none: a config class of transformers may otherwise
            # take a token of its own family, which this vocabulary can lack.
            tokens = {"bos_token_id": bos, "eos_token_id": eos, "pad_token_id": pad}
            return keys | tokens
    # The one with fewest differences, so that the reader sees what is in the way.
    nearest = min(differences, key=lambda name: len(differences[name]))
    raise UserError(
        f"--format hf: the model fits none of {', '.join(FAMILIES)}; it "
        f"differs from {nearest} in {first_few(differences[nearest])}: use "
        "--format torch"
    )


def exported(config: ModelConfig) -> ModelConfig:
    """Returns the config of the exported model, whose table has no padding.

    Other software samples from every row of the table, so the padding that was made
    here stays out. The padding of an imported table is the checkpoint's own and stays,
    as vocabulary, which is all that a config.json can say.
    """
    rows = config.padded_vocabulary if imported_rows(config) else config.vocabulary
    return dataclasses.replace(config, vocabulary=rows, pad_vocabulary_to=1)


def imported_rows(config: ModelConfig) -> bool:
    """Whether the rows beyond the vocabulary came with a checkpoint: see `from_hf`."""
    return config.pad_vocabulary_to == config.padded_vocabulary
