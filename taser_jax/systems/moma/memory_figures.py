"""How memories share attention and documents, as figures like MoMA's Figures 2 and 3."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure


@dataclasses.dataclass(frozen=True)
class MemoryShare:
    """One memory's part in the documents of a set of queries.

    Attributes:
        model: the run's label.
        stage: what was trained or searched: an episode, or a target.
        task: the queries' task.
        memory: the memory; of the source or target, its relevant or its other documents.
        attention: its share of the attention to documents.
        documents: its share of the documents.
        queries_with_gold: queries with a relevant document among theirs.
    """

    model: str
    stage: str
    task: str
    memory: str
    attention: float
    documents: float
    queries_with_gold: float


def shares_figure(shares: Sequence[MemoryShare], *, x: str) -> Figure:
    """Attention beside documents, a bar per memory stacked for each stage and task, in per cent.

    Args:
        shares: of one or several models.
        x: name of the horizontal axis.
    """
    bars = list(dict.fromkeys((one.model, one.stage, one.task) for one in shares))
    models = {one.model for one in shares}
    figure = Figure(figsize=(2.5 + 1.1 * len(bars), 4.2), dpi=120, layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    labels = [
        "\n".join([*([model] if len(models) > 1 else []), stage, task])
        for model, stage, task in bars
    ]
    for axis, measure in zip(axes, ("attention", "documents"), strict=True):
        _stack(axis, shares, bars, measure)
        axis.set_title(measure, loc="left", fontsize=10)
        axis.set_xticks(range(len(bars)), labels, fontsize=6)
        axis.set_xlabel(x)
    axes[0].set_ylabel("% of all documents'")
    handles, names = axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper center", ncols=4, fontsize=8, frameon=False)
    return figure


def _stack(
    axis: Axes,
    shares: Sequence[MemoryShare],
    bars: Sequence[tuple[str, str, str]],
    measure: str,
) -> None:
    bottom = [0.0] * len(bars)
    for memory in dict.fromkeys(one.memory for one in shares):
        found = {
            (one.model, one.stage, one.task): 100 * getattr(one, measure)
            for one in shares
            if one.memory == memory
        }
        heights = [found.get(bar, 0.0) for bar in bars]
        drawn = axis.bar(range(len(bars)), heights, 0.8, bottom=bottom, label=memory)
        axis.bar_label(
            drawn, [f"{h:.0f}" if h >= 4 else "" for h in heights], label_type="center", fontsize=7
        )
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
