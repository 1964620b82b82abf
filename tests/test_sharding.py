import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from recurjax.errors import UserError
from recurjax.layers.attention import AttentionConfig
from recurjax.layers.mlp import MlpConfig
from recurjax.layers.norm import NormConfig
from recurjax.layers.position import LearnedPositions
from recurjax.model import Decoder, ModelConfig
from recurjax.parameters import parameter_name
from recurjax.sharding import (
    AXES,
    MeshConfig,
    batch_sharding,
    check_batch,
    local_rows,
    make_mesh,
    place,
    shardings,
)
from recurjax.training.optimizers import AdamW, build_optimizer
from recurjax.training.step import first_state
from recurjax.variants.transformer import TransformerConfig
from tests.training.tiny_experiment import config
from tests.variants.latent_recurrent_transformer.switches import SWITCHES as LATENT
from tests.variants.rat.switches import SWITCHES as RAT
from tests.variants.recurrent_transformer.switches import SWITCHES as RECURRENT
from tests.variants.relaxed_recursive_transformer.switches import (
    SWITCHES as RECURSIVE,
)

PLAIN = config().model
NORM = NormConfig(kind="layer", bias=True)
EVERYTHING = ModelConfig(
    vocabulary=30,
    pad_vocabulary_to=16,
    tied_head=False,
    final_norm=NORM,
    stack=TransformerConfig(
        layers=4,
        width=16,
        windows=(5, None),
        norm=NORM,
        attention=AttentionConfig(
            heads=4,
            key_heads=2,
            head_width=4,
            position=LearnedPositions(length=20),
            qk_norm=NORM,
            qkv_bias=True,
            out_bias=True,
        ),
        mlp=MlpConfig(kind="swiglu", width=32, bias=True),
    ),
)
FULL_QK_NORM = dataclasses.replace(
    EVERYTHING.stack.attention, qk_norm=NormConfig(), qk_norm_over="full"
)
MODELS = {
    "plain": PLAIN,
    "everything": EVERYTHING,
    "qk-norm over all heads": dataclasses.replace(
        EVERYTHING, stack=dataclasses.replace(EVERYTHING.stack, attention=FULL_QK_NORM)
    ),
    "recurrent transformer": RECURRENT["grouped_rope_layer_norm_biases_wavefront"],
    "rat, low rank": RAT["low_rank_by_token_beside_windows"],
} | {f"latent, {name}": LATENT[name] for name in ("every scale", "layerwise")}
MODELS |= {"recursive": RECURSIVE["cycle, untied, rank 3, rings"]}
MODELS |= {"of whole rows": dataclasses.replace(EVERYTHING, row_decoder=True)}
MODELS |= {"latent, averages": LATENT["averaged sources, replacing"]}


def abstract(model):
    return jax.eval_shape(
        lambda key: Decoder(model, rngs=nnx.Rngs(key)), jax.random.key(0)
    )


def parameters(model):
    leaves = jax.tree_util.tree_leaves_with_path(abstract(model))
    return {parameter_name(path): leaf for path, leaf in leaves}


def specs(tree, mesh):
    leaves = jax.tree_util.tree_leaves_with_path(shardings(tree, mesh))
    return {parameter_name(path): sharding.spec for path, sharding in leaves}


@pytest.mark.parametrize("name", MODELS)
def test_specs_have_full_rank_and_fit_the_shapes(name):
    mesh = make_mesh(MeshConfig(data=1, fsdp=2, tensor=4))
    matches = specs(abstract(MODELS[name]), mesh)
    for parameter, leaf in parameters(MODELS[name]).items():
        spec = matches[parameter]
        assert len(spec) == leaf.ndim, parameter
        for axis, size in zip(spec, leaf.shape, strict=True):
            assert axis is None or size % mesh.shape[axis] == 0, parameter


def test_each_kind_of_weight_is_cut_where_the_table_says():
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    result = specs(abstract(EVERYTHING), mesh)
    block = "stack.blocks.1"
    assert result[f"{block}.attention.w_q"] == P(None, "fsdp", "tensor", None)
    assert result[f"{block}.attention.w_out"] == P(None, "tensor", None, "fsdp")
    assert result[f"{block}.mlp.w_down"] == P(None, "tensor", "fsdp")
    assert result[f"{block}.attention.b_k"] == P(None, "tensor", None)
    assert result["w_embedding"] == P("tensor", "fsdp")
    assert result["w_head"] == P("fsdp", "tensor")
    assert result["final_norm.scale"] == P(None)


def test_key_heads_that_do_not_divide_tensor_are_replicated():
    mesh = make_mesh(MeshConfig(data=1, fsdp=2, tensor=4))
    result = specs(abstract(EVERYTHING), mesh)
    assert result["stack.blocks.0.attention.w_q"] == P(None, "fsdp", "tensor", None)
    assert result["stack.blocks.0.attention.w_k"] == P(None, "fsdp", None, None)
    assert result["stack.blocks.0.attention.b_v"] == P(None, None, None)


def test_the_moments_lie_like_their_parameters_and_counters_everywhere():
    mesh = make_mesh(MeshConfig(data=1, fsdp=2, tensor=4))
    optimizer = build_optimizer(
        AdamW(learning_rate=1.0), lambda step: 1.0, clip=1.0, steps=1
    )
    spikes = config().training.spikes
    state = jax.eval_shape(
        lambda: first_state(Decoder(EVERYTHING, rngs=nnx.Rngs(0)), optimizer, spikes)
    )
    result = specs(state, mesh)
    for parameter, spec in specs(abstract(EVERYTHING), mesh).items():
        same = {s for name, s in result.items() if name.endswith(f".{parameter}")}
        assert same == {spec}, parameter
    assert result["step"] == P() and result["spikes.losses"] == P()


def test_a_mesh_takes_all_devices_left():
    assert dict(make_mesh(MeshConfig()).shape) == dict.fromkeys(AXES, 1) | {"data": 8}
    shape = make_mesh(MeshConfig(data=2, fsdp=-1, tensor=2)).shape
    assert (shape["data"], shape["fsdp"], shape["tensor"]) == (2, 2, 2)


@pytest.mark.parametrize(
    "mesh", [MeshConfig(data=3), MeshConfig(fsdp=3), MeshConfig(data=8, tensor=2)]
)
def test_a_mesh_that_does_not_fit_the_devices_is_told(mesh):
    with pytest.raises(UserError, match=r"the mesh \(data=.* does not fit 8 devices"):
        make_mesh(mesh)


def test_a_mesh_that_does_not_fit_is_told_with_all_axes_that_count():
    """Of data=8, stage=2 the sizes of data, fsdp and tensor multiply to 8."""
    said = (
        "set --mesh.data, --mesh.fsdp, --mesh.stage, --mesh.sequence and --mesh.tensor "
        "so that their product is 8"
    )
    with pytest.raises(UserError, match=said):
        make_mesh(MeshConfig(data=8, stage=2))


@pytest.mark.parametrize("sizes", [{"data": 0}, {"data": -1, "fsdp": -1}])
def test_axes_that_mean_nothing_are_refused(sizes):
    with pytest.raises(ValueError, match="axes must be at least 1"):
        MeshConfig(**sizes)
    with pytest.raises(ValueError, match=r"MeshConfig\.stage: must be >= -1, got -2"):
        MeshConfig(stage=-2)


def test_a_batch_that_cannot_be_spread_is_told():
    mesh = make_mesh(MeshConfig(data=4, tensor=2))
    check_batch(12, mesh, name="training.batch")
    with pytest.raises(UserError, match="make training.batch a multiple of 4"):
        check_batch(6, mesh, name="training.batch")


def test_rows_arrive_in_order_however_the_mesh_lays_out_the_devices():
    # As on TPU pods, where the order follows the links between the chips.
    order = np.array(jax.devices())[[0, 4, 1, 5, 2, 6, 3, 7]].reshape(4, 1, 1, 1, 2)
    shapes = ((2, 2, 1, 1, 2), (2, 1, 1, 2, 2))  # The second cuts the tokens too.
    for devices in (order, *(order.reshape(shape) for shape in shapes)):
        mesh = Mesh(devices, AXES, axis_types=(AxisType.Auto,) * 5)
        assert local_rows(8, mesh) == (0, 8)
        rows = {name: np.arange(32).reshape(8, 4) for name in ("ids", "targets")}
        batch = place(rows, mesh, batch=8)
        np.testing.assert_array_equal(batch.ids, rows["ids"])
        assert batch.ids.sharding.is_equivalent_to(batch_sharding(mesh), 2)
        assert batch.segments is None


class SliceDevice:
    """What a mesh asks of a device of a TPU slice."""

    platform, device_kind, core_on_chip = "tpu", "TPU v4", 0

    def __init__(self, number: int, slice_index: int):
        self.id = self.process_index = number
        self.slice_index = slice_index
        self.coords = (number % 2, number // 2 % 2, 0)


def slices(count: int) -> list:
    return [SliceDevice(4 * s + n, s) for s in range(count) for n in range(4)]


@pytest.mark.parametrize("sizes", [{"fsdp": 4}, {"fsdp": 2, "tensor": 2}, {}])
def test_only_data_spans_slices(sizes):
    mesh = make_mesh(MeshConfig(**sizes), slices(2))
    assert dict(mesh.shape) == dict.fromkeys(AXES, 1) | sizes | {
        "data": 2 if sizes else 8
    }
    by_data = mesh.devices.reshape(2, 4)
    assert [{d.slice_index for d in row} for row in by_data] == [{0}, {1}]


def test_on_gpus_every_axis_spans_hosts():
    devices = slices(2)
    for device in devices:
        device.platform = "gpu"
    mesh = make_mesh(MeshConfig(data=1, fsdp=8), devices)
    assert [device.id for device in mesh.devices.flat] == list(range(8))


def test_data_that_does_not_span_the_slices_is_told():
    with pytest.raises(UserError, match="mesh.data 1 must be a multiple of the 2 TPU"):
        make_mesh(MeshConfig(data=1, fsdp=8), slices(2))
