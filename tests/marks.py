"""Marks for the cases of a parametrized test."""

from collections.abc import Iterable
from typing import Any

import pytest


def slow_except(
    quick: Iterable[str], cases: Iterable[Any], *, slow: Iterable[str] | None = None
) -> list[Any]:
    """Returns the cases, marked slow unless their id (or themselves) is in `quick`.

    With `slow` those of these ids are slow, and the others a sweep. Golden cases of
    another folder (`RECURJAX_GOLDEN`) need not have these ids.
    """
    quick, marked = set(quick), []
    often = None if slow is None else set(slow)
    for case in cases:
        values, identity, marks = (
            (case.values, case.id, [*case.marks])
            if hasattr(case, "marks")
            else ((case,), str(case), [])
        )
        if {mark.name for mark in marks} & {"slow", "sweep"}:
            raise ValueError(f"{identity} is marked already: pass the cases unmarked")
        if identity not in quick:
            rare = often is not None and identity not in often
            marks.append(pytest.mark.sweep if rare else pytest.mark.slow)
        marked.append(pytest.param(*values, id=identity, marks=marks))
    return marked
