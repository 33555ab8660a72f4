"""Which memories end retrievers attend to: figures 2 and 3 of MoMA, from its pipeline's folders.

    python benchmarks/moma_mini/memory_shares.py OUTPUT_DIR LABEL=PIPELINE_DIR ...

writes OUTPUT_DIR/{memories.csv,episodes.png} and, where targets were searched, targets.png: each
memory's share of the attention to documents, without that to a query's own tokens, and of the
documents. Source and targets are split into relevant and other documents.
"""

from __future__ import annotations

import csv
import dataclasses
import json
import pathlib
import re
import sys
from collections.abc import Iterator, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from taser_jax.evaluation.reports import save_figure


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


def main() -> None:
    """Writes the CSV and the figures."""
    if len(sys.argv) < 3 or not all("=" in argument for argument in sys.argv[2:]):
        print(__doc__, file=sys.stderr)
        sys.exit(2)
    directory = pathlib.Path(sys.argv[1])
    directory.mkdir(parents=True, exist_ok=True)
    shares = []
    for argument in sys.argv[2:]:
        label, _, path = argument.partition("=")
        of_run = list(read_shares(label, pathlib.Path(path)))
        if not of_run:
            sys.exit(f"{path}: no episode of it has scored its documents")
        shares += of_run
    with (directory / "memories.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [field.name for field in dataclasses.fields(MemoryShare)])
        writer.writeheader()
        writer.writerows(map(dataclasses.asdict, shares))
    episodes = [share for share in shares if share.stage.startswith("episode")]
    targets = [share for share in shares if not share.stage.startswith("episode")]
    save_figure(directory / "episodes.png", shares_figure(episodes, x="episode and task"))
    if targets:
        save_figure(directory / "targets.png", shares_figure(targets, x="target and task"))


def read_shares(label: str, directory: pathlib.Path) -> Iterator[MemoryShare]:
    """Shares of a run's episodes, in their order, then of its targets."""
    episodes = sorted(
        directory.glob("stages/*-distil.json"),
        key=lambda path: [int(number) for number in re.findall(r"\d+", path.stem)],
    )
    records = [(path.stem.removesuffix("-distil"), path) for path in episodes]
    targets = sorted(directory.glob("targets/*/stages/*-attention.json"))
    records += [(path.parents[1].name, path) for path in targets]
    for stage, path in records:
        for line in json.loads(path.read_text(encoding="utf-8"))["outputs"]["attention"]:
            for memory, attention in line["attention"].items():
                yield MemoryShare(
                    label,
                    stage,
                    line["task"],
                    memory,
                    attention,
                    line["documents"][memory],
                    line["queries_with_gold"],
                )


def shares_figure(shares: Sequence[MemoryShare], *, x: str) -> Figure:
    """Attention beside documents, a bar per memory stacked for each stage and task, in per cent."""
    bars = list(dict.fromkeys((share.model, share.stage, share.task) for share in shares))
    models = {share.model for share in shares}
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
    axis: Axes, shares: Sequence[MemoryShare], bars: Sequence[tuple[str, str, str]], measure: str
) -> None:
    bottom = [0.0] * len(bars)
    for memory in dict.fromkeys(share.memory for share in shares):
        height_of = {
            (share.model, share.stage, share.task): 100 * getattr(share, measure)
            for share in shares
            if share.memory == memory
        }
        heights = [height_of.get(bar, 0.0) for bar in bars]
        drawn = axis.bar(range(len(bars)), heights, 0.8, bottom=bottom, label=memory)
        texts = [f"{height:.0f}" if height >= 4 else "" for height in heights]
        axis.bar_label(drawn, texts, label_type="center", fontsize=7)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]


if __name__ == "__main__":
    main()
