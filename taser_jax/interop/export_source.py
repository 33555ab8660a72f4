"""The input of every exporter: a trained dual encoder, facts for its model card, and prompts.

The prompts of queries leave as texts if a text yields their ids, else as ids.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from taser_jax.data.text.vocabularies import load_vocabulary
from taser_jax.data.text.wordpiece import WordPieceVocabulary
from taser_jax.data.token_store.store import QuerySettings, Titles
from taser_jax.models.dual_encoder import ModelConfig, Params
from taser_jax.storage.errors import ConfigError

QUERY, DOCUMENT = "query", "document"
# Names that sentence-transformers models use for prompts of passages.
_OF_PASSAGES = (DOCUMENT, "passage", "search_document")


@dataclasses.dataclass(frozen=True)
class ExportSource:
    """A trained dual encoder to export.

    Attributes:
        config: the dual encoder.
        params: its parameters, as arrays on this host.
        vocabulary_dir: the vocabulary it was trained with.
        query_length: tokens per query in training; longer queries were truncated.
        passage_length: tokens per passage, as for queries.
        fingerprint: fingerprint of configuration and parameters.
        facts: the record of its run (run.json): data fingerprints, steps, negatives per query.
        metrics: name -> value, for the model card; may be empty.
        config_text: the Gin configuration it was trained with.
        task: the task whose query encoder to export, if encoders differ by task.
        query_settings: how queries were converted to tokens.
        titles: whether passages were encoded with their titles.
        passage_prompt: ids put before every passage; tokenizers of exports add them.
        prompts: task -> ids of its prompt, for the tasks that differ only in their prompts.
    """

    config: ModelConfig
    params: Params
    vocabulary_dir: pathlib.Path
    query_length: int
    passage_length: int
    fingerprint: str
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    config_text: str = ""
    task: str | None = None
    query_settings: QuerySettings = QuerySettings()
    titles: Titles = Titles.INCLUDE
    passage_prompt: tuple[int, ...] = ()
    prompts: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)


def prompt_text(ids: Sequence[int], vocabulary: WordPieceVocabulary) -> str | None:
    """A text that yields these ids when put before another; None if there is none.

    Example:
        >>> vocabulary = WordPieceVocabulary(
        ...     ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "que", "##ry", ":"]
        ... )
        >>> prompt_text([4, 5, 6], vocabulary)
        'query : '
        >>> prompt_text([4, 5, 3], vocabulary) is None  # "[SEP]" in a text is ordinary text
        True

    Args:
        ids: the prompt's ids, without special tokens around it.
        vocabulary: the model's.
    """
    if not ids:
        return ""
    # The space at the end separates the prompt from the query's first word.
    text = vocabulary.decode(ids) + " "
    return text if vocabulary.encode([text]) == [list(ids)] else None


def prompt_texts(source: ExportSource) -> dict[str, str] | None:
    """sentence-transformers' `prompts`: "query", "document" and each task that has a text.

    Returns:
        Name -> text; None if no text yields the ids of the exported queries' prompt.
    """
    own = tuple(source.query_settings.prompt)
    vocabulary = load_vocabulary(source.vocabulary_dir) if own or source.prompts else None
    if not isinstance(vocabulary, WordPieceVocabulary):
        return None if own else {QUERY: "", DOCUMENT: ""}
    text = prompt_text(own, vocabulary)
    if text is None:
        return None
    texts: Mapping[str, str | None] = {
        task: prompt_text(ids, vocabulary)
        for task, ids in source.prompts.items()
        if task not in _OF_PASSAGES
    }
    tasks = {task: text for task, text in texts.items() if text is not None}
    return {**tasks, QUERY: text, DOCUMENT: ""}


def ids_before_queries(source: ExportSource) -> tuple[int, ...]:
    """The prompt's ids if no text yields them, so that the tokenizer must add them; else none."""
    return source.query_settings.prompt if prompt_texts(source) is None else ()


def check_exported(config: ModelConfig, task: str | None) -> None:
    """Refuses models that one program per role cannot stand for.

    Raises:
        ConfigError: queries with documents of a memory, or a missing or unknown task for a model
            with one query encoder per task.
    """
    if config.fuses:
        raise ConfigError(
            f"a {type(config).__name__.removesuffix('Config')} reads documents of a memory with "
            "each query, and an export has no memory",
            where="export_model.model_dir",
            fix="export a model that reads queries alone; `taser encode` and `taser search` serve "
            "this one",
        )
    tasks = config.query_tasks
    if tasks and task not in tasks:
        problem = "no task" if task is None else f"no query encoder of task {task!r}"
        raise ConfigError(
            f"{problem}; an export has that of one of {', '.join(tasks)}",
            where="export_model.task",
            fix=f"--gin.export_model.task={tasks[0]!r}",
        )
