"""HashHop's score: of rows read with their answers, and of answers as text."""

import jax
import numpy as np

from recurjax.data.tasks import HashHop, TaskData
from recurjax.data.tasks.hash_hop import right_share
from recurjax.data.tasks.rows import row_of
from recurjax.data.tokenizers import ByteTokenizer
from recurjax.evaluation import hash_hop
from recurjax.evaluation.evaluator import Evaluator
from recurjax.evaluation.hash_hop import generated_chains, read_chains
from recurjax.types import IGNORED, Batch, Tokens
from tests.variants.latent_recurrent_transformer.switches import byte_model

TASK = HashHop(size=2, hops=3, length=80, validation_rows=3)
ELEMENT = 5  # " = aB"


def test_chains_count_as_far_as_every_token_is_right():
    model, (B, T) = byte_model(None), (4, 24)
    ids = np.random.default_rng(0).integers(256, size=(B, T)).astype(np.int32)
    logits, _ = jax.jit(lambda m: m(Tokens(ids), m.init_cache(B, 0)))(model)
    targets = np.array(np.asarray(logits).argmax(-1), np.int32)
    targets[:, :4], targets[3] = IGNORED, IGNORED
    targets[:, 4 + 3 * ELEMENT + 1 :] = IGNORED  # three elements and the end
    first_wrong = [None, 2 * ELEMENT + 1, 2 * ELEMENT]
    for row, at in enumerate(first_wrong):
        if at is not None:
            targets[row, 4 + at] = (targets[row, 4 + at] + 1) % 256
    # Right to the end; two complete ones; the second does not end where it should.
    got = read_chains(model, [Batch(ids, targets)], TASK)
    np.testing.assert_allclose(got, [1, 2 / 3, 1 / 3])


def test_chains_that_are_read_and_written_have_one_score(monkeypatch):
    answer = (" = pX", " = Ow", " = dE")
    right = np.frombuffer("".join((*answer, "\n")).encode(), np.uint8)
    texts = [
        " = pX = Ow = dE\n",
        " = pX = Ow\n",  # Ends too early, behind what is right.
        " = pX = Ow=dE\n",
        " = pX = OwQ = dE",  # An element that goes on.
        " = pX = OW = dE\n",
        "pX = Ow = dE\n",
        "\n",
    ]
    padded = [np.frombuffer(text.ljust(16, "?").encode(), np.uint8) for text in texts]
    said = np.stack(padded).astype(np.int32)
    monkeypatch.setattr(hash_hop, "likeliest", lambda model, states: said)
    batch = Batch(said, np.tile(right.astype(np.int32), (len(texts), 1)))
    got = read_chains(byte_model(None), [batch], TASK)
    want = [right_share(("pX", "Ow", "dE"), text) for text in texts]
    # Read, a chain is followed as the task writes it: spaces left out are wrong.
    want[2] = 2 / 3
    np.testing.assert_allclose(got, want)
    assert want == [1, 2 / 3, 2 / 3, 1 / 3, 1 / 3, 0, 0]


class Scripted(Evaluator):
    """Answers the full chain, half of it with other spaces, and nothing."""

    def answers(self, questions, *, name):
        messages = []
        for number, question in enumerate(questions):
            row = row_of(TASK, seed=5, split="validation", number=number)
            text = row.ids[: TASK.length_of(TASK.pairs)].astype(np.uint8).tobytes()
            prompt = bytes(question.prompt)
            assert text.startswith(prompt) and question.stop == ("\n",)
            chain = text[len(prompt) :].decode().strip()
            assert question.most == 2 * (3 * ELEMENT + 1)
            messages.append([" " + chain, chain[:4] + "=" + chain[6:9], ""][number])
        return messages


def test_chains_that_are_written_are_compared_as_text():
    evaluator = Scripted(
        model=byte_model(None), tokenizer=ByteTokenizer(bos=False), bos=False
    )
    data = TaskData(task=TASK, seed=5)
    np.testing.assert_allclose(generated_chains(evaluator, data), [1, 2 / 3, 0])
