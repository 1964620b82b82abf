"""Maxima, softmax and log-sum-exp: jax's numbers, whatever the length."""

import ast

import chex
import jax
import jax.numpy as jnp

from pallas_kernels import reductions
from pallas_kernels.target import Target, as_if
from tests.compiling import QUICK_COMPILE
from tests.source_tree import modules, tree_of

FREE = {
    "pallas_kernels.reductions",
    # The paper's algorithms to read, which no model calls.
    "pallas_kernels.recurrent_prefill.algorithms",
    "recurjax.convert.parity",
    "recurjax.surgery.recency",
    # Of as many learned numbers as there are lags or sources.
    "recurjax.variants.latent_recurrent_transformer.recurrence",
    "recurjax.variants.latent_recurrent_transformer.memory_stack",
}
"""Modules that may call jax's own."""
KERNELS = ("reference", "mosaic", "triton")
"""How other devices' modules begin, or their folders."""


def test_they_are_jax_s_own():
    rows = {n: jax.random.normal(jax.random.key(n), (2, n)) for n in (1, 17, 103)}
    rows[103] = rows[103].at[0, 0].set(-jnp.inf)

    def weigh(x):
        p = reductions.softmax(x)
        return jnp.sum(jnp.sin(p)) + jnp.sum(reductions.logsumexp(x) ** 2)

    def everything(rows):
        return {
            n: (
                reductions.largest(x),
                reductions.largest(x.T, axis=0),
                reductions.softmax(x),
                reductions.logsumexp(x, keepdims=True),
                jax.grad(weigh)(x[1:]),
            )
            for n, x in rows.items()
        }

    ours = jax.jit(everything, compiler_options=QUICK_COMPILE)(rows)
    # Traced as for a GPU, these are jax's own.
    with as_if(Target(platform="gpu", kind="")):
        theirs = jax.jit(everything, compiler_options=QUICK_COMPILE)(rows)
    chex.assert_trees_all_close(ours, theirs, rtol=2e-5, atol=1e-6)


def test_the_maximum_of_nothing_is_the_initial_one():
    nothing = jnp.zeros((2, 0))
    assert (reductions.largest(nothing, initial=-jnp.inf) == -jnp.inf).all()
    assert reductions.logsumexp(jnp.full((1, 40), -jnp.inf)) == -jnp.inf


def test_no_logits_are_reduced_by_jax_itself():
    """On a CPU that takes a quarter of attention's forward pass."""
    for module, path in modules().items():
        parts = module.split(".")
        if parts[0] == "tests" or module in FREE or parts[0] == "experiments":
            continue
        if any(part.startswith(KERNELS) for part in parts):
            continue
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Call):
                call = ast.unparse(node)
                names = ("jax.nn.softmax(", "jax.nn.logsumexp(", "jax.nn.log_softmax(")
                logits = ("jnp.max(logits", "logits.max(", "z.max(")
                assert not call.startswith(names + logits), f"{path}:{node.lineno}"
