"""The share of a HashHop chain that a model follows, scored or generated.

The score of both is h_gq, the longest right beginning of the chain over its length:
greedy generation is right for as long as each likeliest token after the right ones is.
So a model of bytes reads its rows once, with their answers; one with other tokens
writes answers, which are compared as text.
"""

from collections.abc import Iterable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Int

from recurjax.data.tasks import HashHop, TaskData
from recurjax.data.tasks.hash_hop import END, right_share
from recurjax.data.tasks.rows import row_of
from recurjax.evaluation.accuracy import AS_CALLED, likeliest
from recurjax.evaluation.answerer import Question
from recurjax.evaluation.evaluator import Evaluator
from recurjax.model import Decoder
from recurjax.sharding import replicated
from recurjax.training.objective import Objective
from recurjax.types import IGNORED, Array, Batch

SCORE = "h_gq"

_ENDERS = (*END.encode(), *b"= ")
"""Bytes with which a model ends an element, right or too early."""


def read_chains(
    model: Decoder,
    batches: Iterable[Batch],
    task: HashHop,
    *,
    objective: Objective = AS_CALLED,
    mesh: Mesh | None = None,
) -> list[float]:
    """Returns the score of each row of bytes that asks something.

    Args:
      model: any variant, of bytes.
      batches: the task's rows, on the model's mesh.
      task: the task that made them.
      objective: how the model is run.
      mesh: the mesh that counts are gathered over; None: one device.
    """
    # Bytes of one element of a chain, as the task writes it.
    element = len(" = ") + task.size
    elements = task.hops if task.thoughts else 1
    chains = []
    for batch in batches:
        right = _right_tokens(model, batch, objective=objective, mesh=mesh)
        for reached, query, instead in np.asarray(right).T.tolist():
            # Where the first wrong byte follows an element, that element counts if the
            # byte ends it: as text too the chain then is right so far.
            ended = reached % element or instead in _ENDERS
            complete = max(0, reached if ended else reached - 1) // element
            chains += [complete / elements] if query else []
    return chains


def generated_chains(evaluator: Evaluator, data: TaskData) -> list[float]:
    """Returns the score of each row of the test, from what the model writes.

    Args:
      evaluator: any model of text; its own tokenizer reads the problem.
      data: data whose task is a HashHop.
    """
    task, encode = data.task, evaluator.tokenizer.encode
    assert isinstance(task, HashHop)
    problems = []
    for number in range(task.validation_rows):
        row = row_of(task, seed=data.seed, split="validation", number=number)
        text = row.ids[: task.length_of(task.pairs)].astype(np.uint8).tobytes().decode()
        # A target is one position earlier than its byte, so the answer begins after the
        # first position with a target.
        first = int(np.argmax(row.targets != IGNORED)) + 1
        problems.append((text[:first], text[first:]))
    # Other tokens than the right ones may be more for the same text: twice as many fit.
    questions = [
        Question(evaluator.context(prompt), 2 * len(encode(answer)), (END,))
        for prompt, answer in problems
    ]
    answers = evaluator.answers(questions, name="chains")
    return [
        right_share(_elements(answer), text)
        for (_, answer), text in zip(problems, answers, strict=True)
    ]


def _elements(answer: str) -> tuple[str, ...]:
    """Reads " = aB = cD" back."""
    return tuple(element.strip() for element in answer.split("=")[1:])


@partial(jax.jit, static_argnames=("objective", "mesh"))
def _right_tokens(
    model: Decoder, batch: Batch, *, objective: Objective, mesh: Mesh | None
) -> Int[Array, "3 B"]:
    """Counts answer tokens before the first wrong one, and all; tells the wrong one."""
    scored = batch.targets != IGNORED
    best = likeliest(model, objective.states(model, batch))
    good = ~scored | (best == batch.targets)
    # The product is 1 up to the first wrong answer, and 0 from there on.
    reached = (scored & (jnp.cumprod(good, axis=1) > 0)).sum(1)
    instead = jnp.take_along_axis(best, good.argmin(1)[:, None], axis=1)[:, 0]
    counts = jnp.stack([reached, scored.sum(1), instead])
    if mesh is None:
        return counts
    return jax.lax.with_sharding_constraint(counts, replicated(mesh))
