"""Passages of tables with and without a header, of JSON, thesauri and KILT's pages; qrels."""

import itertools
import json
import random

import pytest
from written_files import write

from taser_jax.data.readers import fields
from taser_jax.data.readers.fields import read_qrels
from taser_jax.data.readers.located import PARAGRAPH_END, LeftOut, Span
from taser_jax.data.readers.passages import chunk_page, read_passages
from taser_jax.storage.errors import DataError
from taser_jax.storage.records import Passage


def passages(path, left_out: LeftOut | None = None) -> list[Passage]:
    return [located.passage for located in read_passages(path, left_out)]


@pytest.mark.parametrize("name", ["psgs.tsv", "psgs.tsv.gz"])
def test_a_header_brings_csv_quotes(tmp_path, name):
    path = write(
        tmp_path / name,
        "id\ttext\ttitle\n"
        '1\t"He said ""no"", and left."\tNo\n'
        "2\tplain\t\n"
        '3\t"two\nlines"\t"A ""B"""\n'
        "4\tit's 5' 10\" tall\tBob\n"
        '5\t"Yes" she said\t"open\n'
        "6\tlast\tZ\n",
    )
    assert passages(path) == [
        Passage("1", 'He said "no", and left.', "No"),
        Passage("2", "plain", ""),
        Passage("3", "two\nlines", 'A "B"'),
        Passage("4", "it's 5' 10\" tall", "Bob"),
        # No quotes of csv's: as they are.
        Passage("5", '"Yes" she said', '"open'),
        Passage("6", "last", "Z"),
    ]
    assert [located.line for located in read_passages(path)] == [2, 3, 4, 6, 7, 8]


def test_columns_go_by_the_header_not_by_their_place(tmp_path):
    path = write(
        tmp_path / "p.tsv", "title\twikipedia_id\tparagraph_id\tid\ttext\nT\t9\t0\t1\tbody\n"
    )
    [located] = read_passages(path)
    assert located.passage == Passage("1", "body", "T", page_id="9")
    assert located.span == Span((0, 0), (0, PARAGRAPH_END))
    maillard = write(tmp_path / "six.tsv", "id\ttext\ttitle\tpage\ta\tb\n0\tc\tT\t7\t\t\n")
    [located] = read_passages(maillard)
    assert (located.passage, located.span) == (Passage("0", "c", "T", "7"), None)
    # Nor is any fourth field a page: made queries would all be of one.
    record = {"id": "0", "text": "c", "title": "T", "lang": "en", "date": None, "source": "x"}
    assert passages(write(tmp_path / "six.jsonl", [record])) == [Passage("0", "c", "T")]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("id\ttext\ttitle\n1\ta\tb\n2\tno title\n", r":3: 2 columns, not 3: id, text"),
        ("id\ttext\ttitle\n1\ta\tb\n2\t \t\n", r":3, field 'text': it is empty"),
        ("id\ttext\ttitle\n1\ta\tb\n\ta\tb\n", r":3, field 'id': the id is empty"),
        ("1\ta\tA\ttab\n", r":1: 4 columns, not 2 or 3(.|\n)*tabs or newlines within a text"),
        ("id\ttext\tparagraph_id\n1\ta\tx\n", r":2, field 'paragraph_id': found 'x'"),
        ("id\ttext\n", r": there is no passage in it"),
    ],
)
def test_a_bad_table_names_line_and_field(tmp_path, content, message):
    with pytest.raises(DataError, match=r"p\.tsv" + message):
        passages(write(tmp_path / "p.tsv", content))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"text": "x"}', r", field 'id': the id is empty"),
        ('{"_id": "d9"}', r", field 'text': no field 'text'"),
        ('{"_id": "d9", "text": "x", "title": 3}', r", field 'title': found 3"),
        ('{"_id": "d9", "text": ', r": not valid JSON"),
    ],
)
def test_a_bad_corpus_names_line_and_field(tmp_path, row, message):
    path = write(tmp_path / "corpus.jsonl", f'{{"_id": "d1", "text": "first"}}\n{row}\n')
    with pytest.raises(DataError, match=r"corpus\.jsonl:2" + message):
        passages(path)


def test_a_field_beyond_all_measure_is_an_open_quote(tmp_path, monkeypatch):
    monkeypatch.setattr(fields, "_LONGEST_FIELD", 200_000)
    path = write(tmp_path / "p.tsv", 'id\ttext\ttitle\n1\t"' + "x" * 199_000 + '"\tb\n')
    assert len(passages(path)[0].text) == 199_000
    path = write(tmp_path / "p.tsv", 'id\ttext\ttitle\n1\t"' + "long line\n" * 30_000)
    with pytest.raises(DataError, match=r"p\.tsv:2: 2 columns.*\n.*quote left open"):
        passages(path)


def test_what_is_empty_or_repeated_is_left_out_counted_and_listed(tmp_path):
    content = "id\ttext\ttitle\n1\ta\tT\n2\t\t\n1\ta\tT\n3\t\tonly a title\n"
    path, left_out = write(tmp_path / "p.tsv", content), LeftOut()
    assert passages(path, left_out) == [Passage("1", "a", "T"), Passage("3", "", "only a title")]
    assert left_out.counts == {"empty passages": 1, "repeated passages": 1}
    assert left_out.lines == [
        f"{path}:3, field 'text': it is empty",
        f"{path}:4, field 'id': the id '1' was already used",
    ]
    with pytest.raises(DataError, match=r":3, field 'text'"):
        passages(path)
    path = write(tmp_path / "p.tsv", "1\ta\n1\ta\tT\n")
    with pytest.raises(DataError, match=r":2, field 'id': the id '1' was already used"):
        passages(path, LeftOut())


def test_passages_are_streamed(tmp_path):
    rows = "".join(f"{n}\ta\tb\n" for n in range(40_000))
    path = write(tmp_path / "p.tsv", f"id\ttext\ttitle\n{rows}2\tbroken\n")
    assert next(read_passages(path)).passage.id == "0"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("q1 0 d1 1\nq1 d2 1\n", r":2: 3 columns"),
        ("query-id\tcorpus-id\tscore\nq1\t0\td1\t1\n", r":2: 4 columns"),
        ("query-id,corpus-id,rank\nq1,d1,1\n", r":1: its columns are query-id, corpus-id, rank"),
        ("q1,0,d1,1\n", r":1: 1 columns, not TREC's 4(.|\n)*nor named by a header"),
        ("q1 0 d1 yes\n", r":1, last column: the grade is 'yes'"),
        (f"q1 0 d1 {10**30}\n", r":1, last column: the grade is '10{30}'(.|\n)*32 bits"),
    ],
)
def test_bad_qrels_name_the_line(tmp_path, content, message):
    with pytest.raises(DataError, match=r"qrels\.tsv" + message):
        list(read_qrels(write(tmp_path / "qrels.tsv", content)))


@pytest.mark.parametrize(
    "content",
    [
        "q1 Q0 d1 2\nq2\t0\td2\t0\n\n",
        "query-id\tcorpus-id\tscore\nq1\td1\t2\nq2\td2\t0\n",
        "relevance;doc_id;qid\n2;d1;q1\n0;d2;q2\n",
        "query,docno,label\nq1,d1,2\nq2,d2,0\n",
    ],
)
def test_qrels_in_trecs_columns_or_by_a_header(tmp_path, content):
    judged = read_qrels(write(tmp_path / "qrels.tsv", content))
    triples = [(entry.query_id, entry.passage_id, entry.relevance) for entry in judged]
    assert triples == [("q1", "d1", 2), ("q2", "d2", 0)]


def test_windows_of_a_page_by_hand():
    page = [
        "Bern\n",
        "Bern is a city. It lies on the Aare.\n",
        "Bears live there.\n",
        "Section::::History.\n",
        "Founded in 1191 by Duke B. of Zurich it grew. It burned.\n",
        "",
    ]
    assert list(chunk_page(page, words=10)) == [
        ("Bern is a city. It lies on the Aare. Bears", Span((1, 0), (2, 5))),
        ("live there. Founded in 1191 by Duke B. of Zurich", Span((2, 6), (4, 36))),
        ("it grew. It burned.", Span((4, 37), (4, 56))),
    ]


@pytest.mark.parametrize("limit", [1, 7, 30])
def test_no_word_of_a_page_is_lost_or_repeated(limit):
    rng = random.Random(limit)
    paragraphs = [
        "".join(rng.choice(["word ", "Name. ", "It's ", "(x) ", "1.5 "]) for _ in range(n))
        for n in (0, 3, 40, 1, 25)
    ]
    page = ["T", *paragraphs[:3], "Section::::S", *paragraphs[3:]]
    texts, spans = zip(*chunk_page(page, words=limit), strict=True)
    assert " ".join(texts).split() == " ".join(paragraphs).split()
    assert all(first.end <= second.start for first, second in itertools.pairwise(spans))
    assert [len(text.split()) for text in texts[:-1]] == [limit] * (len(texts) - 1)


def test_pages_of_a_knowledge_source(tmp_path):
    record = {"wikipedia_id": "7", "wikipedia_title": "Bern", "text": ["Bern\n", "A city.\n"]}
    path = write(tmp_path / "k.json", [record])
    assert passages(path) == [Passage("7.0", "A city.", "Bern", "7")]
    array = write(tmp_path / "array.json", json.dumps([record]))
    assert passages(array) == passages(path)
    for bad, message in (
        ({**record, "wikipedia_id": None}, r", field 'wikipedia_id': the id is empty"),
        ({**record, "text": "A city."}, r", field 'text': .* expected a list"),
        ({"wikipedia_id": "8", "text": []}, r": .*field 'wikipedia_title'"),
    ):
        with pytest.raises(DataError, match=r"k\.json:2" + message):
            passages(write(tmp_path / "k.json", [record, bad]))


MESH = """<?xml version="1.0"?>
<!DOCTYPE DescriptorRecordSet SYSTEM "desc2006.dtd">
<DescriptorRecordSet><DescriptorRecord>
 <DescriptorName><String>Temefos</String></DescriptorName>
 <ConceptList>
  <Concept PreferredConceptYN="Y"><ConceptUI>M2</ConceptUI>
   <ConceptName><String>Temefos</String></ConceptName>
   <ScopeNote>An organothiophosphate
     insecticide &amp; larvicide.</ScopeNote>
   <TermList><Term><TermUI>T1</TermUI><String>Abate</String></Term></TermList>
  </Concept>
  <Concept><ConceptUI>M3</ConceptUI><ConceptName><String>Abate</String></ConceptName></Concept>
 </ConceptList>
</DescriptorRecord></DescriptorRecordSet>
"""


@pytest.mark.parametrize("name", ["desc.xml", "qual.xml.gz"])
def test_a_scope_note_is_a_passage_with_its_concepts_name(tmp_path, name):
    path = write(tmp_path / name, MESH)
    note = "An organothiophosphate insecticide & larvicide."
    assert passages(path) == [Passage("M2", note, "Temefos")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (MESH[:-40], r":14: not complete XML"),
        ("no xml", r":1: not complete XML"),
        (MESH.replace("ScopeNote", "Note"), "no passage in it(.|\n)*a ScopeNote"),
    ],
)
def test_mesh_files_that_cannot_be_used(tmp_path, text, message):
    with pytest.raises(DataError, match=r"desc\.xml.*" + message):
        passages(write(tmp_path / "desc.xml", text))


def test_terms_without_a_definition_say_nothing(tmp_path):
    terms = [
        {"id": "DOID:3", "name": "unnamed"},
        {"id": "DOID:4", "name": "disease", "definition": "A disposition.", "synonyms": ["x"]},
        {"id": "DOID:5", "name": "undefined", "definition": ""},
    ]
    path = write(tmp_path / "terms.jsonl", terms)
    assert passages(path) == [Passage("DOID:4", "A disposition.", "disease")]
    with pytest.raises(DataError, match=r"terms\.jsonl: there is no passage(.|\n)*a definition"):
        passages(write(tmp_path / "terms.jsonl", terms[:1]))
