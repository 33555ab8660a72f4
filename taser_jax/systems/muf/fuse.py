"""`taser fuse`: fuses specialists' lists, each weighted by its confidence in the query."""

from __future__ import annotations

import dataclasses
import enum
import functools
import pathlib
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from jaxtyping import Float

from taser_jax.commands.evaluate import EvaluationConfig
from taser_jax.commands.hybrid import development_set
from taser_jax.commands.inputs import (
    PassageHeads,
    check_known,
    read_task_run,
    run_path,
    tasks_with,
)
from taser_jax.data.collections.store import PassageStore, QuerySet, list_tasks
from taser_jax.devices.hosts import first_host_only, writes
from taser_jax.retrieval import hybrid
from taser_jax.retrieval.fusion import (
    Absent,
    FusionConfig,
    Weighting,
    fuse_runs,
    weights_of,
)
from taser_jax.retrieval.hybrid import HybridConfig, choose_alpha, settle
from taser_jax.retrieval.query_arrays import FUSED_LISTS, QueryArrays
from taser_jax.retrieval.runs import Run, top_k, write_trec_run
from taser_jax.storage.artifacts import FilePath, file_name, split_path, write_json
from taser_jax.storage.errors import ConfigError
from taser_jax.storage.progress import logger, phase
from taser_jax.storage.settings import to_plain
from taser_jax.systems.muf.bayesian import BayesianConfig
from taser_jax.systems.muf.confidence import ConfidenceConfig
from taser_jax.systems.muf.oracle import oracle_weights
from taser_jax.systems.muf.specialists import CalibrationConfig, OpenSpecialist, Specialist

FUSION_FILE = "fusion.json"


class Domain(enum.Enum):
    """Whether specialists that were trained on a task take part in fusing its queries.

    INCLUDED: they do. LEFT_OUT: they do not, as in DPR-MUF's rows without the domain.
    """

    INCLUDED = "included"
    LEFT_OUT = "left_out"


@dataclasses.dataclass(frozen=True)
class FusionSummary:
    """The result of a fusion.

    Attributes:
        temperatures: specialist -> T; without those whose confidence was not needed.
        alphas: task -> weight of BM25; empty where none was added.
        undecided: queries for which every specialist's confidence is 0.
    """

    temperatures: Mapping[str, float]
    alphas: Mapping[str, float]
    undecided: int


@writes("{output_dir}")
@first_host_only
def fuse(
    *,
    specialists: Mapping[str, Specialist],
    data_dir: str,
    collection: str,
    output_dir: str,
    lists_dir: str | None = None,
    split: str = "test",
    development_split: str = "validation",
    tasks: Sequence[str] | None = None,
    domain: Domain = Domain.INCLUDED,
    config: FusionConfig = FusionConfig(),
    confidence: ConfidenceConfig = ConfidenceConfig(),
    calibration: CalibrationConfig = CalibrationConfig(),
    evaluation: EvaluationConfig = EvaluationConfig(),
    sparse_dir: str | None = None,
    with_bm25: HybridConfig = HybridConfig(depth=1000),
    measure: str = "R@20",
    oracle: Mapping[str, str] | None = None,
    search: BayesianConfig = BayesianConfig(),
    own_passage_tasks: Sequence[str] = (),
    k: int = 100,
    tag: str = "muf",
) -> FusionSummary:
    """Joins specialists' lists: score = Σ w·s / Σ w, absent passages at each list's minimum.

    Each specialist's lists, temperature and confidences are computed once for all fusions, and
    stored below `lists_dir`. `output_dir` receives lists/ (arrays, with the confidences), runs/
    (TREC files), with BM25 also runs_bm25/, and fusion.json.

    Args:
        specialists: name -> model.
        data_dir: folder of collections.
        collection: the collection, the same for all.
        output_dir: the fusion's directory.
        lists_dir: where each specialist's results are kept; None is `output_dir`/specialists.
        split: split of the queries.
        development_split: split on which the weight of BM25 is chosen, task by task.
        tasks: tasks to use; None means all that have the split.
        domain: whether a task's own specialists take part.
        config: depth, weighting, absent passages.
        confidence: how confidences are computed.
        calibration: how temperatures are chosen.
        evaluation: the criterion for hits, which calibration and BM25's weight rest on.
        sparse_dir: runs of BM25 on both splits; None adds none.
        with_bm25: depth, candidates for α.
        measure: what α maximises.
        oracle: task -> its specialist: weights are searched for, from that specialist's list on, to
            put a relevant passage first (DPR-MUF's Bayesian oracle); None weights by confidence.
        search: the oracle's Bayesian optimisation.
        own_passage_tasks: tasks whose queries are also passages of the collection: the passage with
            the query's id is excluded from its lists.
        k: results per query in TREC files.
        tag: the TREC files' last column.

    Returns:
        Temperatures, weights of BM25, and the number of undecided queries.

    Raises:
        ConfigError: no specialist, none left for a task, or calibration on the reported split.
        FingerprintError: an index, ensemble or specialist of another model or collection.
    """
    store = PassageStore.open(data_dir, collection)
    names = tasks_with(data_dir, collection, split=split, tasks=tasks)
    check_known(own_passage_tasks, list_tasks(data_dir, collection), where="OWN_PASSAGE_TASKS")
    root = pathlib.Path(lists_dir or pathlib.Path(output_dir) / "specialists")
    _check(specialists, config, calibration, split=split, development_split=development_split)
    opened = open_specialists(
        specialists,
        root,
        data_dir=data_dir,
        store=store,
        config=config,
        confidence=confidence,
        calibration=calibration,
        evaluation=evaluation,
        own_passage_tasks=own_passage_tasks,
    )
    chosen = {task: _of_task(opened, task, domain) for task in names}
    undecided, alphas = 0, {}
    heads = PassageHeads(store)
    for task in names:
        with phase(f"fuse {task} {split}"):
            weigh = None
            if oracle is not None:
                weigh = functools.partial(
                    oracle_weights,
                    queries=QuerySet.open(data_dir, collection, task, split),
                    store=store,
                    own=list(chosen[task]).index(oracle[task]),
                    config=config,
                    search=search,
                    evaluation=evaluation,
                )
            arrays, count = join(chosen[task], task, split, config, weigh=weigh)
        undecided += count
        arrays.save(split_path(pathlib.Path(output_dir) / "lists", task, split))
        _write(output_dir, "runs", task, split, arrays.run, k, store, tag)
        if sparse_dir is not None:
            developed, _ = join(chosen[task], task, development_split, config)
            queries = QuerySet.open(data_dir, collection, task, development_split)
            sparse = read_task_run(sparse_dir, queries, store)
            with phase(f"choose alpha for {task}"):
                development = development_set(
                    developed.run, sparse, queries, heads, measure=measure, evaluation=evaluation
                )
                settled = settle(with_bm25, [(developed.run, sparse)])
                alphas[task] = choose_alpha([development], k=k, config=settled).alpha
            queries = QuerySet.open(data_dir, collection, task, split)
            sparse = read_task_run(sparse_dir, queries, store)
            joined = hybrid.fuse(arrays.run, sparse, alpha=alphas[task], k=k, config=settled)
            _write(output_dir, "runs_bm25", task, split, joined, k, store, f"{tag}-bm25")
    if undecided:
        logger.warning(
            "%d queries: every specialist has confidence 0; their lists get equal weights",
            undecided,
        )
    weighs = config.weighting is not Weighting.EQUAL and len(opened) > 1
    temperatures = {name: one.temperature for name, one in opened.items()} if weighs else {}
    summary = FusionSummary(temperatures, alphas, undecided)
    record = {
        "data_dir": data_dir,
        "collection": collection,
        "specialists": specialists,
        "config": config,
        "confidence": confidence,
        "summary": summary,
    }
    write_json(pathlib.Path(output_dir) / FUSION_FILE, to_plain(record))
    return summary


def open_specialists(
    specialists: Mapping[str, Specialist],
    root: FilePath,
    *,
    data_dir: str,
    store: PassageStore,
    config: FusionConfig,
    confidence: ConfidenceConfig,
    calibration: CalibrationConfig,
    evaluation: EvaluationConfig,
    own_passage_tasks: Sequence[str] = (),
) -> dict[str, OpenSpecialist]:
    """Opens specialists, each with a folder of its own below `root` for its results."""
    return {
        name: OpenSpecialist(
            name,
            specialist,
            pathlib.Path(root) / file_name(name),
            data_dir=data_dir,
            store=store,
            depth=max(config.depth, confidence.k),
            confidence=confidence,
            calibration=calibration,
            evaluation=evaluation,
            own_passage_tasks=own_passage_tasks,
        )
        for name, specialist in specialists.items()
    }


def join(
    specialists: Mapping[str, OpenSpecialist],
    task: str,
    split: str,
    config: FusionConfig,
    *,
    weigh: Callable[[Sequence[Run]], Float[np.ndarray, "queries specialists"]] | None = None,
) -> tuple[QueryArrays, int]:
    """Fused lists of a task's queries with their confidences, and the number of undecided queries.

    A single specialist's lists are taken as they are. Neither they nor equal weights need
    ensembles. `weigh` gives weights in place of confidences.
    """
    runs = [one.lists(task, split) for one in specialists.values()]
    query_ids = runs[0].query_ids
    if weigh is not None:
        confidences = weigh(runs)
    elif config.weighting is Weighting.EQUAL or len(runs) == 1:
        confidences = np.ones((len(query_ids), len(runs)), np.float32)
    else:
        columns = [one.confidence(task, split) for one in specialists.values()]
        confidences = np.stack(columns, axis=1)
    weights = weights_of(confidences, config)
    exact = []
    if config.absent is Absent.EXACT:
        exact = [one.exact_scores(one.vectors(task, split)) for one in specialists.values()]
    fused = fuse_runs(runs, weights.values, config, exact=exact)
    arrays = {"rows": fused.rows, "scores": fused.scores, "confidence": confidences}
    fingerprints = {
        f"model of {name}": one.passages.fingerprints["model"] for name, one in specialists.items()
    }
    first = next(iter(specialists.values())).passages.fingerprints
    fingerprints |= {"collection": first["collection"], "config": str(to_plain(config))}
    fused_lists = QueryArrays(FUSED_LISTS, query_ids, arrays, fingerprints, tuple(specialists))
    return fused_lists, weights.undecided


def _of_task(
    opened: Mapping[str, OpenSpecialist], task: str, domain: Domain
) -> dict[str, OpenSpecialist]:
    """The specialists that take part in fusing a task's queries."""
    if domain is Domain.INCLUDED:
        return dict(opened)
    left = {
        name: one
        for name, one in opened.items()
        if one.ensemble is None or task not in one.ensemble.tasks
    }
    if not left:
        raise ConfigError(
            f"every specialist was trained on {task!r}",
            where="fuse.domain",
            expected="at least one that was not",
            fix="add specialists of other tasks, or set domain to 'included'",
        )
    return left


def _check(
    specialists: Mapping[str, Specialist],
    config: FusionConfig,
    calibration: CalibrationConfig,
    *,
    split: str,
    development_split: str,
) -> None:
    names = {file_name(name) for name in specialists}
    if not specialists or len(names) < len(specialists):
        raise ConfigError(
            f"specialists {', '.join(specialists) or 'none'}",
            where="SPECIALISTS",
            expected="at least one, with names that differ in letters or digits",
        )
    calibrates = (
        config.weighting is not Weighting.EQUAL
        and len(specialists) > 1
        and any(one.temperature is None for one in specialists.values())
    )
    if (calibrates and calibration.split == split) or development_split == split:
        raise ConfigError(
            f"queries of {split!r} would choose what is then reported on them",
            where="CalibrationConfig.split and DEVELOPMENT_SPLIT",
            expected="another split than SPLIT",
            fix="calibrate on 'validation', or give each specialist a temperature",
        )


def _write(
    output_dir: str,
    folder: str,
    task: str,
    split: str,
    run: Run,
    k: int,
    store: PassageStore,
    tag: str,
) -> None:
    """Writes the best k of each query as a TREC file."""
    path = run_path(pathlib.Path(output_dir) / folder, task, split)
    best = Run.of(run.query_ids, top_k(run.rows, run.scores, k))
    write_trec_run(path, best, ids=store.ids, tag=tag)


CONFIGURABLES = (
    BayesianConfig,
    CalibrationConfig,
    ConfidenceConfig,
    EvaluationConfig,
    FusionConfig,
    HybridConfig,
    Specialist,
)
