"""Talks by templates of four families: the tokens are those of transformers.

`make_chat_ids.py` made the golden file, and says what is in it.
"""

import json
from pathlib import Path

import pytest
import tokenizers
from tokenizers import AddedToken

from recurjax.data.tokenizers import TEMPLATE_FILE, JsonTokenizer, load_tokenizer
from tests.data.tokenizers.tokenizer_files import plain_definition

pytest.importorskip("jinja2", reason="needs recurjax[serve]")

from recurjax.data.chat import compiled, load_template  # noqa: E402

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


def test_white_space_is_a_token_in_messages_too():
    library = tokenizers.Tokenizer.from_str(plain_definition("<s>", "</s>"))
    library.add_tokens([AddedToken(text, normalized=False) for text in ("  ", "\n\n")])
    tokenizer = JsonTokenizer(library.to_str())
    # Indented, and with an empty line.
    source = "{% for m in messages %}\n  <s>{{ m.content }}</s>\n\n{% endfor %}"
    template = compiled(source, tokenizer)
    talk = [{"role": "user", "content": "a  b\n\nc"}]
    want = library.encode(template.render(talk), add_special_tokens=False).ids
    assert template.encode(talk, tokenizer) == want
    assert {tokenizer.added_tokens["  "], tokenizer.added_tokens["\n\n"]} < set(want)
