import json

import pytest

from taser_jax.data.collections.store import PassageStore, QuerySet
from taser_jax.data.prepare.collection import prepare
from taser_jax.data.prepare.options import PrepareOptions
from taser_jax.data.prepare.receipts import gold_path
from taser_jax.data.readers import kilt
from taser_jax.data.readers.passages import read_passages

pytestmark = pytest.mark.slow

COUNTS = {
    "squad-train": 8038,
    "squad-dev": 1584,
    "nq_qed-train": 7131,
    "nq_qed-dev": 1359,
    "selqa-dev": 785,
    "hotpotqa-train100": 100,
    "musique-train100": 100,
    "boolq-train32": 32,
    "fm2-dev": 1169,
    "climate_fever-all": 1061,
    "fewrel-val": 11200,
    "cmu_dog-train": 9172,
}


@pytest.fixture(scope="module")
def kilt_mini(shared_data):
    return shared_data / "kilt_mini"


def test_counts_and_places(kilt_mini):
    assert {
        name: sum(1 for _ in kilt.read_queries(kilt_mini / f"{name}.jsonl.gz")) for name in COUNTS
    } == COUNTS
    passages = list(read_passages(kilt_mini / "passages.tsv.gz"))
    assert len(passages) == 57937
    assert len({one.passage.page_id for one in passages}) == 28537
    assert all(one.span is not None for one in passages)


@pytest.fixture(scope="module")
def prepared(kilt_mini, tmp_path_factory):
    """Two sets whose queries have several gold passages, by passage id."""
    data_dir = tmp_path_factory.mktemp("data")
    tasks = {
        "hotpotqa": {"test": "hotpotqa-train100.jsonl.gz"},
        "climate_fever": {"test": "climate_fever-all.jsonl.gz"},
    }
    prepare(
        data_dir=data_dir,
        collection="mini",
        passages="passages.tsv.gz",
        queries=tasks,
        directory=kilt_mini,
        options=PrepareOptions(strict=True),
    )
    return data_dir


@pytest.mark.release
def test_positives_are_the_passages_that_the_files_name(prepared):
    store = PassageStore.open(prepared, "mini")
    for task in ("hotpotqa", "climate_fever"):
        queries = QuerySet.open(prepared, "mini", task, "test")
        gold = [json.loads(line) for line in gold_path(queries).read_text().splitlines()]
        assert len(gold) == len(queries)
        for query, record in zip(queries, gold, strict=True):
            wanted = [p for output in record["output"] for p in output["provenance"]]
            assert {store.ids[row] for row in query.positives} == {p["passage_id"] for p in wanted}
            found = {passage.page_id for passage in store.get_many(query.positives)}
            assert found == {p["wikipedia_id"] for p in wanted}
