"""Marks for the cases of a parametrized test."""

from collections.abc import Iterable
from typing import Any

import pytest


def slow_except(quick: Iterable[str], cases: Iterable[Any]) -> list[Any]:
    """Returns the cases, marked slow unless their id (or themselves) is in `quick`.

    Golden cases of another folder (`RECURJAX_GOLDEN`) need not have these ids.
    """
    quick, marked = set(quick), []
    for case in cases:
        values, identity, marks = (
            (case.values, case.id, [*case.marks])
            if hasattr(case, "marks")
            else ((case,), str(case), [])
        )
        if identity not in quick:
            marks.append(pytest.mark.slow)
        marked.append(pytest.param(*values, id=identity, marks=marks))
    return marked
