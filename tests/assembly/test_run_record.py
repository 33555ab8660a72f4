"""What run.json says of texts, and what exports read there."""

from __future__ import annotations

import types

import pytest

from taser_jax.assembly.text_facts import data_facts, text_settings
from taser_jax.data.token_store.store import QueryNormalization, QuerySettings, Titles
from taser_jax.data.token_store.writer import TokenStoreWriter
from taser_jax.storage.errors import ConfigError

CURLY = QuerySettings(QueryNormalization.CURLY_APOSTROPHE)
PROMPTED = QuerySettings(prompt=(7, 3))


def recorded(directory, settings, *, lengths=types.MappingProxyType({}), titles=Titles.OMIT):
    """Facts of a run over one task for each of `settings`."""
    writer = TokenStoreWriter(
        directory,
        collection="tiny",
        collection_fingerprint="c",
        vocabulary_fingerprint="v",
        vocabulary_size=9,
        query_length=4,
        passage_length=4,
        titles=titles,
    )
    writer.write_passages([[2, 5, 3]], count=1)
    for task, setting in {**settings, "another": CURLY}.items():
        writer.write_queries(
            task,
            "train",
            query_ids=["q"],
            tokens=[[2, 5, 3]],
            positives=[[0]],
            length=lengths.get(task),
            settings=setting,
        )
    plan = types.SimpleNamespace(
        batches_per_epoch=dict.fromkeys(settings, 1), steps_per_epoch=4, fingerprint="f"
    )
    facts = data_facts(plan, writer.finish(), train_steps=6)
    assert facts["epochs"] == 1.5
    names = ("query_normalization", "query_prompt", "query_lengths", "titles")
    return {name: facts[name] for name in names if name in facts} | {"query_length": 4}


def test_tasks_that_agree_are_recorded_once(tmp_path):
    facts = recorded(tmp_path, {"a": CURLY, "b": CURLY})
    assert facts == {"query_normalization": "curly_apostrophe", "titles": "omit", "query_length": 4}
    for task in (None, "a", "typed"):
        found = text_settings(facts, task)
        assert (found.queries, found.query_length, found.titles) == (CURLY, 4, Titles.OMIT)


def test_tasks_that_differ_are_recorded_each(tmp_path):
    facts = recorded(tmp_path, {"a": CURLY, "b": PROMPTED}, lengths={"b": 6})
    assert facts["query_normalization"] == {"a": "curly_apostrophe", "b": "none"}
    assert facts["query_prompt"] == {"a": [], "b": [7, 3]}
    assert facts["query_lengths"] == {"a": 4, "b": 6}
    assert text_settings(facts, "b").queries == PROMPTED
    assert [text_settings(facts, task).query_length for task in "ab"] == [4, 6]
    for task in (None, "c"):
        with pytest.raises(ConfigError, match=rf"task is {task!r}(.|\n)*one of a, b"):
            text_settings(facts, task)


def test_what_is_not_known_is_left_out(tmp_path):
    facts = recorded(tmp_path, {"a": None}, titles=None)
    assert facts == {"query_length": 4}
    found = text_settings(facts, None)
    assert (found.queries, found.titles) == (QuerySettings(), Titles.INCLUDE)
