"""Weights for MUF's specialists that need no ensemble, from the lists of benchmarks/muf/run.sh.

    python benchmarks/muf/other_weights.py OUTPUT_DIR

adds two rows to each finished seed: "Weights by margin", where w is the score of a specialist's
first passage less that of its twentieth, and "Weights by classifier", where w is the probability of
the specialist's domain that a softmax regression on the untrained MiniLM's query embedding gives,
trained on the training queries. γ is chosen on validation queries, by R@1. Then it writes the
tables again (table.py).
"""

from __future__ import annotations

import pathlib
import subprocess
import sys
from collections.abc import Callable

import numpy as np
from jaxtyping import Float, Int
from muf_tasks import COLLECTION, SPECIALISTS

from taser_jax.commands.evaluate import EvaluationConfig, Judge, judge_run
from taser_jax.data.collections.store import PassageStore, QuerySet
from taser_jax.evaluation.metrics import Evaluation
from taser_jax.retrieval.embeddings import QueryEmbeddings
from taser_jax.retrieval.fusion import FusionConfig, fuse_runs, weights_of
from taser_jax.retrieval.runs import LISTS, QueryArrays, Run
from taser_jax.storage.artifacts import file_name, split_path
from taser_jax.systems.muf.tables import write_row

# As runs/muf_mini.gin judges.
EVALUATION = EvaluationConfig(
    judge=Judge.ANSWERS,
    measures=("R@1", "R@20", "R@100"),
    qrels_tasks=("medquad", "fewrel", "cmu_dog"),
)
POWERS = (1.0, 4.0, 16.0)
MARGIN_RANK = 20
# Of the softmax regression: full batches of unit vectors.
STEPS, LEARNING_RATE, DECAY = 500, 20.0, 1e-5

Confidences = Float[np.ndarray, "queries specialists"]
Weigh = Callable[[str, str], Confidences]
"""Task and split -> w of each query."""


def main() -> None:
    """Writes the rows of every finished seed, then the tables."""
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        sys.exit(2)
    root = pathlib.Path(sys.argv[1])
    store = PassageStore.open(root / "data", COLLECTION)
    for directory in sorted(root.glob("seed-*")):
        if not (directory / "domains.csv").exists():
            continue
        seed = Seed(root / "data", directory, store)
        for name, weigh in (
            ("Weights by margin", seed.margins),
            ("Weights by classifier", seed.classifier()),
        ):
            power = max(POWERS, key=lambda power: seed.validation(weigh, power))
            row = {task: seed.evaluate(weigh, power, task, "test") for task in SPECIALISTS}
            write_row(directory, name, row, split="test")
            print(f"{directory.name}: {name} with γ = {power:g}")
    command = [sys.executable, pathlib.Path(__file__).with_name("table.py"), root]
    subprocess.run(command, check=True)


class Seed:
    """The specialists of a finished seed.

    Args:
        data_dir: folder of collections.
        directory: the seed's.
        store: the collection.
    """

    def __init__(
        self, data_dir: pathlib.Path, directory: pathlib.Path, store: PassageStore
    ) -> None:
        self._data_dir, self._directory, self._store = data_dir, directory, store

    def runs(self, task: str, split: str) -> list[Run]:
        """A list per specialist."""
        roots = [
            self._directory / "specialists" / file_name(specialist)
            for specialist in SPECIALISTS.values()
        ]
        return [QueryArrays.open(split_path(r / "lists", task, split), LISTS).run for r in roots]

    def margins(self, task: str, split: str) -> Confidences:
        """Score of each list's first passage less that of its twentieth, at most 1."""
        scores = [run.scores for run in self.runs(task, split)]
        margins = [of_list[:, 0] - of_list[:, MARGIN_RANK - 1] for of_list in scores]
        return np.clip(np.stack(margins, axis=1), 0.0, 1.0)

    def classifier(self) -> Weigh:
        """Probabilities of the domains, of a softmax regression on training queries."""
        vectors = [self._vectors(task, "train") for task in SPECIALISTS]
        labels = np.repeat(np.arange(len(vectors)), [len(some) for some in vectors])
        weights = softmax_regression(np.concatenate(vectors), labels)
        return lambda task, split: softmax(self._vectors(task, split) @ weights)

    def validation(self, weigh: Weigh, power: float) -> float:
        """R@1 on validation queries, mean over tasks."""
        rows = [self.evaluate(weigh, power, task, "validation") for task in SPECIALISTS]
        return float(np.mean([row.values["R@1"].mean() for row in rows]))

    def evaluate(self, weigh: Weigh, power: float, task: str, split: str) -> Evaluation:
        """Values by query of the fusion with these weights."""
        config = FusionConfig(power=power)
        weights = weights_of(weigh(task, split), config)
        [fused] = fuse_runs(self.runs(task, split), [weights], config)
        queries = QuerySet.open(self._data_dir, COLLECTION, task, split)
        return judge_run(fused, queries, self._store, EVALUATION)

    def _vectors(self, task: str, split: str) -> Float[np.ndarray, "queries dim"]:
        directory = self._directory / "minilm-untrained" / "embeddings"
        queries = QueryEmbeddings.of_split(directory, task, split)
        rows = np.asarray(queries[:], np.float64)
        return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def softmax_regression(
    vectors: Float[np.ndarray, "queries dim"], labels: Int[np.ndarray, " queries"]
) -> Float[np.ndarray, "dim classes"]:
    """Weights of the log-loss with a small decay, by gradient descent."""
    expected = np.eye(labels.max() + 1)[labels]
    weights = np.zeros((vectors.shape[1], expected.shape[1]))
    for _ in range(STEPS):
        errors = softmax(vectors @ weights) - expected
        weights -= LEARNING_RATE * (vectors.T @ errors / len(vectors) + DECAY * weights)
    return weights


def softmax(logits: Float[np.ndarray, "queries classes"]) -> Float[np.ndarray, "queries classes"]:
    """Probabilities along the second axis."""
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


if __name__ == "__main__":
    main()
