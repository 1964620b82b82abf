"""Writes a run out, as a PyTorch module or a Hugging Face model, and reads it back.

The module is one self-contained file made from the templates in modules/. A variant's
template defines `build_layers(stack)` and `position_of(stack)`; layers.py comes before
it and decoder.py after it, and imports between them are dropped. The GPU kernels of a
scan come from `pallas_kernels` as they are, under `if triton is not None`. Two further
files make it a model of transformers' AutoModelForCausalLM.
"""

import ast
import re
import tempfile
import textwrap
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Int
from numpy.typing import DTypeLike
from safetensors.numpy import save_file

import pallas_kernels
from recurjax.config_json import from_json, to_json
from recurjax.convert import parity
from recurjax.convert.formats.safetensors_files import SINGLE, open_directory
from recurjax.convert.formats.tensors import RenamedTensors, TensorSource
from recurjax.convert.hugging_face.keys import read_keys
from recurjax.convert.hugging_face.names import hf_pieces
from recurjax.convert.hugging_face.write_config import exported, hf_keys
from recurjax.convert.imported_run import whole_directory
from recurjax.convert.loading import load_model
from recurjax.convert.parity import NotMeasured, Parity
from recurjax.convert.pieces import Piece
from recurjax.convert.torch.names import torch_pieces
from recurjax.data.config import Bytes, DataConfig
from recurjax.data.tokenizers import (
    ByteTokenizer,
    JsonTokenizer,
    Tokenizer,
    byte_level_tokenizer,
    load_tokenizer,
    text_ends,
)
from recurjax.errors import UserError, first_few
from recurjax.experiment import Experiment, model_differences
from recurjax.files.json_files import json_text
from recurjax.layers.position import Rope
from recurjax.model import Decoder, ModelConfig, StackConfig
from recurjax.parameters import from_nested_dict, to_nested_dict
from recurjax.ranges import LARGEST_SIZE
from recurjax.training.checkpoint.manifest import named
from recurjax.training.run import LoadedRun
from recurjax.variants.latent_recurrent_transformer import (
    LatentRecurrentTransformerConfig,
)
from recurjax.variants.rat import MambaMixerConfig, RatConfig, RecurrentLayerConfig
from recurjax.variants.recurformer import RecurFormerConfig
from recurjax.variants.recurrent_transformer import RecurrentTransformerConfig
from recurjax.variants.relaxed_recursive_transformer import (
    RelaxedRecursiveTransformerConfig,
)
from recurjax.variants.transformer import TransformerConfig

FORMAT = "recurjax-torch-1"
MODULE = "decoder_recurjax.py"
"""The PyTorch module, which needs no transformers."""
AUTO_MODULES = ("configuration_recurjax.py", "modeling_recurjax.py")
"""The files by which transformers loads it."""
REPORT = "parity.json"
Check = Parity | NotMeasured


def to_torch(
    run: LoadedRun,
    out: Path,
    *,
    format: Literal["torch", "hf"] = "torch",
    check: bool = True,
    python: str | None = None,
    ids: Int[np.ndarray, "B T"] | None = None,
    tolerance: float = parity.TOLERANCE,
) -> Check:
    """Writes model.safetensors, config.json, the tokenizer and parity.json.

    With format "torch" also `decoder_recurjax.py`, which loads them with torch,
    safetensors and numpy only, and the two files by which transformers' AutoModel does,
    with trust_remote_code=True; format "hf" is what transformers loads by itself.

    Args:
      run: a loaded run.
      out: the directory; it is written atomically.
      format: see above.
      check: compare both sides; False: parity.json says that nothing was measured.
      python: an interpreter with torch; None: this one, if it has.
      ids: see `compare`.
      tolerance: see `Parity`.

    Raises:
      UserError: the variant has no PyTorch module, or is none of Hugging Face's
        architectures; `out` is taken; the disk is full; the PyTorch side fails.
    """
    # Check before writing anything.
    config = run.model.config
    if format == "torch" and type(config.stack) not in TEMPLATES:
        raise UserError(
            f"{type(config.stack).__name__} has no PyTorch module: export one "
            f"of {', '.join(kind.__name__ for kind in TEMPLATES)}"
        )
    if config.row_decoder:
        raise UserError(
            "a model with a row decoder, trained with the objective Compress, "
            "predicts no next tokens and has no PyTorch module"
        )
    if _loops_mixers(config.stack):
        raise UserError(
            "a loop over a RatConfig's mixers has no PyTorch module: write its layers "
            "out with recurjax convert to-transformer RUN OUT, and export OUT"
        )
    if format == "torch" and _asks_length(config.stack):
        raise UserError(
            "--format torch does not support rope scalings that depend on the "
            "sequence's length (DynamicScaling, LongScaling of two lists): "
            "use --format hf"
        )
    keys = _config(run) if format == "torch" else _hf_config(run)
    model = run.model if format == "torch" else exported_model(run.model)
    with whole_directory(out) as aside:
        if format == "torch":
            pieces = torch_pieces(config)
            (aside / MODULE).write_text(torch_source(config.stack), encoding="utf-8")
            for name in AUTO_MODULES:
                (aside / name).write_text(auto_source(name), encoding="utf-8")
        else:
            pieces = hf_pieces(keys["model_type"], model.config)
        # Files of Hugging Face have one dtype, the one that their config names.
        dtype = None if format == "torch" else jnp.dtype(config.weight_dtype)
        write_tensors(model, pieces, aside / SINGLE, dtype=dtype)
        _write_json(aside / "config.json", keys)
        tokenizer = run.tokenizer
        if isinstance(tokenizer, JsonTokenizer):
            tokenizer = tokenizer.restated()
        if isinstance(tokenizer, ByteTokenizer):
            # Other software reads bytes as a vocabulary without merges.
            byte_level_tokenizer(tokenizer).save(aside)
        tokenizer.save(aside)
        parity = (
            _compare(run, aside, format, python, ids, tolerance)
            if check
            else NotMeasured(reason="not asked for")
        )
        _write_json(aside / REPORT, parity.to_json())
    return parity


def _loops_mixers(stack: StackConfig) -> bool:
    """Whether a recursive model's layers are RAT's."""
    looped = isinstance(stack, RelaxedRecursiveTransformerConfig)
    return looped and isinstance(stack.transformer, RatConfig)


def _asks_length(stack: StackConfig) -> bool:
    """Whether a layer's rotation depends on more than positions."""
    match stack:
        case TransformerConfig():
            base = stack
        case RecurFormerConfig() | RelaxedRecursiveTransformerConfig():
            base = stack.transformer
        case _:
            return False
    assert isinstance(base, TransformerConfig), "refused above: _loops_mixers"
    positions = (kind.position for kind in base.pattern)
    return any(isinstance(p, Rope) and p.asks_length for p in positions)


def compare_with_export(run: LoadedRun, directory: Path, **options: Any) -> Check:
    """Compares a run with an export's weights in PyTorch; see `compare`.

    The module that reads them is generated from the run's config. The one in the
    directory is not run: importing weights must not execute what came with them.
    """
    # Into a folder that goes away: the module is only for this comparison.
    with tempfile.TemporaryDirectory() as folder:
        module = Path(folder) / MODULE
        source = torch_source(run.model.config.stack)
        module.write_text(source, encoding="utf-8")
        command = [str(module), "--directory", str(directory.absolute())]
        return parity.compare(run.model, command, **options)


def compare_with_hf(
    model: Decoder, path: Path, *, tokenizer: Tokenizer | None = None, **options: Any
) -> Check:
    """Compares a model with what transformers makes of a directory; see `compare`.

    Every row of the exported head is compared, and the tokens of some texts where the
    directory has a tokenizer.json.
    """
    command = [str(HF_REFERENCE), "--directory", str(path)]
    has_file = path.is_dir() and (path / "tokenizer.json").is_file()
    read = tokenizer if has_file and isinstance(tokenizer, JsonTokenizer) else None
    return parity.compare(exported_model(model), command, tokenizer=read, **options)


def exported_model(model: Decoder) -> Decoder:
    """Returns the model that Hugging Face's format can say: see `exported`."""
    config = exported(model.config)
    values = to_nested_dict(model)
    V = config.vocabulary
    values["w_embedding"] = values["w_embedding"][:V]
    if "w_head" in values:
        values["w_head"] = values["w_head"][:, :V]
    like = jax.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    return from_nested_dict(like, values)


def _compare(
    run: LoadedRun,
    directory: Path,
    format: str,
    python: str | None,
    ids: Int[np.ndarray, "B T"] | None,
    tolerance: float,
) -> Check:
    options = {"python": python, "ids": ids, "tolerance": tolerance}
    if format == "hf":
        return compare_with_hf(run.model, directory, tokenizer=run.tokenizer, **options)
    return compare_with_export(run, directory, **options)


def _config(run: LoadedRun) -> dict[str, Any]:
    config, ends = run.model.config, text_ends(run.tokenizer)
    tokenizer = run.tokenizer
    return {
        "architectures": ["RecurjaxForCausalLM"],
        "model_type": "recurjax",
        "auto_map": {
            "AutoConfig": "configuration_recurjax.RecurjaxConfig",
            "AutoModelForCausalLM": "modeling_recurjax.RecurjaxForCausalLM",
        },
        "dtype": config.weight_dtype,
        "vocab_size": config.vocabulary,
        "hidden_size": config.stack.width,
        "num_hidden_layers": config.stack.layers,
        "max_position_embeddings": config.max_length or _usual_length(run),
        # A tied head is the embedding itself, of which there is one tensor.
        "tie_word_embeddings": False,
        "bos_token_id": tokenizer.bos,
        "eos_token_id": ends[0] if len(ends) == 1 else list(ends) or None,
        "pad_token_id": tokenizer.pad,
        "format": FORMAT,
        "step": run.step,
        "model": to_json(config),
        "experiment": to_json(run.experiment),
    }


def _usual_length(run: LoadedRun) -> int:
    # A Hugging Face model names its longest sequence; at least a usual one.
    return max(run.experiment.training.length, 2048)


def _hf_config(run: LoadedRun) -> dict[str, Any]:
    return hf_keys(
        run.model.config,
        length=_usual_length(run),
        bos=run.tokenizer.bos,
        eos=run.tokenizer.eos,
        pad=run.tokenizer.pad,
    )


def _write_json(file: Path, values: dict[str, Any]) -> None:
    file.write_text(json_text(values, indent=2) + "\n", encoding="utf-8")


def to_tensors(
    model: Decoder, pieces: Iterable[Piece], *, dtype: DTypeLike | None = None
) -> dict[str, np.ndarray]:
    """Returns every tensor of the table.

    Args:
      model: on one process' devices.
      pieces: the place of each parameter; together they fill each tensor.
      dtype: dtype of all tensors; None: each keeps its parameter's dtype and values.
    """
    arrays = named(to_nested_dict(model))
    of_tensor: dict[str, list[Piece]] = defaultdict(list)
    for piece in pieces:
        # A tensor of theirs may hold several parameters of ours, and is written in one
        # go.
        of_tensor[piece.tensor].append(piece)
    tensors = {}
    for name, parts in of_tensor.items():
        # Its numbers are unset: the pieces together write every one of them.
        disk = np.empty(parts[0].shape, dtype or arrays[parts[0].parameter].dtype)
        for piece in parts:
            ours = arrays[piece.parameter]
            piece.put(
                disk, np.asarray(ours if piece.layer is None else ours[piece.layer])
            )
        tensors[name] = disk
    return tensors


def write_tensors(
    model: Decoder,
    pieces: Iterable[Piece],
    file: Path,
    *,
    dtype: DTypeLike | None = None,
) -> None:
    """Writes them; `format` pt is what torch's and transformers' readers ask for."""
    tensors = to_tensors(model, pieces, dtype=dtype)
    save_file(tensors, file, metadata={"format": "pt"})


TEMPLATES: dict[type, str] = {
    TransformerConfig: "transformer",
    RecurrentTransformerConfig: "recurrent_transformer",
    RatConfig: "rat",
    LatentRecurrentTransformerConfig: "latent_recurrent_transformer",
    RecurFormerConfig: "recurformer",
    RelaxedRecursiveTransformerConfig: "relaxed_recursive_transformer",
}
"""The template of each variant that can be exported."""
_SCANS = {"rat": "gated_scan", "mamba": "selective_scan"}
"""The op of `pallas_kernels` whose GPU kernels a template launches."""

_FOLDER = Path(__file__).parent / "modules"
_KERNELS = Path(pallas_kernels.__file__).parent
_SHARED = ("mamba", "recurrent_block", "latent_memory", "pattern_memory")
_LOCAL = ("layers", "variant", "kernels", *_SHARED, *_SCANS.values())
HF_REFERENCE = _FOLDER / "hf_reference.py"
"""The script that runs a Hugging Face model in transformers."""


def torch_source(stack: StackConfig) -> str:
    """Joins the templates of a variant; what it does not use is left out.

    Raises:
      KeyError: the variant has no template.
    """
    templates = _templates(stack)
    ops = [_SCANS[name] for name in templates if name in _SCANS]
    # The order in the joined file: what is used before who uses it.
    files = [_FOLDER / "layers.py"]
    if ops:
        files += [_FOLDER / "scans/kernels.py", _KERNELS / "triton_launches.py"]
        files += [_KERNELS / "triton_kernels.py"]
    parts = {op: _files_of(op) for op in ops}
    files += [file for op in ops for file in parts[op]]
    *shared, variant = templates
    files += [_FOLDER / f"shared/{name}.py" for name in shared]
    files += [_FOLDER / f"{variant}.py", _FOLDER / "decoder.py"]
    return _joined(files, _renamed(parts))


def _templates(stack: StackConfig) -> list[str]:
    """Returns the templates of a variant: those of modules/shared/, its own last."""
    match stack:
        case RecurFormerConfig():
            parts = ["mamba"]
        case RecurrentTransformerConfig():
            parts = ["recurrent_block"]
        case LatentRecurrentTransformerConfig():
            parts = ["latent_memory"]
        case RatConfig():
            of_place = {
                MambaMixerConfig: "mamba",
                RecurrentLayerConfig: "recurrent_block",
            }
            kinds = {type(place) for place in stack.pattern}
            parts = [name for kind, name in of_place.items() if kind in kinds]
            if stack.memory is not None:
                parts += ["latent_memory", "pattern_memory"]
        case _:
            parts = []
    return [*parts, TEMPLATES[type(stack)]]


def _files_of(op: str) -> list[Path]:
    folder = _KERNELS / op
    return [
        *(folder / "triton_sizes.py", folder / "triton_kernels.py"),
        _FOLDER / f"scans/{op}.py",
    ]


def _renamed(parts: dict[str, list[Path]]) -> dict[Path, dict[str, str]]:
    """Returns new names, by file, for what two ops define under one name."""
    names = {
        op: {name for file in files for name in _defined_in(file)}
        for op, files in parts.items()
    }
    count = Counter(name for of_op in names.values() for name in of_op)
    return {
        file: {name: f"{name}_of_{op}" for name in names[op] if count[name] > 1}
        for op, files in parts.items()
        for file in files
    }


def _defined_in(file: Path) -> set[str]:
    names = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {ast.unparse(target) for target in node.targets}
    return names


def auto_source(name: str) -> str:
    """Returns a file of transformers, which names the others of its folder by a dot."""
    text = (_FOLDER / name).read_text(encoding="utf-8")
    return re.sub(r"^from (\w+_recurjax) import", r"from .\1 import", text, flags=re.M)


def _joined(files: list[Path], renamed: dict[Path, dict[str, str]]) -> str:
    plain: set[str] = set()
    from_modules: dict[str, set[str]] = {}
    bodies, docstrings = [], []
    for file in files:
        text = file.read_text(encoding="utf-8")
        for old, new in renamed.get(file, {}).items():
            text = re.sub(rf"\b{old}\b", new, text)
        lines = text.splitlines()
        tree = ast.parse(text)
        docstrings.append(ast.get_docstring(tree) or "")
        in_triton = file.name == "triton_kernels.py"
        for node in tree.body:
            header = (
                isinstance(node, ast.Import | ast.ImportFrom) or node is tree.body[0]
            )
            if header:
                # Docstring and imports go; both come back once, at the head of the
                # file.
                assert node.end_lineno is not None
                lines[node.lineno - 1 : node.end_lineno] = [""] * (
                    node.end_lineno - node.lineno + 1
                )
            # Only a machine that has Triton imports it: kernels.py does.
            if isinstance(node, ast.Import) and not in_triton:
                plain |= {ast.unparse(node)}
            elif isinstance(node, ast.ImportFrom) and not _is_joined(node.module):
                # Imports of the same module from two templates become one.
                names = {alias.name for alias in node.names}
                from_modules.setdefault(str(node.module), set()).update(names)
        body = "\n".join(lines).strip()
        if in_triton:
            body = "if triton is not None:\n" + textwrap.indent(body, "    ")
        bodies.append(body)
    head = "\n\n".join(
        ["Written by recurjax; needs Python >= 3.10, torch >= 2.4, safetensors, numpy."]
        + [docstrings[-1], docstrings[-2]]
    )
    imports = sorted(plain) + [
        f"from {module} import {', '.join(sorted(names))}"
        for module, names in sorted(from_modules.items())
    ]
    return "\n\n\n".join([f'"""{head}\n"""\n\n' + "\n".join(imports), *bodies]) + "\n"


def _is_joined(module: str | None) -> bool:
    return module in _LOCAL or str(module).startswith("pallas_kernels.")


def from_torch(
    directory: Path,
    *,
    mesh: Mesh | None = None,
    report: Callable[[str], None] = print,
) -> LoadedRun:
    """Loads an export.

    Args:
      directory: with config.json, model.safetensors and a tokenizer.
      mesh: devices that hold the parameters; None: one device.
      report: called with a message if weights are not finite.

    Raises:
      UserError: it is not an export, its tensors are not the model's, or config.json
        was edited so that model and experiment do not agree.
    """
    file = directory / "config.json"
    keys = read_keys(file)
    if keys.get("format") != FORMAT:
        raise UserError(
            f"{file} must have the format {FORMAT!r} of this version of "
            f"recurjax, got {keys.get('format')!r}: export the run again"
        )
    missing = [name for name in ("model", "experiment", "step") if name not in keys]
    # Name each one, so that a file of another kind differs from a damaged one.
    if missing:
        raise UserError(f"{file} lacks {', '.join(missing)}")
    step = keys["step"]
    if type(step) is not int or not 0 <= step <= LARGEST_SIZE:
        raise UserError(
            f"{file}: step must be an integer from 0 to {LARGEST_SIZE}, got "
            f"{step!r:.60}"
        )
    config = from_json(ModelConfig, keys["model"], path="model")
    # The experiment next to the model, so that a run can continue from it.
    experiment = from_json(Experiment, keys["experiment"], path="experiment")
    if changed := model_differences(config, experiment.model):
        raise UserError(
            f"{file}: model and experiment.model differ: {first_few(changed)}"
        )
    data = experiment.data
    if isinstance(data, DataConfig) and isinstance(data.tokenizer, Bytes):
        # transformers' own saving leaves its file out.
        tokenizer = ByteTokenizer(bos=data.tokenizer.bos)
    else:
        tokenizer = load_tokenizer(directory)
    source = _without_prefix(open_directory(directory))
    # The tensors' names and shapes come from the model, not from the file.
    model = load_model(config, torch_pieces(config), source, mesh=mesh, report=report)
    return LoadedRun(experiment, model, tokenizer, step)


def _without_prefix(source: TensorSource) -> TensorSource:
    """Returns the tensors by the plain module's names.

    What `save_pretrained` writes has the wrapper's prefix, "model.layers.0...".
    """
    if not all(name.startswith("model.") for name in source.tensors):
        return source
    names = {name.removeprefix("model."): name for name in source.tensors}
    return RenamedTensors(source, names)
