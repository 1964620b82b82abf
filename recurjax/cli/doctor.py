"""`recurjax doctor`: versions, devices and backends, and why others do not work."""

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import chunk_attention, gated_scan, recurrent_prefill
from pallas_kernels.selective_scan import selective_scan
from recurjax.errors import UserError
from recurjax.layers.attention import attend
from recurjax.machine import caches
from recurjax.plan import compilers
from recurjax.version import VERSION

# Without these nothing runs; each extra below is of one feature.
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
_EXTRAS = {
    "pyarrow": "parquet",
    "tensorflow-datasets": "tfds",
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "mlflow-skinny": "mlflow",
    "gcsfs": "cloud",
    "s3fs": "s3",
    "gguf": "gguf",
    "torch": "torch",
    "starlette": "serve",
    "lm-eval": "harness",
    "wonderwords": "ruler",
    "rouge": "longbench",
}
# Only their names are ever shown: a report is pasted where others read it.
_CREDENTIALS = {
    "HF_TOKEN": "private files of the Hugging Face hub",
    "WANDB_API_KEY": "Weights & Biases",
    "GOOGLE_APPLICATION_CREDENTIALS": "Google Cloud",
    "AWS_ACCESS_KEY_ID": "Amazon S3",
}
_BACKENDS = ("triton", "mosaic_tpu", "xla")
_OF_ATTENTION = ("cudnn", "splash", "cpu", "blocks")

_USAGE = """usage: recurjax doctor

Prints versions, devices, the backend of each op, why the other backends are
unavailable, compilers, disk space and the names of credentials."""


def run(argv: list[str]) -> int:
    """Runs the command."""
    if argv and argv[0] in ("-h", "--help"):
        print(_USAGE)
        return 0
    if argv:
        raise UserError(f"recurjax doctor takes no arguments, got {' '.join(argv)}")
    # Check and print each part in turn, so that a hang shows its place.
    for title, lines in (
        ("versions", _versions()),
        ("devices", _devices()),
        ("operations, by the first backend that can", _operations()),
        ("compilers of recurjax plan", _compilers()),
        ("disk", _disk()),
        ("credentials", _credentials()),
    ):
        print(title)
        for line in lines:
            print(f"  {line}")
    return 0


def _versions() -> Iterator[str]:
    yield f"recurjax {VERSION}, Python {sys.version.split()[0]}, {sys.platform}"
    yield ", ".join(f"{name} {_version(name) or 'missing'}" for name in _PACKAGES)
    for name, extra in _EXTRAS.items():
        version = _version(name)
        yield (
            f"{name} {version}"
            if version
            else f"no {name}: pip install 'recurjax[{extra}]'"
        )


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _devices() -> Iterator[str]:
    try:
        # The first look at the devices: what is wrong with them shows here.
        devices = jax.devices()
    except RuntimeError as error:  # a plugin without its driver, a device in use
        yield f"none: {str(error).splitlines()[0]}"
        return
    for kind in dict.fromkeys(device.device_kind for device in devices):
        count = sum(device.device_kind == kind for device in devices)
        yield f"{count} x {kind} ({devices[0].platform})"


def _operations() -> Iterator[str]:
    for name, call in _calls().items():
        # As the library chooses: the first backend that does not refuse, and why the
        # ones before it did. Nothing is computed.
        refused, taken = [], "none"
        for backend in _OF_ATTENTION if name == "attend" else _BACKENDS:
            try:
                jax.eval_shape(lambda call=call, backend=backend: call(backend))
            except NotImplementedError as error:
                reason = str(error).removeprefix(f"{name}: {backend}: ")
                refused.append(f"{backend}: {reason}")
            else:
                taken = backend
                break
        yield f"{name}: {taken}" + "".join(f"\n      not {line}" for line in refused)


def _calls() -> dict[str, Callable[[Any], Any]]:
    """Returns a usual call of each operation, of a backend that is named."""
    # Sizes that every backend takes, so that a refusal is the machine's.
    B, T, D, H, E, N, chunk = 2, 256, 512, 8, 64, 16, 16
    dtype = jnp.bfloat16
    rows = jnp.zeros((B, T, D), dtype)
    heads = jnp.zeros((B, T, H, E), dtype)
    ends = chunk_attention.ChunkEnds(*(jnp.zeros((B, H, T // chunk, E), dtype),) * 2)
    states = jnp.zeros((B, T, N), dtype)
    spec = recurrent_prefill.LayerSpec(
        heads=H,
        key_heads=H,
        head_width=E,
        logit_scale=E**-0.5,
        residual_scale=1.0,
        dtype="bfloat16",
    )
    ones, wide = jnp.ones((1, D)), jnp.zeros((1, D, 4 * D))
    weights = recurrent_prefill.LayerWeights(
        *(jnp.zeros((1, D, H, E)),) * 3,
        w_out=jnp.zeros((1, H, E, D)),
        w_up=wide,
        w_down=wide.swapaxes(1, 2),
        attention_norm_scale=ones,
        mlp_norm_scale=ones,
        q_norm_scale=ones,
        k_norm_scale=ones,
    )
    cache = recurrent_prefill.empty_cache(1, B, 0, D, spec)
    return {
        "attend": lambda backend: attend(
            *(heads,) * 3, scale=E**-0.5, causal=True, implementation=backend
        ),
        "recurrent_prefill": lambda backend: recurrent_prefill.recurrent_prefill(
            jnp.zeros((B, T, D)), weights, cache, spec=spec, implementation=backend
        ),
        "chunk_attention": lambda backend: chunk_attention.chunk_attention(
            heads,
            jnp.zeros((B, T, H)),
            heads,
            ends,
            chunk=chunk,
            scale=E**-0.5,
            implementation=backend,
        ),
        "gated_scan": lambda backend: gated_scan.gated_scan(
            rows, (rows,), implementation=backend
        ),
        "selective_scan": lambda backend: selective_scan(
            rows,
            rows,
            jnp.zeros((D, N)),
            states,
            states,
            implementation=backend,
        ),
    }


def _compilers() -> Iterator[str]:
    for plugin, target in (("libtpu", "TPUs"), ("jax_plugins", "NVIDIA GPUs")):
        place = compilers.find_compilers(plugin)
        yield f"{target}: {place or 'not here: run `recurjax compilers`'}"


def _disk() -> Iterator[str]:
    folders = {"runs": Path.cwd(), "compilers": compilers.places()[-1]}
    if (cache := caches.cache_folder()) is None:
        empty = caches.VARIABLE in os.environ
        why = f"${caches.VARIABLE} is empty" if empty else "the user has no home"
        yield f"compiled programs and copies: not kept, as {why}"
    else:
        folders["compiled programs and copies"] = cache
    for what, folder in folders.items():
        # A missing folder will be on the disk of its nearest existing parent.
        there = next(p for p in (folder, *folder.parents) if p.exists())
        free = shutil.disk_usage(there).free / 1e9
        writable = "" if os.access(there, os.W_OK) else ", not writable"
        yield f"{what}: {free:.1f} GB free at {folder}{writable}"


def _credentials() -> Iterator[str]:
    """Returns which credentials are set, without their values."""
    for name, purpose in _CREDENTIALS.items():
        yield f"{name} is {'set' if os.environ.get(name) else 'not set'} ({purpose})"
