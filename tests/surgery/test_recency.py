"""Recency ratios against the golden ones and a loop; the choice of heads by them."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recurjax.convert.hugging_face import from_hf
from recurjax.errors import UserError
from recurjax.layers.position import Alibi
from recurjax.surgery.recency import (
    CHECK_TEXTS,
    CHECKS,
    HeadRecency,
    choose_heads,
    first_heads,
    mean_attention,
    measure_recency,
    recency_ratio,
    settled_choice,
)
from tests.golden.cases import GOLDEN, golden_cases
from tests.variants.transformer import switches as transformer

FILES = golden_cases("recurformer/recency_ratio*.json")
MODELS = [
    pytest.param(file.values[0].parent, id=file.values[0].parent.name)
    for file in golden_cases("hf/*/config.json")
    if file.values[0].parent.name in ("llama", "gpt_neox")
]


@pytest.mark.parametrize("path", FILES)
def test_ratios_are_the_golden_ones(path):
    met = 0
    for name, want in json.loads(path.read_text()).items():
        if name.endswith(("_incl_first", "_incl")):
            continue  # the paper leaves the first key out
        *folder, setting = name.split("/")
        if folder:
            architecture, which = folder
            file = GOLDEN / "hf" / architecture / "io.npz"
            if not file.is_file():
                continue  # the folder has the ratios of a model that it lacks
            with np.load(file) as io:
                attention = io[which]
        else:
            # A causal head that attends evenly: uniform_causal_T1024_k102_excl.
            _, _, length, setting, _ = setting.split("_")
            T = int(length[1:])
            attention = np.tril(np.ones((T, T))) / np.arange(1, T + 1)[:, None]
        with jax.enable_x64(True):
            got = recency_ratio(jnp.asarray(attention, float), int(setting[1:]))
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-6)
        met += 1
    assert met


def test_the_ratio_grows_with_the_window_up_to_one():
    logits = np.random.default_rng(0).normal(size=(3, 9, 9))
    weights = np.where(np.tril(np.ones((9, 9))) > 0, np.exp(logits), 0)
    weights = jnp.asarray(weights / weights.sum(-1, keepdims=True), jnp.float32)
    ratios = np.stack([recency_ratio(weights, k) for k in range(9)])
    assert (np.diff(ratios, axis=0) >= 0).all() and (ratios >= 0).all()
    np.testing.assert_allclose(ratios[7:], 1, rtol=1e-6)


@pytest.mark.parametrize("folder", MODELS)
def test_heads_are_measured_as_transformers_shows_them(folder):
    """First and last layer, whose weights the golden case has."""
    model = from_hf(folder).model
    with np.load(folder / "io.npz") as io:
        ids, first, last = io["input_ids"], io["attn_first"], io["attn_last"]
    got = measure_recency(model, [ids], window=3, threshold=0.4)
    assert got.texts == len(ids)
    for layer, attention in ((0, first), (-1, last)):
        want = np.asarray(recency_ratio(jnp.asarray(attention), 3))
        np.testing.assert_allclose(got.ratio[layer], want.mean(0), atol=2e-5)
        np.testing.assert_array_equal(got.count[layer], (want > 0.4).sum(0))
        share = attention[:, :, 1:, 0].mean(-1)
        np.testing.assert_allclose(got.first[layer], share.mean(0), atol=2e-5)
    L, H = got.ratio.shape
    heads = [(0, 0), (L - 1, H - 1)]
    maps = mean_attention(model, [ids[:1], ids[1:]], heads)
    for each, attention in zip(heads, (first[:, 0], last[:, -1]), strict=True):
        np.testing.assert_allclose(maps[each][0], attention.mean(0), atol=2e-5)
        assert maps[each][1].shape == ids.shape[1:]


@pytest.mark.parametrize("cap", [None, 0.5])
def test_contributions_are_weights_times_the_norms_of_values(cap):
    config = transformer.small(key_heads=2, layers=1, attention={"soft_cap": cap})
    model = transformer.build(config)
    ids = np.random.default_rng(0).integers(17, size=(2, 7), dtype=np.int32)
    got = measure_recency(model, [ids], window=2)
    block = jax.tree.map(lambda leaf: leaf[0], model.stack.blocks[0])
    x = block.attention_norm(model.embed(ids))
    q, k, v = (np.asarray(y) for y in block.attention.queries_keys_values(x))
    B, T, H, E = q.shape
    sums = np.zeros((H, 2, 2))
    for head in range(H):
        keys, values = (y[:, :, head // (H // 2)] for y in (k, v))
        for b, t in np.ndindex(B, T):
            if t == 0:  # It has nothing but the first token.
                continue
            logits = keys[b, : t + 1] @ q[b, t, head] / np.sqrt(E)
            weights = np.exp(logits if cap is None else cap * np.tanh(logits / cap))
            weights /= weights.sum()
            for n, norm in enumerate((1, 2)):
                each = weights * np.linalg.norm(values[b, : t + 1], norm, axis=-1)
                sums[head, n] += each[0], each[1:].sum()
    pairs = np.array([B * (T - 1), B * T * (T - 1) // 2])
    np.testing.assert_allclose(got.contributions[0], sums / pairs, rtol=2e-5)


def test_batches_add_up():
    model = transformer.build(transformer.small(key_heads=2))
    ids = np.random.default_rng(0).integers(17, size=(4, 12), dtype=np.int32)
    whole = measure_recency(model, [ids], window=2)
    parts = measure_recency(model, [ids[:1], ids[1:]], window=2)
    np.testing.assert_allclose(parts.ratio, whole.ratio, rtol=1e-5)
    np.testing.assert_array_equal(parts.count, whole.count)
    assert parts.texts == 4


RECENCY = HeadRecency(
    ratio=np.array([[0.1, 0.9, 0.4, 0.6], [0.8, 0.7, 0.3, 0.2]]),
    count=np.array([[0, 3, 1, 1], [3, 2, 1, 0]]),
    first=np.zeros((2, 4)),
    contributions=np.zeros((2, 4, 2, 2)),
    texts=3,
    key_heads=2,
)


@pytest.mark.parametrize(
    ("share", "scope", "want"),
    [
        (0.0, "heads", ((), ())),
        (0.25, "heads", ((1,), (0,))),
        # Three heads tie at a count of 1: the mean ratio decides.
        (0.5, "heads", ((1, 3), (0, 1))),
        (0.625, "heads", ((1, 2, 3), (0, 1))),
        (0.5, "layer", ((1, 3), (0, 1))),
        (0.25, "groups", ((), (0, 1))),
        (0.5, "groups", ((0, 1), (0, 1))),
        (1.0, "groups", ((0, 1, 2, 3), (0, 1, 2, 3))),
    ],
)
def test_the_most_recent_heads_are_chosen(share, scope, want):
    assert choose_heads(RECENCY, share, scope=scope) == want


def test_ties_go_by_layer_and_head():
    even = RECENCY._replace(
        ratio=np.ones((2, 3)), count=np.ones((2, 3), int), key_heads=3
    )
    assert choose_heads(even, 0.5, scope="heads") == ((0, 1, 2), ())


def test_the_papers_count_of_heads():
    """922 of Llama-2's 1024 at beta .9."""
    count = np.random.default_rng(0).integers(1025, size=(32, 32))
    recency = RECENCY._replace(
        ratio=count / 1024, count=count, texts=1024, key_heads=32
    )
    chosen = choose_heads(recency, 0.9, scope="heads")
    assert sum(map(len, chosen)) == 922


def test_an_untrained_model_loses_its_first_heads():
    assert first_heads(2, 8, 0.25) == ((0, 1), (0, 1))


def test_what_cannot_be_measured_or_chosen_is_refused():
    for share in (-0.1, 1.5, float("nan")):
        with pytest.raises(UserError, match="--beta"):
            choose_heads(RECENCY, share, scope="heads")
    ids = np.zeros((1, 4), np.int32)
    windows = transformer.build(transformer.small(windows=(3,)))
    with pytest.raises(UserError, match="windows"):
        measure_recency(windows, [ids], window=2)
    slopes = transformer.build(transformer.small(attention={"position": Alibi()}))
    with pytest.raises(UserError, match="ALiBi"):
        measure_recency(slopes, [ids], window=2)
    plain = transformer.build(transformer.small())
    with pytest.raises(UserError, match="--text is empty"):
        measure_recency(plain, [], window=2)


def test_reading_stops_once_the_choice_of_heads_has_settled():
    def after(texts, *recent):
        """The measurement after `texts` texts: layer 0's two heads are as recent."""
        count, zeros = np.array([recent]), np.zeros((1, 2))
        return HeadRecency(zeros, count, zeros, np.zeros((1, 2, 2, 2)), texts, 2)

    def stops(*choices):
        stop = settled_choice(0.5, "heads")
        return [
            # Half a check further nothing is chosen, and so nothing changes.
            stop(after(CHECK_TEXTS * look, *recent))
            | stop(after(CHECK_TEXTS * look + CHECK_TEXTS // 2, *recent))
            for look, recent in enumerate(choices, 1)
        ]

    first, second = (2, 1), (1, 2)
    assert stops(*[first] * CHECKS) == [False] * (CHECKS - 1) + [True]
    later = [first, second] + [first] * CHECKS
    assert stops(*later) == [False] * (len(later) - 1) + [True]


@pytest.mark.parametrize(("moved", "settles"), [(2, True), (3, False)])
def test_a_hundredth_of_the_heads_may_take_turns(moved, settles):
    stop = settled_choice(0.5, "layer")
    answers = []
    for look in range(1, CHECKS + 1):
        # Of 200 heads the first 100 are recent; at every second look some trade places.
        count = np.repeat([[2, 0]], [100, 100], axis=1)
        if look % 2:
            count[0, :moved], count[0, -moved:] = 0, 2
        zeros = np.zeros(count.shape)
        products = np.zeros((*count.shape, 2, 2))
        texts = CHECK_TEXTS * look
        answers.append(stop(HeadRecency(zeros, count, zeros, products, texts, 200)))
    assert answers == [False] * (CHECKS - 1) + [settles]


def test_no_more_text_is_read_than_the_stop_lets_through():
    model = transformer.build(transformer.small(layers=1))
    batches = iter(np.random.default_rng(0).integers(17, size=(5, 2, 6)))
    got = measure_recency(model, batches, window=2, stop=lambda r: r.texts == 4)
    assert got.texts == 4 and len(list(batches)) == 3
