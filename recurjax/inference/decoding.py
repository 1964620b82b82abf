"""The compiled programs: prefill of ragged prompts, and many decode steps at once."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Bool, Float, Int, Key

from pallas_kernels import target
from recurjax.inference.sampling import RowSampling, sample
from recurjax.model import Decoder
from recurjax.sharding import replicated
from recurjax.types import Array, Cache, Tokens

NOT_FINITE = -1
"""In place of a token: the logits that it was to be drawn from were not finite."""


class DecodeState(NamedTuple):
    """Where a batch of texts stands between two calls.

    Attributes:
      cache: of every token but the newest.
      newest: the token of each row that the model has not read yet.
      seen: which tokens a row contains; None without a repetition penalty.
      finished: rows that drew an EOS; they read nothing more and keep `newest`.
      drawn: how many tokens each unfinished row has drawn.
      aux: what the prefill had to report, see `Decoder.prefill`.
    """

    cache: Cache
    newest: Int[Array, " B"]
    seen: Bool[Array, "B V"] | None
    finished: Bool[Array, " B"]
    drawn: Int[Array, ""]
    aux: dict[str, Float[Array, ""]]


@partial(jax.jit, static_argnames=("cache_length", "penalizes", "by", "mesh"))
def prefill(
    model: Decoder,
    tokens: Tokens,
    keys: Key[Array, " B"],
    eos: Int[Array, "..."],
    *,
    sampling: RowSampling,
    cache_length: int,
    penalizes: bool = False,
    by: str = "exact",
    mesh: Mesh | None = None,
) -> DecodeState:
    """Reads the prompts and draws the first new token of every row.

    Only the logits of each row's last real position are computed.

    Args:
      tokens: right-padded prompts with their `lengths`, each at least 1.
      keys: each row's random stream; draw n uses the key folded with n.
      eos: the token that finishes a row, or a list of them; -1: none.
      cache_length: how many tokens a row's cache can hold.
      penalizes: whether any row has a repetition penalty, for which the state keeps
        what each row contains.
      by: how the prompts are read, see `Decoder.prefill`.
      mesh: every process of it gets the tokens of all rows; None: one device.
    """
    B, T = tokens.ids.shape
    assert tokens.lengths is not None
    # A cache is made inside the program: it is never copied to the device.
    cache = model.init_cache(B, cache_length, cache_dtype(model))
    x, cache, aux = model.prefill(tokens, cache, by=by)
    # Prompts are padded on the right: each row's next token follows its own last one.
    last = jnp.take_along_axis(x, (tokens.lengths - 1)[:, None, None], axis=1)
    seen = None
    if penalizes:
        # Padding points past the vocabulary: dropped.
        real = jnp.arange(T) < tokens.lengths[:, None]
        ids = jnp.where(real, tokens.ids, model.config.vocabulary)
        seen = jnp.zeros((B, model.config.vocabulary), bool)
        seen = seen.at[jnp.arange(B)[:, None], ids].set(True, mode="drop")
    state = DecodeState(
        cache=cache,
        # Replaced by the first draw below; only its shape and dtype count here.
        newest=tokens.ids[:, 0],
        seen=seen,
        finished=jnp.zeros(B, bool),
        drawn=jnp.zeros((), jnp.int32),
        aux=aux,
    )
    state = draw(state, model.logits(last[:, 0]), keys, eos, sampling)
    return state._replace(
        newest=_everywhere(state.newest, mesh), aux=_everywhere(aux, mesh)
    )


@partial(jax.jit, static_argnames=("chunk", "mesh"), donate_argnames="state")
def decode(
    model: Decoder,
    state: DecodeState,
    keys: Key[Array, " B"],
    eos: Int[Array, "..."],
    limit: Int[Array, ""],
    *,
    sampling: RowSampling,
    chunk: int,
    mesh: Mesh | None = None,
) -> tuple[DecodeState, Int[Array, "B N"]]:
    """Draws up to `limit` further tokens a row; ends early when every row is finished.

    Returns the state and N = `chunk` columns of tokens: column n is draw n of this
    call, without meaning after a row's EOS and beyond `limit`.

    Args:
      state: donated: its cache is updated in place.
      limit: at most `chunk`; a number, so that a shorter last call compiles nothing.
      mesh: as of `prefill`.
    """

    def unfinished(carry) -> Bool[Array, ""]:
        n, state, _ = carry
        # All rows finished: the rest of the chunk is not computed.
        return (n < limit) & ~jnp.all(state.finished)

    def step(carry):
        n, state, made = carry
        state = decode_step(model, state, keys, eos, sampling=sampling)
        return n + 1, state, made.at[:, n].set(state.newest)

    # Columns beyond the end keep 0; the host does not look at them.
    made = jnp.zeros((state.newest.shape[0], chunk), jnp.int32)
    start = (jnp.zeros((), jnp.int32), state, made)
    _, state, made = jax.lax.while_loop(unfinished, step, start)
    return state, _everywhere(made, mesh)


def decode_step(
    model: Decoder,
    state: DecodeState,
    keys: Key[Array, " B"],
    eos: Int[Array, "..."],
    *,
    sampling: RowSampling,
) -> DecodeState:
    """Reads each unfinished row's newest token and draws the next: one step, unjitted.

    Finished rows read nothing (a length of 0): their caches stay as they are, so that
    an engine may put other requests into them at any step.
    """
    # A length of 0 is a token that is not there, for attention and for recurrent
    # states.
    lengths = (~state.finished).astype(jnp.int32)
    tokens = Tokens(state.newest[:, None], lengths=lengths)
    x, cache = model.hidden(tokens, state.cache)
    state = state._replace(cache=cache)
    return draw(state, model.logits(x[:, 0]), keys, eos, sampling)


def _everywhere(tree: Any, mesh: Mesh | None) -> Any:
    if mesh is None:
        return tree
    return jax.lax.with_sharding_constraint(tree, replicated(mesh))


def cache_dtype(model: Decoder) -> str:
    """Returns float32 for bfloat16 models on CPU, where it holds the same values.

    XLA's CPU backend widens and narrows the whole of a bfloat16 cache to write a token.
    """
    dtype = model.config.dtype
    widens = target.widens_bfloat16()
    return "float32" if widens and dtype == "bfloat16" else dtype


def draw(
    state: DecodeState,
    logits: Float[Array, "B V"],
    keys: Key[Array, " B"],
    eos: Int[Array, "..."],
    sampling: RowSampling,
) -> DecodeState:
    """Draws each unfinished row's next token from its logits."""
    drawn = jnp.broadcast_to(state.drawn, state.newest.shape)
    ids = draw_ids(logits, keys, drawn, state.seen, sampling)
    # A finished row draws too, as all rows do, and keeps what it had.
    ids = jnp.where(state.finished, state.newest, ids)
    ends = (ids[:, None] == jnp.atleast_1d(eos)).any(axis=-1)
    seen = state.seen
    if seen is not None:
        seen = seen.at[jnp.arange(ids.shape[0]), ids].set(True)
    return state._replace(
        newest=ids,
        seen=seen,
        finished=state.finished | ends,
        drawn=state.drawn + 1,
    )


def draw_ids(
    logits: Float[Array, "B V"],
    keys: Key[Array, " B"],
    drawn: Int[Array, " B"],
    seen: Bool[Array, "B V"] | None,
    sampling: RowSampling,
) -> Int[Array, " B"]:
    """Draws a token for each row, or `NOT_FINITE`.

    A draw depends on the row's own stream and on how many it has drawn, not on the
    batch.
    """
    keys = jax.vmap(jax.random.fold_in)(keys, drawn)
    ids = sample(keys, logits, seen, sampling)
    # Of NaN any token is as likely: none is drawn, and the host finds the mark.
    return jnp.where(jnp.isfinite(logits).all(-1), ids, NOT_FINITE)
