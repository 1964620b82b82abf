from tests.training.compilation import quick_compilation

__all__ = ["quick_compilation"]
