"""Tasks of mteb and ir_datasets as folders that `taser prepare` reads, without a network."""

import json
import pathlib
import sys
from types import SimpleNamespace
from unittest import mock

import capitals
import pytest

from taser_jax.commands.prepare import prepare
from taser_jax.data.collections.store import PassageStore, QuerySet, list_tasks
from taser_jax.interop import collections_by_name
from taser_jax.interop.collections_by_name import as_folder
from taser_jax.storage.errors import ConfigError, DataError

PASSAGES = {"d1": ("Paris", "It lies on the Seine."), "d2": ("", "A board game."), "d3": ("x", "y")}
QUERIES = {"q1": "a river", "q2": "a game"}
GRADES = {"q1": {"d1": 2, "d3": 0}, "q2": {"d2": 1}}


class Data:
    """As ir_datasets hands it out; queries have no field `text`, as TREC's."""

    def __init__(self, judged: dict[str, dict[str, int]], more: str = ""):
        self._judged, self._more = judged, more

    def has_qrels(self):
        return bool(self._judged)

    def docs_iter(self):
        for id, (title, text) in PASSAGES.items():
            yield SimpleNamespace(doc_id=id, title=title, text=text + self._more)

    def queries_iter(self):
        for id in self._judged:
            yield SimpleNamespace(query_id=id, default_text=lambda id=id: QUERIES[id])

    def qrels_iter(self):
        for query, grades in self._judged.items():
            for id, grade in grades.items():
                yield SimpleNamespace(query_id=query, doc_id=id, relevance=grade)


@pytest.fixture(autouse=True)
def libraries(tmp_path, monkeypatch):
    """Both libraries with one task each, and a cache here."""
    datasets = {
        "tiny": Data({}),
        "tiny/train": Data({"q2": GRADES["q2"]}),
        "tiny/test": Data({"q1": GRADES["q1"]}),
        "bare": Data({}),
    }
    monkeypatch.setitem(sys.modules, "ir_datasets", SimpleNamespace(load=datasets.__getitem__))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_splits_of_ir_datasets_are_a_collection(tmp_path):
    prepare(data_dir=str(tmp_path / "data"), directories="ir_datasets:tiny")
    data = tmp_path / "data", "tiny"
    texts = [passage.text for passage in PassageStore.open(*data)]
    assert texts == [text for _, text in PASSAGES.values()]
    assert list_tasks(*data) == {"tiny": ["train", "test"]}
    (query,) = QuerySet.open(*data, "tiny", "test")
    assert (query.text, query.positives, query.relevance) == ("a river", (0,), (2,))


def test_a_title_is_no_part_of_a_default_text(monkeypatch):
    """As of nfcorpus and msmarco-document; a text of its own is left as it is."""

    def documents(_):
        yield SimpleNamespace(doc_id="d1", title="Paris", default_text=lambda: "Paris On a river.")
        yield SimpleNamespace(doc_id="d2", title="Go", text="Go is a game.")

    monkeypatch.setattr(Data, "docs_iter", documents)
    folder = pathlib.Path(as_folder("ir_datasets:tiny"))
    corpus = map(json.loads, (folder / "corpus.jsonl").read_text().splitlines())
    titles_and_texts = [(passage["title"], passage["text"]) for passage in corpus]
    assert titles_and_texts == [("Paris", "On a river."), ("Go", "Go is a game.")]


def test_one_split_of_ir_datasets_is_what_it_is_named(monkeypatch):
    folder = pathlib.Path(as_folder("ir_datasets:tiny/train"))
    assert folder.name == "tiny-train"
    names = {path.name for path in folder.rglob("*")}
    assert names == {"corpus.jsonl", "queries.jsonl", "qrels", "train.tsv"}
    assert (folder / "qrels" / "train.tsv").read_text() == "query-id\tcorpus-id\tscore\nq2\td2\t1\n"
    assert json.loads((folder / "queries.jsonl").read_text()) == {"_id": "q2", "text": "a game"}
    # What has been read is kept, and other names are folders.
    monkeypatch.setattr(collections_by_name, "_READERS", {"ir_datasets": None})
    assert as_folder("ir_datasets:tiny/train") == str(folder)
    assert as_folder("gs://bucket/beir") == "gs://bucket/beir"


def test_an_id_with_two_texts_is_refused(monkeypatch, tmp_path):
    splits = {"tiny": Data({}), "tiny/train": Data(GRADES), "tiny/test": Data(GRADES, " More.")}
    monkeypatch.setattr(sys.modules["ir_datasets"], "load", splits.__getitem__)
    with pytest.raises(DataError, match="'d1' has two texts"):
        as_folder("ir_datasets:tiny")
    assert not any(path.is_file() for path in (tmp_path / "cache").rglob("*"))


def mteb_task(monkeypatch, **changes):
    """mteb's own task object, with data that are here."""
    mteb = pytest.importorskip("mteb")
    task = capitals.mteb_task("Tiny", PASSAGES, QUERIES, GRADES, **changes)
    monkeypatch.setattr(mteb, "get_task", {"Tiny": task}.__getitem__)


def test_a_task_of_mteb_is_a_collection(tmp_path, monkeypatch):
    mteb_task(monkeypatch)
    prepare(data_dir=str(tmp_path / "data"), directories={"Mine": "mteb:Tiny"}, collection="c")
    data = tmp_path / "data", "c"
    assert list_tasks(*data) == {"Mine": ["test"]}
    first, second = QuerySet.open(*data, "Mine", "test")
    assert (first.positives, second.positives) == ((0,), (1,))
    assert next(iter(PassageStore.open(*data))).title == "Paris"


def test_an_unknown_task_and_one_without_judgements_are_refused(tmp_path, monkeypatch):
    mteb_task(monkeypatch)
    with pytest.raises(ConfigError, match=r"no such task(.|\n)*retrieval task of mteb"):
        as_folder("mteb:Tinny")
    with pytest.raises(ConfigError, match="the task has no judgements"):
        as_folder("ir_datasets:bare")
    mteb_task(monkeypatch, top_ranked={"q1": ["d1"]})
    with pytest.raises(ConfigError, match="candidates or instructions"):
        as_folder("mteb:Tiny")
    assert not any(path.is_file() for path in (tmp_path / "cache").rglob("*"))


def test_a_library_that_cannot_read_or_is_absent_says_why(monkeypatch):
    absent = mock.Mock(side_effect=OSError("name resolution failed\nand more"))
    monkeypatch.setattr(sys.modules["ir_datasets"], "load", absent)
    with pytest.raises(DataError, match=r"could not read it: name resolution failed\n"):
        as_folder("ir_datasets:tiny")
    monkeypatch.setitem(sys.modules, "ir_datasets", None)
    with pytest.raises(ConfigError, match=r"not installed(.|\n)*pip install"):
        as_folder("ir_datasets:tiny")
