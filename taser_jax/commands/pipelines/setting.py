"""The systems of a comparison, and the settings that all their stages share."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Sequence

from taser_jax.assembly.config import TrainingConfig
from taser_jax.commands.evaluate import EvaluationConfig
from taser_jax.commands.inputs import check_known
from taser_jax.evaluation.significance import SignificanceConfig
from taser_jax.models.dual_encoder import ModelConfig
from taser_jax.retrieval.bm25 import Bm25Config
from taser_jax.retrieval.encode_config import EncodeConfig
from taser_jax.retrieval.hybrid import HybridConfig
from taser_jax.retrieval.index import IndexConfig
from taser_jax.retrieval.mining_options import AnswerContaining, MiningConfig
from taser_jax.training.objective import ObjectiveConfig

BM25 = "BM25"


class FinalNegatives(enum.Enum):
    """Which hard negatives round 2 draws from.

    MINED: P2, the round-1 model's own. JOINED: P1's and P2's lists of a query as one; the paper
    does not say in what proportion it combines them.
    """

    MINED = "mined"
    JOINED = "joined"

    @classmethod
    def of_paper(cls, num_sets: int) -> FinalNegatives:
        """P1 and P2 for one training set, P2 alone for several (TASER, appendix B)."""
        return cls.JOINED if num_sets == 1 else cls.MINED


@dataclasses.dataclass(frozen=True)
class System:
    """One model of a comparison.

    Attributes:
        model: the dual encoder.
        objective: None takes the training's; set it for the regulariser of learned routing.
        learning_rate: None takes the training's.
        tasks: tasks that it is trained on; None means all that the comparison searches.
        train_steps: None takes the training's.
    """

    model: ModelConfig
    objective: ObjectiveConfig | None = None
    learning_rate: float | None = None
    tasks: Sequence[str] | None = None
    train_steps: int | None = None

    def training(self, training: TrainingConfig) -> TrainingConfig:
        """The common training with this system's own settings."""
        if self.objective is not None:
            training = dataclasses.replace(training, objective=self.objective)
        if self.learning_rate is not None:
            optimizer = dataclasses.replace(training.optimizer, learning_rate=self.learning_rate)
            training = dataclasses.replace(training, optimizer=optimizer)
        if self.train_steps is not None:
            loop = dataclasses.replace(training.loop, train_steps=self.train_steps)
            training = dataclasses.replace(training, loop=loop)
        return training


@dataclasses.dataclass(frozen=True)
class Setting:
    """Settings that all stages of one comparison share.

    Attributes:
        output_dir: directory of all outputs.
        data_dir: folder of collections.
        token_store: tokens of the collection.
        training: configuration of all trainings; the same steps in each round.
        first_mining: hard negatives of round 1, from BM25 (P1).
        second_mining: hard negatives of round 2, from each round-1 model's own run (P2).
        final_negatives: negatives of round 2; None follows the paper, by the number of sets.
        index: index of the reported searches; mining searches exactly.
        encode: batches and shards of encoding.
        evaluation: how runs are scored.
        bm25: parameters of BM25.
        hybrid: depth and candidates for α.
        hybrid_measure: measure that α maximises on the development split.
        significance: what the table's rows are tested against; None tests nothing.
        k: results per query.
        tasks: tasks to train on and to search; None means all.
        own_passage_tasks: tasks whose queries are also passages and must not find themselves.
    """

    output_dir: str
    data_dir: str
    token_store: str
    training: TrainingConfig
    first_mining: MiningConfig = MiningConfig(answer_containing=AnswerContaining.DROP)
    second_mining: MiningConfig = MiningConfig(count=100)
    final_negatives: FinalNegatives | None = None
    index: IndexConfig = IndexConfig()
    encode: EncodeConfig = EncodeConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    bm25: Bm25Config = Bm25Config()
    hybrid: HybridConfig = HybridConfig()
    hybrid_measure: str = "R@20"
    significance: SignificanceConfig | None = SignificanceConfig()
    k: int = 100
    tasks: Sequence[str] | None = None
    own_passage_tasks: Sequence[str] = ()

    def check_tasks(self, known: Iterable[str]) -> None:
        """Checks that the tasks that settings name are among those there are.

        Raises:
            ConfigError: naming what is unknown.
        """
        self.evaluation.check_tasks(known)
        check_known(self.own_passage_tasks, known, where="OWN_PASSAGE_TASKS")


def row_name(system: str, number: int, first_negatives: Sequence[str] = (BM25,)) -> str:
    """The table's row of a system's round.

    Example:
        >>> row_name("Shared", 1), row_name("Shared", 2)
        ('Shared (BM25 negatives)', 'Shared (mined negatives)')
        >>> row_name("Shared", 1, ["BM25", "MiniLM, untrained"])
        'Shared (negatives of BM25 and MiniLM, untrained)'
    """
    if number > 1:
        return f"{system} (mined negatives)"
    if tuple(first_negatives) == (BM25,):
        return f"{system} (BM25 negatives)"
    return f"{system} (negatives of {' and '.join(first_negatives)})"
