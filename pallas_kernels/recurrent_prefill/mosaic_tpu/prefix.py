"""One row's queries of a tile against its prefix, inside the TPU kernel."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.recurrent_prefill.mosaic_tpu.launch import HIDDEN, dot, head_groups


def meet_prefix(r, before, q_rows_ref, keys_ref, values_ref, state, spec, chunk):
    """Merges row r's prefix into the state of its b queries, a few heads at a time.

    Heads narrower than a register's 128 lanes go together: a query, the other heads'
    lanes cleared against all lanes of the keys.
    """
    largest_ref, normalizer_ref, weighted_ref = state
    b, H, E = q_rows_ref.shape[1], spec.heads, spec.head_width
    largest, normalizer = largest_ref[r], normalizer_ref[r]
    lane = jax.lax.broadcasted_iota(jnp.int32, (b, H), 1)
    for group in head_groups(spec):
        lanes = pl.ds(group.first * E, group.width)
        owner = jax.lax.broadcasted_iota(jnp.int32, (b, group.width), 1) // E
        q = q_rows_ref[r, :, lanes]
        queries = [
            jnp.where(owner == h, q, jnp.zeros_like(q)) for h in range(group.heads)
        ]

        def meet(c, running, lanes=lanes, owner=owner, queries=queries, group=group):
            slots = pl.ds(pl.multiple_of(c * chunk, chunk), chunk)
            k, v = keys_ref[r, slots, lanes], values_ref[r, slots, lanes]
            at = c * chunk + jax.lax.broadcasted_iota(jnp.int32, (b, chunk), 1)
            t = jax.lax.broadcasted_iota(jnp.int32, (b, chunk), 0)
            seen = at < before
            # What lies beyond the prefix was never written.
            v = jnp.where(
                c * chunk + jax.lax.broadcasted_iota(jnp.int32, v.shape, 0) < before,
                v,
                jnp.zeros_like(v),
            )
            new = []
            for h, (largest, normalizer, weighted) in enumerate(running):
                logits = spec.logit_scale * dot(queries[h], k, transposed=True)
                if spec.alibi_max_bias is not None:
                    slope = 2.0 ** (
                        -spec.alibi_max_bias * (group.first + h + 1) / spec.heads
                    )
                    logits = logits - slope * (before + t - at).astype(jnp.float32)
                logits = jnp.where(seen, logits, HIDDEN)
                above = jnp.maximum(largest, jnp.max(logits, axis=1, keepdims=True))
                shrink = jnp.exp(largest - above)
                p = jnp.where(seen, jnp.exp(logits - above), 0.0)
                new.append(
                    (
                        above,
                        normalizer * shrink + jnp.sum(p, axis=1, keepdims=True),
                        weighted * shrink + dot(p.astype(v.dtype), v),
                    )
                )
            return tuple(new)

        own = weighted_ref[r, :, lanes]
        start = tuple(
            (
                largest[:, group.first + h : group.first + h + 1],
                normalizer[:, group.first + h : group.first + h + 1],
                own,
            )
            for h in range(group.heads)
        )
        chunks = (before + chunk - 1) // chunk
        weighted = own
        for h, (high, total, o) in enumerate(jax.lax.fori_loop(0, chunks, meet, start)):
            mine = lane == group.first + h
            largest = jnp.where(mine, high, largest)
            normalizer = jnp.where(mine, total, normalizer)
            weighted = jnp.where(owner == h, o, weighted)
        weighted_ref[r, :, lanes] = weighted
    largest_ref[r], normalizer_ref[r] = largest, normalizer
