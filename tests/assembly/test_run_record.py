"""run.json: what it says of texts, and which settings may change in a model directory."""

import dataclasses
import json
import types

import pytest
import tiny_training
from tiny_training import store_writer

from taser_jax.assembly.plans import MultitaskTraining
from taser_jax.assembly.run_record import check_settings, data_facts, settings_of, text_settings
from taser_jax.data.token_store.store import QueryNormalization, QuerySettings, Titles, TokenStore
from taser_jax.storage.errors import ConfigError, FingerprintError

CURLY = QuerySettings(QueryNormalization.CURLY_APOSTROPHE)
PROMPTED = QuerySettings(prompt=(7, 3))


def recorded(directory, settings, *, lengths=types.MappingProxyType({}), titles=Titles.OMIT):
    """Facts of a run over one task for each of `settings`."""
    writer = store_writer(directory, query_length=4, titles=titles.value)
    writer.write_passages([[2, 5, 3]], count=1)
    for task, setting in {**settings, "another": CURLY}.items():
        texts = {"query_ids": ["q"], "tokens": [[2, 5, 3]], "positives": [[0]]}
        about = {"length": lengths.get(task), "settings": setting}
        writer.write_queries(task, "train", **texts, **about)
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
        settings = text_settings(facts, task)
        assert (settings.queries, settings.query_length, settings.titles) == (CURLY, 4, Titles.OMIT)


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


@pytest.mark.parametrize("tasks", ["a", "ab"])
def test_one_length_below_the_token_stores_needs_no_task(tmp_path, tasks):
    facts = recorded(tmp_path, dict.fromkeys(tasks, CURLY), lengths=dict.fromkeys(tasks, 3))
    assert facts["query_lengths"] == dict.fromkeys(tasks, 3)
    assert [text_settings(facts, task).query_length for task in (None, "a")] == [3, 3]


def test_what_is_not_recorded_is_the_default():
    settings = text_settings({"query_length": 4}, None)
    assert (settings.queries, settings.titles) == (QuerySettings(), Titles.INCLUDE)


SETTINGS = {
    "model.bert.num_layers": 2,
    "training.loop.train_steps": 300,
    "training.optimizer.learning_rate": 2e-5,
    "training.length_buckets": (8, 16),
    "training.validation.batch_size": 8,
    "training.multitask": None,
    "data.queries.faq": "a1",
}


def test_a_batch_of_every_task_keeps_their_order(tiny_store_dir, tmp_path):
    store, training = TokenStore.open(tiny_store_dir), tiny_training.training_config(train_steps=4)
    training = dataclasses.replace(training, multitask=MultitaskTraining())

    def settings(*tasks):
        queries = {task: store.queries(task, "train") for task in tasks}
        return settings_of(tiny_training.model_config(), training, store=store, queries=queries)

    facts = {"settings": settings("first", "second")}
    (tmp_path / "run.json").write_text(json.dumps(facts))
    check_settings(tmp_path, settings("first", "second"), step=2)
    with pytest.raises(FingerprintError, match=r"tasks: was \['first', 'second'\], now \['second'"):
        check_settings(tmp_path, settings("second", "first"), step=2)


def changed(**values):
    return SETTINGS | {name.replace("__", "."): value for name, value in values.items()}


def without(word):
    return {name: value for name, value in SETTINGS.items() if word not in name}


UNVALIDATED = without("validation") | {"training.validation": None}
EVERY_TASK = without("multitask") | {"training.multitask.batching.total": 64}


@pytest.fixture
def model_dir(tmp_path):
    (tmp_path / "run.json").write_text(json.dumps({"settings": SETTINGS}))
    return tmp_path


@pytest.mark.parametrize(
    ("settings", "changes"),
    [
        (SETTINGS, {}),
        (
            changed(training__loop__train_steps=600, training__length_buckets=(16,)),
            {"training.loop.train_steps": (300, 600), "training.length_buckets": ([8, 16], [16])},
        ),
        (UNVALIDATED, {"training.validation.batch_size": (8, "unset")}),
        # Settings of another version of the code: one that it added, one that it dropped.
        (changed(training__objective__label_smoothing=0.0), {}),
        (without("optimizer"), {}),
    ],
)
def test_steps_and_validation_may_change(model_dir, caplog, settings, changes):
    with caplog.at_level("INFO", logger="taser"):
        check_settings(model_dir, settings, step=300)
    assert ("after step 300:\n" in caplog.text) == bool(changes)
    for name, (old, new) in changes.items():
        assert f"{name}: was {old}, now {new}\n" in f"{caplog.text}\n"


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (changed(training__optimizer__learning_rate=1e-3), "learning_rate: was 2e-05, now 0.001"),
        (changed(model__bert__num_layers=3), "num_layers: was 2, now 3"),
        (changed(data__queries__faq="b2"), "data.queries.faq: was a1, now b2"),
        (changed(data__queries__news="c3"), "data.queries.news: was unset, now c3"),
        (EVERY_TASK, "multitask: was None, now unset"),
    ],
)
def test_the_rest_is_refused(model_dir, settings, named):
    settings = settings | {"training.loop.train_steps": 400}
    with pytest.raises(FingerprintError) as refused:
        check_settings(model_dir, settings, step=300)
    message = str(refused.value)
    assert named in message
    assert "train_steps" not in message


def test_without_a_record_nothing_is_compared(tmp_path):
    check_settings(tmp_path, SETTINGS, step=300)
