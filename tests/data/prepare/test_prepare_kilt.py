import hashlib
import json

import pytest
from written_files import write

from taser_jax.data.collections.store import PassageStore, QuerySet, list_tasks
from taser_jax.data.prepare import mapping
from taser_jax.data.prepare.collection import gold_path
from taser_jax.data.prepare.splits import sampled, split_of
from taser_jax.storage.errors import DataError

PASSAGES = [
    # id, text, title, wikipedia_id, paragraph_id
    ("a", "Bern is a city.", "Bern", "7", 1),
    ("b", "It lies on the Aare.", "Bern", "7", 1),
    ("c", "Bears live there.", "Bern", "7", 2),
    ("d", "A river.", "Aare", "8", 0),
    # Numbered beyond any page.
    ("e", "A game.", "Chess", "9", 1 << 40),
]


@pytest.fixture
def prepare_kilt(tmp_path, prepare_here):
    """Prepares queries in q.jsonl, as the test set of task t if nothing else is said."""

    def prepare(*records: dict, tasks=None, passages="p.tsv", **options):
        rows = "".join("\t".join(map(str, row)) + "\n" for row in PASSAGES)
        write(tmp_path / "p.tsv", f"id\ttext\ttitle\twikipedia_id\tparagraph_id\n{rows}")
        write(tmp_path / "q.jsonl", records)
        return prepare_here(passages, tasks or {"t": {"test": "q.jsonl"}}, **options).splits

    return prepare


@pytest.fixture
def positives_of(queries_of):
    return lambda task="t", split="test": {q.id: q.positives for q in queries_of(task, split)}


def _query(id: str, *provenance: dict, **fields) -> dict:
    output = [{"answer": "x", "provenance": list(provenance)}]
    return {"id": id, "input": f"question {id}?", "output": output, **fields}


def _at(page: str, first: int | None = None, last: int | None = None, **fields) -> dict:
    place = {} if first is None else {"start_paragraph_id": first, "end_paragraph_id": last}
    return {"wikipedia_id": page, "title": "T", **place, **fields}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"id": (2,), "par": (0, 1)}),
        ({"page_gold_tasks": ("t",)}, {"id": (0, 1, 2), "par": (0, 1, 2)}),
    ],
)
def test_gold_by_id_by_paragraph_and_by_page(prepare_kilt, positives_of, options, expected):
    (split,) = prepare_kilt(
        _query("id", _at("7", 1, 1, passage_id="c")),
        _query("par", _at("7", 1, 1)),
        _query("both", _at("8", 0, 0), _at("7", 1, 2), _at("8", 0, 0)),
        _query("page", _at("7")),
        _query("far", _at("9", 1, 1)),
        **options,
    )
    assert positives_of() == expected | {"both": (3, 0, 1, 2), "page": (0, 1, 2), "far": (4,)}
    assert split.left_out == ({} if options else {mapping.WHOLE_PAGES: 2})


def test_characters_choose_among_the_chunks_of_a_paragraph(tmp_path, prepare_kilt, positives_of):
    paragraphs = ["Bern", "Bern is a city. It lies on Aare.", "Section::::X", "Bears live there."]
    page = {"wikipedia_id": "7", "wikipedia_title": "Bern", "text": paragraphs}
    write(tmp_path / "k.json", [page])
    prepare_kilt(
        _query("first", _at("7", 1, 1, start_character=3, end_character=8)),
        _query("second", _at("7", 1, 1, start_character=16, end_character=20)),
        _query("cut", _at("7", 1, 1, start_character=10, end_character=17)),
        # Between the chunks of its paragraph: the paragraph's. A heading: the page's.
        _query("space", _at("7", 1, 1, start_character=15, end_character=16)),
        _query("heading", _at("7", 2, 2)),
        passages="k.json",
        passage_words=4,
    )
    store = PassageStore.open(tmp_path / "data", "c")
    assert [(p.id, p.page_id, p.text) for p in store] == [
        ("7.0", "7", "Bern is a city."),
        ("7.1", "7", "It lies on Aare."),
        ("7.2", "7", "Bears live there."),
    ]
    both = {"cut": (0, 1), "space": (0, 1)}
    assert positives_of() == {"first": (0,), "second": (1,), "heading": (0, 1, 2), **both}


def test_official_gold_is_kept_line_by_line(tmp_path, prepare_kilt):
    records = [
        _query("q0", _at("7")),
        {"id": 1, "input": "two?", "output": [{"answer": "x"}, {"answer": "y"}], "meta": {"é": 1}},
    ]
    (split,) = prepare_kilt(*records)
    queries = QuerySet.open(tmp_path / "data", "c", "t", "test")
    gold = [json.loads(line) for line in gold_path(queries).read_text().splitlines()]
    assert gold == [records[0], {**records[1], "id": "1"}]
    assert queries[1].answers == ("x", "y")
    assert split.left_out == {mapping.WITHOUT_POSITIVE: 1, mapping.WHOLE_PAGES: 1}
    # Nothing half-written is left.
    assert not list((tmp_path / "data").rglob("*partial*"))


def test_one_file_is_parted_by_hash(tmp_path, prepare_kilt, positives_of):
    ids, path = [f"talk{i}_{turn}" for i in range(60) for turn in range(3)], "q.jsonl"
    tasks, groups = {"single": path, "grouped": path}, {"grouped": "^[^_]+"}
    prepare_kilt(*(_query(id, _at("7")) for id in ids), tasks=tasks, split_groups=groups)
    names = ["train", "validation", "test"]
    assert list_tasks(tmp_path / "data", "c") == dict.fromkeys(tasks, names)
    splits = {task: {name: set(positives_of(task, name)) for name in names} for task in tasks}
    for task in ("single", "grouped"):
        parts = splits[task]
        assert set().union(*parts.values()) == set(ids)
        assert sum(map(len, parts.values())) == len(ids)
        assert 0.65 < len(parts["train"]) / len(ids) < 0.95
    talks = [{id.split("_")[0] for id in part} for part in splits["grouped"].values()]
    assert sum(map(len, talks)) == 60
    assert splits["single"] != splits["grouped"]


@pytest.mark.parametrize("name", ["train+validation", "validation+train"])
def test_the_last_queries_of_a_file_are_its_validation(tmp_path, name, prepare_kilt, positives_of):
    """TACO-DR: the last 500 training examples of each task."""

    def prepared(**options):
        queries = (_query(f"q{i}", _at("7")) for i in range(12))
        prepare_kilt(*queries, tasks={"t": {name: "q.jsonl", "test": "dev.jsonl"}}, **options)
        return [list(positives_of("t", split)) for split in ("train", "validation", "test")]

    write(tmp_path / "dev.jsonl", [_query("dev", _at("7"))])
    ids = [f"q{i}" for i in range(12)]
    assert prepared(validation_last=5) == [ids[:7], ids[7:], ["dev"]]
    # As for zsRE and T-REx: a sample of the file, of which the last 5 are parted off.
    train, validation, _ = prepared(validation_last=5, train_samples={"t": 8})
    assert (len(train), len(validation)) == (3, 5)
    assert train + validation == sorted(train + validation, key=ids.index)
    with pytest.raises(DataError, match="split 'train': there are no queries"):
        prepared(validation_last=12)


def test_shares_and_samples_are_what_was_asked_for():
    asked = {"splits": ("train", "test"), "shares": {"train": 3.0, "test": 1.0}}
    assigned = [split_of(f"t\t{i}", task="t", **asked) for i in range(4000)]
    # The same in every process and version: 64 bits of BLAKE2b of task, tab and id.
    digests = [hashlib.blake2b(f"t\t{i}".encode(), digest_size=8).digest() for i in range(4000)]
    below = [int.from_bytes(digest, "little") < 3 << 62 for digest in digests]
    assert [split == "train" for split in assigned] == below
    ids = [str(i) for i in range(50)]
    assert sampled(ids, task="t", count=10) == sampled(reversed(ids), task="t", count=10)
    assert sampled(ids, task="t", count=10) != sampled(ids, task="u", count=10)
    assert sampled(ids, task="t", count=10) < sampled(ids, task="t", count=20) < set(ids)
    assert sampled(ids, task="t", count=99) == set(ids)


def test_inputs_with_a_marked_mention(prepare_kilt, queries_of):
    text = "one two three [START_ENT] Bern [END_ENT] and more"
    assert mapping.entity_input(text, left_words=2, where="w") == text.removeprefix("one ")
    assert mapping.entity_input(text, left_words=0, where="w").startswith("[START_ENT] Bern")
    assert mapping.entity_input(text, left_words=9, where="w") == text
    for bad in ("no mention", "[START_ENT] Bern", "[START_ENT] [END_ENT]", text + " " + text):
        with pytest.raises(DataError, match="w, field 'input'"):
            mapping.entity_input(bad, left_words=2, where="w")
    long = " ".join(f"w{n}" for n in range(70)) + " [START_ENT] Bern [END_ENT]"
    tasks = {task: {"test": "q.jsonl"} for task in ("aida", "wow")}
    prepare_kilt(_query("q", _at("7"), input=long), tasks=tasks, entity_tasks=("aida",))
    assert [query.text for query in queries_of("aida", "test")] == [long[long.index("w6 ") :]]
    assert [query.text for query in queries_of("wow", "test")] == [long]


@pytest.mark.parametrize(
    ("provenance", "message"),
    [
        (_at("99"), r"q.jsonl:1, provenance 0, field 'wikipedia_id': the page '99'"),
        (_at(""), r"the page ''"),
        (_at("7", passage_id="zz"), r"field 'passage_id': the passage 'zz' is not in"),
        (_at("7", passage_id="d"), r"field 'passage_id': passage 'd' is not of page '7'"),
    ],
)
def test_provenance_that_the_collection_lacks(prepare_kilt, provenance, message):
    with pytest.raises(DataError, match=message):
        prepare_kilt(_query("q", provenance), strict=True)


def test_missing_pages_and_blind_queries_are_counted(prepare_kilt):
    splits = prepare_kilt(
        _query("q0", _at("99")),
        _query("q1", _at("99"), _at("7", 1, 1)),
        {"id": "blind", "input": "x?"},
        tasks={"t": {"train": "q.jsonl", "test": "q.jsonl"}},
    )
    lacks = {mapping.MISSING_POSITIVES: 2, mapping.WITHOUT_POSITIVE: 2}
    counts = [(split.split, split.queries, split.left_out) for split in splits]
    assert counts == [("train", 1, lacks), ("test", 3, lacks)]


def test_a_validation_share_has_its_own_gold(tmp_path, prepare_kilt):
    places = [_at("7", passage_id=id) for id in "abcabc"]
    queries = (_query(f"q{n}", place) for n, place in enumerate(places))
    prepare_kilt(*queries, tasks={"t": {"train": "q.jsonl"}}, validation_share=0.4)
    for split in ("train", "validation"):
        queries = QuerySet.open(tmp_path / "data", "c", "t", split)
        gold = [json.loads(line)["id"] for line in gold_path(queries).read_text().splitlines()]
        assert gold == [query.id for query in queries]
