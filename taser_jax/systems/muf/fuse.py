"""`taser fuse`: fuses specialists' lists, each weighted by its confidence in the query.

`taser ask` answers typed questions with the specialists of a fusion.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from jaxtyping import Float

from taser_jax.commands.ask import Answer
from taser_jax.commands.evaluate import EvaluationConfig
from taser_jax.commands.inputs import check_own_passages, read_task_run, run_path, tasks_with
from taser_jax.commands.search import development_set
from taser_jax.data.collections.store import PassageStore
from taser_jax.devices.hosts import first_host_only, writes
from taser_jax.retrieval import fusion
from taser_jax.retrieval.passages import Hit
from taser_jax.retrieval.runs import FUSED_LISTS, QueryArrays, Run, top_k, write_trec_run
from taser_jax.retriever import Retriever
from taser_jax.storage.artifacts import file_name, path_from, require_equal, split_path, write_json
from taser_jax.storage.errors import ConfigError
from taser_jax.storage.progress import logger, phase
from taser_jax.storage.typed_files import read_typed, to_plain
from taser_jax.systems.muf.oracle import BayesianConfig, oracle_weights
from taser_jax.systems.muf.specialists import VALIDATION, Specialist, Weighing, open_specialists
from taser_jax.training.checkpoints import absolute_path

FUSION_FILE = "fusion.json"


class Domain(enum.Enum):
    """Whether specialists that were trained on a task take part in fusing its queries.

    INCLUDED: they do. LEFT_OUT: they do not, as in DPR-MUF's rows without the domain.
    """

    INCLUDED = "included"
    LEFT_OUT = "left_out"


@dataclasses.dataclass(frozen=True)
class AddedBm25:
    """BM25 added to the fused lists, as fused + α·BM25.

    Attributes:
        runs_dir: its runs of both splits; None adds none.
        config: depth, and candidates for α.
        measure: what α maximises on each task's validation queries.
    """

    runs_dir: str | None = None
    config: fusion.HybridConfig = fusion.HybridConfig(depth=1000)
    measure: str = "R@20"


@dataclasses.dataclass(frozen=True)
class FusionSummary:
    """The result of a fusion.

    Attributes:
        temperatures: specialist -> T; without those whose confidence was not needed.
        alphas: task -> weight of BM25; empty where none was added.
    """

    temperatures: Mapping[str, float]
    alphas: Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class FusionRecord:
    """The content of fusion.json, from which typed questions are answered.

    Specialists' folders are relative to it, so that a pipeline's folder can be moved.
    """

    data_dir: str
    collection: str
    specialists: Mapping[str, str]
    weighing: Weighing
    summary: FusionSummary
    own_passage_tasks: tuple[str, ...] = ()
    members: int | None = None


@writes("{output_dir}", kinds=[])
@first_host_only
def fuse(
    *,
    specialists: Mapping[str, str],
    data_dir: str,
    collection: str,
    output_dir: str,
    lists_dir: str | None = None,
    split: str = "test",
    tasks: Sequence[str] | None = None,
    domain: Domain = Domain.INCLUDED,
    weighing: Weighing = Weighing(),
    evaluation: EvaluationConfig = EvaluationConfig(),
    bm25: AddedBm25 = AddedBm25(),
    members: int | None = None,
    oracle: BayesianConfig | None = None,
    own_passage_tasks: Sequence[str] = (),
    k: int = 100,
    tag: str = "muf",
) -> FusionSummary:
    """Joins specialists' lists: score = Σ w·s / Σ w, absent passages at each list's minimum.

    Each specialist's lists, temperature and confidences are computed once for all fusions, and
    stored below `lists_dir`. `output_dir` receives lists/ (arrays, with the confidences), runs/
    (TREC files), with BM25 also runs_bm25/, and fusion.json.

    Args:
        specialists: name -> folder of a model: embeddings/, index/, with more than one of them
            ensemble/, and for `taser ask` model/.
        data_dir: folder of collections.
        collection: the collection, the same for all.
        output_dir: the fusion's directory.
        lists_dir: where each specialist's results are kept; None is `output_dir`/specialists.
        split: split of the queries.
        tasks: tasks to use; None means all that have the split.
        domain: whether a task's own specialists take part.
        weighing: depth of the lists, confidences, weights.
        evaluation: the criterion for hits, which calibration and BM25's weight rest on.
        bm25: runs of BM25 to add.
        members: how many members of each ensemble weigh, from the first on; None means all.
        oracle: searches for weights that put a relevant passage first, in place of confidences
            (DPR-MUF's Bayesian oracle), from the list of the first specialist that was trained on
            the task; None weighs by confidence.
        own_passage_tasks: tasks whose queries are also passages of the collection: the passage with
            the query's id is excluded from its lists.
        k: results per query in TREC files.
        tag: their last column.

    Returns:
        Temperatures, and weights of BM25.

    Raises:
        ConfigError: no specialist, none left for a task, one without an ensemble to be left out by,
            or calibration on the reported split.
        FingerprintError: an index, ensemble or specialist of another model or collection.
    """
    store = PassageStore.open(data_dir, collection)
    names = tasks_with(store, split=split, tasks=tasks)
    check_own_passages(own_passage_tasks, store)
    _check(specialists, weighing, split=split, bm25=bm25)
    opened = open_specialists(
        specialists,
        lists_dir or pathlib.Path(output_dir) / "specialists",
        store=store,
        weighing=weighing,
        evaluation=evaluation,
        own_passage_tasks=own_passage_tasks,
        first_members=members,
    )
    chosen = {task: _of_task(opened, task, domain) for task in names}
    alphas = {}

    def write(folder: str, task: str, run: Run, *, tag: str) -> None:
        best = Run.of(run.query_ids, top_k(run.rows, run.scores, k))
        path = run_path(pathlib.Path(output_dir) / folder, task, split)
        write_trec_run(path, best, ids=store.ids, tag=tag)

    for task in names:
        queries, weigh = store.queries(task, split), None
        if oracle is not None:
            members_of = (specialist.ensemble for specialist in chosen[task].values())
            trained_on_it = (n for n, own in enumerate(members_of) if own and task in own.tasks)
            weigh = functools.partial(
                oracle_weights,
                queries=queries,
                store=store,
                own=next(trained_on_it, 0),
                config=weighing.fusion,
                search=oracle,
                evaluation=evaluation,
            )
        with phase(f"fuse {task} {split}"):
            arrays = join(chosen[task], task, split, weighing.fusion, weigh=weigh)
        arrays.save(split_path(pathlib.Path(output_dir) / "lists", task, split))
        write("runs", task, arrays.run, tag=tag)
        if bm25.runs_dir is not None:
            development = store.queries(task, VALIDATION)
            dense = join(chosen[task], task, VALIDATION, weighing.fusion).run
            sparse = read_task_run(bm25.runs_dir, development, store)
            settled = fusion.settle(bm25.config, [(dense, sparse)])
            with phase(f"choose alpha for {task}"):
                judged = development_set(
                    dense, sparse, development, store, bm25.measure, evaluation
                )
                alphas[task] = fusion.choose_alpha([judged], k=k, config=settled).alpha
            sparse = read_task_run(bm25.runs_dir, queries, store)
            added = fusion.fuse(arrays.run, sparse, alpha=alphas[task], k=k, config=settled)
            write("runs_bm25", task, added, tag=f"{tag}-bm25")
    weighed = opened if weighing.fusion.weighs(len(opened)) else {}
    temperatures = {name: specialist.temperature for name, specialist in weighed.items()}
    summary = FusionSummary(temperatures, alphas)
    own = tuple(own_passage_tasks)
    folders = {name: path_from(output_dir, folder) for name, folder in specialists.items()}
    place = os.fspath(absolute_path(data_dir))
    record = FusionRecord(place, collection, folders, weighing, summary, own, members)
    write_json(pathlib.Path(output_dir) / FUSION_FILE, to_plain(record))
    return summary


def join(
    specialists: Mapping[str, Specialist],
    task: str,
    split: str,
    config: fusion.FusionConfig,
    *,
    weigh: Callable[[Sequence[Run]], Float[np.ndarray, "queries specialists"]] | None = None,
) -> QueryArrays:
    """Fused lists of a task's queries, with their confidences.

    A single specialist's lists are taken as they are. Neither they nor equal weights need
    ensembles. `weigh` gives weights in place of confidences.
    """
    runs = [specialist.lists(task, split) for specialist in specialists.values()]
    query_ids = runs[0].query_ids
    if weigh is not None:
        confidences = weigh(runs)
    elif config.weighs(len(runs)):
        columns = [specialist.confidence(task, split) for specialist in specialists.values()]
        confidences = np.stack(columns, axis=1)
    else:
        confidences = np.ones((len(query_ids), len(runs)), np.float32)
    if undecided := int((confidences.max(axis=1) <= 0).sum()):
        what = "%s %s: every specialist has confidence 0 in %d queries; their lists weigh the same"
        logger.warning(what, task, split, undecided)
    weights = confidences if weigh is not None else fusion.weights_of(confidences, config)
    [fused] = fusion.fuse_runs(runs, [weights], config)
    arrays = {"rows": fused.rows, "scores": fused.scores, "confidence": confidences}
    prints = {name: specialist.passages.fingerprints for name, specialist in specialists.items()}
    fingerprints = {f"model of {name}": of_model["model"] for name, of_model in prints.items()}
    fingerprints["collection"] = next(iter(prints.values()))["collection"]
    fingerprints["config"] = str(to_plain(config))
    return QueryArrays(FUSED_LISTS, query_ids, arrays, fingerprints, tuple(specialists))


def _of_task(opened: Mapping[str, Specialist], task: str, domain: Domain) -> dict[str, Specialist]:
    """The specialists that take part in fusing a task's queries."""
    if domain is Domain.INCLUDED:
        return dict(opened)
    others = {
        name: specialist
        for name, specialist in opened.items()
        if task not in specialist.members.tasks
    }
    if not others:
        problem = f"every specialist was trained on {task!r}"
        fix = "add specialists of other tasks, or set it to 'included'"
        raise ConfigError(problem, where="fuse.domain", fix=fix)
    return others


def _check(
    specialists: Mapping[str, str], weighing: Weighing, *, split: str, bm25: AddedBm25
) -> None:
    names = {file_name(name) for name in specialists}
    if not specialists or len(names) < len(specialists):
        problem = f"the specialists are {', '.join(specialists) or 'none'}"
        fix = "give at least one, and names that differ in letters or digits"
        raise ConfigError(problem, where="SPECIALISTS", fix=fix)
    calibrates = weighing.fusion.weighs(len(specialists)) and len(weighing.temperatures) > 1
    if split == VALIDATION and (calibrates or bm25.runs_dir is not None):
        problem = f"queries of {split!r} would choose what is then reported on them"
        fix = "fuse another split, or give one of Weighing.temperatures and add no BM25"
        raise ConfigError(problem, where="SPLIT", fix=fix)


def ask_fused(
    questions: Sequence[str], *, fusion_dir: str, task: str | None, query_length: int | None, k: int
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
    record = read_typed(path, FusionRecord, fix="run `taser fuse` first, or correct FUSION_DIR")
    store = PassageStore.open(record.data_dir, record.collection)
    weighing = record.weighing
    opened = open_specialists(
        {name: str(path.parent / folder) for name, folder in record.specialists.items()},
        path.parent / "specialists",
        store=store,
        weighing=weighing,
        evaluation=EvaluationConfig(),
        first_members=record.members,
    )
    temperatures = record.summary.temperatures
    runs, columns = [], []
    ids = [str(line) for line in range(len(questions))]
    for name, specialist in opened.items():
        model_dir = specialist.folder / "model"
        if not model_dir.exists():
            problem = f"specialist {name!r} has no model to encode questions with"
            fix = "put it beside the specialist's embeddings, as the folder model"
            raise ConfigError(problem, where=str(specialist.folder), fix=fix)
        retriever = Retriever.load(str(model_dir), task=task, query_length=query_length)
        require_equal(
            f"model {model_dir}",
            {"model": retriever.model.fingerprint},
            specialist.passages.fingerprints,
            "encode and index the collection with this model, or correct model_dir",
        )
        vectors = retriever.encode_queries(questions)
        result = specialist.search(vectors)
        runs.append(Run.of(ids, result))
        if name in temperatures:
            columns.append(specialist.confidences(vectors, result, [temperatures[name]])[0])
        else:
            columns.append(np.ones(len(ids), np.float32))
    confidences = np.stack(columns, axis=1)
    weights = fusion.weights_of(confidences, weighing.fusion)
    [fused] = fusion.fuse_runs(runs, [weights], dataclasses.replace(weighing.fusion, k=k))
    answers = []
    for rows, scores, of_query in zip(fused.rows, fused.scores, confidences, strict=True):
        results = zip(rows, scores, strict=True)
        hits = [Hit(store[int(row)], float(score)) for row, score in results if row >= 0]
        note = ", ".join(f"{name} {w:.2f}" for name, w in zip(opened, of_query, strict=True))
        answers.append(Answer(hits, note=f"   w: {note}"))
    return answers
