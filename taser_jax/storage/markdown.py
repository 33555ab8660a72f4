"""Markdown tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def markdown_table(head: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    r"""A Markdown table: names to the left in the first column, figures to the right in others.

    Example:
        >>> markdown_table(["task", "R@1"], [["a|b", 71.3]]).splitlines()
        ['| task | R@1 |', '| --- | ---: |', '| a\\|b | 71.3 |']
    """
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "\n".join(
        "| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines
    )
