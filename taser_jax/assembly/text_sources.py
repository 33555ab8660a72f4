"""What models may read in place of a token store's tokens; systems register both sources."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from jaxtyping import PyTree

from taser_jax.assembly.model_directory import LoadedModel
from taser_jax.data.batches.stream import Texts, TextSource
from taser_jax.data.token_store.arrays import CachedStates, TokenizedQueries
from taser_jax.data.token_store.store import TokenStore
from taser_jax.models.dual_encoder import ModelConfig, Params
from taser_jax.retrieval.encoding import EncodeConfig
from taser_jax.storage.artifacts import FilePath
from taser_jax.storage.registered import Registered

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


class OpenQueryDocuments(Protocol):
    """Opens the documents that a system looked up."""

    def __call__(
        self, directory: FilePath, *, per_query: int, config: ModelConfig, store: TokenStore
    ) -> QueryDocuments:
        """Checks that the model takes documents, and opens them.

        Args:
            directory: the documents of all splits.
            per_query: documents fused with each query, K.
            config: the model that fuses them.
            store: the queries' token store.

        Raises:
            ConfigError: the model takes none, or fewer than one document per query.
        """


class SharedEmbeddings(Protocol):
    """A store's passages as embeddings that encodings and trainings of one tower share."""

    def encoded_by(self, model: LoadedModel, *, config: EncodeConfig) -> Texts:
        """All passages; those without an embedding are encoded first.

        Args:
            model: the model whose passage tower encodes.
            config: sizes of batches.

        Raises:
            FingerprintError: another tower made the embeddings.
        """

    def for_training(
        self,
        config: ModelConfig,
        params: Params,
        *,
        trainable: PyTree[bool],
        others: TextSource | None,
    ) -> TextSource:
        """All passages, for a training that leaves the passage tower alone.

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


QUERY_DOCUMENTS: Registered[OpenQueryDocuments] = Registered(
    "taser_jax.systems.moma.query_documents"
)
# A directory and the token store of the passages -> their embeddings.
SHARED_EMBEDDINGS: Registered[Callable[[FilePath, TokenStore], SharedEmbeddings]] = Registered(
    "taser_jax.systems.moma.embeddings"
)
