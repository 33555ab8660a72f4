"""Commitment between the checkpoints of a model: from moving averages, measured or saved."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

from taser_jax.analysis.commitment import (
    Averages,
    Marks,
    compare,
    marks_of,
    no_averages,
)
from taser_jax.analysis.config import AnalysisConfig
from taser_jax.analysis.findings import OWN, CommitmentRow
from taser_jax.analysis.saved_averages import has_saved_average, restore_saved_average
from taser_jax.batch import Batch
from taser_jax.commands.analyzed_models import AnalyzedModel
from taser_jax.errors import ConfigError
from taser_jax.optim.tsage_options import BiasCorrection
from taser_jax.progress import phase


def steps_to_compare(model: AnalyzedModel, config: AnalysisConfig) -> list[tuple[int, int]]:
    """(earlier, later) steps to compare; none without β or with one checkpoint."""
    if not config.betas or (len(model.steps) < 2 and config.period is None):
        return []
    if config.period is None:
        return list(zip(model.steps[:-1], model.steps[1:], strict=True))
    found = [
        (step - config.period, step) for step in model.steps if step - config.period in model.steps
    ]
    if not found:
        raise ConfigError(
            f"no two checkpoints {config.period} steps apart",
            where=f"PERIOD, {model.directory}",
            expected=f"a distance between two of {', '.join(map(str, model.steps))}",
            fix="correct PERIOD, or set it to None to compare each checkpoint with the one before",
        )
    return found


def measured_commitments(
    model: AnalyzedModel,
    advance: Callable[..., Averages],
    draw: Callable[[int, int], Iterator[dict[str, Batch]]],
    pairs: Sequence[tuple[int, int]],
    config: AnalysisConfig,
    *,
    tasks: Sequence[str],
) -> list[CommitmentRow]:
    """Rates at each β, from moving averages that run on over the checkpoints."""
    averages = None
    start = config.first_batch

    def mark(step: int) -> list[Marks]:
        nonlocal averages, start
        params = model.restore(step)
        if averages is None:
            averages = no_averages(params, tasks, betas=len(config.betas))
        averages = advance(
            averages,
            params,
            draw(start, config.num_batches),
            where=str(model.checkpoint(step)),
        )
        start += config.num_batches
        return _marks(averages, config, betas=config.betas)

    names = [f"{beta:g}" for beta in config.betas]
    return _compared(model, pairs, mark, names=names)


def saved_commitments(
    model: AnalyzedModel, pairs: Sequence[tuple[int, int]], config: AnalysisConfig
) -> list[CommitmentRow]:
    """Rates from the averages that T-SAGE itself used; none where one was not saved."""
    steps = sorted({step for pair in pairs for step in pair})
    if not all(has_saved_average(model.checkpoint(step), model.params) for step in steps):
        return []
    uncorrected = dataclasses.replace(config, bias_correction=BiasCorrection.NONE)

    def mark(step: int) -> list[Marks]:
        average = restore_saved_average(model.checkpoint(step), model.params)
        values = {
            task: {path: leaf[None] for path, leaf in tree.items()}
            for task, tree in average.items()
        }
        return _marks(Averages(1, values), uncorrected, betas=(0.0,))

    return _compared(model, pairs, mark, names=[OWN])


def _marks(averages: Averages, config: AnalysisConfig, *, betas: Sequence[float]) -> list[Marks]:
    return marks_of(
        averages,
        betas=betas,
        temperature=config.temperature,
        bounds=config.bounds,
        bias_correction=config.bias_correction,
    )


def _compared(
    model: AnalyzedModel,
    pairs: Sequence[tuple[int, int]],
    mark: Callable[[int], list[Marks]],
    *,
    names: Sequence[str],
) -> list[CommitmentRow]:
    """Marks of each step in order, kept until no later step is compared with them."""
    marks: dict[int, list[Marks]] = {}
    rows = []
    with phase(f"{model.name}: commitment with β {', '.join(names)}"):
        for step in sorted({step for pair in pairs for step in pair}):
            marks[step] = mark(step)
            for earlier, later in pairs:
                if later == step:
                    found = compare(marks[earlier], marks[later])
                    rows += [
                        CommitmentRow(model.name, earlier, later, name, commitment)
                        for name, commitment in zip(names, found, strict=True)
                    ]
            needed = {earlier for earlier, later in pairs if later > step}
            marks = {kept: value for kept, value in marks.items() if kept in needed}
    return rows
