"""Early exits: the golden trajectories, full rows at once, and the two commands."""

import dataclasses
import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recurjax.convert.imported_run import new_experiment, write_run
from recurjax.data.tokenizers import ByteTokenizer
from recurjax.errors import UserError
from recurjax.evaluation.exit_scores import cheapest, fit_exit_head, score_exits
from recurjax.exits import EarlyExit, ExitHead, ExitRule, confidence, cosine, parse_rule
from recurjax.inference.engine import Engine, EngineConfig, RequestSettings
from recurjax.inference.engine.strategy import choose_strategy
from recurjax.inference.generate import generate_tokens
from recurjax.inference.sampling import SamplingConfig
from recurjax.layers.attention import AttentionConfig
from recurjax.layers.mlp import MlpConfig
from recurjax.layers.norm import NormConfig
from recurjax.layers.position import Rope
from recurjax.model import ModelConfig
from recurjax.surgery.fewer_layers import truncated
from recurjax.surgery.named_parameters import with_parameters
from recurjax.types import IGNORED, Batch, Tokens
from recurjax.variants.relaxed_recursive_transformer import (
    RelaxedRecursiveTransformerConfig,
)
from recurjax.variants.transformer import TransformerConfig
from tests.cli.commands import assert_refused, recurjax
from tests.compiling import QUICK_COMPILE, compiled_programs
from tests.golden.cases import golden_cases, load
from tests.inference.oracle import early_text
from tests.marks import slow_except
from tests.tolerances import assert_values_close
from tests.training.compilation import quick_compilation
from tests.variants.relaxed_recursive_transformer.switches import (
    VOCABULARY,
    build,
    small,
)
from tests.variants.transformer import switches as transformer

pytestmark = pytest.mark.usefixtures("quick_compilation")
__all__ = ["quick_compilation"]
GREEDY = SamplingConfig(temperature=0.0)
NAMES = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "out": "self_attn.o_proj",
    "up": "mlp.up_proj",
    "gate": "mlp.gate_proj",
    "down": "mlp.down_proj",
}
CACHE = 64


def golden_model(case):
    """The looped Llama of a golden file."""
    meta = json.loads(str(case["meta_json"]))
    K, B = meta["block_layers"], meta["loops"]
    H, E = meta["num_attention_heads"], meta["head_dim"]
    stack = RelaxedRecursiveTransformerConfig(
        transformer=TransformerConfig(
            layers=K * B,
            width=meta["hidden_size"],
            attention=AttentionConfig(
                heads=H,
                key_heads=meta["num_key_value_heads"],
                head_width=E,
                position=Rope(base=meta["rope_theta"]),
            ),
            mlp=MlpConfig(kind="swiglu", width=meta["intermediate_size"]),
            norm=NormConfig(eps=meta["rms_norm_eps"]),
        ),
        loops=B,
        rank=meta["rank"],
    )
    config = ModelConfig(
        vocabulary=meta["vocab_size"],
        stack=stack,
        final_norm=NormConfig(eps=meta["rms_norm_eps"]),
    )

    def weight(name):
        return case[f"p/{name}.weight"].T

    def of_block(name):
        return np.stack([weight(f"model.layers.{i}.{name}") for i in range(K)])

    by_name = {
        "w_embedding": weight("model.embed_tokens").T,
        "w_head": weight("lm_head"),
        "final_norm.scale": weight("model.norm"),
        "stack.blocks.0.attention_norm.scale": of_block("input_layernorm"),
        "stack.blocks.0.mlp_norm.scale": of_block("post_attention_layernorm"),
    }
    for ours, theirs in NAMES.items():
        whole = of_block(theirs)
        part = "mlp" if theirs.startswith("mlp") else "attention"
        if ours in ("q", "k", "v"):
            whole = whole.reshape(*whole.shape[:2], -1, E)
        elif ours == "out":
            whole = whole.reshape(K, H, E, -1)
        by_name[f"stack.blocks.0.{part}.w_{ours}"] = whole
        for side, letter in (("reduce", "A"), ("expand", "B")):
            depths = [case[f"p/lora.{l}.{theirs}.{letter}"].T for l in range(K * B)]
            leaf = np.stack(depths).reshape(B, K, *depths[0].shape)
            by_name[f"stack.adapters.0.{ours}.w_{side}"] = leaf
    return with_parameters(config, by_name), meta


@pytest.mark.slow
@pytest.mark.parametrize(
    "path", golden_cases("relaxed_recursive_transformers/exits_*.npz")
)
def test_trajectories_are_the_golden_ones_token_for_token(path):
    case = load(path)
    model, meta = golden_model(case)
    settings = RequestSettings(
        max_new_tokens=meta["steps"], sampling=GREEDY, logprobs=True
    )
    prompts = [case[f"prompt{n}"] for n in range(case["tokens"].shape[2])]
    thresholds = [float(threshold) for threshold in case["thresholds"]]
    for i, missing in enumerate(meta["rules"]):
        requests, rules = {}, {}
        for j, threshold in enumerate(thresholds):
            rules[j] = ExitRule(kind="confidence", threshold=threshold)
            sizes = EngineConfig(
                slots=4,
                length=CACHE,
                prefill_tokens=16,
                top_logprobs=meta["vocab_size"],
                exit=rules[j],
                missing=missing,
            )
            engine = Engine(model, sizes)
            for n, prompt in enumerate(prompts):
                requests[j, n] = engine.submit(prompt, settings)
            while engine.busy:
                engine.step()
        for (j, n), request in requests.items():
            assert request.tokens == case["tokens"][i, j, n].tolist()
            assert request.loops == case["loops"][i, j, n].tolist()
            logs = np.array([[v for _, v in sorted(top)] for top in request.top])
            want = jax.nn.log_softmax(case["logits"][i, j, n])
            np.testing.assert_allclose(logs[1:], want[1:], rtol=0, atol=1e-4)
        # The oracle of the engine's tests tells what each loop's rule saw.
        exits = EarlyExit(rule=rules[1], missing=missing)
        text = early_text(model, prompts[0], settings, CACHE, exits)
        assert text.loops == requests[1, 0].loops
        for scores, want in zip(text.scores, case["margins"][i, 1, 0], strict=True):
            np.testing.assert_allclose(scores, want[: len(scores)], rtol=0, atol=2e-5)


MODELS = {
    "propagate": small(loops=3, layers=6, rank=2, tie_norms=False, windows=(3, None)),
    "share": small(loops=3, layers=6, rank=2, loop_cache="first", windows=(4, None)),
}


@pytest.mark.parametrize("missing", slow_except((), MODELS, slow=["share"]))
def test_whole_rows_leave_as_texts_do_token_by_token(missing):
    model, threshold = build(MODELS[missing]), 0.02
    rule = ExitRule(kind="confidence", threshold=threshold)
    exits = EarlyExit(rule=rule, missing=missing)
    settings = RequestSettings(max_new_tokens=10, sampling=GREEDY)
    text = early_text(model, [3], settings, 10, exits)
    ids = np.array([[3, *text.tokens[:-1]]], np.int32)

    @partial(jax.jit, compiler_options=QUICK_COMPILE)
    def at_once(model, ids):
        def leave(loop, before, after):
            sure = confidence(model.logits(model.final_norm(after))) > threshold
            return sure & (jnp.arange(ids.shape[1]) > 0)  # prompts run all loops

        x, ran = model.stack.leaving(model.embed(ids), Tokens(ids), leave)
        return model.logits(model.final_norm(x)), ran

    logits, ran = at_once(model, ids)
    for at in range(ids.shape[1]):
        assert_values_close(text.logits[at], np.asarray(logits)[0, at])
    assert text.loops == np.asarray(ran)[0].tolist()
    assert len(set(text.loops[1:])) > 1  # some left, some did not


@pytest.mark.slow
@pytest.mark.parametrize(
    "missing",
    [
        pytest.param("propagate", marks=pytest.mark.sweep),
        "skip",
        pytest.param("share", marks=pytest.mark.sweep),
    ],
)
def test_a_threshold_that_nothing_exceeds_is_the_full_model(missing):
    model = build(MODELS["share" if missing == "share" else "propagate"])
    prompts = [[1, 2, 3], [4, 5]]
    want = generate_tokens(model, prompts, max_new_tokens=6, sampling=GREEDY)
    exits = EarlyExit(rule=ExitRule(kind="confidence", threshold=1.0), missing=missing)
    got = generate_tokens(
        model, prompts, max_new_tokens=6, sampling=GREEDY, exits=exits
    )
    for first, other in zip(got.tokens, want.tokens, strict=True):
        np.testing.assert_array_equal(first, other)
    assert got.loops == [[3] * 6] * 2
    assert got.aux == {"mean loops a token": 3.0}


@pytest.mark.slow
def test_a_speed_with_exits_has_no_compiling_in_it():
    exits = EarlyExit(rule=ExitRule(kind="cosine", threshold=0.5), missing="skip")

    def timing():
        return generate_tokens(
            build(MODELS["propagate"]),
            [[1, 2, 3], [4, 5]],
            max_new_tokens=3,
            sampling=GREEDY,
            exits=exits,
        ).timing

    first = timing()
    assert first.compile_seconds > 0 < first.decode_seconds
    with compiled_programs() as compiled:
        again = timing()
    assert compiled == []
    # What compiles is counted as that alone, whichever half of a step needed it.
    assert again.compile_seconds < first.compile_seconds


@pytest.mark.slow
def test_the_figures_of_a_text_are_those_of_the_models_cut_there():
    model = build(MODELS["propagate"])
    draw = np.random.default_rng(0)
    ids = jnp.asarray(draw.integers(VOCABULARY, size=(2, 12)), jnp.int32)
    targets = jnp.roll(ids, -1, axis=1).at[:, -1].set(IGNORED)
    batch = Batch(ids, targets)
    head = fit_exit_head(model, [batch] * 3)
    scores = score_exits(
        model,
        lambda: [batch],
        token_bytes=np.ones(VOCABULARY, np.int64),
        thresholds={"confidence": (0.0, 0.02, 1.0), "head": (0.5,)},
        head=head,
    )
    by = {(score.rule, score.threshold): score for score in scores}
    for loops in (1, 2, 3):
        cut = truncated(model, loops)
        logits = jax.jit(lambda m: m(Tokens(ids), m.init_cache(2, 0))[0])(cut)
        logs = jax.nn.log_softmax(logits)[:, :-1]
        own = jnp.take_along_axis(logs, ids[:, 1:, None], -1)
        one = by["static", float(loops)]
        assert one.loss == pytest.approx(-float(own.mean()), rel=1e-5)
        assert one.loops == loops
        # One byte per token: bits per byte are nats per token over ln 2.
        assert one.bits_per_byte == pytest.approx(one.loss / np.log(2), rel=1e-5)
    full = by["static", 3.0]
    assert full.agreement == 1.0
    assert by["confidence", 1.0][2:] == full[2:]
    sure = [by["confidence", t].loops for t in (0.0, 0.02, 1.0)]
    assert sure[0] == 1.0 and sure[0] < sure[1] < sure[2] == 3.0
    assert by["oracle", 0.0].loops <= 3.0
    assert [item.threshold for item in cheapest(scores, full.loss)][:1] != []
    assert cheapest(scores, 0.0) == []


def test_rules_are_what_they_say():
    logits = jnp.log(jnp.array([[0.5, 0.2, 0.3], [0.1, 0.8, 0.1]]))
    np.testing.assert_allclose(confidence(logits), [0.2, 0.7], rtol=1e-5)
    x, y = jnp.array([[3.0, 4.0], [0.0, 0.0]]), jnp.array([[4.0, 3.0], [1.0, 0.0]])
    np.testing.assert_allclose(cosine(x, y), [0.96, 0.0], rtol=1e-5)
    assert parse_rule("cosine:0.98") == ExitRule(kind="cosine", threshold=0.98)
    for wrong in ("confidence", "sure:0.5", "confidence:1.5", "head:-0.1", "cosine:x"):
        with pytest.raises(UserError, match="such as confidence:0.7"):
            parse_rule(wrong)


@pytest.mark.parametrize(
    ("model", "missing", "kind", "said"),
    [
        (
            transformer.small(),
            "propagate",
            "cosine",
            "early exits need a recursive model",
        ),
        (small(sharing="sequence"), "propagate", "cosine", "sharing 'cycle'"),
        (small(), "share", "cosine", "share is for a model with loop_cache 'first'"),
        (small(loop_cache="first"), "skip", "cosine", "use share"),
        (small(), "skip", "head", "exits RUN --fit-head 100"),
    ],
)
def test_exits_that_a_model_does_not_have_are_refused(model, missing, kind, said):
    rule = ExitRule(kind=kind, threshold=0.5)
    config = EngineConfig(exit=rule, missing=missing)
    with pytest.raises(UserError, match=said):
        choose_strategy(build(model), config, None)
    head = ExitHead(jnp.zeros((1, 8)), jnp.zeros(1))
    choose_strategy(build(small()), EngineConfig(exit=rule), head)


@pytest.mark.slow
def test_the_commands_run_and_refuse(tmp_path):
    run, text = tmp_path / "run", tmp_path / "text.txt"
    text.write_text("It was a bright cold day in April. " * 30)
    config = dataclasses.replace(small(rank=2), vocabulary=257)
    model = build(config)
    write_run(run, model, new_experiment(run, config, length=16), ByteTokenizer())
    message, png = tmp_path / "exits.json", tmp_path / "exits.png"
    code, out, err = recurjax(
        *("evaluate", "exits", run, "--text", text, "--batch", "4", "--json", message),
        *("--tokens", "128", "--fit-head", "2", "--most-loss", "50", "--plot", png),
        *("--thresholds", "0.02", "0.5"),
    )
    assert code == 0, err
    result = json.loads(message.read_text())
    rules = [item["rule"] for item in result["exits"]]
    assert rules == ["static", "static", "oracle"] + [
        rule for rule in ("confidence", "cosine", "head") for _ in range(2)
    ]
    assert {item["rule"] for item in result["chosen"]} >= {"static", "confidence"}
    assert png.read_bytes()[:4] == b"\x89PNG" and (run / "exit_head.npz").is_file()
    prompt = ("--prompt", "It was", "--max-new-tokens", "4", "--temperature", "0")
    code, out, err = recurjax(
        "generate", run, *prompt, "--exit", "head:0.5", "--missing", "skip", "--json"
    )
    assert code == 0 and "mean loops a token" in err, err
    loops = json.loads(out)["generations"][0]["loops"]
    assert len(loops) == 4 and loops[0] == 2
    # Fewer loops than the model was trained with, and more.
    for loops in ("1", "3"):
        assert recurjax("generate", run, *prompt, "--loops", loops)[0] == 0
    # Prompts of a file leave early side by side, with the tokens each has alone.
    file = tmp_path / "prompts.txt"
    file.write_text("It was\nIn April\n")
    many = ("--prompts-file", file, *prompt[2:], "--json", "--exit", "confidence:0.02")
    code, out, err = recurjax("generate", run, *many)
    assert code == 0, err
    first, second = json.loads(out)["generations"]
    code, out, err = recurjax("generate", run, *prompt, *many[-3:])
    alone = json.loads(out)["generations"][0]
    assert (first["tokens"], first["loops"]) == (alone["tokens"], alone["loops"])
    verified = recurjax("generate", run, *many, "--missing", "verify")
    plain = recurjax("generate", run, *prompt, "--json")
    rows = [json.loads(out)["generations"][0] for _, out, _ in (verified, plain)]
    assert rows[0]["tokens"] == rows[1]["tokens"] and len(second["loops"]) == 4
    refuse = partial(recurjax, "generate", run, *prompt)
    assert_refused(refuse("--exit", "confidence:2"), "threshold from 0 to 1")
    assert_refused(refuse("--missing", "skip"), "applies to early exits only")
    drawn = ("--exit", "confidence:0.5", "--missing", "verify", "--temperature", "1")
    assert_refused(refuse(*drawn), "verify decodes greedily only")
    assert_refused(refuse("--loops", "0"), "--loops: must be >= 1")
    share = ("--exit", "confidence:0.5", "--missing", "share")
    assert_refused(refuse(*share), "share is for a model with loop_cache")
    judge = partial(recurjax, "evaluate", "exits", run)
    assert_refused(judge("--thresholds", "1.5"), "--thresholds: must be >= 0 and <= 1")
    assert_refused(judge("--mesh.data", "2"), "no option --mesh.data")
    lines = (run / "evaluations.jsonl").read_text().splitlines()
    kept = [json.loads(line) for line in lines]
    exits = {row["settings"]["exit"] for row in kept}
    assert {"static:1", "oracle:0", "head:0.5"} <= exits
