"""What models read in place of a token store's tokens.

States of frozen blocks are computed once; later trainings read them. Systems offer queries with
documents, and passages as embeddings.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
import re
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from taser_jax.data.batches.stream import Texts, TextSource
from taser_jax.data.token_store.arrays import STATES, CachedStates, StateRows, TokenizedQueries
from taser_jax.data.token_store.store import TokenStore
from taser_jax.devices.mesh import MeshConfig, make_mesh
from taser_jax.devices.partitioning import Partitioner, parameter_path
from taser_jax.models.batch import EncoderInput, Role, States, Tokens, static_task
from taser_jax.models.dual_encoder import DualEncoder, Params
from taser_jax.models.stack import Scan
from taser_jax.retrieval.embeddings import EmbeddingDtype, queries_directory
from taser_jax.retrieval.encoding import EncodeConfig, batches_by_length
from taser_jax.storage import artifacts
from taser_jax.storage.errors import ConfigError
from taser_jax.storage.progress import bar, logger
from taser_jax.storage.typed_files import to_plain

# At least the size of a NumPy file's header.
_HEADER = 128
_VERSION = 1
_GIB = 2**30
# Queries are short: at a multiple of 32, most of a batch would be padding.
_LENGTH_MULTIPLE = 16

DocumentStates = Callable[[Texts, int, str], Texts]
"""Documents, the tokens that they are padded to, and their fingerprint -> their states."""


@runtime_checkable
class QueryDocuments(TextSource, Protocol):
    """Queries with documents, in place of a token store's queries."""

    def renamed(self, queries: TokenizedQueries) -> TokenizedQueries:
        """The same queries with a fingerprint that depends on their documents."""

    def on_states(self, states: CachedStates, of_documents: DocumentStates) -> TextSource:
        """The same with states of frozen blocks in place of tokens.

        Args:
            states: those of the token store.
            of_documents: documents, their length and fingerprint -> their states.
        """


# No core room imports a system: what a system offers is named, for `pkgutil.resolve_name`, and its
# module is imported when a configuration first asks for it.
# Opens the documents that a system looked up, K per query, for the model that fuses them.
QUERY_DOCUMENTS = "taser_jax.systems.moma.query_documents:Augmentation"
# A directory and the token store of the passages -> what one tower has made of them, as `Texts`.
SHARED_EMBEDDINGS = "taser_jax.systems.moma.memory:EmbeddedPassages"


@dataclasses.dataclass(frozen=True)
class EmbeddedSource:
    """Embedded passages beside queries as they are, or with documents.

    Attributes:
        passages: the passages, as embeddings.
        of_queries: some queries -> what is read of them.
    """

    passages: Texts
    of_queries: Callable[[TokenizedQueries], Texts]


def check_states_can_be_kept(frozen_blocks: int) -> None:
    """Refuses a directory for states where nothing is frozen, or on several hosts.

    Raises:
        ConfigError: naming the blocks and hosts.
    """
    hosts = jax.process_count()
    if not frozen_blocks or hosts > 1:
        problem = f"{frozen_blocks} frozen blocks, {hosts} hosts, and a directory for states"
        expected = "at least one frozen block, on one host"
        fix = "set train_from_block" if hosts == 1 else "drop states_dir, or train on one host"
        raise ConfigError(problem, where="TrainingConfig.states_dir", expected=expected, fix=fix)


def frozen_texts(
    directory: str,
    model: DualEncoder,
    params: Params,
    store: TokenStore,
    queries: Sequence[TokenizedQueries],
    *,
    dtype: EmbeddingDtype,
    augmentation: QueryDocuments | None = None,
) -> TextSource:
    """The states of a store's passages and queries, and of the documents fused with its queries.

    What is missing is computed first. Queries' towers encode documents as passages: frozen blocks
    that all towers share, as from the same pretrained weights, give each document one row of
    states.

    Args:
        directory: folder for one model's frozen blocks and one token store; created where absent.
        model: the model, with frozen blocks.
        params: its parameters.
        store: the token store.
        queries: query sets whose states are wanted; those of all queries of a split are computed.
        dtype: dtype of the states; bfloat16 halves them and keeps 8 bits of each number.
        augmentation: documents of the queries; None has none.

    Raises:
        ConfigError: nothing is frozen, there are several hosts, or documents and towers whose
            frozen blocks differ.
        FingerprintError: the directory has states of other weights, tokens or blocks.
        StorageError: it cannot be written.
    """
    check_states_can_be_kept(model.frozen_blocks)
    maker = _Maker(dtype, model, params)
    passages = maker.rows(
        pathlib.Path(directory) / "passages",
        store.passages,
        length=store.metadata.passage_length,
        fingerprint=store.metadata.passages_fingerprint,
        role=Role.PASSAGE,
    )
    rows, places = {}, {}
    for task, split in dict.fromkeys((each.task, each.split) for each in queries if len(each)):
        whole = store.queries(task, split)
        rows[task, split] = maker.rows(
            queries_directory(directory, task, split),
            whole,
            length=whole.ids.shape[1],
            # Of the tokens alone: other positives and negatives leave the states as they are.
            fingerprint=artifacts.fingerprint([whole.ids, whole.lengths]),
            role=Role.QUERY,
            task=task,
        )
        places[task, split] = {query_id: row for row, query_id in enumerate(whole.query_ids)}
    states = CachedStates(passages, rows, places)
    if augmentation is None:
        return states
    if len({maker.fingerprint(tower) for tower in params}) > 1:
        problem = "documents are encoded by the queries' tower, whose frozen blocks are its own"
        fix = "start all towers from the same pretrained weights, or drop states_dir"
        raise ConfigError(problem, where="TrainingConfig.states_dir", fix=fix)

    def of_documents(documents: Texts, length: int, fingerprint: str) -> StateRows:
        return maker.rows(
            pathlib.Path(directory) / "documents" / fingerprint,
            documents,
            length=length,
            fingerprint=fingerprint,
            role=Role.PASSAGE,
        )

    return augmentation.on_states(states, of_documents)


class _Maker:
    def __init__(self, dtype: EmbeddingDtype, model: DualEncoder, params: Params) -> None:
        self._dtype, self._model, self._params = dtype, model, params
        self._partitioner = Partitioner(make_mesh(MeshConfig(), devices=jax.local_devices()))
        # Compiled once for all splits, and for all tasks that share an encoder.
        self._encoder = functools.cache(self._compiled_encoder)

    def rows(
        self,
        directory: pathlib.Path,
        texts: Texts,
        *,
        length: int,
        fingerprint: str,
        role: Role,
        task: str | None = None,
    ) -> StateRows:
        """The states of all texts of a side; computed if they are not there yet."""
        plan = {
            "format_version": _VERSION,
            "kind": "states",
            "role": role.value,
            "tokens": fingerprint,
            "blocks": self._model.frozen_blocks,
            "weights": self.fingerprint(self._model.config.tower_name(role, task)),
            "dtype": self._dtype.value,
        }
        artifacts.follow_plan(directory, plan)
        if not (directory / STATES).is_file():
            self._write(directory / STATES, texts, longest=length, role=role, task=task)
        return StateRows.open(directory, texts.lengths, length=length)

    def fingerprint(self, tower: str) -> str:
        """Fingerprint of what a tower's frozen blocks compute: their settings and parameters.

        The tower's name is left out: DPR's two towers and Shared's one, from the same pretrained
        weights, have the same states.
        """
        # How a step is compiled is not in model.json, from which `taser encode` has the model.
        config = self._model.config.with_transformer(scan=Scan.NONE)
        blocks = self._model.frozen_blocks
        frozen = re.compile(config.frozen_parameters(blocks))
        total = artifacts.Fingerprint().add(
            artifacts.fingerprint_json(to_plain(config.frozen_settings(blocks)))
        )
        for path, leaf in jax.tree_util.tree_leaves_with_path({tower: self._params[tower]}):
            if frozen.fullmatch(parameter_path(path)):
                total.add(parameter_path(path).partition("/")[2]).add(np.asarray(leaf))
        return total.hex()

    def _write(
        self, path: pathlib.Path, texts: Texts, *, longest: int, role: Role, task: str | None
    ) -> None:
        lengths = np.asarray(texts.lengths)
        ends = np.cumsum(lengths, dtype=np.int64)
        dtype, width = self._dtype.numpy, self._model.config.transformer.embed_dim
        bytes_ = int(ends[-1]) * width * dtype.itemsize
        logger.info("%s: %.2f GiB, states of %s tokens", path, bytes_ / _GIB, f"{ends[-1]:,}")
        stored = np.uint16 if self._dtype is EmbeddingDtype.BFLOAT16 else np.float32
        states_of = self._encoder(role, static_task(self._model.query_tasks, task))
        encoding = EncodeConfig(
            batch_multiple=8 * self._partitioner.batch_devices, length_multiple=_LENGTH_MULTIPLE
        )
        shown = bar("states", total=int(ends[-1]), unit="token")
        with artifacts.replacing(path) as scratch, shown as done:
            # Under a memory map a full disk would kill the process: the room is taken before.
            with open(scratch, "wb") as file:
                os.posix_fallocate(file.fileno(), 0, bytes_ + _HEADER)
            out = np.lib.format.open_memmap(
                os.fspath(scratch), "w+", dtype=stored, shape=(int(ends[-1]), width)
            )
            for members, size, length in batches_by_length(lengths, encoding):
                states = states_of(
                    texts.tokens(np.resize(members, size)).resized(min(length, longest))
                )
                hidden = np.asarray(states.hidden).astype(dtype).view(stored)
                for row, states_of_text in zip(members, hidden, strict=False):
                    out[ends[row] - lengths[row] : ends[row]] = states_of_text[: lengths[row]]
                done.update(int(lengths[members].sum()))
            out.flush()

    def _compiled_encoder(self, role: Role, task: str | None) -> Callable[[EncoderInput], States]:
        model, put = self._model, self._partitioner.put_batch
        params = jax.device_put(self._params, self._partitioner.replicated)

        @functools.partial(jax.jit, out_shardings=self._partitioner.replicated)
        def states(params: Params, tokens: Tokens) -> States:
            output: Any = model.apply(
                {"params": params}, tokens, role=role, task=task, method="states"
            )
            return output

        return lambda tokens: states(params, put(tokens))
