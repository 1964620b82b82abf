"""Chats of 30 styles have the ids that transformers gives them: see chat_styles.py."""

import json

import pytest

from recurjax.data.tokenizers import load_tokenizer
from tests.data.chat_styles import RECORD, cases, digest, write_folder
from tests.data.tokenizers.text_folders import KINDS

pytest.importorskip("jinja2", reason="needs recurjax[serve]")

from recurjax.data.chat import compiled  # noqa: E402

RECORDED = json.loads(RECORD.read_text())


@pytest.mark.parametrize("kind", KINDS)
def test_a_chat_has_the_ids_that_transformers_gives_it(kind, tmp_path):
    write_folder(tmp_path, kind)
    tokenizer = load_tokenizer(tmp_path)
    wrong = []
    for (name, template, chat, answer), want in zip(
        cases(), RECORDED[kind], strict=True
    ):
        ids = compiled(template, tokenizer).encode(
            chat["messages"],
            tokenizer,
            answer=answer,
            variables={"tools": chat.get("tools")},
        )
        if digest(ids) != want:
            wrong.append(name)
    assert wrong == []
