"""Values of Gin against annotations, by hand."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Literal

import pytest

from taser_jax.cli.command_table import fits, fix_of, shown


@dataclasses.dataclass
class Part:
    size: int = 1


@pytest.mark.parametrize(
    ("hint", "good", "bad"),
    [
        (int, [3, -1], ["3", 3.0, True, None]),
        (float, [3, 0.5], ["0.5", True]),
        (str, ["a"], [1, ["a"]]),
        (bool, [True], [1, "True"]),
        (int | None, [None, 2], ["2"]),
        (Sequence[str], [["a"], ("a", "b"), []], ["faq", [1], {"a": 1}]),
        (tuple[int, ...], [[1, 2], (1,)], [[1, "2"], "12", 3]),
        (tuple[int, str], [(1, "a")], [(1,), ("a", 1)]),
        (Mapping[str, int], [{"query": 32}, {}], [128, {"query": "32"}, {1: 2}, ["query"]]),
        (str | Sequence[str], ["a", ["a"]], [1]),
        (Mapping[str, str | Mapping[str, str]], [{"t": "p"}, {"t": {"s": "p"}}], [{"t": 1}, "p"]),
        (str | os.PathLike[str], ["a"], [1]),
        (Literal["a", "b"], ["a"], ["c"]),
        (Part | None, [Part(), None], ["part", Part]),
        (object, [1, "a", None], []),
    ],
)
def test_what_an_annotation_allows(hint: object, good: list[object], bad: list[object]):
    assert [value for value in good if not fits(value, hint)] == []
    assert [value for value in bad if fits(value, hint)] == []


def test_annotations_and_what_to_write():
    assert shown(Mapping[str, int] | None) == "Mapping[str, int] | None"
    assert shown(str | os.PathLike[str]) == "str | PathLike[str]"
    assert (shown(Part | None), shown(int)) == ("Part | None", "int")
    assert fix_of("faq", Sequence[str] | None) == "write ['faq']"
    assert fix_of("good", Mapping[str, str]) == "write {'good': 'good'}"
    assert fix_of(3, Mapping[str, str]) is None
