"""How well MUF's confidences predict errors and domains, from a finished run.

    python benchmarks/muf/uncertainty.py PIPELINE_DIR

writes PIPELINE_DIR/uncertainty.csv: for each specialist and task the mean w, and the AUROC of w for
right first passages and for the specialist's own queries.
"""

from __future__ import annotations

import csv
import dataclasses
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
from finished_run import FinishedRun, run_of_arguments
from jaxtyping import Bool, Float

from taser_jax.evaluation.results import per_query_path, read_per_query
from taser_jax.systems.muf.tables import MUF, TEST


def main() -> None:
    """Writes the CSV of a run that has its tables."""
    run = run_of_arguments(__doc__)
    if run is not None:
        text = uncertainty_csv(read_uncertainty(run))
        (run.directory / "uncertainty.csv").write_text(text, encoding="utf-8")


@dataclasses.dataclass(frozen=True)
class SpecialistUncertainty:
    """One specialist's confidence in its results for every task's queries.

    Attributes:
        name: the specialist's name.
        own: tasks that it was trained on.
        confidence: task -> w of each query.
        correct: task -> whether the first passage of its list is right.
    """

    name: str
    own: Sequence[str]
    confidence: Mapping[str, Float[np.ndarray, " queries"]]
    correct: Mapping[str, Bool[np.ndarray, " queries"]]

    def error_auroc(self, task: str) -> float | None:
        """AUROC of w for right first passages of a task; None where all are right or all wrong."""
        return auroc(self.confidence[task], self.correct[task])

    def domain_auroc(self) -> float | None:
        """AUROC of w for own queries against others; None where all tasks are its own, or none."""
        of_tasks = self.confidence.items()
        is_own = np.concatenate([np.full(len(w), task in self.own) for task, w in of_tasks])
        return auroc(np.concatenate(list(self.confidence.values())), is_own)


def auroc(
    confidence: Float[np.ndarray, " queries"], positive: Bool[np.ndarray, " queries"]
) -> float | None:
    """Probability that a positive query is surer than a negative one; equals count one half.

    Example:
        >>> auroc(np.array([0.9, 0.5, 0.5, 0.1]), np.array([True, True, False, False]))
        0.875

    Args:
        confidence: higher is surer.
        positive: right results, or a specialist's own queries.

    Returns:
        The area under the ROC curve; None where all queries are of one class.
    """
    positives, negatives = int(positive.sum()), int((~positive).sum())
    if not positives or not negatives:
        return None
    _, place, count = np.unique(confidence, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(count) - (count - 1) / 2)[place]
    wins = ranks[positive].sum() - positives * (positives + 1) / 2
    return float(wins / (positives * negatives))


def read_uncertainty(run: FinishedRun) -> Iterator[SpecialistUncertainty]:
    """Each specialist's confidences, and whether the first passage of its own list is right."""
    for place, (name, own) in enumerate(run.own.items()):
        confidence, correct = {}, {}
        for task in run.tasks:
            fused = run.confidences(MUF, task)
            w = dict(zip(fused.query_ids, fused.arrays["confidence"][:, place], strict=True))
            judged = read_per_query(per_query_path(run.directory, name, task, TEST))
            confidence[task] = np.array([w[query_id] for query_id in judged.query_ids])
            correct[task] = judged.values["R@1"] > 0
        yield SpecialistUncertainty(name, own, confidence, correct)


def uncertainty_csv(specialists: Iterable[SpecialistUncertainty]) -> str:
    """A line per specialist and task: mean w, accuracy, AUROCs; empty where one is undefined."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    columns = ("specialist", "task", "own", "queries", "mean_w", "accuracy")
    writer.writerow([*columns, "auroc_of_errors", "auroc_of_own_queries"])
    for specialist in specialists:
        domain = _shown(specialist.domain_auroc())
        for task, w in specialist.confidence.items():
            accuracy = _shown(float(np.mean(specialist.correct[task])))
            line = [specialist.name, task, task in specialist.own, len(w), _shown(np.mean(w))]
            writer.writerow([*line, accuracy, _shown(specialist.error_auroc(task)), domain])
    return text.getvalue()


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


if __name__ == "__main__":
    main()
