"""Chat template, pad token and generation_config.json come in and go out again."""

import json

import pytest

from recurjax.convert.formats.gguf_tokenizer import gguf_text_settings, gguf_tokenizer
from recurjax.data.tokenizers import JsonTokenizer, TextSettings, load_tokenizer
from recurjax.training.run import load_run
from tests.cli.commands import assert_refused, recurjax
from tests.convert.hf_directories import LLAMA, copy_of

TEMPLATE = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
GENERATION = {"eos_token_id": [2, 7], "temperature": 0.6, "transformers_version": "4"}
NAMES = {"bos_token": "w1", "eos_token": {"content": "w2"}, "pad_token": "w3"}


def with_companions(folder, *, template_file=True):
    """A model with all of them, the template as either of the two ways to keep it."""
    copy_of(LLAMA, folder, tokens=131)
    names = NAMES if template_file else NAMES | {"chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    if template_file:
        (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "generation_config.json").write_text(json.dumps(GENERATION))
    return folder


@pytest.mark.parametrize("template_file", [True, False])
def test_they_come_into_a_run_and_go_out_again(template_file, tmp_path):
    source = with_companions(tmp_path / "hf", template_file=template_file)
    run, out = tmp_path / "run", tmp_path / "out"
    assert recurjax("convert", "from-hf", source, run, "--no-check")[0] == 0
    result = load_run(run).tokenizer
    assert (result.settings.template, result.settings.generation) == (
        TEMPLATE,
        GENERATION,
    )
    # The file names a BOS, and no post-processor puts it before a text.
    assert (result.bos, result.eos, result.pad) == (None, 2, 3)
    assert result.names["bos_token"] == "w1"
    assert result.settings.ends == (2, 7)
    options = ("--format", "hf", "--no-check")
    assert recurjax("convert", "to-torch", run, out, *options)[0] == 0
    assert (out / "chat_template.jinja").read_text() == TEMPLATE
    assert json.loads((out / "generation_config.json").read_text()) == GENERATION
    assert json.loads((out / "config.json").read_text())["pad_token_id"] == 3
    again = load_tokenizer(out)
    assert (again.pad, again.names) == (3, result.names)
    assert (again.settings.template, again.settings.generation) == (
        TEMPLATE,
        GENERATION,
    )
    # The settings are no part of the tokenizer: prepared corpora stay valid.
    definition = (out / "tokenizer.json").read_text()
    assert again.hash == JsonTokenizer(definition, eos="w2").hash == result.hash


def test_a_tokenizer_from_elsewhere_gets_the_models_companions(tmp_path):
    source = with_companions(tmp_path / "hf")
    bare = copy_of(LLAMA, tmp_path / "bare", tokens=131)
    (bare / "chat_template.jinja").write_text("its own")
    run = tmp_path / "run"
    options = ("--no-check", "--tokenizer", bare)
    assert recurjax("convert", "from-hf", source, run, *options)[0] == 0
    result = load_tokenizer(run / "tokenizer").settings
    assert (result.template, result.generation) == ("its own", GENERATION)


def test_settings_that_are_no_json_are_told(tmp_path):
    source = with_companions(tmp_path / "hf")
    (source / "generation_config.json").write_text("[1]")
    args = ("convert", "from-hf", source, tmp_path / "run", "--no-check")
    assert_refused(recurjax(*args), "generation_config.json must hold a JSON object")


def test_a_gguf_file_has_them_in_its_fields():
    fields = {
        "tokenizer.chat_template": TEMPLATE,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": ["a", "b", "ab", "<|end|>", "<|pad|>"],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.token_type": [1, 1, 1, 3, 3],
        "tokenizer.ggml.eos_token_id": 3,
        "tokenizer.ggml.eot_token_id": 3,
        "tokenizer.ggml.padding_token_id": 4,
    }
    tokenizer = gguf_tokenizer(fields, where="m.gguf")
    assert (tokenizer.eos, tokenizer.pad) == (3, 4)
    assert tokenizer.settings.template == TEMPLATE and tokenizer.settings.ends == (3,)
    assert gguf_text_settings(fields | {"tokenizer.ggml.eot_token_id": 4}).ends == (
        3,
        4,
    )
    assert gguf_text_settings({}) == TextSettings()
