"""Several files as one collection: passages by hand; KILT's files with BEIR's folders."""

import pytest
from written_files import beir, write

from taser_jax.data.collections.store import PassageStore, list_tasks, write_collection
from taser_jax.data.prepare.collection import PassageMerger
from taser_jax.data.prepare.mapping import PassageResolver
from taser_jax.storage.errors import DataError
from taser_jax.storage.records import Passage, text_hash

# Of "set\tqN", N below 10, with validation's share of a half: hashes below the middle are training.
HALF = {"train": 0.5, "validation": 0.5}


def record(id: str, text: str, *outputs: dict) -> dict:
    return {"id": id, "input": text, "output": list(outputs)}


def on_page(page: int, **answer: str) -> dict:
    """An output whose evidence is the passage of the page's name."""
    return {**answer, "provenance": [{"wikipedia_id": str(page), "passage_id": str(page)}]}


@pytest.fixture
def sources(tmp_path):
    """A KILT source of 30 passages, and a BEIR folder of 4 that has one of them and one's id."""
    kilt = "".join(f"{n}\ttext {n}\tpage {n}\t{n}\t1\n" for n in range(30))
    (tmp_path / "passages.tsv").write_text(f"id\ttext\ttitle\twikipedia_id\tparagraph_id\n{kilt}")
    outputs = (on_page(3, answer="a"), on_page(29, answer="a"), {"answer": "b"})
    lines = [record(f"q{n}", f"question {n}", *outputs) for n in range(10)]
    write(tmp_path / "set.jsonl.gz", lines)
    asked = {id: f"about {id}" for id in [*(f"t{n}" for n in range(10)), "held-out"]}
    train = [f"t{n} {row}" for n in range(10) for row in ("3 1", "x 2")]
    folder = beir(tmp_path / "beir", corpus={}, queries=asked, train=train, test=["held-out y 1"])
    passages = [("x", "new"), ("3", "other 3"), ("y", "text 5"), ("z", "spare")]
    titled = [{"_id": id, "text": text, "title": "page 5" * (id == "y")} for id, text in passages]
    write(folder / "corpus.jsonl", titled)
    return {**wiki({"set": {"train+validation": "set.jsonl.gz"}}), "directories": "beir"}


def wiki(queries):
    return {"passages": {"wiki": "passages.tsv"}, "queries": queries}


def test_both_formats_become_one_collection(tmp_path, sources, prepare_here, queries_of):
    def written():
        files = (file for file in (tmp_path / "data").rglob("*") if file.is_file())
        return {file: file.read_bytes() for file in files}

    prepared = prepare_here(**sources, task_shares={"set": HALF})
    first = written()
    prepare_here(**sources, task_shares={"set": HALF})
    assert written() == first
    store = PassageStore.open(tmp_path / "data", "c")
    # 30 and 4, of which one is there already and one's id is taken.
    assert (prepared.passages, prepared.merged, prepared.renamed) == (33, 1, 1)
    assert [store[row].id for row in (3, 30, 31, 32)] == ["3", "x", "beir:3", "z"]
    tasks = list_tasks(tmp_path / "data", "c")
    assert tasks == {"set": ["train", "validation"], "beir": ["train", "test"]}
    for query in queries_of("set", "train"):
        assert (query.positives, query.answers) == ((3, 29), ("a", "b"))
    for query in queries_of("beir", "train"):
        assert (query.positives, query.relevance) == ((30, 31), (2, 1))
    [test] = queries_of("beir", "test")
    assert (test.id, test.positives) == ("held-out", (5,))


def test_fewer_distractors_keep_every_positive_and_its_query(tmp_path, sources, prepare_here):
    whole = prepare_here(**sources, task_shares={"set": HALF})
    few = prepare_here(**sources, task_shares={"set": HALF}, distractors=0.0)
    store = PassageStore.open(tmp_path / "data", "c")
    # y has the text of 5, which is nobody's positive by that id: y stays under its own.
    assert list(store.ids) == ["3", "29", "x", "beir:3", "y"]
    assert [split.queries for split in few.splits] == [split.queries for split in whole.splits]
    some = prepare_here(**sources, task_shares={"set": HALF}, distractors=0.3)
    assert few.passages < some.passages < whole.passages


def dialogues(tmp_path):
    """40 queries of ten pages: page 0 has q0, q10, q20 and q30."""
    lines = [record(f"q{n}", f"turn {n}", on_page(n % 10)) for n in range(40)]
    write(tmp_path / "films.jsonl", lines)
    return wiki({"films": {"train+test": "films.jsonl"}})


def test_queries_of_a_page_share_a_split(tmp_path, sources, prepare_here, queries_of):
    def pages(split):
        return {int(query.id[1:]) % 10 for query in queries_of("films", split)}

    prepare_here(**dialogues(tmp_path), split_by_page=("films",))
    # By the hash of the page, with SHARES of 0.8 and 0.1.
    trained = {n for n in range(10) if text_hash(f"films\t{n}") / 2**64 < 8 / 9}
    assert 0 < len(trained) < 10
    assert (pages("train"), pages("test")) == (trained, {*range(10)} - trained)
    # By their own ids, the queries of a page are on both sides.
    prepare_here(**dialogues(tmp_path))
    assert pages("train") & pages("test")


def test_a_split_by_page_needs_one_page_for_each_query(sources, prepare_here):
    with pytest.raises(DataError, match=r"set\.jsonl\.gz:1.*'q0' are on 2 pages"):
        prepare_here(**sources, split_by_page=("set",))


def test_a_training_sample_keeps_positives_and_tests(tmp_path, sources, prepare_here, queries_of):
    films = dialogues(tmp_path)
    whole = prepare_here(**films)
    ids = {query.id for query in queries_of("films", "train")}
    tests = [query.id for query in queries_of("films", "test")]
    prepare_here(**films, train_samples={"films": 2}, distractors=0.0)
    sample = queries_of("films", "train")
    assert len(sample) == 2
    assert {query.id for query in sample} < ids
    assert [query.id for query in queries_of("films", "test")] == tests
    gold = {str(int(id[1:]) % 10) for id in [*(query.id for query in sample), *tests]}
    assert {*PassageStore.open(tmp_path / "data", "c").ids} == gold
    assert len(gold) < 10 < whole.passages


def test_what_cannot_be_merged_is_refused(tmp_path, sources, prepare_here, queries_of):
    proof = {"wikipedia_id": "3", "title": "P"}
    write(tmp_path / "bare.jsonl", [record("q", "who", {"provenance": [proof]})])
    bare = {**sources, **wiki({"set": {"train": "bare.jsonl"}})}
    with pytest.raises(DataError, match=r"bare\.jsonl:1.*'P' has no passage_id"):
        prepare_here(**bare, distractors=0.5)
    # Without it, its page's passages are gold.
    prepare_here(**bare)
    assert [query.positives for query in queries_of("set", "train")] == [(3,)]


def _collection(tmp_path, **sources):
    """Sources are (id, text) of passages."""
    merger = PassageMerger({label: [Passage(*p) for p in rows] for label, rows in sources.items()})
    store = write_collection(tmp_path, "c", merger.passages(), aliases=merger.aliases)
    return merger, store, PassageResolver(store, merger.rows_of_source)


def test_two_files_by_hand(tmp_path):
    second = [("1", "y "), ("3", "x"), ("2", "z"), ("4", "w")]
    merger, store, resolver = _collection(tmp_path, a=[("1", "x"), ("2", "y")], b=second)
    assert [f"{passage.id} {passage.text}" for passage in store] == ["1 x", "2 y", "b:2 z", "4 w"]
    assert (merger.merged, merger.renamed) == (2, 1)
    assert merger.aliases == {"b:1": 1, "b:3": 0, "3": 0}
    rows = {"1": 0, "2": 1, "3": 0, "4": 3, "b:1": 1, "b:2": 2, "b:3": 0}
    assert {id: store.row_of(id) for id in rows} == rows

    def row(id, label=""):
        return resolver.row_of_id(id, label=label, where="q.tsv:1")

    assert [row("1", "a"), row("2", "a"), row("3", "a"), row("4", "a")] == [0, 1, None, None]
    assert [row("1", "b"), row("2", "b"), row("3", "b"), row("4", "b")] == [1, 2, 0, 3]
    assert [row("3"), row("4"), row("5")] == [0, 3, None]
    with pytest.raises(DataError, match=r"q\.tsv:1: the passage id '1' means different(.|\n)*a, b"):
        row("1")


def test_contexts_go_by_content_unless_the_id_is_certain(tmp_path):
    _, _, resolver = _collection(tmp_path, a=[("1", "x")], b=[("1", "y"), ("2", "z")])
    assert resolver.row_of_context(Passage("1", "y", ""), label="", where="") == 1
    assert resolver.row_of_context(Passage("1", "y", ""), label="a", where="") == 0
    assert resolver.row_of_context(Passage("gone", " z", ""), label="b", where="") == 2
    assert resolver.row_of_context(Passage("gone", "gone", ""), label="b", where="") is None


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ([("1", "x"), ("b:1", "y")], [("1", "z")], "passages 'b': the id 'b:1' is used for two"),
        ([("1", "x"), ("1", "y")], [("2", "z")], "passages 'a': .*'a:1' is used for two texts"),
        ([("1", "x")], [("2", "x"), ("2", "z")], "passages 'b': .*'b:2' is used for two texts"),
    ],
)
def test_an_id_that_stays_ambiguous_is_refused(tmp_path, first, second, message):
    with pytest.raises(DataError, match=message):
        _collection(tmp_path, a=first, b=second)


def test_fewer_distractors_keep_positives_that_are_known_by_their_content(tmp_path, prepare_here):
    rows = "".join(f"own{n}\ttext {n}\tt{n}\n" for n in range(20))
    write(tmp_path / "passages.tsv", f"id\ttext\ttitle\n{rows}")
    contexts = [{"title": f"t{n}", "text": f"text {n}", "passage_id": f"wiki:{n}"} for n in (3, 7)]
    write(tmp_path / "q.json", [{"question": "q?", "answers": [], "positive_ctxs": contexts}])
    prepared = prepare_here(**wiki({"t": {"train": "q.json"}}), distractors=0.0)
    assert list(PassageStore.open(tmp_path / "data", "c").ids) == ["own3", "own7"]
    assert [(split.queries, split.left_out) for split in prepared.splits] == [(1, {})]
