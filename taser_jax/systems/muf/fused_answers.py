"""Answers typed questions with the fused specialists of a `taser fuse` directory."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from taser_jax.commands.evaluate import EvaluationConfig
from taser_jax.data.collections.store import PassageStore
from taser_jax.retrieval.fusion import FusionConfig, Weighting, fuse_runs, weights_of
from taser_jax.retrieval.runs import Run
from taser_jax.retriever import Hit, Retriever
from taser_jax.storage.artifacts import file_name, read_json, require_equal
from taser_jax.storage.errors import ConfigError
from taser_jax.storage.settings import from_plain
from taser_jax.systems.muf.confidence import ConfidenceConfig
from taser_jax.systems.muf.fuse import FUSION_FILE
from taser_jax.systems.muf.specialists import CalibrationConfig, OpenSpecialist, Specialist


@dataclasses.dataclass(frozen=True)
class FusedAnswers:
    """Answers to several questions.

    Attributes:
        names: the specialists' names.
        hits: the best passages of each question.
        confidence: each specialist's w; 1 where all lists have equal weights.
    """

    names: tuple[str, ...]
    hits: list[list[Hit]]
    confidence: Float[np.ndarray, "questions specialists"]


def ask_fused(
    questions: Sequence[str],
    fusion_dir: str,
    *,
    k: int,
    query_length: int | None = None,
    task: str | None = None,
) -> FusedAnswers:
    """Encodes questions with every specialist's model, searches, and fuses the lists.

    Args:
        questions: questions as typed.
        fusion_dir: from `taser fuse`, of specialists that name their MODEL_DIR.
        k: passages per question.
        query_length: maximum tokens per question; None takes each model's own.
        task: task whose prompt, length and query encoder are used, where tasks differ.

    Raises:
        ConfigError: no fusion there, or a specialist without its model.
        FingerprintError: a model that did not encode the specialist's passages.
    """
    path = pathlib.Path(fusion_dir) / FUSION_FILE
    record = read_json(path, fix="run `taser fuse` first, or correct FUSION_DIR")
    store = PassageStore.open(record["data_dir"], record["collection"])
    config = from_plain(FusionConfig, record["config"], f"{path}, config")
    confidence = from_plain(ConfidenceConfig, record["confidence"], f"{path}, confidence")
    temperatures = record["summary"]["temperatures"]
    runs, exact, columns = [], [], []
    ids = [str(line) for line in range(len(questions))]
    for name, plain in record["specialists"].items():
        specialist = from_plain(Specialist, plain, f"{path}, specialist {name!r}")
        if specialist.model_dir is None:
            raise ConfigError(
                f"specialist {name!r} has no model",
                where=str(path),
                expected="model_dir, to encode questions with",
                fix=f"bind {file_name(name)}/Specialist.model_dir, and run `taser fuse` again",
            )
        opened = OpenSpecialist(
            name,
            specialist,
            path.parent / "specialists" / file_name(name),
            data_dir=record["data_dir"],
            store=store,
            depth=max(config.depth, confidence.k),
            confidence=confidence,
            calibration=CalibrationConfig(),
            evaluation=EvaluationConfig(),
        )
        retriever = Retriever.load(specialist.model_dir, task=task, query_length=query_length)
        require_equal(
            f"model {specialist.model_dir}",
            {"model": retriever.model.fingerprint},
            opened.passages.fingerprints,
            "encode and index the collection with this model, or correct model_dir",
        )
        vectors = retriever.encode_queries(questions)
        result = opened.search(vectors)
        runs.append(Run.of(ids, result))
        exact.append(opened.exact_scores(vectors))
        weighs = config.weighting is not Weighting.EQUAL and name in temperatures
        if weighs:
            columns.append(opened.confidences(vectors, result, [temperatures[name]])[0])
        else:
            columns.append(np.ones(len(ids), np.float32))
    confidences = np.stack(columns, axis=1)
    weights = weights_of(confidences, config).values
    fused = fuse_runs(runs, weights, dataclasses.replace(config, k=k), exact=exact)
    hits = [
        [
            Hit(store[int(row)], float(score))
            for row, score in zip(rows, scores, strict=True)
            if row >= 0
        ]
        for rows, scores in zip(fused.rows, fused.scores, strict=True)
    ]
    return FusedAnswers(tuple(record["specialists"]), hits, confidences)
