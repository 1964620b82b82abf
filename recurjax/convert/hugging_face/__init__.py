"""Hugging Face's checkpoints: in, config and tensors' names both ways."""

from recurjax.convert.hugging_face.checkpoint import Imported, from_hf

__all__ = ["Imported", "from_hf"]
