"""Talks by templates of four families: the tokens are those of transformers.

`make_chat_ids.py` made the golden file, and says what is in it.
"""

import json
from pathlib import Path

import pytest

from recurjax.data.tokenizers import TEMPLATE_FILE, load_tokenizer

pytest.importorskip("jinja2", reason="needs recurjax[serve]")

from recurjax.data.chat import load_template  # noqa: E402

GOLDEN = json.loads(Path(__file__).with_name("chat_ids.json").read_text())


@pytest.mark.parametrize("style", GOLDEN["styles"])
def test_tokens_of_a_talk_are_those_of_transformers(style, tmp_path):
    case = GOLDEN["styles"][style]
    (tmp_path / "tokenizer.json").write_text(case["definition"])
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(case["names"]))
    (tmp_path / TEMPLATE_FILE).write_text(case["template"])
    tokenizer = load_tokenizer(tmp_path)
    template = load_template(tmp_path, tokenizer=tokenizer)
    for talk, wanted in zip(GOLDEN["talks"], case["ids"], strict=True):
        for answer, ids in zip((True, False), wanted, strict=True):
            assert template.encode(talk, tokenizer, answer=answer) == ids
    pad = case["names"]["pad_token"]
    assert tokenizer.decode([tokenizer.pad]) in ("", pad)
    assert tokenizer.named_tokens[pad] == tokenizer.pad
