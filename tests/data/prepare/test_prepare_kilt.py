import hashlib
import json
import pathlib

import pytest
from written_files import write

from taser_jax.data.collections.store import PassageStore, QuerySet, list_tasks
from taser_jax.data.prepare.collection import gold_path
from taser_jax.data.prepare.mapping import (
    MISSING_POSITIVES,
    WHOLE_PAGES,
    WITHOUT_POSITIVE,
    entity_input,
)
from taser_jax.data.prepare.splits import sampled, split_of
from taser_jax.storage.errors import DataError

PASSAGES = [
    # id, text, title, wikipedia_id, paragraph_id
    ("a", "Bern is a city.", "Bern", "7", 1),
    ("b", "It lies on the Aare.", "Bern", "7", 1),
    ("c", "Bears live there.", "Bern", "7", 2),
    ("d", "A river.", "Aare", "8", 0),
]


@pytest.fixture(autouse=True)
def passages(tmp_path):
    rows = "".join("\t".join(map(str, row)) + "\n" for row in PASSAGES)
    write(tmp_path / "p.tsv", f"id\ttext\ttitle\twikipedia_id\tparagraph_id\n{rows}")


@pytest.fixture
def positives_of(queries_of):
    return lambda task="t", split="test": {q.id: q.positives for q in queries_of(task, split)}


def _query(id: str, *provenance: dict, **fields) -> dict:
    return {
        "id": id,
        "input": f"question {id}?",
        "output": [{"answer": "x", "provenance": list(provenance)}],
        **fields,
    }


def _queries(folder: pathlib.Path, *records: dict, name: str = "q.jsonl") -> str:
    return write(folder / name, records).name


def _at(page: str, first: int | None = None, last: int | None = None, **fields) -> dict:
    place = {} if first is None else {"start_paragraph_id": first, "end_paragraph_id": last}
    return {"wikipedia_id": page, "title": "T", **place, **fields}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"id": (2,), "par": (0, 1), "both": (3, 0, 1, 2), "page": (0, 1, 2)}),
        (
            {"page_gold_tasks": ("t",)},
            {"id": (0, 1, 2), "par": (0, 1, 2), "both": (3, 0, 1, 2), "page": (0, 1, 2)},
        ),
    ],
)
def test_gold_by_id_by_paragraph_and_by_page(
    tmp_path, options, expected, prepare_here, positives_of
):
    path = _queries(
        tmp_path,
        _query("id", _at("7", 1, 1, passage_id="c")),
        _query("par", _at("7", 1, 1)),
        _query("both", _at("8", 0, 0), _at("7", 1, 2), _at("8", 0, 0)),
        _query("page", _at("7")),
    )
    (split,) = prepare_here("p.tsv", {"t": {"test": path}}, **options).splits
    assert positives_of() == expected
    assert split.left_out == ({} if options else {WHOLE_PAGES: 1})


def test_characters_choose_among_the_chunks_of_a_paragraph(tmp_path, prepare_here, positives_of):
    page = {
        "wikipedia_id": "7",
        "wikipedia_title": "Bern",
        "text": ["Bern", "Bern is a city. It lies on Aare.", "Section::::X", "Bears live there."],
    }
    path = _queries(
        tmp_path,
        _query("first", _at("7", 1, 1, start_character=3, end_character=8)),
        _query("second", _at("7", 1, 1, start_character=16, end_character=20)),
        _query("cut", _at("7", 1, 1, start_character=10, end_character=17)),
        # Between the chunks of its paragraph: the paragraph's. A heading: the page's.
        _query("space", _at("7", 1, 1, start_character=15, end_character=16)),
        _query("heading", _at("7", 2, 2)),
    )
    pages = _queries(tmp_path, page, name="k.json")
    prepare_here(pages, {"t": {"test": path}}, passage_words=4)
    store = PassageStore.open(tmp_path / "data", "c")
    assert [(p.id, p.page_id, p.text) for p in store] == [
        ("7.0", "7", "Bern is a city."),
        ("7.1", "7", "It lies on Aare."),
        ("7.2", "7", "Bears live there."),
    ]
    assert positives_of() == {
        "first": (0,),
        "second": (1,),
        "cut": (0, 1),
        "space": (0, 1),
        "heading": (0, 1, 2),
    }


def test_official_gold_is_kept_line_by_line(tmp_path, prepare_here):
    records = [
        _query("q0", _at("7")),
        {"id": 1, "input": "two?", "output": [{"answer": "x"}, {"answer": "y"}], "meta": {"é": 1}},
    ]
    path = _queries(tmp_path, *records)
    (split,) = prepare_here("p.tsv", {"t": {"test": path}}).splits
    queries = QuerySet.open(tmp_path / "data", "c", "t", "test")
    gold = [json.loads(line) for line in gold_path(queries).read_text().splitlines()]
    assert gold == [records[0], {**records[1], "id": "1"}]
    assert queries[1].answers == ("x", "y")
    assert split.left_out == {WITHOUT_POSITIVE: 1, WHOLE_PAGES: 1}
    # Nothing half-written is left.
    assert not list((tmp_path / "data").rglob("*partial*"))


def test_one_file_is_parted_by_hash(tmp_path, prepare_here, positives_of):
    ids = [f"talk{i}_{turn}" for i in range(60) for turn in range(3)]
    path = _queries(tmp_path, *(_query(id, _at("7")) for id in ids))
    prepare_here(
        "p.tsv",
        {"single": path, "grouped": path, "two": {"train+validation": path, "test": path}},
        split_groups={"grouped": "^[^_]+"},
        train_samples={"two": 20},
    )
    assert list_tasks(tmp_path / "data", "c") == {
        task: ["train", "validation", "test"] for task in ("grouped", "single", "two")
    }
    splits = {
        task: {split: set(positives_of(task, split)) for split in parts}
        for task, parts in list_tasks(tmp_path / "data", "c").items()
    }
    for task in ("single", "grouped"):
        parts = splits[task]
        assert set().union(*parts.values()) == set(ids)
        assert sum(map(len, parts.values())) == len(ids)
        assert 0.65 < len(parts["train"]) / len(ids) < 0.95
    talks = [{id.split("_")[0] for id in part} for part in splits["grouped"].values()]
    assert sum(map(len, talks)) == 60
    assert splits["single"] != splits["grouped"]
    # 180 ids at 8 : 1, of which 20 remain for training.
    assert len(splits["two"]["train"]) == 20
    assert 5 < len(splits["two"]["validation"]) < 40
    assert splits["two"]["test"] == set(ids)


@pytest.mark.parametrize("name", ["train+validation", "validation+train"])
def test_the_last_queries_of_a_file_are_its_validation_split(
    tmp_path, name, prepare_here, positives_of
):
    """TACO-DR: the last 500 training examples of each task."""
    path = _queries(tmp_path, *(_query(f"q{i}", _at("7")) for i in range(12)))
    other = _queries(tmp_path, _query("dev", _at("7")), name="dev.jsonl")
    files = {"t": {name: path, "test": other}}
    prepare_here("p.tsv", files, validation_last=5)
    assert list(positives_of("t", "train")) == [f"q{i}" for i in range(7)]
    assert list(positives_of("t", "validation")) == [f"q{i}" for i in range(7, 12)]
    assert list(positives_of("t", "test")) == ["dev"]
    # As for zsRE and T-REx: a sample of the file, of which the last 5 are parted off.
    prepare_here("p.tsv", files, validation_last=5, train_samples={"t": 8})
    train, validation = list(positives_of("t", "train")), list(positives_of("t", "validation"))
    assert (len(train), len(validation)) == (3, 5)
    in_order = sorted(train + validation, key=lambda id: int(id[1:]))
    assert train + validation == in_order
    with pytest.raises(DataError, match="split 'train': there are no queries"):
        prepare_here("p.tsv", files, validation_last=12)


def test_shares_and_samples_are_what_was_asked_for():
    shares = {"train": 3.0, "test": 1.0}
    assigned = [
        split_of(str(i), task="t", splits=("train", "test"), shares=shares) for i in range(4000)
    ]
    # Four standard deviations of a binomial with 4,000 draws at 3/4.
    assert abs(assigned.count("train") - 3000) < 4 * (4000 * 0.75 * 0.25) ** 0.5
    # The same in every process and version: 64 bits of BLAKE2b of task, tab and id.
    digests = [hashlib.blake2b(f"t\t{i}".encode(), digest_size=8).digest() for i in range(4000)]
    below = [int.from_bytes(digest, "little") < 3 << 62 for digest in digests]
    assert [split == "train" for split in assigned] == below
    ids = [str(i) for i in range(50)]
    assert sampled(ids, task="t", count=10) == sampled(reversed(ids), task="t", count=10)
    assert sampled(ids, task="t", count=10) != sampled(ids, task="u", count=10)
    assert sampled(ids, task="t", count=10) < sampled(ids, task="t", count=20) < set(ids)
    assert sampled(ids, task="t", count=99) == set(ids)


def test_inputs_with_a_marked_mention(tmp_path, prepare_here):
    text = "one two three [START_ENT] Bern [END_ENT] and more"
    assert (
        entity_input(text, left_words=2, where="w")
        == "two three [START_ENT] Bern [END_ENT] and more"
    )
    assert entity_input(text, left_words=0, where="w").startswith("[START_ENT] Bern")
    assert entity_input(text, left_words=9, where="w") == text
    for bad in ("no mention", "[START_ENT] Bern", "[START_ENT] [END_ENT]", text + " " + text):
        with pytest.raises(DataError, match="w, field 'input'"):
            entity_input(bad, left_words=2, where="w")
    long = " ".join(f"w{n}" for n in range(70)) + " [START_ENT] Bern [END_ENT]"
    path = _queries(tmp_path, _query("q", _at("7"), input=long))
    prepare_here(
        "p.tsv", {task: {"test": path} for task in ("aida", "wow")}, entity_tasks=("aida",)
    )
    aida, wow = (QuerySet.open(tmp_path / "data", "c", task, "test") for task in ("aida", "wow"))
    assert (aida[0].text, wow[0].text) == (long[long.index("w6 ") :], long)


@pytest.mark.parametrize(
    ("provenance", "message"),
    [
        (_at("99"), r"q.jsonl:1, provenance 0, field 'wikipedia_id': the page '99'"),
        (_at(""), r"the page ''"),
        (_at("7", passage_id="zz"), r"field 'passage_id': the passage 'zz' is not in"),
        (_at("7", passage_id="d"), r"field 'passage_id': passage 'd' is not of page '7'"),
    ],
)
def test_provenance_that_the_collection_lacks(tmp_path, provenance, message, prepare_here):
    tasks = {"t": {"test": _queries(tmp_path, _query("q", provenance))}}
    with pytest.raises(DataError, match=message):
        prepare_here("p.tsv", tasks, strict=True)


def test_missing_pages_and_blind_queries_are_counted(tmp_path, prepare_here):
    blind = {"id": "blind", "input": "x?"}
    provenances = {"q0": [_at("99")], "q1": [_at("99"), _at("7", 1, 1)]}
    records = [_query(id, *places) for id, places in provenances.items()]
    path = _queries(tmp_path, *records, blind)
    prepared = prepare_here("p.tsv", {"t": {"train": path, "test": path}})
    counts = [(split.split, split.queries, split.left_out) for split in prepared.splits]
    lacks = {MISSING_POSITIVES: 2, WITHOUT_POSITIVE: 2}
    assert counts == [("train", 1, lacks), ("test", 3, lacks)]


def test_a_validation_share_has_its_own_gold(tmp_path, prepare_here):
    path = _queries(
        tmp_path, *(_query(f"q{n}", _at("7", passage_id=id)) for n, id in enumerate("abcabc"))
    )
    prepare_here("p.tsv", {"t": {"train": path}}, validation_share=0.4)
    for split in ("train", "validation"):
        queries = QuerySet.open(tmp_path / "data", "c", "t", split)
        gold = [json.loads(line)["id"] for line in gold_path(queries).read_text().splitlines()]
        assert gold == [query.id for query in queries]
