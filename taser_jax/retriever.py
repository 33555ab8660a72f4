"""A retriever in a few lines of Python: load a model, add passages, ask."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float, Int

from taser_jax.assembly.model_directory import LoadedModel, hold_model, load_model, read_facts
from taser_jax.assembly.retriever_parts import read_parts
from taser_jax.assembly.text_facts import text_settings
from taser_jax.data.collections.store import PassageStore
from taser_jax.data.text.preprocessors import encode_passages, encode_queries
from taser_jax.data.text.vocabularies import Vocabulary, load_vocabulary
from taser_jax.data.token_store.text_settings import QuerySettings, Titles
from taser_jax.interop.encoder_settings import EncoderSettings, read_encoder_settings
from taser_jax.interop.hub import fetch
from taser_jax.interop.pretrained import load_pretrained, pretrained_bert
from taser_jax.models.batch import Role, Tokens
from taser_jax.models.bert import BertConfig
from taser_jax.models.bert_dual_encoder import DualEncoderConfig
from taser_jax.models.dual_encoder import DualEncoder
from taser_jax.models.parameters import abstract_params
from taser_jax.retrieval.embeddings import EncodeFn, encode_rows
from taser_jax.retrieval.encode_config import EncodeConfig
from taser_jax.retrieval.exact import ExactSearcher, search_devices
from taser_jax.retrieval.index import open_index
from taser_jax.retrieval.runs import NO_ROW
from taser_jax.retrieval.searcher import Searcher
from taser_jax.storage.artifacts import FilePath
from taser_jax.storage.errors import ConfigError, DataError
from taser_jax.storage.records import Passage

# For models that were trained before lengths were recorded.
_QUERY_LENGTH, _PASSAGE_LENGTH = 32, 256


@dataclasses.dataclass(frozen=True)
class Hit:
    """One result of a search.

    Attributes:
        passage: what was found.
        score: inner product of the query's and the passage's embeddings; of a hybrid search, the
            sum by which it ranks.
        dense: of a hybrid search, the inner product; None where the dense list lacks the passage.
        sparse: of a hybrid search, BM25's score; None where BM25's list lacks the passage.
    """

    passage: Passage
    score: float
    dense: float | None = None
    sparse: float | None = None


@dataclasses.dataclass(frozen=True)
class Texts:
    """How texts become tokens for a model.

    Attributes:
        vocabulary: splits them.
        query_length: maximum tokens per query.
        passage_length: maximum tokens per passage.
        queries: prompt and normalisation of queries.
        titles: whether a passage's title precedes its text.
    """

    vocabulary: Vocabulary
    query_length: int = _QUERY_LENGTH
    passage_length: int = _PASSAGE_LENGTH
    queries: QuerySettings = QuerySettings()
    titles: Titles = Titles.INCLUDE


@dataclasses.dataclass(frozen=True)
class Collection:
    """Passages on disk, with their index.

    Attributes:
        store: the passages, by row.
        searcher: an index of their embeddings.
    """

    store: PassageStore
    searcher: Searcher


class Retriever:
    """A dual encoder with the passages that it searches.

    Example:
        >>> retriever = Retriever.from_pretrained(
        ...     "sentence-transformers/all-MiniLM-L6-v2"
        ... )  # doctest: +SKIP
        >>> retriever.add([Passage(id="1", text="Paris lies on the Seine.")])  # doctest: +SKIP
        >>> retriever.search(["which river flows through Paris?"], k=1)[0][0].passage.id
        ... # doctest: +SKIP
        '1'

    Args:
        model: the dual encoder with its parameters.
        texts: how texts become its tokens.
        collection: passages on disk; None begins with none.
        task: task whose query encoder is used, where tasks have their own.
    """

    def __init__(
        self,
        model: LoadedModel,
        *,
        texts: Texts,
        collection: Collection | None = None,
        task: str | None = None,
    ) -> None:
        self.model = model
        self.texts = texts
        self._collection = collection
        self._encode_query = model.encode_fn(Role.QUERY, task=task)
        self._encode_passage = model.encode_fn(Role.PASSAGE)
        self._added: list[Passage] = []
        self._added_ids: set[str] = set()
        self._embeddings = np.zeros((0, 0), np.float32)
        self._searcher: Searcher | None = None

    @classmethod
    def load(
        cls,
        directory: FilePath,
        *,
        index_dir: FilePath | None = None,
        data_dir: FilePath | None = None,
        collection: str | None = None,
        task: str | None = None,
        query_length: int | None = None,
        step: int | None = None,
    ) -> Retriever:
        """Opens a trained model, with its collection where one is named.

        Args:
            directory: of a model, or one with a `retriever.json` (`taser quickstart` leaves one),
                which names model, index and collection.
            index_dir: an index of the collection that this model encoded.
            data_dir: folder of collections.
            collection: the collection.
            task: task whose prompt, length and query encoder are used, where tasks differ.
            query_length: maximum tokens per query; None takes the training's.
            step: step of the checkpoint; None means the best one.

        Raises:
            ConfigError: no model there, only some of index, data and collection given, or tasks
                that differ and none named.
            FingerprintError: the index is of another model or collection.
        """
        parts = read_parts(directory)
        if parts is not None:
            index_dir, data_dir, collection = parts.index_dir, parts.data_dir, parts.collection
        model_dir = directory if parts is None else parts.model_dir
        named = {"index_dir": index_dir, "data_dir": data_dir, "collection": collection}
        missing = [name for name, value in named.items() if value is None]
        if missing and len(missing) < len(named):
            raise ConfigError(
                f"no {' and no '.join(missing)}",
                where="Retriever.load",
                expected="index_dir, data_dir and collection, or none of them",
                fix="name all three to search a collection on disk",
            )
        facts = read_facts(model_dir)
        settings = text_settings(facts, task)
        store = PassageStore.open(data_dir, collection) if data_dir and collection else None
        model = load_model(model_dir, step=step)
        found = None
        if store is not None and index_dir is not None:
            prints = {"model": model.fingerprint, "collection": store.fingerprint}
            searcher = open_index(index_dir, fingerprints=prints, devices=search_devices())
            found = Collection(store, searcher)
        texts = Texts(
            vocabulary=load_vocabulary(
                model.vocabulary_dir, rows=model.model.config.transformer.vocab_size
            ),
            query_length=query_length or settings.query_length or _QUERY_LENGTH,
            passage_length=facts.get("passage_length") or _PASSAGE_LENGTH,
            queries=settings.queries,
            titles=settings.titles,
        )
        return cls(model, texts=texts, collection=found, task=task)

    @classmethod
    def from_pretrained(
        cls,
        source: str | os.PathLike[str],
        *,
        settings: EncoderSettings | None = None,
        query_length: int = 64,
        passage_length: int = 256,
    ) -> Retriever:
        """A pretrained BERT as a retriever, with no training.

        Args:
            source: a Hugging Face or sentence-transformers directory, or an id on the hub.
            settings: pooling, normalisation and prompt; None takes what the directory says, and
                for a plain checkpoint, which says nothing, the hidden state of [CLS].
            query_length: maximum tokens per query.
            passage_length: maximum tokens per passage; the model's own maximum if that is lower.

        Raises:
            DataError: no checkpoint there, or a damaged one.
            ConfigError: an architecture that is not supported.
        """
        directory = fetch(source)
        without_dropout = BertConfig(dropout_rate=0.0, attention_dropout_rate=0.0)
        bert = pretrained_bert(directory, numerics=without_dropout)
        settings = settings or read_encoder_settings(directory)
        config = DualEncoderConfig(bert=bert)
        vocabulary = load_vocabulary(directory, rows=bert.vocab_size)
        queries = QuerySettings()
        if settings is not None:
            config = dataclasses.replace(
                config, pooling=settings.pooling, normalization=settings.normalization
            )
            query_length, passage_length = (
                min(length, settings.max_length or length)
                for length in (query_length, passage_length)
            )
            (prompt,) = vocabulary.encode([settings.query_prompt])
            queries = QuerySettings(prompt=tuple(prompt))
        module = DualEncoder(config)
        params = load_pretrained(directory, config=config, params=abstract_params(module))
        model = hold_model(module, params, vocabulary_dir=directory)
        return cls(model, texts=Texts(vocabulary, query_length, passage_length, queries))

    def __len__(self) -> int:
        """Number of passages."""
        return self._stored + len(self._added)

    @property
    def _stored(self) -> int:
        return 0 if self._collection is None else len(self._collection.store)

    def encode_queries(self, texts: Sequence[str]) -> Float[np.ndarray, "queries dim"]:
        """Embeddings of queries.

        Raises:
            ConfigError: a string instead of a list.
        """
        return self._encode(self.query_tokens(texts), self._encode_query)

    def query_tokens(self, texts: Sequence[str]) -> Tokens:
        """Queries as the model takes them.

        Raises:
            ConfigError: a string instead of a list.
        """
        _check_list(texts, "texts")
        return encode_queries(
            texts,
            self.texts.vocabulary,
            length=self.texts.query_length,
            settings=self.texts.queries,
        )

    def encode_passages(
        self, passages: Sequence[Passage | str]
    ) -> Float[np.ndarray, "passages dim"]:
        """Embeddings of passages; a string is a passage without title."""
        _check_list(passages, "passages")
        tokens = encode_passages(
            [p if isinstance(p, Passage) else Passage(id="", text=p) for p in passages],
            self.texts.vocabulary,
            length=self.texts.passage_length,
            titles=self.texts.titles,
        )
        return self._encode(tokens, self._encode_passage)

    def _encode(self, tokens: Tokens, encode_fn: EncodeFn) -> np.ndarray:
        if not len(tokens.ids):
            return np.zeros((0, self.model.model.config.embedding_dim), np.float32)
        config = EncodeConfig(batch_multiple=self.model.batch_multiple)
        rows = np.arange(len(tokens.ids))
        embeddings, _ = encode_rows(encode_fn, TokensInMemory(tokens), rows, config=config)
        return embeddings

    def add(self, passages: Sequence[Passage]) -> None:
        """Encodes passages, keeps them in memory, and searches them from now on.

        Raises:
            DataError: an id that is there already, or twice among the new ones.
        """
        seen: set[str] = set()
        for passage in passages:
            if passage.id in seen or passage.id in self._added_ids or self._is_stored(passage.id):
                raise DataError(
                    f"passage id {passage.id!r} is taken",
                    where="Retriever.add",
                    expected="ids that are not there yet",
                    fix="give the passage another id, or leave it out",
                )
            seen.add(passage.id)
        embeddings = self.encode_passages(passages)
        if not len(embeddings):
            return
        self._embeddings = (
            np.concatenate([self._embeddings, embeddings]) if self._added else embeddings
        )
        self._added.extend(passages)
        self._added_ids |= seen
        self._searcher = ExactSearcher(_Matrix(self._embeddings), devices=search_devices())

    def _is_stored(self, id: str) -> bool:
        return self._collection is not None and self._collection.store.find(id) is not None

    def search(self, questions: Sequence[str], *, k: int = 10) -> list[list[Hit]]:
        """The best passages of each question, best first; of equal scores those on disk first.

        Args:
            questions: questions as typed.
            k: passages per question; fewer where there are fewer.

        Raises:
            ConfigError: a string instead of a list, an empty question, k below 1, or no passages.
        """
        _check_list(questions, "questions")
        if not all(map(str.strip, questions)):
            raise ConfigError("an empty question", where="Retriever.search", expected="some text")
        if not len(self):
            raise ConfigError(
                "there are no passages",
                where="Retriever.search",
                fix="add some, or load a retriever with its collection",
            )
        return self.search_embeddings(self.encode_queries(questions), k=k)

    def search_embeddings(
        self, queries: Float[np.ndarray, "queries dim"], *, k: int = 10
    ) -> list[list[Hit]]:
        """The best passages of each embedding, as `search` finds them."""
        hits: list[list[Hit]] = [[] for _ in queries]
        if self._collection is not None:
            _collect(hits, self._collection.searcher, queries, k, self._collection.store.get_many)
        if self._searcher is not None:
            _collect(hits, self._searcher, queries, k, lambda rows: [self._added[r] for r in rows])
        return [sorted(found, key=lambda hit: -hit.score)[:k] for found in hits]


@dataclasses.dataclass(frozen=True)
class TokensInMemory:
    """Tokens in memory, as the encoder reads them from a token store."""

    padded: Tokens

    @property
    def lengths(self) -> Int[np.ndarray, " texts"]:
        """Real tokens of each text."""
        return np.asarray(self.padded.mask).sum(axis=1)

    def tokens(self, rows: np.ndarray) -> Tokens:
        """Tokens of the given rows."""
        return Tokens(ids=self.padded.ids[rows], mask=self.padded.mask[rows])


@dataclasses.dataclass(frozen=True)
class _Matrix:
    """Embeddings in memory, as an index reads them from disk."""

    array: np.ndarray

    @property
    def shape(self) -> tuple[int, int]:
        return self.array.shape[0], self.array.shape[1]

    def rows(self, start: int, stop: int) -> np.ndarray:
        return self.array[start:stop]


def _collect(
    hits: list[list[Hit]],
    searcher: Searcher,
    queries: Float[np.ndarray, "queries dim"],
    k: int,
    passages: Callable[[Sequence[int]], list[Passage]],
) -> None:
    """Appends one searcher's results to each query's."""
    result = searcher.search(queries, k)
    for found, rows, scores in zip(hits, result.rows, result.scores, strict=True):
        real = rows != NO_ROW
        found.extend(
            Hit(passage, float(score))
            for passage, score in zip(passages(rows[real].tolist()), scores[real], strict=True)
        )


def _check_list(values: Sequence[object], name: str) -> None:
    if isinstance(values, str):
        raise ConfigError(
            f"{name} is a string", where="Retriever", expected="a list", fix=f"write [{name}]"
        )
