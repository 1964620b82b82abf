"""GGUF files written by their own package: names, row order, quantised weights."""

import json
import tracemalloc

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from recurjax.convert.formats import gguf_file
from recurjax.convert.formats.gguf_file import _hf_name, unpermute
from recurjax.convert.formats.gguf_tokenizer import gguf_tokenizer
from recurjax.convert.hugging_face import from_hf
from recurjax.convert.hugging_face.families import FAMILIES
from recurjax.errors import UserError
from recurjax.layers.position import LongScaling
from recurjax.model import in_weight_dtype
from recurjax.parameters import to_nested_dict
from recurjax.training.run import load_run
from tests.cli.commands import recurjax
from tests.convert.hf_directories import LLAMA, copy_of
from tests.golden.cases import OWN

KEYS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "rope.dimension_count": "head_dim",
}


def permute(rows, heads):
    """llama.cpp's order, as its converter writes it."""
    folded = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return folded.swapaxes(1, 2).reshape(rows.shape)


def test_row_order_is_undone():
    rows = np.arange(48 * 3).reshape(48, 3)
    assert (permute(rows, 6) != rows).any()
    np.testing.assert_array_equal(unpermute(permute(rows, 6), 6), rows)


def write_gguf(file, *, tensors=None, **changes):
    gguf = pytest.importorskip("gguf", reason="the extra gguf is not installed")
    config = json.loads((LLAMA / "config.json").read_text())
    writer = gguf.GGUFWriter(file, "llama")
    for key, name in KEYS.items():
        writer.add_uint32(f"llama.{key}", config[name])
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    for key, value in changes.items():
        writer.add_string(key, value)
    weights = load_file(LLAMA / "model.safetensors")
    names = {
        _hf_name(name, FAMILIES["llama"]): name
        for name in gguf_names(config["num_hidden_layers"])
    }
    for name, tensor in weights.items():
        for heads, part in ((6, ".q_proj."), (2, ".k_proj.")):
            tensor = permute(tensor, heads) if part in name else tensor
        writer.add_tensor(names[name], np.ascontiguousarray(tensor))
    for name, tensor in (tensors or {}).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_names(layers):
    parts = ("attn_norm", "ffn_norm", "attn_q", "attn_k", "attn_v", "attn_output")
    parts += ("ffn_gate", "ffn_up", "ffn_down")
    yield from ("token_embd.weight", "output_norm.weight", "output.weight")
    yield from (f"blk.{i}.{part}.weight" for i in range(layers) for part in parts)


def test_a_file_holds_the_same_model_as_the_directory(tmp_path):
    write_gguf(tmp_path / "m.gguf")
    tokenizer = tokenizer_json(tmp_path, 131)
    converted = from_hf(tmp_path / "m.gguf", tokenizer=tokenizer)
    want = from_hf(LLAMA)
    eps = converted.model.config.final_norm.eps
    assert eps == pytest.approx(1e-5, rel=1e-6)
    assert converted.length == want.length
    jax.tree.map(
        np.testing.assert_array_equal,
        to_nested_dict(converted.model),
        to_nested_dict(want.model),
    )


def tokenizer_json(folder, tokens):
    import tokenizers

    words = {f"w{i}": i for i in range(tokens)}
    model = tokenizers.models.WordLevel(words, unk_token="w0")
    tokenizers.Tokenizer(model).save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def test_damaged_and_unknown_files_are_refused(tmp_path):
    write_gguf(tmp_path / "m.gguf", **{"llama.expert.kind": "mixed"})
    tokenizer = tokenizer_json(tmp_path, 131)
    with pytest.raises(UserError, match="llama.expert.kind 'mixed' is unknown"):
        from_hf(tmp_path / "m.gguf", tokenizer=tokenizer)
    with pytest.raises(UserError, match="the tokenizer must be .* got None"):
        from_hf(tmp_path / "m.gguf")
    (tmp_path / "n.gguf").write_bytes((tmp_path / "m.gguf").read_bytes()[:5000])
    with pytest.raises(UserError, match="is not a complete GGUF file"):
        from_hf(tmp_path / "n.gguf", tokenizer=tokenizer)


def test_a_file_cut_inside_its_tensors_is_refused(tmp_path):
    write_gguf(tmp_path / "m.gguf")
    data = (tmp_path / "m.gguf").read_bytes()
    (tmp_path / "m.gguf").write_bytes(data[: len(data) - 5000])
    with pytest.raises(
        UserError, match="not a complete GGUF file: .* inside its tensors"
    ):
        from_hf(tmp_path / "m.gguf", tokenizer=tokenizer_json(tmp_path, 131))


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0", "F16", "BF16"])
def test_rows_expanded_a_few_at_a_time_are_those_expanded_at_once(
    kind, tmp_path, monkeypatch
):
    gguf = pytest.importorskip("gguf", reason="the extra gguf is not installed")
    kind = gguf.GGMLQuantizationType[kind]
    rows = np.random.default_rng(0).standard_normal((50, 64)).astype(np.float32)
    quantized = gguf.quants.quantize(rows, kind)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("before", np.ones(3, np.float32))
    writer.add_tensor("output.weight", quantized, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    monkeypatch.setattr(gguf_file, "_AT_ONCE", 7 * 64)
    _, source, *_ = gguf_file.open_gguf(tmp_path / "m.gguf", with_tokenizer=False)
    assert source.tensors["lm_head.weight"].shape == (50, 64)
    want = gguf.quants.dequantize(quantized, kind)
    np.testing.assert_array_equal(source.read("lm_head.weight"), want)


def test_expanding_takes_little_more_memory_than_the_result(tmp_path):
    gguf = pytest.importorskip("gguf", reason="the extra gguf is not installed")
    kind = gguf.GGMLQuantizationType.Q8_0
    # 16 MiB expanded, four times what is expanded at once.
    rows = np.ones((16384, 256), np.float32)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    data = gguf.quants.quantize(rows, kind)
    writer.add_tensor("output.weight", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    del data
    _, source, *_ = gguf_file.open_gguf(tmp_path / "m.gguf", with_tokenizer=False)
    tracemalloc.start()
    try:
        values = source.read("lm_head.weight")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    np.testing.assert_allclose(values, rows, rtol=1e-3)
    # Expanded at once it takes the result twice, and more.
    assert peak < 1.8 * rows.nbytes


@pytest.mark.parametrize("case", ["gemma2", "gemma3", "phi3", "qwen3"])
def test_other_architectures_hold_the_same_model(case, tmp_path):
    """Names by the package's own table; Gemma's norms hold 1 + scale."""
    gguf = pytest.importorskip("gguf", reason="the extra gguf is not installed")
    file, source = tmp_path / "m.gguf", OWN / "hf" / case
    config = json.loads((source / "config.json").read_text())
    width = config["hidden_size"] // config["num_attention_heads"]
    width = config.get("head_dim", width)
    writer = gguf.GGUFWriter(file, case)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_rope_dimension_count(width)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if window := config.get("sliding_window"):
        writer.add_sliding_window(window)
    if case == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    architecture = gguf.MODEL_ARCH[case.upper()]
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    for name, tensor in load_file(source / "model.safetensors").items():
        if "gemma" in case and tensor.ndim == 1:
            tensor = tensor + 1
        theirs = names.get_name(name, try_suffixes=(".weight",))
        writer.add_tensor(theirs, np.ascontiguousarray(tensor))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    imported = from_hf(file, tokenizer=tokenizer_json(tmp_path, 131))
    # llama.cpp's scale is that of the heads.
    changes = {"query_pre_attn_scalar": width} if "gemma" in case else {}
    want = from_hf(copy_of(source, tmp_path / "hf", **changes))
    ours, theirs = (side.model.config.stack for side in (imported, want))
    assert (ours.pattern, ours.norms) == (theirs.pattern, theirs.norms)
    assert ours.attention.soft_cap == theirs.attention.soft_cap
    assert ours.attention.scale is theirs.attention.scale is None
    leaves = (jax.tree.leaves(side.model) for side in (imported, want))
    for ours, theirs in zip(*leaves, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=3e-7)


def write_quantized(file, kinds, *, table):
    """A model of two layers with random integers, which no rounding has made.

    Args:
      kinds: type of the layers' matrices, and of the last layer's; one for both.
      table: type of the embedding and of the head.
    """
    gguf = pytest.importorskip("gguf", reason="the extra gguf is not installed")
    draw, width, inner, key_width = np.random.default_rng(0), 64, 96, 32
    shapes = {
        **dict.fromkeys(("attn_q", "attn_output"), (width, width)),
        **dict.fromkeys(("attn_k", "attn_v"), (key_width, width)),
        **dict.fromkeys(("ffn_gate", "ffn_up"), (inner, width)),
        "ffn_down": (width, inner),
    }
    sizes = {"block_count": 2, "context_length": 64, "embedding_length": width}
    sizes |= {"feed_forward_length": inner, "attention.head_count": 4}
    sizes |= {"attention.head_count_kv": 2, "rope.dimension_count": 16}
    writer = gguf.GGUFWriter(file, "llama")
    for key, value in sizes.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)

    def add(name, shape, kind):
        kind = gguf.GGMLQuantizationType[kind]
        rows = draw.normal(size=shape).astype(np.float32) / 8
        data = gguf.quants.quantize(rows, kind)
        if kind.name.startswith("Q"):
            block = gguf.GGML_QUANT_SIZES[kind][1]
            values = data.reshape(-1, block)[:, 4 if kind.name == "Q4_1" else 2 :]
            values[:] = draw.integers(0, 256, values.shape)
        writer.add_tensor(f"{name}.weight", data, raw_dtype=kind)

    add("token_embd", (50, width), table)
    add("output", (50, width), table)
    writer.add_tensor("output_norm.weight", np.ones(width, np.float32))
    for layer, kind in zip((0, 1), (kinds[0], kinds[-1]), strict=True):
        for name in ("attn_norm", "ffn_norm"):
            ones = np.ones(width, np.float32)
            writer.add_tensor(f"blk.{layer}.{name}.weight", ones)
        for name, shape in shapes.items():
            add(f"blk.{layer}.{name}", shape, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize(
    ("kind", "table", "dtype"),
    [
        ("Q8_0", "Q8_0", "q8_0"),
        ("Q4_0", "Q4_0", "q4_0"),
        ("Q4_1", "Q8_0", "q4_1"),
        ("Q4_0", "F16", "q4_0-layers"),
        ("BF16", "BF16", "bfloat16"),
        ("F16", "BF16", "float32"),
    ],
)
def test_integers_stay_as_they_are(kind, table, dtype, tmp_path):
    file, tokenizer = tmp_path / "m.gguf", tokenizer_json(tmp_path, 50)
    write_quantized(file, [kind], table=table)
    want = from_hf(file, tokenizer=tokenizer).model
    model = from_hf(file, tokenizer=tokenizer, dtype="keep").model
    assert model.config.weight_dtype == dtype
    integers = [x for x in jax.tree.leaves(model) if "int" in str(x.dtype)]
    assert len(integers) == (0 if "Q" not in kind else 7 if "layers" in dtype else 9)
    expanded = in_weight_dtype(model, "float32")
    jax.tree.map(
        np.testing.assert_array_equal, to_nested_dict(expanded), to_nested_dict(want)
    )


@pytest.mark.slow
def test_a_run_of_a_files_integers_continues_as_the_expanded_one(tmp_path):
    file, tokenizer = tmp_path / "m.gguf", tokenizer_json(tmp_path, 50)
    write_quantized(file, ["Q4_1"], table="Q8_0")
    texts = {}
    for dtype in ("float32", "keep"):
        run = tmp_path / dtype
        options = ["--tokenizer", tokenizer, "--dtype", dtype, "--no-check"]
        code, _, err = recurjax("convert", "from-hf", file, run, *options)
        assert code == 0, err
        prompt = ["--prompt", "w1", "--temperature", "0", "--max-new-tokens", "8"]
        code, texts[dtype], err = recurjax("generate", run, *prompt)
        assert code == 0, err
    assert texts["keep"] == texts["float32"]
    stored = load_run(tmp_path / "keep", weights="stored").model
    assert stored.config.weight_dtype == "q4_1"
    kept = from_hf(file, tokenizer=tokenizer, dtype="keep").model
    jax.tree.map(
        np.testing.assert_array_equal, to_nested_dict(stored), to_nested_dict(kept)
    )


@pytest.mark.parametrize(
    ("kinds", "named"), [(["Q5_0"], "Q5_0"), (["Q4_0", "Q8_0"], "Q4_0, Q8_0")]
)
def test_other_types_of_layers_stay_only_expanded(kinds, named, tmp_path):
    file, tokenizer = tmp_path / "m.gguf", tokenizer_json(tmp_path, 50)
    write_quantized(file, kinds, table="Q8_0")
    with pytest.raises(
        UserError, match=f"of Q8_0, Q4_0 or Q4_1, and they are {named}: leave it out"
    ):
        from_hf(file, tokenizer=tokenizer, dtype="keep")
    from_hf(file, tokenizer=tokenizer)


def test_factors_of_a_rope_are_read_from_its_tensor(tmp_path):
    """As llama.cpp has the rule of Llama 3."""
    factors = np.array([1.0, 2.0, 4.0, 8.0], np.float32)
    write_gguf(tmp_path / "m.gguf", tensors={"rope_freqs.weight": factors})
    made = from_hf(tmp_path / "m.gguf", tokenizer=tokenizer_json(tmp_path, 131))
    scaling = made.model.config.stack.attention.position.scaling
    assert scaling == LongScaling(
        short=(1.0, 2.0, 4.0, 8.0), long=(1.0, 2.0, 4.0, 8.0), length=256
    )


def test_a_tokenizer_is_built_from_tokens_and_merges():
    letters = [chr(i) for i in range(33, 127)] + ["Ġ"]
    tokens = ["<|end|>", *letters, "th", "the", "Ġt"]
    fields = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": ["t h", "th e", "Ġ t"],
        "tokenizer.ggml.token_type": [3] + [1] * (len(tokens) - 1),
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 0,
    }
    tokenizer = gguf_tokenizer(fields, where="here")
    ids = tokenizer.encode("the t12")
    assert [tokens[i] for i in ids] == ["the", "Ġt", "1", "2"]
    assert tokenizer.decode(ids) == "the t12"
    assert (tokenizer.bos, tokenizer.eos) == (None, 0)
    fields["tokenizer.ggml.add_bos_token"] = True
    assert gguf_tokenizer(fields, where="here").bos == 0
    fields["tokenizer.ggml.pre"] = "mystery"
    with pytest.raises(UserError, match="with 'mystery'.*--tokenizer"):
        gguf_tokenizer(fields, where="here")
