"""Commitment between the checkpoints of a model, from moving averages, measured or saved.

Beside each rate stands the rate of pure noise under the same moving average.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence

from taser_jax.commands.analyzed_models import AnalyzedModel
from taser_jax.evaluation.specialty.commitment import (
    Averages,
    Commitment,
    Marks,
    compare,
    marks_of,
    no_averages,
)
from taser_jax.evaluation.specialty.config import AnalysisConfig
from taser_jax.evaluation.specialty.findings import OWN, CommitmentRow
from taser_jax.evaluation.specialty.noise import noise_commitments
from taser_jax.evaluation.specialty.saved_averages import has_saved_average, restore_saved_average
from taser_jax.evaluation.specialty.sensitivity import Sample
from taser_jax.models.batch import Batch
from taser_jax.optim.tsage_options import BiasCorrection
from taser_jax.storage.errors import ConfigError
from taser_jax.storage.progress import phase


def steps_to_compare(model: AnalyzedModel, config: AnalysisConfig) -> list[tuple[int, int]]:
    """Pairs of (earlier, later) steps to compare; empty for a single checkpoint."""
    if len(model.steps) < 2 and config.period is None:
        return []
    if config.period is None:
        return list(zip(model.steps[:-1], model.steps[1:], strict=True))
    found = [
        (step - config.period, step) for step in model.steps if step - config.period in model.steps
    ]
    if not found:
        raise ConfigError(
            f"no two checkpoints {config.period} steps apart",
            where=f"AnalysisConfig.period, {model.directory}",
            expected=f"a distance between two of {', '.join(map(str, model.steps))}",
            fix="correct it, or set it to None to compare each checkpoint with the one before",
        )
    return found


@dataclasses.dataclass(frozen=True)
class CheckpointCommitments:
    """The commitment rates of one model's checkpoints.

    Attributes:
        model: the checkpoints.
        pairs: (earlier, later) steps, from `steps_to_compare`.
        config: numbers of batches, β, temperature and bounds.
        samples: step -> sensitivities of single batches, for the rates of noise.
    """

    model: AnalyzedModel
    pairs: Sequence[tuple[int, int]]
    config: AnalysisConfig
    samples: Mapping[int, Sample]

    @property
    def steps(self) -> list[int]:
        """The steps compared, ascending."""
        return sorted({step for pair in self.pairs for step in pair})

    def measured(
        self,
        advance: Callable[..., Averages],
        draw: Callable[[int, int], Iterator[dict[str, Batch]]],
        *,
        tasks: Sequence[str],
    ) -> list[CommitmentRow]:
        """Rates at each β, from moving averages that continue over the checkpoints."""
        config, steps = self.config, self.steps
        if not config.betas:
            return []
        averages = None
        start = config.first_batch

        def mark(step: int) -> list[Marks]:
            nonlocal averages, start
            params = self.model.restore(step)
            if averages is None:
                averages = no_averages(params, tasks, betas=len(config.betas))
            averages = advance(
                averages,
                params,
                draw(start, config.num_batches),
                where=str(self.model.checkpoint(step)),
            )
            start += config.num_batches
            return self._marks(averages, config.betas, config.bias_correction)

        def noise(earlier: int, later: int) -> Sequence[Commitment | None]:
            batches = [config.num_batches * (1 + steps.index(step)) for step in (earlier, later)]
            return self._noise(later, config.betas, batches, config.bias_correction)

        return self._compared(mark, noise, names=[f"{beta:g}" for beta in config.betas])

    def saved(self) -> list[CommitmentRow]:
        """Rates from the averages that T-SAGE itself used; none if any was not saved."""
        model, uncorrected = self.model, BiasCorrection.NONE
        if not all(has_saved_average(model.checkpoint(step), model.params) for step in self.steps):
            return []

        def mark(step: int) -> list[Marks]:
            average = restore_saved_average(model.checkpoint(step), model.params)
            values = {
                task: {path: leaf[None] for path, leaf in tree.items()}
                for task, tree in average.items()
            }
            return self._marks(Averages(1, values), (0.0,), uncorrected)

        def noise(earlier: int, later: int) -> Sequence[Commitment | None]:
            beta = model.facts.get("tsage_beta")
            if beta is None:
                return [None]
            return self._noise(later, (beta,), (earlier, later), uncorrected)

        return self._compared(mark, noise, names=[OWN])

    def _noise(
        self, step: int, betas: Sequence[float], batches: Sequence[int], correction: BiasCorrection
    ) -> Sequence[Commitment | None]:
        sample = self.samples.get(step)
        # A batch whose median is 0 cannot be normalised; nor can T-SAGE normalise it.
        if sample is None or not (sample.batch_medians > 0).all():
            return [None] * len(betas)
        earlier, later = batches
        return noise_commitments(
            sample,
            betas=betas,
            batches=(earlier, later),
            temperature=self.config.temperature,
            bounds=self.config.bounds,
            bias_correction=correction,
        )

    def _marks(
        self, averages: Averages, betas: Sequence[float], correction: BiasCorrection
    ) -> list[Marks]:
        return marks_of(
            averages,
            betas=betas,
            temperature=self.config.temperature,
            bounds=self.config.bounds,
            bias_correction=correction,
        )

    def _compared(
        self,
        mark: Callable[[int], list[Marks]],
        noise: Callable[[int, int], Sequence[Commitment | None]],
        *,
        names: Sequence[str],
    ) -> list[CommitmentRow]:
        """Marks of each step in order, kept until no later step is compared with them."""
        marks: dict[int, list[Marks]] = {}
        rows = []
        with phase(f"{self.model.name}: commitment with β {', '.join(names)}"):
            for step in self.steps:
                marks[step] = mark(step)
                for earlier, later in self.pairs:
                    if later == step:
                        found = compare(marks[earlier], marks[later])
                        rows += [
                            CommitmentRow(self.model.name, earlier, later, *values)
                            for values in zip(names, found, noise(earlier, later), strict=True)
                        ]
                needed = {earlier for earlier, later in self.pairs if later > step}
                marks = {kept: value for kept, value in marks.items() if kept in needed}
        return rows
