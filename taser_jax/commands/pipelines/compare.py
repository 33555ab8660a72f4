"""`taser compare`: from folders of text to a table, a recommendation, an index and an export."""

from __future__ import annotations

import dataclasses
import functools
import math
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax

from taser_jax.commands.pipelines import compare_parts, compare_plan
from taser_jax.commands.pipelines.compared_rows import ComparedRows
from taser_jax.commands.pipelines.cross_validation import DEPTH, RANKED, choose_bm25
from taser_jax.commands.pipelines.retrieval_stages import DEVELOPMENT, Setting, System
from taser_jax.commands.pipelines.stages import pipeline_records
from taser_jax.commands.tokenize import make_vocabulary, tokenize
from taser_jax.data.collections.store import PassageStore, QuerySet
from taser_jax.data.prepare.made_queries import make_queries
from taser_jax.devices.hosts import writes
from taser_jax.evaluation.reports import ResultsTable
from taser_jax.interop import collections_by_name
from taser_jax.interop.hub import fetch, read_encoder_settings
from taser_jax.interop.pretrained import Pretrained, pretrained_bert, pretrained_normalization
from taser_jax.models.batch import Normalization
from taser_jax.models.dual_encoder import ModelConfig
from taser_jax.retrieval.bm25 import Bm25Config
from taser_jax.storage.errors import ConfigError, check_known
from taser_jax.storage.progress import logger
from taser_jax.storage.typed_files import PositiveNumber

# A system's name on the command line -> in the table, where that differs.
ROWS = {"shared": "Shared", "taser": "TASER", "dpr": "DPR"}
# (k1, b): Anserini's, then those of Lucene, of Robertson and Zaragoza, and of short texts.
_BM25 = ((0.9, 0.4), (1.2, 0.75), (1.5, 0.75), (0.6, 0.2))
# Beyond about this many passages one BM25 is enough.
_FEW_PASSAGES = 100_000
# As many validation queries choose BM25's parameters without the training queries.
_ENOUGH = 200


@writes("{setting.output_dir}", kinds=[])
def compare(
    *,
    directories: Sequence[str],
    setting: Setting,
    candidates: Mapping[str, System],
    systems: str | Sequence[str] = ("shared", "taser"),
    pretrained: str | None = None,
    minutes: PositiveNumber | None = None,
    memory: PositiveNumber | None = None,
    queries: str | None = None,
    validation_share: float = 0.1,
    strict: bool = False,
    feature_lengths: Mapping[str, int] | None = None,
    vocabulary_size: int = 8192,
    train_steps: int | None = None,
    rounds: Literal[1, 2] | None = None,
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
        directories: folders of text, or tasks of others such as "mteb:SciFact"; all become one
            collection.
        setting: what all stages share; its places are below its output directory. Fields that have
            their defaults are decided from the data.
        candidates: name -> system that can be trained.
        systems: those that are, as a list or separated by commas.
        pretrained: weights to start from: "minilm", a directory or a hub id. Its files give
            pooling, normalisation, prompt and longest text. None starts from random weights.
        minutes: time budget from the start of the command; None sets no limit. With one, products
            are in bfloat16 where the processor multiplies it.
        memory: GiB that a training may take: its batches are encoded in chunks that fit. None
            means 4 on a CPU, and no limit elsewhere.
        queries: "make" makes training, validation and test queries of the passages, which have
            none of their own: of titles, first sentences and others, cut out of their passages.
        validation_share: share of training queries that becomes a validation split, where there is
            none.
        strict: whether to refuse what is otherwise left out and listed, such as empty passages.
        feature_lengths: {"query": ..., "passage": ...}; None takes the pretrained model's own
            length or, from random weights, the 95th percentiles.
        vocabulary_size: entries of the vocabulary that is trained where nothing is pretrained.
        train_steps: steps of each training; None follows the number of distinct training queries,
            as do rounds and folds, and the optimiser's rate and warm-up where they are 0.
        rounds: 2 trains again on mined negatives.
        folds: folds of cross-validation; 0 chooses on the validation queries.
        config_text: written to config.gin.

    Returns:
        The table, also in table.md, table.csv and table.png; None for a collection without queries.

    Raises:
        ConfigError: folders whose format is not recognised or that have no test queries, an unknown
            system, or other settings than the directory was begun with.
    """
    if queries not in (None, "make"):
        raise ConfigError(f"queries {queries!r}", where="--queries", fix="write --queries=make")
    names = systems.split(",") if isinstance(systems, str) else list(systems)
    check_known(names, candidates, where="compare.systems", what="system")
    both = ("query", "passage")
    check_known(feature_lengths or (), both, where="TASK_FEATURE_LENGTHS", what="length of")
    # A folder's name may be completed with a slash when the command is run again.
    directories = [str(pathlib.Path(collections_by_name.as_folder(name))) for name in directories]
    fixed = {
        "steps": train_steps,
        "learning_rate": setting.training.optimizer.learning_rate or None,
        "rounds": rounds,
        "folds": folds,
        "frozen_blocks": setting.training.train_from_block or None,
    }
    run = _Run(
        setting=dataclasses.replace(
            setting, data_dir=str(pathlib.Path(setting.output_dir) / "data")
        ),
        systems={ROWS.get(name, name): candidates[name] for name in names},
        pretrained=pretrained,
        collection=compare_parts.collection_name(directories),
        lengths=feature_lengths or {},
        vocabulary_size=vocabulary_size,
        fixed={name: value for name, value in fixed.items() if value is not None},
    )
    with pipeline_records(setting.output_dir, config_text) as record:
        run.splits = run.stages.run(
            "prepare",
            compare_parts.prepare_detected,
            directories=list(directories),
            checksums=compare_parts.file_checksums(directories, setting.output_dir),
            validation_share=validation_share,
            strict=strict,
            **run.data,
        )
        if queries is not None:
            run.make_queries()
        compare_parts.check_splits(run.splits, is_pretrained=pretrained is not None)
        compare_parts.check_judged(run.splits, setting.evaluation, **run.data)
        sides = run.tokenize(run.lengths)
        run.decide_model(is_hurried=minutes is not None)
        if run.tasks_with("train"):
            run.plan(sides, minutes, memory)
        run.decide_bm25()
        record("decided.gin", "\n".join(run.decisions))
        if not run.splits:
            run.index_only()
            return None
        return run.compare()


@dataclasses.dataclass(kw_only=True)
class _Run(ComparedRows):
    """A comparison whose settings are decided one after another."""

    lengths: Mapping[str, int]
    vocabulary_size: int
    fixed: Mapping[str, Any]

    def __post_init__(self) -> None:
        super().__post_init__()
        self._buckets = self.setting.training.length_buckets
        self.decisions: list[str] = []

    def _decide(self, reason: str, **settings: object) -> None:
        """Logs a decision as Gin lines."""
        lines = [f"{name.replace('__', '.')} = {value!r}" for name, value in settings.items()]
        logger.info("decided: %s", reason)
        for line in lines:
            logger.info("  %s", line)
        self.decisions += [f"# {reason[:1].upper()}{reason[1:]}.", *lines, ""]

    def make_queries(self) -> None:
        """Goes on with a collection of passages and the queries that were cut out of them."""
        if self.splits:
            problem = f"there are queries of {', '.join(self.splits)}"
            raise ConfigError(problem, where="--queries", fix="leave it out")
        self.whole, self.collection = self.collection, f"{self.collection}_made"
        self.splits = self.stages.run("make-queries", make_queries, source=self.whole, **self.data)

    def tokenize(
        self, lengths: Mapping[str, int], *, again: str = ""
    ) -> dict[str, compare_plan.FittedLength]:
        """Vocabulary, lengths and tokens; `again` is of the stages of further lengths."""
        own = None
        if self.pretrained is None:
            vocabulary = self.root / "vocabulary"
            size = self.vocabulary_size
            self.stages.run("vocab", make_vocabulary, output_dir=vocabulary, size=size, **self.data)
        else:
            vocabulary = fetch(self.pretrained)
            positions = pretrained_bert(self.pretrained).max_length
            own = read_encoder_settings(vocabulary).longest(positions)
        fitted = self.stages.run(
            f"lengths{again}",
            compare_parts.fit_lengths,
            vocabulary=str(vocabulary),
            own_length=own,
            given=dict(lengths),
            **self.data,
        )
        sides = {side: compare_plan.FittedLength(**values) for side, values in fitted.items()}
        lengths = {side: fit.tokens for side, fit in sides.items()}
        cuts = [f"{fit.cut:.1%} of {side} texts are cut" for side, fit in sides.items()]
        buckets = self._buckets or tuple(compare_plan.length_buckets(*sides.values()))
        self._decide(
            f"lengths: {', '.join(cuts)}; and lengths that batches are padded to",
            TASK_FEATURE_LENGTHS=lengths,
            TrainingConfig__length_buckets=buckets,
        )
        self.setting = dataclasses.replace(
            self.setting,
            token_store=str(self.root / f"tokens{again}"),
            training=dataclasses.replace(self.setting.training, length_buckets=buckets),
        )
        self.stages.run(
            f"tokenize{again}",
            tokenize,
            data_dir=self.setting.data_dir,
            output_dir=self.setting.token_store,
            vocabulary=str(vocabulary),
            feature_lengths=lengths,
            mixture_or_task=self.collection if self.splits else None,
            collection=None if self.splits else self.collection,
        )
        return sides

    def decide_model(self, *, is_hurried: bool) -> None:
        """Sizes and pooling, precision, temperature and the depth of lists."""
        setting, training = self.setting, self.setting.training
        objective = training.objective
        named = None if self.pretrained is None else pretrained_normalization(self.pretrained)
        if named is Normalization.L2:
            objective = compare_parts.filled(objective, temperature=0.05)
            self._decide(
                "embeddings are normalised, as the pretrained weights say: a temperature sharpens "
                "cosines",
                ObjectiveConfig__temperature=objective.temperature,
            )
        passages = len(PassageStore.open(**self.data))
        depth = min(setting.k, passages)
        self._decide(f"{passages:,} passages: results per query", TOP_K=depth)
        self.setting = dataclasses.replace(
            setting,
            k=depth,
            first_mining=compare_parts.filled(setting.first_mining, depth=depth),
            second_mining=compare_parts.filled(setting.second_mining, depth=depth),
            training=dataclasses.replace(
                training,
                objective=objective,
                pretrained=None if self.pretrained is None else Pretrained(self.pretrained),
            ),
        )
        dtype = "float32"
        if is_hurried and compare_parts.multiplies_bfloat16():
            dtype = "bfloat16"
            reason = "more fits into these minutes: the processor multiplies bfloat16"
            self._decide(reason, BertConfig__dtype=dtype)
        self._change_models(
            functools.partial(compare_parts.with_weights, pretrained=self.pretrained, dtype=dtype)
        )

    def _change_models(self, change: Callable[[ModelConfig], ModelConfig]) -> None:
        for name, system in self.systems.items():
            self.systems[name] = dataclasses.replace(system, model=change(system.model))

    def _distinct_queries(self, split: str) -> int:
        """Number of different texts among a split's queries, over all tasks that have it.

        Folds are of these: a text that several tasks ask is in one fold.
        """
        tasks = self.tasks_with(split)
        sets = (QuerySet.open(task=task, split=split, **self.data) for task in tasks)
        return len({query.text for queries in sets for query in queries})

    def decide_bm25(self) -> None:
        """The k1 and b that rank the labelled queries best; as set where they are set."""
        setting, splits = self.setting, list(filter(self.tasks_with, (DEVELOPMENT, "train")))
        few_passages = len(PassageStore.open(**self.data)) <= _FEW_PASSAGES
        if not splits or not few_passages or setting.bm25 != Bm25Config():
            return
        if self._distinct_queries(DEVELOPMENT) >= _ENOUGH:
            splits = [DEVELOPMENT]
        candidates = [Bm25Config(k1=k1, b=b) for k1, b in _BM25]
        best = self.stages.run(
            "bm25-choose",
            choose_bm25,
            output_dir=self.root / "bm25" / "grid",
            splits=splits,
            candidates=candidates,
            measure=setting.hybrid_measure,
            evaluation=setting.evaluation,
            own_passage_tasks=list(setting.own_passage_tasks),
            **self.data,
        )
        if best:
            k1, b = _BM25[best]
            self._decide("BM25", Bm25Config__k1=k1, Bm25Config__b=b)
            self.setting = dataclasses.replace(setting, bm25=candidates[best])

    def plan(
        self,
        sides: Mapping[str, compare_plan.FittedLength],
        minutes: float | None,
        memory: float | None,
    ) -> None:
        """Batches, rate, steps, frozen blocks, rounds and folds, by queries, time and memory."""
        queries, validation = map(self._distinct_queries, ("train", DEVELOPMENT))
        training, is_pretrained = self.setting.training, self.pretrained is not None
        model = next(iter(self.systems.values())).model
        blocks = model.transformer.num_layers
        preferred = compare_plan.defaults(
            queries,
            validation=validation,
            blocks=blocks if is_pretrained else None,
            width=model.transformer.embed_dim,
            batch_size=training.batching.batch_size,
            frozen=self.fixed.get("frozen_blocks"),
        )
        preferred = dataclasses.replace(preferred, **self.fixed)
        compare_parts.check_folds(preferred.folds, queries=queries)
        if memory is None:
            memory = 4.0 if jax.default_backend() == "cpu" else math.inf
        chunks = functools.partial(compare_parts.chunks_that_fit, model, sides=sides, gib=memory)
        measured = self.stages.run(
            "measure",
            compare_parts.measure,
            model_dir=self.root / "measured",
            token_store=self.setting.token_store,
            model=model,
            training=compare_parts.measured_training(training, preferred, chunks(preferred)),
            encode=self.setting.encode,
        )
        done = sorted(self.stages.finished() & _BEFORE)
        passages = len(PassageStore.open(**self.data))
        may_cut = "passage" not in self.lengths
        validated = min(1.0, DEPTH * min(RANKED, validation) / passages)
        costs = compare_plan.Costs(
            **measured,
            blocks=blocks,
            systems=len(self.systems),
            pretrained=is_pretrained,
            spent_seconds=sum(self.stages.record(name).seconds for name in done),
            pool_share=min(1.0, 2 * DEPTH * RANKED / passages),
            validation_share=(1 if preferred.folds else compare_parts.VALIDATIONS) * validated,
            chunks=chunks,
            shorter=compare_plan.shorter_passages(**sides) if may_cut else {},
        )
        chosen = compare_plan.plan(costs, preferred, minutes=minutes, fixed=self.fixed)
        self._decide(
            f"{queries:,} distinct training queries: batches and rate",
            BATCH_SIZE=chosen.batch_size,
            LEARNING_RATE=chosen.learning_rate,
        )
        self._decide(
            f"about {chosen.seconds / 60:.0f} minutes, by steps of {costs.step_seconds:.2f} s",
            TRAIN_STEPS=chosen.steps,
            ROUNDS=chosen.rounds,
            FOLDS=chosen.folds,
            TrainingConfig__train_from_block=chosen.frozen_blocks,
        )
        num_chunks = chunks(chosen)
        if num_chunks > 1:
            self._decide(f"trains in {memory:g} GiB", TrainingConfig__num_chunks=num_chunks)
        if minutes is not None and chosen.seconds > 60 * minutes:
            logger.warning("even the shortest comparison takes longer than %g minutes", minutes)
        if chosen.passage_tokens is not None:
            lengths = {side: fit.tokens for side, fit in sides.items()}
            self.tokenize({**lengths, "passage": chosen.passage_tokens}, again="-cut")
        training = compare_parts.planned(
            self.setting.training,
            chosen,
            num_chunks=num_chunks,
            states_dir=str(self.root / "states"),
            is_pretrained=is_pretrained,
            validation=validation,
        )
        self.setting = dataclasses.replace(self.setting, training=training)
        self._change_models(functools.partial(compare_parts.with_trained_experts, chosen=chosen))
        self.chosen = chosen


# The stages before the plan.
_BEFORE = {"prepare", "make-queries", "vocab", "lengths", "tokenize", "measure"}
