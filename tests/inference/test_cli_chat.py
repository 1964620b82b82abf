"""`recurjax chat` through pipes, and its talk by itself."""

import io
import json
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from recurjax.cli import chat as command
from recurjax.cli.chat import ChatOptions, ChatSession, run
from recurjax.data.chat import ChatTemplate
from recurjax.data.tokenizers import ByteTokenizer, TextSettings
from recurjax.errors import UserError
from recurjax.inference.engine import Engine, EngineConfig
from recurjax.inference.engine.memory import in_words, state_size, state_sizes
from recurjax.inference.sampling import SamplingConfig, requested_sampling

pytest.importorskip("jinja2", reason="needs recurjax[serve]")

LETTERS = "abcdefghijklmnopqrstuvwxyz"
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}a{% endif %}"
)
GREEDY = ("--temperature", "0", "--max-new-tokens", "5")


@pytest.fixture(scope="module")
def engine(cycle):
    sizes = EngineConfig(slots=1, length=64, prefill_tokens=16, steps=2, states_gib=0.1)
    options = {"tokenizer": ByteTokenizer()}
    engine = Engine(cycle(LETTERS), sizes, **options)
    engine.compile()
    return engine


@pytest.fixture
def chat(engine, cycle, monkeypatch, tmp_path, capsys):
    """Runs the command on lines of input; returns its output and its messages."""
    loaded = SimpleNamespace(model=cycle(LETTERS), tokenizer=ByteTokenizer())
    monkeypatch.setattr(command, "load_run", lambda path, **options: loaded)
    monkeypatch.setattr(command, "Engine", lambda *args, **options: engine)
    (tmp_path / "t.jinja").write_text(TEMPLATE)

    def ask(*lines, template=True, options=GREEDY):
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{x}\n" for x in lines)))
        given = ["--template", str(tmp_path / "t.jinja")] if template else []
        assert run([str(tmp_path), *given, *options]) == 0
        return capsys.readouterr()

    return ask


@pytest.fixture
def talk(engine):
    return new_talk(engine, ChatTemplate(TEMPLATE))


def new_talk(engine, template, **changes):
    usual = {
        "sampling": SamplingConfig(temperature=0.0),
        "max_new_tokens": 9,
        "seed": 0,
    }
    return ChatSession(engine, ByteTokenizer(), template, **usual | changes)


def test_answers_are_lines_where_nobody_types(chat):
    out, err = chat("hi", "", "there\\", "all", "//x")
    assert out == "bcdef\nbcdef\nbcdef\n"
    assert err == "A chat; /help lists the commands.\n"


def test_a_line_that_ends_in_a_backslash_goes_on_in_the_next(chat, tmp_path):
    file = tmp_path / "talk.json"
    chat("first\\", "second", "//third\\", "", f"/save {file}")
    messages = json.loads(file.read_text())["messages"]
    typed = [each["content"] for each in messages if each["role"] == "user"]
    assert typed == ["first\nsecond", "/third\n"]


def test_a_model_without_a_template_continues_texts_and_says_so(chat):
    out, err = chat("xy", "m", "/system be brief", template=False)
    assert out == "zabcd\nnopqr\n"
    assert "Completion mode" in err and "--template FILE" in err
    assert "recurjax: a system prompt needs a chat template" in err


def test_commands_change_the_talk(chat, tmp_path):
    file = tmp_path / "talk.json"
    out, err = chat(
        *("/system", "/system short", "one", "/retry", f"/save {file}", "/temperature"),
        *("/temperature 0.5", "/temperature warm", "/temperature -1", "/stats"),
        *("/reset", "/system", "/help", "/wings", "/save", "/exit", "unread"),
    )
    assert out == "bcdef\nbcdef\n"
    said = err.splitlines()
    assert said[1:4] == ["system: (none)", "(started again)", f"(3 messages in {file})"]
    assert said[4:6] == ["temperature 0", "temperature 0.5"]
    assert said[6] == "recurjax: /temperature needs a number of at least 0, got 'warm'"
    assert said[7].endswith("temperature: must be >= 0, got -1.0")
    assert "a second, ended by its limit" in said[8] and "KiB" in said[9]
    assert said[10:12] == ["(forgotten)", "system: short"]
    assert said[-2] == "recurjax: there is no command /wings: /help lists them"
    assert said[-1] == "recurjax: /save needs a file name"
    roles = [row["role"] for row in json.loads(file.read_text())["messages"]]
    assert roles == ["system", "user", "assistant"]


def test_a_saved_talk_goes_on(chat, tmp_path):
    file = tmp_path / "talk.json"
    chat("one", f"/save {file}")
    _, err = chat(
        "/retry", "two", f"/save {file}", options=(*GREEDY, "--load", str(file))
    )
    said = json.loads(file.read_text())["messages"]
    assert [row["content"] for row in said] == ["one", "bcdef", "two", "bcdef"]
    file.write_text('{"messages": [{"role": "user"}]}')
    _, err = chat(f"/load {file}", f"/load {tmp_path}/none")
    assert (
        f"{file} must be a saved conversation" in err and "none cannot be read" in err
    )


def test_the_next_turn_reads_only_what_is_new(talk):
    pieces = []
    first = talk.ask("0123456789", pieces.append)
    assert (first.reused, "".join(pieces)) == (0, "bcdefghij")
    again = talk.ask("z", pieces.append)
    # All but the newest token of the first turn was kept: its prompt and eight more.
    assert again.reused == first.prompt_tokens + 8
    assert again.prompt_tokens - again.reused == 4 and again.held > first.held


def test_ctrl_c_stops_the_answer_and_keeps_the_talk(talk, engine):
    before = signal.getsignal(signal.SIGINT)
    stopped = talk.ask("a", lambda piece: signal.raise_signal(signal.SIGINT))
    assert stopped.reason == "you" and stopped.tokens < 9
    assert signal.getsignal(signal.SIGINT) is before
    assert talk.messages[-1]["content"] == LETTERS[1 : 1 + stopped.tokens]
    whole = talk.retry(lambda piece: None)
    assert (whole.tokens, len(talk.messages)) == (9, 2) and not engine.busy


def test_a_talk_that_is_too_long_is_told_and_stays_as_it_was(talk):
    talk.ask("a", lambda piece: None)
    before = list(talk.messages)
    with pytest.raises(UserError, match="the model's cache 64: /reset"):
        talk.ask("x" * 60, lambda piece: None)
    assert talk.messages == before
    talk.reset()
    with pytest.raises(UserError, match="/retry needs an answer to replace"):
        talk.retry(lambda piece: None)


def test_another_try_draws_other_tokens(engine):
    talk = new_talk(engine, None, sampling=SamplingConfig(temperature=8.0))
    talk.ask("a", lambda piece: None)
    first = talk.messages[-1]
    talk.retry(lambda piece: None)
    assert talk.messages[-1] != first


def test_the_models_own_sampling_holds_where_the_user_names_none():
    options = ChatOptions(run=Path("runs/x"), top_p=0.5)
    generation = {"temperature": 0.6, "top_k": 0, "top_p": 0.9, "eos_token_id": 2}
    defaults = TextSettings(generation=generation).sampling
    result, own = requested_sampling(options, defaults)
    assert result == SamplingConfig(temperature=0.6, top_p=0.5)
    assert own == ["temperature 0.6"]


def test_the_state_is_counted_beside_what_attention_would_hold(cycle):
    sizes = state_sizes(cycle(LETTERS), 48)
    assert [size.tokens for size in sizes] == [1, 2, 4, 8, 16, 32, 48]
    # One key head of 8 of the model's 16 channels, in two layers, and the positions.
    assert sizes[-1].attention == 2 * 2 * 16 * 4 * 48
    assert sizes[-1].attention // 2 <= sizes[-1].state < sizes[-1].attention
    assert "48 tokens in 6." in in_words(state_size(cycle(LETTERS), 48))
