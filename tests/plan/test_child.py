"""The process that compiles does not outlive its parent."""

import subprocess
import sys

import jax
import pytest

from recurjax.layers.attention import AttentionConfig
from recurjax.layers.mlp import MlpConfig
from recurjax.layers.position import Alibi, Rope
from recurjax.model import ModelConfig
from recurjax.plan.child import STAND_IN, attention_notes
from recurjax.plan.programs import compile_program
from recurjax.variants.transformer import TransformerConfig
from tests.source_tree import ROOT

CHILD = """
import time
from recurjax.plan.child import end_with_parent
end_with_parent()
print("watching", flush=True)
time.sleep(20)
print("outlived", flush=True)
"""
PARENT = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {CHILD!r}])"


def test_a_killed_plan_takes_its_compiler_along():
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "watching\n"
        parent.kill()
        # Both hold the pipe: it ends with the second.
        assert parent.stdout.read() == ""


class Lowered:
    """A program whose products XLA finds no tiles for, or fails otherwise."""

    def __init__(self, said):
        self.said = said

    def compile(self, compiler_options=None):
        if compiler_options is None:
            raise jax.errors.JaxRuntimeError(self.said)
        return compiler_options


def test_products_without_tiles_are_planned_as_cublas_calls_and_it_is_told():
    lowered = Lowered("INTERNAL: Couldn't find output tile sizes that satisfy hlo: dot")
    options, notes = compile_program(lowered, gpu=True)
    assert options == {"xla_gpu_enable_triton_gemm": False}
    assert len(notes) == 1 and "planned as calls of cuBLAS" in notes[0]


@pytest.mark.parametrize(
    ("said", "gpu"),
    [("RESOURCE_EXHAUSTED: Used 90G of", True), ("Couldn't find output", False)],
)
def test_other_failures_of_a_compiler_stay_its_answer(said, gpu):
    with pytest.raises(jax.errors.JaxRuntimeError, match=said):
        compile_program(Lowered(said), gpu=gpu)


def test_a_plan_for_a_gpu_says_what_its_attention_leaves_out():
    def notes(width, position):
        attention = AttentionConfig(
            heads=2, key_heads=2, head_width=width, position=position
        )
        mlp = MlpConfig(width=8)
        stack = TransformerConfig(layers=1, width=8, attention=attention, mlp=mlp)
        return attention_notes(ModelConfig(vocabulary=8, stack=stack))

    assert notes(64, Rope()) == [STAND_IN]
    assert [note for note in notes(96, Rope()) if "96 is none" in note]
    assert [note for note in notes(64, Alibi()) if "as wide as 128" in note]
