"""What pipelines share: their systems and settings, and the stages around a training."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import types
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from etils import epath

from taser_jax.assembly.data import TrainingData
from taser_jax.assembly.model_directory import read_facts
from taser_jax.assembly.plans import TrainingConfig
from taser_jax.commands.encode import encode
from taser_jax.commands.evaluate import EvaluationConfig, Judge, evaluate
from taser_jax.commands.import_model import import_model
from taser_jax.commands.inputs import check_own_passages
from taser_jax.commands.mine import mine
from taser_jax.commands.pipelines.stages import Stages
from taser_jax.commands.search import bm25, index, search
from taser_jax.commands.train import TrainSummary, train
from taser_jax.data.collections.store import PassageStore
from taser_jax.data.seqio_tasks.tokenize import INPUTS
from taser_jax.data.token_store.store import TokenStore
from taser_jax.devices.hosts import writes
from taser_jax.evaluation.kilt import is_page_measure
from taser_jax.evaluation.metrics import check_measures
from taser_jax.evaluation.significance import SignificanceConfig
from taser_jax.models.dual_encoder import ModelConfig
from taser_jax.retrieval.bm25 import Bm25Config
from taser_jax.retrieval.embeddings import encoded_splits
from taser_jax.retrieval.encoding import EncodeConfig
from taser_jax.retrieval.fusion import HybridConfig
from taser_jax.retrieval.index import IndexConfig
from taser_jax.retrieval.mining import AnswerContaining, MiningConfig
from taser_jax.storage.artifacts import file_name, read_json, require_equal
from taser_jax.storage.errors import ConfigError, FingerprintError
from taser_jax.training.objective import ObjectiveConfig

BM25 = "BM25"
DEVELOPMENT = "validation"


@dataclasses.dataclass(frozen=True)
class System:
    """One model of a comparison.

    Attributes:
        model: the dual encoder.
        objective: None takes the training's; set it for the regulariser of learned routing.
        tasks: tasks that it is trained on; None means all that the comparison searches.
        train_steps: None takes the training's.
    """

    model: ModelConfig
    objective: ObjectiveConfig | None = None
    tasks: Sequence[str] | None = None
    train_steps: int | None = None

    def training(self, training: TrainingConfig) -> TrainingConfig:
        """The common training with this system's own settings."""
        if self.objective is not None:
            training = dataclasses.replace(training, objective=self.objective)
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
        second_mining: hard negatives of round 2, from each round-1 model's own run (P2). A single
            training set also keeps P1's (TASER, appendix B), joined per query: the paper does not
            say in what proportion it combines them.
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

    def open_tokens(self, splits: Sequence[str] = ("train", "test")) -> TokenStore:
        """The token store, of this very collection, with the tasks that settings name.

        Args:
            splits: splits of which there must be queries.

        Raises:
            ConfigError: no queries of a split, or a setting names an unknown task, one whose
                queries are no passages, or a measure that does not judge one.
            FingerprintError: the collection's passages are other ones than those tokenised, or the
                queries of a task are.
        """
        store = TokenStore.open(self.token_store)
        collection = store.metadata.collection
        passages = PassageStore.open(self.data_dir, collection)
        require_equal(
            f"token store {store.directory}",
            {"collection": store.metadata.collection_fingerprint},
            {"collection": passages.fingerprint},
            "run `taser tokenize` again, or correct DATA_DIR",
        )
        for split in splits:
            if not any(split in there for there in store.tasks.values()):
                problem = f"the token store has no {split} queries"
                fix = "run `taser tokenize` for tasks that have some (MIXTURE_OR_TASK_NAME)"
                raise ConfigError(problem, where=str(store.directory), fix=fix)
        made_from = read_json(store.directory / INPUTS, absent={}).get("queries", {})
        tokenized = {prints[-1] for prints in made_from.values()}
        for entry in store.metadata.queries if tokenized else ():
            task, split = entry.task, entry.split
            is_used = task in (self.tasks or store.tasks) and split in passages.tasks.get(task, ())
            if is_used and passages.queries(task, split).fingerprint not in tokenized:
                problem = f"{split} queries of {task!r} or their positives have changed since then"
                fix = "run `taser tokenize` again, with --gin.tokenize.replace=True"
                raise FingerprintError(problem, where=str(store.directory), fix=fix)
        self.evaluation.check_tasks(store.tasks)
        check_own_passages(self.own_passage_tasks, passages)
        for task in () if is_page_measure(self.hybrid_measure) else self.tasks or store.tasks:
            by_answers = self.evaluation.judge_of(task) is Judge.ANSWERS
            where = "Setting.hybrid_measure"
            check_measures([self.hybrid_measure], by_answers=by_answers, where=where)
        return store


def row_name(system: str, number: int, first_negatives: Sequence[str] = (BM25,)) -> str:
    """The table's row of a system's round.

    Example:
        >>> row_name("Shared", 1), row_name("Shared", 2)
        ('Shared (BM25 negatives)', 'Shared (mined negatives)')
        >>> row_name("Shared", 1, ["BM25", "MiniLM, untrained"])
        'Shared (negatives of BM25 and MiniLM, untrained)'
        >>> row_name("Shared", 1, [])
        'Shared (random negatives)'
    """
    if number > 1:
        return f"{system} (mined negatives)"
    if tuple(first_negatives) == (BM25,):
        return f"{system} (BM25 negatives)"
    if not first_negatives:
        return f"{system} (random negatives)"
    return f"{system} (negatives of {' and '.join(first_negatives)})"


class RetrievalStages:
    """Stages of one pipeline directory, in terms of the commands they run.

    A model has a label, which is its folder and the prefix of its stages.

    Attributes:
        setting: what all stages share.
        root: the directory.
        stages: those that are finished there.
        rows: names of the table's rows, in the order in which they were evaluated.
    """

    def __init__(self, setting: Setting) -> None:
        self.setting, self.root = setting, pathlib.Path(setting.output_dir)
        self.stages = Stages(setting.output_dir)
        self.rows: list[str] = []

    @functools.cached_property
    def store(self) -> TokenStore:
        """The token store."""
        return TokenStore.open(self.setting.token_store)

    @property
    def common(self) -> dict[str, object]:
        """Arguments of all commands that read the collection."""
        setting, collection = self.setting, self.store.metadata.collection
        return {"data_dir": setting.data_dir, "collection": collection, "tasks": setting.tasks}

    @property
    def _searched(self) -> dict[str, object]:
        own_passage_tasks = list(self.setting.own_passage_tasks)
        return {**self.common, "k": self.setting.k, "own_passage_tasks": own_passage_tasks}

    def bm25(self, splits: Sequence[str]) -> None:
        """BM25's runs, negatives of training queries, and row."""
        self.stages.run(
            "bm25-search",
            _bm25_runs,
            output_dir=self.root / "bm25" / "runs",
            index_dir=self.root / "bm25" / "index",
            splits=splits,
            config=self.setting.bm25,
            **self._searched,
        )
        if "train" in splits:
            self.mine("bm25", self.setting.first_mining)
        self.evaluate(BM25, "bm25", parameters=None)

    def import_model(self, label: str, model: ModelConfig) -> int:
        """Imports the pretrained weights as a model; returns its number of parameters."""
        pretrained, tokens = self.setting.training.pretrained, self.store.metadata
        assert pretrained is not None
        return self.stages.run(
            f"{label}-import",
            import_model,
            model_dir=self.root / label / "model",
            model=model,
            pretrained=pretrained,
            vocabulary=str(self.store.vocabulary_directory),
            feature_lengths={"query": tokens.query_length, "passage": tokens.passage_length},
        )

    def train(
        self,
        label: str,
        model: ModelConfig,
        training: TrainingConfig,
        *,
        model_dir: pathlib.Path | None = None,
        negatives_dirs: Sequence[pathlib.Path] = (),
        tasks: Sequence[str] | None = None,
        initial_checkpoint: epath.Path | None = None,
        **inputs: Any,
    ) -> TrainSummary:
        """Trains a model on the tasks, or on all that are searched.

        `inputs` are further fields of `TrainingData`.
        """
        data = TrainingData(
            inputs.pop("token_store", self.setting.token_store),
            tasks=tasks or self.setting.tasks,
            negatives_dirs=list(map(str, negatives_dirs)),
            **inputs,
        )
        summary = self.stages.run(
            f"{label}-train",
            train,
            model_dir=model_dir or self.root / label / "model",
            data=data,
            model=model,
            training=training,
            initial_checkpoint=initial_checkpoint,
        )
        return TrainSummary(**summary)

    def retrieve(
        self,
        label: str,
        *,
        splits: Sequence[str],
        encoded: Sequence[str] | None = None,
        model_dir: pathlib.Path | None = None,
        documents: Mapping[str, object] = types.MappingProxyType({}),
    ) -> None:
        """Encodes collection and queries with a model, indexes and searches the splits.

        Args:
            label: the model's.
            splits: splits to search.
            encoded: splits whose queries are encoded; None means all.
            model_dir: the model; None is that in the label's folder.
            documents: arguments of `encode` for queries with documents.
        """
        setting, training, root = self.setting, self.setting.training, self.root / label
        own, embeddings_dir = model_dir or root / "model", root / "embeddings"
        # The blocks that training freezes are an untrained model's, too.
        frozen = read_facts(own).get("train_from_block", training.train_from_block)
        encoding = {
            "model_dir": own,
            "token_store": setting.token_store,
            "output_dir": embeddings_dir,
            **documents,
            "config": setting.encode,
            "states_dir": training.states_dir if frozen else None,
            "frozen_blocks": frozen,
            "states_dtype": training.states_dtype,
            "tasks": setting.tasks,
        }
        self.stages.run(f"{label}-encode", encode, **{"query_splits": encoded, **encoding})
        # Recall is sampled from the tasks in the token store's order.
        tasks = [
            task for task in self.store.tasks if setting.tasks is None or task in setting.tasks
        ]
        self.stages.run(
            f"{label}-index",
            _index_both,
            embeddings_dir=embeddings_dir,
            exact_dir=root / "exact",
            index_dir=root / "index",
            config=setting.index,
            tasks=tasks,
        )
        # One stage per split: what is added later searches the last model's training queries, too.
        for split in splits:
            self.stages.run(
                f"{label}-search-{split}",
                _encode_and_search,
                encoding=encoding,
                embeddings_dir=embeddings_dir,
                # Mining searches exactly; what is reported goes through the chosen index.
                index_dir=root / ("exact" if split == "train" else "index"),
                output_dir=root / "runs",
                split=split,
                tag=label,
                **self._searched,
            )

    def mine(self, label: str, config: MiningConfig) -> None:
        """Mines from a model's runs of the training queries."""
        self.stages.run(
            f"{label}-mine",
            mine,
            runs_dir=self.root / label / "runs",
            output_dir=self.root / label / "negatives",
            config=config,
            regex_tasks=self.setting.evaluation.regex_tasks,
            **self.common,
        )

    def evaluate(
        self,
        row: str,
        label: str,
        *,
        parameters: int | None,
        details: Mapping[str, str] | None = None,
    ) -> None:
        """Evaluates a model's test runs as a row of the directory's table."""
        self.stages.run(
            f"{file_name(row)}-evaluate",
            evaluate,
            runs_dir=self.root / label / "runs",
            output_dir=self.setting.output_dir,
            system=row,
            config=self.setting.evaluation,
            parameters=parameters,
            details=details,
            # Rows are tested once all are there.
            significance=None,
            **self.common,
        )
        self.rows.append(row)


@writes("{output_dir}", "{index_dir}")
def _bm25_runs(*, output_dir: str, index_dir: str, splits: Sequence[str], **searched: Any) -> None:
    for split in splits:
        bm25(output_dir=output_dir, index_dir=index_dir, split=split, **searched)


@writes("{exact_dir}", "{index_dir}")
def _index_both(*, exact_dir: str, index_dir: str, config: IndexConfig, **sampled: Any) -> None:
    for directory, chosen in ((exact_dir, IndexConfig()), (index_dir, config)):
        index(index_dir=directory, config=chosen, **sampled)


@writes("{embeddings_dir}", "{output_dir}")
def _encode_and_search(
    *,
    encoding: Mapping[str, Any],
    embeddings_dir: str,
    output_dir: str,
    split: str,
    **searched: Any,
) -> None:
    # A round or an episode that is added later searches queries that were not encoded.
    if split not in {encoded for _, encoded in encoded_splits(embeddings_dir)}:
        encode(**{**encoding, "query_splits": [split]})
    search(embeddings_dir=embeddings_dir, output_dir=output_dir, split=split, **searched)


def check_untrained(
    setting: Setting, untrained: Mapping[str, System], trained: Mapping[str, System], *, where: str
) -> None:
    """Refuses untrained models without pretrained weights or on several hosts, and equal names."""
    if untrained and setting.training.pretrained is None:
        problem = f"{', '.join(untrained)}: untrained, and no pretrained weights"
        fix = "set PRETRAINED, or leave the untrained systems out"
        raise ConfigError(problem, where=where, fix=fix)
    if untrained and jax.process_count() > 1:
        fix = "leave them out, and evaluate the imported model by itself: one host imports it"
        raise ConfigError(f"untrained systems on {jax.process_count()} hosts", where=where, fix=fix)
    folders = [file_name(name) for name in (*untrained, *trained)]
    if len(set(folders)) < len(folders):
        problem = f"systems would be in the folders {', '.join(folders)}"
        raise ConfigError(problem, where=where.split(".")[0], fix="give each row its own name")
