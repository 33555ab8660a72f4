"""The prompts of queries in exports: as texts if a text yields their ids, else as ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from taser_jax.data.text.vocabularies import load_vocabulary
from taser_jax.data.text.wordpiece import WordPieceVocabulary
from taser_jax.interop.export_source import ExportSource

QUERY, DOCUMENT = "query", "document"
# Names that sentence-transformers models use for prompts of passages.
_OF_PASSAGES = (DOCUMENT, "passage", "search_document")


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
        return {QUERY: "", DOCUMENT: ""}
    text = prompt_text(own, vocabulary)
    if text is None:
        return None
    found: Mapping[str, str | None] = {
        task: prompt_text(ids, vocabulary)
        for task, ids in source.prompts.items()
        if task not in _OF_PASSAGES
    }
    tasks = {task: text for task, text in found.items() if text is not None}
    return {**tasks, QUERY: text, DOCUMENT: ""}


def ids_before_queries(source: ExportSource) -> tuple[int, ...]:
    """The prompt's ids if no text yields them, so that the tokenizer must add them; else none."""
    return source.query_settings.prompt if prompt_texts(source) is None else ()
