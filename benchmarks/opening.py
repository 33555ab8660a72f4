"""The claims of docs/claims.md, a line each, and their figure: the beginning of docs/results.md.

    python benchmarks/opening.py benchmarks/results --figure docs/images/claims.png

reads the claims.json files below folders alone: of an OUTPUT_DIR, or benchmarks/results, where
finished benchmarks are published (docs/development.md). A file has its folder's name. Claims of no
file are listed as not run yet.
"""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Sequence

import matplotlib.pyplot as plt
from claims import REGISTERED, Finding, interval_text, read_json

HEADER = (
    *("claim", "rows", "measure", "effect", "95% over queries", "95% over seeds"),
    *("seeds", "verdict", "command"),
)
NOT_RUN = "not run yet"
Titled = tuple[str, Finding]


def main() -> None:
    """Prints the table and writes the figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("outputs", nargs="+", metavar="FOLDER", type=pathlib.Path)
    parser.add_argument("--figure", type=pathlib.Path, required=True)
    arguments = parser.parse_args()
    findings: list[Titled] = []
    for output in arguments.outputs:
        files = sorted(output.rglob("claims.json"))
        if not files:
            parser.error(f"no claims.json in {output} or below it: give a benchmark's OUTPUT_DIR")
        for file in files:
            name = file.resolve().parent.name
            findings += [(name, finding) for finding in read_json(file) if finding.headline]
    print(markdown(findings))
    plot(findings).savefig(arguments.figure, dpi=120, bbox_inches="tight")


def markdown(findings: Sequence[Titled]) -> str:
    """The claims in the order of docs/claims.md, with a line for each headline measure."""
    lines = [f"| {' | '.join(HEADER)} |", "|---|---|---|---:|---:|---:|---:|---|---|"]
    for number, line in REGISTERED.items():
        own = [(title, finding) for title, finding in findings if finding.number == number]
        for title, finding in own:
            cells = [
                *(f"{number}. {line.text}", f"{title}: {finding.rows}", finding.measure),
                *(f"{finding.effect:+.1f}", interval_text(finding.over_queries)),
                *(interval_text(finding.over_seeds), str(finding.seeds)),
                *(str(finding.verdict), f"`{finding.command}`"),
            ]
            lines.append(f"| {' | '.join(cells)} |")
        if not own:
            cells = [f"{number}. {line.text}", *["-"] * 6, NOT_RUN, "-"]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def plot(findings: Sequence[Titled]) -> plt.Figure:
    """Effects with their intervals, one below the other: thick over queries, thin over seeds."""
    rows = [
        titled
        for number in reversed(REGISTERED)
        for titled in reversed(findings)
        if titled[1].number == number
    ]
    figure, axes = plt.subplots(figsize=(8, 0.32 * len(rows) + 1))
    titles = list(dict.fromkeys(title for title, _ in findings))
    colours = dict(zip(titles, plt.get_cmap("tab10").colors, strict=False))
    for height, (title, finding) in enumerate(rows):
        for interval, width in ((finding.over_queries, 3), (finding.over_seeds, 1)):
            if interval is not None:
                ends = [interval.low, interval.high]
                axes.plot(ends, [height, height], color=colours[title], lw=width)
        axes.plot(finding.effect, height, "o", color=colours[title])
        axes.plot(finding.smallest, height, "|", color="grey", ms=9)
    axes.axvline(0, color="grey", lw=1, ls=":")
    labels = [
        f"{finding.number}. {title}, {finding.measure}: {finding.verdict}"
        for title, finding in rows
    ]
    axes.set_yticks(range(len(rows)), labels)
    axes.set_xlabel(
        "points; 95% intervals over queries (thick) and seeds (thin); bar: what matters"
    )
    return figure


if __name__ == "__main__":
    main()
