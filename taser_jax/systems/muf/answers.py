"""Answers typed questions with the fused specialists of a `taser fuse` directory."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
from jaxtyping import Float

from taser_jax.commands.ask import FUSION, Answer
from taser_jax.commands.evaluate import EvaluationConfig
from taser_jax.data.collections.store import PassageStore
from taser_jax.retrieval.fusion import Weighting, fuse_runs, weights_of
from taser_jax.retrieval.passages import Hit
from taser_jax.retrieval.runs import Run
from taser_jax.retriever import Retriever
from taser_jax.storage.artifacts import require_equal
from taser_jax.storage.errors import ConfigError
from taser_jax.storage.typed_files import read_typed
from taser_jax.systems.muf.fuse import FUSION_FILE
from taser_jax.systems.muf.specialists import Specialist, Weighing, open_specialists


class _Summary(msgspec.Struct):
    temperatures: dict[str, float]


class _Fusion(msgspec.Struct):
    data_dir: str
    collection: str
    weighing: Weighing
    specialists: dict[str, Specialist]
    summary: _Summary


def ask_fused(
    questions: Sequence[str],
    *,
    fusion_dir: str,
    task: str | None,
    query_length: int | None,
    k: int,
) -> list[Answer]:
    """Encodes questions with every specialist's model, searches, and fuses the lists.

    Args:
        questions: questions as typed.
        fusion_dir: of `taser fuse`, whose specialists name their MODEL_DIR.
        task: task whose prompt, length and query encoder are used.
        query_length: maximum tokens per question; None means as in training.
        k: passages per question.

    Returns:
        The answers, each with the confidence of the specialists; 1 where lists weigh the same.

    Raises:
        ConfigError: no fusion there, or a specialist without its model.
        FingerprintError: a model that did not encode the specialist's passages.
    """
    path = pathlib.Path(fusion_dir) / FUSION_FILE
    record = read_typed(path, _Fusion, fix="run `taser fuse` first, or correct FUSION_DIR")
    store = PassageStore.open(record.data_dir, record.collection)
    weighing, specialists = record.weighing, record.specialists
    opened = open_specialists(
        specialists,
        path.parent / "specialists",
        data_dir=record.data_dir,
        store=store,
        weighing=weighing,
        evaluation=EvaluationConfig(),
    )
    temperatures = record.summary.temperatures
    weighs = weighing.fusion.weighting is not Weighting.EQUAL
    runs, columns = [], []
    ids = [str(line) for line in range(len(questions))]
    for name, specialist in opened.items():
        model_dir = specialists[name].model_dir
        if model_dir is None:
            title = f"specialist {name!r} has no model to encode questions with"
            fix = "put it beside the specialist's embeddings as model, and run `taser fuse` again"
            raise ConfigError(title, where=str(path), fix=fix)
        retriever = Retriever.load(model_dir, task=task, query_length=query_length)
        require_equal(
            f"model {model_dir}",
            {"model": retriever.model.fingerprint},
            specialist.passages.fingerprints,
            "encode and index the collection with this model, or correct model_dir",
        )
        vectors = retriever.encode_queries(questions)
        result = specialist.search(vectors)
        runs.append(Run.of(ids, result))
        if weighs and name in temperatures:
            columns.append(specialist.confidences(vectors, result, [temperatures[name]])[0])
        else:
            columns.append(np.ones(len(ids), np.float32))
    confidences = np.stack(columns, axis=1)
    weights = weights_of(confidences, weighing.fusion).values
    fused = fuse_runs(runs, weights, dataclasses.replace(weighing.fusion, k=k))
    hits = [
        [
            Hit(store[int(row)], float(score))
            for row, score in zip(rows, scores, strict=True)
            if row >= 0
        ]
        for rows, scores in zip(fused.rows, fused.scores, strict=True)
    ]
    return [
        Answer(best, note="   w: " + _named(opened, weights))
        for best, weights in zip(hits, confidences, strict=True)
    ]


def _named(names: Iterable[str], weights: Float[np.ndarray, " specialists"]) -> str:
    return ", ".join(f"{name} {w:.2f}" for name, w in zip(names, weights, strict=True))


FUSION.register(ask_fused)
