"""Attention and its gradients, one query at a time, in numpy's float64."""

import numpy as np


def attention_oracle(
    q, k, v, g, *, scale, visible, bias=None, soft_cap=None
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Returns o and the gradients of sum(o * g); `visible` and `bias` are [B, H, T, S].

    Gradients by hand: of w it is v g; of the logits w * (dw - w . dw); through the cap
    times 1 - tanh^2.
    """
    q, k, v, g = (np.asarray(array).astype(np.float64) for array in (q, k, v, g))
    B, T, H, _ = q.shape
    share = H // k.shape[2]
    o = np.zeros_like(q)
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    dbias = np.zeros((B, H, T, k.shape[1]))
    for b, t, h in np.ndindex(B, T, H):
        seen = np.flatnonzero(visible[b, h, t])
        keys, values = k[b, seen, h // share], v[b, seen, h // share]
        logits, slope = scale * keys @ q[b, t, h], 1.0
        if soft_cap is not None:
            tanh = np.tanh(logits / soft_cap)
            logits, slope = soft_cap * tanh, 1 - tanh**2
        if bias is not None:
            logits = logits + bias[b, h, t, seen]
        w = np.exp(logits - logits.max())
        w /= w.sum()
        o[b, t, h] = w @ values
        dw = values @ g[b, t, h]
        dlogits = w * (dw - w @ dw)
        dbias[b, h, t, seen] = dlogits
        dlogits = scale * slope * dlogits
        dq[b, t, h] = dlogits @ keys
        dk[b, seen, h // share] += np.outer(dlogits, q[b, t, h])
        dv[b, seen, h // share] += np.outer(w, g[b, t, h])
    return o, {"q": dq, "k": dk, "v": dv, "bias": dbias}
