"""`taser tokenize`: tokenises retrieval tasks once and stores their ids."""

from __future__ import annotations

import importlib
import os
import pathlib
import sys
from collections.abc import Mapping, Sequence

from taser_jax.assembly.data import MIXTURE_FILE, check_lengths
from taser_jax.data.collections.store import SPLITS, list_tasks
from taser_jax.data.seqio_tasks.context import use_data
from taser_jax.data.seqio_tasks.registry import (
    add_collection,
    is_registered,
    mixture_rates,
    retrieval_tasks,
)
from taser_jax.data.seqio_tasks.tokenize import tokenize_collection
from taser_jax.data.text.prompts import Prompt, TaskPrompt
from taser_jax.data.text.vocabularies import load_vocabulary
from taser_jax.data.token_store.text_settings import Titles
from taser_jax.devices.hosts import first_host_only, writes
from taser_jax.interop.hub import EncoderSettings, read_encoder_settings
from taser_jax.storage.artifacts import write_json
from taser_jax.storage.errors import ConfigError
from taser_jax.storage.progress import logger, phase


@writes("{output_dir}")
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
    extra_ids: int | None = None,
    splits: Sequence[str] = SPLITS,
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
        extra_ids: number of T5's <extra_id_N> after the ids of a SentencePiece model; None takes
            the number saved with it or in its tokenizer_config.json, or else 0.
        splits: which splits.
        replace: whether a finished store from other inputs is replaced; otherwise it is refused.

    Returns:
        The store's fingerprint.
    """
    check_lengths(feature_lengths)
    if module:
        # As `python -m` does, so that task files in the working directory need no PYTHONPATH.
        if "" not in sys.path and os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"cannot import {error.name!r}",
                where=f"MIXTURE_OR_TASK_MODULE={module}",
                expected="a module that registers tasks, and what it imports",
                fix="run from the folder it is in, put that on PYTHONPATH, or correct the name",
            ) from error
    elif mixture_or_task and (
        list_tasks(data_dir, mixture_or_task) and not is_registered(mixture_or_task)
    ):
        settings = _settings(vocabulary)
        add_collection(
            data_dir,
            mixture_or_task,
            prompt=_prompt(settings),
            titles=Titles.INCLUDE if settings is None else Titles.JOIN,
        )
    with phase("tokenize"):
        store = tokenize_collection(
            data_dir=data_dir,
            mixture_or_task=mixture_or_task,
            # A project's file names its collection beside its mixture.
            collection=None if mixture_or_task else collection,
            vocabulary=load_vocabulary(vocabulary, extra_ids=extra_ids),
            query_length=feature_lengths["query"],
            passage_length=feature_lengths["passage"],
            output_dir=output_dir,
            splits=splits,
            replace=replace,
        )
    if mixture_or_task is not None:
        with use_data(data_dir=data_dir, vocabulary=load_vocabulary(store.vocabulary_directory)):
            trained = [task for task, there in store.tasks.items() if "train" in there]
            weights = mixture_rates(mixture_or_task, trained=trained)
            tasks = retrieval_tasks(mixture_or_task)
        mixture = {
            "format_version": 1,
            "mixture": mixture_or_task,
            "weights": weights,
            "registered": {task.name: task.source.task for task in tasks},
        }
        write_json(pathlib.Path(output_dir) / MIXTURE_FILE, mixture)
    logger.info(
        "token store: %s passages, %s query sets, fingerprint %s",
        f"{len(store):,}",
        len(store.metadata.queries),
        store.metadata.fingerprint,
    )
    return store.metadata.fingerprint


def _settings(vocabulary: str) -> EncoderSettings | None:
    """Those of a sentence-transformers model, if the vocabulary is its directory."""
    directory = pathlib.Path(vocabulary)
    return read_encoder_settings(directory) if directory.is_dir() else None


def _prompt(settings: EncoderSettings | None) -> TaskPrompt:
    """The query prompt of a sentence-transformers model."""
    if settings is None or not settings.query_prompt:
        return TaskPrompt()
    return TaskPrompt(Prompt.TEXT, text=settings.query_prompt)


CONFIGURABLES = ()
