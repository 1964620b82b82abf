"""Hugging Face's tensor names for our parameters, one table an architecture."""

from recurjax.convert.hugging_face.read_config import Architecture
from recurjax.convert.pieces import Piece, PieceTable
from recurjax.model import ModelConfig
from recurjax.variants.transformer import TransformerConfig


def hf_pieces(architecture: Architecture, config: ModelConfig) -> list[Piece]:
    """Returns the table of a model whose stack is a Transformer."""
    table = PieceTable(config)
    if architecture == "gpt_neox":
        _gpt_neox(table, config)
    else:
        _llama(table, config)
    return table.finished()


TIED_TENSORS = (
    ("model.embed_tokens.weight", "lm_head.weight"),
    ("gpt_neox.embed_in.weight", "embed_out.weight"),
)
"""Embedding and head, of Llama's relatives and of GPT-NeoX."""


def ignored_tensors(architecture: Architecture, config: ModelConfig) -> set[str]:
    """Names that checkpoints may hold and that carry nothing of their own.

    A tied head repeats the embedding; old files hold tables that follow from the
    config (inverse frequencies, causal masks).
    """
    # A tied head is written again in some files; it is the embedding.
    names = {"lm_head.weight"} if config.tied_head else set()
    for layer in range(config.stack.layers):
        if architecture == "gpt_neox":
            prefix = f"gpt_neox.layers.{layer}.attention."
            tables = ("rotary_emb.inv_freq", "bias", "masked_bias")
            names |= {prefix + table for table in tables}
        else:
            names.add(f"model.layers.{layer}.self_attn.rotary_emb.inv_freq")
    return names | ({"embed_out.weight"} if config.tied_head else set())


def _llama(table: PieceTable, config: ModelConfig) -> None:
    table.same("model.embed_tokens.weight", "w_embedding")
    table.same("model.norm.weight", "final_norm.scale")
    table.same("lm_head.weight", "w_head")
    for layer, ours, place in _layers(config):
        theirs = f"model.layers.{layer}"
        for name, norm in (
            ("input_layernorm", "attention_norm"),
            ("post_attention_layernorm", "mlp_norm"),
        ):
            table.same(f"{theirs}.{name}.weight", f"{ours}.{norm}.scale", place)
        # Their o_proj is our w_out; the others have the same letters.
        for name, part in (("q", "q"), ("k", "k"), ("v", "v"), ("o", "out")):
            tensor = f"{theirs}.self_attn.{name}_proj"
            table.same(f"{tensor}.weight", f"{ours}.attention.w_{part}", place)
            table.same(f"{tensor}.bias", f"{ours}.attention.b_{part}", place)
        for part in ("gate", "up", "down"):
            tensor = f"{theirs}.mlp.{part}_proj"
            table.same(f"{tensor}.weight", f"{ours}.mlp.w_{part}", place)
            table.same(f"{tensor}.bias", f"{ours}.mlp.b_{part}", place)


def _gpt_neox(table: PieceTable, config: ModelConfig) -> None:
    table.same("gpt_neox.embed_in.weight", "w_embedding")
    for theirs, ours in (("weight", "scale"), ("bias", "bias")):
        table.same(f"gpt_neox.final_layer_norm.{theirs}", f"final_norm.{ours}")
    table.same("embed_out.weight", "w_head")
    assert isinstance(config.stack, TransformerConfig)
    a, D = config.stack.attention, config.stack.width
    H, E = a.heads, a.head_width
    for layer, ours, place in _layers(config):
        theirs = f"gpt_neox.layers.{layer}"
        for name, norm in (
            ("input_layernorm", "attention_norm"),
            ("post_attention_layernorm", "mlp_norm"),
        ):
            table.same(f"{theirs}.{name}.weight", f"{ours}.{norm}.scale", place)
            table.same(f"{theirs}.{name}.bias", f"{ours}.{norm}.bias", place)
        # Rows are interleaved per head: head 0's q, k, v, then head 1's.
        fused = f"{theirs}.attention.query_key_value"
        for i, name in enumerate("qkv"):
            table.part(
                f"{fused}.weight",
                f"{ours}.attention.w_{name}",
                place,
                shape=(3 * H * E, D),
                view=(H, 3, E, D),
                # Out axis [H, 3, E] and inputs D; ours is [D, H, E]: inputs first.
                part=(slice(None), i),
                axes=(2, 0, 1),
            )
            table.part(
                f"{fused}.bias",
                f"{ours}.attention.b_{name}",
                place,
                shape=(3 * H * E,),
                view=(H, 3, E),
                part=(slice(None), i),
                axes=(0, 1),
            )
        for tensor, part in (
            (f"{theirs}.attention.dense", "attention.{}_out"),
            (f"{theirs}.mlp.dense_h_to_4h", "mlp.{}_up"),
            (f"{theirs}.mlp.dense_4h_to_h", "mlp.{}_down"),
        ):
            table.same(f"{tensor}.weight", f"{ours}.{part.format('w')}", place)
            table.same(f"{tensor}.bias", f"{ours}.{part.format('b')}", place)


def _layers(config: ModelConfig) -> list[tuple[int, str, int]]:
    """Returns each layer's number, our block's name, and its place in the stack."""
    assert isinstance(config.stack, TransformerConfig)
    period = len(config.stack.windows)
    return [
        (layer, f"stack.blocks.{layer % period}", layer // period)
        for layer in range(config.stack.layers)
    ]
