"""Files of tensors, read one tensor at a time: safetensors, GGUF, torch.save."""

from recurjax.convert.formats.safetensors_files import SafetensorsFiles, open_directory
from recurjax.convert.formats.tensors import TensorInfo, TensorSource
from recurjax.convert.formats.torch_file import open_torch_file

__all__ = [
    "SafetensorsFiles",
    "TensorInfo",
    "TensorSource",
    "open_directory",
    "open_torch_file",
]
