"""The laws of mixtures: shares, parts that are as alone, any division, exact resume."""

import dataclasses
import itertools

import numpy as np
import pytest

from recurjax.config_json import from_json, to_json
from recurjax.data.config import (
    Bpe,
    Bytes,
    DataConfig,
    EmbeddedText,
    Mixture,
    Part,
    Prepared,
    Reweighting,
    TextFiles,
    TokenizerFile,
)
from recurjax.data.corpora import embedded_text
from recurjax.data.dataset import open_dataset
from recurjax.data.prepared import prepare
from recurjax.data.shares import Shares
from recurjax.data.tokenizers import build_tokenizer
from recurjax.errors import UserError
from recurjax.training.loop import train
from tests.training.tiny_experiment import changed, config

WEIGHTS = (0.5, 0.3, 0.2)
LENGTH, BATCH = 16, 4
PACKINGS = ("concat", "best_fit")


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """Three texts of many short documents, each text with letters of its own."""
    root, results = tmp_path_factory.mktemp("parts"), []
    for number, weight in enumerate(WEIGHTS):
        letters = "abcdefghi"[3 * number : 3 * number + 3]
        texts = [letters * (1 + (7 * k) % 11) for k in range(40)]
        file = root / f"{number}.txt"
        file.write_text("\n".join(texts))
        corpus = TextFiles(patterns=(str(file),), separator="\n")
        results.append(Part(corpus=corpus, weight=weight, name=f"p{number}"))
    return tuple(results)


def data(corpus, packing="concat", **options):
    return DataConfig(
        corpus=corpus,
        tokenizer=Bytes(),
        packing=packing,
        document_segments=True,
        packing_buffer=8,
        prefetch=0,
        **options,
    )


def batches(config, count, *, rows=None, batch=BATCH):
    loader = open_dataset(config).loader("train", length=LENGTH, batch=batch, rows=rows)
    return list(itertools.islice(loader, count))


def rows_of(taken, name="ids"):
    return np.concatenate([batch[name] for batch in taken])


def part_of(row) -> int:
    """The part that a row's letters belong to; the check that no row mixes two."""
    [part] = {(int(token) - ord("a")) // 3 for token in row if token < 256 and token}
    return part


@pytest.mark.parametrize(
    "weights",
    [
        (1.0,),
        (1.0, 1.0),
        (0.7, 0.2, 0.1),
        (5.0, 1.0, 1.0, 1.0, 1.0, 1.0),
        (0.995, 0.003, 0.002),
        (6.5e9, 1.2e9, 3e8),
        (0.1, 0.0, 0.9),
    ],
)
def test_shares_are_met_within_one_row_after_any_number_of_rows(weights):
    shares, total = Shares([(0, weights)]), sum(weights)
    given = np.zeros(len(weights))
    for n in range(3000):
        [(part, (number, rows))] = shares.rows(n, n + 1).items()
        assert number == given[part] and rows == [0]
        given[part] += 1
        off = given - np.array(weights) / total * (n + 1)
        assert abs(off).max() < 1, n
    assert (given[np.array(weights) == 0] == 0).all()


def test_weights_change_at_a_row_and_parts_go_on_where_they_were():
    shares = Shares([(0, (1.0, 1.0)), (10, (1.0, 3.0)), (1000, (0.0, 1.0))])
    one_by_one = [list(shares.rows(n, n + 1).items()) for n in range(1100)]
    drawn = [(part, number) for [(part, (number, _))] in one_by_one]
    owners = [part for part, _ in drawn]
    for part in (0, 1):
        numbers = [number for owner, number in drawn if owner == part]
        assert numbers == list(range(len(numbers)))
    assert sum(owners[:10]) == 5
    assert abs(sum(owners[10:1000]) - 0.75 * 990) < 1
    assert set(owners[1000:]) == {1}
    # Any stretch of rows at once, across cycles and changes.
    for first, stop in ((0, 1100), (3, 3), (7, 12), (9, 10), (998, 1001), (1050, 1060)):
        result = {
            row: (part, number + n)
            for part, (number, rows) in shares.rows(first, stop).items()
            for n, row in enumerate(rows)
        }
        assert [result[row] for row in range(stop - first)] == drawn[first:stop]


@pytest.mark.parametrize("packing", PACKINGS)
def test_a_mixture_of_one_part_is_that_corpus(parts, packing):
    alone = data(parts[0].corpus, packing)
    mixed = data(Mixture(parts=parts[:1]), packing)
    for got, want in zip(batches(mixed, 30), batches(alone, 30), strict=True):
        assert got.keys() == want.keys()
        for name in want:
            np.testing.assert_array_equal(got[name], want[name])


@pytest.mark.parametrize("packing", PACKINGS)
def test_each_part_gives_its_own_rows_in_its_own_order(parts, packing):
    taken = batches(data(Mixture(parts=parts), packing), 25)  # epochs of every part
    mixed, segments = rows_of(taken), rows_of(taken, "segments")
    owners = np.array([part_of(row) for row in mixed])
    assert np.bincount(owners).tolist() == [50, 30, 20]
    for number, part in enumerate(parts):
        alone = batches(data(part.corpus, packing), 50)
        count = (owners == number).sum()
        for got, name in ((mixed, "ids"), (segments, "segments")):
            want = rows_of(alone, name)[:count]
            np.testing.assert_array_equal(got[owners == number], want)


@pytest.mark.parametrize("packing", PACKINGS)
def test_any_division_of_rows_and_any_batch_is_the_same_stream(parts, packing):
    mixture = data(Mixture(parts=parts), packing)
    whole = rows_of(batches(mixture, 8))
    np.testing.assert_array_equal(whole, rows_of(batches(mixture, 2, batch=16)))
    divided = [batches(mixture, 8, rows=rows) for rows in ((0, 1), (1, 4))]
    joined = [
        np.concatenate([part["ids"] for part in each])
        for each in zip(*divided, strict=True)
    ]
    np.testing.assert_array_equal(whole, np.concatenate(joined))


@pytest.mark.parametrize("packing", PACKINGS)
def test_a_place_is_resumed_exactly_and_by_any_division(parts, packing):
    later = (Reweighting(step=5, weights=(0.0, 1.0, 1.0)),)
    mixture = data(Mixture(parts=parts, reweightings=later), packing)
    dataset = open_dataset(mixture)
    iterator = iter(dataset.loader("train", length=LENGTH, batch=BATCH))
    for _ in range(4):
        next(iterator)
    state = iterator.get_state()
    want = rows_of(itertools.islice(iterator, 6))
    assert {part_of(row) for row in want[BATCH:]} == {1, 2}
    other = iter(dataset.loader("train", length=LENGTH, batch=BATCH, rows=(2, 4)))
    other.set_state(state)
    got = rows_of(itertools.islice(other, 6))
    np.testing.assert_array_equal(
        got, want.reshape(6, BATCH, -1)[:, 2:].reshape(12, -1)
    )
    heavier = (dataclasses.replace(parts[0], weight=0.6), *parts[1:])
    reweighted = open_dataset(data(Mixture(parts=heavier), packing))
    loader = reweighted.loader("train", length=LENGTH, batch=BATCH)
    with pytest.raises(UserError, match="saved with data"):
        iter(loader).set_state(state)


def test_validation_is_every_parts_own_and_one_after_the_other(parts):
    mixture = data(Mixture(parts=parts), validation_fraction=0.5)
    loader = open_dataset(mixture).loader("validation", length=LENGTH, batch=BATCH)
    taken = list(loader)
    assert len(taken) == loader.batches
    for done in (1, len(taken) // 2, len(taken) - 1):  # in each of the parts
        first, resumed = iter(loader), iter(loader)
        for _ in range(done):
            next(first)
        resumed.set_state(first.get_state())
        np.testing.assert_array_equal(rows_of(resumed), rows_of(taken[done:]))
    want = [
        batch
        for part in parts
        for batch in open_dataset(data(part.corpus, validation_fraction=0.5)).loader(
            "validation", length=LENGTH, batch=BATCH
        )
    ]
    for got, batch in zip(taken, want, strict=True):
        np.testing.assert_array_equal(got["targets"], batch["targets"])


def test_prepared_parts_are_the_same_rows_and_need_one_tokenizer(parts, tmp_path):
    tokenizer = build_tokenizer(Bytes(), parts[0].corpus, validation_fraction=0.1)
    prepare(parts[1].corpus, tokenizer, tmp_path / "shards")
    shards = Prepared(directory=str(tmp_path / "shards"))
    mixed = (parts[0], dataclasses.replace(parts[1], corpus=shards))
    text = rows_of(batches(data(Mixture(parts=parts[:2])), 9))
    np.testing.assert_array_equal(rows_of(batches(data(Mixture(parts=mixed)), 9)), text)
    bpe = build_tokenizer(Bpe(vocabulary=265), EmbeddedText(), validation_fraction=0.1)
    bpe.save(tmp_path / "bpe")
    other = dataclasses.replace(
        data(Mixture(parts=mixed)), tokenizer=TokenizerFile(path=str(tmp_path / "bpe"))
    )
    with pytest.raises(UserError, match="part p1 of the mixture: .* another tokenizer"):
        open_dataset(other)
    trained = dataclasses.replace(other, tokenizer=Bpe(vocabulary=300))
    with pytest.raises(UserError, match="cannot be trained on a mixture"):
        open_dataset(trained)


def test_a_mixture_is_json_and_back(parts):
    later = (Reweighting(step=3, weights=(1.0, 2.0, 3.0)),)
    config = data(Mixture(parts=parts, reweightings=later))
    assert from_json(DataConfig, to_json(config)) == config


def test_what_is_no_mixture_is_one_sentence(parts):
    part = parts[0]
    for make, message in (
        (
            lambda: Mixture(parts=()),
            "needs at least one part, each with a unique name, got no",
        ),
        (
            lambda: Mixture(parts=(part, part)),
            "unique name, got p0, p0",
        ),
        (
            lambda: dataclasses.replace(part, weight=0.0),
            r"Part\.weight: must be > 0, got 0.0",
        ),
        (lambda: dataclasses.replace(part, name="a b"), "Part: name must have letters"),
        (
            lambda: Mixture(
                parts=(part,), reweightings=(Reweighting(step=4, weights=(1.0,)),) * 2
            ),
            "ascending steps, got 4 after 4",
        ),
        (
            lambda: Reweighting(step=0, weights=(1.0,)),
            r"Reweighting\.step: must be >= 1, got 0",
        ),
        (
            lambda: Reweighting(step=1, weights=(1.0, -0.5)),
            r"Reweighting\.weights: must be >= 0, got \(1.0, -0.5\)",
        ),
        (
            lambda: Mixture(
                parts=(part,), reweightings=(Reweighting(step=4, weights=(0.0,)),)
            ),
            "must have 1 weights, not all 0, got",
        ),
        (
            lambda: Mixture(
                parts=(part,), reweightings=(Reweighting(step=4, weights=(1.0, 2.0)),)
            ),
            "step 4 must have 1 weights",
        ),
        (
            lambda: Mixture(
                parts=(
                    dataclasses.replace(part, weight=0.3333333),
                    dataclasses.replace(parts[1], weight=0.6666667),
                )
            ),
            "the weights 0.3333333, 0.6666667 are not multiples of a 100,000th",
        ),
        (
            lambda: Mixture(
                parts=parts[:2],
                reweightings=(Reweighting(step=4, weights=(0.3333333, 0.5)),),
            ),
            "the weights 0.3333333, 0.5 are not multiples of a 100,000th",
        ),
        (lambda: Shares([(0, (0.123456789, 0.5))]), "for example to 0.25 or 0.001"),
    ):
        with pytest.raises(UserError, match=message) as raised:
            make()
        assert "\n" not in str(raised.value)


@pytest.mark.slow  # It compiles a training step and an evaluation.
def test_a_run_has_a_loss_for_each_part(tmp_path):
    texts = embedded_text()
    parts = []
    for name, text in (("first", texts[:20000]), ("second", texts[20000:50000])):
        (tmp_path / f"{name}.txt").write_text(text)
        corpus = TextFiles(patterns=(str(tmp_path / f"{name}.txt"),))
        parts.append(Part(corpus=corpus, weight=1.0, name=name))
    experiment = changed(
        config(),
        data={"corpus": Mixture(parts=tuple(parts))},
        training={"steps": 3},
        evaluation={"batches": 1},
    )
    result = train(experiment, tmp_path / "run")
    score = result.score
    assert score is not None and score.parts is not None
    assert set(score.parts) == {"first", "second"}
    tokens = {name: part.tokens for name, part in score.parts.items()}
    assert score.tokens == sum(tokens.values())
    mean = sum(part.loss * part.tokens for part in score.parts.values()) / score.tokens
    assert score.loss == pytest.approx(mean)
    assert {"loss/first", "bits_per_byte/second"} <= set(score.metrics())
