"""Which documents an end retriever attends to, and what its lookup model learns from that."""

from __future__ import annotations

import dataclasses
import functools
import shutil
from collections.abc import Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float32, Int

from taser_jax.assembly.model_directory import LoadedModel
from taser_jax.data.token_store.arrays import Ragged, TokenizedQueries
from taser_jax.data.token_store.store import TokenStore
from taser_jax.data.token_store.writer import TokenStoreWriter
from taser_jax.models.batch import Augmented, EncoderInput
from taser_jax.models.dual_encoder import DualEncoder, Params
from taser_jax.models.encoded import static_task
from taser_jax.models.fusion import FidAttention, encode_with_attention
from taser_jax.retrieval.embeddings import encode_rows
from taser_jax.retrieval.encode_config import EncodeConfig
from taser_jax.storage.artifacts import FilePath
from taser_jax.storage.errors import ConfigError
from taser_jax.systems.moma.memories import AugmentedTexts, Lookup, Mixture


def document_attention(
    model: LoadedModel,
    texts: AugmentedTexts,
    *,
    task: str | None = None,
    kind: FidAttention = FidAttention.SUM,
    config: EncodeConfig = EncodeConfig(),
) -> Float32[np.ndarray, "queries segments"]:
    """The attention of each query to its own tokens and to its documents (equation 9).

    Args:
        model: the end retriever.
        texts: queries with documents.
        task: the queries' task.
        kind: how attention becomes one number per document.
        config: sizes of batches.
    """
    devices = dataclasses.replace(config, batch_multiple=model.batch_multiple)
    static = static_task(model.model.query_tasks, task)

    def attend(batch: EncoderInput) -> jax.Array:
        placed = model.partitioner.put_batch(batch)
        return _attention(model.params, placed, model=model.model, task=static, kind=kind)

    found, _ = encode_rows(attend, texts, np.arange(len(texts.rows)), config=devices)
    return found


@functools.partial(jax.jit, static_argnames=("model", "task", "kind"))
def _attention(
    params: Params, texts: Augmented, *, model: DualEncoder, task: str | None, kind: FidAttention
) -> jax.Array:
    _, attention = encode_with_attention(model, params, texts, task=task, kind=kind)
    return jnp.maximum(attention, jnp.finfo(attention.dtype).min)


@dataclasses.dataclass(frozen=True)
class Distilled:
    """Training data of the lookup model, for the queries of one split.

    Attributes:
        positives: documents of the mixture, the source's gold first.
        negatives: documents that the lookup found and that are no positives.
    """

    positives: list[Int[np.ndarray, " positives"]]
    negatives: list[Int[np.ndarray, " negatives"]]


def distil(
    gold: Sequence[Int[np.ndarray, " positives"]],
    lookup: Lookup,
    attention: Float32[np.ndarray, "queries documents"],
    *,
    learned: int,
    negatives: int,
    seed: int = 0,
) -> Distilled:
    """Positives D^s+ ∪ top N of D^a by attention, and negatives from the other documents found.

    Equations 10 to 12 of MoMA. A document with the same text as a positive has the same row in the
    mixture, and so is no negative.

    Args:
        gold: relevant documents of each query, as rows of the mixture.
        lookup: what the lookup model found, deeper than the documents that were fused.
        attention: attention to the first K of them.
        learned: N.
        negatives: number of negatives drawn per query.
        seed: seed of the draw.

    Raises:
        ConfigError: N above K.
    """
    count = attention.shape[1]
    if not 0 <= learned <= count:
        raise ConfigError(
            f"{learned} learned positives of {count} documents",
            where="MomaConfig.learned_positives",
            expected=f"0 to {count}",
        )
    rng = np.random.default_rng([0xD157, seed])
    scores = np.where(lookup.rows[:, :count] >= 0, attention, -np.inf)
    order = np.argsort(-scores, axis=1, kind="stable")[:, :learned]
    chosen = np.take_along_axis(lookup.rows, order, axis=1)
    positives, others = [], []
    for own, best, found in zip(gold, chosen, lookup.rows, strict=True):
        joined = np.array([*own, *best[best >= 0]], np.int64)
        _, first = np.unique(joined, return_index=True)
        positives.append(joined[np.sort(first)])
        rest = found[(found >= 0) & ~np.isin(found, joined)]
        others.append(rng.permutation(rest)[:negatives])
    return Distilled(positives, others)


def write_joined_store(
    directory: FilePath,
    mixture: Mixture,
    source: TokenStore,
    queries: Mapping[tuple[str, str], tuple[TokenizedQueries, Distilled]],
) -> TokenStore:
    """A token store of all memories, with the source's queries: what the lookup model trains on.

    Args:
        directory: where it goes.
        mixture: the memories, whose documents become its passages.
        source: the token store whose vocabulary and lengths it takes.
        queries: (task, split) -> queries with their positives and negatives in the mixture.
    """
    writer = TokenStoreWriter(
        directory,
        collection="memories",
        collection_fingerprint=mixture.manifest.fingerprint,
        vocabulary_fingerprint=source.metadata.vocabulary_fingerprint,
        vocabulary_size=source.metadata.vocabulary_size,
        query_length=source.metadata.query_length,
        passage_length=mixture.length,
    )
    shutil.copytree(source.vocabulary_directory, writer.vocabulary_directory, dirs_exist_ok=True)
    writer.write_passages(_token_lists(mixture), count=len(mixture))
    for (task, split), (own, distilled) in queries.items():
        writer.write_queries(
            task,
            split,
            query_ids=own.query_ids,
            tokens=[ids[:n].tolist() for ids, n in zip(own.ids, own.lengths, strict=True)],
            positives=[rows.tolist() for rows in distilled.positives],
            hard_negatives=[rows.tolist() for rows in distilled.negatives],
            length=own.ids.shape[1],
        )
    return writer.finish()


def gold_documents(
    mixture: Mixture, source: str, positives: Ragged
) -> list[Int[np.ndarray, " positives"]]:
    """Each query's positives, rows of the source, as rows of the mixture."""
    documents = mixture.documents_of(source)
    return [documents[rows] for rows in positives]


def _token_lists(mixture: Mixture) -> Iterator[list[int]]:
    for start in range(0, len(mixture), 4096):
        rows = np.arange(start, min(start + 4096, len(mixture)))
        tokens = mixture.tokens(rows)
        for ids, length in zip(tokens.ids, mixture.lengths[rows], strict=True):
            yield ids[:length].tolist()
