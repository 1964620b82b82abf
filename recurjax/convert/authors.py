"""The papers' own checkpoints: their parameter names, from safetensors or torch files.

A state dict says neither heads nor chunks nor norms: an experiment's config does.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from jax.sharding import Mesh

from recurjax.convert.loading import load_model
from recurjax.convert.pieces import Piece, PieceTable
from recurjax.convert.safetensors_files import SafetensorsFiles, open_directory
from recurjax.convert.tensors import TensorInfo, TensorSource
from recurjax.convert.torch_file import open_torch_file
from recurjax.errors import UserError
from recurjax.model import Decoder, ModelConfig
from recurjax.variants.rat import AttentionMixerConfig, RatConfig
from recurjax.variants.recurrent_transformer import RecurrentTransformerConfig


def from_authors(
    path: Path,
    config: ModelConfig,
    *,
    mesh: Mesh | None = None,
    report: Callable[[str], None] = print,
) -> Decoder:
    """Loads a checkpoint of the Recurrent Transformer's or RAT's authors.

    Args:
      path: a .safetensors file, a directory with some, or a file of torch.save, which
        needs torch and is read with weights_only=True.
      config: the model that it holds.
      mesh: where to lay the parameters out; None: on one device.
      report: gets a sentence when weights are not finite.

    Raises:
      UserError: another variant, not such a file, or tensors that do not fit; all
        differences are listed.
    """
    match config.stack:
        case RecurrentTransformerConfig():
            pieces, rename = _recurrent_transformer(config), _olmo_name
        case RatConfig():
            pieces, rename = _rat(config), _plain_name
        case _:
            raise UserError(
                f"the authors' names of {type(config.stack).__name__} are not known: "
                "known are RecurrentTransformerConfig and RatConfig"
            )
    source = Renamed(_open(path), rename)
    return load_model(config, pieces, source, mesh=mesh, report=report)


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


# Left by torch.compile, DistributedDataParallel and FSDP.
_WRAPPERS = re.compile(r"\b(?:_orig_mod|module|_fsdp_wrapped_module)\.")
_OLMO_CAPTURED_LAYER = re.compile(r"^blocks\.(\d+)\.graphed_callable\.block\.")
_OLMO_CAPTURED_WHOLE = re.compile(r"^blocks\.0\.graphed_callable\.blocks\.(\d+)\.")
_OLMO_PARTS = re.compile(r"\b(?:pre|post)_attention_block\.")


def _plain_name(name: str) -> str:
    return _WRAPPERS.sub("", name)


def _olmo_name(name: str) -> str:
    """Strips what CUDA graphs, captured layer by layer or whole, put before a name.

    Each block also lists its parameters under the two halves that share them.
    """
    name = _plain_name(name).removeprefix("transformer.")
    for captured in (_OLMO_CAPTURED_LAYER, _OLMO_CAPTURED_WHOLE):
        name = captured.sub(r"blocks.\1.", name)
    return _OLMO_PARTS.sub("", name)


def _recurrent_transformer(config: ModelConfig) -> list[Piece]:
    table = PieceTable(config)
    table.plain("wte.weight", "w_embedding")
    if table.has("stack.position.w_position"):
        table.plain("wpe.weight", "stack.position.w_position")
    _norm(table, "ln_f", "final_norm")
    table.rows("ff_out.weight", ["w_head"])
    for layer in range(config.stack.layers):
        theirs, ours = f"blocks.{layer}", "stack.blocks"
        for name, norm in (
            ("attn_norm", "attention_norm"),
            ("ff_norm", "mlp_norm"),
            ("q_norm", "attention.q_norm"),
            ("k_norm", "attention.k_norm"),
        ):
            _norm(table, f"{theirs}.{name}", f"{ours}.{norm}", layer)
        # The gate of their SwiGLU is the second half.
        for name, parts in (
            ("q_proj", ("attention.{}_q",)),
            ("kv_proj", ("attention.{}_k", "attention.{}_v")),
            ("attn_out", ("attention.{}_out",)),
            ("ff_proj", ("mlp.{}_up", "mlp.{}_gate")),
            ("ff_out", ("mlp.{}_down",)),
        ):
            for kind, letter in (("weight", "w"), ("bias", "b")):
                names = [f"{ours}.{part.format(letter)}" for part in parts]
                table.rows(f"{theirs}.{name}.{kind}", names, layer)
    return table.finished()


def _norm(table: PieceTable, theirs: str, ours: str, layer: int | None = None) -> None:
    for kind, part in (("weight", "scale"), ("bias", "bias")):
        if table.has(f"{ours}.{part}"):
            table.plain(f"{theirs}.{kind}", f"{ours}.{part}", layer)


def _rat(config: ModelConfig) -> list[Piece]:
    table = PieceTable(config)
    assert isinstance(config.stack, RatConfig)
    table.plain("embedding.wte.weight", "w_embedding")
    _norm(table, "backbone.ln", "final_norm")
    table.rows("lm_head.weight", ["w_head"])
    pattern = config.stack.pattern
    for number in range(config.stack.layers):
        place, layer = number % len(pattern), number // len(pattern)
        ours, mixer = f"stack.blocks.{place}", f"stack.blocks.{place}.mixer"
        theirs = f"backbone.layers.{number}"
        _norm(table, f"{theirs}.seq_layer.input_norm", f"{ours}.mixer_norm", layer)
        if isinstance(pattern[place], AttentionMixerConfig):
            mixer += ".attention"
            rows = [f"{mixer}.w_{name}" for name in "vqk"]
        else:
            rows = [f"{mixer}.output_gate.w_full", f"{mixer}.w_v"]
            rows += [f"{mixer}.forget_gate.w_full"]
            rows += [f"{mixer}.w_{name}" for name in "qk"]
            bias = f"{mixer}.forget_gate.b_forget"
            table.plain(f"{theirs}.seq_layer.gate_bias", bias, layer)
        table.rows(f"{theirs}.seq_layer.in_proj.weight", rows, layer)
        table.rows(f"{theirs}.seq_layer.out_proj.weight", [f"{mixer}.w_out"], layer)
        _norm(table, f"{theirs}.hidden_layer.ln", f"{ours}.mlp_norm", layer)
        for name, part in (("fc1", "up"), ("fc2", "down")):
            tensor = f"{theirs}.hidden_layer.{name}.weight"
            table.rows(tensor, [f"{ours}.mlp.w_{part}"], layer)
    return table.finished()
