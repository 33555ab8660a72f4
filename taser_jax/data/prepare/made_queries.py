"""Queries made of the passages themselves: a title or a sentence, cut out of what it asks for."""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Iterable, Iterator

import regex

from taser_jax.data.collections import store
from taser_jax.data.prepare.splits import SHARES, sampled, split_of
from taser_jax.data.readers.dialects import WORD
from taser_jax.storage.artifacts import FilePath
from taser_jax.storage.errors import DataError
from taser_jax.storage.records import UNSPACED, Passage, Query, hash_share

TASK = "made"
# More queries train no longer, or tell no more about a model.
_MOST = {"train": 20_000, "validation": 1000, "test": 1000}
# Words of a query, and of what remains of its passage, at least.
_FEWEST_WORDS = 4
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[^\W\d_]|[\"'(])|(?<=[。！？])\s*(?=\w)")


def make_queries(*, data_dir: FilePath, collection: str, source: str) -> dict[str, list[str]]:
    """Writes a collection whose passages lack what became their queries, and these queries.

    Half the pages with a title are asked for by it: title -> text. Of others each passage is, by
    its first sentence, or by one within: sentence -> its neighbours (the inverse cloze task). Each
    passage keeps its row. Pages are divided into training, validation and test by a hash.

    Args:
        data_dir: folder of collections.
        collection: the new one.
        source: the collection whose passages are taken.

    Returns:
        The new collection's task and its splits.

    Raises:
        DataError: too few passages to fill all splits.

    Source: Lee et al., "Latent Retrieval for Weakly Supervised Open Domain Question Answering",
    ACL 2019, which leaves the sentence in a tenth of the passages; here it is always cut out.
    """
    passages = list(store.PassageStore.open(data_dir, source))
    by_split: dict[str, list[Query]] = {split: [] for split in store.SPLITS}
    for page, query, changed in _made(passages):
        split = split_of(f"{TASK}\t{page}", task=TASK, splits=store.SPLITS, shares=SHARES)
        by_split[split].append(query)
        for row, passage in changed.items():
            passages[row] = passage
    if empty := [split for split, queries in by_split.items() if not queries]:
        raise DataError(
            f"{len(passages)} passages make no query for {', '.join(empty)}",
            where=f"collection {source!r}",
            fix="give more text, or leave out --queries=make: the index is made without it",
        )
    store.write_collection(data_dir, collection, passages)
    for split, queries in by_split.items():
        ids = sampled((query.id for query in queries), task=TASK, count=_MOST[split])
        chosen = [query for query in queries if query.id in ids]
        store.write_queries(data_dir, collection, TASK, split, chosen)
    return store.list_tasks(data_dir, collection)


def _made(passages: Iterable[Passage]) -> Iterator[tuple[str, Query, dict[int, Passage]]]:
    """Yields a page, a query made of it, and row -> passage: the query's positives without it."""
    pages: dict[tuple[str, str], dict[int, Passage]] = collections.defaultdict(dict)
    for row, passage in enumerate(passages):
        pages[passage.page_id or passage.id, passage.title][row] = passage
    for (page, title), of_page in pages.items():
        if title and hash_share(f"title\t{page}") < 0.5:
            without = {row: _without_title(passage) for row, passage in of_page.items()}
            if all(_words(passage.text) >= _FEWEST_WORDS for passage in without.values()):
                id = f"title:{next(iter(of_page.values())).id}"
                yield page, Query(id, title, TASK, positives=tuple(without)), without
                continue
        for row, passage in of_page.items():
            if (cut := _sentence(passage)) is not None:
                sentence, rest = cut
                query = Query(f"sentence:{passage.id}", sentence, TASK, positives=(row,))
                yield page, query, {row: dataclasses.replace(passage, text=rest)}


def _words(text: str) -> int:
    return len(WORD.findall(" ".join(text.split())))


def _without_title(passage: Passage) -> Passage:
    # Not the beginning of a longer word.
    title = regex.compile(rf"(?i)\A{regex.escape(passage.title)}((?<=[{UNSPACED}])|(?!\w))\s*")
    return dataclasses.replace(passage, title="", text=title.sub("", passage.text))


def _sentence(passage: Passage) -> tuple[str, str] | None:
    """The first sentence of a passage or one within, and the others; None if it has no two."""
    sentences = _SENTENCE_END.split(passage.text.strip())
    share = hash_share(f"sentence\t{passage.id}")
    number = 0 if share < 0.5 else int((2 * share - 1) * len(sentences))
    rest = " ".join(sentences[:number] + sentences[number + 1 :])
    long_enough = min(_words(sentences[number]), _words(rest)) >= _FEWEST_WORDS
    return (sentences[number], rest) if long_enough else None
