"""What MUF's fusion costs beside joint models (DPR-MUF's table 1), from a finished run.

    python benchmarks/muf/costs.py PIPELINE_DIR

writes PIPELINE_DIR/costs.md: seconds of training and encoding from the stages' records, bytes of
the passages' vectors, and milliseconds per query that this machine takes, and costs.json, the
milliseconds by number of members.
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import json
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from finished_run import FinishedRun, run_of_arguments

from taser_jax.retrieval.embeddings import Embeddings
from taser_jax.retrieval.fusion import FusionConfig, fuse_runs, weights_of
from taser_jax.retrieval.runs import Run
from taser_jax.storage.artifacts import file_name
from taser_jax.systems.muf.specialists import Specialist
from taser_jax.systems.muf.tables import MUF, TEST, of_size

# Queries that are timed together.
TIMED = 64


@dataclasses.dataclass(frozen=True)
class ModelCost:
    """What one model took.

    Attributes:
        train: seconds of its training, and of its ensemble's.
        encode: seconds of encoding and indexing the collection.
        vectors: bytes of its passages' embeddings.
    """

    train: float
    encode: float
    vectors: int


@dataclasses.dataclass(frozen=True)
class Latency:
    """Milliseconds per query, without encoding.

    Attributes:
        single: search by one specialist, the mean of all.
        search: by all of them, one after the other.
        confidence: of all of them.
        fusion: of their lists.
    """

    single: float
    search: float
    confidence: float
    fusion: float

    @property
    def total(self) -> float:
        """All of a fusion."""
        return self.search + self.confidence + self.fusion


def main() -> None:
    """Writes the costs of a run that has its tables."""
    run = run_of_arguments(__doc__)
    if run is None:
        return
    measured = latencies(run)
    plain = {members: dataclasses.asdict(latency) for members, latency in measured.items()}
    (run.directory / "costs.json").write_text(json.dumps(plain, indent=1) + "\n", encoding="utf-8")
    specialists = {name: model_cost(run, name) for name in run.specialists}
    joint = {name: model_cost(run, name) for name in joint_models(run)}
    table = costs_table(specialists, joint, measured[max(measured)])
    (run.directory / "costs.md").write_text(table, encoding="utf-8")


def joint_models(run: FinishedRun) -> list[str]:
    """Trained models that are no specialists, in the order of the table."""
    trained = {name.removesuffix("-train") for name in run.stages.finished()}
    with (run.directory / "domains.csv").open(newline="") as file:
        rows = dict.fromkeys(line["system"] for line in csv.DictReader(file))
    return [name for name in rows if file_name(name) in trained and name not in run.specialists]


def model_cost(run: FinishedRun, name: str) -> ModelCost:
    """What a trained model took, from the records of its stages."""
    label, finished = file_name(name), set(run.stages.finished())
    seconds = {
        part: run.stages.record(f"{label}-{part}").seconds
        for part in ("train", "ensemble", "encode", "index")
        if f"{label}-{part}" in finished
    }
    passages = Embeddings(run.directory / label / "embeddings")
    return ModelCost(
        train=seconds["train"] + seconds.get("ensemble", 0.0),
        encode=seconds["encode"] + seconds["index"],
        vectors=len(passages) * passages[:1].nbytes,
    )


def latencies(run: FinishedRun) -> dict[int, Latency]:
    """Members -> latency of a fusion with so many, for each row of sizes and for all."""
    opened = run.opened()
    first = next(iter(opened.values()))
    assert first.ensemble is not None
    everyone = first.ensemble.config.members
    sizes = [members for members in range(2, everyone) if run.has_fusion(of_size(members))]
    fusions = {members: run.opened(members=members) for members in sizes} | {everyone: opened}
    return {
        members: fusion_latency(list(specialists.values()), run.tasks[0], run.weighing.fusion)
        for members, specialists in fusions.items()
    }


def fusion_latency(specialists: Sequence[Specialist], task: str, config: FusionConfig) -> Latency:
    """Milliseconds per query for some queries of a task, each measured after a first run."""
    vectors = [specialist.vectors(task, TEST)[:TIMED] for specialist in specialists]
    count = len(vectors[0])
    lists = [
        open_specialist.search(some)
        for open_specialist, some in zip(specialists, vectors, strict=True)
    ]
    runs = [Run.of([str(line) for line in range(count)], result) for result in lists]
    search, confidence, columns = 0.0, 0.0, []
    for open_specialist, some, result in zip(specialists, vectors, lists, strict=True):
        weigh = functools.partial(
            open_specialist.confidences, some, result, [open_specialist.temperature]
        )
        columns.append(weigh()[0])
        search += seconds_of(functools.partial(open_specialist.search, some))
        confidence += seconds_of(weigh)
    w = np.stack(columns, axis=1)
    fusion = seconds_of(lambda: fuse_runs(runs, [weights_of(w, config)], config))
    per_query = [1000 * seconds / count for seconds in (search, confidence, fusion)]
    return Latency(per_query[0] / len(specialists), *per_query)


def seconds_of(call: Callable[[], object]) -> float:
    """How long a call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def costs_table(
    specialists: Mapping[str, ModelCost], joint: Mapping[str, ModelCost], latency: Latency
) -> str:
    """The paper's table 1 in figures: a line per property, a column per joint model and for MUF.

    Adding a domain trains the joint model again, and one more specialist.
    """
    single = list(specialists.values())
    header = [*joint, f"{MUF}, {len(single)} specialists"]

    def line(name: str, of_joint: Sequence[str], of_fusion: str) -> str:
        return f"| {name} | {' | '.join([*of_joint, of_fusion])} |"

    trained = [f"{cost.train:.0f} s" for cost in joint.values()]
    encoded = [f"{cost.encode:.0f} s" for cost in joint.values()]
    again = [f"{cost.train + cost.encode:.0f} s" for cost in joint.values()]
    stored = [f"{cost.vectors / 1e6:.0f} MB" for cost in joint.values()]
    searched = [f"{latency.single:.1f} ms"] * len(joint)
    train = [cost.train for cost in single]
    encode = [cost.encode for cost in single]
    one_more = (sum(train) + sum(encode)) / len(single)
    vectors = sum(cost.vectors for cost in single) / 1e6
    apart = "training, each on its own machine"
    lines = [
        f"| | {' | '.join(header)} |",
        f"|---|{'---:|' * len(header)}",
        line("training", trained, f"{sum(train):.0f} s"),
        line(apart, trained, f"{max(train):.0f} s"),
        line("encoding and indexing", encoded, f"{sum(encode):.0f} s"),
        line("one more domain", again, f"{one_more:.0f} s"),
        line("passages' vectors", stored, f"{vectors:.0f} MB"),
        line("search, confidence and fusion of a query", searched, f"{latency.total:.1f} ms"),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
