"""Conversations: what the assistant says and its end are learned, and nothing else."""

import json

import numpy as np
import pytest

from recurjax.config_json import from_json, to_json
from recurjax.data.config import Conversations, DataConfig, TokenizerFile
from recurjax.data.dataset import open_dataset
from recurjax.data.tokenizers import load_tokenizer
from recurjax.errors import UserError
from recurjax.types import IGNORED
from tests.data.tokenizers.tokenizer_files import plain_definition

pytest.importorskip("jinja2", reason="needs recurjax[serve]")

START, END = "<|im_start|>", "<|im_end|>"
CHATML = """{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
# The last question has no answer: nothing of it could be learned.
TALK = ("be brief", "user|a né", f"assistant|\nb {END}", "user|c")
TALK = (*TALK, "assistant|d", "user|e")


def messages(*said):
    rows = [row.partition("|")[::2] for row in said]
    return [
        {"role": role if text else "system", "content": text or role}
        for role, text in rows
    ]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "tokenizer.json").write_text(plain_definition(START, END))
    (tmp_path / "chat_template.jinja").write_text(CHATML)
    return tmp_path


def opened(folder, *talks, **changes):
    file = folder / "talks.jsonl"
    lines = [json.dumps({"messages": messages(*talk)}) for talk in talks]
    file.write_text("\n".join(lines) + "\n")
    return of(folder, file, **changes)


def of(folder, file, **changes):
    config = DataConfig(
        corpus=Conversations(patterns=(str(file),), **changes),
        tokenizer=TokenizerFile(path=str(folder), bos="none", eos=END),
        validation_fraction=0.0,
        prefetch=0,
    )
    assert from_json(DataConfig, to_json(config), path="data") == config
    return open_dataset(config)


def row_of(data, length):
    batch = next(iter(data.loader("train", length=length, batch=1)))
    return {name: row[0] for name, row in batch.items()}


def named(tokenizer, ids):
    """Returns the text with the names of special tokens."""
    names = {number: name for name, number in tokenizer.named_tokens.items()}
    return "".join(names.get(i) or tokenizer.decode([i]) for i in ids.tolist())


def test_all_turns_of_the_assistant_and_their_ends_are_asked(folder):
    data = opened(folder, TALK)
    row = row_of(data, 120)
    ids, targets = row["ids"], row["targets"]
    tokenizer = load_tokenizer(folder)
    asked = targets != IGNORED
    # Each target is the token that is read next.
    places = np.flatnonzero(asked[:-1])
    np.testing.assert_array_equal(targets[places], ids[places + 1])
    # A name in a content is text: it ends nothing.
    plain = tokenizer.encode(END)
    want = [*tokenizer.encode("\nb "), *plain, tokenizer.named_tokens[END]]
    want += [*tokenizer.encode("d"), tokenizer.named_tokens[END]]
    assert targets[asked].tolist() == want
    read = named(tokenizer, ids[row["segments"] == 0])
    assert read.startswith(f"{START}system\nbe brief{END}\n{START}user\na ")
    # Nothing of the last question is there.
    assert read.endswith(f"{START}user\nc{END}\n{START}assistant\nd{END}")
    # The answer begins where the prompt of a server's request ends.
    assert named(tokenizer, ids[: np.flatnonzero(asked)[0] + 1]).endswith("assistant\n")


def test_conversations_share_rows_and_do_not_see_each_other(folder):
    talks = [("user|" + "x" * n, "assistant|y") for n in range(4)]
    data = opened(folder, *talks)
    batch = next(iter(data.loader("train", length=160, batch=1)))
    assert sorted(set(batch["segments"][0].tolist())) == [-1, 0, 1, 2, 3]
    alone = opened(folder, *talks, rows="one")
    loader = alone.loader("train", length=160, batch=1)
    assert loader.count == 4 and "segments" not in next(iter(loader))
    assert alone.fingerprint != data.fingerprint


def test_what_is_longer_than_a_row_loses_its_end(folder):
    data = opened(folder, ("user|a", "assistant|" + "b" * 50))
    whole = row_of(data, 120)
    cut = row_of(data, 40)
    np.testing.assert_array_equal(cut["ids"], whole["ids"][:40])
    np.testing.assert_array_equal(cut["targets"], whole["targets"][:40])
    # A long question leaves half of the row for the answer, and keeps both its ends.
    long = row_of(opened(folder, ("user|" + "a" * 90, "assistant|" + "b" * 50)), 40)
    asked = long["targets"][long["targets"] != IGNORED]
    assert load_tokenizer(folder).decode(asked) == "b" * 20


def test_parquet_holds_the_same_conversations(folder):
    pa = pytest.importorskip("pyarrow", reason="needs recurjax[parquet]")
    import pyarrow.parquet as pq

    lines = opened(folder, TALK, ("user|a", "assistant|b"))
    rows = [messages(*TALK), messages("user|a", "assistant|b")]
    pq.write_table(pa.table({"said": rows}), folder / "talks.parquet")
    data = of(folder, folder / "talks.parquet", field="said")
    assert data.fingerprint == lines.fingerprint
    with pytest.raises(UserError, match="has no column 'messages'; it has: said"):
        of(folder, folder / "talks.parquet")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("[]", "has no field 'messages'; it has: list"),
        ('{"text": "a"}', "has no field 'messages'; it has: text"),
        ('{"messages": 5}', "at least one with the role assistant"),
        ('{"messages": [{"role": "user", "content": "a"}]}', "at least one with"),
    ],
)
def test_lines_that_hold_no_conversation_are_told(folder, line, said):
    (folder / "bad.jsonl").write_text(line + "\n")
    with pytest.raises(UserError, match=f"bad.jsonl:1.*{said}"):
        of(folder, folder / "bad.jsonl")


def test_templates_that_do_not_serve_are_told(folder):
    (folder / "chat_template.jinja").write_text("{{ messages | length }}")
    with pytest.raises(UserError, match="rewrites earlier messages as a conversation"):
        opened(folder, TALK)
    (folder / "chat_template.jinja").write_text(
        "{{ messages[-1].content if messages }}"
    )
    with pytest.raises(UserError, match="writes nothing before the answer"):
        opened(folder, ("assistant|b",))
    (folder / "chat_template.jinja").write_text(
        "{% if ask %}{% generation %}a{% endgeneration %}{% endif %}b"
    )
    with pytest.raises(UserError, match="talks.jsonl:1.* but none in this"):
        opened(folder, TALK)
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(UserError, match="tokenizer has no chat template: set"):
        opened(folder, TALK)
    values = to_json(Conversations(patterns=("a",))) | {"rows": "both"}
    with pytest.raises(UserError, match="rows"):
        from_json(Conversations, values, path="corpus")
