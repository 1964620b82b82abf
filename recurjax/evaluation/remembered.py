"""Scores that a journal keeps, so that a killed evaluation goes on by item."""

from collections.abc import Sequence

import numpy as np

from recurjax.evaluation.journal import Journal, key_of
from recurjax.evaluation.scorer import Pair, PairScore, Scorer


def remembered_scores(
    scorer: Scorer, journal: Journal, pairs: Sequence[Pair]
) -> list[PairScore]:
    """Returns the pairs' scores, asking the model only for those not in the journal.

    A pair that comes twice is read once.
    """
    keys = [key_of(scorer.reading, *pair) for pair in pairs]
    new = {
        key: pair for key, pair in zip(keys, pairs, strict=True) if key not in journal
    }
    names, asked = list(new), list(new.values())
    scorer.report(len(pairs) - len(asked))
    for done in scorer.batches(asked):
        journal.add((names[at], _as_json(score)) for at, score in done.items())
    return [_from_json(journal[key]) for key in keys]


def _as_json(score: PairScore) -> list:
    # Nats are float32: written as such, they are read back to the bit.
    return [score.log_p, score.greedy, [float(x) for x in score.nats]]


def _from_json(value: list) -> PairScore:
    log_p, greedy, nats = value
    return PairScore(log_p, greedy, np.array(nats, np.float32))
