"""`taser pipeline moma`: episodes that train an end retriever and its lookup in turn."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence

from taser_jax.assembly.config import TrainingConfig
from taser_jax.commands.inputs import check_collection
from taser_jax.commands.pipelines.episodes import Episode, Episodes, number_episodes
from taser_jax.commands.pipelines.setting import Setting
from taser_jax.commands.pipelines.taser import CONFIGURABLES as TASER_CONFIGURABLES
from taser_jax.commands.pipelines.taser import begin_pipeline, check_depth, print_table
from taser_jax.data.collections.store import PassageStore
from taser_jax.data.token_store.store import TokenStore
from taser_jax.devices.hosts import writes
from taser_jax.evaluation.reports import ResultsTable
from taser_jax.models.dual_encoder import ModelConfig
from taser_jax.systems.moma.moma_options import (
    Documents,
    EvaluatedLookup,
    LookupTraining,
    MomaConfig,
    Trained,
)
from taser_jax.systems.moma.moma_targets import search_targets
from taser_jax.systems.moma.stages import MomaStages


@writes("{setting.output_dir}")
def pipeline_moma(
    *,
    setting: Setting,
    model: ModelConfig,
    moma: MomaConfig,
    episodes: Sequence[Episodes] = (),
    lookup_training: TrainingConfig | None = None,
    name: str = "MoMA",
    config_text: str = "",
) -> ResultsTable:
    """Warms up on BM25's negatives, then trains end retriever and lookup in each episode.

    Episode t looks documents up with f_a,t−1, trains f_t on the negatives of f_t−1, scores the
    documents by f_t's attention, and trains f_a,t on them. If interrupted, rerun the command to
    resume at the interrupted stage.

    Args:
        setting: what all stages share; its training is the warm-up's, its second mining that of
            the end retriever.
        model: the end retriever, which fuses documents; without documents, also the lookup, which
            has its own weights.
        moma: the memories, and what MoMA is compared with.
        episodes: the end retriever's trainings.
        lookup_training: training of the lookup in each episode; None uses the episode's own. The
            paper samples one of several positives in each step: `PositiveChoice.SAMPLE`.
        name: the model's name in the table's rows.
        config_text: written to config.gin.

    Returns:
        The table, also in table.md, table.csv and table.png.

    Raises:
        ConfigError: the directory was begun with other settings, or the model fuses no documents.
        StorageError: the directory cannot be written.

    Source: MoMA, section 3.3. Unstated there and our choice: an episode looks up before it mines,
        so that mining sees the newest lookup; episode 1 mines without documents; (f_t, f_a,t) is
        evaluated; every training has a fresh optimiser.
    """
    check_depth(setting)
    if not model.fuses:
        raise model.no_fusion()
    begin_pipeline(pathlib.Path(setting.output_dir), config_text)
    store = TokenStore.open(setting.token_store)
    check_collection(store, PassageStore.open(setting.data_dir, store.metadata.collection))
    setting.check_tasks(store.tasks)
    run = MomaStages(setting, model, moma, name, store)
    rows: list[str] = []
    warmed = run.warm_up(rows)
    numbered = list(number_episodes(episodes))
    finished = {}
    for kind in map(LookupTraining, moma.compared):
        steps = _Alternation(run, kind, lookup_training, rows)
        finished[kind] = steps.train(warmed, numbered)
    search_targets(run, finished)
    return print_table(setting, rows, by_task=setting.evaluation.measures[0])


@dataclasses.dataclass(frozen=True)
class _Alternation:
    """The episodes of one of the compared ways to train the lookup."""

    run: MomaStages
    kind: LookupTraining
    lookup_training: TrainingConfig | None
    rows: list[str]

    def train(self, warmed: Trained, episodes: Sequence[Episode]) -> tuple[Trained, Trained | None]:
        """The last end retriever and lookup, from the warmed-up model; None without a lookup."""
        run, kind = self.run, self.kind
        end = warmed
        if kind is LookupTraining.NONE:
            lookup, documents = None, None
        else:
            lookup, documents = warmed, run.look_up(warmed)
        newest, found = lookup, documents
        for episode in episodes:
            label = f"{kind.prefix}{episode.label}"
            lookup, documents = newest, found
            end = run.train_end(label, episode.training, end, documents)
            if kind is LookupTraining.LEARNED:
                newest, found = self._learn(label, episode.training, end, lookup, documents)
            if run.moma.evaluated is EvaluatedLookup.NEWEST:
                lookup, documents = newest, found
            run.retrieve(
                end,
                self.rows,
                f"{run.row(kind)} ({episode.label})",
                documents,
                mined=episode is not episodes[-1],
            )
        return end, lookup

    def _learn(
        self,
        label: str,
        training: TrainingConfig,
        end: Trained,
        lookup: Trained | None,
        documents: Documents | None,
    ) -> tuple[Trained, Documents]:
        """f_a,t, trained on what f_t attends to, and the documents that it finds."""
        assert lookup is not None
        assert documents is not None
        joined = self.run.distil(label, end, documents)
        if self.lookup_training is not None:
            own = self.lookup_training
            batching = dataclasses.replace(own.batching, seed=training.batching.seed)
            training = dataclasses.replace(own, seed=training.seed, batching=batching)
        learned = self.run.train_lookup(label, training, lookup, joined)
        return learned, self.run.look_up(learned)


CONFIGURABLES = (*TASER_CONFIGURABLES, Episodes, MomaConfig)
