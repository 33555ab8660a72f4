"""`taser pipeline moma`: episodes that train an end retriever and its lookup in turn."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from taser_jax.assembly.plans import TrainingConfig
from taser_jax.commands.evaluate import write_table
from taser_jax.commands.pipelines.ance import Episodes, number_episodes
from taser_jax.commands.pipelines.retrieval_stages import RetrievalStages, Setting
from taser_jax.commands.pipelines.stages import pipeline_records
from taser_jax.commands.pipelines.taser import check_depth, print_table
from taser_jax.devices.hosts import writes
from taser_jax.evaluation.reports import ResultsTable
from taser_jax.models.dual_encoder import ModelConfig
from taser_jax.systems.moma.augment import look_up
from taser_jax.systems.moma.memories import SOURCE
from taser_jax.systems.moma.stages import (
    UNTRAINED,
    Documents,
    LookupTraining,
    MomaConfig,
    MomaStages,
    Trained,
    with_own_states,
)


@writes("{setting.output_dir}", kinds=[])
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
    with pipeline_records(setting.output_dir, config_text):
        setting.open_tokens()
        run = MomaStages(setting, model, moma, name)
        # What is wrong with a target is said before anything is trained.
        targets = [_Target(run, *target) for target in moma.targets.items()]
        warmed = run.warm_up()
        trainings = number_episodes(episodes)
        finished = {
            kind: _alternate(run, kind, warmed, trainings, lookup_training)
            for kind in map(LookupTraining, moma.compared)
        }
        _search_targets(run, targets, finished)
        return print_table(setting, run.rows, by_task=setting.evaluation.measures[0])


def _alternate(
    run: MomaStages,
    kind: LookupTraining,
    warmed: Trained,
    trainings: Mapping[int, TrainingConfig],
    lookup_training: TrainingConfig | None,
) -> tuple[Trained, Trained | None]:
    """The last end retriever and lookup, from the warmed-up model; None without a lookup."""
    end, lookup = warmed, None if kind is LookupTraining.NONE else warmed
    documents = None if lookup is None else run.look_up(lookup)
    for number, training in trainings.items():
        label = f"{kind.prefix}episode-{number}"
        # f_t, from f_t−1's checkpoint and negatives, with documents (equations 7 and 8).
        of_end = {"negatives_dirs": [end.directory.parent / "negatives"], **run.options(documents)}
        end = run.component(label, training, end, **of_end)
        if kind is LookupTraining.LEARNED:
            assert lookup is not None
            assert documents is not None
            if lookup_training is not None:
                seed = training.batching.seed
                batching = dataclasses.replace(lookup_training.batching, seed=seed)
                training = dataclasses.replace(
                    lookup_training, seed=training.seed, batching=batching
                )
            joined = run.distil(label, end, documents)
            # Joined stores have the same texts in every episode, and not those of the source.
            training = with_own_states(training, "joined")
            lookup = run.component(f"{label}-lookup", training, lookup, token_store=str(joined))
            documents = run.look_up(lookup)
        row = f"{run.row(kind)} (episode-{number})"
        run.add_row(row, end, documents, mined=number < len(trainings))
    return end, lookup


def _search_targets(
    run: MomaStages,
    targets: Sequence[_Target],
    finished: Mapping[LookupTraining, tuple[Trained, Trained | None]],
) -> None:
    """Searches and evaluates each target by itself, with its test queries; writes its table.

    A target replaces the source as a memory. MoMA itself is also searched with the source in place
    of the target, and without documents. No weight changes, and no target's qrels are read before
    its runs are written.

    Args:
        run: the stages.
        targets: the targets' own stages.
        finished: the last end retriever and lookup of each compared way.
    """
    untrained = run.untrained()
    for target in targets:
        target.bm25(("test",))
        if untrained is not None:
            target.add_row(UNTRAINED.capitalize(), untrained, None)
        for kind, (end, lookup) in finished.items():
            row = run.row(kind)
            if lookup is None:
                target.add_row(row, end, None)
                continue
            swapped = {**run.moma.memories, target.name: target.setting.token_store}
            del swapped[SOURCE]
            if kind is LookupTraining.LEARNED:
                target.add_row(f"{row}, no documents", end, None)
                documents = target.look_up(lookup, run.moma.memories, "without-target")
                target.add_row(f"{row} without target", end, documents)
            documents = target.look_up(lookup, swapped, "documents")
            target.add_row(row, end, documents)
        write_table(
            target.root,
            systems=target.rows,
            by_task=run.setting.evaluation.measures[0],
            significance=run.setting.significance,
        )


class _Target(RetrievalStages):
    """One target's stages and folder.

    Raises:
        ConfigError: its token store has no test queries, or a setting does not fit its tasks.
        FingerprintError: it has another vocabulary than the source, or another collection.
    """

    def __init__(self, run: MomaStages, name: str, path: str) -> None:
        self._run, self.name = run, name
        setting = dataclasses.replace(
            run.setting,
            training=with_own_states(run.setting.training, f"targets/{name}"),
            output_dir=str(run.root / "targets" / name),
            token_store=path,
            tasks=None,
            own_passage_tasks=(),
        )
        super().__init__(setting)
        run.check_vocabulary(setting.open_tokens(splits=["test"]))

    def look_up(self, lookup: Trained, memories: Mapping[str, str], folder: str) -> Documents:
        """The documents that a lookup finds for the target's queries in these memories."""
        root = self.root / f"{lookup.label}-{folder}"
        documents = Documents(root / "memories", root / "documents")
        self.stages.run(
            root.name,
            look_up,
            **self._run.mixture(lookup, memories),
            memory_dir=documents.memory_dir,
            token_store=self.setting.token_store,
            output_dir=documents.directory,
            splits=["test"],
            k=self._run.moma.documents,
        )
        return documents

    def add_row(self, row: str, end: Trained, documents: Documents | None) -> None:
        """Searches with an end retriever, with or without documents, and evaluates."""
        label = end.label if documents is None else f"{end.label}-{documents.directory.parent.name}"
        self.retrieve(
            label,
            splits=("test",),
            encoded=("test",),
            model_dir=end.directory,
            documents=self._run.read_with(end, documents),
        )
        self.evaluate(row, label, parameters=end.parameters)
