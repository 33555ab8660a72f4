"""`taser compare`: from folders of text to a table, an index, an export and a Gin file."""

from __future__ import annotations

import dataclasses
import pathlib
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from taser_jax.assembly.model_directory import read_model_config
from taser_jax.commands.pipelines.answers import answer, best_dense_row
from taser_jax.commands.pipelines.compare_plan import (
    Costs,
    FittedLength,
    default_steps,
    fit_length,
    length_buckets,
    padded_length,
    plan,
)
from taser_jax.commands.pipelines.compare_project import ROWS, UNTRAINED, Project, RunCommand
from taser_jax.commands.pipelines.stages import Stages
from taser_jax.commands.pipelines.taser import keep_compiled_programs
from taser_jax.data.prepare.detection import detect
from taser_jax.data.text.preprocessors import passage_ids
from taser_jax.data.text.vocabularies import load_vocabulary
from taser_jax.devices.hosts import writes
from taser_jax.evaluation.reports import ResultsTable
from taser_jax.storage.errors import ConfigError

_MEASURE = "nDCG@10"
_MEASURED_STEPS = 20
# Texts whose tokens are counted.
_SAMPLE = 2000
_LONGEST = {"query": 64, "passage": 256}


@writes("{output_dir}")
def compare(
    *,
    directories: Sequence[str],
    output_dir: str,
    pretrained: str | None = None,
    systems: str | Sequence[str] = "taser",
    minutes: float | None = None,
    validation_share: float = 0.1,
    feature_lengths: Mapping[str, int] | None = None,
    vocabulary_size: int = 8192,
    train_steps: int | None = None,
    batch_size: int = 32,
    learning_rate: float | None = None,
    seed: int = 0,
    run_command: RunCommand,
) -> ResultsTable:
    """Compares BM25, an untrained model, TASER and a hybrid on folders of text; exports the best.

    Detects the format of the folders (BEIR, DPR, KILT or TSV; `.gz` too), prepares them as one
    collection with a task each, makes what is missing (a validation split of the training queries,
    a vocabulary, lengths), and runs `taser pipeline taser`: BM25's negatives, training, mining, a
    second round, the hybrid with α chosen on validation. Every decision is printed with the Gin
    line that changes it, and kept in a Gin file in `output_dir`, with which each step can be
    repeated. If interrupted, rerun the command to resume.

    Example:
        `taser compare my_beir/ --pretrained=minilm --out=results`

    Args:
        directories: folders of text; each format is prepared on its own, and all are merged.
        output_dir: directory of all outputs.
        pretrained: weights to start from: "minilm", a directory or a hub id. Its files give
            pooling, normalisation, prompt and longest text. None starts from random weights.
        systems: "taser", "shared", "dpr", as a list or separated by commas.
        minutes: time budget for steps, frozen blocks and rounds; None sets no limit.
        validation_share: share of training queries that becomes a validation split, where there is
            none.
        feature_lengths: {"query": ..., "passage": ...}; None takes the data's 95th percentiles.
        vocabulary_size: entries of the vocabulary that is trained where nothing is pretrained.
        train_steps: steps of each training; None takes three epochs, within 100 to 1,000 steps.
        batch_size: queries per step.
        learning_rate: None takes 5e-5 for pretrained weights, else 1e-3.
        seed: seed of all trainings.
        run_command: runs a command with the Gin file; the command line gives it.

    Returns:
        The table, also in table.md, table.csv and table.png.

    Raises:
        ConfigError: folders whose format is not recognised or that have no training or test
            queries, an unknown system, or other settings than the directory was begun with.
    """
    names = systems.split(",") if isinstance(systems, str) else list(systems)
    _check_systems(names)
    root = pathlib.Path(output_dir)
    project = Project(
        run_command=run_command,
        root=root,
        collection=_collection_name(directories),
        detected=[detect(directory) for directory in directories],
        pretrained=pretrained,
        systems=names,
    )
    rate = learning_rate or (1e-3 if pretrained is None else 5e-5)
    given = {
        "directories": list(directories),
        "pretrained": pretrained,
        "systems": names,
        "validation_share": validation_share,
        "lengths": dict(feature_lengths or {}),
        "batch_size": batch_size,
    }
    stages = Stages(root)
    stages.run("compare", lambda **_: None, **given)
    keep_compiled_programs(root)
    project.decide_data(validation_share, vocabulary_size)
    project.prepare()
    project.check_splits()
    if pretrained is None:
        project.run("vocab")

    def lengths_stage(**_: object) -> dict[str, Any]:
        found = _lengths(project, feature_lengths or {})
        return {side: dataclasses.asdict(one) for side, one in found.items()}

    lengths = stages.run("compare-lengths", lengths_stage, **given)
    sides = {side: FittedLength(**one) for side, one in lengths.items()}
    project.decide_model(sides, batch_size=batch_size, learning_rate=rate, seed=seed)
    project.run("tokenize")
    measured = stages.run(
        "compare-measure",
        lambda **_: _measure(project, sides, batch_size),
        **given,
    )
    costs = Costs(**measured)
    steps = train_steps or default_steps(_training_queries(project), batch_size)
    chosen = plan(costs, steps=steps, minutes=minutes, pretrained=pretrained is not None)
    project.decide_training(chosen, costs, minutes)
    table: ResultsTable = project.run("pipeline taser")
    untrained = () if pretrained is None else (UNTRAINED,)
    trained = [ROWS[name] for name in names]
    best, folder = best_dense_row(
        table, root, systems=trained, untrained=untrained, rounds=chosen.rounds
    )
    _finish(project, stages, best, folder)
    return table


def _check_systems(names: Sequence[str]) -> None:
    unknown = sorted(set(names) - ROWS.keys())
    if unknown or not names or len(set(names)) < len(names):
        raise ConfigError(
            f"systems {', '.join(names) or 'none'}",
            where="compare.systems",
            expected=f"of {', '.join(ROWS)}, each once",
            fix="write --systems=taser,dpr",
        )


def _collection_name(directories: Sequence[str]) -> str:
    """The folder's name, or those of several, as a name for files."""
    names = [pathlib.Path(directory).resolve().name for directory in directories]
    slug = re.sub(r"\W+", "_", "_".join(names).lower()).strip("_")
    return slug if slug[:1].isalpha() else f"c_{slug}"


def _training_queries(project: Project) -> int:
    return sum(len(project.queries(task, "train")) for task in project.tasks)


def _lengths(project: Project, given: Mapping[str, int]) -> dict[str, FittedLength]:
    """Lengths of queries and passages, from a sample of the texts."""
    settings, vocabulary = project.settings, load_vocabulary(project.vocabulary)
    most = settings.max_length if settings and settings.max_length else _LONGEST["passage"]
    prompt = settings.query_prompt if settings else ""
    texts = [
        prompt + queries[row].text
        for task in project.tasks
        for queries in [project.queries(task, "train")]
        for row in _sampled(len(queries))
    ]
    store = project.passages
    passages = store.get_many(_sampled(len(store)))
    tokens = passage_ids(
        [passage.title for passage in passages],
        [passage.text for passage in passages],
        vocabulary,
        None,
    )
    counts = {
        "query": [2 + len(ids) for ids in vocabulary.encode(texts)],
        "passage": [len(ids) for ids in tokens],
    }
    return {
        side: fit_length(found, longest=min(_LONGEST[side], most), given=given.get(side))
        for side, found in counts.items()
    }


def _measure(project: Project, sides: Mapping[str, FittedLength], batch_size: int) -> Costs:
    """Costs from a few steps of the first system."""
    directory = project.root / "measured"
    # What a killed run left would be resumed, with fewer steps to time or none.
    shutil.rmtree(directory, ignore_errors=True)
    start = time.monotonic()
    summary = project.run(
        "train",
        ("MODEL_DIR", str(directory)),
        ("MODEL", f"@{project.systems[0]}/DualEncoderConfig()"),
        ("TRAIN_STEPS", str(_MEASURED_STEPS)),
        ("WARMUP_STEPS", "1"),
        ("TrainingConfig.validation", "None"),
    )
    wall = time.monotonic() - start
    model = read_model_config(str(directory))
    shutil.rmtree(directory)
    step = 1 / summary.steps_per_second
    buckets = length_buckets(*sides.values())
    query, passage = (padded_length(sides[side], buckets) for side in ("query", "passage"))
    # Queries, positives and hard negatives, forward and backward: three forward passes.
    tokens = 3 * batch_size * (query + 2 * passage)
    return Costs(
        step_seconds=step,
        start_seconds=max(0.0, wall - _MEASURED_STEPS * step),
        encode_seconds=len(project.passages) * sides["passage"].mean * step / tokens,
        blocks=model.transformer.num_layers,
        systems=len(project.systems),
        untrained=project.pretrained is not None,
    )


def _finish(project: Project, stages: Stages, best: str, folder: pathlib.Path) -> None:
    """Answers test queries with the best dense row, exports it, and prints where everything is."""
    task = next(iter(project.tasks))
    queries = project.queries(task, "test")
    rows = sorted({0, len(queries) // 3, 2 * len(queries) // 3})
    questions = [queries[row].text for row in rows]
    project.decide_answers(best, folder, questions=questions, task=task)
    print(f"\nTest queries, answered by {best}, the best dense row by {_MEASURE}:")
    parts = answer(
        questions,
        root=project.root,
        folder=folder,
        data_dir=project.data_dir,
        collection=project.collection,
        task=task,
    )

    def export(*, model_dir: str) -> dict[str, Any]:
        return {"formats": list(project.run("export"))}

    stages.run("compare-export", export, model_dir=parts.model_dir)
    print(f"\nAll of it is under {project.root}: table.md, .csv and .png, runs, index, export.")
    print(f"Repeat a step: taser train --gin_file={project.gin_file}")
    print(f"In Python: taser_jax.Retriever.load({str(project.root)!r}).search(['your question'])")


def _sampled(count: int) -> list[int]:
    """Rows of a sample, in order."""
    rng = np.random.default_rng(0)
    size = min(count, _SAMPLE)
    return sorted(rng.choice(count, size=size, replace=False).tolist())


CONFIGURABLES = ()
