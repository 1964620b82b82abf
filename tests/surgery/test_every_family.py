"""Surgery on every family that `from_hf` reads.

`python -m tests.surgery.test_every_family` prints the table of
recurjax/convert/README.md.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recurjax.convert.hugging_face import from_hf
from recurjax.errors import UserError
from recurjax.model import Decoder, count_parameters
from recurjax.surgery.recurformer import MambaConfig, to_recurformer
from recurjax.surgery.relaxed_recursive import recursive_stack, to_recursive
from recurjax.types import Tokens
from tests.convert.hf_directories import CASES, arrays

MAMBA = MambaConfig(dt_rank=2, state=3)
FULL = 999
"""A rank that no matrix exceeds."""
RANK = 4


@jax.jit
def loss_of(model: Decoder, ids: jax.Array) -> jax.Array:
    logits, _ = model(Tokens(ids), model.init_cache(len(ids), 0))
    logs = jax.nn.log_softmax(logits[:, :-1].astype(jnp.float32))
    return -jnp.take_along_axis(logs, ids[:, 1:, None], -1).mean()


def recursive(model: Decoder, rank: int, *, tie_norms: bool) -> Decoder:
    # The fewest loops whose block has whole repeats of the layers' pattern.
    stack = recursive_stack(model, loops=2, rank=rank, tie_norms=tie_norms)
    return to_recursive(model, stack, init="average")


def recurrent(model: Decoder, count: int) -> Decoder:
    """Replaces the last heads of each layer that reads all tokens."""
    config = model.config.stack
    heads = tuple(range(config.attention.heads - count, config.attention.heads))
    windows = config.windows
    replaced = tuple(
        heads if windows[layer % len(windows)] is None else ()
        for layer in range(config.layers)
    )
    return to_recurformer(model, replaced, mamba=MAMBA)


def row(folder: Path) -> list[str]:
    """Returns the table's cells: parameters and losses, or why a surgery is refused."""
    model, ids = from_hf(folder).model, jnp.asarray(arrays(folder)["input_ids"])

    def cell(build) -> str:
        try:
            changed = build()
        except UserError as error:
            return str(error)
        count = count_parameters(changed.config).total
        return f"{count:,}; {loss_of(changed, ids):.4f}"

    return [
        folder.name,
        cell(lambda: model),
        cell(lambda: recursive(model, FULL, tie_norms=False)),
        cell(lambda: recursive(model, RANK, tie_norms=True)),
        cell(lambda: recurrent(model, 1)),
    ]


@pytest.fixture(scope="module", params=CASES)
def base(request):
    model = from_hf(request.param).model
    ids = jnp.asarray(arrays(request.param)["input_ids"])
    return model, ids, float(loss_of(model, ids))


def test_the_family_becomes_recursive(base):
    model, ids, before = base
    try:
        full = recursive(model, FULL, tie_norms=False)
    except UserError as refusal:
        # Named: what of the family a block of loops cannot have.
        assert "windows" in str(refusal) and "\n" not in str(refusal)
        return
    # With all ranks and own norms it is the model.
    np.testing.assert_allclose(float(loss_of(full, ids)), before, rtol=1e-5)
    shared = recursive(model, 0, tie_norms=True)
    after = float(loss_of(shared, ids))
    assert np.isfinite(after) and after != before
    counts = [count_parameters(m.config).total for m in (shared, model)]
    assert counts[0] < counts[1]


def test_the_family_becomes_a_recurformer(base):
    model, ids, before = base
    same = recurrent(model, 0)
    np.testing.assert_allclose(float(loss_of(same, ids)), before, rtol=1e-5)
    try:
        changed = recurrent(model, 1)
    except UserError as refusal:
        assert "qk_norm" in str(refusal) and "\n" not in str(refusal)
        return
    assert np.isfinite(float(loss_of(changed, ids)))


if __name__ == "__main__":
    print("| family | model | all ranks | rank 4, tied norms | a head of each layer |")
    print("|---|---|---|---|---|")
    for case in CASES:
        print("| " + " | ".join(row(case.values[0])) + " |")
