"""Embeddings by text that all memories, encodings and trainings of one passage tower share."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax
from jaxtyping import PyTree

from taser_jax.assembly.model_directory import LoadedModel, passage_fingerprint
from taser_jax.assembly.text_sources import SHARED_EMBEDDINGS
from taser_jax.data.batches.padding import OtherTexts, Texts
from taser_jax.data.token_store.arrays import TokenizedQueries
from taser_jax.data.token_store.store import TokenStore
from taser_jax.models.batch import Role
from taser_jax.models.dual_encoder import ModelConfig, Params
from taser_jax.retrieval.encode_config import EncodeConfig
from taser_jax.storage.artifacts import FilePath
from taser_jax.storage.errors import ConfigError
from taser_jax.systems.moma.joined import EmbeddedTexts, encode_missing


def tower_fingerprints(model: LoadedModel, store: TokenStore) -> dict[str, str]:
    """What the embeddings of a store's passages depend on, besides their texts."""
    return _fingerprints(model.passage_fingerprint, store)


def _fingerprints(tower: str, store: TokenStore) -> dict[str, str]:
    return {"model": tower, "vocabulary": store.metadata.vocabulary_fingerprint}


def add_missing(
    directory: FilePath, model: LoadedModel, store: TokenStore, *, config: EncodeConfig
) -> int:
    """Encodes the passages of a store that have no embedding yet; returns how many.

    Args:
        directory: folder of the embeddings.
        model: the model whose passage tower encodes.
        store: the passages.
        config: sizes of batches.
    """
    return encode_missing(
        model.encode_fn(Role.PASSAGE),
        store.passages,
        directory,
        fingerprints=tower_fingerprints(model, store),
        config=dataclasses.replace(config, batch_multiple=model.batch_multiple),
    )


@dataclasses.dataclass(frozen=True)
class EmbeddedPassages:
    """A store's passages as embeddings; its queries as they are, or with documents.

    Attributes:
        passages: the passages, as embeddings.
        others: what the queries are replaced by; None keeps their tokens.
    """

    passages: Texts
    others: OtherTexts | None

    def of_queries(self, queries: TokenizedQueries) -> Texts:
        """These queries with their documents, or as they are."""
        return queries if self.others is None else self.others.of_queries(queries)


@dataclasses.dataclass(frozen=True)
class SharedEmbeddings:
    """A store's passages as embeddings of a directory, for `taser encode` and `taser train`.

    Attributes:
        directory: folder of the embeddings.
        store: the passages.
    """

    directory: FilePath
    store: TokenStore

    def encoded_by(self, model: LoadedModel, *, config: EncodeConfig) -> EmbeddedTexts:
        """All passages; those without an embedding are encoded first.

        Args:
            model: the model whose passage tower encodes.
            config: sizes of batches.

        Raises:
            FingerprintError: another tower made the embeddings.
        """
        add_missing(self.directory, model, self.store, config=config)
        return self._embedded(tower_fingerprints(model, self.store))

    def for_training(
        self,
        config: ModelConfig,
        params: Params,
        *,
        trainable: PyTree[bool],
        others: OtherTexts | None,
    ) -> EmbeddedPassages:
        """Checks that training leaves the passage tower alone, and that it made the embeddings.

        Args:
            config: the model to train.
            params: its parameters before training.
            trainable: tree shaped as these; False where training leaves them alone.
            others: what the queries are replaced by; None keeps their tokens.

        Raises:
            ConfigError: the passage tower is trained.
            DataError: a passage without an embedding.
            FingerprintError: another tower made them.
        """
        name = config.tower_name(Role.PASSAGE, None)
        if any(jax.tree.leaves(trainable[name])):
            raise ConfigError(
                f"{name} is trained, and passages come as embeddings",
                where="SHARED_EMBEDDINGS",
                expected="a passage tower of its own that is frozen",
                fix=f"freeze ('{name}/.*', 'freeze') in OptimizerConfig.updates, or drop it",
            )
        tower = passage_fingerprint(config, params)
        return EmbeddedPassages(self._embedded(_fingerprints(tower, self.store)), others)

    def _embedded(self, fingerprints: Mapping[str, str]) -> EmbeddedTexts:
        return EmbeddedTexts(self.directory, self.store.passages, fingerprints=fingerprints)


SHARED_EMBEDDINGS.register(SharedEmbeddings)
