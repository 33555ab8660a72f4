"""What a fusion costs beside a joint model (DPR-MUF's table 1), and its figures 2, 3 and 5."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from taser_jax.commands.pipelines.stages import Stages
from taser_jax.retrieval.embeddings import Embeddings
from taser_jax.retrieval.fusion import FusionConfig, fuse_runs, weights_of
from taser_jax.retrieval.query_arrays import FUSED_LISTS, QueryArrays
from taser_jax.retrieval.runs import Run
from taser_jax.storage.artifacts import file_name, replacing, split_path
from taser_jax.systems.muf.fusion_figures import Strips, sizes_figure, strips_figure, weights_figure
from taser_jax.systems.muf.muf_tables import MUF, TEST, MufRows, of_size
from taser_jax.systems.muf.specialists import OpenSpecialist

# Timed together, and drawn as examples.
_TIMED, _EXAMPLES, _STRIP_MEMBERS, _STRIP_PASSAGES = 64, 8, 5, 20


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
    def relative(self) -> float:
        """A fusion's latency over a single specialist's."""
        return (self.search + self.confidence + self.fusion) / self.single


def model_cost(stages: Stages, label: str, embeddings_dir: str) -> ModelCost:
    """What a trained model took, from the records of its stages."""
    finished = set(stages.finished())
    seconds = {
        part: stages.record(f"{label}-{part}").seconds
        for part in ("train", "ensemble", "encode", "index")
        if f"{label}-{part}" in finished
    }
    passages = Embeddings.open(embeddings_dir)
    return ModelCost(
        train=seconds["train"] + seconds.get("ensemble", 0.0),
        encode=seconds["encode"] + seconds["index"],
        vectors=len(passages) * passages.rows(0, 1).nbytes,
    )


def fusion_latency(
    opened: Sequence[OpenSpecialist], task: str, config: FusionConfig
) -> dict[str, float]:
    """The fields of `Latency` for some queries of a task, each measured after a first run."""
    vectors = [one.vectors(task, TEST)[:_TIMED] for one in opened]
    count = len(vectors[0])
    found = [one.search(some) for one, some in zip(opened, vectors, strict=True)]
    joined = list(zip(opened, vectors, found, strict=True))
    runs = [Run.of([str(line) for line in range(count)], result) for result in found]
    sure = np.stack([one.confidences(v, r, [one.temperature])[0] for one, v, r in joined], axis=1)
    search, confidence = 0.0, 0.0
    for one, some, result in joined:
        search += _seconds(functools.partial(one.search, some))
        measured = functools.partial(one.confidences, some, result, [one.temperature])
        confidence += _seconds(measured)
    fusion = _seconds(lambda: fuse_runs(runs, weights_of(sure, config).values, config))
    milliseconds = {"search": search, "confidence": confidence, "fusion": fusion}
    milliseconds["single"] = search / len(opened)
    return {name: 1000 * value / count for name, value in milliseconds.items()}


def costs_table(
    specialists: Mapping[str, ModelCost], joint: Mapping[str, ModelCost], latency: Latency
) -> str:
    """The paper's table 1 in figures: a line per property, a column per joint model and for MUF.

    Adding a domain trains the joint model again, and one more specialist.
    """
    models = list(specialists.values())
    lines = [
        f"| | {' | '.join([*joint, f'{MUF}, {len(models)} specialists'])} |",
        f"|---|{'---:|' * (len(joint) + 1)}",
    ]
    one_by_one = sum(one.train for one in models)
    apart = max(one.train for one in models)
    more = sum(one.train + one.encode for one in models) / len(models)
    for name, cells in (
        ("training", [*(_s(one.train) for one in joint.values()), _s(one_by_one)]),
        ("training, each on its own machine", [*(_s(o.train) for o in joint.values()), _s(apart)]),
        (
            "encoding and indexing",
            [*(_s(o.encode) for o in joint.values()), _s(sum(one.encode for one in models))],
        ),
        ("one more domain", [*(_s(o.train + o.encode) for o in joint.values()), _s(more)]),
        (
            "passages' vectors",
            [*(_mb(o.vectors) for o in joint.values()), _mb(sum(one.vectors for one in models))],
        ),
        (
            "search, confidence and fusion of a query",
            [
                *(f"{latency.single:.1f} ms" for _ in joint),
                f"{latency.relative * latency.single:.1f} ms",
            ],
        ),
    ):
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def write_figures(
    rows: MufRows,
    opened: Mapping[str, OpenSpecialist],
    lists: Mapping[str, pathlib.Path],
    latencies: Mapping[int, Latency],
) -> None:
    """Figures 2, 3 and 5 of the paper, into figures/.

    Args:
        rows: all rows.
        opened: the specialists.
        lists: row -> folder of its fused lists, for `MUF` and, if it was run, the Bayesian oracle.
        latencies: members -> latency of such a fusion, for each row of sizes.
    """
    figures = {}
    measure = rows.setting.evaluation.measures[-1]
    if len(latencies) > 1:
        most = max(latencies)
        figures["sizes"] = sizes_figure(
            {
                task: {
                    size: float(
                        rows.values[MUF if size == most else of_size(size)][task]
                        .values[measure]
                        .mean()
                    )
                    for size in latencies
                }
                for task in rows.tasks
            },
            {size: one.relative for size, one in latencies.items()},
            measure,
        )
    weights = {}
    for row, directory in lists.items():
        for task in rows.own:
            arrays = QueryArrays.open(split_path(directory, task, TEST), FUSED_LISTS)
            raw = arrays.arrays["confidence"][:_EXAMPLES]
            weights[row, task] = weights_of(raw).values
    figures["examples"] = weights_figure(weights, list(opened))
    for task, name in rows.own.items():
        figures[f"members-{file_name(name)}"] = strips_figure(_strips(opened[name], task))
    for name, figure in figures.items():
        with replacing(rows.directory / "figures" / f"{name}.png") as scratch:
            figure.savefig(scratch, format="png")


def _strips(one: OpenSpecialist, task: str) -> Sequence[Strips]:
    """Strips of four of a task's queries, from the least to the most certain."""
    sure = one.confidence(task, TEST)
    order = np.argsort(sure, kind="stable")
    lines = order[np.linspace(0, len(order) - 1, min(4, len(order))).round().astype(int)]
    found = one.member_probabilities(task, TEST, lines, members=_STRIP_MEMBERS)
    ids = one.lists(task, TEST).query_ids
    return [
        Strips(ids[line], float(sure[line]), probabilities[:, :_STRIP_PASSAGES])
        for line, probabilities in zip(lines, found, strict=True)
    ]


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _s(seconds: float) -> str:
    return f"{seconds:.0f} s"


def _mb(count: int) -> str:
    return f"{count / 1e6:.0f} MB"
