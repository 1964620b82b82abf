"""The papers' own checkpoints: their parameter names, from safetensors or torch files.

A state dict says neither heads nor chunks nor norms: an experiment's config does.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from jax.sharding import Mesh

from recurjax.convert.authors.names import (
    latent_pieces,
    olmo_name,
    plain_name,
    rat_pieces,
    recurrent_pieces,
    tied_rat_name,
)
from recurjax.convert.formats.safetensors_files import SafetensorsFiles, open_directory
from recurjax.convert.formats.tensors import TensorInfo, TensorSource
from recurjax.convert.formats.torch_file import open_torch_file
from recurjax.convert.loading import load_model
from recurjax.data.tokenizers import JsonTokenizer, Tokenizer
from recurjax.errors import UserError
from recurjax.model import Decoder, ModelConfig
from recurjax.variants.latent_recurrent_transformer import (
    LatentRecurrentTransformerConfig,
)
from recurjax.variants.rat import RatConfig
from recurjax.variants.recurrent_transformer import RecurrentTransformerConfig


def from_authors(
    path: Path,
    config: ModelConfig,
    *,
    mesh: Mesh | None = None,
    report: Callable[[str], None] = print,
) -> Decoder:
    """Loads a checkpoint of a paper's authors: RT, RAT, or LRT and nanochat.

    Args:
      path: a .safetensors file, a directory with some, or a file of torch.save, which
        needs torch and is read with weights_only=True.
      config: the model that it holds.
      mesh: where to lay the parameters out; None: on one device.
      report: gets a sentence when weights are not finite.

    Raises:
      UserError: another variant, a model that the authors' code cannot have, not such
        a file, or tensors that do not fit; all differences are listed.
    """
    # The config names the variant; a state dict says nothing of it.
    match config.stack:
        case RecurrentTransformerConfig():
            table, rename = recurrent_pieces(config), olmo_name
        case RatConfig():
            rename = tied_rat_name if config.tied_head else plain_name
            table = rat_pieces(config)
        case LatentRecurrentTransformerConfig():
            table, rename = latent_pieces(config), plain_name
        case _:
            raise UserError(
                f"the authors' names of {type(config.stack).__name__} are not known: "
                f"known are {', '.join(kind.__name__ for kind in _KNOWN)}"
            )
    # Said before a gigabyte is read, and by our names, which the config has.
    if unnamed := table.unnamed():
        raise UserError(
            "the authors' checkpoints have no tensors for some parameters of this "
            f"config: {', '.join(unnamed)}"
        )
    source = Renamed(_open(path), rename)
    return load_model(config, table.finished(), source, mesh=mesh, report=report)


def as_trained(tokenizer: Tokenizer, config: ModelConfig) -> Tokenizer:
    """Returns a tokenizer that separates documents as the authors' training did.

    RAT's were joined by </s> alone: weights that never saw <s> must not get it in
    front, so EOS stands in the place of BOS.
    """
    if isinstance(config.stack, RatConfig) and isinstance(tokenizer, JsonTokenizer):
        return tokenizer.separated_by_eos()
    return tokenizer


_KNOWN = (RecurrentTransformerConfig, RatConfig, LatentRecurrentTransformerConfig)


class Renamed:
    """A checkpoint under other names; see `TensorSource`.

    Modules that share a parameter write it several times: such copies must be equal.
    """

    def __init__(self, source: TensorSource, rename: Callable[[str], str]):
        """Renames every tensor.

        Raises:
          UserError: two tensors get one name and differ.
        """
        self.where = source.where
        self._source = source
        self._old: dict[str, str] = {}
        for name in source.tensors:
            new = rename(name)
            first = self._old.setdefault(new, name)
            # Modules that share a parameter write it twice; either copy would do, if
            # equal.
            if first != name and not _equal(source, first, name):
                raise UserError(
                    f"{self.where}: {first} and {name} are one parameter and differ"
                )
        self.tensors: Mapping[str, TensorInfo] = {
            new: source.tensors[old] for new, old in self._old.items()
        }

    def read(self, name: str) -> np.ndarray:
        return self._source.read(self._old[name])


def _equal(source: TensorSource, one: str, other: str) -> bool:
    if source.tensors[one] != source.tensors[other]:
        return False
    return np.array_equal(source.read(one), source.read(other), equal_nan=True)


def _open(path: Path) -> TensorSource:
    if path.is_dir():
        return open_directory(path)
    if not path.is_file():
        raise UserError(f"there is no checkpoint at {path}")
    if path.suffix == ".safetensors":
        return SafetensorsFiles([path], where=str(path))
    return open_torch_file(path)
