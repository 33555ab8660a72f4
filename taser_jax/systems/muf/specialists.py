"""A specialist's part in fusion: its lists, its temperature and its confidences."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar

import numpy as np
from jaxtyping import Float, Float32
from msgspec import Meta

from taser_jax.commands.evaluate import EvaluationConfig, Judge, judge_run
from taser_jax.commands.search import best_run
from taser_jax.data.collections.store import PassageStore, QuerySet
from taser_jax.retrieval import runs
from taser_jax.retrieval.embeddings import Embeddings, QueryEmbeddings
from taser_jax.retrieval.fusion import FusionConfig
from taser_jax.retrieval.index import open_index
from taser_jax.storage import artifacts
from taser_jax.storage.errors import ConfigError
from taser_jax.storage.progress import logger, phase
from taser_jax.storage.typed_files import Checked, Positive, PositiveNumber
from taser_jax.systems.muf.confidence import (
    TEMPERATURES,
    TemperatureChoice,
    choose_temperature,
    query_confidence,
)
from taser_jax.systems.muf.ensemble_files import Ensemble

# The split whose queries choose temperatures.
VALIDATION = "validation"
_TEMPERATURE = "temperature.json"


@dataclasses.dataclass(frozen=True)
class Weighing(Checked):
    """How specialists' lists are weighed and joined.

    Attributes:
        fusion: depth of the lists, and how confidences become weights.
        k: passages of a specialist's own list that its members' softmaxes are over.
        temperatures: candidates for T, of which each specialist's own validation queries choose;
            scores of another scale than BERT-base's need others. One alone is T for all.
    """

    RANGE_FIX: ClassVar[str] = (
        "temperatures are one or more positive numbers; the paper has .001, .002, ..., .010"
    )

    fusion: FusionConfig = FusionConfig()
    k: Positive = 1000
    temperatures: Annotated[tuple[PositiveNumber, ...], Meta(min_length=1)] = TEMPERATURES

    @property
    def depth(self) -> int:
        """Passages that a specialist's list needs."""
        return max(self.fusion.depth, self.k)


@dataclasses.dataclass
class Specialist:
    """A specialist over one collection; results are kept in `directory` and reused.

        <directory>/lists/<task>.<split>/         ranked lists
        <directory>/confidence/<hash>/<task>.<split>/    w of each query; the hash is of members,
                                                         temperature and k
        <directory>/temperature.json              the chosen one, with the curve

    Attributes:
        name: for messages.
        folder: has its embeddings/ and index/; ensemble/, unless its lists are never weighted; for
            `taser ask` also model/.
        directory: where its results are stored.
        store: the collection.
        weighing: depth of its lists, how its confidences are computed and its temperature chosen.
        evaluation: the criterion for hits: whether the first passage of a list is relevant.
        own_passage_tasks: tasks whose queries are also passages, which their lists leave out.
        first_members: how many of its ensemble's members are used, from the first on; None means
            all.

    Raises:
        FingerprintError: index, embeddings or ensemble are of another model or collection.
    """

    name: str
    folder: pathlib.Path
    directory: pathlib.Path
    store: PassageStore
    weighing: Weighing
    evaluation: EvaluationConfig
    own_passage_tasks: Sequence[str] = ()
    first_members: int | None = None

    def __post_init__(self) -> None:
        of_store = {"collection": self.store.fingerprint}
        self.passages = Embeddings(self._embeddings_dir, fingerprints=of_store)
        # Of a pipeline's folder, exact/ is the index.
        exact = self.folder / "exact"
        index_dir = exact if exact.exists() else self.folder / "index"
        self._searcher = open_index(index_dir, fingerprints=of_store)
        artifacts.require_equal(
            f"index {index_dir}",
            self._searcher.fingerprints,
            self.passages.fingerprints,
            "search this model's embeddings with an INDEX_DIR of their own, or correct it",
        )
        built = artifacts.read_json(index_dir / artifacts.METADATA)
        how = {name: built[name] for name in ("config", "dim") if name in built}
        # Exact search of whole embeddings goes without saying.
        self._index = f", {built['kind']} of {how}" if how else ""
        self.ensemble: Ensemble | None = None
        if (self.folder / "ensemble").exists():
            prints = self.passages.fingerprints
            ensemble = Ensemble.open(self.folder / "ensemble", fingerprints=prints)
            count = self.first_members
            self.ensemble = ensemble if count is None else ensemble.first(count)

    @property
    def _embeddings_dir(self) -> pathlib.Path:
        return self.folder / "embeddings"

    def queries(self, task: str, split: str) -> QueryEmbeddings:
        """Its embeddings of a task's queries."""
        return QueryEmbeddings.of_split(
            self._embeddings_dir, task, split, fingerprints=self.passages.fingerprints
        )

    def vectors(self, task: str, split: str) -> Float32[np.ndarray, "queries dim"]:
        """The same embeddings, in memory."""
        queries = self.queries(task, split)
        return np.asarray(queries[:], np.float32)

    def lists(self, task: str, split: str) -> runs.Run:
        """Its list for each query; searched once."""
        queries = self.queries(task, split)

        def search() -> dict[str, np.ndarray]:
            result = self.search(self.vectors(task, split), more=task in self.own_passage_tasks)
            ids, depth = queries.query_ids, self.weighing.depth
            run = best_run(result, ids, self.store, task, depth, self.own_passage_tasks)
            return {"rows": run.rows, "scores": run.scores}

        return self._computed_once(runs.LISTS, "lists", task, split, {}, search).run

    def search(
        self, vectors: Float[np.ndarray, "queries dim"], *, more: int = 0
    ) -> runs.SearchResult:
        """Its list for each query embedding, with `more` further results."""
        return self._searcher.search(vectors, self.weighing.depth + more)

    def confidences(
        self,
        vectors: Float[np.ndarray, "queries dim"],
        result: runs.SearchResult,
        temperatures: Sequence[float],
    ) -> Float32[np.ndarray, "temperatures queries"]:
        """Its confidence in these lists, at every temperature."""
        return query_confidence(
            self.members.embed,
            vectors,
            self.passages.take,
            result,
            temperatures=temperatures,
            k=self.weighing.k,
        )

    def confidence(self, task: str, split: str) -> Float32[np.ndarray, " queries"]:
        """Its confidence w in each query's list; computed once."""
        settings = {
            "ensemble": self.members.fingerprints["ensemble"],
            "temperature": str(self.temperature),
            "confidence": f"k {self.weighing.k}",
        }
        folder = f"confidence/{artifacts.fingerprint_json(settings)[:8]}"

        def confidences() -> dict[str, np.ndarray]:
            return {"confidence": self._own_confidences(task, split, (self.temperature,))[0]}

        saved = self._computed_once(runs.CONFIDENCE, folder, task, split, settings, confidences)
        return saved.arrays["confidence"]

    @functools.cached_property
    def temperature(self) -> float:
        """T: the only one, or the candidate with the lowest ECE on its own validation queries.

        Raises:
            ConfigError: several candidates, and none of its tasks has validation queries.
        """
        if len(self.weighing.temperatures) == 1:
            return self.weighing.temperatures[0]
        members = self.first_members
        path = self.directory / (f"temperature-{members}.json" if members else _TEMPERATURE)
        judged = dict.fromkeys(map(self._judged, self.members.tasks))
        queries = [own.fingerprint for own in self._validation]
        basis = {
            "ensemble": self.members.fingerprints["ensemble"],
            "queries": artifacts.fingerprint_json(queries),
            "grid": str(self.weighing.temperatures),
            "judge": f"{', '.join(judged)}, k {self.weighing.k}{self._index}",
        }
        if not path.exists():
            with phase(f"{self.name}: calibration"):
                choice = self._calibrate()
            curve = dict(vars(choice))
            table = vars(curve.pop("reliability"))
            by_bin = {name: values.tolist() for name, values in table.items()}
            artifacts.write_json(path, {**curve, **by_bin, "basis": basis})
        saved = artifacts.read_json(path)
        artifacts.require_equal(
            str(path), saved["basis"], basis, f"delete {path} to calibrate again"
        )
        return float(saved["temperature"])

    @property
    def members(self) -> Ensemble:
        """Its ensemble, which weighs its lists and knows what it was trained on.

        Raises:
            ConfigError: it has none.
        """
        if self.ensemble is None:
            problem = f"specialist {self.name!r} has no ensemble that weighs its lists"
            fix = (
                "run `taser ensemble` for it; only weighting='equal' with its own domain needs none"
            )
            raise ConfigError(problem, where="SPECIALISTS", fix=fix)
        return self.ensemble

    def _computed_once(
        self,
        kind: str,
        folder: str,
        task: str,
        split: str,
        settings: Mapping[str, str],
        compute: Callable[[], dict[str, np.ndarray]],
    ) -> runs.QueryArrays:
        """Arrays of a task's queries, from `directory` where they are there already."""
        queries = self.queries(task, split)
        # One that all have, since a name that only one side has is not compared.
        depth = f"{self.weighing.depth}{self._index}"
        if task in self.own_passage_tasks:
            depth += ", own passages left out"
        fingerprints = {**queries.fingerprints, "depth": depth, **settings}
        directory = artifacts.split_path(self.directory / folder, task, split)
        if not runs.is_finished(directory):
            with phase(f"{self.name}: {kind} of {task} {split}"):
                arrays = compute()
            runs.QueryArrays(kind, queries.query_ids, arrays, fingerprints).save(directory)
        return runs.QueryArrays.open(directory, kind, fingerprints=fingerprints)

    def _judged(self, task: str) -> str:
        """What decides which of a task's validation queries are right."""
        judge = self.evaluation.judge_of(task)
        is_regex = task in self.evaluation.regex_tasks
        regex = " by regex" if is_regex and judge is Judge.ANSWERS else ""
        own = " without own passages" if task in self.own_passage_tasks else ""
        return f"{judge.value}{regex}{own}"

    def _own_confidences(
        self, task: str, split: str, temperatures: Sequence[float]
    ) -> Float32[np.ndarray, "temperatures queries"]:
        vectors = self.vectors(task, split)
        return self.confidences(vectors, self.lists(task, split).result, temperatures)

    @functools.cached_property
    def _validation(self) -> list[QuerySet]:
        """The validation queries of the tasks that the specialist was trained on."""
        splits = self.store.tasks
        tasks = [task for task in self.members.tasks if VALIDATION in splits.get(task, ())]
        if not tasks:
            problem = f"there are no {VALIDATION} queries of {', '.join(self.members.tasks)}"
            fix = "give one temperature in Weighing.temperatures, or prepare that split"
            raise ConfigError(problem, where=f"calibration of {self.name}", fix=fix)
        return [self.store.queries(task, VALIDATION) for task in tasks]

    def _calibrate(self) -> TemperatureChoice:
        """The temperature with the lowest ECE over the validation queries."""
        grid = self.weighing.temperatures
        judged = dataclasses.replace(self.evaluation, measures=("R@1",), page_only_tasks=())
        confidences, correct = [], []
        for queries in self._validation:
            run = self.lists(queries.task, VALIDATION)
            evaluation = judge_run(run, queries, self.store, judged)
            right = dict(zip(evaluation.query_ids, evaluation.values["R@1"], strict=True))
            lines = [line for line, query_id in enumerate(run.query_ids) if query_id in right]
            confidences.append(self._own_confidences(queries.task, VALIDATION, grid)[:, lines])
            correct.append([right[run.query_ids[line]] > 0 for line in lines])
        is_correct = np.concatenate(correct).astype(bool)
        choice = choose_temperature(
            np.concatenate(confidences, axis=1), is_correct, grid, name=self.name
        )
        logger.info("%s: temperature %g", self.name, choice.temperature)
        return choice


def open_specialists(
    specialists: Mapping[str, str], root: artifacts.FilePath, **shared: Any
) -> dict[str, Specialist]:
    """Opens specialists, each with a folder of its own below `root` for its results.

    Args:
        specialists: name -> its folder.
        root: the folder of folders.
        shared: further attributes of `Specialist`, the same for all.
    """
    return {
        name: Specialist(
            name, pathlib.Path(folder), pathlib.Path(root, artifacts.file_name(name)), **shared
        )
        for name, folder in specialists.items()
    }
