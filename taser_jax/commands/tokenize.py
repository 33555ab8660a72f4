"""`taser tokenize`: tokenises retrieval tasks once, and trains a vocabulary for them."""

from __future__ import annotations

import importlib
import os
import pathlib
import sys
from collections.abc import Iterator, Mapping

from etils import epath

from taser_jax.assembly.data import MIXTURE_FILE, check_lengths
from taser_jax.data.collections.store import PassageStore, QuerySet, list_tasks
from taser_jax.data.seqio_tasks.registry import find_mixture, mixture_of_collection, names
from taser_jax.data.seqio_tasks.retrieval_task import RetrievalMixture, use_data
from taser_jax.data.seqio_tasks.tokenize import tokenize_collection
from taser_jax.data.text import vocabularies, wordpiece
from taser_jax.data.text.preprocessors import Prompt, TaskPrompt
from taser_jax.data.token_store.store import Titles
from taser_jax.devices.hosts import first_host_only, writes
from taser_jax.interop.hub import MODULES_FILE, prompt_texts, template_prompt, text_facts
from taser_jax.storage.artifacts import TOKEN_STORE, check_kind, write_json
from taser_jax.storage.errors import ConfigError
from taser_jax.storage.progress import logger, phase
from taser_jax.storage.publishing import one_writer

_OF_WEIGHTS = ("config.json", "tokenizer.json", wordpiece.VOCAB_FILE, vocabularies.T5_MODEL_FILE)


@writes("{output_dir}", kinds=[TOKEN_STORE])
@first_host_only
def tokenize(
    *,
    data_dir: str,
    mixture_or_task: str | None = None,
    collection: str | None = None,
    vocabulary: str,
    feature_lengths: Mapping[str, int],
    output_dir: str,
    module: str | None = None,
    vocabulary_size: int | None = None,
    extra_ids: int | None = None,
    replace: bool = False,
) -> str:
    """Tokenises a mixture's collection and queries; training reads the result with NumPy alone.

    Args:
        data_dir: folder of collections.
        mixture_or_task: a registered name, or a collection, all of whose tasks are taken as
            they are.
        collection: without a mixture, a collection without queries, such as a memory.
        vocabulary: directory of a vocabulary or of a BERT's or T5's checkpoint, a BERT vocab.txt or
            a SentencePiece model.
        feature_lengths: {"query": ..., "passage": ...}, special tokens included.
        output_dir: the token store; one made from the same inputs is reused.
        module: Python module that registers the task, for example "taser_jax.tasks.pydocs"; None
            for a collection, or for tasks that are registered already.
        vocabulary_size: trains a WordPiece vocabulary of as many entries on the passages and
            training queries, if the directory has none; None takes what is there.
        extra_ids: number of T5's <extra_id_N> after the ids of a SentencePiece model; None takes
            the number saved with it or in its tokenizer_config.json, or else 0.
        replace: whether a finished store from other inputs is replaced; otherwise it is refused.

    Returns:
        The store's fingerprint.
    """
    check_lengths(feature_lengths)
    mixture = None
    if mixture_or_task is not None:
        mixture = _mixture(mixture_or_task, module, data_dir, vocabulary)
    if vocabulary_size is not None:
        source = str(collection) if mixture is None else mixture.collection
        make_vocabulary(
            data_dir=data_dir, collection=source, output_dir=vocabulary, size=vocabulary_size
        )
    with phase("tokenize"):
        store = tokenize_collection(
            data_dir=data_dir,
            mixture=mixture,
            # A project's file names its collection beside its mixture.
            collection=collection if mixture is None else None,
            vocabulary=vocabularies.load_vocabulary(vocabulary, extra_ids=extra_ids),
            query_length=feature_lengths["query"],
            passage_length=feature_lengths["passage"],
            output_dir=output_dir,
            replace=replace,
        )
    if mixture is not None:
        with use_data(
            data_dir=data_dir, vocabulary=vocabularies.load_vocabulary(store.vocabulary_directory)
        ):
            trained = [task for task, there in store.tasks.items() if "train" in there]
            weights = mixture.weights(trained=trained)
        content = {"format_version": 1, "mixture": mixture.name, "weights": weights}
        write_json(pathlib.Path(output_dir) / MIXTURE_FILE, content)
    logger.info(
        "token store: %s passages, %s query sets, fingerprint %s",
        f"{len(store):,}",
        len(store.metadata.queries),
        store.metadata.fingerprint,
    )
    return store.metadata.fingerprint


def make_vocabulary(*, data_dir: str, collection: str, output_dir: str, size: int) -> str:
    """Trains a WordPiece vocabulary on a collection's passages and training queries.

    Args:
        data_dir: folder of collections.
        collection: the collection.
        output_dir: directory of the vocabulary; one that is there is kept.
        size: number of entries.

    Returns:
        The vocabulary's fingerprint.

    Raises:
        ConfigError: another vocabulary is there.
    """
    directory = epath.Path(output_dir)
    if (directory / wordpiece.METADATA).exists():
        former = vocabularies.load_vocabulary(output_dir)
        if former.kind != wordpiece.WordPieceVocabulary.kind or former.size > size:
            problem = f"a {former.kind} vocabulary of {former.size} entries is here"
            problem += f", not a wordpiece one of {size}"
            fix = "choose another VOCABULARY directory, or leave VOCAB_SIZE out"
            raise ConfigError(problem, where=output_dir, fix=fix)
        logger.info("vocabulary: reused (%d entries)", former.size)
        return former.fingerprint
    files = [name for name in _OF_WEIGHTS if (directory / name).exists()]
    if files or (directory.exists() and not directory.is_dir()):
        raise ConfigError(
            f"here is {', '.join(files) or 'a file'}: a vocabulary of pretrained weights, or words",
            where=output_dir,
            fix="leave VOCAB_SIZE out to take this vocabulary, or choose another VOCABULARY "
            "directory",
        )
    with one_writer(output_dir), phase("train vocabulary"):
        check_kind(output_dir, [])
        trained = wordpiece.train_vocabulary(
            _texts(data_dir, collection), size=size, output_dir=output_dir
        )
    logger.info("vocabulary: %d entries, fingerprint %s", trained.size, trained.fingerprint)
    return trained.fingerprint


def _texts(data_dir: str, collection: str) -> Iterator[str]:
    for passage in PassageStore.open(data_dir, collection):
        yield f"{passage.title} {passage.text}"
    for task, splits in sorted(list_tasks(data_dir, collection).items()):
        if "train" in splits:
            for query in QuerySet.open(data_dir, collection, task, "train"):
                yield query.text


def _mixture(name: str, module: str | None, data_dir: str, vocabulary: str) -> RetrievalMixture:
    if module:
        import_tasks(module)
    elif name not in names() and list_tasks(data_dir, name):
        directory = pathlib.Path(vocabulary)
        if not (directory / MODULES_FILE).is_file():
            return mixture_of_collection(data_dir, name)
        # Of a sentence-transformers model: its prompts, and titles as it is trained with.
        before = _template_text(directory)
        prompt, passage_prompt = (
            TaskPrompt(Prompt.TEXT, text=before + text) if before + text else TaskPrompt()
            for text in prompt_texts(directory)
        )
        titles = Titles(text_facts(directory)["titles"])
        return mixture_of_collection(
            data_dir, name, prompt=prompt, titles=titles, passage_prompt=passage_prompt
        )
    return find_mixture(name)


def _template_text(directory: pathlib.Path) -> str:
    """The prompt of a tokenizer as a text.

    Raises:
        ConfigError: no text has its ids.
    """
    ids = template_prompt(directory)
    if not ids:
        return ""
    from taser_jax.interop.export_source import prompt_text

    text = prompt_text(ids, vocabularies.load_vocabulary(directory))
    if text is None:
        raise ConfigError(
            f"its tokenizer puts the ids {list(ids)} before every text, which no text has",
            where=str(directory),
            fix="register the task with its prompt: TaskPrompt(Prompt.NAME, ...) in a module of "
            "MIXTURE_OR_TASK_MODULE",
        )
    return text


def collection_of(mixture_or_task: str, module: str | None) -> tuple[str, list[str] | None] | None:
    """The collection of a mixture's tasks, and their names there; None is all of them.

    Queries that the tasks' own sources yield are left out: the first tokenisation writes them.
    """
    if module:
        try:
            import_tasks(module)
        except ConfigError:
            # Tokenising says what is wrong with the module.
            return None
    if mixture_or_task not in names():
        return mixture_or_task, None
    mixture = find_mixture(mixture_or_task)
    return mixture.collection, [task.query_set for task in mixture.tasks if task.source is None]


def import_tasks(module: str) -> None:
    """Imports a module that registers tasks.

    Raises:
        ConfigError: it, or what it imports, is not there.
    """
    # As `python -m` does, so that task files in the working directory need no PYTHONPATH.
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        problem = f"cannot import {error.name!r}"
        fix = "run from the folder it is in, put that on PYTHONPATH, or correct the name"
        raise ConfigError(problem, where=f"MIXTURE_OR_TASK_MODULE={module}", fix=fix) from error
