"""The Gin file of `taser compare`, as far as it is decided, and the commands that read it."""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from taser_jax.commands.pipelines.compare_files import Preparation, preparations
from taser_jax.commands.pipelines.compare_plan import Costs, FittedLength, Plan, length_buckets
from taser_jax.commands.pipelines.setting import BM25, FinalNegatives
from taser_jax.data.collections.store import PassageStore, QuerySet, list_tasks
from taser_jax.data.prepare.detection import DetectedFiles
from taser_jax.data.seqio_tasks.merged_collections import merge_collections
from taser_jax.interop.encoder_settings import EncoderSettings, read_encoder_settings
from taser_jax.interop.hub import fetch
from taser_jax.models.dual_encoder import Normalization
from taser_jax.models.routing import ExpertConfig
from taser_jax.storage.artifacts import file_name, write_text
from taser_jax.storage.errors import ConfigError
from taser_jax.storage.progress import logger

UNTRAINED = "Pretrained, untrained"
# A system's name on the command line -> in the table.
ROWS = {"taser": "TASER", "shared": "Shared", "dpr": "DPR"}
# Beyond about this many passages ScaNN is worth building.
_EXACT_PASSAGES = 100_000


RunCommand = Callable[[str, str, Sequence[tuple[str, str]]], object]
"""Runs `taser NAME --gin_file=FILE --gin.BINDING=VALUE`, and returns what the command returns."""


@dataclasses.dataclass
class Project:
    """One comparison: its Gin file as far as it is decided, and the commands that read it."""

    run_command: RunCommand
    root: pathlib.Path
    collection: str
    detected: Sequence[DetectedFiles]
    pretrained: str | None
    systems: Sequence[str]
    lines: list[str] = dataclasses.field(default_factory=list)

    @property
    def gin_file(self) -> pathlib.Path:
        """The Gin file with all decisions, for every command."""
        return self.root / f"{self.collection}.gin"

    @property
    def data_dir(self) -> str:
        """Folder of collections."""
        return str(self.root / "data")

    @property
    def tasks(self) -> dict[str, list[str]]:
        """Task -> its splits, of the prepared collection."""
        return list_tasks(self.data_dir, self.collection)

    @property
    def passages(self) -> PassageStore:
        """The prepared passages."""
        return PassageStore.open(self.data_dir, self.collection)

    @property
    def vocabulary(self) -> pathlib.Path:
        """The vocabulary's folder: the pretrained weights', or that of one to train."""
        return self.root / "vocabulary" if self.pretrained is None else fetch(self.pretrained)

    @property
    def preparations(self) -> list[Preparation]:
        """The commands that prepare the folders."""
        return preparations(self.detected, collection=self.collection)

    def prepare(self) -> None:
        """Prepares the collection; folders of several formats as one for each, then merged."""
        found = self.preparations
        for one in found:
            self.run(f"prepare {one.format.value}")
        if len(found) > 1:
            merge_collections(self.data_dir, self.collection, [one.collection for one in found])

    @property
    def settings(self) -> EncoderSettings | None:
        """Pooling, normalisation, prompt and length, as the pretrained directory has them."""
        return None if self.pretrained is None else read_encoder_settings(fetch(self.pretrained))

    def _decide(self, what: str, *lines: str) -> None:
        """Adds Gin lines and logs what they decide."""
        logger.info("decided: %s", what)
        for line in "\n".join(lines).splitlines():
            logger.info("  %s", line)
        self.lines += [f"# {what[:1].upper()}{what[1:]}.", *lines, ""]

    def _write(self) -> None:
        head = f"# Written by `taser compare`. Every command takes it: --gin_file={self.gin_file}"
        write_text(self.gin_file, "\n".join([head, "", *self.lines]))

    def run(self, name: str, *bindings: tuple[str, str]) -> Any:
        """Runs a command as `taser NAME --gin_file=...` does."""
        self._write()
        logger.info("$ taser %s --gin_file=%s", name, self.gin_file)
        return self.run_command(name, str(self.gin_file), bindings)

    def decide_data(self, validation_share: float, vocabulary_size: int) -> None:
        """The files, and where everything goes."""
        model = "models/bert_tiny.gin" if self.pretrained is None else "models/bert_pretrained.gin"
        self.lines += ["include 'runs/compared.gin'", f"include '{model}'", ""]
        found = self.preparations
        names = " and ".join(one.format.value.upper() for one in found)
        merged = ", which merges one for each format" if len(found) > 1 else ""
        self._decide(
            f"the collection, from {names} files{merged}",
            f"COLLECTION = {self.collection!r}",
            *(line for one in found for line in one.lines),
        )
        self._decide(
            "a task without validation queries gets them from its training queries",
            f"VALIDATION_SHARE = {validation_share}",
        )
        vocabulary = f"VOCABULARY = {str(self.vocabulary)!r}"
        if self.pretrained is None:
            size = f"VOCAB_SIZE = {vocabulary_size}"
            self._decide("a vocabulary is trained", vocabulary, size)
        else:
            weights = f"PRETRAINED = {self.pretrained!r}"
            self._decide("the vocabulary is the weights'", vocabulary, weights)
        self._decide(
            "everything is written below one directory",
            *self._places(OUTPUT_DIR="", EVAL_OUTPUT_DIR="", DATA_DIR="data", TOKEN_STORE="tokens"),
            *self._places(BM25_INDEX_DIR="bm25/index", BM25_RUNS_DIR="bm25/runs"),
            *self._places(HYBRID_RUNS_DIR="hybrid", EXPORT_DIR="export"),
            f"MIXTURE_OR_TASK_NAME = {self.collection!r}",
        )

    def _places(self, **folders: str) -> list[str]:
        return [f"{name} = {str(self.root / folder)!r}" for name, folder in folders.items()]

    def check_splits(self) -> None:
        """Checks that there are queries to train on, to choose by and to report."""
        tasks = self.tasks
        for split in ("train", "validation", "test"):
            missing = [task for task, splits in tasks.items() if split not in splits]
            if missing:
                raise ConfigError(
                    f"task {', '.join(missing)} has no {split} split",
                    where=", ".join(found.passages for found in self.detected),
                    expected="queries to train on, and queries to test with",
                    fix="add their files; a validation split is made of training queries, and "
                    "none is made of test queries",
                )

    def queries(self, task: str, split: str) -> QuerySet:
        """A task's queries of a split."""
        return QuerySet.open(self.data_dir, self.collection, task, split)

    def decide_model(
        self,
        sides: Mapping[str, FittedLength],
        *,
        batch_size: int,
        learning_rate: float,
        seed: int,
    ) -> None:
        """Lengths, batches and systems."""
        cut = ", ".join(f"{side.cut:.1%} of {name} texts are cut" for name, side in sides.items())
        tokens = {name: side.tokens for name, side in sides.items()}
        buckets = length_buckets(*sides.values())
        self._decide(
            f"lengths: {cut}",
            f"TASK_FEATURE_LENGTHS = {tokens}",
            *([f"TrainingConfig.length_buckets = {buckets}"] if buckets else []),
        )
        cosines = self.settings is not None and (self.settings.normalization is Normalization.L2)
        if cosines:
            self._decide(
                "embeddings are normalised, as the pretrained weights say: cosines are sharpened "
                "by a temperature",
                "ObjectiveConfig.temperature = 0.05",
            )
        elif self.pretrained is None:
            self._decide(
                "from random weights the mean over tokens learns faster than [CLS]",
                "DualEncoderConfig.pooling = 'mean'",
            )
        self._decide(
            "batches and learning rate",
            f"BATCH_SIZE = {batch_size}",
            f"LEARNING_RATE = {learning_rate}",
            f"RANDOM_SEED = {seed}",
        )
        passages = len(self.passages)
        kind = "exact" if passages <= _EXACT_PASSAGES else "scann"
        self._decide(f"{passages:,} passages: the index", f"IndexConfig.kind = {kind!r}")
        depth = min(100, passages)
        self._decide("results per query", f"TOP_K = {depth}", f"MiningConfig.depth = {depth}")
        rows = ", ".join(f"{ROWS[name]!r}: @{name}/System()" for name in self.systems)
        untrained = f"{{{UNTRAINED!r}: @shared/System()}}" if self.pretrained else "{}"
        more = [f"SignificanceConfig.more_baselines = [{UNTRAINED!r}]"] if self.pretrained else []
        self._decide(
            "the rows of the table, beside BM25",
            f"pipeline_taser.systems = {{{rows}}}",
            f"pipeline_taser.hybrid_systems = {[ROWS[name] for name in self.systems]}",
            f"pipeline_taser.untrained_systems = {untrained}",
            *more,
        )

    def decide_training(self, chosen: Plan, costs: Costs, minutes: float | None) -> None:
        """Steps, frozen blocks and rounds, with the time that they take."""
        budget = "" if minutes is None else f"; the budget is {minutes:g}"
        frozen = [
            f"TrainingConfig.train_from_block = {chosen.frozen_blocks}",
            f"TrainingConfig.states_dir = {str(self.root / 'states')!r}",
        ]
        if "taser" in self.systems:
            # An expert that is not trained is no expert, and without one the frozen blocks are
            # those of the other systems and of the untrained model, which share their states.
            blocks = ExpertConfig(num_experts=2).specialized_blocks(costs.blocks)
            trained = [block for block in blocks if block > chosen.frozen_blocks]
            frozen.append(f"taser/ExpertConfig.blocks = {trained or [costs.blocks]}")
        self._decide(
            f"about {math.ceil(chosen.seconds / 60)} minutes from here, by measured steps of "
            f"{costs.step_seconds:.2f} s{budget}",
            f"TRAIN_STEPS = {chosen.steps}",
            f"WARMUP_STEPS = {max(1, chosen.steps // 10)}",
            f"pipeline_taser.rounds = {chosen.rounds}",
            *(frozen if chosen.frozen_blocks else ()),
        )
        self._decide_last_round(chosen.rounds)
        if minutes is not None and chosen.seconds > 60 * minutes:
            logger.warning("even the shortest comparison takes longer than %g minutes", minutes)

    def _decide_last_round(self, rounds: int) -> None:
        """Places for commands that take one model: those of the first system's last training."""
        name = ROWS[self.systems[0]]
        last, mined = f"{file_name(name)}-{rounds}", file_name(BM25)
        learned_from, config = [mined], "@first/MiningConfig()"
        if rounds > 1:
            mined, config = f"{file_name(name)}-1", "@second/MiningConfig()"
            joins = FinalNegatives.of_paper(len(self.tasks)) is FinalNegatives.JOINED
            learned_from = [*(learned_from if joins else ()), mined]
        directories = [str(self.root / one / "negatives") for one in learned_from]
        self._decide(
            "commands that take one model take the last round of the first system; `taser "
            "evaluate` adds a row of its own to the table",
            f"SYSTEM = {f'{name} (repeated)'!r}",
            *self._places(MODEL_DIR=f"{last}/model", EMBEDDINGS_DIR=f"{last}/embeddings"),
            *self._places(INDEX_DIR=f"{last}/index", RUNS_DIR=f"{last}/runs"),
            f"search.tag = {last!r}",
        )
        self._decide(
            "it learned from the hard negatives of these folders; `taser mine` repeats the last of "
            "them into one of its own, which NEGATIVES_DIRS may name",
            f"NEGATIVES_DIRS = {directories}",
            *self._places(NEGATIVES_DIR="mined"),
            f"mine.runs_dir = {str(self.root / mined / 'runs')!r}",
            f"mine.config = {config}",
        )

    def decide_answers(
        self, best: str, folder: pathlib.Path, *, questions: Sequence[str], task: str
    ) -> None:
        """What is exported and asked; writes the finished file."""
        self._decide(
            f"the export is of {best}, the best dense row",
            f"export_model.model_dir = {str(folder / 'model')!r}",
            f"export_model.results_dir = {str(self.root)!r}",
            f"export_model.system = {best!r}",
        )
        self._decide(
            "questions: test queries, answered as those of their task",
            f"QUESTIONS = {list(questions)}",
            f"ask.task = {task!r}",
        )
        self._write()
