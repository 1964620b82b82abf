"""Out to PyTorch and back: bit-exact, and the same function where torch is at hand."""

import ast
import dataclasses
import importlib.util
import json
import os
import stat
import subprocess
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from recurjax.convert import parity
from recurjax.convert.hugging_face import from_hf
from recurjax.convert.imported_run import new_experiment, write_run
from recurjax.convert.parity import NotMeasured, Parity, layer_states
from recurjax.convert.torch.export import (
    compare_with_export,
    from_torch,
    to_torch,
    torch_source,
)
from recurjax.convert.torch.names import torch_pieces
from recurjax.data.tokenizers import ByteTokenizer, load_tokenizer
from recurjax.errors import UserError
from recurjax.exits import EarlyExit, ExitRule, confidence
from recurjax.inference.generate import generate_tokens
from recurjax.inference.sampling import SamplingConfig
from recurjax.layers.attention import AttentionConfig
from recurjax.layers.mlp import MlpConfig
from recurjax.layers.norm import NormConfig
from recurjax.layers.position import (
    Alibi,
    DynamicScaling,
    LearnedPositions,
    LinearScaling,
    Llama3Scaling,
    Rope,
    YarnScaling,
)
from recurjax.model import ModelConfig
from recurjax.parameters import to_nested_dict
from recurjax.training.run import LoadedRun, load_run
from recurjax.types import Tokens
from recurjax.variants.latent_recurrent_transformer import (
    LatentRecurrentTransformerConfig,
    MemoryConfig,
)
from recurjax.variants.rat import (
    MambaMixerConfig,
    RatMixerConfig,
    RecurrentLayerConfig,
    presets,
)
from recurjax.variants.recurformer import MambaConfig, RecurFormerConfig
from recurjax.variants.recurrent_transformer import RecurrentTransformerConfig
from recurjax.variants.relaxed_recursive_transformer import (
    RelaxedRecursiveTransformerConfig,
)
from recurjax.variants.transformer import TransformerConfig
from tests.cli.commands import assert_refused, recurjax
from tests.convert.hf_directories import CASES, LLAMA
from tests.marks import slow_except
from tests.pallas_kernels import triton_interpreter
from tests.tolerances import TOLERANCES, assert_values_close
from tests.torch_python import PYTHON
from tests.training.tiny_experiment import drawn
from tests.variants.latent_recurrent_transformer.switches import SWITCHES

WIDTH = 16
PADDED = 259


def attention(**switches) -> AttentionConfig:
    sizes = {"heads": 4, "key_heads": 2, "head_width": 4}
    return AttentionConfig(**sizes | switches)


def transformer(**switches) -> TransformerConfig:
    usual = {"attention": attention(), "mlp": MlpConfig(kind="swiglu", width=24)}
    return TransformerConfig(width=WIDTH, **{"layers": 2} | usual | switches)


def recurrent(**switches) -> RecurrentTransformerConfig:
    sizes = {"heads": 4, "key_heads": 2, "head_width": 4, "mlp": MlpConfig(width=24)}
    return RecurrentTransformerConfig(layers=2, width=WIDTH, **sizes | switches)


def recursive(base=None, **switches) -> RelaxedRecursiveTransformerConfig:
    sizes = {"transformer": base or transformer(layers=4), "loops": 2, "rank": 3}
    return RelaxedRecursiveTransformerConfig(**sizes | switches)


SIZE = {"width": WIDTH, "heads": 4}
LAYER = NormConfig(kind="layer", bias=True)
# Of five layers two are left over behind the pattern.
BY_LAYER = transformer(
    layers=5,
    norms="both",
    windows=(4, 4, None),
    positions=(
        Rope(scaling=LinearScaling(factor=2.0)),
        None,
        Rope(scaling=Llama3Scaling(factor=8.0, low=1.0, high=4.0, length=16)),
    ),
    attention=attention(soft_cap=5.0),
)
STACKS = {
    "transformer": transformer(),
    "transformer_alibi": transformer(
        windows=(3, None),
        residual_scale="inverse_sqrt_depth",
        norm=LAYER,
        attention=attention(
            position=Alibi(),
            qk_norm=NormConfig(one_plus=True),
            qkv_bias=True,
            out_bias=True,
            soft_cap=5.0,
        ),
        mlp=MlpConfig(kind="relu_squared", width=24, bias=True),
    ),
    "transformer_learned": transformer(
        parallel_residual=True,
        attention=attention(
            position=LearnedPositions(length=40),
            qk_norm=NormConfig(kind="layer"),
            qk_norm_over="full",
            scale=0.3,
        ),
        mlp=MlpConfig(kind="geglu", width=24),
    ),
    "transformer_norms_both": BY_LAYER,
    "transformer_norms_after": transformer(
        norms="after",
        attention=attention(
            position=Rope(scaling=YarnScaling(factor=4.0, length=16, amplitude=1.1)),
            qk_norm=NormConfig(),
            qk_norm_over="full",
        ),
    ),
    "recurrent_transformer": recurrent(),
    "recurrent_transformer_blocks": recurrent(
        block=3,
        normed_persistent=False,
        position=Rope(fraction=0.5),
        norm=LAYER,
        qk_norm=None,
        qkv_bias=True,
        out_bias=True,
        residual_scale="one",
        mlp=MlpConfig(kind="swiglu", width=24, bias=True),
    ),
    "rat_and_window": presets.stack(
        presets.rat(**SIZE, chunk=5),
        presets.attention(**SIZE, window=6),
        layers=4,
        width=WIDTH,
    ),
    "rat_baselines": presets.stack(
        RatMixerConfig(
            heads=4,
            head_width=4,
            chunk=4,
            groups=4,
            position_of="token",
            forget_rank=3,
            output_rank=2,
        ),
        presets.rnn(**SIZE, length=32),
        presets.reversed_rat(**SIZE, chunk=5, length=40),
        presets.attention(**SIZE),
        layers=4,
        width=WIDTH,
    ),
    "rat_and_mamba": presets.stack(
        presets.rat(**SIZE, chunk=5),
        MambaMixerConfig(state=3, dt_rank=5),
        layers=4,
        width=WIDTH,
    ),
    "rat_with_memory": presets.with_memory(
        presets.stack(
            presets.rat(**SIZE, chunk=5),
            presets.rnn(**SIZE, length=32),
            layers=4,
            width=WIDTH,
        ),
        sources=(2, 4),
        lags=(0, 2),
        reset_token=3,
    ),
    "rat_with_rt_layers": presets.stack(
        RecurrentLayerConfig(
            heads=4, key_heads=2, head_width=4, position=Rope(fraction=0.5), block=3
        ),
        presets.attention(**SIZE, window=6),
        presets.recurrent(**SIZE),
        layers=3,
        width=WIDTH,
    ),
    "recurformer": RecurFormerConfig(
        transformer=transformer(attention=attention(qkv_bias=True, out_bias=True)),
        replaced=((0, 3), (0, 1, 2, 3)),
        mamba=MambaConfig(state=3, dt_rank=5),
    ),
    "recurformer_learned": RecurFormerConfig(
        transformer=transformer(
            windows=(None, 3),
            parallel_residual=True,
            residual_scale="inverse_sqrt_depth",
            norm=LAYER,
            attention=attention(
                position=LearnedPositions(length=40),
                qk_norm=NormConfig(one_plus=True),
                soft_cap=5.0,
                scale=0.3,
            ),
        ),
        replaced=((0, 1, 2), ()),
        mamba=MambaConfig(conv=2, state=4, dt_rank=3, expand=3),
    ),
    "recurformer_norms_both": RecurFormerConfig(
        transformer=BY_LAYER,
        replaced=((), (), (0, 2, 3), (), ()),
        mamba=MambaConfig(state=3, dt_rank=5),
    ),
    "recursive": recursive(),
    "recursive_untied": recursive(
        transformer(
            layers=4,
            windows=(3, None),
            parallel_residual=True,
            norm=LAYER,
            attention=attention(
                position=Alibi(),
                qk_norm=NormConfig(one_plus=True),
                qkv_bias=True,
                out_bias=True,
                soft_cap=5.0,
            ),
            mlp=MlpConfig(kind="gelu", width=24, bias=True),
        ),
        tie_norms=False,
    ),
    "recursive_first": recursive(
        transformer(layers=6, windows=(3, None)), loops=3, loop_cache="first"
    ),
    "recursive_norms_both": recursive(
        dataclasses.replace(BY_LAYER, layers=6), tie_norms=False
    ),
    "recursive_sequence": recursive(sharing="sequence", rank=0, tie_norms=False),
    "recursive_learned_turned": recursive(
        transformer(
            layers=6,
            attention=attention(
                position=LearnedPositions(length=40),
                qk_norm=NormConfig(),
                qk_norm_over="full",
            ),
        ),
        loops=3,
        sharing="cycle_rev",
        loop_cache="first",
        rank=100,
    ),
} | {
    f"latent_{name.replace(',', '').replace(' ', '_')}": dataclasses.replace(
        model.stack, vocabulary=PADDED
    )
    for name, model in SWITCHES.items()
}
STACKS["latent_own_state_in_the_residual_alone"] = dataclasses.replace(
    STACKS["latent_vanilla"],
    memory=MemoryConfig(sources=(2,), lags=(0,), keys=False, values=False),
)


def run_of(stack, out, **switches) -> LoadedRun:
    if isinstance(stack, LatentRecurrentTransformerConfig):
        final_norm = NormConfig(scale=False, eps=1e-6)
        switches |= {"final_norm": final_norm, "logit_soft_cap": 15.0}
    config = ModelConfig(vocabulary=256, pad_vocabulary_to=7, stack=stack, **switches)
    assert config.padded_vocabulary == PADDED
    experiment = new_experiment(out, config, length=32)
    return LoadedRun(experiment, drawn(config, scale=0.3), ByteTokenizer(bos=False), 7)


def assert_same_parameters(one, other):
    one, other = (to_nested_dict(model) for model in (one, other))
    jax.tree.map(np.testing.assert_array_equal, one, other)


def few_tokens(length):
    """Rows of few different tokens, so that the latent memory's reset is among them."""
    return np.random.default_rng(0).integers(8, size=(2, length)).astype(np.int32)


QUICK = (
    *("transformer", "recurrent_transformer", "rat_baselines", "recurformer"),
    "recursive_untied",
    "latent_averaged_sources_replacing",
)
OFTEN = (
    *("transformer_alibi", "recurrent_transformer_blocks", "rat_with_memory"),
    *("rat_and_mamba", "recurformer_norms_both", "recursive_first"),
    *("latent_keys_averaged_lags_reset", "latent_layerwise"),
)
"""Stacks that between them turn most switches of each variant."""
FAMILIES = ("hf/gemma3", "hf/gpt_neox")
"""Of unlike kinds of layer: what is written for the others is to the bit what
transformers wrote, as another test shows."""


@pytest.mark.parametrize("name", slow_except(QUICK, STACKS))
def test_there_and_back_is_bit_exact(name, tmp_path):
    run = run_of(STACKS[name], tmp_path, tied_head=name == "transformer")
    out = tmp_path / "out"
    assert to_torch(run, out, check=False) == NotMeasured(reason="not asked for")
    back = from_torch(out)
    assert_same_parameters(back.model, run.model)
    assert back.experiment == run.experiment
    assert (back.step, back.tokenizer.hash) == (7, run.tokenizer.hash)


def test_after_training_in_torch_the_new_numbers_come_back(tmp_path):
    run = run_of(STACKS["transformer"], tmp_path)
    to_torch(run, tmp_path / "out", check=False)
    file = tmp_path / "out" / "model.safetensors"
    tensors = load_file(file)
    tensors["layers.1.attention.q.weight"] += 1
    save_file(tensors, file)
    back = to_nested_dict(from_torch(tmp_path / "out").model)
    want = to_nested_dict(run.model)
    where = ("stack", "blocks", "0", "attention", "w_q")
    for key in where:
        back, want = back[key], want[key]
    np.testing.assert_array_equal(back[1], want[1] + 1)
    np.testing.assert_array_equal(back[0], want[0])


def test_names_as_transformers_saves_them_are_read(tmp_path):
    run = run_of(STACKS["recurformer"], tmp_path)
    to_torch(run, tmp_path / "out", check=False)
    file = tmp_path / "out" / "model.safetensors"
    save_file({f"model.{name}": w for name, w in load_file(file).items()}, file)
    assert_same_parameters(from_torch(tmp_path / "out").model, run.model)


@pytest.mark.parametrize("name", STACKS)
def test_the_module_is_one_file_that_imports_torch_safetensors_and_numpy(name):
    tree = ast.parse(torch_source(STACKS[name]))
    # Triton too, if it is there: the export runs without.
    optional = [node for node in tree.body if isinstance(node, ast.Try)]
    for node in optional:
        assert [ast.unparse(line) for line in node.body] == [
            "import triton",
            "import triton.language as tl",
        ]
        tree.body.remove(node)
    assert len(optional) == name.startswith(("rat", "recurformer"))
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(str(node.module).split(".")[0])
    standard = {"argparse", "collections", "json", "math", "pathlib", "typing"}
    assert imported - standard == {"torch", "safetensors", "numpy"}


@pytest.mark.parametrize("name", STACKS)
def test_no_name_of_the_module_is_defined_twice(name):
    """A kernel would read what another part of the file has put in its place."""
    tree = ast.parse(torch_source(STACKS[name]))
    # Kernels are defined where Triton is.
    parts = [
        part for n in tree.body for part in (n.body if isinstance(n, ast.If) else [n])
    ]
    names = [n.name for n in parts if isinstance(n, ast.FunctionDef | ast.ClassDef)]
    names += [
        ast.unparse(target)
        for node in parts
        if isinstance(node, ast.Assign)
        for target in node.targets
    ]
    assert len(names) == len(set(names)) > 10


def test_each_tensor_has_one_name_and_matrices_are_out_by_in():
    config = ModelConfig(vocabulary=256, stack=STACKS["rat_and_window"])
    shapes = {piece.tensor: piece.shape for piece in torch_pieces(config)}
    assert shapes["layers.2.mixer.output_gate.full.weight"] == (16, 16)
    assert shapes["layers.2.mixer.forget_gate.bias"] == (16,)
    assert shapes["layers.3.mixer.attention.q.weight"] == (16, 16)
    assert shapes["layers.3.mlp.up.weight"] == (64, 16)
    assert shapes["embedding.weight"] == shapes["head.weight"] == (256, 16)


def test_the_latent_memorys_tensors_have_names_too():
    stack = STACKS["latent_averaged_sources_replacing"]
    config = ModelConfig(vocabulary=256, pad_vocabulary_to=7, stack=stack)
    shapes = {piece.tensor: piece.shape for piece in torch_pieces(config)}
    assert shapes["layers.memory.k.weight"] == (4, 8)
    assert shapes["layers.source_logits"] == (2,)
    assert shapes["layers.0.mix.weight"] == (2, 8)
    assert shapes["layers.1.value_embedding.weight"] == (PADDED, 4)
    assert shapes["layers.1.value_gate.weight"] == (1, 4)
    assert shapes["layers.1.input_scale"] == (1,)


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_layer_by_layer_is_the_whole_model(name, tmp_path, quick_compilation):
    model = run_of(STACKS[name], tmp_path).model
    ids = few_tokens(11)
    states = layer_states(model, ids)
    whole, _ = model.hidden(Tokens(jax.numpy.asarray(ids)), model.init_cache(2, 0))
    assert len(states) == model.config.stack.layers + 1
    np.testing.assert_allclose(states[-1], whole, rtol=1e-5, atol=1e-5)


@pytest.mark.torch
@pytest.mark.parametrize("name", slow_except((), STACKS, slow=OFTEN))
def test_pytorch_computes_the_same(name, tmp_path, quick_compilation):
    run = run_of(STACKS[name], tmp_path, embedding_scale="sqrt_width")
    result = to_torch(run, tmp_path / "out", python=PYTHON, ids=few_tokens(20))
    assert isinstance(result, Parity)
    assert result.within_tolerance and result.first_differing_layer is None
    # Learned positions end at 40.
    assert result.greedy_tokens == (21 if "learned" in name else 64)
    stored = json.loads((tmp_path / "out" / "parity.json").read_text())
    assert stored["measured"] and stored["within_tolerance"]


SCANS = {
    "rat": presets.stack(
        presets.rat(width=32, heads=2, chunk=5),
        presets.rnn(width=32, heads=2, length=32),
        presets.reversed_rat(width=32, heads=2, chunk=5, length=40),
        layers=3,
        width=32,
    ),
    "rat_and_mamba": presets.stack(
        presets.rat(width=32, heads=2, chunk=5),
        MambaMixerConfig(state=4, dt_rank=5),
        layers=2,
        width=32,
    ),
    "recurformer": RecurFormerConfig(
        transformer=transformer(attention=attention(qkv_bias=True)),
        replaced=((0, 3), (0, 1, 2, 3)),
        mamba=MambaConfig(state=4, dt_rank=5),
    ),
}
"""Whose widths the GPU kernels serve."""


@pytest.mark.torch
@pytest.mark.parametrize("name", slow_except((), SCANS, slow=["rat_and_mamba"]))
def test_the_gpu_kernels_of_an_export_compute_what_plain_torch_does(name, tmp_path):
    if (reason := triton_interpreter.reason_to_skip()) is not None:
        pytest.skip(reason)
    to_torch(run_of(SCANS[name], tmp_path), tmp_path / "out", check=False)
    script = Path(__file__).with_name("exported_kernels.py")
    path = f"{triton_interpreter.COMPILERS}:{triton_interpreter.ROOT}"
    done = subprocess.run(
        [PYTHON, script, tmp_path / "out"],
        env=os.environ | {"PYTHONPATH": path, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    ops = ("_of_gated_scan", "_of_selective_scan") if name == "rat_and_mamba" else ("",)
    cases = json.loads(done.stdout)
    for case, answer in cases.items():
        kernels = ["forward_kernel", "backward_kernel"]
        kernels += [] if case == "rows" else ["summarize_kernel"]
        assert set(answer["launched"]) == {k + op for k in kernels for op in ops}
        # Twice the table's for bfloat16: both sides round.
        exact = TOLERANCES["float32"].gradient
        tolerance = 2 * TOLERANCES[case].gradient if case in TOLERANCES else exact
        gaps = answer["apart"]
        assert {n: gap for n, gap in gaps.items() if not gap <= tolerance} == {}


EXITS = """
import sys

import numpy as np
import torch
from decoder_recurjax import exit_logits, generate_early, load

model, ids = load(sys.argv[1]), torch.from_numpy(np.load("ids.npy")).long()
made = {"logits": exit_logits(model, ids).numpy()}
ways = ["share"] if model.layers.first else ["propagate", "skip"]
for way in ways:
    tokens, loops = generate_early(
        model, ids, 12, threshold=float(sys.argv[2]), missing=way
    )
    made[way], made[way + "_loops"] = tokens.numpy()[0, ids.shape[1] :], loops
np.savez("exits.npz", **made)
"""


@pytest.mark.torch
@pytest.mark.parametrize(
    "name",
    slow_except(
        (),
        ["recursive", "recursive_untied", "recursive_first"],
        slow=["recursive_untied"],
    ),
)
def test_tokens_leave_early_in_pytorch_as_they_do_here(
    name, tmp_path, quick_compilation
):
    run, out = run_of(STACKS[name], tmp_path), tmp_path / "out"
    to_torch(run, out, check=False)
    ids, model = few_tokens(9)[:1], run.model
    np.save(out / "ids.npy", ids)
    tokens = Tokens(jax.numpy.asarray(ids))
    states, _ = model.stack.states(
        model.embed(tokens.ids), model.init_cache(1, 0), tokens
    )
    logits = jax.vmap(lambda x: model.logits(model.final_norm(x)))(states)
    # Between two of the first loop's scores on the prompt: some tokens leave there.
    low, high = np.sort(np.asarray(confidence(logits[0])).ravel())[4:6]
    threshold = float(low + high) / 2
    command = [PYTHON, "-c", EXITS, str(out), str(threshold)]
    subprocess.run(command, cwd=out, check=True)
    with np.load(out / "exits.npz") as file:
        theirs = dict(file)
    assert_values_close(np.asarray(logits), theirs["logits"])
    rule = ExitRule(kind="confidence", threshold=threshold)
    for way in set(theirs) & {"propagate", "skip", "share"}:
        generation = generate_tokens(
            model,
            list(ids),
            max_new_tokens=12,
            sampling=SamplingConfig(temperature=0.0),
            exits=EarlyExit(rule=rule, missing=way),
        )
        np.testing.assert_array_equal(generation.tokens[0], theirs[way])
        assert generation.loops == [theirs[f"{way}_loops"].tolist()]
        assert len(set(generation.loops[0])) > 1  # some left early, some did not


@pytest.mark.torch
@pytest.mark.slow
def test_the_layer_that_differs_first_is_named(tmp_path, quick_compilation):
    run = run_of(STACKS["transformer"], tmp_path)
    to_torch(run, tmp_path / "out", check=False)
    file = tmp_path / "out" / "model.safetensors"
    tensors = load_file(file)
    tensors["layers.1.mlp.down.weight"] *= 1.1
    save_file(tensors, file)
    result = compare_with_export(run, tmp_path / "out", python=PYTHON)
    assert isinstance(result, Parity)
    assert not result.within_tolerance and result.first_differing_layer == 2


@pytest.mark.parametrize("directory", CASES)
def test_hugging_face_there_and_back_is_bit_exact(directory, tmp_path):
    converted = from_hf(directory)
    experiment = new_experiment(
        tmp_path, converted.model.config, length=converted.length
    )
    run = LoadedRun(experiment, converted.model, ByteTokenizer(bos=False), 0)
    to_torch(run, tmp_path / "out", format="hf", check=False)
    # Bytes are not the vocabulary of this model.
    (tmp_path / "out" / "tokenizer.json").unlink()
    assert_same_parameters(from_hf(tmp_path / "out").model, converted.model)
    ours = load_file(tmp_path / "out" / "model.safetensors")
    theirs = load_file(directory / "model.safetensors")
    assert set(ours) == set(theirs)
    for name, tensor in theirs.items():
        np.testing.assert_array_equal(ours[name], tensor)


@pytest.mark.torch("transformers")
@pytest.mark.parametrize("directory", slow_except((), CASES, slow=FAMILIES))
def test_transformers_loads_what_we_write(directory, tmp_path, quick_compilation):
    converted = from_hf(directory)
    experiment = new_experiment(
        tmp_path, converted.model.config, length=converted.length
    )
    run = LoadedRun(experiment, converted.model, ByteTokenizer(bos=False), 0)
    result = to_torch(run, tmp_path / "out", format="hf", python=PYTHON)
    assert isinstance(result, Parity) and result.within_tolerance


def test_other_models_are_refused_for_hugging_face(tmp_path):
    run = run_of(STACKS["recurrent_transformer"], tmp_path)
    with pytest.raises(UserError, match="transformers has no architecture"):
        to_torch(run, tmp_path / "out", format="hf")
    assert not (tmp_path / "out").exists()


def test_a_rope_that_depends_on_the_length_is_refused_for_torch(tmp_path):
    """Also where other layers have another encoding."""
    stack = STACKS["transformer"]
    rope = Rope(scaling=DynamicScaling(factor=2.0, length=8))
    attention = dataclasses.replace(stack.attention, position=None)
    stack = dataclasses.replace(stack, attention=attention, positions=(rope, Rope()))
    with pytest.raises(UserError, match="does not support rope scalings that depend"):
        to_torch(run_of(stack, tmp_path), tmp_path / "out", check=False)


def test_without_torch_the_report_says_that_nothing_was_measured(tmp_path):
    if importlib.util.find_spec("torch") is not None:
        pytest.skip("torch is installed")
    run = run_of(STACKS["transformer"], tmp_path)
    result = to_torch(run, tmp_path / "out")
    assert result == NotMeasured(reason="No module named 'torch'")
    stored = json.loads((tmp_path / "out" / "parity.json").read_text())
    assert stored == {"measured": False, "reason": "No module named 'torch'"}


def test_what_came_with_the_weights_is_not_run(tmp_path, monkeypatch):
    """`decoder_recurjax.py` and the other modules in a directory that `convert
    from-torch` reads are not run: the comparison runs a module generated from the
    config.
    """
    run = run_of(STACKS["transformer"], tmp_path)
    to_torch(run, tmp_path / "out", check=False)
    module = tmp_path / "out" / "decoder_recurjax.py"
    own = module.read_text()
    module.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    seen = []

    def compare(model, command, **options):
        seen.append((Path(command[0]).read_text(), command[1:]))
        return NotMeasured(reason="watched only")

    monkeypatch.setattr(parity, "compare", compare)
    compare_with_export(run, tmp_path / "out")
    assert seen == [(own, ["--directory", str(tmp_path / "out")])]


def test_an_interpreter_that_does_not_run_is_an_error(tmp_path):
    """`convert` with a comparison starts the interpreter of `--torch-python` with a
    module that recurjax writes.
    """
    run = run_of(STACKS["transformer"], tmp_path)
    with pytest.raises(UserError, match="no/python cannot be run"):
        to_torch(run, tmp_path / "out", python="no/python")
    assert not (tmp_path / "out").exists()


def test_the_commands_take_a_run_out_and_bring_it_back(tmp_path):
    """`--no-check` leaves the comparison out."""
    run = run_of(STACKS["transformer"], tmp_path / "run")
    write_run(tmp_path / "run", run.model, run.experiment, run.tokenizer, step=7)
    for words in (("to-torch", "run", "export"), ("from-torch", "export", "back")):
        command, source, out = words
        answer = recurjax(
            "convert", command, tmp_path / source, tmp_path / out, "--no-check"
        )
        said = f"{tmp_path / out}: parity: not measured: not asked for\n"
        assert answer == (0, said, "")
    back = load_run(tmp_path / "back")
    assert_same_parameters(back.model, run.model)
    assert (back.step, back.experiment) == (7, run.experiment)


def test_a_full_disk_leaves_nothing_behind(tmp_path, monkeypatch):
    def on_a_full_disk(tensors, file, metadata):
        file.write_bytes(b"the beginning")  # what the package does on a full disk
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("recurjax.convert.torch.export.save_file", on_a_full_disk)
    run = run_of(STACKS["transformer"], tmp_path)
    with pytest.raises(UserError, match="out could not be written: .*No space left"):
        to_torch(run, tmp_path / "out", check=False)
    assert list(tmp_path.iterdir()) == []


def test_other_directories_are_no_export(tmp_path):
    answer = recurjax("convert", "from-torch", LLAMA, tmp_path / "out", "--no-check")
    assert_refused(answer, "config.json must have the format .* of this version")
    run = run_of(STACKS["transformer"], tmp_path)
    to_torch(run, tmp_path / "export", check=False)
    file = tmp_path / "export" / "config.json"
    keys = json.loads(file.read_text())
    keys["model"]["tied_head"] = True
    file.write_text(json.dumps(keys))
    answer = recurjax("convert", "from-torch", tmp_path / "export", tmp_path / "out")
    assert_refused(answer, "model and experiment.model differ: tied_head")
    assert not (tmp_path / "out").exists()


def test_a_truncated_export_is_refused(tmp_path):
    run = run_of(STACKS["transformer"], tmp_path)
    to_torch(run, tmp_path / "export", check=False)
    file = tmp_path / "export" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    answer = recurjax("convert", "from-torch", tmp_path / "export", tmp_path / "out")
    assert_refused(
        answer, "model.safetensors is not a complete safetensors file: .*cut"
    )
    assert {path.name for path in tmp_path.iterdir()} == {"export"}


@pytest.mark.parametrize("bos", [True, False])
def test_a_byte_tokenizer_travels_as_tokenizer_json(bos, tmp_path):
    run = run_of(STACKS["transformer"], tmp_path)
    tokenizer = ByteTokenizer(bos=bos)
    run = run._replace(tokenizer=tokenizer)
    to_torch(run, tmp_path / "out", check=False)
    keys = json.loads((tmp_path / "out" / "config.json").read_text())
    assert keys["bos_token_id"] == keys["eos_token_id"] == tokenizer.bos
    # The export has both forms, which encode alike.
    assert load_tokenizer(tmp_path / "out").hash == tokenizer.hash
    read = load_tokenizer(tmp_path / "out" / "tokenizer.json")
    assert (read.vocabulary, read.bos, read.eos) == (
        tokenizer.vocabulary,
        tokenizer.bos,
        tokenizer.eos,
    )
    for text in (
        "",
        "h\u00e9llo\r\n\t  w\u00f6rld",
        "\u6f22\u5b57 \U0001f30d\x00",
        "<|bos|>",
    ):
        ids = read.encode(text)
        np.testing.assert_array_equal(ids, tokenizer.encode(text))
        assert read.decode(ids) == text


def test_files_have_the_usual_permissions(tmp_path):
    run = run_of(STACKS["transformer"], tmp_path)
    old = os.umask(0o027)
    try:
        to_torch(run, tmp_path / "out", check=False)
    finally:
        os.umask(old)
    modes = {
        path.name: stat.S_IMODE(path.stat().st_mode)
        for path in (tmp_path / "out").iterdir()
    }
    assert set(modes.values()) == {0o640}, modes
