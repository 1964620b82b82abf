from tests.training.compilation import quick_compilation, unoptimized

__all__ = ["quick_compilation", "unoptimized"]
