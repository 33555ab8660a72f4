"""A mixture over several collections: their passages merged, their queries' rows moved."""

from __future__ import annotations

import json
import pathlib
import random
import shutil

import pytest
import seqio
import tensorflow as tf

from taser_jax.commands.inputs import tasks_with
from taser_jax.commands.tokenize import tokenize
from taser_jax.data.collections.store import (
    PassageStore,
    QuerySet,
    list_tasks,
    write_collection,
    write_queries,
)
from taser_jax.data.seqio_tasks import registry
from taser_jax.data.seqio_tasks.merged_collections import MERGED_FILE, write_merged
from taser_jax.data.seqio_tasks.retrieval_task import use_data
from taser_jax.data.text.hugging_face import WordPieceVocabulary
from taser_jax.data.token_store.store import Titles, TokenStore
from taser_jax.storage.artifacts import write_json
from taser_jax.storage.errors import ConfigError, DataError
from taser_jax.storage.records import Passage, Query

PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *"abcdefgxyz"]
# By hand. Rows: hills p1 0, p2 1; seas' p1 is hills' p2, p2 is another passage under a taken id,
# p3 is hills' p1 with other white space, p4 is p1 again.
HILLS = [Passage("p1", "x y", "t"), Passage("p2", "z")]
SEAS = [Passage("p1", "z"), Passage("p2", "g"), Passage("p3", "x  y", "t"), Passage("p4", "z")]
MERGED = {"p1": "x y", "p2": "z", "seas:p2": "g"}
ROWS = {"hills": [0, 1], "seas": [1, 2, 0, 1]}

pytestmark = pytest.mark.usefixtures("empty_registries")


@pytest.fixture
def data_dir(tmp_path) -> str:
    data_dir = str(tmp_path / "data")
    write_collection(data_dir, "hills", HILLS)
    write_collection(data_dir, "seas", SEAS)
    hills = [Query("q0", "a", "qa", (1,), (), (0,), ("answer",))]
    write_queries(data_dir, "hills", "qa", "train", hills)
    seas = [
        # Two positives that become one, with the higher grade.
        Query("q0", "b", "qa", (0, 2, 3), (1, 1, 2), (1,)),
        # A hard negative that becomes a positive, and two that become one.
        Query("q1", "c", "qa", (0,), (), (3, 2, 2, 1)),
    ]
    write_queries(data_dir, "seas", "qa", "train", seas)
    write_queries(data_dir, "seas", "claims", "train", [Query("q0", "d", "claims", (1,))])
    write_queries(data_dir, "seas", "claims", "test", [Query("t0", "e", "claims", (3,))])
    return data_dir


def register(*, rates=(1.0, 1.0, 1.0)) -> None:
    for name, collection, task in (
        ("hills_qa", "hills", "qa"),
        ("seas_qa", "seas", "qa"),
        ("seas_claims", "seas", "claims"),
    ):
        registry.add_retrieval_task(name, collection=collection, task=task)
    names = ("hills_qa", "seas_qa", "seas_claims")
    registry.add_retrieval_mixture("land", list(zip(names, rates, strict=True)))


def merge(data_dir: str, mixture: str = "land") -> None:
    with use_data(data_dir=data_dir, vocabulary=WordPieceVocabulary(PIECES)):
        write_merged(registry.find_mixture(mixture).tasks)


def make_tokens(data_dir: str, tmp_path, **more) -> TokenStore:
    WordPieceVocabulary(PIECES).save(str(tmp_path / "vocabulary"))
    tokenize(
        data_dir=data_dir,
        mixture_or_task="land",
        vocabulary=str(tmp_path / "vocabulary"),
        feature_lengths={"query": 5, "passage": 6},
        output_dir=str(tmp_path / "tokens"),
        **more,
    )
    return TokenStore.open(tmp_path / "tokens")


def test_two_collections_by_hand(data_dir):
    register()
    merge(data_dir)
    store = PassageStore.open(data_dir, "land")
    assert {passage.id: passage.text for passage in store} == MERGED
    found = {
        (task, split): [
            (q.id, q.positives, q.relevance, q.hard_negatives, q.answers)
            for q in QuerySet.open(data_dir, "land", task, split)
        ]
        for task, splits in list_tasks(data_dir, "land").items()
        for split in splits
    }
    assert found == {
        # Both collections have a task qa.
        ("hills.qa", "train"): [("q0", (1,), (), (0,), ("answer",))],
        ("seas.qa", "train"): [("q0", (1, 0), (2, 1), (2,), ()), ("q1", (1,), (), (0, 2), ())],
        ("claims", "train"): [("q0", (2,), (), (), ())],
        ("claims", "test"): [("t0", (1,), (), (), ())],
    }
    names = ["seas_qa", "hills.qa", "claims"]
    assert tasks_with(data_dir, "land", split="train", tasks=names) == ["seas.qa", *names[1:]]


def test_tokens_and_rates_are_those_of_the_merged_collection(data_dir, tmp_path):
    register(rates=(2.0, seqio.mixing_rate_num_examples, 5.0))
    store = make_tokens(data_dir, tmp_path)
    assert (store.metadata.collection, len(store)) == ("land", 3)
    assert store.metadata.collection_fingerprint == PassageStore.open(data_dir, "land").fingerprint
    assert store.tasks == {"claims": ["train", "test"], "hills.qa": ["train"], "seas.qa": ["train"]}
    letters = {letter: PIECES.index(letter) for letter in "bcg"}
    queries = store.queries("seas.qa", "train")
    assert queries.ids[:, 1].tolist() == [letters["b"], letters["c"]]
    assert [rows.tolist() for rows in queries.positives] == [[1, 0], [1]]
    assert letters["g"] in store.passages.tokens([2]).ids
    mixture = json.loads((tmp_path / "tokens" / "mixture.json").read_text())
    assert mixture["weights"] == {"claims": 5.0, "hills.qa": 2.0, "seas.qa": 2.0}
    assert mixture["registered"]["seas_qa"] == "seas.qa"


def test_positives_keep_their_texts_whatever_the_order(tmp_path):
    """Random collections over few texts: what a query points at has the same text after merging."""
    draw = random.Random(0)
    data_dir = str(tmp_path)
    before = {}
    for collection in ("one", "two", "three"):
        # `one:3` and `3` are both ids that merging itself might give.
        ids = [*map(str, range(9)), *(f"{collection}:{n}" for n in range(3))]
        draw.shuffle(ids)
        passages = [Passage(id, draw.choice("abcdefg")) for id in ids]
        queries = [
            Query(f"q{n}", "a", collection, tuple(draw.sample(range(12), 3)), (), (n,))
            for n in range(5)
        ]
        write_collection(data_dir, collection, passages)
        write_queries(data_dir, collection, collection, "train", queries)
        registry.add_retrieval_task(collection, collection=collection)
        for query in queries:
            positives = {passages[row].text for row in query.positives}
            negatives = {passages[row].text for row in query.hard_negatives}
            before[collection, query.id] = positives, negatives - positives
    found = []
    for name, order in (("a", ["one", "two", "three"]), ("b", ["three", "one", "two"])):
        registry.add_retrieval_mixture(name, order)
        merge(data_dir, name)
        store = PassageStore.open(data_dir, name)
        texts = [passage.text for passage in store]
        assert len(set(texts)) == len(texts)
        after = {
            (task, query.id): tuple(
                {texts[row] for row in rows} for rows in (query.positives, query.hard_negatives)
            )
            for task in ("one", "two", "three")
            for query in QuerySet.open(data_dir, name, task, "train")
        }
        assert after == before
        found.append((store.fingerprint, list(store)))
    assert found[0] == found[1]


def _state(data_dir: str) -> dict[str, int]:
    root = pathlib.Path(data_dir, "land")
    return {str(path): path.stat().st_mtime_ns for path in root.rglob("*") if path.is_file()}


def test_the_same_tasks_again_change_nothing_and_others_follow(data_dir):
    register()
    merge(data_dir)
    before = _state(data_dir)
    merge(data_dir)
    assert _state(data_dir) == before
    # What a kill leaves: no end, and a part missing.
    path = pathlib.Path(data_dir, "land", MERGED_FILE)
    content = json.loads(path.read_text())
    write_json(path, {name: content[name] for name in ("format_version", "inputs")})
    shutil.rmtree(path.parent / "queries" / "claims" / "test")
    merge(data_dir)
    assert _state(data_dir).keys() == before.keys()
    # A mixture of the same name without a task, over other passages.
    write_collection(data_dir, "hills", [Passage("p0", "e"), *HILLS])
    write_queries(data_dir, "hills", "qa", "train", [Query("q0", "a", "qa", (2,))])
    registry.remove("land")
    registry.add_retrieval_mixture("land", ["hills_qa", "seas_qa"])
    merge(data_dir)
    assert list_tasks(data_dir, "land") == {"hills.qa": ["train"], "seas.qa": ["train"]}
    (query,) = QuerySet.open(data_dir, "land", "hills.qa", "train")
    assert PassageStore.open(data_dir, "land")[query.positives[0]].text == "z"


def test_queries_of_a_source_of_ones_own_are_merged(data_dir):
    def dataset(split, shuffle_files, seed=None):
        return tf.data.Dataset.from_tensor_slices({"query": ["a"], "positives": ["p3"]})

    source = seqio.FunctionDataSource(dataset, splits=["train"])
    registry.add_retrieval_task("mine", collection="seas", source=source)
    registry.add_retrieval_task("hills_qa", collection="hills", task="qa")
    registry.add_retrieval_mixture("land", ["mine", "hills_qa"])
    merge(data_dir)
    (query,) = QuerySet.open(data_dir, "land", "mine", "train")
    assert query.positives == (ROWS["seas"][2],)


@pytest.mark.parametrize("over", ["hills", "land"])
def test_a_prepared_collection_is_never_replaced(data_dir, over):
    register()
    registry.add_retrieval_mixture("hills", ["hills_qa", "seas_qa"])
    if over == "land":
        merge(data_dir)
        write_json(pathlib.Path(data_dir, "land", "prepare.json"), {})
    before = PassageStore.open(data_dir, over).fingerprint
    with pytest.raises(ConfigError, match=f"a collection '{over}' is there already"):
        merge(data_dir, over)
    assert PassageStore.open(data_dir, over).fingerprint == before


def test_forms_of_passages_are_those_of_the_collections(data_dir, tmp_path):
    registry.add_passages("hills", titles=Titles.OMIT)
    register()
    with pytest.raises(ConfigError, match="hills titles=omit, seas titles=include"):
        make_tokens(data_dir, tmp_path)
    assert not pathlib.Path(data_dir, "land").exists()
    registry.add_passages("seas", titles=Titles.OMIT)
    mixture = registry.find_mixture("land")
    assert registry.titles_of("land", mixture) is Titles.OMIT
    registry.add_passages("land", titles=Titles.INCLUDE)
    assert registry.titles_of("land", mixture) is Titles.INCLUDE


def test_a_task_that_is_not_prepared_is_named_before_anything_is_written(data_dir, tmp_path):
    register()
    shutil.rmtree(pathlib.Path(data_dir, "seas", "queries", "claims"))
    with pytest.raises(DataError, match="collection 'seas': task 'claims' is not among"):
        make_tokens(data_dir, tmp_path)
    assert not pathlib.Path(data_dir, "land").exists()
