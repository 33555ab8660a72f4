"""One table and one figure of all claims, for the beginning of docs/results.md.

    python benchmarks/opening.py TITLE=OUTPUT_DIR [TITLE=OUTPUT_DIR ...] --figure PNG

reads the claims.json that each benchmark leaves in its OUTPUT_DIR, prints the table and draws the
effects with their intervals.
"""

from __future__ import annotations

import argparse
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import TypedDict

import matplotlib.pyplot as plt

HEADER = ("claim", "measure", "effect", "95% over queries", "seeds", "command")


class Effect(TypedDict):
    """A line of claims.json; effects in points."""

    claim: str
    measure: str
    effect: float
    low: float
    high: float
    p: float
    seeds: int
    command: str


def main() -> None:
    """Prints the table and writes the figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("outputs", nargs="+", metavar="TITLE=OUTPUT_DIR")
    parser.add_argument("--figure", type=pathlib.Path, required=True)
    arguments = parser.parse_args()
    found: dict[str, list[Effect]] = {}
    for output in arguments.outputs:
        title, _, directory = output.partition("=")
        text = (pathlib.Path(directory) / "claims.json").read_text(encoding="utf-8")
        found[title] = json.loads(text)
    print(markdown(found))
    plot(found).savefig(arguments.figure, dpi=120, bbox_inches="tight")


def markdown(found: Mapping[str, Sequence[Effect]]) -> str:
    """A line for each claim, under its benchmark's title."""
    lines = [f"| {' | '.join(HEADER)} |", "|---|---|---:|---:|---:|---|"]
    for title, effects in found.items():
        for one in effects:
            cells = [
                *(f"{title}: {one['claim']}", one["measure"], f"{one['effect']:+.1f}"),
                f"[{one['low']:+.1f}, {one['high']:+.1f}]",
                *(str(one["seeds"]), f"`{one['command']}`"),
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def plot(found: Mapping[str, Sequence[Effect]]) -> plt.Figure:
    """Effects as points with their intervals, one below the other; 0 is no effect."""
    rows = [(title, one) for title, effects in found.items() for one in effects]
    figure, axes = plt.subplots(figsize=(8, 0.32 * len(rows) + 1))
    colours = dict(zip(found, plt.get_cmap("tab10").colors, strict=False))
    for height, (title, one) in enumerate(reversed(rows)):
        colour = colours[title]
        axes.plot([one["low"], one["high"]], [height, height], color=colour, lw=2)
        axes.plot(one["effect"], height, "o", color=colour)
    axes.axvline(0, color="grey", lw=1, ls=":")
    labels = [f"{title}: {one['claim']}" for title, one in reversed(rows)]
    axes.set_yticks(range(len(rows)), labels)
    axes.set_xlabel("points, with 95% intervals over queries")
    return figure


if __name__ == "__main__":
    main()
