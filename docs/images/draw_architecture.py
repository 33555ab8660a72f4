"""Draws docs/images/architecture.svg: the TASER encoder, and the path of the data.

python docs/images/draw_architecture.py [--png]
"""

from __future__ import annotations

import pathlib
import sys

import matplotlib
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch

SHARED, QUERY, PASSAGE, FILE = "#dbe4ee", "#fbd9b5", "#cfe8cf", "#f5f3ec"
LINE, GREY = "#33404d", "#6b7785"
QUERY_LINE, PASSAGE_LINE = "#c8701a", "#3d8b3d"
HERE = pathlib.Path(__file__).resolve().parent


def box(
    axes: Axes,
    x: float,
    y: float,
    width: float,
    height: float,
    text: str,
    color: str,
    size: float = 9.5,
    bold: bool = False,
    edge: str = LINE,
) -> None:
    """A rounded box with text in its middle; x and y are its lower left corner."""
    style = FancyBboxPatch(
        (x, y), width, height, boxstyle="round,pad=0,rounding_size=0.12", fc=color, ec=edge, lw=1.1
    )
    axes.add_patch(style)
    axes.text(
        x + width / 2,
        y + height / 2,
        text,
        ha="center",
        va="center",
        fontsize=size,
        color=LINE,
        fontweight="bold" if bold else "normal",
        linespacing=1.35,
    )


def arrow(axes: Axes, *points: tuple[float, float], color: str = LINE) -> None:
    """A line through points with a head at its last."""
    xs, ys = zip(*points, strict=True)
    if len(points) > 2:
        axes.plot(xs[:-1], ys[:-1], color=color, lw=1.4, solid_joinstyle="round")
    axes.annotate(
        "",
        xy=points[-1],
        xytext=points[-2],
        arrowprops={"arrowstyle": "-|>", "color": color, "lw": 1.4, "shrinkA": 0, "shrinkB": 0},
    )


def note(axes: Axes, x: float, y: float, text: str, **style: object) -> None:
    """Small grey text."""
    axes.text(x, y, text, **{"fontsize": 8.5, "color": GREY, "va": "center", **style})


def draw_encoder(axes: Axes) -> None:
    """The stack of blocks, and one specialised block in full."""
    axes.text(0, 9.3, "The TASER encoder", fontsize=13, fontweight="bold", color=LINE)
    box(axes, 0.0, 0.05, 1.75, 0.75, "query\n[CLS] text [SEP]", QUERY, 8)
    box(axes, 1.95, 0.05, 2.25, 0.75, "passage\n[CLS] title [SEP] text [SEP]", PASSAGE, 8)
    arrow(axes, (0.87, 0.8), (0.87, 1.3), color=QUERY_LINE)
    arrow(axes, (3.07, 0.8), (3.07, 1.3), color=PASSAGE_LINE)

    heights = {"embeddings": 1.3, "1": 2.05, "2": 2.8, "3": 3.55}
    box(axes, 0, heights["embeddings"], 4.2, 0.58, "embeddings", SHARED)
    box(axes, 0, heights["1"], 4.2, 0.58, "block 1: shared", SHARED)
    box(axes, 0, heights["2"], 4.2, 0.58, "block 2: shared", SHARED)
    box(axes, 0, 3.55, 4.2, 0.95, "", "white")
    axes.text(2.1, 4.31, "block 3: specialised", ha="center", va="center", fontsize=9.5, color=LINE)
    box(axes, 0.15, 3.63, 1.85, 0.5, "query expert", QUERY, 8.5, edge=QUERY_LINE)
    box(axes, 2.2, 3.63, 1.85, 0.5, "passage expert", PASSAGE, 8.5, edge=PASSAGE_LINE)
    for x, color in ((0.87, QUERY_LINE), (3.07, PASSAGE_LINE)):
        for low, high in ((1.88, 2.05), (2.63, 2.8), (3.38, 3.55), (4.5, 4.95)):
            axes.plot([x, x], [low, high], color=color, lw=1.4)
    note(axes, 2.1, 5.2, "the same again: blocks 4-6, 7-9, 10-12", ha="center")
    for x, color in ((0.87, QUERY_LINE), (3.07, PASSAGE_LINE)):
        arrow(axes, (x, 5.45), (x, 6.05), color=color)
    box(axes, 0.0, 6.05, 1.75, 0.75, "query vector\n(last [CLS])", QUERY, 8)
    box(axes, 1.95, 6.05, 2.25, 0.75, "passage vector\n(last [CLS])", PASSAGE, 8)
    arrow(axes, (0.87, 6.8), (0.87, 7.2), (1.6, 7.2), (1.6, 7.6), color=QUERY_LINE)
    arrow(axes, (3.07, 6.8), (3.07, 7.2), (2.6, 7.2), (2.6, 7.6), color=PASSAGE_LINE)
    box(axes, 0.9, 7.6, 2.4, 0.75, "score = dot product", "white", 9.5, bold=True)
    note(axes, 2.1, 8.68, "loss: the positive's share among all\npassages of the global batch",
         ha="center")  # fmt: skip
    axes.plot([4.2, 5.0], [4.5, 8.55], color=GREY, lw=0.8, ls=(0, (4, 3)))
    axes.plot([4.2, 5.0], [3.55, 1.3], color=GREY, lw=0.8, ls=(0, (4, 3)))

    axes.add_patch(
        FancyBboxPatch((5.0, 1.3), 4.1, 7.25, boxstyle="round,pad=0,rounding_size=0.12",
                       fc="white", ec=GREY, lw=0.9, ls=(0, (4, 3)))
    )  # fmt: skip
    axes.text(7.05, 8.22, "a specialised block", ha="center", va="center", fontsize=9.5, color=LINE)
    box(axes, 5.3, 1.95, 3.5, 0.6, "self-attention (shared)", SHARED)
    box(axes, 5.3, 2.9, 3.5, 0.6, "add, layer norm (shared)", SHARED)
    arrow(axes, (7.05, 1.5), (7.05, 1.95))
    arrow(axes, (7.05, 2.55), (7.05, 2.9))
    arrow(axes, (7.05, 3.5), (7.05, 3.9))
    box(axes, 6.05, 3.9, 2.0, 0.72, "router", "white", 9.5, bold=True)
    arrow(axes, (6.45, 4.62), (6.15, 5.15), color=QUERY_LINE)
    arrow(axes, (7.65, 4.62), (7.95, 5.15), color=PASSAGE_LINE)
    box(axes, 5.3, 5.15, 1.68, 1.55, "query\nexpert\nfeed-forward\n+ layer norm", QUERY, 8.5,
        edge=QUERY_LINE)  # fmt: skip
    box(axes, 7.12, 5.15, 1.68, 1.55, "passage\nexpert\nfeed-forward\n+ layer norm", PASSAGE, 8.5,
        edge=PASSAGE_LINE)  # fmt: skip
    arrow(axes, (6.14, 6.7), (6.14, 7.05), (7.05, 7.05), (7.05, 7.85), color=LINE)
    axes.plot([7.96, 7.96, 7.05], [6.7, 7.05, 7.05], color=LINE, lw=1.4)
    note(axes, 5.0, 0.78, "Det-R routes by role and computes one expert only;\n"
         "Seq-R learns a choice a sequence, Tok-R a choice a token", ha="left")  # fmt: skip


def draw_data(axes: Axes) -> None:
    """Commands and the files between them."""
    left, right, width, height = 10.1, 13.2, 2.3, 0.74
    axes.text(left, 9.3, "The path of the data", fontsize=13, fontweight="bold", color=LINE)
    column = [
        ("TSV, BEIR, DPR files", None),
        ("collection", "prepare"),
        ("token store", "vocab, tokenize"),
        ("checkpoints", "train"),
        ("embeddings", "encode"),
        ("index", "index"),
        ("runs", "search"),
        ("results table", "evaluate"),
    ]
    step = 1.14
    tops = [8.9 - step * number for number in range(len(column))]
    for (name, command), top in zip(column, tops, strict=True):
        box(axes, left, top - height, width, height, name, FILE)
        if command:
            arrow(axes, (left + width / 2, top + step - height), (left + width / 2, top))
            note(axes, left + width / 2 + 0.12, top + (step - height) / 2, command, color=LINE,
                 style="italic")  # fmt: skip
    middle = [top - height / 2 for top in tops]
    box(axes, right, middle[3] - height / 2, width, height, "hard negatives", FILE)
    box(axes, right, middle[1] - height / 2, width, height, "BM25 runs", FILE)
    arrow(axes, (left + width, middle[1]), (right, middle[1]))
    note(axes, left + width + 0.1, middle[1] + 0.2, "bm25", color=LINE, style="italic")
    center = right + width / 2
    arrow(axes, (center, middle[1] - height / 2), (center, middle[3] + height / 2))
    note(axes, center + 0.12, middle[2], "mine (round 1)", color=LINE, style="italic")
    arrow(axes, (left + width, middle[6]), (center, middle[6]), (center, middle[3] - height / 2))
    note(axes, center + 0.12, middle[5], "mine (round 2)", color=LINE, style="italic")
    arrow(axes, (right, middle[3]), (left + width, middle[3]))
    note(axes, left + width + 0.1, middle[3] + 0.2, "train", color=LINE, style="italic")


def main() -> None:
    """Writes the picture."""
    matplotlib.rcParams["svg.hashsalt"] = "architecture"
    matplotlib.rcParams["font.family"] = "DejaVu Sans"
    figure, axes = plt.subplots(figsize=(14.6, 8.6))
    axes.set_xlim(-0.2, 15.9)
    axes.set_ylim(-0.15, 9.75)
    axes.axis("off")
    draw_encoder(axes)
    draw_data(axes)
    figure.subplots_adjust(0.01, 0.01, 0.99, 0.99)
    figure.savefig(HERE / "architecture.svg", metadata={"Date": None}, facecolor="white")
    if "--png" in sys.argv:
        figure.savefig(HERE / "architecture.png", dpi=80, facecolor="white")


if __name__ == "__main__":
    main()
