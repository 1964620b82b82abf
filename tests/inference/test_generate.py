from dataclasses import replace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recurjax.data.tokenizers import ByteTokenizer, TextSettings, text_ends
from recurjax.errors import UserError
from recurjax.inference.compute_dtype import in_compute_dtype
from recurjax.inference.engine import Engine, EngineConfig, RequestSettings
from recurjax.inference.generate import (
    NotFinite,
    Timing,
    continue_prompts,
    generate,
    generate_tokens,
)
from recurjax.inference.sampling import SamplingConfig
from recurjax.layers.position import LearnedPositions
from recurjax.sharding import MeshConfig, make_mesh, shardings
from tests.compiling import compiled_programs
from tests.inference.conftest import STACK, build, following_logits
from tests.inference.oracle import tokens_of

BYTES = ByteTokenizer()
GREEDY = SamplingConfig(temperature=0.0)
PROMPTS = [list(b"To be"), [7], list(b"longer: 12 bytes")[:13]]
NEW = 21


def chunks_of_four(model, prompts=PROMPTS, **options):
    options = {"max_new_tokens": NEW, "sampling": GREEDY, "chunk": 4} | options
    return generate_tokens(model, prompts, **options)


def assert_greedy(model, prompts, result) -> None:
    for prompt, ids in zip(prompts, result.tokens, strict=True):
        np.testing.assert_array_equal(
            ids, following_logits(model, prompt, ids).argmax(axis=-1)
        )


@pytest.fixture(scope="module")
def greedy(model):
    return chunks_of_four(model)


def test_greedy_text_is_the_argmax_of_the_plain_forward(model, greedy):
    assert [len(ids) for ids in greedy.tokens] == [NEW] * 3
    assert greedy.finish_reasons == ["length"] * 3
    assert_greedy(model, PROMPTS, greedy)
    assert len({int(token) for ids in greedy.tokens for token in ids}) > 10


def test_weights_are_rounded_once_and_not_for_every_token(monkeypatch):
    class Reached(Exception):
        pass

    def engine(model, *_, **__):
        given.append(model)
        raise Reached

    given = []
    monkeypatch.setattr("recurjax.inference.generate.Engine", engine)
    model = build(dtype="bfloat16")
    with pytest.raises(Reached):
        chunks_of_four(model)
    chex.assert_trees_all_equal_dtypes(given[0], in_compute_dtype(model))
    assert model.w_embedding[...].dtype == jnp.float32


def test_parameters_that_are_not_finite_are_told_and_not_drawn_from(model):
    broken = jax.tree.map(lambda leaf: leaf * jnp.nan, model)
    with pytest.raises(NotFinite, match="not finite at new token 1 of prompt 1: its"):
        chunks_of_four(broken)
    drawn = SamplingConfig(temperature=1.0, top_k=3, repetition_penalty=1.1)
    with pytest.raises(NotFinite, match="not finite at new token 1 of prompt 1: its"):
        chunks_of_four(broken, sampling=drawn)


@pytest.mark.parametrize("wish", [2**31, 10**12, 2**62])
def test_more_than_the_machine_holds_is_refused_before_it_is_asked_for(model, wish):
    with pytest.raises(UserError, match="ask for fewer new tokens|fewer new tokens"):
        chunks_of_four(model, max_new_tokens=wish)


@pytest.mark.parametrize("wrong", [2**31, -(2**31) - 1, 2**40, 10**30])
def test_an_id_that_no_integer_of_the_device_holds_is_no_token(model, wrong):
    with pytest.raises(UserError, match=r"prompt 2 has tokens from .* the model's are"):
        chunks_of_four(model, [[1, 2], [3, wrong]])


def test_rings_serve_past_their_window():
    windowed = build(stack=replace(STACK, windows=(4, None)))
    generation = chunks_of_four(windowed)
    assert_greedy(windowed, PROMPTS, generation)


def test_bfloat16_picks_a_token_that_is_best_up_to_rounding():
    half = build(dtype="bfloat16")
    generation = chunks_of_four(half)
    for prompt, ids in zip(PROMPTS, generation.tokens, strict=True):
        logits = following_logits(half, prompt, ids)
        chosen = np.take_along_axis(logits, ids[:, None], axis=1)[:, 0]
        best, spread = logits.max(axis=1), logits.std(axis=1)
        assert (best - chosen <= 0.2 * spread).all()
        assert (best == chosen).mean() > 0.8


def test_learned_positions_are_used_to_the_last_one():
    learned = replace(STACK.attention, position=LearnedPositions(length=20))
    short = build(stack=replace(STACK, attention=learned))
    prompts = [list(range(18)), [3, 4]]
    generation = chunks_of_four(short, prompts, max_new_tokens=3)
    assert_greedy(short, prompts, generation)
    with pytest.raises(UserError, match="18 tokens and needs 21 .* model has only 20"):
        chunks_of_four(short, prompts, max_new_tokens=4)


def test_repetition_penalty_counts_prompt_and_text(model):
    penalty = 1.5
    config = replace(GREEDY, repetition_penalty=penalty)
    generation = chunks_of_four(model, sampling=config)
    differs = False
    for prompt, ids in zip(PROMPTS, generation.tokens, strict=True):
        logits = following_logits(model, prompt, ids)
        for n, token in enumerate(ids):
            seen = np.isin(np.arange(257), [*prompt, *ids[:n]])
            factor = np.where(logits[n] > 0, 1 / penalty, penalty)
            assert np.where(seen, logits[n] * factor, logits[n]).argmax() == token
            differs |= int(logits[n].argmax()) != token
    assert differs


def test_each_row_is_as_if_alone(model):
    together = chunks_of_four(model, seed=2, sampling=SamplingConfig())
    for row, prompt in enumerate(PROMPTS):
        settings = RequestSettings(max_new_tokens=NEW, seed=2, stream=row)
        alone = tokens_of(model, prompt, settings, 64)
        assert together.tokens[row].tolist() == alone


def test_seeds_decide_the_text_and_chunks_do_not(model):
    def tokens(prompts=PROMPTS, **options):
        generation = chunks_of_four(
            model, prompts, sampling=SamplingConfig(), **options
        )
        return [ids.tolist() for ids in generation.tokens]

    first = tokens(seed=2)
    assert tokens(seed=2) == first
    assert tokens(seed=3) != first
    assert tokens(seed=2, chunk=7) == first
    assert [ids[:6] for ids in first] == tokens(seed=2, max_new_tokens=6)
    same_prompt = tokens([PROMPTS[0]] * 3)
    assert len({tuple(ids) for ids in same_prompt}) == 3


def test_every_draw_has_randomness_of_its_own(model):
    indifferent = jax.tree.map(jnp.zeros_like, model)
    generation = chunks_of_four(indifferent, sampling=SamplingConfig(), seed=1)
    for ids in generation.tokens:
        assert len(set(ids.tolist())) > NEW - 4


def test_a_row_ends_at_eos_and_the_others_go_on(model, greedy):
    rows = [ids.tolist() for ids in greedy.tokens]
    eos = next(token for token in rows[0] if token not in rows[2])
    generation = chunks_of_four(model, eos=eos)
    for got, whole, reason in zip(
        generation.tokens, greedy.tokens, generation.finish_reasons, strict=True
    ):
        ends = np.flatnonzero(whole == eos)
        length = ends[0] + 1 if ends.size else NEW
        np.testing.assert_array_equal(got, whole[:length])
        assert reason == ("eos" if ends.size else "length")
    assert (
        generation.finish_reasons[0] == "eos"
        and generation.finish_reasons[2] == "length"
    )
    again = chunks_of_four(model, eos={eos})
    assert again.finish_reasons == generation.finish_reasons


def test_a_sharded_model_continues_as_on_one_device(model, greedy):
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    spread = jax.device_put(model, shardings(model, mesh))
    generation = chunks_of_four(spread)
    np.testing.assert_array_equal(np.stack(generation.tokens), np.stack(greedy.tokens))


@pytest.mark.slow
@pytest.mark.parametrize("rows", [3, 4], ids=["on_each_device", "over_devices"])
def test_rows_lie_over_the_mesh_that_is_named(model, greedy, rows):
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    spread = jax.device_put(model, shardings(model, mesh))
    prompts = [*PROMPTS, PROMPTS[0]][:rows]
    generation = chunks_of_four(spread, prompts, mesh=mesh)
    want = [*greedy.tokens, greedy.tokens[0]][:rows]
    np.testing.assert_array_equal(np.stack(generation.tokens), np.stack(want))


@pytest.fixture
def engine(model):
    """An engine as `generate` makes it, whose prompts are read."""
    sizes = EngineConfig(slots=3, length=64, prefill_tokens=48, steps=4)
    engine = Engine(model, sizes)
    for prompt in PROMPTS:
        engine.submit(prompt, RequestSettings(max_new_tokens=NEW, sampling=GREEDY))
    assert len(engine.read()) == 3
    return engine


def test_decoding_updates_its_cache_in_place(engine):
    cache = engine._state.cache
    engine.decode()
    large = [leaf for leaf in jax.tree.leaves(cache) if leaf.size > 100]
    assert large and all(leaf.is_deleted() for leaf in large)


def test_prefill_makes_the_logits_of_one_position_only(engine):
    pieces = engine._programs._compiled["together", 16, True].programs
    program = "".join(piece.as_text() for piece in pieces)
    assert "f32[3,257]" in program and "f32[3,16,257]" not in program


def test_texts_of_other_lengths_compile_nothing(model, greedy):
    with compiled_programs() as compiled:
        again = chunks_of_four(model, [PROMPTS[1]] * 3, max_new_tokens=10)
    assert compiled == []
    timing = again.timing
    assert (timing.rows, timing.prompt_tokens, timing.new_tokens) == (3, 3, 30)
    assert timing.decode_tokens_per_second == 27 / timing.decode_seconds


def test_other_settings_of_sampling_compile_nothing(model, greedy):
    with compiled_programs() as compiled:
        plain = chunks_of_four(model, sampling=SamplingConfig(), seed=1)
        chunks_of_four(model, sampling=SamplingConfig(temperature=0.3, top_k=4))
        chunks_of_four(model, sampling=SamplingConfig(top_p=0.5, min_p=0.1))
        again = chunks_of_four(model)
    assert compiled == []
    np.testing.assert_array_equal(np.stack(again.tokens), np.stack(greedy.tokens))
    assert (np.stack(plain.tokens) != np.stack(greedy.tokens)).any()


def test_streamed_pieces_join_to_the_text_across_split_characters(cycle):
    made_of = "né🌍!"
    pieces = {0: [], 1: [], 2: []}
    generation = generate(
        cycle(made_of),
        ["n", "x!", "né🌍"],
        tokenizer=BYTES,
        max_new_tokens=NEW,
        sampling=GREEDY,
        chunk=4,
        on_text=lambda row, text: pieces[row].append(text),
    )
    endless = made_of * 4
    for row, skipped in enumerate((1, 0, 3)):
        data = endless[skipped:].encode()[:NEW]
        want = data.decode(errors="replace")
        assert generation.texts[row] == want == "".join(pieces[row])
        assert generation.tokens[row].tolist() == list(data)
        assert len(pieces[row]) > 3 and all(pieces[row])


@pytest.mark.parametrize(
    ("stop", "text", "count"),
    [
        (["f"], "bcde", 5),
        (["de"], "bc", 4),  # draws 3 and 4, of the first and the second chunk
        (["hijk", "zz"], "bcdefg", 10),
        (["zz"], "bcdefghijklmnopqrstuv", NEW),
    ],
)
def test_texts_end_before_a_stop_string(cycle, stop, text, count):
    generation = generate(
        cycle("abcdefghijklmnopqrstuvwxyz"),
        ["a", "k", "q"],
        tokenizer=BYTES,
        max_new_tokens=NEW,
        sampling=GREEDY,
        stop=stop,
        chunk=4,
    )
    assert generation.texts[0] == text
    assert len(generation.tokens[0]) == count
    assert generation.finish_reasons[0] == ("length" if count == NEW else "stop")
    for row, start in ((1, 11), (2, 17)):
        letters = "abcdefghijklmnopqrstuvwxyz" * 2
        whole = letters[start : start + NEW]
        assert generation.texts[row] == whole.split(stop[0])[0]


def test_texts_end_at_each_token_that_the_models_settings_name(cycle):
    model = cycle("abcdefghij")
    tokenizer = ByteTokenizer()
    # The last one is a token of no model here.
    ends = {"eos_token_id": [256, ord("d"), ord("h"), 1 << 40]}
    tokenizer.settings = TextSettings(generation=ends)
    prompts, shared = (
        ["a", "e", "h"],
        {"tokenizer": tokenizer, "max_new_tokens": 4, "sampling": GREEDY},
    )
    generation = generate(model, prompts, **shared)
    assert generation.texts == ["bc", "fg", "ijab"]
    assert [bytes(ids.tolist()) for ids in generation.tokens] == [
        b"bcd",
        b"fgh",
        b"ijab",
    ]
    assert generation.finish_reasons == ["eos", "eos", "length"]
    for number, request in continue_prompts(model, prompts, **shared, slots=2):
        assert request.text == generation.texts[number]
        assert request.tokens == generation.tokens[number].tolist()
        assert request.reason == generation.finish_reasons[number]
    assert text_ends(tokenizer) == (256, ord("d"), ord("h"))
    assert text_ends(ByteTokenizer(bos=False)) == ()


def test_a_prompt_starts_from_bos_unless_told_otherwise(model):
    options = {"max_new_tokens": NEW, "sampling": GREEDY, "chunk": 4}
    prompts = ["To be", "", "or not"]
    ids = [[256, *prompt.encode()] for prompt in prompts]

    def tokens(result):
        return [row.tolist() for row in result.tokens]

    generation = generate(model, prompts, tokenizer=BYTES, **options)
    assert tokens(generation) == tokens(generate_tokens(model, ids, eos=256, **options))
    assert generation.timing.prompt_tokens == sum(map(len, ids))
    generation = generate(model, prompts, tokenizer=BYTES, bos=False, **options)
    ids = [ids[0][1:], [256], ids[2][1:]]
    assert tokens(generation) == tokens(generate_tokens(model, ids, eos=256, **options))


def text_error(model, prompts, *, tokenizer=BYTES, **options) -> str:
    with pytest.raises(UserError) as caught:
        generate(model, prompts, tokenizer=tokenizer, **{"max_new_tokens": 4} | options)
    return str(caught.value)


def test_what_cannot_be_continued_is_refused_in_a_sentence(model):
    assert "prompts is empty" in text_error(model, [])
    assert "wrap it" in text_error(model, "To be")
    without_bos = ByteTokenizer(bos=False)
    message = text_error(model, ["a", ""], tokenizer=without_bos)
    assert "prompt 2 is empty" in message and "no BOS" in message
    assert "max_new_tokens" in text_error(model, ["a"], max_new_tokens=0)
    assert "non-empty" in text_error(model, ["a"], stop=["b", ""])
    assert "non-empty" in text_error(model, ["a"], stop="b")
    message = text_error(model, ["a", "a" * 29], cache_length=32)
    assert message.startswith("prompt 2 has 30 tokens and needs 33 positions for 4 new")
    assert "the cache has only 32" in message


def test_a_tokenizer_larger_than_the_model_is_refused():
    small = build(vocabulary=200)
    assert "257 tokens and the model only 200" in text_error(small, ["a"])
    with pytest.raises(UserError, match="from 3 to 250 and the model's are 0 to 199"):
        generate_tokens(small, [[250, 3]], max_new_tokens=2)
    with pytest.raises(UserError, match="prompt 1 has no tokens"):
        generate_tokens(small, [[]], max_new_tokens=2)


def test_a_rate_without_a_time_is_0():
    timing = Timing(rows=1, prompt_tokens=3, new_tokens=5)
    assert timing.prefill_tokens_per_second == timing.decode_tokens_per_second == 0
    timing = Timing(
        rows=1, prompt_tokens=3, new_tokens=5, prefill_seconds=2, decode_seconds=2
    )
    assert timing.prefill_tokens_per_second == 1.5
    assert timing.decode_tokens_per_second == 2
