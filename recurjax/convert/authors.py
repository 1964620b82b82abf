"""The papers' own checkpoints, from safetensors or torch files.

A state dict says neither heads nor chunks nor norms: an experiment's config does.
RT's names are OLMo's blocks, LRT's are nanochat's. A name is first stripped of what
wrappers put into it, then looked up in a table.
"""

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
from jax.sharding import Mesh

from recurjax.convert.formats.safetensors_files import SafetensorsFiles, open_directory
from recurjax.convert.formats.tensors import RenamedTensors, TensorSource
from recurjax.convert.formats.torch_file import open_torch_file
from recurjax.convert.loading import load_model
from recurjax.convert.pieces import PieceTable
from recurjax.data.tokenizers import JsonTokenizer, Tokenizer
from recurjax.errors import UserError, first_few
from recurjax.model import Decoder, ModelConfig
from recurjax.variants.latent_recurrent_transformer import (
    LatentRecurrentTransformerConfig,
)
from recurjax.variants.rat import (
    AttentionMixerConfig,
    RatConfig,
    RatMixerConfig,
    RnnMixerConfig,
)
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
      mesh: devices that hold the parameters; None: one device.
      report: called with a message if weights are not finite.

    Raises:
      UserError: another variant, a model that the authors' code cannot have, not such
        a file, or tensors that do not fit; the first few are named.
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
                "there are no checkpoints of the authors for "
                f"{type(config.stack).__name__}: name an experiment with one of "
                f"{', '.join(kind.__name__ for kind in _KNOWN)}"
            )
    # Said before a gigabyte is read, and by our names, which the config has.
    if unnamed := table.unnamed():
        raise UserError(
            "the authors' checkpoints lack tensors for these parameters of "
            f"the config: {first_few(unnamed, separator=', ')}; set the fields "
            "that add them as the authors do"
        )
    source = renamed(_open(path), rename)
    return load_model(config, table.finished(), source, mesh=mesh, report=report)


def as_trained(tokenizer: Tokenizer, config: ModelConfig) -> Tokenizer:
    """Returns a tokenizer that separates documents as the authors' training did.

    RAT's were joined by </s> alone: weights that never saw <s> must not get it in
    front, so EOS takes the place of BOS.
    """
    if isinstance(config.stack, RatConfig) and isinstance(tokenizer, JsonTokenizer):
        return tokenizer.separated_by_eos()
    return tokenizer


_KNOWN = (RecurrentTransformerConfig, RatConfig, LatentRecurrentTransformerConfig)


def renamed(source: TensorSource, rename: Callable[[str], str]) -> RenamedTensors:
    """Returns a checkpoint under other names.

    Modules that share a parameter write it several times: such copies must be equal.

    Raises:
      UserError: two tensors get one name and differ.
    """
    names: dict[str, str] = {}
    for name in source.tensors:
        first = names.setdefault(rename(name), name)
        # Either copy would do, if equal.
        if first != name and not _equal(source, first, name):
            raise UserError(
                f"{source.where}: {first} and {name} are one parameter with two "
                "different values: use an undamaged checkpoint"
            )
    return RenamedTensors(source, names)


def _equal(source: TensorSource, name: str, other: str) -> bool:
    if source.tensors[name] != source.tensors[other]:
        return False
    return np.array_equal(source.read(name), source.read(other), equal_nan=True)


def _open(path: Path) -> TensorSource:
    if path.is_dir():
        return open_directory(path)
    if not path.is_file():
        raise UserError(f"there is no checkpoint at {path}: check the path")
    if path.suffix == ".safetensors":
        return SafetensorsFiles([path], where=str(path))
    return open_torch_file(path)


# Left by torch.compile, DistributedDataParallel and FSDP.
_WRAPPERS = re.compile(r"\b(?:_orig_mod|module|_fsdp_wrapped_module)\.")
_OLMO_CAPTURED_LAYER = re.compile(r"^blocks\.(\d+)\.graphed_callable\.block\.")
_OLMO_CAPTURED_WHOLE = re.compile(r"^blocks\.0\.graphed_callable\.blocks\.(\d+)\.")
_OLMO_PARTS = re.compile(r"\b(?:pre|post)_attention_block\.")


def plain_name(name: str) -> str:
    """Strips what torch.compile and data parallelism put into a name."""
    return _WRAPPERS.sub("", name)


def tied_rat_name(name: str) -> str:
    """Strips the same; RAT's files repeat the tied head next to the embedding."""
    return plain_name(name).replace("head.lm_head.weight", "embedding.wte.weight")


def olmo_name(name: str) -> str:
    """Strips the same, and what CUDA graphs put before a name.

    They capture layer by layer, or all layers as the first one's.
    Each block also lists its parameters under the two halves that share them.
    """
    name = plain_name(name).removeprefix("transformer.")
    for captured in (_OLMO_CAPTURED_LAYER, _OLMO_CAPTURED_WHOLE):
        name = captured.sub(r"blocks.\1.", name)
    return _OLMO_PARTS.sub("", name)


def recurrent_pieces(config: ModelConfig) -> PieceTable:
    """Returns the table of OLMo's blocks, as RT's authors name them."""
    table = PieceTable(config)
    table.same("wte.weight", "w_embedding")
    table.same("wpe.weight", "stack.position.w_position")
    _norm(table, "ln_f", "final_norm")
    table.same("ff_out.weight", "w_head")
    for layer in range(config.stack.layers):
        # Layers are stacked in ours: `layer` is the place on the leading axis.
        # Layers are stacked in ours: `layer` is the place on the leading axis.
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
    return table


def _norm(table: PieceTable, theirs: str, ours: str, layer: int | None = None) -> None:
    for kind, part in (("weight", "scale"), ("bias", "bias")):
        table.same(f"{theirs}.{kind}", f"{ours}.{part}", layer)


def rat_pieces(config: ModelConfig) -> PieceTable:
    """Returns the table of RAT's authors: embedding, backbone, head.

    Raises:
      UserError: the config has layers that RAT's authors do not publish.
    """
    table = PieceTable(config)
    assert isinstance(config.stack, RatConfig)
    published = RatMixerConfig | RnnMixerConfig | AttentionMixerConfig
    for mixer in config.stack.pattern:
        if not isinstance(mixer, published):
            raise UserError(
                "RAT's authors publish no checkpoints with a layer of "
                f"{type(mixer).__name__}: use a pattern without it"
            )
    table.same("embedding.wte.weight", "w_embedding")
    _norm(table, "backbone.ln", "final_norm")
    table.same("head.lm_head.weight", "w_head")
    pattern = config.stack.pattern
    # Place in the pattern, and repeat on the leading axis.
    for number in range(config.stack.layers):
        place, layer = number % len(pattern), number // len(pattern)
        ours, mixer = f"stack.blocks.{place}", f"stack.blocks.{place}.mixer"
        theirs = f"backbone.layers.{number}"
        _norm(table, f"{theirs}.seq_layer.input_norm", f"{ours}.mixer_norm", layer)
        if isinstance(pattern[place], AttentionMixerConfig):
            mixer += ".attention"
            # The rows of their one matrix have the order v, q, k.
            rows = [f"{mixer}.w_{name}" for name in "vqk"]
        else:
            rows = [f"{mixer}.output_gate.w_full", f"{mixer}.w_v"]
            rows += [f"{mixer}.forget_gate.w_full"]
            rows += [f"{mixer}.w_{name}" for name in "qk"]
            bias = f"{mixer}.forget_gate.b_forget"
            # Their gate's bias is a parameter of the layer, not of the gate.
            table.same(f"{theirs}.seq_layer.gate_bias", bias, layer)
        table.rows(f"{theirs}.seq_layer.in_proj.weight", rows, layer)
        table.rows(f"{theirs}.seq_layer.out_proj.weight", [f"{mixer}.w_out"], layer)
        _norm(table, f"{theirs}.hidden_layer.ln", f"{ours}.mlp_norm", layer)
        for name, part in (("fc1", "up"), ("fc2", "down")):
            tensor = f"{theirs}.hidden_layer.{name}.weight"
            table.rows(tensor, [f"{ours}.mlp.w_{part}"], layer)
    return table


def latent_pieces(config: ModelConfig) -> PieceTable:
    """Returns nanochat's table; with a memory that of the authors' layerwise release.

    Raises:
      UserError: with a memory the gate of the value embeddings does not read all
        channels; there it is rows of one matrix with the memory's gates.
    """
    table, stack = PieceTable(config), config.stack
    assert isinstance(stack, LatentRecurrentTransformerConfig)
    remembers = stack.memory is not None
    if remembers and stack.value_gate_channels not in (0, stack.width):
        raise UserError(
            "stack.value_gate_channels must be 0, because gates read all "
            "channels in the authors' release, got "
            f"{stack.value_gate_channels}"
        )
    table.same("transformer.wte.weight", "w_embedding")
    table.same("lm_head.weight", "w_head")
    for number in range(stack.layers):
        layer, place = divmod(number, stack.pattern)
        ours, theirs = f"stack.blocks.{place}", f"transformer.h.{number}"
        # With a memory one matrix has the gates of both, one below the other.
        gates = ["w_mix", "w_value_gate"] if remembers else ["w_value_gate"]
        for name, parts in {
            f"{theirs}.attn.c_q": ["w_q"],
            f"{theirs}.attn.c_k": ["w_k"],
            f"{theirs}.attn.c_v": ["w_v"],
            f"{theirs}.attn.c_proj": ["w_out"],
            f"{theirs}.attn.{'triple' if remembers else 've'}_gate": gates,
            f"{theirs}.mlp.c_fc": ["mlp.w_up"],
            f"{theirs}.mlp.c_proj": ["mlp.w_down"],
            f"interleaved_key_projections.{number}.W_v": ["memory.w_k"],
            f"interleaved_projections.{number}.W_v": ["memory.w_v"],
        }.items():
            table.rows(f"{name}.weight", [f"{ours}.{part}" for part in parts], layer)
        embeds = "interleaved_init_value_embeds" if remembers else "value_embeds"
        table.same(f"{embeds}.{number}.weight", f"{ours}.w_value_embedding", layer)
        for name, scale in (
            ("resid_lambdas", "residual_scale"),
            ("x0_lambdas", "input_scale"),
            ("interleaved_lambdas", "memory_scale"),
        ):
            # Their scales are one vector over the layers, ours a number in each.
            index = (slice(number, number + 1),)
            shape = (stack.layers,)
            table.part(
                name, f"{ours}.{scale}", layer, shape=shape, part=index, axes=(0,)
            )
    return table
