"""Targets of `taser pipeline moma`: collections that are searched, and that no training sees."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from taser_jax.commands.evaluate import write_table
from taser_jax.commands.pipelines.retrieval_stages import RetrievalStages
from taser_jax.commands.pipelines.setting import BM25
from taser_jax.commands.pipelines.stages import Stages
from taser_jax.data.token_store.store import TokenStore
from taser_jax.systems.moma.memory_shares import attention_by_task
from taser_jax.systems.moma.moma_options import Documents, LookupTraining, Trained
from taser_jax.systems.moma.stages import UNTRAINED, MomaStages, look_up

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
        self._setting = dataclasses.replace(
            run.setting,
            output_dir=str(self._root),
            token_store=path,
            tasks=None,
            own_passage_tasks=(),
        )
        self._stages = Stages(self._root)
        self._retrieval = RetrievalStages(self._stages, self._setting, store)
        self._tasks = list(store.tasks)

    def bm25(self) -> str:
        """BM25's row."""
        root = self._root / "bm25"
        self._retrieval.bm25(root, splits=("test",))
        return self._retrieval.evaluate(BM25, root / "runs", parameters=None)

    def look_up(self, lookup: Trained, memories: Mapping[str, str], folder: str) -> Documents:
        """The documents that a lookup finds for the target's queries in these memories."""
        root = self._root / f"{lookup.label}-{folder}"
        documents = Documents(root / "memories", root / "found")
        self._stages.run(
            root.name,
            look_up,
            **self._run.mixture(lookup, memories),
            memory_dir=documents.memory_dir,
            token_store=self._path,
            output_dir=documents.directory,
            splits=["test"],
            k=self._run.moma.documents,
        )
        return documents

    def search(self, row: str, end: Trained, documents: Documents | None) -> str:
        """The row of an end retriever, with or without documents."""
        label = end.label if documents is None else f"{end.label}-{documents.directory.parent.name}"
        self._retrieval.retrieve(
            label,
            self._root / label,
            splits=("test",),
            encoded=("test",),
            model_dir=end.directory,
            documents={
                **self._run.options(documents),
                "shared_embeddings": self._run.shared_embeddings(end),
            },
        )
        return self._retrieval.evaluate(row, self._root / label / "runs", parameters=end.parameters)

    def attend(self, end: Trained, documents: Documents) -> None:
        """Records how the memories share the attention of the target's queries."""
        self._stages.run(
            f"{end.label}-attention",
            _attention,
            **self._run.attended(end, documents),
            token_store=self._path,
            tasks=self._tasks,
            split="test",
            source=self._name,
        )

    def write(self, rows: list[str]) -> None:
        """The target's table."""
        write_table(
            self._root,
            systems=rows,
            by_task=self._setting.evaluation.measures[0],
            significance=self._setting.significance,
        )


@functools.wraps(attention_by_task)
def _attention(**attended: Any) -> dict[str, Any]:
    return {"attention": [line for line, *_ in attention_by_task(**attended).values()]}
