"""Hugging Face's tensor names for our parameters, by the row of a family."""

from recurjax.convert.formats.tensors import RenamedTensors, TensorSource
from recurjax.convert.hugging_face.families import FAMILIES, Family
from recurjax.convert.pieces import Piece, PieceTable
from recurjax.model import ModelConfig
from recurjax.variants.transformer import TransformerConfig


def hf_pieces(architecture: str, config: ModelConfig) -> list[Piece]:
    """Returns the table of a model whose stack is a Transformer."""
    table, family = PieceTable(config), FAMILIES[architecture]
    for theirs, ours in family.outer.items():
        _module(table, theirs, "", [ours])
    assert isinstance(config.stack, TransformerConfig)
    for layer in range(config.stack.layers):
        block, entry = config.stack.place_of(layer)
        for theirs, ours in family.inner.items():
            names = ours.split()
            theirs = f"{family.layer.format(layer)}.{theirs}"
            prefix = f"stack.blocks.{block}."
            if len(names) > 1 and family.fused == "heads":
                _interleaved(table, theirs, prefix, names, entry)
            else:
                inputs_first = family.inputs_first
                _module(table, theirs, prefix, names, entry, inputs_first)
    return table.finished()


def _module(
    table: PieceTable,
    theirs: str,
    prefix: str,
    names: list[str],
    entry: int | None = None,
    inputs_first: bool = False,
) -> None:
    """Adds a module's weight and bias, of one parameter of ours or of several."""
    for suffix in ("weight", "bias"):
        parameters = [prefix + _parameter(name, suffix) for name in names]
        if len(parameters) == 1 and not (inputs_first and suffix == "weight"):
            table.same(f"{theirs}.{suffix}", parameters[0], entry)
        else:
            table.rows(
                f"{theirs}.{suffix}", parameters, entry, inputs_first=inputs_first
            )


def _interleaved(
    table: PieceTable, theirs: str, prefix: str, names: list[str], entry: int
) -> None:
    """Adds a tensor whose rows are head 0's q, k, v, then head 1's, and so on."""
    assert isinstance(table.config.stack, TransformerConfig)
    a, D = table.config.stack.attention, table.config.stack.width
    H, E, N = a.heads, a.head_width, len(names)
    for number, name in enumerate(names):
        # Out axis [H, N, E] and inputs D; ours is [D, H, E]: inputs first.
        table.part(
            f"{theirs}.weight",
            prefix + _parameter(name, "weight"),
            entry,
            shape=(N * H * E, D),
            view=(H, N, E, D),
            part=(slice(None), number),
            axes=(2, 0, 1),
        )
        table.part(
            f"{theirs}.bias",
            prefix + _parameter(name, "bias"),
            entry,
            shape=(N * H * E,),
            view=(H, N, E),
            part=(slice(None), number),
            axes=(0, 1),
        )


def _parameter(ours: str, suffix: str) -> str:
    """Returns our parameter that a module has as weight or bias."""
    parents, dot, last = ours.rpartition(".")
    if last.endswith("norm"):
        return f"{ours}.{'scale' if suffix == 'weight' else 'bias'}"
    return f"{parents}{dot}{suffix[0]}_{last}"


def tied_tensors(family: Family) -> tuple[str, str]:
    """Returns the names of the embedding and of the head."""
    embedding, head = (family.module(ours) for ours in ("embedding", "head"))
    return f"{embedding}.weight", f"{head}.weight"


def ignored_tensors(architecture: str, config: ModelConfig) -> set[str]:
    """Names that checkpoints may hold and that carry nothing of their own.

    A tied head repeats the embedding; old files hold tables that follow from the
    config (inverse frequencies, causal masks).
    """
    family = FAMILIES[architecture]
    names = {
        f"{family.layer.format(layer)}.{table}"
        for layer in range(config.stack.layers)
        for table in family.tables
    }
    return names | ({tied_tensors(family)[1]} if config.tied_head else set())


def with_usual_names(source: TensorSource, architecture: str) -> TensorSource:
    """Returns a checkpoint under the names of its family's full model.

    A file of the decoder without its head has no prefix ("h.0.ln_1.weight"); one of a
    model that reads images too has the text model inside it.
    """
    family = FAMILIES[architecture]
    embedding, head = tied_tensors(family)
    prefix = family.prefix
    short = embedding.removeprefix(prefix)
    for inner, outer in (
        ("", head),
        (f"language_model.{prefix}", f"language_model.{head}"),
        (f"{prefix}language_model.", head),
    ):
        if embedding in source.tensors or inner + short not in source.tensors:
            continue
        names = {
            prefix + name.removeprefix(inner): name
            for name in source.tensors
            if name.startswith(inner) and name != outer
        }
        if outer in source.tensors:
            names[head] = outer
        return RenamedTensors(source, names)
    return source
