"""Checks whether an engine is possible, and selects its decode strategy."""

from jax.sharding import Mesh

from recurjax.data.tokenizers import Tokenizer
from recurjax.errors import UserError
from recurjax.exits import ExitHead, exits_of
from recurjax.inference.engine.config import EngineConfig
from recurjax.inference.engine.depth_wise import DepthWise, Verified
from recurjax.inference.engine.slots import DecodeStrategy, SequenceWise
from recurjax.inference.engine.speculative import Speculative, refuse_speculation
from recurjax.model import Decoder


def choose_strategy(
    model: Decoder, config: EngineConfig, head: ExitHead | None
) -> DecodeStrategy:
    """Returns the strategy that a config names.

    Args:
      head: for the rule "head".

    Raises:
      UserError: the model has no loops to leave, or others than the rule needs.
    """
    if config.speculate is not None:
        reason = refuse_speculation(model, config.speculate)
        if reason is not None:
            raise UserError(reason)
        return Speculative(most_tokens=config.speculate)
    if config.exit is None:
        return SequenceWise()
    # Keys and values that a token lacks are made up for as the model was trained.
    usual = exits_of(model).missing
    verifies = config.missing == "verify"
    # Under `verify` nothing is missing in the end, whatever the model does about it.
    missing = usual if config.missing in (None, "verify") else config.missing
    reason = exits_of(model).refuses_exits(missing)
    if reason is not None:
        raise UserError(reason)
    if config.exit.kind == "head" and head is None:
        raise UserError(
            "the rule head needs a trained exit head: train one with recurjax "
            "evaluate exits RUN --fit-head 100"
        )
    if (reason := exits_of(model).refuses_ticks(rollback=verifies)) is not None:
        what = "verify takes back what follows a wrong guess" if verifies else "exit"
        raise UserError(f"{what}: {reason}")
    if verifies:
        return Verified(kind=config.exit.kind)
    return DepthWise(kind=config.exit.kind, missing=missing)


def refuse_engine(
    model: Decoder,
    config: EngineConfig,
    *,
    tokenizer: Tokenizer | None,
    mesh: Mesh | None,
) -> str | None:
    """Returns what speaks against an engine, or None; before anything is compiled."""
    reason = model.refuses_prefill(config.prefill)
    if reason is None and mesh is not None:
        reason = model.stack.refuses(mesh, config.length)
        if config.exit is not None:
            reason = "early exits run on one device: leave the mesh out"
        if config.speculate is not None:
            reason = "speculate runs on one device: leave the mesh out"
    if reason is None:
        what = f"a slot of {config.length} tokens"
        reason = model.config.refuses_length(config.length, what)
    if reason is None and tokenizer is not None:
        has, knows = tokenizer.vocabulary, model.config.vocabulary
        if has > knows:
            reason = (
                f"the tokenizer has {has} tokens and the model only {knows}: use "
                "the model's own tokenizer"
            )
    return reason
