"""Importing a directory: any layout on disk, any mesh, a run directory that works."""

import dataclasses
import json
import tracemalloc

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from recurjax.convert import loading
from recurjax.convert.formats.safetensors_files import SafetensorsFiles, open_directory
from recurjax.convert.formats.tensors import empty_for_jax
from recurjax.convert.hugging_face import from_hf
from recurjax.convert.hugging_face.names import hf_pieces
from recurjax.convert.hugging_face.read_config import model_from_keys
from recurjax.convert.hugging_face.write_config import hf_keys
from recurjax.convert.torch.export import from_torch, write_tensors
from recurjax.errors import UserError
from recurjax.evaluation.perplexity import score
from recurjax.inference.generate import generate_tokens
from recurjax.inference.sampling import SamplingConfig
from recurjax.model import Decoder, in_weight_dtype
from recurjax.parameters import parameter_name, rule_of, to_nested_dict
from recurjax.sharding import MeshConfig, make_mesh
from recurjax.training.program import build_step
from recurjax.training.run import load_run
from recurjax.types import IGNORED, Batch, Tokens
from tests.cli.commands import recurjax
from tests.convert.hf_directories import LLAMA, copy_of, rewrite
from tests.golden.cases import OWN
from tests.training import tiny_experiment


def parameters(directory, **options):
    model = from_hf(directory, **options).model
    return jax.tree.map(np.asarray, to_nested_dict(model))


@pytest.fixture(scope="module")
def plain():
    return parameters(LLAMA)


def assert_same(one, other):
    jax.tree.map(np.testing.assert_array_equal, one, other)


def test_shards_hold_the_same_parameters(plain, tmp_path):
    directory = copy_of(LLAMA, tmp_path / "sharded")
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    homes = {}
    for number in (1, 2):
        name = f"model-0000{number}-of-00002.safetensors"
        own = dict(list(tensors.items())[number - 1 :: 2])
        save_file(own, directory / name)
        homes |= dict.fromkeys(own, name)
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": homes}))
    assert_same(parameters(directory), plain)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_half_precision_is_widened_exactly(dtype, plain, tmp_path):
    directory = copy_of(LLAMA, tmp_path / "half")
    tensors = load_file(directory / "model.safetensors")
    write_half(tensors, directory / "model.safetensors", dtype)
    want = jax.tree.map(lambda x: x.astype(dtype).astype(np.float32), plain)
    assert_same(parameters(directory), want)


@pytest.mark.parametrize("dtype", ["bfloat16", "keep", "float32"])
def test_bfloat16_weights_can_stay_what_they_are(dtype, plain, tmp_path):
    """Half of the memory, the same logits, and back to the same file."""
    directory = copy_of(LLAMA, tmp_path / "half")
    tensors = load_file(directory / "model.safetensors")
    write_half(tensors, directory / "model.safetensors", ml_dtypes.bfloat16)
    imported = from_hf(directory, dtype=dtype)
    model = imported.model
    narrow = dtype != "float32"
    assert (
        model.config.dtype
        == model.config.weight_dtype
        == ("bfloat16" if narrow else "float32")
    )
    leaves = jax.tree.leaves(model)
    size, wide = sum(x.nbytes for x in leaves), 4 * sum(x.size for x in leaves)
    assert size <= (0.6 if narrow else 1.0) * wide
    assert model.final_norm.scale[...].dtype == jnp.float32
    want = jax.tree.map(
        lambda x: x.astype(ml_dtypes.bfloat16).astype(np.float32), plain
    )
    got = jax.tree.map(lambda x: np.asarray(x, np.float32), to_nested_dict(model))
    assert_same(got, want)
    pieces = hf_pieces(imported.architecture, model.config)
    stored = jnp.dtype(model.config.weight_dtype)
    write_tensors(model, pieces, tmp_path / "back.safetensors", dtype=stored)
    back = SafetensorsFiles([tmp_path / "back.safetensors"], where="back")
    disk = open_directory(directory)
    for name, info in back.tensors.items():
        assert info.dtype == ("BF16" if narrow else "F32"), name
        np.testing.assert_array_equal(back.read(name), disk.read(name))
    assert hf_keys(model.config, length=16)["dtype"] == model.config.weight_dtype


def test_a_checkpoint_that_is_not_bfloat16_is_kept_as_float32(plain):
    assert_same(parameters(LLAMA, dtype="keep"), plain)


def test_weights_are_cast_both_ways_and_narrow_ones_are_not_trained(plain):
    model = from_hf(LLAMA).model
    narrow = in_weight_dtype(model, "bfloat16")
    like = jax.eval_shape(lambda: Decoder(narrow.config, rngs=nnx.Rngs(0)))
    assert jax.tree.structure(like) == jax.tree.structure(narrow)
    assert [x.dtype for x in jax.tree.leaves(like)] == [
        x.dtype for x in jax.tree.leaves(narrow)
    ]
    for path, leaf in jax.tree_util.tree_leaves_with_path(narrow):
        is_weight = rule_of(parameter_name(path)).is_weight
        assert leaf.dtype == ("bfloat16" if is_weight else "float32")
    wide = in_weight_dtype(narrow, "float32")
    assert wide.config == model.config
    assert {x.dtype for x in jax.tree.leaves(wide)} == {jnp.dtype("float32")}
    experiment = dataclasses.replace(tiny_experiment.config(), model=narrow.config)
    with pytest.raises(UserError, match="weight_dtype bfloat16 cannot be trained"):
        build_step(experiment, make_mesh(MeshConfig(), jax.devices()[:1]))


@pytest.mark.parametrize(
    ("case", "change"),
    [
        ("gpt2", lambda name: name.removeprefix("transformer.")),
        ("gemma3", lambda name: f"language_model.{name}"),
        ("gemma3", lambda name: name.replace("model.", "model.language_model.", 1)),
    ],
    ids=["without_its_head", "text_of_older", "text_of_newer"],
)
def test_names_of_parts_are_those_of_the_whole_model(case, change, tmp_path):
    source = OWN / "hf" / case
    directory = copy_of(source, tmp_path / "hf")
    if case == "gemma3":
        inner = json.loads((source / "config.json").read_text())
        keys = {"model_type": "gemma3", "text_config": inner}
        (directory / "config.json").write_text(json.dumps(keys))

    def renamed(tensors):
        changed = {change(name): x for name, x in tensors.items()}
        vision = {} if case == "gpt2" else {"vision_tower.w": np.zeros(3, np.float32)}
        return changed | vision

    rewrite(directory, renamed)
    messages = []
    assert_same(parameters(directory, report=messages.append), parameters(source))
    assert any("as a text model" in text for text in messages) == (case == "gemma3")


def write_half(tensors, file, dtype):
    """Writes a safetensors file by hand: the package's numpy side has no bfloat16."""
    name = {"bfloat16": "BF16", "float16": "F16"}[np.dtype(dtype).name]
    header, data = {}, b""
    for key, array in tensors.items():
        part = array.astype(dtype).tobytes()
        ends = [len(data), len(data) + len(part)]
        header[key] = {"dtype": name, "shape": array.shape, "data_offsets": ends}
        data += part
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)


def test_a_mesh_gets_its_shards_and_the_same_numbers(plain, monkeypatch):
    monkeypatch.setattr(loading, "_ON_HOST", 0)  # as for stacks that are large
    mesh = make_mesh(MeshConfig(data=1, fsdp=4, tensor=2))
    model = from_hf(LLAMA, mesh=mesh).model
    w_up = model.stack.blocks[0].mlp.w_up[...]
    assert w_up.addressable_shards[0].data.size == w_up.size // 8
    assert_same(jax.tree.map(np.asarray, to_nested_dict(model)), plain)


def test_weights_that_are_not_finite_are_counted(tmp_path):
    directory = copy_of(LLAMA, tmp_path / "nan")

    def spoil(tensors):
        tensors["model.norm.weight"][:2] = np.nan
        tensors["model.layers.1.mlp.up_proj.weight"][0, 0] = np.inf
        return tensors

    rewrite(directory, spoil)
    said = []
    from_hf(directory, report=said.append)
    assert len(said) == 1 and "3 weights" in said[0] and "in 2 tensors" in said[0]
    assert "model.norm.weight" in said[0]


def test_rows_beyond_the_tokenizers_are_kept_and_never_predicted(tmp_path):
    directory = copy_of(LLAMA, tmp_path / "padded", tokens=100)
    model = from_hf(directory).model
    assert model.config.vocabulary == 100
    assert model.w_embedding.shape[0] == 131
    logits = model.logits(jnp.zeros((1, model.config.stack.width)))
    assert logits.shape == (1, 100)


@pytest.mark.slow
def test_an_imported_directory_generates_and_evaluates(quick_compilation, tmp_path):
    directory = copy_of(LLAMA, tmp_path / "hf", tokens=131)
    out = tmp_path / "run"
    code, said, err = recurjax("convert", "from-hf", directory, out, "--no-check")
    assert (code, err) == (0, ""), err
    assert said == f"{out}: parity: not measured: not asked for\n"
    assert json.loads((out / "parity.json").read_text()) == {
        "measured": False,
        "reason": "not asked for",
    }
    loaded = load_run(out)
    assert loaded.step == 0 and loaded.tokenizer.vocabulary == 131
    words = ("--prompt", "w5 w6", "--max-new-tokens", 3, "--temperature", 0, "--json")
    code, said, err = recurjax("generate", out, *words)
    assert code == 0, err
    [result] = json.loads(said)["generations"]
    # The folder names a BOS, and no post-processor puts it before a text.
    assert result["tokens"] == greedy(loaded.model, [5, 6], 3)[: len(result["tokens"])]
    text = tmp_path / "text"
    text.write_text("w1 w2 w3 w4 " * 20)
    code, said, err = recurjax("evaluate", out, "--text", text, "--length", 16)
    assert code == 0, err
    assert json.loads(said)["tokens"] == 80


def greedy(model, ids, count):
    for _ in range(count):
        logits, _ = model(Tokens(jnp.asarray([ids])), model.init_cache(1, 0))
        ids = [*ids, int(logits[0, -1].argmax())]
    return ids[-count:]


def test_a_parameter_that_is_a_whole_tensor_is_not_copied():
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    array = empty_for_jax((300, 70))
    array.fill(2.0)
    kept = loading._place(array, place)
    assert kept.unsafe_buffer_pointer() == array.ctypes.data
    np.testing.assert_array_equal(kept, np.full((300, 70), 2.0))


@pytest.mark.parametrize("same", [True, False])
def test_a_tied_checkpoint_with_a_head_of_its_own_keeps_it(same, tmp_path):
    folder = copy_of(LLAMA, tmp_path / "hf", tie_word_embeddings=True)

    def change(tensors):
        embedding = tensors["model.embed_tokens.weight"]
        return tensors | {"lm_head.weight": embedding * (1 if same else 3)}

    rewrite(folder, change)
    messages = []
    model = from_hf(folder, report=messages.append).model
    assert (model.w_head is None) == same
    assert any("differs from the embedding" in text for text in messages) != same
    if not same:
        head = np.asarray(model.w_embedding[...]).T * 3
        np.testing.assert_array_equal(np.asarray(model.w_head[...]), head)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_importing_takes_little_more_than_the_model(dtype, tmp_path):
    """The peak is below 1.3 of the model and its largest tensor, fused ones too."""
    keys = json.loads((OWN / "hf" / "phi3" / "config.json").read_text())
    keys |= {"hidden_size": 192, "intermediate_size": 512, "vocab_size": 4096}
    config = model_from_keys(keys, where="config.json").config
    like = jax.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    model = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), like)
    (tmp_path / "config.json").write_text(json.dumps(keys))
    file = tmp_path / "model.safetensors"
    write_tensors(model, hf_pieces("phi3", config), file, dtype=jnp.dtype(dtype))
    from_hf(tmp_path, dtype=dtype)  # what is imported and traced once
    tracemalloc.start()
    model = from_hf(tmp_path, dtype=dtype).model
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    leaves = jax.tree.leaves(model)
    assert sum(leaf.nbytes for leaf in leaves) > 3e6
    largest = model.w_embedding[...].nbytes
    assert peak < 1.3 * sum(leaf.nbytes for leaf in leaves) + largest


@pytest.mark.slow
def test_bfloat16_weights_decode_evaluate_and_leave(plain, tmp_path, quick_compilation):
    """The rounded model's loss, its tokens, its file there and back, its surgery."""
    folder, out = copy_of(LLAMA, tmp_path / "model", tokens=131), tmp_path / "run"
    line = ["convert", "from-hf", folder, out, "--dtype", "bfloat16", "--no-check"]
    code, _, err = recurjax(*line)
    assert code == 0, err
    run = load_run(out)
    assert run.model.config.weight_dtype == run.model.config.dtype == "bfloat16"
    rows = jax.random.randint(jax.random.key(0), (2, 12), 0, 131)
    batch = Batch(rows, jnp.roll(rows, -1, axis=1).at[:, -1].set(IGNORED))
    losses = [
        score(model, [batch], token_bytes=run.tokenizer.token_bytes).loss
        for model in (run.model, from_hf(folder).model)
    ]
    np.testing.assert_allclose(losses[0], losses[1], rtol=0.01)
    sampling = SamplingConfig(temperature=0.0)
    words = generate_tokens(
        run.model, [np.arange(4)], max_new_tokens=3, sampling=sampling
    )
    assert len(words.tokens[0]) == 3
    line = ["convert", "to-torch", out, tmp_path / "torch", "--no-check"]
    code, _, err = recurjax(*line)
    assert code == 0, err
    keys = json.loads((tmp_path / "torch" / "config.json").read_text())
    assert keys["dtype"] == "bfloat16"
    back = from_torch(tmp_path / "torch").model
    assert_same(to_nested_dict(back), to_nested_dict(run.model))
    line = ["convert", "to-recursive", out, tmp_path / "looped"]
    code, _, err = recurjax(*line, "--loops", 2, "--rank", 2)
    assert code == 0 and "the bfloat16 weights become float32" in err, err
    assert load_run(tmp_path / "looped").model.config.weight_dtype == "float32"
