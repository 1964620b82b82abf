"""The small trained exports; skips aloud without an interpreter that has torch."""

import os

import pytest

from experiments import torch_export_parity as parity


@pytest.mark.slow
def test_a_trained_models_export_is_the_same_function(tmp_path, quick_compilation):
    python = os.environ.get("RECURJAX_TORCH_PYTHON")
    if python is None:
        pytest.skip("RECURJAX_TORCH_PYTHON names no interpreter with torch")
    name = "transformer"
    # The rate's warm-up takes 20 steps.
    words = ["--out", tmp_path, "--steps", 21, "--models", name]
    matches = parity.main([str(w) for w in (*words, "--torch-python", python)])
    assert matches[name]["within_tolerance"]
    assert matches[name]["greedy_agreement"] == matches[name]["greedy_tokens"] == 64
    assert name in parity.table(matches)
