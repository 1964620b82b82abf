"""The exact recurrence in float64, one token of one row after another, no tricks."""

import numpy as np

from recurjax.parameters import to_nested_dict

EPS = float(np.finfo(np.float32).eps)


def logits_of(model, ids):
    """Logits [B, T, V] of a Decoder with a latent stack, every switch by its words."""
    config, tree = model.config, to_nested_dict(model)
    tree = _wide(tree)
    rows = [_Row(config.stack, tree) for _ in ids]
    out = np.array(
        [
            [row.step(token) for token in line]
            for row, line in zip(rows, ids, strict=True)
        ]
    )
    x = _rms(out, config.final_norm.eps)
    cap = config.logit_soft_cap
    return cap * np.tanh(x @ tree["w_head"] / cap)[..., : config.vocabulary]


class _Row:
    def __init__(self, config, tree):
        self.config, self.tree, self.stack = config, tree, tree["stack"]
        self.kept = [[] for _ in range(config.layers)]  # (k, v) of each token
        self.states, self.ids = [], []

    def step(self, token):
        memory = self.config.memory
        self.ids.append(token)
        if memory is None:
            x, _, new = self.forward(token, None)
        else:
            parts = [self.lagged(token, lag) for lag in memory.lags]
            shares = np.ones(len(parts))
            if len(parts) > 1 and memory.combine == "average":
                shares = _softmax(self.stack["lag_logits"])
            m = sum(share * part for share, part in zip(shares, parts, strict=True))
            x, state, new = self.forward(token, m)
            self.states.append(state)
        for kept, pair in zip(self.kept, new, strict=True):
            kept.append(pair)
        return x

    def lagged(self, token, lag):
        """The state `lag` tokens back; zero before the row's or document's start."""
        if lag == 0:
            return self.forward(token, np.zeros(self.config.width))[1]
        at, reset = len(self.ids) - 1 - lag, self.config.memory.reset_token
        hidden = at < 0 or reset in self.ids[at + 1 :]
        return np.zeros(self.config.width) if hidden else self.states[at]

    def forward(self, token, m):
        c = self.config
        x0 = _rms(self.tree["w_embedding"][token])
        x, first, outputs, new = x0, None, [], []
        for layer in range(c.layers):
            place, turn = layer % c.pattern, layer // c.pattern
            p = _turn(self.stack["blocks"][str(place)], turn)
            x = p.get("residual_scale", 1) * x + p.get("input_scale", 0) * x0
            for earlier, y in enumerate(outputs):
                x = x + p.get("history_scale", np.zeros(c.layers))[earlier] * y
            if m is not None:
                x = x + p.get("memory_scale", 0) * m
            a = _rms(x)
            q, k, v = (np.einsum("d,dhe->he", a, p[f"w_{s}"]) for s in "qkv")
            first = v if layer == 0 else first
            if "value_scale" in p and layer:
                v = (1 - p["value_scale"]) * v + p["value_scale"] * first
            if "w_input_v" in p:
                v = v + np.einsum("d,dhe->he", x0, p["w_input_v"])
            k, v = self.injected(p, a, k, v, m, layer)
            if "w_value_gate" in p:
                channels = len(p["w_value_gate"])
                gate = c.value_gate_scale * _sigmoid(a[:channels] @ p["w_value_gate"])
                v = v + gate[:, None] * p["w_value_embedding"][token]
            t = len(self.ids) - 1
            q, k = (_rms(_turned(s, -t, c.rope_base)) for s in (q, k))
            new.append((k, v))
            seen = [*self.kept[layer], (k, v)][-(c.layer_windows[layer] + 1) :]
            o = _attend(q, seen)
            o = np.einsum("he,hed->d", o, p["w_out"])
            x = x + p.get("attention_scale", 1) * o
            up = np.maximum(_rms(x) @ p["mlp"]["w_up"], 0) ** 2
            x = x + p.get("mlp_scale", 1) * (up @ p["mlp"]["w_down"])
            outputs.append(x)
        return x, self.state(outputs), new

    def injected(self, p, a, k, v, m, layer):
        memory = self.config.memory
        if memory is None or not memory.gated:
            return k, v
        entry = memory.entry_layers
        if entry is not None and layer >= entry:
            return k, v
        local, recurrent = 2 * _sigmoid(np.einsum("d,dgk->gk", a, p["w_mix"]))
        if layer < memory.replace_layers:
            local = np.zeros_like(local)
        weights = p.get("memory", self.stack.get("memory"))
        sides = {"k": k, "v": v}
        for name, wanted in (("k", memory.keys), ("v", memory.values)):
            if wanted:
                entering = np.einsum("d,dke->ke", m, weights[f"w_{name}"])
                own = local[:, None] * sides[name]
                sides[name] = own + recurrent[:, None] * entering
        return sides["k"], sides["v"]

    def state(self, outputs):
        memory = self.config.memory
        if memory is None:
            return None
        shares = np.ones(1)
        if len(memory.sources) > 1:
            shares = _softmax(self.stack["source_logits"])
        chosen = [outputs[source - 1] for source in memory.sources]
        mixed = sum(s * y for s, y in zip(shares, chosen, strict=True))
        return _rms(mixed) if memory.normed else mixed


def _attend(q, seen):
    keys, values = (np.stack(side) for side in zip(*seen, strict=True))  # [S, K, E]
    group = len(q) // keys.shape[1]
    out = []
    for head, query in enumerate(q):
        side = head // group
        weights = _softmax(keys[:, side] @ query / np.sqrt(len(query)))
        out.append(weights @ values[:, side])
    return np.stack(out)


def _turned(x, angle, base):
    half = x.shape[-1] // 2
    theta = angle * base ** (-np.arange(half) / half)
    x1, x2 = x[..., :half], x[..., half:]
    cos, sin = np.cos(theta), np.sin(theta)
    return np.concatenate([x1 * cos - x2 * sin, x1 * sin + x2 * cos], -1)


def _rms(x, eps=EPS):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)


def _softmax(x):
    x = np.exp(x - x.max())
    return x / x.sum()


def _sigmoid(x):
    return 1 / (1 + np.exp(-x))


def _wide(tree):
    if isinstance(tree, dict):
        return {name: _wide(branch) for name, branch in tree.items()}
    return np.asarray(tree, np.float64)


def _turn(tree, turn):
    if isinstance(tree, dict):
        return {name: _turn(branch, turn) for name, branch in tree.items()}
    return tree[turn]
