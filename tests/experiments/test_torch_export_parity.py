"""The small trained exports."""

import pytest

from experiments import torch_export_parity as parity
from tests.torch_python import PYTHON


@pytest.mark.torch
@pytest.mark.slow
def test_a_trained_models_export_is_the_same_function(tmp_path, quick_compilation):
    name = "transformer"
    # The rate's warm-up takes 20 steps.
    words = ["--out", tmp_path, "--steps", 21, "--models", name]
    matches = parity.main([str(w) for w in (*words, "--torch-python", PYTHON)])
    assert matches[name]["within_tolerance"]
    assert matches[name]["greedy_agreement"] == matches[name]["greedy_tokens"] == 64
    assert name in parity.table(matches)
