"""When a token may leave a stack of loops early: rules, as functions of what it saw.

A rule gives a score after each loop but the last; a score above the threshold lets the
token leave. Sources: Schuster et al. 2022 (CALM), section 3.4, for all three; the
paper's section 3.8 for the oracle, which compares with the deepest loop's prediction
and so can only be looked at, not run.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from pallas_kernels import reductions
from recurjax.errors import UserError
from recurjax.model import Decoder, SupportsExits, as_exits
from recurjax.types import Array, Missing

RuleKind = Literal["confidence", "cosine", "head"]
RULES: tuple[RuleKind, ...] = ("confidence", "cosine", "head")


@dataclass(frozen=True, kw_only=True, slots=True)
class ExitRule:
    """Leave after a loop whose score exceeds a threshold.

    Attributes:
      kind: confidence: p(likeliest) - p(second likeliest). cosine: how far the loop
        left the token's state where it was. head: a trained `ExitHead`.
      threshold: strictly exceeded by the score. Below the least score every token
        leaves after one loop, at the largest (1) none leaves early.
    """

    kind: RuleKind
    threshold: float


class ExitHead(NamedTuple):
    """A linear guess, for each loop but the last, of whether more loops change a token.

    Attributes:
      weight: weight that multiplies the states that the output head reads, after the
        final norm.
      bias: added to the product.
    """

    weight: Float[Array, "N D"]
    bias: Float[Array, " N"]


@dataclass(frozen=True, kw_only=True)
class EarlyExit:
    """Settings of early exits.

    Attributes:
      rule: when.
      missing: what becomes of the keys and values that they then lack; "verify": they
        continue through all loops while their successor starts from the exit's guess,
        and greedy texts are the full model's. None: as the model was trained.
      head: exit head of the rule "head".
    """

    rule: ExitRule
    missing: Missing | Literal["verify"] | None = None
    head: ExitHead | None = None


def exits_of(model: Decoder) -> SupportsExits:
    """Returns the model's stack as one that tokens can leave early.

    Raises:
      UserError: the model has no loops, or one with fewer loops is not a model.
    """
    stack = as_exits(model.stack)
    if stack is None:
        raise UserError(
            "early exits need a recursive model, and the stack is a "
            f"{type(model.config.stack).__name__}: leave them out"
        )
    # In the way that fits the model, it refuses only if it has no exits at all.
    if (reason := stack.refuses_exits(stack.missing)) is not None:
        raise UserError(reason)
    return stack


def parse_rule(text: str) -> ExitRule:
    """Reads "confidence:0.7".

    Raises:
      UserError: the rule has another form, or the threshold is outside 0..1.
    """
    name, _, number = text.partition(":")
    try:
        threshold = float(number)
    except ValueError:
        threshold = float("nan")
    known: dict[str, RuleKind] = {kind: kind for kind in RULES}
    rule = known.get(name)
    if rule is None or not 0.0 <= threshold <= 1.0:
        raise UserError(
            f"--exit must be a rule, one of {', '.join(RULES)}, and a "
            f"threshold from 0 to 1, such as confidence:0.7, got {text}"
        )
    return ExitRule(kind=rule, threshold=threshold)


def scores(
    kind: RuleKind,
    head: ExitHead | None,
    loop: Int[Array, "B T"],
    before: Float[Array, "B T D"],
    after: Float[Array, "B T D"],
    normed: Float[Array, "B T D"],
    logits: Float[Array, "B T V"],
) -> Float[Array, "B T"]:
    """Returns a rule's score of tokens that have run mixed loops.

    Args:
      head: exit head of the rule "head".
      loop: the loop that each has run last, from 0; of the deepest the score means
        nothing.
      before, after: the states around that loop.
      normed: what the output head reads.
    """
    if kind == "confidence":
        return confidence(logits)
    if kind == "cosine":
        return cosine(before, after)
    assert head is not None
    at = jnp.minimum(loop, head.weight.shape[0] - 1)
    weight, bias = jnp.asarray(head.weight)[at], jnp.asarray(head.bias)[at]
    return jax.nn.sigmoid(jnp.sum(normed.astype(weight.dtype) * weight, axis=-1) + bias)


def confidence(logits: Float[Array, "*B V"]) -> Float[Array, "*B"]:
    """Returns the likeliest token's probability less the second likeliest's."""
    two, _ = jax.lax.top_k(reductions.softmax(logits), 2)
    return two[..., 0] - two[..., 1]


def cosine(
    before: Float[Array, "*B D"], after: Float[Array, "*B D"]
) -> Float[Array, "*B"]:
    """Returns x y / (|x| |y|) of a token's states before and after a loop.

    Before the first loop that is the embedding.
    """
    dtype = jnp.promote_types(after.dtype, jnp.float32)
    x, y = before.astype(dtype), after.astype(dtype)
    product = jnp.sum(x * y, axis=-1)
    sizes = jnp.sum(x * x, axis=-1) * jnp.sum(y * y, axis=-1)
    return product / jnp.sqrt(jnp.maximum(sizes, jnp.finfo(dtype).tiny))


def head_score(
    head: ExitHead, loop: int, normed: Float[Array, "*B D"]
) -> Float[Array, "*B"]:
    """Returns sigmoid(w x + b) of states after loop 1 .. B - 1."""
    return jax.nn.sigmoid(head_logit(head, loop, normed))


def head_logit(
    head: ExitHead, loop: int, normed: Float[Array, "*B D"]
) -> Float[Array, "*B"]:
    """Returns w x + b, what a head is trained by."""
    weight, bias = head.weight[loop - 1], head.bias[loop - 1]
    return normed.astype(weight.dtype) @ weight + bias
