"""A specialist's part in fusion: its lists, its temperature and its confidences."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Float32, Int

from taser_jax.commands.evaluate import EvaluationConfig, judge_run
from taser_jax.commands.inputs import PassageHeads, own_rows
from taser_jax.data.collections.store import PassageStore, QuerySet, list_tasks
from taser_jax.retrieval.embeddings import Embeddings
from taser_jax.retrieval.exact import search_devices
from taser_jax.retrieval.fusion import ScoreRows
from taser_jax.retrieval.index import open_index
from taser_jax.retrieval.query_arrays import CONFIDENCE, LISTS, QueryArrays, is_finished
from taser_jax.retrieval.query_embeddings import QueryEmbeddings
from taser_jax.retrieval.runs import Run, SearchResult, without_own
from taser_jax.retrieval.searcher import Searcher
from taser_jax.storage.artifacts import (
    FilePath,
    fingerprint_json,
    read_json,
    require_equal,
    split_path,
    write_json,
)
from taser_jax.storage.errors import ConfigError
from taser_jax.storage.progress import logger, phase
from taser_jax.systems.muf.calibration import Reliability, TemperatureChoice, choose_temperature
from taser_jax.systems.muf.confidence import (
    TEMPERATURES,
    ConfidenceConfig,
    check_temperatures,
    member_logits,
    query_confidence,
)
from taser_jax.systems.muf.ensemble_files import Ensemble

_TEMPERATURE = "temperature.json"


@dataclasses.dataclass(frozen=True)
class Specialist:
    """A trained model that takes part in fusion.

    Attributes:
        embeddings_dir: its passages' and queries' embeddings, from `taser encode`.
        index_dir: their index.
        ensemble_dir: from `taser ensemble`; None for a model whose lists are never weighted.
        temperature: temperature of its members' softmaxes; None chooses one by calibration.
        members: how many of its members are used, from the first on; None means all.
        model_dir: the model; only `taser ask`, which encodes questions, reads it.
    """

    embeddings_dir: str
    index_dir: str
    ensemble_dir: str | None = None
    temperature: float | None = None
    members: int | None = None
    model_dir: str | None = None


@dataclasses.dataclass(frozen=True)
class CalibrationConfig:
    """How a specialist's temperature is chosen.

    Attributes:
        temperatures: the candidates; scores of another scale than BERT-base's need others.
        split: split whose queries decide; not the one that is reported.
    """

    temperatures: tuple[float, ...] = TEMPERATURES
    split: str = "validation"

    def __post_init__(self) -> None:
        check_temperatures(self.temperatures)


class OpenSpecialist:
    """A specialist over one collection; results are kept in `directory` and reused.

        <directory>/lists/<task>.<split>/         ranked lists
        <directory>/confidence/<hash>/<task>.<split>/    w of each query; the hash is of members,
                                                         temperature, k and ε
        <directory>/temperature.json              the chosen one, with the curve

    Args:
        name: for messages.
        specialist: where its files are.
        directory: where its results are stored.
        data_dir: folder of collections.
        store: the collection.
        depth: passages of each list.
        confidence: how confidences are computed.
        calibration: how its temperature is chosen.
        evaluation: the criterion for hits: whether the first passage of a list is relevant.
        own_passage_tasks: tasks whose queries are also passages, which their lists leave out.

    Raises:
        FingerprintError: index, embeddings or ensemble are of another model or collection.
    """

    def __init__(
        self,
        name: str,
        specialist: Specialist,
        directory: FilePath,
        *,
        data_dir: str,
        store: PassageStore,
        depth: int,
        confidence: ConfidenceConfig,
        calibration: CalibrationConfig,
        evaluation: EvaluationConfig,
        own_passage_tasks: Sequence[str] = (),
    ) -> None:
        self._own_passage_tasks = own_passage_tasks
        self.name, self._directory = name, pathlib.Path(directory)
        self._specialist, self._store, self._data_dir = specialist, store, data_dir
        self._depth, self._confidence = depth, confidence
        self._calibration, self._evaluation = calibration, evaluation
        self.passages = Embeddings.open(
            specialist.embeddings_dir, fingerprints={"collection": store.fingerprint}
        )
        require_equal(
            f"index {specialist.index_dir}",
            self._searcher.fingerprints,
            self.passages.fingerprints,
            "index this model's embeddings (`taser index`), or correct INDEX_DIR",
        )
        self.ensemble = None
        if specialist.ensemble_dir is not None:
            ensemble = Ensemble.open(
                specialist.ensemble_dir, fingerprints=self.passages.fingerprints
            )
            self.ensemble = ensemble.first(specialist.members) if specialist.members else ensemble

    @functools.cached_property
    def _searcher(self) -> Searcher:
        return open_index(
            self._specialist.index_dir,
            fingerprints={"collection": self._store.fingerprint},
            devices=search_devices(),
        )

    def queries(self, task: str, split: str) -> QueryEmbeddings:
        """Its embeddings of a task's queries."""
        return QueryEmbeddings.of_split(
            self._specialist.embeddings_dir, task, split, fingerprints=self.passages.fingerprints
        )

    def vectors(self, task: str, split: str) -> Float32[np.ndarray, "queries dim"]:
        """The same embeddings, in memory."""
        queries = self.queries(task, split)
        return np.asarray(queries.rows(0, len(queries)), np.float32)

    def lists(self, task: str, split: str) -> Run:
        """Its list for each query; searched once."""
        queries = self.queries(task, split)
        directory = split_path(self._directory / "lists", task, split)
        drops = task in self._own_passage_tasks
        fingerprints = dict(self._list_fingerprints(queries))
        if drops:
            fingerprints["own passages"] = "left out"
        if not is_finished(directory):
            with phase(f"{self.name}: search of {task} {split}"):
                result = self.search(self.vectors(task, split), more=drops)
            if drops:
                own = own_rows(self._store, task, queries.query_ids)
                result = without_own(result, own, self._depth)
            run = Run.of(queries.query_ids, result)
            QueryArrays.of_run(run, fingerprints=fingerprints).save(directory)
        return QueryArrays.open(directory, LISTS, fingerprints=fingerprints).run

    def exact_scores(self, vectors: Float[np.ndarray, "queries dim"]) -> ScoreRows:
        """Dot products of query embeddings, for passages that its lists lack."""

        def score(lines: np.ndarray, rows: np.ndarray) -> np.ndarray:
            found = (self.passages.take(np.maximum(row, 0)) for row in rows)
            return np.stack(
                [
                    np.asarray(passages, np.float32) @ vector
                    for passages, vector in zip(found, vectors[lines], strict=True)
                ]
            )

        return score

    def search(self, vectors: Float[np.ndarray, "queries dim"], *, more: int = 0) -> SearchResult:
        """Its list for each query embedding, with `more` further results."""
        return self._searcher.search(vectors, self._depth + more)

    def confidences(
        self,
        vectors: Float[np.ndarray, "queries dim"],
        result: SearchResult,
        temperatures: Sequence[float],
    ) -> Float32[np.ndarray, "temperatures queries"]:
        """Its confidence in these lists, at every temperature.

        Raises:
            ConfigError: it has no ensemble.
        """
        members = self._members
        return query_confidence(
            members.embed,
            vectors,
            self.passages,
            result,
            members=members.config.members,
            temperatures=temperatures,
            config=self._confidence,
        )

    def confidence(self, task: str, split: str) -> Float32[np.ndarray, " queries"]:
        """Its confidence w in each query's list; computed once.

        Raises:
            ConfigError: it has no ensemble.
        """
        queries = self.queries(task, split)
        settings = {
            "ensemble": self._members.fingerprints["ensemble"],
            "temperature": str(self.temperature),
            "confidence": f"k {self._confidence.k}, epsilon {self._confidence.epsilon}",
        }
        root = self._directory / "confidence" / fingerprint_json(settings)[:8]
        directory = split_path(root, task, split)
        fingerprints = {**self._list_fingerprints(queries), **settings}
        if not is_finished(directory):
            with phase(f"{self.name}: confidence of {task} {split}"):
                found = self._own_confidences(task, split, (self.temperature,))[0]
            arrays = {"confidence": found}
            QueryArrays(CONFIDENCE, queries.query_ids, arrays, fingerprints).save(directory)
        saved = QueryArrays.open(directory, CONFIDENCE, fingerprints=fingerprints)
        return saved.arrays["confidence"]

    def member_probabilities(
        self, task: str, split: str, lines: Int[np.ndarray, " lines"], *, members: int
    ) -> Float32[np.ndarray, "lines members k"]:
        """Softmaxes of its first members over some queries' lists, at its temperature."""
        rows = self.lists(task, split).rows[lines, : self._confidence.k]
        passages = np.stack([self.passages.take(np.maximum(row, 0)) for row in rows])
        embedded = self._members.embed(self.vectors(task, split)[lines])[:members]
        logits = member_logits(embedded, jnp.asarray(passages)) / self.temperature
        return np.asarray(jax.nn.softmax(jnp.where(rows[:, None] >= 0, logits, -jnp.inf)))

    @functools.cached_property
    def temperature(self) -> float:
        """T: as given, or the candidate with the lowest ECE on its own validation queries.

        Raises:
            ConfigError: none of its tasks has validation queries, or T is not positive.
        """
        if self._specialist.temperature is not None:
            check_temperatures([self._specialist.temperature])
            return self._specialist.temperature
        members = self._specialist.members
        path = self._directory / (f"temperature-{members}.json" if members else _TEMPERATURE)
        basis = {
            "ensemble": self._members.fingerprints["ensemble"],
            "grid": str(self._calibration.temperatures),
            "judge": f"{self._evaluation.judge.value}, k {self._confidence.k}",
        }
        if not path.exists():
            with phase(f"{self.name}: calibration"):
                choice = self._calibrate()
            write_json(path, {**_as_json(choice), "basis": basis})
        saved = read_json(path)
        require_equal(str(path), saved["basis"], basis, f"delete {path} to calibrate again")
        return float(saved["temperature"])

    @property
    def _members(self) -> Ensemble:
        if self.ensemble is None:
            raise ConfigError(
                f"specialist {self.name!r} has no ensemble",
                where="Specialist.ensemble_dir",
                expected="members whose agreement weighs its lists",
                fix="run `taser ensemble` for it, or set FusionConfig.weighting to 'equal'",
            )
        return self.ensemble

    def _list_fingerprints(self, queries: QueryEmbeddings) -> Mapping[str, str]:
        return {**queries.fingerprints, "depth": str(self._depth)}

    def _own_confidences(
        self, task: str, split: str, temperatures: Sequence[float]
    ) -> Float32[np.ndarray, "temperatures queries"]:
        vectors = self.vectors(task, split)
        return self.confidences(vectors, self.lists(task, split).result, temperatures)

    def _calibrate(self) -> TemperatureChoice:
        """ECE over the validation queries of the tasks that the specialist was trained on."""
        grid, split = self._calibration.temperatures, self._calibration.split
        known = list_tasks(self._data_dir, self._store.name)
        tasks = [task for task in self._members.tasks if split in known.get(task, ())]
        if not tasks:
            raise ConfigError(
                f"no {split} queries of {', '.join(self._members.tasks)}",
                where=f"calibration of {self.name}",
                expected="queries to choose its temperature with",
                fix="give the specialist a temperature, or prepare that split",
            )
        judged = dataclasses.replace(self._evaluation, measures=("R@1",), page_only_tasks=())
        found, correct = [], []
        for task in tasks:
            queries = QuerySet.open(self._data_dir, self._store.name, task, split)
            run = self.lists(task, split)
            evaluation = judge_run(run, queries, PassageHeads(self._store), judged)
            right = dict(zip(evaluation.query_ids, evaluation.values["R@1"], strict=True))
            lines = [line for line, query_id in enumerate(run.query_ids) if query_id in right]
            found.append(self._own_confidences(task, split, grid)[:, lines])
            correct.append([right[run.query_ids[line]] > 0 for line in lines])
        choice = choose_temperature(
            np.concatenate(found, axis=1),
            np.concatenate(correct).astype(bool),
            grid,
            name=self.name,
        )
        logger.info("%s: temperature %g", self.name, choice.temperature)
        return choice


def read_reliability(directory: FilePath) -> Reliability | None:
    """A specialist's reliability at its chosen temperature; None where it was not calibrated."""
    path = pathlib.Path(directory) / _TEMPERATURE
    if not path.exists():
        return None
    saved = read_json(path)
    columns = (np.array(saved[name]) for name in ("count", "confidence", "accuracy"))
    return Reliability(*columns)


def _as_json(choice: TemperatureChoice) -> dict[str, object]:
    table = choice.reliability
    return {
        "temperature": choice.temperature,
        "temperatures": list(choice.temperatures),
        "errors": list(choice.errors),
        "count": table.count.tolist(),
        "confidence": table.confidence.tolist(),
        "accuracy": table.accuracy.tolist(),
    }
