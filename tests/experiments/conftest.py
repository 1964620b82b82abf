from tests.training.compilation import quick_children, quick_compilation

__all__ = ["quick_children", "quick_compilation"]
