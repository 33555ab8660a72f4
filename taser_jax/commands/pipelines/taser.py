"""`taser pipeline taser`: train, mine, retrain, search, evaluate; `taser quickstart` on pydocs."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import Literal

from taser_jax.commands.ask import ask
from taser_jax.commands.evaluate import write_table
from taser_jax.commands.pipelines.retrieval_stages import (
    BM25,
    DEVELOPMENT,
    RetrievalStages,
    Setting,
    System,
    check_untrained,
    row_name,
)
from taser_jax.commands.pipelines.stages import Stages, pipeline_records
from taser_jax.commands.prepare import PYDOCS, prepare_pydocs
from taser_jax.commands.search import hybrid
from taser_jax.commands.tokenize import make_vocabulary, tokenize
from taser_jax.devices.hosts import writes
from taser_jax.evaluation.reports import ResultsTable
from taser_jax.interop.hub import fetch
from taser_jax.retriever_parts import RetrieverParts, write_parts
from taser_jax.storage.artifacts import file_name
from taser_jax.storage.errors import ConfigError, check_known
from taser_jax.storage.progress import logger


@writes("{setting.output_dir}", kinds=[])
def pipeline_taser(
    *,
    setting: Setting,
    systems: Mapping[str, System],
    hybrid_systems: Sequence[str] = (),
    untrained_systems: Mapping[str, System] | None = None,
    first_negatives: Sequence[str] = (BM25,),
    rounds: Literal[1, 2] = 2,
    config_text: str = "",
) -> ResultsTable:
    """Runs the paper's recipe for each system beside BM25, and prints one table.

    BM25 negatives (P1) -> train -> search the training queries -> mine (P2) -> train again, as
    long, on P2 (a single set: on P1 and P2) -> search held-out queries -> evaluate -> add BM25 to
    the chosen systems. If interrupted, rerun the command to resume at the interrupted stage.

    Every round starts from the same weights and draws the same queries in the same order (one seed
    for all): the rows of one system differ by their hard negatives alone. In the paper, too,
    TASER's final model does not continue the one that mined (appendix B).

    Args:
        setting: what all stages share.
        systems: row name -> model.
        hybrid_systems: systems whose last round is also shown with BM25 added.
        untrained_systems: row name -> model that is evaluated as its pretrained weights left it.
        first_negatives: rows that round 1's hard negatives are mined with: BM25 as in the paper,
            untrained systems, or both, whose lists are then joined per query.
        rounds: 1 stops before mining with the model; 2 is the paper's.
        config_text: written to config.gin.

    Returns:
        The table, also in table.md, table.csv and table.png.

    Raises:
        ConfigError: the directory was begun with other settings, or names that do not fit.
        StorageError: the directory cannot be written.
    """
    untrained_systems = untrained_systems or {}
    check_untrained(setting, untrained_systems, systems, where="pipeline_taser.untrained_systems")
    check_known(hybrid_systems, systems, where="pipeline_taser.hybrid_systems", what="system")
    rows = (BM25, *untrained_systems)
    check_known(first_negatives, rows, where="pipeline_taser.first_negatives", what="system")
    check_depth(setting)
    with pipeline_records(setting.output_dir, config_text):
        store = setting.open_tokens()
        if not any(DEVELOPMENT in splits for splits in store.tasks.values()):
            problem = f"no task of collection {store.metadata.collection!r} has a validation split"
            fix = "run `taser prepare` with VALIDATION_SHARE=0.1, and `taser tokenize` again"
            raise ConfigError(problem, where=str(store.directory), fix=fix)
        sets = setting.tasks or [task for task, splits in store.tasks.items() if "train" in splits]
        comparison = Comparison(
            setting, first_negatives=tuple(first_negatives), keeps_first_negatives=len(sets) == 1
        )
        comparison.bm25(("train", DEVELOPMENT, "test"))
        for name, system in untrained_systems.items():
            comparison.untrained(name, system)
        for number in range(1, rounds + 1):
            for name, system in systems.items():
                comparison.round(name, system, number, is_last=number == rounds)
        for name in hybrid_systems:
            comparison.add_bm25(name, f"{file_name(name)}-{rounds}")
        return print_table(setting, comparison.rows, by_task=setting.evaluation.measures[-1])


class Comparison(RetrievalStages):
    """The stages of one comparison of systems."""

    def __init__(
        self,
        setting: Setting,
        *,
        first_negatives: tuple[str, ...] = (BM25,),
        keeps_first_negatives: bool = False,
    ) -> None:
        super().__init__(setting)
        self._first_negatives, self._keeps_first = first_negatives, keeps_first_negatives
        # Folder of a model -> its parameters, and what a hybrid's row says of its training.
        self._models: dict[str, tuple[int, dict[str, str]]] = {}

    def untrained(self, name: str, system: System, splits: Sequence[str] | None = None) -> None:
        """Encodes, indexes, searches and evaluates a pretrained model.

        With no split there are no queries: it is encoded and indexed.
        """
        label = file_name(name)
        parameters = self.import_model(label, system.model)
        self._models[label] = parameters, {}
        if splits is None:
            splits = (DEVELOPMENT, "test")
            splits = ("train", *splits) if name in self._first_negatives else splits
        self.retrieve(label, splits=splits, encoded=splits)
        if name in self._first_negatives:
            self.mine(label, self.setting.second_mining)
        if splits:
            self.evaluate(name, label, parameters=parameters, details={"training": "none"})

    def round(self, name: str, system: System, number: int, *, is_last: bool) -> None:
        """Trains, encodes, indexes, searches, mines and evaluates one round.

        Nothing mines with the last round, so its training queries are not encoded.
        """
        label = f"{file_name(name)}-{number}"
        training = system.training(self.setting.training)
        sources = [file_name(each) for each in self._first_negatives]
        if number > 1:
            mined = f"{file_name(name)}-{number - 1}"
            sources = [*sources, mined] if self._keeps_first else [mined]
        trained = self.train(
            label,
            system.model,
            training,
            tasks=system.tasks,
            negatives_dirs=[self.root / source / "negatives" for source in sources],
        )
        masked = {"false negatives": training.batching.false_negatives.value}
        self._models[label] = trained.parameters, masked
        splits = (*(() if is_last else ("train",)), DEVELOPMENT, "test")
        self.retrieve(label, splits=splits, encoded=splits)
        if not is_last:
            self.mine(label, self.setting.second_mining)
        self.evaluate(
            row_name(name, number, self._first_negatives),
            label,
            parameters=trained.parameters,
            details={**masked, "training": f"{trained.seconds:.0f} s"},
        )

    def add_bm25(
        self, name: str, label: str, *, alpha: float | None = None, chosen_by: str = ""
    ) -> None:
        """Joins a model's runs with BM25's, as a row of their own.

        Args:
            name: the model's name in the row's.
            label: its folder, such as "taser-2".
            alpha: weight of BM25; None chooses it on the development split.
            chosen_by: what chose a given `alpha`, for the row.
        """
        setting, joined = self.setting, f"{label}-bm25"
        alphas = self.stages.run(
            f"{label}-hybrid",
            hybrid,
            dense_dir=self.root / label / "runs",
            sparse_dir=self.root / "bm25" / "runs",
            output_dir=self.root / joined / "runs",
            development_split=DEVELOPMENT,
            alpha=alpha,
            k=setting.k,
            measure=setting.hybrid_measure,
            config=setting.hybrid,
            evaluation=setting.evaluation,
            **self.common,
        )
        low, high = min(alphas.values()), max(alphas.values())
        shown = f"{low:.3g}" if low == high else f"{low:.3g} to {high:.3g}"
        parameters, details = self._models[label]
        alpha_shown = f"{shown} ({chosen_by})" if chosen_by else shown
        details = {**details, "alpha": alpha_shown}
        self.evaluate(f"{name} + BM25", joined, parameters=parameters, details=details)


def print_table(setting: Setting, rows: Sequence[str], *, by_task: str) -> ResultsTable:
    """Writes and prints the table of a pipeline's folder; `by_task` is the measure of each task."""
    table = write_table(
        setting.output_dir, systems=rows, by_task=by_task, significance=setting.significance
    )
    print("\n" + table.to_text())
    path = pathlib.Path(setting.output_dir) / "table.md"
    logger.info("table: %s (and .csv, .png)", path)
    return table


def check_depth(setting: Setting) -> None:
    """Checks that mining finds the ranks it looks at.

    Raises:
        ConfigError: fewer results per query than mining's depth.
    """
    depth = max(setting.first_mining.depth, setting.second_mining.depth)
    if setting.k < depth:
        problem = f"{setting.k} results per query, and mining considers the first {depth}"
        raise ConfigError(problem, where="TOP_K", fix="raise TOP_K, or lower MiningConfig.depth")


@writes("{setting.output_dir}", kinds=[])
def quickstart(
    *,
    setting: Setting,
    systems: Mapping[str, System],
    hybrid_systems: Sequence[str],
    questions: Sequence[str],
    untrained_systems: Mapping[str, System] | None = None,
    first_negatives: Sequence[str] = (BM25,),
    rounds: Literal[1, 2] = 2,
    vocabulary: str | None = None,
    vocabulary_size: int = 8192,
    query_length: int = 32,
    passage_length: int = 64,
    train_queries: int | None = None,
    config_text: str = "",
) -> ResultsTable:
    """Builds pydocs, trains and compares systems on all its tasks, and answers three questions.

    Args:
        setting: what the stages share; data and tokens are made where it says.
        systems: row name -> model.
        hybrid_systems: systems also shown with BM25 added.
        questions: questions that the best dense row answers at the end.
        untrained_systems: row name -> model shown as its pretrained weights left it.
        first_negatives: rows that round 1's hard negatives are mined with.
        rounds: 2 mines with the model and trains again.
        vocabulary: pretrained weights whose vocabulary is used; None trains one on the collection.
        vocabulary_size: entries of the WordPiece vocabulary that is trained.
        query_length: tokens per query.
        passage_length: tokens per passage.
        train_queries: maximum number of training queries per task; None means all.
        config_text: written to config.gin.

    Returns:
        The table that was printed.
    """
    root = pathlib.Path(setting.output_dir)
    stages, data = Stages(root), {"data_dir": setting.data_dir, "collection": PYDOCS}
    if vocabulary is not None:
        vocabulary = str(fetch(vocabulary))
    stages.run("prepare", prepare_pydocs, **data, train_queries=train_queries)
    if vocabulary is None:
        vocabulary = str(root / "vocabulary")
        size = vocabulary_size
        stages.run("vocab", make_vocabulary, **data, output_dir=vocabulary, size=size)
    stages.run(
        "tokenize",
        tokenize,
        data_dir=setting.data_dir,
        mixture_or_task=PYDOCS,
        module="taser_jax.tasks.pydocs",
        vocabulary=vocabulary,
        feature_lengths={"query": query_length, "passage": passage_length},
        output_dir=setting.token_store,
    )
    table = pipeline_taser(
        setting=setting,
        systems=systems,
        hybrid_systems=hybrid_systems,
        untrained_systems=untrained_systems,
        first_negatives=first_negatives,
        rounds=rounds,
        config_text=config_text,
    )
    # The best encoder by the table's last measure.
    folders = {name: file_name(name) for name in untrained_systems or ()} | {
        row_name(name, number, first_negatives): f"{file_name(name)}-{number}"
        for name in systems
        for number in range(1, rounds + 1)
    }
    dense = [row for row in table.results if row.system in folders]
    best = max(dense, key=lambda row: table.mean(row, table.measures[-1]) or 0.0).system
    model_dir, index_dir = (str(root / folders[best] / name) for name in ("model", "index"))
    print(f"\nThree questions, answered by {best}:")
    write_parts(root, RetrieverParts(model_dir, index_dir, setting.data_dir, PYDOCS))
    if questions:
        ask(questions=questions, directory=str(root))
    print(f"\nAll of it is under {root}: table.md, table.csv, table.png, runs, models, stages.")
    print(f"In Python: taser_jax.Retriever.load({str(root)!r}).search(['your question'])")
    return table
