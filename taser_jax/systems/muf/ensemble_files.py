"""Ensembles: the inputs of their training, and the artefact it writes."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Iterator, Mapping, Sequence

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Float

from taser_jax.assembly.data import training_queries
from taser_jax.data.batches.draws import queries_of
from taser_jax.data.batches.one_task import BatchStream
from taser_jax.data.batches.stream import BatchingConfig, prefetch
from taser_jax.data.token_store.arrays import TokenizedQueries
from taser_jax.data.token_store.store import TokenStore
from taser_jax.optim.optimizers import OptimizerConfig
from taser_jax.retrieval.embeddings import Embeddings, QueryEmbeddings
from taser_jax.retrieval.runs import read_arrays, write_arrays
from taser_jax.storage import artifacts
from taser_jax.storage.errors import ConfigError, DataError
from taser_jax.storage.typed_files import Checked, Positive, Seed
from taser_jax.systems.muf.members import (
    EnsembleBatch,
    EnsembleConfig,
    MemberPlacement,
    apply_members,
)
from taser_jax.training.state import Params, named_seed

KIND = "ensemble"
_VERSION = 1
_MEMBERS = "members.npz"


class _Metadata(artifacts.Metadata, frozen=True):
    members: Positive
    hidden_dims: tuple[Positive, ...]
    tasks: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class EnsembleTraining(Checked):
    """How an ensemble is trained; the defaults are DPR-MUF's.

    Attributes:
        model: sizes.
        batching: queries in a member's batch, and its hard negatives.
        optimizer: optimiser of each member. Its warm-up is at most a tenth of the run.
        epochs: passes of each member over the specialist's training queries.
        evaluations: number of validations, and of checkpoints, in the whole run; the checkpoint of
            the lowest loss is kept, so that with one it is the last.
        seed: seed of weights and batches.
    """

    model: EnsembleConfig = EnsembleConfig()
    batching: BatchingConfig = BatchingConfig(batch_size=128)
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=2e-5, warmup_steps=1237)
    epochs: Positive = 100
    evaluations: Positive = 20
    seed: Seed = 0


@dataclasses.dataclass(frozen=True)
class SpecialistVectors:
    """A specialist's frozen vectors of some queries and all passages.

    Attributes:
        passages: its passage embeddings, memory-mapped.
        queries: task -> embeddings of its queries, in the order of `tokenized`.
        tokenized: task -> positives and hard negatives of these queries.
    """

    passages: Embeddings
    queries: Mapping[str, Float[np.ndarray, "queries dim"]]
    tokenized: Mapping[str, TokenizedQueries]

    @classmethod
    def read(
        cls,
        embeddings_dir: artifacts.FilePath,
        store: TokenStore,
        *,
        tasks: Sequence[str],
        split: str,
        negatives_dirs: Sequence[str] = (),
    ) -> SpecialistVectors:
        """Opens the embeddings of these tasks' split, without queries that have no positive.

        Raises:
            ConfigError: the token store has no such task or split.
            DataError: it is not encoded, or no query has a positive.
            FingerprintError: the embeddings are of another model, collection or token store.
        """
        passages = Embeddings(
            embeddings_dir, fingerprints={"passages": store.metadata.passages_fingerprint}
        )
        vectors, tokenized = {}, {}
        for task in tasks:
            expected = {**passages.fingerprints, "queries": store.queries(task, split).fingerprint}
            encoded = QueryEmbeddings.of_split(embeddings_dir, task, split, fingerprints=expected)
            queries = training_queries(
                store, task_names=[task], negatives_dirs=negatives_dirs, split=split
            )[task]
            with_positive = np.flatnonzero(queries.positives.lengths)
            if not len(with_positive):
                where = f"task {task!r}, split {split!r}"
                problem = f"none of {len(queries)} queries has a positive to train with"
                raise DataError(problem, where=where, fix="leave the task out")
            tokenized[task] = queries_of(queries, with_positive)
            row_of = {query_id: row for row, query_id in enumerate(encoded.query_ids)}
            rows = np.array([row_of[query_id] for query_id in tokenized[task].query_ids])
            vectors[task] = np.asarray(encoded.take(rows), np.float32)
        return cls(passages, vectors, tokenized)

    def stream(self, store: TokenStore, batching: BatchingConfig) -> BatchStream:
        """Rows of batches of these queries."""
        return BatchStream(store, self.tokenized, batching)

    def batch(self, streams: Sequence[BatchStream], step: int) -> EnsembleBatch:
        """One batch of each stream, as vectors, with a leading axis of streams."""
        rows = [stream.rows(step) for stream in streams]
        passages = self.passages.take(np.concatenate([batch.passage_rows for batch in rows]))
        return EnsembleBatch(
            queries=np.stack([self.queries[batch.task][batch.query_rows] for batch in rows]),
            passages=passages.reshape(len(rows), -1, passages.shape[1]),
            positive_index=np.stack([batch.positive_index for batch in rows]),
            ignore=np.stack([batch.ignore for batch in rows]),
        )


class EnsembleBatches:
    """Every member's batches, gathered ahead in a thread and placed on the devices.

    Args:
        vectors: the specialist's vectors.
        stream: rows of batches; each member reseeds it.
        placement: members over devices; a host gathers batches for the members on its own.
        seed: the ensemble's seed.
    """

    def __init__(
        self,
        vectors: SpecialistVectors,
        stream: BatchStream,
        placement: MemberPlacement,
        *,
        seed: int,
    ) -> None:
        self._vectors, self._split = vectors, placement.split
        parts = self._split.addressable_devices_indices_map((placement.padded,)).values()
        here = sorted(
            member for part in parts if part for member in range(placement.padded)[part[0]]
        )
        self._streams = [stream.reseeded(named_seed(seed, f"member {member}")) for member in here]
        self._members = placement.padded

    def iterate(self, start_step: int, stop_step: int) -> Iterator[tuple[int, EnsembleBatch]]:
        """Batches on the devices, for steps start_step .. stop_step - 1."""
        make = functools.partial(self._vectors.batch, self._streams)
        return prefetch(make, start_step, stop_step, self._put)

    def describe(self, step: int) -> str:
        """Task and first query ids of the first member's batch."""
        rows = self._streams[0].rows(step)
        ids = self._vectors.tokenized[rows.task].query_ids
        shown = ", ".join(repr(ids[row]) for row in rows.query_rows[:4])
        return f"the first member's task {rows.task!r}, queries {shown}, ..."

    def _put(self, batch: EnsembleBatch) -> EnsembleBatch:
        def put(array: np.ndarray) -> jax.Array:
            shape = (self._members, *array.shape[1:])
            return jax.make_array_from_process_local_data(self._split, array, shape)

        return jax.tree.map(put, batch)


@dataclasses.dataclass(frozen=True)
class Ensemble:
    """A trained ensemble.

    Attributes:
        config: sizes.
        params: arrays with a leading axis of members.
        fingerprints: fingerprints of the specialist's model, collection, vocabulary and passages,
            and of the ensemble itself ("ensemble").
        tasks: tasks whose queries it was trained on.
    """

    config: EnsembleConfig
    params: Params
    fingerprints: Mapping[str, str]
    tasks: tuple[str, ...]

    @property
    def member_parameters(self) -> int:
        """Parameters of one member."""
        return sum(leaf[0].size for leaf in jax.tree.leaves(self.params))

    def embed(self, queries: Float[np.ndarray, "queries dim"]) -> jax.Array:
        """Every member's embeddings of a specialist's query embeddings: [members, queries, dim]."""
        return apply_members(self.params, queries)

    def first(self, members: int) -> Ensemble:
        """The ensemble of the first members, equal to one trained with that many.

        Raises:
            ConfigError: it has fewer.
        """
        if not 2 <= members <= self.config.members:
            problem = f"{members} members of an ensemble of {self.config.members}"
            fix = f"take 2 to {self.config.members}, or train a larger ensemble"
            raise ConfigError(problem, where="fuse.members", fix=fix)
        params = jax.tree.map(lambda leaf: leaf[:members], self.params)
        total = artifacts.fingerprint_json([self.fingerprints["ensemble"], members])
        return dataclasses.replace(
            self,
            config=dataclasses.replace(self.config, members=members),
            params=params,
            fingerprints={**self.fingerprints, "ensemble": total},
        )

    def save(self, directory: artifacts.FilePath, *, facts: Mapping[str, object]) -> None:
        """Writes members.npz and, last, metadata.json.

        Args:
            directory: where it goes.
            facts: facts about its training; JSON-able.
        """
        directory = pathlib.Path(directory)
        write_arrays(directory / _MEMBERS, flatten_dict(self.params, sep="/"))
        artifacts.write_json(
            directory / artifacts.METADATA,
            {
                "format_version": _VERSION,
                "kind": KIND,
                "members": self.config.members,
                "hidden_dims": list(self.config.hidden_dims),
                "tasks": list(self.tasks),
                "fingerprints": dict(self.fingerprints),
                **facts,
            },
        )

    @classmethod
    def open(
        cls, directory: artifacts.FilePath, *, fingerprints: Mapping[str, str] | None = None
    ) -> Ensemble:
        """Opens a finished ensemble.

        Args:
            directory: what `taser ensemble` wrote.
            fingerprints: required fingerprints of the embeddings it was trained on.

        Raises:
            DataError: none is there, or its arrays are damaged.
            FingerprintError: it belongs to another model or collection.
        """
        fix = "train an ensemble on this model's embeddings (`taser ensemble`), or correct the path"
        metadata = artifacts.read_metadata(
            directory, KIND, _VERSION, _Metadata, fingerprints=fingerprints, fix=fix
        )
        fix = "run `taser ensemble` again: it writes them from its checkpoints"
        arrays = read_arrays(pathlib.Path(directory) / _MEMBERS, fix=fix)
        params = unflatten_dict(arrays, sep="/")
        config = EnsembleConfig(metadata.members, metadata.hidden_dims)
        return cls(config, params, metadata.fingerprints, metadata.tasks)
