"""The recency ratio of attention heads, and the choice of local heads by it.

Source: RecurFormer, section 3.1, as the specification reads it: the first key token is
left out (much attention falls on it whatever the text says), the window is a tenth of
the text, and a head is recent in a text where its ratio exceeds a half.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from recurjax.errors import UserError
from recurjax.files.atomic import write_figure
from recurjax.layers.attention import AttentionConfig
from recurjax.layers.position import Alibi
from recurjax.model import Decoder
from recurjax.types import Array, Tokens
from recurjax.variants.relaxed_recursive_transformer import (
    RelaxedRecursiveTransformerConfig,
)
from recurjax.variants.transformer import TransformerConfig

Scope = Literal["heads", "groups", "layer"]
"""heads: the most recent of the full model; groups: complete groups that share a key
head, by their mean, so that every one frees its cache; layer: as many in each layer."""


class HeadRecency(NamedTuple):
    """The measured recency of every head.

    Attributes:
      ratio: mean recency ratio over the texts.
      count: RA-I, in how many texts the ratio exceeded the threshold.
      first: mean share of attention that falls on the first key token.
      contributions: mean of a weight times its value's norm, [norm, key]: by L1 and L2
        norm, of the first key token and of all others (the paper's table 5).
      texts: how many there were.
      key_heads: K; H / K neighbours share one.
    """

    ratio: Float[np.ndarray, "L H"]
    count: Int[np.ndarray, "L H"]
    first: Float[np.ndarray, "L H"]
    contributions: Float[np.ndarray, "L H 2 2"]
    texts: int
    key_heads: int


def recency_ratio(attention: Float[Array, "*B T T"], window: int) -> Float[Array, "*B"]:
    """Returns the share of attention that falls within the window before each query.

    RR = sum of A[i, j] over 0 <= i - j <= k, over its sum over all j <= i; both for
    queries and keys from position 1 on. Nothing is renormalised.

    Args:
      attention: softmax weights [query, key], causal.
      window: k, in tokens.
    """
    # The first key is left out of both sums; queries start at position 1 with it.
    T = attention.shape[-1]
    distance = jnp.arange(T)[:, None] - jnp.arange(T)
    counted = (distance >= 0) & (jnp.arange(T) >= 1)
    near = counted & (distance <= window)
    # Sums of differences of T^2 weights: at least float32, as all sums here.
    wide = attention.astype(jnp.promote_types(attention.dtype, jnp.float32))
    return jnp.where(near, wide, 0).sum((-2, -1)) / jnp.where(counted, wide, 0).sum(
        (-2, -1)
    )


def with_own_heads(model: Decoder) -> TransformerConfig:
    """Returns the stack of a model each of whose layers has heads of its own.

    Raises:
      UserError: it is not a Transformer's.
    """
    stack = model.config.stack
    if isinstance(stack, RelaxedRecursiveTransformerConfig):
        raise UserError(
            "heads are replaced layer by layer, and the loops of a recursive model "
            "share theirs: write its layers out with recurjax convert to-transformer "
            "RUN OUT, and convert OUT"
        )
    if not isinstance(stack, TransformerConfig):
        raise UserError(
            "only heads of a Transformer can be replaced, and the model's "
            f"stack is a {type(stack).__name__}"
        )
    return stack


def measure_recency(
    model: Decoder,
    batches: Iterable[np.ndarray],
    *,
    window: int,
    threshold: float = 0.5,
    stop: Callable[[HeadRecency], bool] = lambda recency: False,
) -> HeadRecency:
    """Reads texts and measures all heads of a Transformer.

    A layer is run at a time, and one head's weights of a batch exist at once.

    Args:
      batches: token ids [B, T], all texts of one length T > 1.
      window: k, in tokens.
      threshold: alpha: a head is recent in a text where its ratio is above.
      stop: gets what was measured so far after each batch; True: no more is read.

    Raises:
      UserError: the model is not a Transformer, its layers have windows or ALiBi, or
        there is no text.
    """
    config = with_own_heads(model)
    if len(config.pattern) > 1:
        raise UserError(
            "the recency of heads is measured in models whose layers are "
            f"alike, got a pattern of {len(config.pattern)} windows or "
            "positions"
        )
    # A window would decide the ratio before the text does.
    if config.windows != (None,):
        raise UserError(
            "heads with a window cannot be replaced, because the window "
            "bounds what they read: use a model without windows"
        )
    if isinstance(config.attention.position, Alibi):
        raise UserError(
            "heads with ALiBi cannot be replaced, because its slopes depend "
            "on the number of heads"
        )
    shape = (config.layers, config.attention.heads)
    ratio, first = np.zeros(shape), np.zeros(shape)
    contributions = np.zeros((*shape, 2, 2))
    count, texts = np.zeros(shape, np.int64), 0
    recency = None
    for ids in batches:
        x = _first_input(model, ids)
        for layer in range(config.layers):
            x, scores = _layer_recency(
                model.stack, x, jnp.asarray(layer), window=window
            )
            ratios, shares, products = map(np.asarray, scores)
            ratio[layer] += ratios.sum(0)
            first[layer] += shares.sum(0)
            contributions[layer] += products.sum(0)
            count[layer] += (ratios > threshold).sum(0)
        texts += len(ids)
        recency = HeadRecency(
            ratio / texts,
            count.copy(),
            first / texts,
            contributions / texts,
            texts,
            config.attention.key_heads,
        )
        if stop(recency):
            break
    if recency is None:
        raise UserError(
            "--text is empty, and the recency of heads is measured on it: use more text"
        )
    return recency


CHECK_TEXTS = 16
"""Texts between two looks at which heads are chosen, where reading may stop."""
CHECKS = 4
"""Looks in a row that must choose the same heads before reading stops."""
ALIKE = 0.01
"""Share of all heads that may differ between choices that count as the same: at the
edge of a choice, heads that are equally recent take turns."""


def settled_choice(share: float, scope: Scope) -> Callable[[HeadRecency], bool]:
    """Returns a `stop` of `measure_recency`: the choice of heads no longer changes.

    Heads are chosen after every `CHECK_TEXTS` texts. Reading stops once `CHECKS` looks
    in a row chose the same ones, up to `ALIKE` of all heads from each to the last, so
    that it depends on the texts alone.

    Args:
      share, scope: see `choose_heads`.
    """
    choices: list[set[tuple[int, int]]] = []

    def stop(recency: HeadRecency) -> bool:
        if recency.texts // CHECK_TEXTS > len(choices):
            choice = choose_heads(recency, share, scope=scope)
            choices.append({(n, head) for n, row in enumerate(choice) for head in row})
        recent, most = choices[-CHECKS:], ALIKE * recency.count.size
        alike = all(len(recent[-1] - look) <= most for look in recent)
        return len(recent) == CHECKS and alike

    return stop


def _first_input(model: Decoder, ids: np.ndarray) -> Float[Array, "B T D"]:
    """Returns what the first layer reads: positions are added as the stack does it."""
    x = model.embed(ids)
    if model.stack.position is not None:  # pyright: ignore[reportAttributeAccessIssue]
        x = model.stack.position(x, jnp.arange(ids.shape[1])[None])  # pyright: ignore[reportAttributeAccessIssue]
    return x


def _block_output(stack, block, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    """Runs a layer on entire texts."""
    cache = stack.init_cache(x.shape[0], 0, x.dtype).groups[0]
    x, _ = block(x, cache, Tokens(jnp.zeros(x.shape[:2], jnp.int32)))
    return x


@partial(jax.jit, static_argnames="window")
def _layer_recency(
    stack, x: Float[Array, "B T D"], layer: Int[Array, ""], *, window: int
) -> tuple[
    Float[Array, "B T D"],
    tuple[Float[Array, "B H"], Float[Array, "B H"], Float[Array, "B H 2 2"]],
]:
    """Runs one layer; returns its output, and each head's ratio, share and products."""
    block = jax.tree.map(lambda leaf: leaf[layer], stack.blocks[0])
    # The block's own queries, keys and values, norms and positions applied.
    config = stack.config.attention
    q, k, v = block.attention.queries_keys_values(block.attention_input(x))
    T, H = q.shape[1:3]
    v = v.astype(jnp.promote_types(v.dtype, jnp.float32))
    norms = jnp.stack([jnp.linalg.norm(v, ord=n, axis=-1) for n in (1, 2)])

    def head(number: Array) -> tuple[Array, Array, Array]:
        # Query heads of a group share one key head.
        group = number // (H // config.key_heads)
        weights = _weights(config, q[:, :, number], k[:, :, group])
        # A key's weights over all queries; the first query has the first key alone.
        of_key = weights[:, 1:].sum(1)
        products = of_key * norms[..., group]  # [norm, B, T]
        # Pairs of a query and a key it reads: with the first key, and with others.
        pairs = T - 1, T * (T - 1) // 2
        means = [
            products[..., :1].sum(-1) / pairs[0],
            products[..., 1:].sum(-1) / pairs[1],
        ]
        contributions = jnp.stack(means, axis=-1).swapaxes(0, 1)
        return recency_ratio(weights, window), of_key[:, 0] / pairs[0], contributions

    # One head after another: [B, T, T] weights of all would not fit.
    scores = jax.lax.map(head, jnp.arange(H))
    x = _block_output(stack, block, x)
    # lax.map stacks head by head, [H, B, ...].
    ratios, shares, contributions = scores
    return x, (ratios.T, shares.T, contributions.swapaxes(0, 1))


def _weights(
    config: AttentionConfig, q: Float[Array, "B T E"], k: Float[Array, "B T E"]
) -> Float[Array, "B T T"]:
    """Returns the causal softmax weights of one head, [query, key], in float32."""
    T, E = q.shape[1:]
    logits = jnp.einsum("bte,bse->bts", q, k, preferred_element_type=jnp.float32)
    logits = logits * (E**-0.5 if config.scale is None else config.scale)
    if config.soft_cap is not None:
        logits = config.soft_cap * jnp.tanh(logits / config.soft_cap)
    causal = jnp.arange(T)[:, None] >= jnp.arange(T)
    return jax.nn.softmax(jnp.where(causal, logits, -jnp.inf), axis=-1)


def mean_attention(
    model: Decoder, batches: Iterable[np.ndarray], heads: Sequence[tuple[int, int]]
) -> dict[tuple[int, int], tuple[np.ndarray, np.ndarray]]:
    """Returns heads' weights [T, T] and values' L2 norms [T], means over texts.

    Args:
      model: a Transformer as `measure_recency` takes it.
      batches: token ids [B, T], all texts of one length.
      heads: (layer, head) of each, from 0.
    """
    sums: dict[tuple[int, int], list[Any]] = {each: [0.0, 0.0] for each in heads}
    texts = 0
    for ids in batches:
        x = _first_input(model, ids)
        for layer in range(1 + max(layer for layer, _ in sums)):
            numbers = tuple(head for l, head in sums if l == layer)
            x, parts = _layer_attention(
                model.stack, x, jnp.asarray(layer), numbers=numbers
            )
            for number, part in zip(numbers, parts, strict=True):
                for place, values in enumerate(part):
                    sums[layer, number][place] += np.asarray(values, np.float64)
        texts += len(ids)
    return {each: (w / texts, n / texts) for each, (w, n) in sums.items()}


@partial(jax.jit, static_argnames="numbers")
def _layer_attention(
    stack, x: Float[Array, "B T D"], layer: Int[Array, ""], *, numbers: tuple[int, ...]
) -> tuple[Float[Array, "B T D"], list[tuple[Float[Array, "T T"], Float[Array, " T"]]]]:
    """Runs one layer; returns its output, and sums over texts of some heads."""
    block = jax.tree.map(lambda leaf: leaf[layer], stack.blocks[0])
    config = stack.config.attention
    q, k, v = block.attention.queries_keys_values(block.attention_input(x))
    sums = []
    for number in numbers:
        group = number // (config.heads // config.key_heads)
        weights = _weights(config, q[:, :, number], k[:, :, group])
        norms = jnp.linalg.norm(v[:, :, group].astype(jnp.float32), axis=-1)
        sums.append((weights.sum(0), norms.sum(0)))
    return _block_output(stack, block, x), sums


def choose_heads(
    recency: HeadRecency, share: float, *, scope: Scope
) -> tuple[tuple[int, ...], ...]:
    """Chooses the heads to replace: the most recent ones by RA-I.

    Ties go by the mean ratio, then by layer and head.

    Args:
      share: beta, of all heads (or groups), from 0 to 1; round(beta L H) are chosen.
      scope: see `Scope`.

    Returns:
      For each layer its replaced query heads, ascending.
    """
    L, H = recency.count.shape
    check_share(share)
    count, ratio = recency.count.astype(float), recency.ratio
    # Groups are ranked by their mean, because complete groups are replaced.
    if scope == "groups":
        count, ratio = (
            x.reshape(L, recency.key_heads, -1).mean(-1) for x in (count, ratio)
        )
    columns = count.shape[1]
    # lexsort: the last key is the first to decide.
    order = np.lexsort((np.arange(L * columns), -ratio.ravel(), -count.ravel()))
    if scope == "layer":
        replaced = set()
        for layer in range(L):
            heads = [n for n in order.tolist() if n // columns == layer]
            replaced |= set(heads[: round(share * columns)])
    else:
        replaced = set(order[: round(share * L * columns)].tolist())
    # Query heads of one column: 1, or a full group.
    size = H // columns
    return tuple(
        tuple(head for head in range(H) if layer * columns + head // size in replaced)
        for layer in range(L)
    )


def plot_heads(
    recency: HeadRecency, replaced: tuple[tuple[int, ...], ...], file: Path
) -> None:
    """Draws RA-I as a share of the texts, layers down and heads across (figure 9).

    A cross marks what is replaced.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    L, H = recency.count.shape
    # Wide enough for the title, however few heads there are.
    size = (max(4.2, 1.5 + 0.28 * H), 1.4 + 0.28 * L)
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    shares = recency.count / recency.texts
    image = axes.imshow(shares, cmap="viridis", vmin=0, vmax=1, aspect="auto")
    marks = [(head, layer) for layer, heads in enumerate(replaced) for head in heads]
    if marks:
        across, down = zip(*marks, strict=True)
        # Seen on dark and on light: those that go are mostly the lightest.
        axes.scatter(across, down, marker="x", color="red", s=18, linewidths=1.2)
    axes.set(
        xlabel="head",
        ylabel="layer",
        title="share of texts in which a head is recent\n(x: replaced)",
    )
    figure.colorbar(image)
    write_figure(figure, file)


def first_heads(layers: int, heads: int, share: float) -> tuple[tuple[int, ...], ...]:
    """Chooses the first round(beta H) heads of each layer, for an untrained model.

    Nothing is recent before training: a fixed order serves as well as any.
    """
    check_share(share)
    return (tuple(range(round(share * heads))),) * layers


def check_share(share: float) -> None:
    """Raises UserError for a share of heads that is none."""
    if not (math.isfinite(share) and 0.0 <= share <= 1.0):
        raise UserError(f"--beta must be between 0 and 1, got {share}")
