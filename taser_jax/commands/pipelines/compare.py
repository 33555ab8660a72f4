"""`taser compare`: from folders of text to a table, a recommendation, an index and an export."""

from __future__ import annotations

import dataclasses
import pathlib
import shutil
import time
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from taser_jax.assembly.config import TrainingConfig
from taser_jax.assembly.pretrained import Pretrained
from taser_jax.commands.export import export_model
from taser_jax.commands.pipelines.answers import answer
from taser_jax.commands.pipelines.choice import (
    Choice,
    choose,
    choose_bm25,
    hold_out,
    rank_held_out,
    unchosen_alpha,
)
from taser_jax.commands.pipelines.compare_data import (
    check_detected,
    collection_name,
    file_sizes,
    fit_lengths,
    prepare_detected,
)
from taser_jax.commands.pipelines.compare_plan import (
    Costs,
    FittedLength,
    Plan,
    defaults,
    length_buckets,
    padded_length,
    plan,
)
from taser_jax.commands.pipelines.retrieval_stages import DEVELOPMENT
from taser_jax.commands.pipelines.setting import Setting, System, row_name
from taser_jax.commands.pipelines.stages import Stages
from taser_jax.commands.pipelines.taser import CONFIGURABLES as TASER_CONFIGURABLES
from taser_jax.commands.pipelines.taser import Comparison, begin_pipeline, print_table
from taser_jax.commands.tokenize import tokenize
from taser_jax.commands.train import train
from taser_jax.commands.vocab import vocab
from taser_jax.data.collections.store import PassageStore, QuerySet
from taser_jax.data.prepare.detection import detect
from taser_jax.data.token_store.store import TokenStore
from taser_jax.devices.hosts import writes
from taser_jax.evaluation.reports import ResultsTable
from taser_jax.interop.encoder_settings import read_encoder_settings
from taser_jax.interop.hub import fetch
from taser_jax.interop.pretrained import (
    pretrained_bert,
    pretrained_normalization,
    pretrained_pooling,
)
from taser_jax.models.bert_dual_encoder import DualEncoderConfig, Pooling
from taser_jax.models.dual_encoder import ModelConfig, Normalization
from taser_jax.retrieval.bm25 import Bm25Config
from taser_jax.retrieval.index import IndexKind
from taser_jax.storage.artifacts import file_name, write_json, write_text
from taser_jax.storage.errors import ConfigError
from taser_jax.storage.progress import logger

UNTRAINED = "Pretrained, untrained"
# A system's name on the command line -> in the table.
ROWS = {"shared": "Shared", "taser": "TASER", "dpr": "DPR"}
_MEASURED_STEPS = 6
# Beyond about this many passages ScaNN is worth building, and one BM25 is enough.
_EXACT_PASSAGES = 100_000
# (k1, b): Anserini's, then those of Lucene, of Robertson and Zaragoza, and of short texts.
_BM25 = ((0.9, 0.4), (1.2, 0.75), (1.5, 0.75), (0.6, 0.2))
# Queries of a fold that are ranked, and passages of each of their lists that the pool has.
_RANKED, _DEPTH = 100, 10

ConfigT = TypeVar("ConfigT")


@writes("{setting.output_dir}")
def compare(
    *,
    directories: Sequence[str],
    setting: Setting,
    candidates: Mapping[str, System],
    systems: str | Sequence[str] = ("shared", "taser"),
    pretrained: str | None = None,
    minutes: float | None = None,
    validation_share: float = 0.1,
    feature_lengths: Mapping[str, int] | None = None,
    vocabulary_size: int = 8192,
    train_steps: int | None = None,
    learning_rate: float | None = None,
    rounds: int | None = None,
    folds: int | None = None,
    config_text: str = "",
) -> ResultsTable | None:
    """Compares BM25, an untrained model, trained ones and hybrids; recommends and exports the best.

    What is recommended is never worse than the untrained model with BM25 by more than chance:
    candidates are compared on labelled queries that they were not trained on, and one that gains
    less than a standard error is not taken. Test queries decide nothing.

    Every decision is printed with the Gin line that changes it; `decided.gin` has all of them. If
    interrupted, rerun the command to resume.

    Example:
        `taser compare my_beir/ --pretrained=minilm --out=results`

    Args:
        directories: folders of text; all become one collection.
        setting: what all stages share; its places are below its output directory. Fields that have
            their defaults are decided from the data.
        candidates: name -> system that can be trained.
        systems: those that are, as a list or separated by commas.
        pretrained: weights to start from: "minilm", a directory or a hub id. Its files give
            pooling, normalisation, prompt and longest text. None starts from random weights.
        minutes: time budget from the start of the command; None sets no limit.
        validation_share: share of training queries that becomes a validation split, where there is
            none.
        feature_lengths: {"query": ..., "passage": ...}; None takes the pretrained model's own
            length or, from random weights, the 95th percentiles.
        vocabulary_size: entries of the vocabulary that is trained where nothing is pretrained.
        train_steps: steps of each training; None follows the number of distinct training queries,
            as do the next three.
        learning_rate: the highest of the schedule.
        rounds: 2 trains again on mined negatives.
        folds: folds of cross-validation; 0 chooses on the validation queries.
        config_text: written to config.gin.

    Returns:
        The table, also in table.md, table.csv and table.png; None for a collection without queries.

    Raises:
        ConfigError: folders whose format is not recognised or that have no test queries, an unknown
            system, or other settings than the directory was begun with.
    """
    names = systems.split(",") if isinstance(systems, str) else list(systems)
    _check_systems(names, candidates)
    detected = [detect(directory) for directory in directories]
    check_detected(detected)
    given = {
        "train_steps": train_steps,
        "learning_rate": learning_rate,
        "rounds": rounds,
        "folds": folds,
    }
    run = _Run(
        setting=setting,
        systems={ROWS[name]: candidates[name] for name in names},
        pretrained=pretrained,
        collection=collection_name(directories),
        given={name: value for name, value in given.items() if value is not None},
    )
    begin_pipeline(run.root, config_text)
    splits = run.stages.run(
        "prepare",
        prepare_detected,
        detected=detected,
        sizes=file_sizes(directories),
        data_dir=str(run.root / "data"),
        collection=run.collection,
        validation_share=validation_share,
    )
    run.check_splits(splits)
    sides = run.tokenize(feature_lengths or {}, vocabulary_size, has_queries=bool(splits))
    run.decide_model(sides)
    if not splits:
        run.index_only()
        return None
    is_trained = any("train" in each for each in splits.values())
    chosen = run.plan(sides, minutes) if is_trained else None
    table, choice = run.compare(chosen)
    run.finish(choice, chosen)
    return table


def filled(config: ConfigT, **values: object) -> ConfigT:
    """A configuration in which fields that have their defaults get other values.

    Example:
        >>> filled(Bm25Config(b=0.5), k1=1.2, b=0.75).b
        0.5
    """
    fields = {field.name: field.default for field in dataclasses.fields(config)}  # type: ignore[arg-type]
    unset = {name: value for name, value in values.items() if getattr(config, name) == fields[name]}
    return dataclasses.replace(config, **unset)  # type: ignore[type-var]


@writes("{model_dir}")
def measure(
    *,
    model_dir: str,
    token_store: str,
    model: ModelConfig,
    training: TrainingConfig,
    text_tokens: float,
    batch_tokens: float,
) -> dict[str, float]:
    """Seconds of a step, of a start, and of encoding the collection, from a few steps.

    Args:
        model_dir: of a model that is deleted again.
        token_store: tokens of the collection.
        model: the model.
        training: its training.
        text_tokens: tokens of all passages.
        batch_tokens: tokens of a training batch.
    """
    # What a killed run left would be resumed, with fewer steps to time or none.
    shutil.rmtree(model_dir, ignore_errors=True)
    start = time.monotonic()
    summary = train(model_dir=model_dir, token_store=token_store, model=model, training=training)
    wall = time.monotonic() - start
    shutil.rmtree(model_dir)
    assert summary is not None
    step = 1 / summary.steps_per_second
    return {
        "step_seconds": step,
        "start_seconds": max(0.0, wall - training.loop.train_steps * step),
        # Forward and backward are three forward passes.
        "encode_seconds": text_tokens * step / (3 * batch_tokens),
    }


class _Run:
    """One comparison: its settings as far as they are decided, and its stages."""

    def __init__(
        self,
        *,
        setting: Setting,
        systems: Mapping[str, System],
        pretrained: str | None,
        collection: str,
        given: Mapping[str, Any],
    ) -> None:
        self.root = pathlib.Path(setting.output_dir)
        self.stages = Stages(self.root)
        self.collection = collection
        self._setting = dataclasses.replace(
            setting, data_dir=str(self.root / "data"), token_store=str(self.root / "tokens")
        )
        self._systems, self._pretrained, self._given = dict(systems), pretrained, dict(given)
        self._splits: dict[str, list[str]] = {}
        self._lines: list[str] = []

    def _decide(self, reason: str, **settings: object) -> None:
        """Logs a decision as Gin lines, and writes all so far."""
        lines = [f"{name.replace('__', '.')} = {value!r}" for name, value in settings.items()]
        logger.info("decided: %s", reason)
        for line in lines:
            logger.info("  %s", line)
        self._lines += [f"# {reason[:1].upper()}{reason[1:]}.", *lines, ""]
        write_text(self.root / "decided.gin", "\n".join(self._lines))

    def check_splits(self, splits: Mapping[str, list[str]]) -> None:
        """Notes the tasks; refuses those without test queries, and a training from nothing."""
        self._splits = dict(splits)
        untested = [task for task, there in splits.items() if "test" not in there]
        if untested:
            raise ConfigError(
                f"task {', '.join(untested)} has no test split",
                where="DIRECTORIES",
                fix="add queries to test with; none are made of training queries",
            )
        untrained = [task for task, there in splits.items() if "train" not in there]
        if untrained and self._pretrained is None:
            raise ConfigError(
                f"task {', '.join(untrained)} has no train split, and nothing is pretrained",
                where="DIRECTORIES",
                fix="add training queries, or --pretrained=minilm",
            )

    def tokenize(
        self, given: Mapping[str, int], vocabulary_size: int, *, has_queries: bool
    ) -> dict[str, FittedLength]:
        """Vocabulary, lengths and tokens."""
        data = {"data_dir": self._setting.data_dir, "collection": self.collection}
        settings = None
        if self._pretrained is None:
            vocabulary = self.root / "vocabulary"
            self.stages.run("vocab", vocab, output_dir=vocabulary, size=vocabulary_size, **data)
        else:
            vocabulary = fetch(self._pretrained)
            settings = read_encoder_settings(vocabulary)
        own = None
        if self._pretrained is not None:
            positions = pretrained_bert(self._pretrained).max_length
            own = min(positions, (settings and settings.max_length) or positions)
        fitted = self.stages.run(
            "lengths",
            fit_lengths,
            vocabulary=str(vocabulary),
            prompt=settings.query_prompt if settings else "",
            own_length=own,
            given=dict(given),
            **data,
        )
        sides = {side: FittedLength(**values) for side, values in fitted.items()}
        lengths = {side: fit.tokens for side, fit in sides.items()}
        self._decide(
            "lengths: "
            + ", ".join(f"{fit.cut:.1%} of {side} texts are cut" for side, fit in sides.items()),
            TASK_FEATURE_LENGTHS=lengths,
        )
        self.stages.run(
            "tokenize",
            tokenize,
            data_dir=self._setting.data_dir,
            output_dir=self._setting.token_store,
            vocabulary=str(vocabulary),
            feature_lengths=lengths,
            **(
                {"mixture_or_task": self.collection}
                if has_queries
                else {"collection": self.collection}
            ),
        )
        return sides

    def decide_model(self, sides: Mapping[str, FittedLength]) -> None:
        """Sizes and pooling, temperature, buckets, the index and the depth of lists."""
        setting, training = self._setting, self._setting.training
        objective, cosines = training.objective, False
        if self._pretrained is not None:
            cosines = pretrained_normalization(self._pretrained) is Normalization.L2
        if cosines:
            objective = filled(objective, temperature=0.05)
            self._decide(
                "embeddings are normalised, as the pretrained weights say: a temperature sharpens "
                "cosines",
                ObjectiveConfig__temperature=objective.temperature,
            )
        buckets = training.length_buckets or tuple(length_buckets(*sides.values()))
        passages = len(PassageStore.open(setting.data_dir, self.collection))
        index, depth = setting.index, min(setting.k, passages)
        if passages <= _EXACT_PASSAGES:
            index = dataclasses.replace(index, kind=IndexKind.EXACT)
        self._decide(
            f"{passages:,} passages: index, results per query, and lengths that batches are cut to",
            IndexConfig__kind=index.kind.value,
            TOP_K=depth,
            TrainingConfig__length_buckets=buckets,
        )
        significance = setting.significance
        if significance is not None and self._pretrained is not None:
            baselines = (UNTRAINED, f"{UNTRAINED} + BM25")
            significance = filled(significance, more_baselines=baselines)
        self._setting = dataclasses.replace(
            setting,
            k=depth,
            index=index,
            first_mining=dataclasses.replace(setting.first_mining, depth=depth),
            second_mining=dataclasses.replace(setting.second_mining, depth=depth),
            significance=significance,
            training=dataclasses.replace(
                training,
                objective=objective,
                length_buckets=buckets,
                pretrained=None if self._pretrained is None else Pretrained(self._pretrained),
            ),
        )
        self._systems = {
            name: dataclasses.replace(system, model=self._model(system.model))
            for name, system in self._systems.items()
        }

    def _model(self, model: ModelConfig) -> ModelConfig:
        """The model with the sizes, pooling and normalisation of the pretrained weights."""
        assert isinstance(model, DualEncoderConfig)
        if self._pretrained is None:
            # From random weights the mean over tokens learns faster than [CLS].
            return filled(model, pooling=Pooling.MEAN)
        return filled(
            dataclasses.replace(model, bert=pretrained_bert(self._pretrained, numerics=model.bert)),
            pooling=pretrained_pooling(self._pretrained),
            normalization=pretrained_normalization(self._pretrained),
        )

    @property
    def _untrained(self) -> System:
        """One plain tower with the pretrained weights."""
        model = next(iter(self._systems.values())).model
        assert isinstance(model, DualEncoderConfig)
        plain = DualEncoderConfig(
            bert=model.bert, pooling=model.pooling, normalization=model.normalization
        )
        return System(plain)

    def index_only(self) -> None:
        """A collection without queries: the pretrained model and its index, ready to ask."""
        if self._pretrained is None:
            raise ConfigError(
                "no queries, and nothing is pretrained",
                where="DIRECTORIES",
                fix="add queries, or --pretrained=minilm",
            )
        self._comparison().index_untrained(UNTRAINED, self._untrained)
        self._leave(UNTRAINED, file_name(UNTRAINED), questions=(), task=None)

    def _comparison(self) -> Comparison:
        return Comparison(self.stages, self._setting, TokenStore.open(self._setting.token_store))

    def _distinct(self, split: str) -> int:
        """Number of different texts among a split's queries, over all tasks."""
        return sum(
            len({query.text for query in self._queries(task, split)})
            for task, there in self._splits.items()
            if split in there
        )

    def _queries(self, task: str, split: str) -> QuerySet:
        return QuerySet.open(self._setting.data_dir, self.collection, task, split)

    def plan(self, sides: Mapping[str, FittedLength], minutes: float | None) -> Plan:
        """Batches, rate, steps, frozen blocks, rounds and folds, by queries and by time."""
        training = self._setting.training
        first = next(iter(self._systems.values()))
        blocks = first.model.transformer.num_layers
        queries = self._distinct("train")
        wanted = defaults(
            queries,
            validation=self._distinct(DEVELOPMENT),
            blocks=None if self._pretrained is None else blocks,
            batch_size=training.batching.batch_size,
        )
        names = {"train_steps": "steps"}
        wanted = dataclasses.replace(
            wanted, **{names.get(name, name): value for name, value in self._given.items()}
        )
        training = dataclasses.replace(
            training,
            batching=dataclasses.replace(training.batching, batch_size=wanted.batch_size),
            optimizer=dataclasses.replace(
                training.optimizer, learning_rate=wanted.learning_rate, warmup_steps=1
            ),
        )
        buckets = training.length_buckets
        query, passage = (padded_length(sides[side], buckets) for side in ("query", "passage"))
        passages = len(PassageStore.open(self._setting.data_dir, self.collection))
        loop = dataclasses.replace(
            training.loop, train_steps=_MEASURED_STEPS, evaluation_period=0, checkpoint_period=0
        )
        measured = self.stages.run(
            "measure",
            measure,
            model_dir=self.root / "measured",
            token_store=self._setting.token_store,
            model=first.model,
            training=dataclasses.replace(training, loop=loop, validation=None),
            text_tokens=passages * sides["passage"].mean,
            batch_tokens=wanted.batch_size * (query + 2 * passage),
        )
        done = [name for name in self.stages.finished() if name in _BEFORE]
        costs = Costs(
            **measured,
            blocks=blocks,
            systems=len(self._systems),
            untrained=self._pretrained is not None,
            spent_seconds=sum(self.stages.record(name).seconds for name in done),
            pool_share=min(1.0, 2 * _DEPTH * _RANKED / passages),
        )
        chosen = plan(costs, wanted, minutes=minutes, pretrained=self._pretrained is not None)
        self._decide(
            f"{queries:,} distinct training queries: batches and rate",
            BATCH_SIZE=wanted.batch_size,
            LEARNING_RATE=wanted.learning_rate,
        )
        budget = "" if minutes is None else f" of {minutes:g}"
        self._decide(
            f"about {chosen.seconds / 60:.0f} minutes{budget}, by measured steps of "
            f"{costs.step_seconds:.2f} s",
            TRAIN_STEPS=chosen.steps,
            ROUNDS=chosen.rounds,
            FOLDS=chosen.folds,
            TrainingConfig__train_from_block=chosen.frozen_blocks,
        )
        if minutes is not None and chosen.seconds > 60 * minutes:
            logger.warning("even the shortest comparison takes longer than %g minutes", minutes)
        self._setting = dataclasses.replace(self._setting, training=self._planned(training, chosen))
        self._systems = {
            name: dataclasses.replace(system, model=_with_trained_experts(system.model, chosen))
            for name, system in self._systems.items()
        }
        return chosen

    def _planned(self, training: TrainingConfig, chosen: Plan) -> TrainingConfig:
        frozen = training.train_from_block or chosen.frozen_blocks
        # The first validation precedes any step: the pretrained weights stay if they are best.
        period = max(5, chosen.steps // 4)
        return dataclasses.replace(
            training,
            loop=dataclasses.replace(
                filled(training.loop, evaluation_period=period),
                train_steps=chosen.steps,
                validates_first=self._pretrained is not None,
            ),
            optimizer=dataclasses.replace(
                training.optimizer, warmup_steps=max(1, chosen.steps // 10)
            ),
            train_from_block=frozen,
            states_dir=str(self.root / "states") if frozen else None,
        )

    def compare(self, chosen: Plan | None) -> tuple[ResultsTable, Choice]:
        """All rows, and the choice among them."""
        splits = ["test"]
        splits += [DEVELOPMENT] if self._has(DEVELOPMENT) else []
        splits += ["train"] if self._has("train") else []
        self._choose_bm25()
        comparison = self._comparison()
        comparison.bm25(splits)
        order, label = ["BM25"], file_name(UNTRAINED)
        if self._pretrained is not None:
            order.append(comparison.untrained(UNTRAINED, self._untrained, splits))
        for number in range(1, (chosen.rounds if chosen else 0) + 1):
            for name, system in self._systems.items():
                is_last = number == chosen.rounds  # type: ignore[union-attr]
                order.append(comparison.round(name, system, number, is_last=is_last))
        choice = self._choice(chosen)
        labels = {UNTRAINED: label} if self._pretrained is not None else {}
        labels |= self._labels(chosen)
        for name, folder in labels.items():
            by = f"{choice.queries} queries" if choice.queries else "default"
            order.append(comparison.add_bm25(name, folder, alpha=choice.alphas[name], chosen_by=by))
        return print_table(
            self._setting, order, by_task=self._setting.evaluation.measures[-1]
        ), choice

    def _labels(self, chosen: Plan | None) -> dict[str, str]:
        """Trained system -> folder of its last round."""
        if chosen is None:
            return {}
        return {name: f"{file_name(name)}-{chosen.rounds}" for name in self._systems}

    def _has(self, split: str) -> bool:
        return any(split in there for there in self._splits.values())

    def _tasks(self, split: str) -> list[str]:
        return [task for task, there in self._splits.items() if split in there]

    @property
    def _judging(self) -> dict[str, Any]:
        return {
            "data_dir": self._setting.data_dir,
            "collection": self.collection,
            "measure": self._setting.hybrid_measure,
            "evaluation": self._setting.evaluation,
        }

    def _choose_bm25(self) -> None:
        """k1 and b by the labelled queries, where there are some and passages are not too many."""
        labelled = [split for split in (DEVELOPMENT, "train") if self._has(split)]
        passages = len(PassageStore.open(self._setting.data_dir, self.collection))
        if not labelled or passages > _EXACT_PASSAGES or self._setting.bm25 != Bm25Config():
            return
        is_enough = self._distinct(labelled[0]) >= 200
        grid = [dataclasses.replace(self._setting.bm25, k1=k1, b=b) for k1, b in _BM25]
        best = self.stages.run(
            "bm25-choose",
            choose_bm25,
            output_dir=self.root / "bm25" / "grid",
            tasks=self._tasks(labelled[0]),
            splits=labelled[:1] if is_enough else labelled,
            candidates=grid,
            **self._judging,
        )
        self._setting = dataclasses.replace(self._setting, bm25=grid[best])
        self._decide("BM25", Bm25Config__k1=grid[best].k1, Bm25Config__b=grid[best].b)

    def _choice(self, chosen: Plan | None) -> Choice:
        """What is recommended: cross-validated, by the validation queries, or by default."""
        setting, bm25 = self._setting, self.root / "bm25" / "runs"
        untrained = self.root / file_name(UNTRAINED) / "runs"
        baseline = f"{UNTRAINED} + BM25"
        if not self._has(DEVELOPMENT):
            alpha = self.stages.run(
                "alpha",
                unchosen_alpha,
                dense_dir=untrained,
                sparse_dir=bm25,
                tasks=self._tasks("test"),
                split="test",
                config=setting.hybrid,
                data_dir=setting.data_dir,
                collection=self.collection,
            )
            return Choice(baseline, {UNTRAINED: alpha}, {}, 0)
        split, sparse = DEVELOPMENT, [bm25]
        dense: dict[str, Sequence[pathlib.Path]] = {
            name: [self.root / folder / "runs"] for name, folder in self._labels(chosen).items()
        }
        dense |= {UNTRAINED: [untrained]} if self._pretrained is not None else {}
        if chosen is not None and chosen.folds:
            folds = [self._fold(number, chosen) for number in range(chosen.folds)]
            split, sparse = "train", [fold / "bm25" for fold in folds]
            dense = {name: [fold / file_name(name) for fold in folds] for name in dense}
        if self._pretrained is None:
            baseline = f"{next(iter(self._systems))} + BM25"
        outputs = self.stages.run(
            "choose",
            choose,
            tasks=self._tasks(split),
            split=split,
            dense_dirs=dense,
            sparse_dirs=sparse,
            baseline=baseline,
            k=setting.k,
            config=setting.hybrid,
            **self._judging,
        )
        return Choice(**outputs)

    def _fold(self, number: int, chosen: Plan) -> pathlib.Path:
        """Trains each system without a fold's queries, and ranks these with it."""
        setting, root = self._setting, self.root / "folds" / str(number)
        data = {"data_dir": setting.data_dir, "collection": self.collection}
        untrained = file_name(UNTRAINED)
        self.stages.run(
            f"fold-{number}",
            hold_out,
            tasks=self._tasks("train"),
            runs_dirs={
                "bm25": self.root / "bm25" / "runs",
                untrained: self.root / untrained / "runs",
            },
            negatives_dir=self.root / "bm25" / "negatives",
            output_dir=root,
            fold=number,
            folds=chosen.folds,
            depth=_DEPTH,
            most=_RANKED,
            **data,
        )
        steps = max(1, chosen.steps * (chosen.folds - 1) // chosen.folds)
        loop = dataclasses.replace(setting.training.loop, train_steps=steps)
        for name, system in self._systems.items():
            label = file_name(name)
            # Beside the lists, which are found by their folders.
            model_dir = root / "models" / label
            self.stages.run(
                f"fold-{number}-{label}-train",
                train,
                model_dir=model_dir,
                token_store=setting.token_store,
                model=system.model,
                training=system.training(dataclasses.replace(setting.training, loop=loop)),
                tasks=system.tasks or setting.tasks,
                negatives_dirs=[root / "negatives"],
            )
            self.stages.run(
                f"fold-{number}-{label}-rank",
                rank_held_out,
                model_dir=model_dir,
                token_store=setting.token_store,
                lists_dirs=[root / "bm25", root / untrained],
                output_dir=root / label,
                k=setting.k,
                encode=setting.encode,
                **data,
            )
        return root

    def finish(self, choice: Choice, chosen: Plan | None) -> None:
        """Says what is recommended and why, answers test queries with it, and exports it."""
        name = choice.row.removesuffix(" + BM25")
        row = choice.row
        if row == name and name != UNTRAINED and chosen is not None:
            row = row_name(name, chosen.rounds)
        label = (self._labels(chosen) | {UNTRAINED: file_name(UNTRAINED)})[name]
        print(f"\nRecommended: {row}")
        if choice.row in choice.gains:
            gain, error = (100 * value for value in choice.gains[choice.row])
            print(
                f"It gains {gain:+.1f} ± {error:.1f} points of {self._setting.hybrid_measure} over "
                f"the untrained model with BM25 on {choice.queries} queries that it was not "
                "trained on."
            )
        elif choice.queries:
            print("No other row is better by more than a standard error.")
        errors = [100 * error for _, error in choice.gains.values()]
        if choice.queries < 30 and errors:
            logger.warning(
                "%d labelled queries chose it: they cannot tell differences below ± %.1f points",
                *(choice.queries, 1.96 * max(errors)),
            )
        alpha = choice.alphas.get(name) if row.endswith(" + BM25") else None
        write_json(
            self.root / "recommended.json",
            {
                "row": row,
                "model_dir": f"{label}/model",
                "index_dir": f"{label}/index",
                "alpha": alpha,
                "bm25_index_dir": "bm25/index",
                "queries": choice.queries,
                "gains": choice.gains,
            },
        )
        task = next(iter(self._splits))
        queries = self._queries(task, "test")
        lines = sorted({0, len(queries) // 3, 2 * len(queries) // 3})
        self._leave(row, label, questions=[queries[line].text for line in lines], task=task)

    def _leave(self, row: str, label: str, *, questions: Sequence[str], task: str | None) -> None:
        """Prints answers of the row's model, leaves retriever.json, and exports the model."""
        if questions:
            print(f"\nTest queries, answered by the model of {row}:")
        parts = answer(
            questions,
            root=self.root,
            folder=self.root / label,
            data_dir=self._setting.data_dir,
            collection=self.collection,
            task=task,
        )
        self.stages.run(
            "export",
            export_model,
            model_dir=parts.model_dir,
            output_dir=self.root / "export",
            **({"results_dir": self.root, "system": row} if questions else {}),
        )
        print(f"\nAll of it is under {self.root}: table.md, .csv and .png, runs, index, export.")
        print(f"In Python: taser_jax.Retriever.load({str(self.root)!r}).search(['your question'])")


# The stages before the plan.
_BEFORE = ("prepare", "vocab", "lengths", "tokenize", "measure")


def _check_systems(names: Sequence[str], candidates: Mapping[str, System]) -> None:
    unknown = sorted(set(names) - candidates.keys())
    if unknown or not names or len(set(names)) < len(names):
        raise ConfigError(
            f"systems {', '.join(names) or 'none'}",
            where="compare.systems",
            expected=f"of {', '.join(candidates)}, each once",
            fix="write --systems=taser,dpr",
        )


def _with_trained_experts(model: ModelConfig, chosen: Plan) -> ModelConfig:
    """The model with experts in trained blocks alone: one that is frozen is no expert.

    The frozen blocks are then those of the other systems, which share their states.
    """
    assert isinstance(model, DualEncoderConfig)
    blocks = model.transformer.num_layers
    if not chosen.frozen_blocks or model.experts.num_experts == 1:
        return model
    trained = [
        block for block in model.experts.specialized_blocks(blocks) if block > chosen.frozen_blocks
    ]
    experts = filled(model.experts, blocks=tuple(trained or [blocks]))
    return dataclasses.replace(model, experts=experts)


CONFIGURABLES = tuple(each for each in TASER_CONFIGURABLES if each is not Pretrained)
