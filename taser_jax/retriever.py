"""A retriever in a few lines of Python: load a model, add passages, ask."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

import numpy as np
from jaxtyping import Float

from taser_jax.assembly.model_directory import LoadedModel, hold_model, load_model, read_facts
from taser_jax.assembly.run_record import task_names, text_settings
from taser_jax.data.collections.store import PassageStore
from taser_jax.data.prepare.detection import PassageSource, given_passages
from taser_jax.data.text.preprocessors import encode_passages, encode_queries
from taser_jax.data.text.vocabularies import Vocabulary, load_vocabulary
from taser_jax.data.token_store.arrays import TokenArray
from taser_jax.interop import hub
from taser_jax.interop.pretrained import Pretrained, pretrained_bert, read_pretrained
from taser_jax.models.batch import Role
from taser_jax.models.bert_config import BertConfig
from taser_jax.models.bert_dual_encoder import DualEncoderConfig
from taser_jax.models.dual_encoder import DualEncoder
from taser_jax.models.parameters import abstract_params
from taser_jax.retrieval.encoding import EncodeConfig, EncodeFn, encode_rows
from taser_jax.retrieval.index import open_index
from taser_jax.retrieval.passages import Collection, Hit, Passages
from taser_jax.retriever_parts import (
    RETRIEVER_FILE,
    TEXT_FACTS,
    open_sparse,
    query_multiple,
    read_parts,
    write_retriever,
)
from taser_jax.storage.artifacts import FilePath
from taser_jax.storage.errors import ConfigError, DataError
from taser_jax.storage.records import Passage

T = TypeVar("T")
# For models whose run.json records no lengths.
_QUERY_LENGTH, _PASSAGE_LENGTH = 32, 256


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
        vocabulary: splits texts.
        facts: how texts become its tokens, as run.json has it (`text_settings`).
        collection: passages on disk; None begins with none.
        task: task whose prompt, length and query encoder are used, where tasks differ.
    """

    def __init__(
        self,
        model: LoadedModel,
        vocabulary: Vocabulary,
        *,
        facts: Mapping[str, object],
        collection: Collection | None = None,
        task: str | None = None,
    ) -> None:
        self.model, self.vocabulary = model, vocabulary
        self.facts, self.texts = facts, text_settings(facts, task)
        self._views: dict[str, Retriever] = {}
        self._encode_query = model.encode_fn(Role.QUERY, task=task)
        self._encode_passage = model.encode_fn(Role.PASSAGE)
        self._passages = Passages(collection)

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
            ConfigError: no model there, only some of index, data and collection given or any
                beside a `retriever.json`, or tasks that differ and none named.
            FingerprintError: the index is of another model or collection.
        """
        parts, model_dir = read_parts(directory), directory
        named = {"index_dir": index_dir, "data_dir": data_dir, "collection": collection}
        given = [name for name, value in named.items() if value is not None]
        if given and (parts is not None or len(given) < len(named)):
            there = f"beside {RETRIEVER_FILE}, which has it" if parts else "without the others"
            fix = "name index_dir, data_dir and collection of a model; retriever.json has them"
            raise ConfigError(f"{', '.join(given)} {there}", where=str(directory), fix=fix)
        if parts is not None:
            model_dir, collection = parts.model_dir, parts.collection
            index_dir, data_dir = parts.index_dir, parts.data_dir
        facts = read_facts(model_dir)
        if query_length is not None:
            facts |= {"query_length": query_length, "query_lengths": None}
        # A task that is needed is asked for before the model is read.
        text_settings(facts, task)
        store = PassageStore.open(data_dir, collection) if data_dir and collection else None
        model = load_model(model_dir, step=step)
        passages = None
        if store is not None and index_dir is not None:
            prints = {"model": model.fingerprint, "collection": store.fingerprint}
            searcher = open_index(index_dir, fingerprints=prints)
            passages = Collection(store, searcher, open_sparse(parts, store))
        vocabulary = load_vocabulary(
            model.vocabulary_dir, rows=model.model.config.transformer.vocab_size
        )
        return cls(model, vocabulary, facts=facts, collection=passages, task=task)

    @classmethod
    def from_pretrained(
        cls,
        source: str | os.PathLike[str],
        *,
        query_length: int | None = None,
        passage_length: int | None = None,
    ) -> Retriever:
        """A pretrained BERT as a retriever, with no training.

        Pooling, normalisation and prompt are those that the directory names; a plain checkpoint,
        which names none, gives the hidden state of [CLS]. A sentence-transformers model gets title
        and text as one, `title text`, as it was trained; an export of ours as in its training.

        Args:
            source: a Hugging Face or sentence-transformers directory, or an id on the hub.
            query_length: maximum tokens per query; None means the model's own maximum, which a
                higher number never exceeds.
            passage_length: maximum tokens per passage, likewise.

        Raises:
            DataError: no checkpoint there, or a damaged one.
            ConfigError: an architecture that is not supported.
        """
        directory = hub.fetch(source)
        without_dropout = BertConfig(dropout_rate=0.0, attention_dropout_rate=0.0)
        bert = pretrained_bert(directory, numerics=without_dropout)
        settings = hub.read_encoder_settings(directory)
        pooling, normalization = settings.pooling, settings.normalization
        config = DualEncoderConfig(bert, pooling=pooling, normalization=normalization)
        vocabulary = load_vocabulary(directory, rows=bert.vocab_size)
        facts: dict[str, object] = {**hub.text_facts(directory)}
        longest = settings.longest(bert.max_length)
        if (directory / hub.MODULES_FILE).is_file():
            prompts = map(list, hub.read_prompts(directory, vocabulary))
            facts.update(zip(("query_prompt", "passage_prompt"), prompts, strict=True))
        module, weights = DualEncoder(config), Pretrained(str(directory))
        params = read_pretrained(weights, config=config, params=abstract_params(module))
        model = hold_model(module, params, vocabulary_dir=directory)
        facts |= {
            "query_length": min(query_length or longest, longest),
            "passage_length": min(passage_length or longest, longest),
        }
        return cls(model, vocabulary, facts=facts)

    def __len__(self) -> int:
        """Number of passages."""
        return len(self._passages)

    @property
    def tasks(self) -> tuple[str, ...]:
        """Tasks whose queries are tokenised or encoded in their own ways; `for_task` takes them."""
        return task_names(self.facts, self.model.model.config)

    @property
    def query_length(self) -> int:
        """Maximum tokens of a query."""
        return self.texts.query_length or _QUERY_LENGTH

    @property
    def has_hybrid(self) -> bool:
        """Whether a comparison recommended BM25 beside the model, with an index and a weight."""
        return self._passages.sparse is not None

    def for_task(self, task: str | None) -> Retriever:
        """The same retriever with a task's prompt, length and query encoder.

        Model and passages are shared: what is added to one is found by all.

        Raises:
            ConfigError: no such task.
        """
        if task is None:
            return self
        if task not in self.tasks:
            names = ", ".join(self.tasks) or "none: all queries are treated alike"
            raise ConfigError(f"no task {task!r}", where="Retriever", fix=f"tasks: {names}")
        if task not in self._views:
            view = Retriever(self.model, self.vocabulary, facts=self.facts, task=task)
            view._passages = self._passages
            self._views[task] = view
        return self._views[task]

    def encode_queries(self, texts: Sequence[str]) -> Float[np.ndarray, "queries dim"]:
        """Embeddings of queries.

        Raises:
            ConfigError: a string instead of a list.
        """
        tokens = self.query_tokens(texts)
        multiple = query_multiple(tokens.lengths)
        return self._encode(tokens, self._encode_query, multiple=multiple)

    def query_tokens(self, texts: Sequence[str]) -> TokenArray:
        """Queries as the model takes them.

        Raises:
            ConfigError: a string instead of a list.
        """
        texts = _listed(texts, "texts")
        tokens = encode_queries(
            texts, self.vocabulary, length=self.query_length, settings=self.texts.queries
        )
        return TokenArray.of(tokens)

    def encode_passages(
        self, passages: Sequence[Passage | str]
    ) -> Float[np.ndarray, "passages dim"]:
        """Embeddings of passages; a string is a passage without title."""
        passages = _listed(passages, "passages")
        tokens = encode_passages(
            [p if isinstance(p, Passage) else Passage(id="", text=p) for p in passages],
            self.vocabulary,
            length=self.texts.passage_length or _PASSAGE_LENGTH,
            titles=self.texts.titles,
            prompt=self.texts.passage_prompt,
        )
        multiple = EncodeConfig.length_multiple
        return self._encode(TokenArray.of(tokens), self._encode_passage, multiple=multiple)

    def _encode(self, tokens: TokenArray, encode_fn: EncodeFn, *, multiple: int) -> np.ndarray:
        if not len(tokens):
            return np.zeros((0, self.model.model.config.embedding_dim), np.float32)
        config = EncodeConfig(length_multiple=multiple)
        return encode_rows(encode_fn, tokens, np.arange(len(tokens)), config=config)

    def add(self, source: PassageSource) -> None:
        """Encodes passages, keeps them in memory, and searches them from now on.

        What is there already, with the same id and content, is left as it is.

        Args:
            source: texts, dictionaries with fields such as id, title and text, passages, a data
                frame, or the path of a file or folder (`given_passages`).

        Raises:
            ConfigError: no such path, or a folder of no known format.
            DataError: an id of another passage, or malformed input.
        """
        self._add(_by_id(source, "Retriever.add"))

    def update(self, source: PassageSource) -> None:
        """As `add`, but a passage replaces the one that has its id."""
        self._add(_by_id(source, "Retriever.update"), replaces=True)

    def _add(self, passages: Mapping[str, Passage], *, replaces: bool = False) -> None:
        there = {id: self._passages.find(id) for id in passages}
        new = [passage for id, passage in passages.items() if passage != there[id]]
        taken = {passage.id for passage in new if there[passage.id] is not None}
        if taken and not replaces:
            raise _taken(min(taken), "Retriever.add")
        if new:
            embeddings = self.encode_passages(new)
            self._passages.remove(taken)
            self._passages.add(new, embeddings)

    def remove(self, ids: Sequence[str]) -> None:
        """Searches passages no longer; files on disk stay as they are.

        Raises:
            ConfigError: a string instead of a list.
            DataError: an id that is not there.
        """
        ids = _listed(ids, "ids")
        for id in ids:
            if self._passages.find(id) is None:
                fix = "give ids of passages that are there"
                raise DataError(f"no passage {id!r}", where="Retriever.remove", fix=fix)
        self._passages.remove(set(ids))

    def save(self, directory: FilePath) -> None:
        """Writes model, passages and indexes to a new folder, which `Retriever.load` opens.

        Args:
            directory: a folder without a retriever.

        Raises:
            ConfigError: there is a retriever, or there are no passages to save.
        """
        root, passages = pathlib.Path(directory), self._passages
        if read_parts(root) is not None:
            fix = "name another folder"
            raise ConfigError("there is a retriever here", where=str(root), fix=fix)
        self._check_not_empty()
        write_retriever(
            root,
            self.model,
            passages,
            passages.embeddings(self.encode_passages),
            facts={name: self.facts[name] for name in TEXT_FACTS if name in self.facts},
            vocabulary=self.vocabulary,
        )

    def search(
        self, questions: Sequence[str], *, k: int = 10, hybrid: bool = False
    ) -> list[list[Hit]]:
        """The best passages of each question, best first; of equal scores those on disk first.

        Args:
            questions: questions as typed.
            k: passages per question; fewer where there are fewer.
            hybrid: whether BM25's scores are added, with the weight that a comparison chose, or
                else half the ratio of the lists' widths. BM25's index is built at the first such
                search, where there is none or passages have changed since.

        Raises:
            ConfigError: a string instead of a list, an empty question, k below 1, or no passages.
        """
        questions = _listed(questions, "questions")
        if not all(map(str.strip, questions)):
            raise ConfigError("an empty question", where="Retriever.search", fix="ask something")
        embeddings = self.encode_queries(questions)
        if hybrid:
            self._check_not_empty()
            return self._passages.hybrid_search(questions, embeddings, k=k)
        return self.search_embeddings(embeddings, k=k)

    def search_embeddings(
        self, queries: Float[np.ndarray, "queries dim"], *, k: int = 10
    ) -> list[list[Hit]]:
        """The best passages of each embedding, as `search` finds them."""
        self._check_not_empty()
        return self._passages.hits(self._passages.search(queries, k))

    def _check_not_empty(self) -> None:
        if not len(self):
            fix = "add some, or load a retriever with its collection"
            raise ConfigError("there are no passages", where="Retriever", fix=fix)


def _by_id(source: PassageSource, where: str) -> dict[str, Passage]:
    passages: dict[str, Passage] = {}
    for passage in given_passages(source):
        if passages.setdefault(passage.id, passage) != passage:
            raise _taken(passage.id, where)
    return passages


def _taken(id: str, where: str) -> DataError:
    fix = "give the passage another id, or replace the former with `update`"
    return DataError(f"another passage has the id {id!r}", where=where, fix=fix)


def _listed(values: Iterable[T], name: str) -> list[T]:
    if isinstance(values, str):
        problem = f"{name} is a string, not a list"
        raise ConfigError(problem, where="Retriever", fix=f"write [{name}]")
    listed = list(values)
    for value in listed:
        if not isinstance(value, str | Passage):
            raise ConfigError(f"{name} has {value!r}", where="Retriever", fix="write a string")
    return listed
