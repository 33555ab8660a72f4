"""`taser memory report`: which memories an end retriever attends to, episode by episode."""

from __future__ import annotations

import csv
import dataclasses
import pathlib
import re
from collections.abc import Iterator, Mapping

from taser_jax.evaluation.reports import save_figure
from taser_jax.storage.artifacts import read_json, replacing, storage_errors
from taser_jax.storage.errors import DataError
from taser_jax.storage.progress import logger
from taser_jax.systems.moma.memory_figures import MemoryShare, shares_figure


def memory_report(*, pipeline_dirs: Mapping[str, str], output_dir: str) -> list[MemoryShare]:
    """Writes how memories shared attention and documents (MoMA's Figures 2 and 3).

    The source and the targets are split into relevant and other documents; shares leave out the
    attention to a query's own tokens.

    Args:
        pipeline_dirs: label -> OUTPUT_DIR of a `taser pipeline moma`.
        output_dir: gets memories.csv, episodes.png of the training queries and, where targets were
            searched, targets.png.

    Returns:
        The lines of memories.csv.

    Raises:
        DataError: a run that has scored no documents yet.
        StorageError: the directory cannot be written.
    """
    found = {label: list(_read(label, pathlib.Path(path))) for label, path in pipeline_dirs.items()}
    for label, shares in found.items():
        if not shares:
            raise DataError(
                "no episode has scored its documents",
                where=pipeline_dirs[label],
                expected="a `taser pipeline moma` with an episode whose lookup is learned",
                fix="run it, or correct PIPELINE_DIRS",
            )
    shares = [one for lines in found.values() for one in lines]
    episodes = [one for one in shares if one.stage.startswith("episode")]
    targets = [one for one in shares if not one.stage.startswith("episode")]
    directory = pathlib.Path(output_dir)
    with storage_errors(directory):
        directory.mkdir(parents=True, exist_ok=True)
        with (
            replacing(directory / "memories.csv") as scratch,
            open(scratch, "w", newline="", encoding="utf-8") as file,
        ):
            writer = csv.DictWriter(file, [field.name for field in dataclasses.fields(MemoryShare)])
            writer.writeheader()
            writer.writerows(map(dataclasses.asdict, shares))
        for name, lines, x in (
            ("episodes", episodes, "episode and task"),
            ("targets", targets, "target and task"),
        ):
            if lines:
                save_figure(directory / f"{name}.png", shares_figure(lines, x=x))
    for one in shares:
        logger.info(
            "%s, %s, %s: %s has %.1f%% of attention, %.1f%% of documents",
            *(one.model, one.stage, one.task, one.memory),
            *(100 * one.attention, 100 * one.documents),
        )
    return shares


def _read(label: str, directory: pathlib.Path) -> Iterator[MemoryShare]:
    """Shares of a run's episodes, in their order, then of its targets."""
    episodes = sorted(
        directory.glob("stages/*-distil.json"),
        key=lambda path: [int(number) for number in re.findall(r"\d+", path.stem)],
    )
    records = [(path.stem.removesuffix("-distil"), path) for path in episodes]
    targets = sorted(directory.glob("targets/*/stages/*-attention.json"))
    records += [(path.parents[1].name, path) for path in targets]
    for stage, path in records:
        for line in read_json(path)["outputs"]["attention"]:
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


CONFIGURABLES = ()
