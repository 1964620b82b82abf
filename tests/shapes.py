"""Checks annotated shapes at run time, in the functions that annotate any."""

from typing import Any, get_args

import jaxtyping


def install_shape_checks(*packages: str) -> None:
    """Has jaxtyping check every annotated shape of the packages imported from now on.

    jaxtyping's hook wraps every function, which takes milliseconds, and wraps a nested
    one at each call of the function around it. Most functions annotate no shape, and
    pyright checks their types.
    """
    wrap_all = jaxtyping.jaxtyped

    def jaxtyped(*, typechecker: Any) -> Any:
        wrap = wrap_all(typechecker=typechecker)
        return lambda target: wrap(target) if _annotates_shapes(target) else target

    jaxtyping.jaxtyped = jaxtyped  # type: ignore[assignment]
    jaxtyping.install_import_hook(packages, "beartype.beartype")


def _annotates_shapes(target: Any) -> bool:
    if isinstance(target, property):
        return _annotates_shapes(target.fget)
    if isinstance(target, type):  # A dataclass: its fields are checked in `__init__`.
        target = target.__init__
    function = getattr(target, "__func__", target)
    return any(map(_has_shape, getattr(function, "__annotations__", {}).values()))


def _has_shape(annotation: Any) -> bool:
    if isinstance(annotation, str):
        return "[" in annotation
    if isinstance(annotation, type) and issubclass(annotation, jaxtyping.AbstractArray):
        return True
    return any(map(_has_shape, get_args(annotation)))
