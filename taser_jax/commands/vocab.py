"""`taser vocab`: trains a vocabulary on a collection."""

from __future__ import annotations

import itertools
import pathlib
from collections.abc import Iterator

from taser_jax.data.collections.store import PassageStore, QuerySet, list_tasks
from taser_jax.data.text.vocabularies import (
    T5_MODEL_FILE,
    VocabularyKind,
    load_vocabulary,
    train_vocabulary,
)
from taser_jax.data.text.vocabulary_files import VOCAB_FILE
from taser_jax.devices.hosts import first_host_only, writes
from taser_jax.storage.errors import ConfigError
from taser_jax.storage.progress import logger, phase

_OF_WEIGHTS = ("config.json", "tokenizer.json", VOCAB_FILE, T5_MODEL_FILE)


@writes("{output_dir}")
@first_host_only
def vocab(
    *,
    data_dir: str,
    collection: str,
    output_dir: str,
    kind: VocabularyKind = VocabularyKind.WORDPIECE,
    size: int = 8192,
    lower_case: bool = True,
    passages: int | None = None,
) -> str:
    """Trains a vocabulary on a collection's passages and training queries.

    Args:
        data_dir: folder of collections.
        collection: the collection.
        output_dir: directory of the vocabulary; an existing one is kept, and one of pretrained
            weights refused.
        kind: WordPiece (BERT) or SentencePiece (T5).
        size: number of entries.
        lower_case: whether text is lower-cased first.
        passages: number of passages to read, from the first; None reads all.

    Returns:
        The vocabulary's fingerprint.
    """
    if (pathlib.Path(output_dir) / "vocabulary.json").exists():
        former = load_vocabulary(output_dir)
        if former.kind != kind.value or former.size > size:
            raise ConfigError(
                f"a {former.kind} vocabulary of {former.size} entries is here, not a {kind.value} "
                f"one of {size}",
                where=output_dir,
                fix="choose another VOCABULARY directory",
            )
        logger.info("vocabulary: reused (%d entries)", former.size)
        return former.fingerprint
    if there := [name for name in _OF_WEIGHTS if (pathlib.Path(output_dir) / name).exists()]:
        raise ConfigError(
            f"here is {', '.join(there)}: a vocabulary of pretrained weights, or a file of words",
            where=output_dir,
            fix="go on with `taser tokenize`, which takes this vocabulary as it is, or choose "
            "another VOCABULARY directory",
        )
    with phase("train vocabulary"):
        trained = train_vocabulary(
            _texts(data_dir, collection, passages),
            kind=kind,
            size=size,
            output_dir=output_dir,
            lower_case=lower_case,
        )
    logger.info("vocabulary: %d entries, fingerprint %s", trained.size, trained.fingerprint)
    return trained.fingerprint


def _texts(data_dir: str, collection: str, passages: int | None) -> Iterator[str]:
    store = PassageStore.open(data_dir, collection)
    for passage in itertools.islice(store.iterate(), passages):
        yield f"{passage.title} {passage.text}"
    for task, splits in sorted(list_tasks(data_dir, collection).items()):
        if "train" in splits:
            for query in QuerySet.open(data_dir, collection, task, "train"):
                yield query.text
