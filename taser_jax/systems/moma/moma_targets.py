"""Targets of `taser pipeline moma`: collections that are searched, and that no training sees."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from taser_jax.commands.evaluate import write_table
from taser_jax.commands.pipelines.retrieval_stages import RetrievalStages
from taser_jax.commands.pipelines.setting import BM25
from taser_jax.commands.pipelines.stages import Stages
from taser_jax.data.token_store.store import TokenStore
from taser_jax.systems.moma.augment import augment
from taser_jax.systems.moma.moma_options import Documents, LookupTraining, Trained
from taser_jax.systems.moma.stages import UNTRAINED, MomaStages

Finished = Mapping[LookupTraining, tuple[Trained, Trained | None]]


def search_targets(run: MomaStages, finished: Finished) -> None:
    """Searches and evaluates each target by itself, with its test queries; writes its table.

    A target replaces the source as a memory. MoMA itself is also searched with the source in place
    of the target, and without documents. No weight changes, and no target's qrels are read before
    its runs are written.

    Args:
        run: the stages.
        finished: the last end retriever and lookup of each compared way.
    """
    untrained = run.untrained()
    for name, path in run.moma.targets.items():
        target = _Target(run, name, path)
        rows = [target.bm25()]
        if untrained is not None:
            rows.append(target.search(UNTRAINED.capitalize(), untrained, None))
        for kind, (end, lookup) in finished.items():
            row = run.row(kind)
            if lookup is None:
                rows.append(target.search(row, end, None))
                continue
            swapped = {**run.moma.memories, name: path}
            del swapped[run.moma.source]
            if kind is LookupTraining.LEARNED:
                rows.append(target.search(f"{row}, no documents", end, None))
                documents = target.look_up(lookup, run.moma.memories, "without-target")
                rows.append(target.search(f"{row} without target", end, documents))
            documents = target.look_up(lookup, swapped, "documents")
            rows.append(target.search(row, end, documents))
            if kind is LookupTraining.LEARNED:
                target.attend(end, documents)
        target.write(rows)


class _Target:
    """One target's stages and folder."""

    def __init__(self, run: MomaStages, name: str, path: str) -> None:
        self._run, self._name, self._path = run, name, path
        self._root = run.root / "targets" / name
        store = TokenStore.open(path)
        self._inputs = {"target": store.metadata.passages_fingerprint}
        self._setting = dataclasses.replace(
            run.setting,
            output_dir=str(self._root),
            token_store=path,
            tasks=None,
            own_passage_tasks=(),
        )
        self._stages = Stages(self._root)
        self._retrieval = RetrievalStages(self._stages, self._setting, store.metadata.collection)

    def bm25(self) -> str:
        """BM25's row."""
        root = self._root / "bm25"
        inputs = self._retrieval.bm25(root, self._inputs, splits=("test",))
        return self._retrieval.evaluate(BM25, root / "runs", inputs, parameters=None)

    def look_up(self, lookup: Trained, memories: Mapping[str, str], folder: str) -> Documents:
        """The documents that a lookup finds for the target's queries in these memories."""
        root = self._root / f"{lookup.label}-{folder}"
        found = Documents(root / "memories", root / "found", {})

        def stage() -> None:
            self._run.add_memories(lookup, found.memory_dir, memories)
            augment(
                memory_dir=str(found.memory_dir),
                token_store=self._path,
                model_dir=str(lookup.directory),
                output_dir=str(found.directory),
                splits=["test"],
                k=self._run.moma.documents,
                config=self._setting.encode,
            )

        inputs = {**self._inputs, **lookup.inputs, "mixture": list(memories)}
        self._stages.run(root.name, stage, inputs=inputs)
        return dataclasses.replace(found, inputs=inputs)

    def search(self, row: str, end: Trained, documents: Documents | None) -> str:
        """The row of an end retriever, with or without documents."""
        label = end.label if documents is None else f"{end.label}-{documents.directory.parent.name}"
        found = {} if documents is None else {"documents": dict(documents.inputs)}
        searched = self._retrieval.retrieve(
            label,
            self._root / label,
            {**self._inputs, **end.inputs, **found},
            splits=("test",),
            model_dir=end.directory,
            documents={
                **self._run.options(documents),
                "query_splits": ["test"],
                "shared_embeddings": str(self._run.shared_embeddings(end)),
            },
        )
        return self._retrieval.evaluate(
            row, self._root / label / "runs", searched, parameters=end.parameters
        )

    def attend(self, end: Trained, documents: Documents) -> None:
        """Records how the memories share the attention of the target's queries."""

        def stage() -> dict[str, Any]:
            store = TokenStore.open(self._path)
            shares = self._run.shares(
                end,
                documents,
                store,
                tasks=list(store.tasks),
                split="test",
                source=self._name,
            )
            return {"attention": [line for line, *_ in shares.values()]}

        inputs = {**end.inputs, "documents": dict(documents.inputs)}
        self._stages.run(f"{end.label}-attention", stage, inputs=inputs)

    def write(self, rows: list[str]) -> None:
        """The target's table."""
        write_table(
            self._root,
            systems=rows,
            by_task=self._setting.evaluation.measures[0],
            significance=self._setting.significance,
        )
