import itertools
import json
from dataclasses import replace

import numpy as np
import pytest

from recurjax.data import shuffle
from recurjax.data.config import Bytes, DataConfig, EmbeddedText, JsonLines
from recurjax.data.dataset import Dataset, open_dataset
from recurjax.data.packing import BestFit
from recurjax.data.shuffle import EndlessOrder
from recurjax.data.streams import MemoryStream
from recurjax.errors import UserError
from recurjax.types import IGNORED

BOS = 256
T, B = 16, 6
KINDS = [
    (split, packing)
    for split in ("train", "validation")
    for packing in ("concat", "best_fit")
]
TRAINING, PACKED = KINDS[:2], KINDS[1::2]


@pytest.fixture(scope="module")
def many(tmp_path_factory) -> Dataset:
    """200 documents of 1 to 40 bytes, each of one letter."""
    rng = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("many") / "a.jsonl"
    texts = [chr(97 + i % 26) * int(rng.integers(1, 41)) for i in range(200)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return open_dataset(
        DataConfig(
            corpus=JsonLines(patterns=(str(path),)),
            tokenizer=Bytes(),
            document_segments=True,
            packing_buffer=20,
            prefetch=3,
        )
    )


def loader_of(dataset: Dataset, kind, **options):
    split, packing = kind
    changed = replace(dataset, config=replace(dataset.config, packing=packing))
    return changed.loader(split, **{"length": T, "batch": B, **options})


def taken(iterator, count: int) -> list[dict[str, np.ndarray]]:
    return list(itertools.islice(iterator, count))


def assert_same(got, want):
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        assert a.keys() == b.keys()
        for name in a:
            np.testing.assert_array_equal(a[name], b[name])


def epoch_rows(dataset: Dataset, *, seed=None, epochs=2) -> list[list[tuple]]:
    """The rows (ids and last target) of each epoch, in order."""
    per_epoch = (dataset.split("train").tokens - 1) // T
    batches = iter(dataset.loader("train", length=T, batch=B, seed=seed))
    rows: list[tuple] = []
    while len(rows) < epochs * per_epoch:
        batch = next(batches)
        for ids, targets in zip(batch["ids"], batch["targets"], strict=True):
            assert (ids[1:] == targets[:-1]).all()
            rows.append((*ids.tolist(), int(targets[-1])))
    return [rows[e * per_epoch : (e + 1) * per_epoch] for e in range(epochs)]


def test_batches_are_int32_of_the_shape_asked_for(many):
    for kind in KINDS:
        batch = next(iter(loader_of(many, kind)))
        assert set(batch) == {"ids", "targets", "segments"}
        for array in batch.values():
            assert array.shape == (B, T) and array.dtype == np.int32
            assert array.flags.c_contiguous


def test_each_epoch_has_every_row_once_in_another_order(many):
    stream = many.tokens("train")
    rows = [tuple(stream[i : i + T + 1].tolist()) for i in range(0, len(stream) - T, T)]
    first, second = epoch_rows(many)
    assert sorted(first) == sorted(rows) and first != rows
    assert sorted(second) == sorted(rows) and second != first


def test_the_seed_alone_decides_the_order(many):
    assert epoch_rows(many) == epoch_rows(many, seed=many.config.seed)
    assert epoch_rows(many)[0] != epoch_rows(many, seed=1)[0]
    assert epoch_rows(many)[1] != epoch_rows(many, seed=1)[0]  # seeds are not shifts


def test_documents_come_once_an_epoch_too():
    order = EndlessOrder(50, seed=3)
    epochs = [[order(50 * epoch + i) for i in range(50)] for epoch in range(3)]
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prefetch", [0, 3])
def test_resuming_after_any_step_is_exact(many, kind, prefetch):
    dataset = replace(many, config=replace(many.config, prefetch=prefetch))
    loader = loader_of(dataset, kind, batch=2)
    want = taken(iter(loader), 8)
    for step in range(8):
        first = iter(loader)
        taken(first, step)
        state = json.loads(json.dumps(first.get_state()))
        again = iter(loader)
        taken(again, 3)  # a used iterator may be set, too
        again.set_state(state)
        assert again.get_state() == state
        assert_same(taken(again, 8 - step), want[step:])


@pytest.mark.parametrize("kind", KINDS)
def test_any_division_of_the_rows_gives_the_whole_batch(many, kind):
    want = taken(iter(loader_of(many, kind)), 5)
    for edges in ((0, 2, 6), (0, 1, 2, 3, 4, 5, 6), (0, 5, 6)):
        parts = [
            taken(iter(loader_of(many, kind, rows=rows)), 5)
            for rows in itertools.pairwise(edges)
        ]
        joined = [
            {name: np.concatenate([part[name] for part in step]) for name in step[0]}
            for step in zip(*parts, strict=True)
        ]
        assert_same(joined, want)


@pytest.mark.parametrize("kind", KINDS)
def test_a_place_saved_by_one_division_serves_another(many, kind):
    want = taken(iter(loader_of(many, kind)), 5)
    half = iter(loader_of(many, kind, rows=(0, 3)))
    taken(half, 2)
    whole = iter(loader_of(many, kind))
    whole.set_state(half.get_state())
    assert_same(taken(whole, 3), want[2:])


def test_validation_has_every_token_once_and_pads_with_ignored_targets(many):
    for length, batch in ((T, B), (7, 3), (1000, 2)):
        loader = many.loader("validation", length=length, batch=batch)
        batches = list(loader)
        assert len(batches) == loader.batches
        targets = np.concatenate([step["targets"].ravel() for step in batches])
        ids = np.concatenate([step["ids"].ravel() for step in batches])
        stream = many.tokens("validation")
        real = targets != IGNORED
        np.testing.assert_array_equal(targets[real], stream[1:])
        np.testing.assert_array_equal(ids[real], stream[:-1])
        assert real[: real.sum()].all()  # the padding is at the end


def test_a_pass_over_validation_can_be_repeated(many):
    loader = many.loader("validation", length=T, batch=B)
    assert_same(list(loader), list(loader))


def test_training_has_no_ignored_targets_and_no_end(many):
    for kind in TRAINING:
        loader = loader_of(many, kind)
        assert loader.batches is None
        for batch in taken(iter(loader), 60):
            assert (batch["targets"] != IGNORED).all()


@pytest.mark.parametrize("kind", KINDS)
def test_segments_change_where_a_document_begins(many, kind):
    for batch in taken(iter(loader_of(many, kind)), 5):
        ids, segments = batch["ids"], batch["segments"]
        real = batch["targets"] != IGNORED
        begins = (ids == BOS).astype(int)
        begins[:, 0] = 0
        want = np.where(real, np.cumsum(begins, axis=1), -1)
        np.testing.assert_array_equal(segments, want)


def test_segments_come_only_when_asked_for(many):
    plain = replace(many, config=replace(many.config, document_segments=False))
    for kind in KINDS:
        batch = next(iter(loader_of(plain, kind)))
        assert set(batch) == {"ids", "targets"}


@pytest.mark.parametrize("kind", PACKED)
def test_best_fit_rows_begin_a_document(many, kind):
    for batch in taken(iter(loader_of(many, kind)), 40):
        known = batch["targets"][:, 0] != IGNORED
        assert known.any() and (batch["ids"][known, 0] == BOS).all()


def test_validation_is_packed_as_training_is(many):
    """The documents of the split in order, by the packer that makes training's rows."""
    loader = loader_of(many, ("validation", "best_fit"), batch=2)
    batches = list(loader)
    assert len(batches) == loader.batches > 5
    split, stream = many.split("validation"), many.tokens("validation")
    begins = np.flatnonzero(stream == BOS)
    assert begins[0] > 0  # the split begins inside a document, which is left out
    lengths = np.diff(begins, append=len(stream))
    plan = BestFit(lengths, lambda k: k, buffer=20, documents=len(lengths))
    for batch in batches:
        for r in range(2):
            pieces = [stream[begins[d] : begins[d] + n] for d, n in plan.row(T + 1)]
            want = np.concatenate([*pieces, np.full(T + 1, -2)])[: T + 1]
            count = max(0, int((want != -2).sum()) - 1)
            np.testing.assert_array_equal(batch["ids"][r, :count], want[:count])
            np.testing.assert_array_equal(batch["targets"][r, :count], want[1:][:count])
            assert (batch["targets"][r, count:] == IGNORED).all()
    assert plan.row(T + 1) == []
    # Only the last batch may hold places that are not predicted.
    assert all((batch["targets"] != IGNORED).all() for batch in batches[:-1])
    assert split.tokens == len(stream)


def test_the_state_is_small(many):
    for kind in KINDS:
        batches = iter(loader_of(many, kind))
        taken(batches, 3)
        assert len(json.dumps(batches.get_state())) < 2000


@pytest.mark.parametrize(
    "name, options",
    [("length", {"length": 8}), ("batch", {"batch": 3}), ("seed", {"seed": 5})],
)
def test_a_place_in_other_batches_is_refused(many, name, options):
    state = iter(loader_of(many, KINDS[0])).get_state()
    with pytest.raises(UserError, match=f"was saved with {name}"):
        iter(loader_of(many, KINDS[0], **options)).set_state(state)


def test_a_place_in_other_data_or_packing_is_refused(many):
    state = iter(loader_of(many, KINDS[0])).get_state()
    with pytest.raises(UserError, match="was saved with packing concat"):
        iter(loader_of(many, KINDS[1])).set_state(state)
    other = open_dataset(DataConfig(corpus=EmbeddedText(), tokenizer=Bytes()))
    with pytest.raises(UserError, match="was saved with data"):
        iter(other.loader("train", length=T, batch=B)).set_state(state)


@pytest.mark.parametrize("kind", KINDS)
def test_a_place_in_another_order_of_the_rows_is_refused(many, kind, monkeypatch):
    """States of older versions have no `shuffle`: small sets were ordered otherwise."""
    state = iter(loader_of(many, kind)).get_state()
    older = {**state, "loader": dict(state["loader"])}
    older["loader"].pop("shuffle", None)
    if kind[0] == "validation":  # in order, as ever
        return iter(loader_of(many, kind)).set_state(older)
    with pytest.raises(UserError, match="from an older recurjax, which shuffled"):
        iter(loader_of(many, kind)).set_state(older)
    # The order of large sets is theirs; of a packed corpus they saved the plan alone.
    monkeypatch.setattr(shuffle, "LARGEST_TABLE", 0)
    large = iter(loader_of(many, kind))
    taken(large, 2)
    state = large.get_state()
    older["position"] = state["position"]
    if kind[1] == "best_fit":
        [older["position"]] = state["position"]["parts"]
    again = iter(loader_of(many, kind))
    again.set_state(older)
    assert_same(taken(again, 3), taken(large, 3))


def test_bad_shapes_and_rows_are_refused(many):
    for options in ({"length": 0}, {"batch": 0}, {"rows": (0, 7)}, {"rows": (2, 2)}):
        with pytest.raises(ValueError, match="Dataset.loader"):
            many.loader("train", **{"length": T, "batch": B, **options})
    with pytest.raises((ValueError, TypeError), match="'test'"):
        many.loader("test", length=T, batch=B)


def test_a_closed_iterator_ends_its_threads(many):
    batches = iter(many.loader("train", length=T, batch=B))
    next(batches)
    batches.close()
    with pytest.raises(ValueError, match="closed"):
        next(batches)


@pytest.mark.parametrize("kind", TRAINING)
def test_a_batch_reads_each_of_its_tokens_once(many, kind, monkeypatch):
    """3 million tokens per second on two idle cores depend on it; no clock is read."""
    read, real = [], MemoryStream.read

    def counted(stream, spans):
        read.append(sum(stop - start for start, stop in spans))
        return real(stream, spans)

    monkeypatch.setattr(MemoryStream, "read", counted)
    dataset = replace(many, config=replace(many.config, prefetch=0, threads=1))
    batches = iter(loader_of(dataset, kind))
    taken(batches, 10)
    # Of a row T tokens and the one after them; best-fit rows are read one by one.
    assert sum(read) <= 11 * B * (T + 1)
    assert len(read) <= 11 * (1 if kind[1] == "concat" else B)
