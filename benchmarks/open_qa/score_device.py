"""A table from what device.py brought back, scored by answers where the text is.

    python benchmarks/open_qa/score_device.py RUN_DIR DEVICE_DIR... --output_dir DIR

RUN_DIR is benchmarks/open_qa/run.sh's OUTPUT_DIR: its collection, token store and BM25 runs are
used. Each DEVICE_DIR holds .npz files and a device.jsonl. Written are run files, results, and
table.md and table.csv; α of the hybrids is chosen on validation questions.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from taser_jax.commands.evaluate import EvaluationConfig, Judge, evaluate, write_table
from taser_jax.commands.inputs import run_path
from taser_jax.commands.pipelines.retrieval_stages import BM25, row_name
from taser_jax.commands.search import hybrid
from taser_jax.data.collections.store import PassageStore, QuerySet
from taser_jax.evaluation.results import write_result
from taser_jax.retrieval.runs import Run, write_trec_run
from taser_jax.storage.errors import FingerprintError

COLLECTION = "open_qa"
EVALUATION = EvaluationConfig(judge=Judge.ANSWERS, measures=("R@1", "R@5", "R@20", "R@100"))


def device_lines(directory: pathlib.Path) -> dict[tuple[str, int], dict[str, Any]]:
    """(system, round) -> what device.py reported of it; probes are left out."""
    text = (directory / "device.jsonl").read_text(encoding="utf-8")
    lines = [json.loads(line) for line in text.splitlines()]
    return {(line["system"], line["round"]): line for line in lines if "system" in line}


def write_runs(arrays: Mapping[str, np.ndarray], number: int, scorer: Scorer, label: str) -> str:
    """Run files of one round; their folder."""
    directory = scorer.output_dir / label / "runs"
    for key in arrays:
        of_round, task, split, kind = key.split("/")
        if int(of_round) == number and kind == "rows":
            queries = QuerySet.open(scorer.data_dir, COLLECTION, task, split)
            run = Run(
                [query.id for query in queries],
                arrays[key],
                arrays[key.removesuffix("rows") + "scores"],
            )
            write_trec_run(run_path(directory, task, split), run, ids=scorer.ids, tag=label)
    return str(directory)


class Scorer:
    """Scores runs over one prepared collection.

    Args:
        run_dir: run.sh's OUTPUT_DIR.
        output_dir: runs and tables go there.
    """

    def __init__(self, run_dir: pathlib.Path, output_dir: pathlib.Path) -> None:
        self.output_dir = output_dir
        self.data_dir = str(run_dir / "data")
        self.bm25_dir = str(run_dir / "comparison" / "bm25" / "runs")
        self.ids = PassageStore.open(self.data_dir, COLLECTION).ids
        metadata = json.loads((run_dir / "token_store" / "metadata.json").read_text())
        self._token_store = metadata["fingerprint"]

    def check(self, line: Mapping[str, Any]) -> None:
        """Rows mean passages of this collection only if the token stores are the same."""
        if line["token_store"] != self._token_store:
            raise FingerprintError(
                f"trained on token store {line['token_store']}",
                where=f"{line['system']}, round {line['round']}",
                expected=self._token_store,
                fix="give the RUN_DIR whose token store was taken to the device",
            )

    def row(
        self,
        name: str,
        runs_dir: str,
        *,
        parameters: int | None = None,
        details: Mapping[str, str] | None = None,
    ) -> str:
        """Adds a row to the table; its name."""
        result = evaluate(
            runs_dir=runs_dir,
            data_dir=self.data_dir,
            collection=COLLECTION,
            output_dir=str(self.output_dir),
            system=name,
            config=EVALUATION,
            parameters=parameters,
        )
        write_result(
            self.output_dir / "results", dataclasses.replace(result, details=dict(details or {}))
        )
        return name

    def add_bm25(self, name: str, runs_dir: str, *, parameters: int) -> str:
        """Adds the row of a system joined with BM25; its name."""
        joined = str(self.output_dir / f"{name.lower().replace(' ', '-')}-bm25" / "runs")
        alpha = hybrid(
            dense_dir=runs_dir,
            sparse_dir=self.bm25_dir,
            data_dir=self.data_dir,
            collection=COLLECTION,
            output_dir=joined,
            evaluation=EVALUATION,
        )
        return self.row(
            f"{name} + BM25", joined, parameters=parameters, details={"alpha": f"{alpha:.1f}"}
        )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("run_dir", type=pathlib.Path)
    parser.add_argument("device_dirs", type=pathlib.Path, nargs="+")
    parser.add_argument("--output_dir", type=pathlib.Path, required=True)
    parser.add_argument("--hybrid_systems", nargs="*", default=["DPR", "TASER Det-R"])
    options = parser.parse_args(arguments)
    scorer = Scorer(options.run_dir, options.output_dir)
    order = {1: [scorer.row(BM25, scorer.bm25_dir)], 2: [], 3: []}
    for directory in options.device_dirs:
        for (system, number), line in sorted(device_lines(directory).items()):
            scorer.check(line)
            label = f"{system.lower().replace(' ', '-')}-{number}"
            with np.load(directory / f"{label[:-2]}.npz") as arrays:
                runs_dir = write_runs(arrays, number, scorer, label)
            seconds = f"{line['training_seconds']:.0f} s"
            order[number].append(
                scorer.row(
                    row_name(system, number),
                    runs_dir,
                    parameters=line["parameters"],
                    details={"training": seconds},
                )
            )
            if number == 2 and system in options.hybrid_systems:
                order[3].append(scorer.add_bm25(system, runs_dir, parameters=line["parameters"]))
    table = write_table(
        options.output_dir,
        systems=[name for names in order.values() for name in names],
        by_task=EVALUATION.measures[-1],
    )
    print(table.to_text())


if __name__ == "__main__":
    main()
