"""The rows of `taser compare`, and the choice among them."""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Mapping, Sequence

from taser_jax.commands.ask import ask
from taser_jax.commands.export import export_model
from taser_jax.commands.inputs import open_bm25
from taser_jax.commands.pipelines.compare_plan import Choice, Plan
from taser_jax.commands.pipelines.cross_validation import choose, hold_out, rank_held_out
from taser_jax.commands.pipelines.retrieval_stages import (
    DEVELOPMENT,
    RetrievalStages,
    Setting,
    System,
    row_name,
)
from taser_jax.commands.pipelines.taser import Comparison, print_table
from taser_jax.commands.tokenize import tokenize
from taser_jax.data.collections.store import PassageStore, QuerySet
from taser_jax.devices.hosts import writes
from taser_jax.evaluation.reports import ResultsTable
from taser_jax.models.bert_dual_encoder import DualEncoderConfig
from taser_jax.retrieval.bm25 import Bm25Config
from taser_jax.retriever_parts import RetrieverParts, write_parts
from taser_jax.storage.artifacts import file_name, write_json
from taser_jax.storage.progress import logger
from taser_jax.storage.typed_files import typed

UNTRAINED = "Pretrained, untrained"


@dataclasses.dataclass(kw_only=True)
class ComparedRows(Comparison):
    """The stages of a comparison whose settings are decided.

    Attributes:
        setting: what all stages share.
        collection: the collection.
        systems: row -> system to train.
        pretrained: the weights that they start from; None for random weights.
        splits: task -> its splits.
        chosen: how the systems are trained; None where there are no training queries.
        whole: the collection whose passages the queries were cut out of: what is left searches it.
    """

    setting: Setting
    collection: str
    systems: dict[str, System]
    pretrained: str | None
    splits: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)
    chosen: Plan | None = None
    whole: str | None = None

    def __post_init__(self) -> None:
        super().__init__(self.setting)

    @property
    def data(self) -> dict[str, str]:
        """Arguments of all that read the collection."""
        return {"data_dir": self.setting.data_dir, "collection": self.collection}

    @property
    def _folders(self) -> dict[str, str]:
        """Row of a dense model -> its folder; of trained systems that of the last round."""
        folders = {} if self.pretrained is None else {UNTRAINED: file_name(UNTRAINED)}
        if self.chosen is not None:
            folders |= {name: f"{file_name(name)}-{self.chosen.rounds}" for name in self.systems}
        return folders

    def _as_pretrained(self) -> System:
        """The pretrained weights as one plain tower."""
        model = next(iter(self.systems.values())).model
        assert isinstance(model, DualEncoderConfig)
        plain = DualEncoderConfig(
            bert=model.bert, pooling=model.pooling, normalization=model.normalization
        )
        return System(plain)

    def index_only(self) -> None:
        """A collection without queries: the pretrained model and its index, ready to ask."""
        self.untrained(UNTRAINED, self._as_pretrained(), splits=())
        self._leave(UNTRAINED, self._parts(self._folders[UNTRAINED]))

    def compare(self) -> ResultsTable:
        """All rows, and the choice among them."""
        splits = [split for split in ("test", DEVELOPMENT, "train") if self.tasks_with(split)]
        self.bm25(splits)
        if self.pretrained is not None:
            self.untrained(UNTRAINED, self._as_pretrained(), splits)
        rounds = 0 if self.chosen is None else self.chosen.rounds
        for number in range(1, rounds + 1):
            for name, system in self.systems.items():
                self.round(name, system, number, is_last=number == rounds)
        choice = self._choice()
        by = f"{choice.queries} queries" if choice.queries else "default"
        for name, folder in self._folders.items():
            self.add_bm25(name, folder, alpha=choice.alphas[name], chosen_by=by)
        table = print_table(self.setting, self.rows, by_task=self.setting.evaluation.measures[-1])
        self._finish(choice)
        return table

    def tasks_with(self, split: str) -> list[str]:
        """The tasks that have a split."""
        return [task for task, there in self.splits.items() if split in there]

    @property
    def _baseline(self) -> str:
        """What is recommended where nothing is better: the untrained model with BM25."""
        return f"{next(iter(self._folders))} + BM25"

    def _choice(self) -> Choice:
        """What is recommended: cross-validated, by the validation queries, or by default."""
        setting, bm25 = self.setting, self.root / "bm25" / "runs"
        dense = {name: [self.root / folder / "runs"] for name, folder in self._folders.items()}
        split, sparse = DEVELOPMENT if self.tasks_with(DEVELOPMENT) else "test", [bm25]
        if self.chosen is not None and self.chosen.folds:
            folds = [self._fold(number, self.chosen) for number in range(self.chosen.folds)]
            split, sparse = "train", [fold / "bm25" for fold in folds]
            dense = {name: [fold / file_name(name) for fold in folds] for name in dense}
        chosen = self.stages.run(
            "choose",
            choose,
            tasks=self.tasks_with(split),
            split=split,
            dense_dirs=dense,
            sparse_dirs=sparse,
            baseline=self._baseline,
            k=setting.k,
            measure=setting.hybrid_measure,
            config=setting.hybrid,
            evaluation=setting.evaluation,
            **self.data,
        )
        return typed(chosen, Choice, where="choose")

    def _fold(self, number: int, chosen: Plan) -> pathlib.Path:
        """Trains each system without a fold's queries, and ranks these with it."""
        setting, root = self.setting, self.root / "folds" / str(number)
        names = ["bm25", *([] if self.pretrained is None else [file_name(UNTRAINED)])]
        emptied = self.stages.run(
            f"fold-{number}",
            hold_out,
            tasks=self.tasks_with("train"),
            runs_dirs={name: self.root / name / "runs" for name in names},
            embeddings_dirs={name: self.root / name / "embeddings" for name in names[1:]},
            negatives_dir=self.root / "bm25" / "negatives",
            output_dir=root,
            fold=number,
            folds=chosen.folds,
            own_passage_tasks=list(setting.own_passage_tasks),
            **self.data,
        )
        steps = max(1, chosen.steps * (chosen.folds - 1) // chosen.folds)
        loop = dataclasses.replace(setting.training.loop, train_steps=steps)
        for name, system in self.systems.items():
            label = file_name(name)
            model_dir = root / "models" / label
            tasks = system.tasks or setting.tasks
            if emptied:
                tasks = [task for task in tasks or self.tasks_with("train") if task not in emptied]
            self.train(
                f"fold-{number}-{label}",
                system.model,
                system.training(dataclasses.replace(setting.training, loop=loop)),
                model_dir=model_dir,
                tasks=tasks,
                negatives_dirs=[root / "negatives"],
            )
            self.stages.run(
                f"fold-{number}-{label}-rank",
                rank_held_out,
                model_dir=model_dir,
                token_store=setting.token_store,
                fold_dir=root,
                output_dir=root / label,
                k=setting.k,
                encode=setting.encode,
                states_dir=setting.training.states_dir,
                states_dtype=setting.training.states_dtype,
                own_passage_tasks=list(setting.own_passage_tasks),
                **self.data,
            )
        return root

    def _finish(self, choice: Choice) -> None:
        """Says what is recommended and why, answers test queries with it, and exports it."""
        name, dense = choice.row, choice.row.removesuffix(" + BM25")
        is_hybrid, system = name != dense, dense
        if dense != UNTRAINED and self.chosen is not None:
            system = row_name(dense, self.chosen.rounds)
        row = name if is_hybrid else system
        print(f"\nRecommended: {row}")
        if name in choice.gains:
            gain, error = (100 * value for value in choice.gains[name])
            print(
                f"It gains {gain:+.1f} ± {error:.1f} points of {self.setting.hybrid_measure} over "
                f"{self._baseline} on {choice.queries} queries that it was not trained on."
            )
        elif choice.queries:
            print("No other row is better by more than a standard error.")
        errors = [100 * error for _, error in choice.gains.values() if math.isfinite(error)]
        if choice.queries < 30 and errors:
            what = "%d labelled queries chose it: they cannot tell differences below ± %.1f points"
            logger.warning(what, choice.queries, 1.96 * max(errors))
        parts = self._parts(self._folders[dense])
        if is_hybrid:
            parts = dataclasses.replace(
                parts,
                bm25_dir=str(self.root / "bm25" / "index"),
                alpha=choice.alphas[dense],
                normalization=choice.normalizations.get(dense),
            )
        # JSON has no infinity: a task has one query, which has no standard error.
        gains = {
            name: [mean, error if math.isfinite(error) else None]
            for name, (mean, error) in choice.gains.items()
        }
        recommended = {"row": row, "alpha": parts.alpha, "queries": choice.queries, "gains": gains}
        write_json(self.root / "recommended.json", recommended)
        queries = QuerySet.open(**self.data, task=self.tasks_with("test")[0], split="test")
        print(f"\nTest queries, answered by {row}:")
        lines = sorted({0, len(queries) // 3, 2 * len(queries) // 3})
        self._leave(system, parts, questions=[queries[line].text for line in lines])

    def _parts(self, folder: str) -> RetrieverParts:
        """A retriever of a folder's model alone."""
        model_dir, index_dir = (str(self.root / folder / name) for name in ("model", "index"))
        return RetrieverParts(model_dir, index_dir, self.setting.data_dir, self.collection)

    def _leave(self, system: str, parts: RetrieverParts, *, questions: Sequence[str] = ()) -> None:
        """Leaves retriever.json, prints what it finds, and exports the model of a dense row."""
        write_parts(self.root, parts)
        if questions:
            ask(questions=questions, task=next(iter(self.splits)), directory=str(self.root))
        if self.whole is not None:
            parts = self._index_whole(parts, self.whole)
        self.stages.run(
            "export",
            export_model,
            model_dir=parts.model_dir,
            output_dir=self.root / "export",
            **({"results_dir": self.root, "system": system} if questions else {}),
        )
        left = "table.md, .csv and .png, runs, index, export" if questions else "index, export"
        print(f"\nAll of it is under {self.root}: {left}.")
        print(f"In Python: taser_jax.Retriever.load({str(self.root)!r}).search(['your question'])")

    def _index_whole(self, parts: RetrieverParts, collection: str) -> RetrieverParts:
        """Indexes the passages as they were before queries were cut out of them."""
        setting, root = self.setting, self.root / "whole"
        data = {"data_dir": parts.data_dir, "collection": collection}
        self.stages.run(
            "whole-tokenize",
            tokenize,
            vocabulary=str(self.store.vocabulary_directory),
            feature_lengths={
                "query": self.store.metadata.query_length,
                "passage": self.store.metadata.passage_length,
            },
            output_dir=root / "tokens",
            **data,
        )
        # States of frozen blocks are of the other passages.
        setting = dataclasses.replace(
            setting,
            token_store=str(root / "tokens"),
            training=dataclasses.replace(setting.training, states_dir=None),
        )
        model_dir = pathlib.Path(parts.model_dir)
        RetrievalStages(setting).retrieve("whole", splits=(), encoded=(), model_dir=model_dir)
        whole = dataclasses.replace(parts, index_dir=str(root / "index"), collection=collection)
        if parts.alpha is not None:
            bm25_dir = root / "bm25"
            config = setting.bm25
            self.stages.run("whole-bm25", _index_bm25, index_dir=bm25_dir, config=config, **data)
            whole = dataclasses.replace(whole, bm25_dir=str(bm25_dir))
        write_parts(self.root, whole)
        return whole


@writes("{index_dir}")
def _index_bm25(*, data_dir: str, collection: str, index_dir: str, config: Bm25Config) -> None:
    open_bm25(PassageStore.open(data_dir, collection), index_dir, config)
