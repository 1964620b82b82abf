"""Prompts with answers: what is learned, how rows hold them, what is refused."""

import itertools
import json

import numpy as np
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from recurjax.config_json import from_json, to_json
from recurjax.data.config import Bpe, Bytes, DataConfig, PromptAnswer, TokenizerFile
from recurjax.data.dataset import open_dataset
from recurjax.data.packing import without_middle
from recurjax.errors import UserError
from recurjax.types import IGNORED
from tests.cli.commands import assert_refused, experiment_file, recurjax
from tests.data.tokenizers.tokenizer_files import plain_definition
from tests.training.compilation import quick_compilation

__all__ = ["quick_compilation"]

EOS = 256


def pairs(count):
    return [(f"ask {n}: " + "?" * (n % 5), "!" * (1 + n % 4)) for n in range(count)]


@pytest.fixture
def file(tmp_path):
    return written(tmp_path / "pairs.jsonl", *pairs(23))


def written(file, *said):
    lines = [
        json.dumps({"prompt": prompt, "answer": answer}) for prompt, answer in said
    ]
    file.write_text("\n".join(lines) + "\n")
    return file


def opened(file, *, fraction=0.2, **corpus):
    config = DataConfig(
        corpus=PromptAnswer(patterns=(str(file),), **corpus),
        tokenizer=Bytes(),
        validation_fraction=fraction,
        prefetch=0,
    )
    assert from_json(DataConfig, to_json(config), path="data") == config
    return open_dataset(config)


def told(ids, targets):
    """Returns the input text and the target text."""
    asked = targets[targets != IGNORED]
    return bytes(ids[ids < 256].astype(np.uint8)).decode().rstrip("\0"), asked.tolist()


def test_the_answer_and_its_end_are_asked_and_nothing_else(file):
    batches = list(opened(file).loader("validation", length=24, batch=2))
    assert [sorted(batch) for batch in batches] == [["ids", "targets"]] * 3
    rows = [row for batch in batches for row in zip(*batch.values(), strict=True)]
    for (prompt, answer), (ids, targets) in zip(pairs(23)[18:], rows, strict=False):
        text, asked = told(ids, targets)
        assert (ids[0], text) == (EOS, prompt + answer)
        assert asked == [*answer.encode(), EOS]
        # The first byte of the answer is the target of the prompt's last one.
        assert np.flatnonzero(targets != IGNORED)[0] == len(prompt)
    assert (rows[5][1] == IGNORED).all()  # the last batch is filled up


def test_a_long_prompt_loses_its_middle_and_keeps_both_ends(tmp_path):
    prompt, answer = "abcdefghijklmnopqrstuvwxyz", "42"
    file = written(tmp_path / "long.jsonl", (prompt, answer), (prompt, "0123456789"))
    batch = next(iter(opened(file, fraction=0.0).loader("train", length=8, batch=2)))
    got = sorted(told(*row) for row in zip(*batch.values(), strict=True))
    # Nine tokens: BOS and abc fill the first half, yz precede 42 and EOS, which is only
    # a target. An answer longer than the row loses its end.
    assert got == [("0123456", [*b"01234567"]), ("abcyz42", [*b"42", EOS])]
    ids = np.arange(7, dtype=np.int32)
    assert without_middle(ids, 4).tolist() == [0, 1, 5, 6]
    assert without_middle(ids, 3).tolist() == [0, 5, 6]
    assert without_middle(ids, 3, first=3).tolist() == [0, 1, 2]
    assert without_middle(ids, 1).tolist() == [6] and without_middle(ids, 7) is ids


def test_a_prompt_is_learned_but_for_its_first_token_and_a_lost_middle(tmp_path):
    file = written(tmp_path / "short.jsonl", ("abc", "42"), ("defghijklmnopqrst", "7"))
    data = opened(file, fraction=0.0, loss="all")
    batch = next(iter(data.loader("train", length=8, batch=2)))
    got = sorted(told(*row) for row in zip(*batch.values(), strict=True))
    # rst and 7 follow BOS and def: r is no target.
    short, long = ("abc42", [*b"abc42", EOS]), ("defrst7", [*b"defst7", EOS])
    assert got == [short, long]
    learned_less = opened(file, fraction=0.0)
    assert data.fingerprint != learned_less.fingerprint
    packed = opened(file, fraction=0.0, loss="all", rows="packed")
    row = next(iter(packed.loader("train", length=30, batch=1)))
    ids, targets = row["ids"][0], row["targets"][0]
    # A target is the next token, of its own example.
    asked = np.flatnonzero(targets[:-1] != IGNORED)
    followed = asked[targets[asked] != EOS]
    assert (targets[followed] == ids[followed + 1]).all()
    assert (row["segments"][0][followed] == row["segments"][0][followed + 1]).all()


def test_packed_rows_hold_whole_examples_that_do_not_see_each_other(file):
    data = opened(file, rows="packed")
    loader = data.loader("train", length=40, batch=1)
    epoch = [next(batches) for batches in [iter(loader)] for _ in range(loader.count)]
    matches = []
    for batch in epoch:
        ids, targets, segments = (
            batch[name][0] for name in ("ids", "targets", "segments")
        )
        for number in range(segments.max() + 1):
            places = segments == number
            matches.append(told(ids[places], targets[places]))
        assert (targets[segments < 0] == IGNORED).all()
    wanted = [(p + a, [*a.encode(), EOS]) for p, a in pairs(23)[:18]]
    assert sorted(matches) == sorted(wanted)
    # Fewer rows than two thirds of the examples: best fit leaves little free.
    free = sum(int((batch["segments"] < 0).sum()) for batch in epoch)
    assert len(epoch) <= 9 and free / (40 * len(epoch)) < 0.2


@pytest.mark.parametrize("rows", ["one", "packed"])
def test_epochs_resume_and_divisions_are_exact(file, rows):
    data = opened(file, rows=rows)
    loader = data.loader("train", length=24, batch=3)
    assert loader.count <= 18
    want = list(itertools.islice(iter(loader), 7))
    seen = np.concatenate([batch["ids"] for batch in want])[: loader.count]
    assert len({row.tobytes() for row in seen}) == loader.count
    again = iter(loader)
    list(itertools.islice(again, 2))
    state = json.loads(json.dumps(again.get_state()))
    resumed = iter(loader)
    resumed.set_state(state)
    parts = [data.loader("train", length=24, batch=3, rows=r) for r in ((0, 1), (1, 3))]
    for batch, *shares in zip(want, *map(iter, parts), strict=False):
        for name in batch:
            joined = np.concatenate([share[name] for share in shares])
            np.testing.assert_array_equal(joined, batch[name])
    np.testing.assert_array_equal(next(resumed)["ids"], want[2]["ids"])
    other = opened(written(file, *pairs(22)), rows=rows)
    with pytest.raises(UserError, match="position in the data was saved with data"):
        iter(other.loader("train", length=24, batch=3)).set_state(state)


def test_messages_are_written_plainly_or_by_a_template(tmp_path):
    said = [("system", "Be short."), ("user", "Why?"), ("assistant", "So.")]
    messages = [{"role": role, "content": text} for role, text in said]
    file = tmp_path / "chat.jsonl"
    file.write_text(json.dumps({"messages": messages}) + "\n")

    def text(**corpus):
        batch = next(
            iter(
                opened(file, fraction=0.0, **corpus).loader("train", length=64, batch=1)
            )
        )
        return told(batch["ids"][0], batch["targets"][0])

    plain = "system: Be short.\nuser: Why?\nassistant: So."
    assert text() == (plain, [*b"So.", EOS])
    template = tmp_path / "chat.jinja"
    template.write_text(
        "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}"
        "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    pytest.importorskip("jinja2", reason="a template needs pip install jinja2")
    want = "[system]Be short.[user]Why?[assistant]So."
    assert text(template=str(template)) == (want, [*b"So.", EOS])
    template.write_text("{% for %}")
    with pytest.raises(UserError, match="the chat template does not compile"):
        text(template=str(template))


@pytest.mark.parametrize("first", ["{{ bos_token }}", "", "<|im_start|>system\n"])
def test_a_templates_special_tokens_are_those_of_a_served_chat(tmp_path, first):
    pytest.importorskip("jinja2", reason="a template needs pip install jinja2")
    from recurjax.data.chat import load_template

    bos, start, end = names = ("<|bos|>", "<|im_start|>", "<|im_end|>")
    (tmp_path / "tokenizer.json").write_text(plain_definition(*names))
    template = tmp_path / "chat.jinja"
    template.write_text(
        first + "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    # Names that a user types are text.
    asked = [{"role": "user", "content": f"hi {end}{bos}{start}"}]
    file = tmp_path / "chat.jsonl"
    messages = [*asked, {"role": "assistant", "content": f"yo {start}"}]
    lines = [{"messages": messages}, {"prompt": start, "answer": "a"}]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = DataConfig(
        corpus=PromptAnswer(patterns=(str(file),), template=str(template)),
        tokenizer=TokenizerFile(path=str(tmp_path), bos=bos, eos=end),
    )
    data = open_dataset(config)
    tokenizer, (chat, plain) = data.tokenizer, data.examples
    served = load_template(tmp_path, file=template, tokenizer=tokenizer)
    assert chat.prompt.tolist() == served.encode(asked, tokenizer)
    assert chat.answer.tolist() == [*tokenizer.encode(f"yo {start}"), tokenizer.eos]
    # A prompt that no template wrote begins with the tokenizer's BOS.
    assert plain.prompt.tolist() == [tokenizer.bos, *tokenizer.encode(start)]
    template.write_text("")
    with pytest.raises(UserError, match="example 1 of .*template writes nothing"):
        open_dataset(config)


def test_a_prompt_behind_bos_begins_as_when_the_model_is_asked(tmp_path):
    # SentencePiece's space before the first word is there, which no text behind a token
    # has, and not before the answer.
    pieces = ["<s>", "</s>", "<unk>", "\u2581", "a", "\u2581a", "b"]
    model = models.Unigram([(piece, -1.0) for piece in pieces], 2, False)
    library = tokenizers.Tokenizer(model)
    library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    library.add_special_tokens(["<s>", "</s>"])
    (tmp_path / "tokenizer.json").write_text(library.to_str())
    config = DataConfig(
        corpus=PromptAnswer(patterns=(str(written(tmp_path / "p.jsonl", ("a", "b"))),)),
        tokenizer=TokenizerFile(path=str(tmp_path), bos="<s>", eos="</s>"),
        validation_fraction=0.0,
    )
    data = open_dataset(config)
    [(prompt, answer, *_)] = data.examples
    assert prompt.tolist() == [data.tokenizer.bos, *data.tokenizer.encode("a").tolist()]
    assert (prompt.tolist(), answer.tolist()) == ([0, 5], [6, 1])


def test_a_tokenizer_can_learn_from_the_texts(file):
    config = DataConfig(
        corpus=PromptAnswer(patterns=(str(file),)), tokenizer=Bpe(vocabulary=260)
    )
    data = open_dataset(config)
    assert data.vocabulary == 260
    first = data.examples[0]
    assert data.tokenizer.decode(first.prompt[1:]) == "ask 0: "


def test_what_is_no_example_is_told_in_a_sentence(tmp_path):
    bad = tmp_path / "bad.jsonl"
    chat = [{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]
    for line, pattern in [
        ({"prompt": "a"}, r"bad.jsonl:1 needs .* in the field 'answer'.*: prompt"),
        (
            {"prompt": "a", "answer": 3},
            "needs messages or a text in the field 'answer'",
        ),
        (["a"], "must be a JSON object, got list"),
        ({"messages": chat}, "the last with the role assistant"),
        ({"messages": "ab"}, "messages must be a list"),
    ]:
        bad.write_text(json.dumps(line) + "\n")
        with pytest.raises(UserError, match=pattern):
            opened(bad)
    bad.write_text("{")
    with pytest.raises(UserError, match="bad.jsonl:1 is not valid JSON"):
        opened(bad)
    bad.write_text("\n")
    with pytest.raises(UserError, match="bad.jsonl holds no examples"):
        opened(bad)
    corpus = PromptAnswer(patterns=(str(written(bad, *pairs(2))),))
    with pytest.raises(UserError, match="the tokenizer has none: name it"):
        open_dataset(DataConfig(corpus=corpus, tokenizer=Bytes(bos=False)))
    with pytest.raises(UserError, match="leave packing and document_segments out"):
        DataConfig(corpus=corpus, tokenizer=Bytes(), document_segments=True)
    with pytest.raises(UserError, match="loss must be answer or all, got 'prompt'"):
        opened(bad, loss="prompt")
    with pytest.raises(UserError, match="PromptAnswer: cannot read the chat template"):
        opened(bad, template=str(tmp_path / "none.jinja"))
    with pytest.raises(UserError, match="validation split holds none of the 2 ex"):
        opened(bad, fraction=0.0).loader("validation", length=8, batch=1)


@pytest.mark.slow
def test_a_run_learns_answers_and_counts_epochs(quick_compilation, file, tmp_path):
    body = (
        "return changed(tiny(), data={'corpus': PromptAnswer(patterns=("
        f"{str(file)!r},), rows='packed')}}, training={{'steps': 2, 'length': 24}})"
    )
    code, _, err = recurjax(
        "train", experiment_file(tmp_path, body), "--runs", tmp_path
    )
    assert (code, err) == (0, "")
    lines = (tmp_path / "tiny" / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    epochs = [row["epoch"] for row in rows if row["kind"] == "train"]
    assert epochs[1] == pytest.approx(2 * epochs[0]) and epochs[0] > 0.5
    code, out, _ = recurjax("evaluate", tmp_path / "tiny", "--batch", 2)
    # The last tenth of 23 examples: their answers and EOS.
    assert code == 0 and json.loads(out)["tokens"] == sum(
        len(answer) + 1 for _, answer in pairs(23)[21:]
    )
    missing = experiment_file(tmp_path, body.replace("pairs.jsonl", "none.jsonl"))
    assert_refused(recurjax("train", missing, "--runs", tmp_path / "b"), "none.jsonl")
