"""The XLA backend where logits are few: bands of positions against their prefix.

All C positions of a chunk see the same ends, so logits are plain products of a block of
queries with all ends that its band may see, [S, rows] a head: with ends as rows, sums
and maxima over them run along the vectors of a CPU. The mask is made from indices
inside the block. The own term is one more row, kept apart from the products.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Float

from pallas_kernels import few_queries, reductions
from pallas_kernels.chunk_attention.call import Array, ChunkAttentionCall
from pallas_kernels.chunk_attention.xla_cuts import Bands, choose_bands


def forward(
    call: ChunkAttentionCall,
) -> tuple[Float[Array, "B T H E"], Float[Array, "B T H"]]:
    """Returns o and the log-sum-exp."""
    q, own_logits, own_values = call[:3]
    scale = call.options.scale
    dtype = jnp.promote_types(q.dtype, jnp.float32)
    scaled = scale * own_logits.astype(dtype)

    def block(keys, values, hidden, rows):
        q, own_logit = rows["q"], rows["own"]
        logits = _logits(q, keys, scale, hidden)  # [B, H, S, T]
        top = jnp.maximum(
            own_logit, reductions.largest(logits, axis=2, initial=-jnp.inf)
        )
        p = jnp.exp(logits - top[:, :, None])
        p_own = jnp.exp(own_logit - top)
        total = jnp.sum(p, axis=2) + p_own
        o = _weighted(values, p.astype(values.dtype), dtype)
        o = (o / total[:, :, None]).astype(values.dtype).swapaxes(2, 3)
        return {"o": o, "weight": p_own / total, "lse": top + jnp.log(total)}

    rows = {"q": _tiled(q, scaled.shape[2]), "own": scaled.swapaxes(1, 2)}
    parts = [
        jax.lax.map(lambda part, band=band: band.run(block, part), band.rows(rows))
        for band in _bands(call)
    ]
    out = _joined(parts, scaled.shape[1])
    own_part = out["weight"].swapaxes(1, 2)[..., None] * own_values
    o = out["o"].swapaxes(1, 2) + own_part
    return o.astype(own_values.dtype), out["lse"].swapaxes(1, 2)


def backward(
    call: ChunkAttentionCall,
    o: Float[Array, "B T H E"],
    lse: Float[Array, "B T H"],
    do: Float[Array, "B T H E"],
) -> ChunkAttentionCall:
    """Returns gradients in place of the arrays."""
    q, own_logits, own_values, ends = call[:4]
    scale = call.options.scale
    B, T, N, E = q.shape
    H = own_logits.shape[2]
    dtype = jnp.promote_types(q.dtype, jnp.float32)
    wide = do.astype(dtype)
    delta = jnp.sum(wide * o, axis=-1)  # [B, T, H]
    weight = jnp.exp(scale * own_logits.astype(dtype) - lse)
    d_own_values = weight[..., None] * wide
    d_own_logits = scale * weight * (jnp.sum(wide * own_values, axis=-1) - delta)

    def block(keys, values, hidden, rows):
        q, do = rows["q"], rows["do"]
        p = jnp.exp(_logits(q, keys, scale, hidden) - rows["lse"][:, :, None])
        dp = _product("bhse,bhte->bhst", values, do, dtype)
        d_logits = (scale * p * (dp - rows["delta"][:, :, None])).astype(q.dtype)
        return (
            _product("bhse,bhst->bhet", keys, d_logits, dtype).swapaxes(2, 3),
            _product("bhst,bhte->bhse", d_logits, q, dtype),
            _product("bhst,bhte->bhse", p.astype(q.dtype), do, dtype),
        )

    rows = {
        "q": _tiled(q, H),
        "do": do.astype(q.dtype).swapaxes(1, 2),
        "lse": lse.swapaxes(1, 2),
        "delta": delta.swapaxes(1, 2),
    }
    d_keys = jnp.zeros(ends.keys.shape, dtype)
    d_values = jnp.zeros(ends.values.shape, dtype)
    parts = []
    for band in _bands(call):

        def step(sums, part, band=band):
            dq, dk, dv = band.run(block, part)
            return (sums[0] + dk, sums[1] + dv), {"q": dq}

        S = band.keys.shape[2]
        sums = (d_keys[:, :, :S], d_values[:, :, :S])
        sums, part = jax.lax.scan(step, sums, band.rows(rows))
        d_keys = d_keys.at[:, :, :S].set(sums[0])
        d_values = d_values.at[:, :, :S].set(sums[1])
        parts.append(part)
    dq = _joined(parts, T)["q"].reshape(B, H // N, N, T, E)
    dq = sum(dq[:, tile] for tile in range(1, H // N)) + dq[:, 0]
    dq = dq.swapaxes(1, 2)
    return call.with_gradients(dq, d_own_logits, d_own_values, d_keys, d_values)


class _Band:
    """Some blocks of positions and the chunk ends that their last one may see."""

    def __init__(self, number: int, cut: Bands, call: ChunkAttentionCall):
        self.cut, self.first, self.chunk = cut, call.first, call.options.chunk
        self.start = number * cut.blocks * cut.block_q
        last = self.start + cut.blocks * cut.block_q - 1
        ends = call.ends
        S = ends.keys.shape[2] if self.first is not None else last // self.chunk
        self.keys, self.values = ends.keys[:, :, :S], ends.values[:, :, :S]
        self.documents = call.documents
        known = ends.documents
        self.end_documents = None if known is None else known[:, :S]

    def rows(self, arrays: dict[str, Array]) -> dict[str, Array]:
        """Cuts [B, H, T, ...] to this band's [blocks, B, H, rows, ...]."""
        cut = self.cut
        count = cut.blocks * cut.block_q
        starts = self.start + cut.block_q * jnp.arange(cut.blocks)
        parts = {"start": starts}
        arrays = dict(arrays)
        if self.documents is not None:
            arrays["documents"] = self.documents[:, None]
        for name, x in arrays.items():
            x = x[:, :, self.start : self.start + count]
            padding = [(0, 0)] * x.ndim
            padding[2] = (0, count - x.shape[2])
            x = jnp.pad(x, padding) if padding[2][1] else x
            x = x.reshape(*x.shape[:2], cut.blocks, cut.block_q, *x.shape[3:])
            parts[name] = jnp.moveaxis(x, 2, 0)
        return parts

    def run(self, block, rows: dict[str, Array]):
        """Runs one block of it."""
        # s < first + t // C as (s - first + 1) C <= t: no division for each logit.
        ends = jnp.arange(1, self.keys.shape[2] + 1)[None, :, None]  # [B, S, T]
        if self.first is not None:
            ends = ends - self.first[:, None, None]
        hidden = ends * self.chunk > rows["start"] + jnp.arange(self.cut.block_q)
        if self.end_documents is not None:
            others = self.end_documents[:, :, None] != rows["documents"]
            hidden = hidden | others
        return block(self.keys, self.values, hidden, rows)


def _bands(call: ChunkAttentionCall) -> list[_Band]:
    (B, T, H), S = call.own_logits.shape, call.ends.keys.shape[2]
    cut = choose_bands(B, T, H, S, causal=call.first is None)
    return [_Band(n, cut, call) for n in range(cut.bands)]


def _logits(q, keys, scale, hidden):
    dtype = jnp.promote_types(q.dtype, jnp.float32)
    logits = scale * _product("bhse,bhte->bhst", keys, q, dtype)
    return jnp.where(hidden[:, None], -jnp.inf, logits)


def _weighted(values: Array, p: Array, dtype) -> Array:
    """Sums values over the ends by their weights: [B, H, E, T]."""
    B, H, S, E = values.shape
    part = few_queries.choose_part(B, p.shape[3], S)
    if part == S:
        return _product("bhse,bhst->bhet", values, p, dtype)
    end = S - S % part
    v, w = (x[:, :, :end].reshape(B, H, -1, part, x.shape[3]) for x in (values, p))
    sums = _product("bhnse,bhnst->bhnet", v, w, dtype)
    # Separate from the sum over the parts, with which XLA would fuse it again.
    o = jnp.sum(jax.lax.optimization_barrier(sums), axis=2)
    rest = _product("bhse,bhst->bhet", values[:, :, end:], p[:, :, end:], dtype)
    return o + rest


def _product(subscripts: str, a, b, dtype):
    return jnp.einsum(subscripts, a, b, preferred_element_type=dtype)


def _tiled(q: Array, heads: int) -> Array:
    """[B, T, N, E] to [B, H, T, E]: head h has group h mod N."""
    return jnp.tile(q.swapaxes(1, 2), (1, heads // q.shape[2], 1, 1))


def _joined(parts: list[dict[str, Array]], length: int) -> dict[str, Array]:
    """Joins bands' [blocks, B, H, rows, ...] to [B, H, T, ...]."""
    joined = {}
    for name in parts[0]:
        pieces = [jnp.moveaxis(part[name], 0, 2) for part in parts]
        pieces = [x.reshape(*x.shape[:2], -1, *x.shape[4:]) for x in pieces]
        stream = pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces, axis=2)
        joined[name] = stream[:, :, :length]
    return joined
