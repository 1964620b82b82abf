"""A file of torch.save, read by torch itself with weights_only=True."""

import re
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from recurjax.convert.formats.tensors import TensorInfo
from recurjax.errors import UserError

_NAMES = {
    "torch.float64": "F64",
    "torch.float32": "F32",
    "torch.float16": "F16",
    "torch.bfloat16": "BF16",
}


class TorchFile:
    """A state dict in memory, mapped where the file allows it; see `TensorSource`."""

    def __init__(self, tensors: dict[str, Any], *, where: str):
        """Takes tensors by name."""
        self.where = where
        self._tensors = tensors
        self.tensors = {
            name: TensorInfo(
                tuple(tensor.shape), _NAMES.get(str(tensor.dtype), str(tensor.dtype))
            )
            for name, tensor in tensors.items()
        }

    def read(self, name: str, dtype: DTypeLike = np.float32) -> np.ndarray:
        wide = self._tensors[name].detach().float().cpu().numpy()
        return wide.astype(dtype, copy=False)


def reason_of(error: Exception) -> str:
    """Returns why torch rejects a file, without its advice to unpickle all of it."""
    asked_for = re.search(r"GLOBAL ([\w.]+)", str(error))
    if asked_for is not None:
        return f"it needs {asked_for[1]}"
    first = next(iter(str(error).strip().splitlines()), "")
    return "it is damaged" if not first or "weights" in first.lower() else first


def open_torch_file(path: Path) -> TorchFile:
    """Opens a state dict, or a dict that holds one: `model`, `state_dict` or `task`.

    Nothing but tensors and plain containers is unpickled.

    Raises:
      UserError: torch is not installed, or the file holds something else.
    """
    try:
        # By name: without torch a type checker takes `import torch` for our own folder.
        torch = import_module("torch")
    except ImportError as error:
        raise UserError(
            f"{path} is a torch.save file, which needs torch: pip install "
            "'recurjax[torch]', or save it as safetensors"
        ) from error
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # pickle's and torch's errors have no common class
        raise UserError(
            f"{path} must be a plain state dict, because recurjax unpickles "
            f"nothing else: {reason_of(error)}"
        ) from error
    for key in ("model", "state_dict", "task"):
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    if not isinstance(content, dict) or not all(
        isinstance(name, str) and isinstance(value, torch.Tensor)
        for name, value in content.items()
    ):
        raise UserError(f"{path} must be a state dict, which maps names to tensors")
    return TorchFile(content, where=str(path))
