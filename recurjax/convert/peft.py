"""Adapters in the files of the `peft` package, for Hugging Face's families.

A folder holds adapter_config.json and adapter_model.safetensors, whose tensors are A
[R, in] and B [out, R] of each module: ours, transposed. Numbers are only copied, so
that a round trip is bit-exact.
"""

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from recurjax.convert.formats.safetensors_files import SafetensorsFiles
from recurjax.convert.hugging_face.names import hf_pieces
from recurjax.convert.hugging_face.write_config import hf_keys
from recurjax.convert.imported_run import new_experiment, whole_directory, write_run
from recurjax.convert.pieces import Piece
from recurjax.errors import UserError
from recurjax.files.json_files import json_text, read_json_object
from recurjax.model import ModelConfig
from recurjax.parameters import from_nested_dict, rule_of, to_nested_dict
from recurjax.surgery.adapters import adapted
from recurjax.training.checkpoint.manifest import named, nested
from recurjax.training.config import AdapterConfig, parse_adapters
from recurjax.training.run import load_run, load_saved
from recurjax.training.step import trained_part

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_INERT = {
    *("peft_type", "auto_mapping", "base_model_name_or_path", "revision", "task_type"),
    *("inference_mode", "r", "lora_alpha", "lora_dropout", "target_modules"),
    *("use_rslora", "init_lora_weights", "fan_in_fan_out", "peft_version"),
    *("layers_pattern", "runtime_config", "qalora_group_size", "megatron_core"),
    *("exclude_modules", "loftq_config"),
}
"""Keys that the adapters' function does not depend on, or that are read here."""


class _Module(NamedTuple):
    """One matrix of one layer, and its two tensors on disk.

    Attributes:
      parameter, layer: parameter and layer that W is, as a piece names them.
      name: name of the module in PEFT.
      expand: where B is in its tensor, which several matrices may share.
    """

    parameter: str
    layer: Any
    name: str
    expand: Piece


def from_peft(
    folder: Path, out: Path, base: str, *, report: Callable[[str], None] = print
) -> None:
    """Writes PEFT's adapters as a run of adapters on an imported model.

    Args:
      folder: with adapter_config.json and adapter_model.safetensors.
      out: the new run directory.
      base: a run directory with the model that they adapt.

    Raises:
      UserError: the files are no such adapters, use a feature that recurjax lacks, or
        are of another model.
    """
    run = load_run(base, report=report)
    keys = read_json_object(folder / CONFIG, "PEFT's config")
    source = SafetensorsFiles([folder / TENSORS], where=str(folder))
    rank, alpha = _read(keys, folder / CONFIG)
    modules = list(_modules(run.model.config, rank))
    there = [m for m in modules if _tensors(m)[0] in source.tensors]
    words = sorted({m.parameter.rpartition(".w_")[2] for m in there})
    of_words = [m for m in modules if m.parameter.rpartition(".w_")[2] in words]
    expected = {name for module in of_words for name in _tensors(module)}
    if differing := sorted(expected ^ set(source.tensors)):
        raise UserError(
            f"{folder / TENSORS} does not fit {base}: each adapted matrix "
            "needs lora_A and lora_B in every layer and nothing else; it differs "
            f"in {differing[0]}{' and others' if len(differing) > 1 else ''}"
        )
    stabilized = bool(keys.get("use_rslora"))
    text = f"{'rs' * stabilized}lora:{rank}:{alpha:g}:{','.join(words)}"
    experiment = new_experiment(
        out, run.model.config, length=run.experiment.training.length
    )
    training = dataclasses.replace(experiment.training, adapters=text, start_from=base)
    experiment = dataclasses.replace(experiment, training=training)
    shapes = jax.eval_shape(lambda model: adapted(model, training), run.model)
    saved = trained_part(shapes, training.trained)
    arrays = {
        name: np.zeros(leaf.shape, np.float32)
        for name, leaf in named(to_nested_dict(saved)).items()
    }
    for module in there:
        a, b = (source.read(name) for name in _tensors(module))
        at = () if module.layer is None else module.layer
        for part, tensor, shape in (
            ("lora_a", a.T, None),
            ("lora_b", b, module.expand.shape),
        ):
            if shape is not None and tensor.shape != shape:
                raise UserError(
                    f"{folder / TENSORS}: {module.name} has lora_B of shape "
                    f"{tensor.shape}, and {base} needs {shape}"
                )
            value = module.expand.take(tensor) if part == "lora_b" else tensor
            arrays[f"{module.parameter}.{part}"][at] = value
    model = from_nested_dict(saved, nested(jax.tree.map(jnp.asarray, arrays)))
    reference = {"run": base, "step": run.step, "digest": run.digest}
    write_run(out, model, experiment, run.tokenizer, base=reference)


def to_peft(path: Path, out: Path, *, report: Callable[[str], None] = print) -> None:
    """Writes a run's adapters as a folder that PEFT's `from_pretrained` reads.

    Raises:
      UserError: the run has no adapters, or they are none of what PEFT's LoRA says.
    """
    run = load_saved(path, report=report)
    training = run.experiment.training
    if training.adapters is None or training.train_only is not None:
        raise UserError(
            "to-peft needs a run that trained with --training.adapters alone, "
            f"and {path} trained {'more than' if training.adapters else 'no'} "
            "adapters"
        )
    adapters = parse_adapters(training.adapters)
    arrays = {n: np.asarray(x) for n, x in named(to_nested_dict(run.model)).items()}
    tensors: dict[str, np.ndarray] = {}
    targets = set()
    for module in _modules(run.experiment.model, adapters.rank):
        if f"{module.parameter}.lora_a" not in arrays:
            continue
        at = () if module.layer is None else module.layer
        name_a, name_b = _tensors(module)
        a = np.ascontiguousarray(arrays[f"{module.parameter}.lora_a"][at].T)
        if name_a in tensors and not np.array_equal(tensors[name_a], a):
            raise UserError(
                f"{module.name} is one module with one lora_A in PEFT, and its "
                "parts (q, k, v or gate, up) have one each here: use recurjax "
                "convert merge"
            )
        tensors[name_a] = a
        b = tensors.setdefault(name_b, np.zeros(module.expand.shape, np.float32))
        module.expand.put(b, arrays[f"{module.parameter}.lora_b"][at])
        targets.add(module.name.rpartition(".")[2])
    with whole_directory(out) as aside:
        save_file(tensors, aside / TENSORS, metadata={"format": "pt"})
        (aside / CONFIG).write_text(
            json_text(_keys(adapters, sorted(targets)), indent=2) + "\n",
            encoding="utf-8",
        )


def _keys(adapters: AdapterConfig, targets: list[str]) -> dict[str, Any]:
    alpha = adapters.alpha or float(adapters.rank)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "inference_mode": True,
        "r": adapters.rank,
        "lora_alpha": int(alpha) if alpha.is_integer() else alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": targets,
        "use_rslora": adapters.rank_stabilized,
        "fan_in_fan_out": False,
    }


def _read(keys: dict[str, Any], file: Path) -> tuple[int, float]:
    """Returns rank and alpha.

    Raises:
      UserError: a feature that recurjax lacks, by its name.
    """
    off = (None, False, "none", [], {})
    features = {k: v for k, v in keys.items() if k not in _INERT and v not in off}
    if keys.get("peft_type") != "LORA":
        features["peft_type"] = keys.get("peft_type")
    if keys.get("init_lora_weights", True) not in (True, False, "gaussian"):
        features["init_lora_weights"] = keys["init_lora_weights"]
    if features:
        listed = ", ".join(f"{k} {json.dumps(v)}" for k, v in features.items())
        raise UserError(
            f"{file}: recurjax supports LoRA with one rank and one alpha for "
            f"all layers, not {listed}: merge the adapters with PEFT and "
            "import the model"
        )
    rank, alpha = keys.get("r"), keys.get("lora_alpha")
    if type(rank) is not int or rank < 1 or not isinstance(alpha, int | float):
        raise UserError(
            f"{file}: r must be an integer of at least 1 and lora_alpha a "
            f"number, got {rank} and {alpha}"
        )
    return rank, float(alpha)


def _modules(config: ModelConfig, rank: int) -> Iterator[_Module]:
    """Yields every matrix of the stack that a tensor of its family holds."""
    keys = hf_keys(config, length=1024)
    for piece in hf_pieces(keys["model_type"], config):
        rule = rule_of(piece.parameter)
        if rule.role != "matrix" or not piece.parameter.startswith("stack."):
            continue
        shape, view, part = piece.shape, piece.view, piece.part
        if piece.axes == (0, 1):  # a Conv1D [in, out]: its B is a Linear's
            shape, view, part = shape[::-1], view[::-1], part[1:]
        M = int(np.prod(piece.result[rule.inputs :]))
        axes = piece.axes if len(piece.axes) > 2 else (1, 0)
        expand = dataclasses.replace(
            piece,
            shape=(shape[0], rank),
            view=(*view[:-1], rank),
            part=part,
            axes=axes,
            result=(rank, M),
        )
        name = piece.tensor.removesuffix(".weight")
        yield _Module(piece.parameter, piece.layer, name, expand)


def _tensors(module: _Module) -> tuple[str, str]:
    name = _PREFIX + module.name
    return f"{name}.lora_A.weight", f"{name}.lora_B.weight"
