"""Passages, questions and judgements of every format, and what is said of files that are wrong."""

import csv
import itertools
import json
import random

import pytest
from written_files import write

from taser_jax.data.readers import fields
from taser_jax.data.readers.fields import content_id
from taser_jax.data.readers.passages import PARAGRAPH_END, LeftOut, Span, chunk_page, read_passages
from taser_jax.data.readers.questions import Question, read_kilt, read_qrels, read_questions
from taser_jax.storage.errors import DataError
from taser_jax.storage.records import Passage


def passages(path, left_out: LeftOut | None = None) -> list[Passage]:
    return [located.passage for located in read_passages(path, left_out)]


@pytest.mark.parametrize("name", ["psgs.tsv", "psgs.tsv.gz"])
def test_a_header_brings_csv_quotes(tmp_path, name):
    rows = {
        '1\t"He said ""no"", and left."\tNo\n': (2, Passage("1", 'He said "no", and left.', "No")),
        "2\tplain\t\n": (3, Passage("2", "plain", "")),
        '3\t"two\nlines"\t"A ""B"""\n': (4, Passage("3", "two\nlines", 'A "B"')),
        "4\tit's 5' 10\" tall\tBob\n": (6, Passage("4", "it's 5' 10\" tall", "Bob")),
        # No quotes of csv's: as they are.
        '5\t"Yes" she said\t"open\n': (7, Passage("5", '"Yes" she said', '"open')),
        "6\tlast\tZ\n": (8, Passage("6", "last", "Z")),
    }
    path = write(tmp_path / name, "".join(["id\ttext\ttitle\n", *rows]))
    found = [(located.where, located.passage) for located in read_passages(path)]
    assert found == [(f"{path}:{line}", passage) for line, passage in rows.values()]


@pytest.mark.parametrize(
    "text",
    ["two\nlines, not\none", "f\ng(a,b)", "Bern, a city\nBears, too", "a\r\nb,c d", "x\n#\ty"],
)
def test_a_text_of_several_lines_is_no_row(tmp_path, text):
    path = tmp_path / "p.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("id", "text"), ("p1", text), ("p2", "last")])
    assert [passage.text for passage in passages(path)] == [text, "last"]


def test_columns_go_by_the_header_not_by_their_place(tmp_path):
    content = "title\twikipedia_id\tparagraph_id\tid\ttext\nT\t9\t0\t1\tbody\n"
    [located] = read_passages(write(tmp_path / "p.tsv", content))
    assert located.passage == Passage("1", "body", "T", page_id="9")
    assert located.span == Span((0, 0), (0, PARAGRAPH_END))
    maillard = "id\ttext\ttitle\tpage\ta\tb\n0\tc\tT\t7\t\t\n"
    [located] = read_passages(write(tmp_path / "six.tsv", maillard))
    assert (located.passage, located.span) == (Passage("0", "c", "T", "7"), None)
    # Nor is any fourth field a page: made queries would all be of one.
    record = {"id": "0", "text": "c", "title": "T", "lang": "en", "date": None, "source": "x"}
    assert passages(write(tmp_path / "six.jsonl", [record])) == [Passage("0", "c", "T")]
    cord = write(tmp_path / "metadata.csv", "cord_uid,sha,title,abstract\nug7v,,T,c\n")
    assert passages(cord) == [Passage("ug7v", "c", "T")]
    assert passages(write(tmp_path / "p.csv", "id,text,,\na,b,,\n")) == [Passage("a", "b")]


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
    path = write(tmp_path / "p.tsv", "1\ta\n1\ta\tT\n")
    with pytest.raises(DataError, match=r":2, field 'id': the id '1' was already used"):
        passages(path, LeftOut())


def test_passages_are_streamed(tmp_path):
    rows = "".join(f"{n}\ta\tb\n" for n in range(40_000))
    path = write(tmp_path / "p.tsv", f"id\ttext\ttitle\n{rows}2\tbroken\n")
    assert next(read_passages(path)).passage.id == "0"


def judged(directory, content):
    qrels = read_qrels(write(directory / "qrels", content))
    return [(entry.query_id, entry.passage_id, entry.relevance) for entry in qrels]


@pytest.mark.parametrize(
    "content",
    [
        "q1 Q0 d1 2\nq2\t0\td2\t0\n\n",
        "q1\td1\t2\nq2\td2\t0\n",
        "query-id\tcorpus-id\tscore\nq1\td1\t2\nq2\td2\t0\n",
        "relevance;doc_id;qid\n2.0;d1;q1\n0;d2;q2\n",
        "query,docno,label\nq1,d1,2\nq2,d2,0\n",
    ],
)
def test_qrels_in_trecs_columns_or_by_a_header(tmp_path, content):
    assert judged(tmp_path, content) == [("q1", "d1", 2), ("q2", "d2", 0)]


@pytest.mark.parametrize("content", ["query_id,doc_id\nq1,d1\n", "q1\td1\n"])
def test_ids_alone_are_judged_relevant(tmp_path, content):
    assert judged(tmp_path, content) == [("q1", "d1", 1)]


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
    words = ["word ", "Name. ", "It's ", "(x) ", "1.5 "]
    paragraphs = ["".join(rng.choices(words, k=count)) for count in (0, 3, 40, 1, 25)]
    page = ["T", *paragraphs[:3], "Section::::S", *paragraphs[3:]]
    texts, spans = zip(*chunk_page(page, words=limit), strict=True)
    assert " ".join(texts).split() == " ".join(paragraphs).split()
    assert all(first.end <= second.start for first, second in itertools.pairwise(spans))
    assert [len(text.split()) for text in texts[:-1]] == [limit] * (len(texts) - 1)


PAGE = {"wikipedia_id": "7", "wikipedia_title": "Bern", "text": ["Bern\n", "A city.\n"]}


def test_pages_of_a_knowledge_source_as_lines_or_an_array(tmp_path):
    for content in ([PAGE], json.dumps([PAGE])):
        path = write(tmp_path / "k.json", content)
        assert passages(path) == [Passage("7.0", "A city.", "Bern", "7")]


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
TERMS = [
    {"id": "DOID:3", "name": "unnamed"},
    {"id": "DOID:4", "name": "disease", "definition": "A disposition.", "synonyms": ["x"]},
    {"id": "DOID:5", "name": "undefined", "definition": ""},
]


def test_thesauri_give_scope_notes_and_defined_terms(tmp_path):
    note = "An organothiophosphate insecticide & larvicide."
    assert passages(write(tmp_path / "desc.xml.gz", MESH)) == [Passage("M2", note, "Temefos")]
    defined = [Passage("DOID:4", "A disposition.", "disease")]
    assert passages(write(tmp_path / "terms.jsonl", TERMS)) == defined


ROW = {
    "question": "who?",
    "answers": ["Ada", 1815],
    "positive_ctxs": [{"title": "Ada", "text": "She ...", "passage_id": 12, "score": 3.0}],
    "negative_ctxs": [{"title": None, "text": "other"}],
    "hard_negative_ctxs": [{"text": "near", "psg_id": "13"}],
}


@pytest.mark.parametrize("name", ["t.json.gz", "t.jsonl"])
def test_training_rows_in_json_and_jsonl(tmp_path, name):
    other = {"question": "when?", "answers": [], "positive_ctxs": [], "qid": 7}
    rows = [ROW, other, {**other, "negative_ctxs": ROW["negative_ctxs"]}]
    as_array = ".jsonl" not in name
    path = write(tmp_path / name, json.dumps(rows, indent=4) if as_array else rows)
    first, second, third = read_questions(path)
    assert first == Question(
        where=f"{path}:{2 if as_array else 1}",
        text="who?",
        answers=("Ada", "1815"),
        positives=(Passage("12", "She ...", "Ada"),),
        hard_negatives=(Passage("13", "near", ""),),
    )
    assert (second.id, second.positives, second.hard_negatives) == ("7", (), ())
    # DPR's fallback; what has no id has one of its content.
    assert third.hard_negatives == (Passage(content_id("", "other"), "other", ""),)


def test_qa_csv_bare_and_in_pyserini_quotes(tmp_path):
    rows = {
        "who?\t['Ada', \"O'Hara\"]\n": ("Ada", "O'Hara"),
        'when?\t["1815"]\n': ("1815",),
        'quoted?\t"[""5\' 10"", ""a \\""b\\""""]"\n': ("5' 10", 'a "b"'),
        'the "Charge" of?\t["Crimean War", "x\\\\s?y"]\n': ("Crimean War", "x\\s?y"),
        "none?\t[]\n": (),
    }
    path = write(tmp_path / "q.qa.csv.gz", "".join(rows))
    questions = list(read_questions(path))
    assert [question.where for question in questions] == [f"{path}:{n}" for n in range(1, 6)]
    assert [question.text for question in questions] == [row.partition("\t")[0] for row in rows]
    assert [question.answers for question in questions] == list(rows.values())
    path = write(tmp_path / "q.csv", 'question,answers\nwho?,"[""Ada"", \'Lovelace\']"\nwhen?,[]\n')
    answers = [(question.text, question.answers) for question in read_questions(path)]
    assert answers == [("who?", ("Ada", "Lovelace")), ("when?", ())]


@pytest.mark.parametrize(
    "grades", ["1 0 0 -1 2", "TRUE FALSE 0.0 0 True", "yes irrelevant no Not_Relevant billing"]
)
def test_rows_of_pairs_with_a_grade_are_one_question(tmp_path, grades):
    rows = "q,c,{}\nr,d,{}\nq,e,{}\nq,d,{}\nq,f,{}\n".format(*grades.split())
    path = write(tmp_path / "train.csv", f"query,passage,label\n{rows}")
    quoted = [
        (question.text, [p.text for p in question.positives], len(question.hard_negatives))
        for question in read_questions(path, pairs=True)
    ]
    assert quoted == [("q", ["c", "f"], 2), ("r", [], 1)]
    assert [passage.text for passage in passages(path)] == ["c", "d", "e", "f"]


def test_answers_in_squads_form_on_hugging_face(tmp_path):
    row = {"id": "1", "question": "who?", "context": "Ada.", "answers": {"text": ["Ada"]}}
    [question] = read_questions(write(tmp_path / "train.jsonl", [row]), pairs=True)
    assert (question.answers, question.positives[0].text) == (("Ada",), "Ada.")
    row = {"_id": "2", "query": "who?", "context": "Ada.", "title": None}
    row["answers"] = {"text": [], "answer_start": []}
    [impossible] = read_questions(write(tmp_path / "test.jsonl", [row]), pairs=True)
    assert (impossible.id, impossible.text) == ("2", "who?")
    assert (impossible.positives, impossible.hard_negatives) == ((), question.positives)


@pytest.mark.parametrize("published", ["article", "rows"])
def test_an_article_that_squads_questions_are_about_is_cut(tmp_path, published):
    words = [f"w{number}" for number in range(350)]
    context = "\n".join(words)
    start = context.index("w198")
    answers = {"text": [context[start : context.index("w202")]], "answer_start": [start]}
    if published == "article":
        [text], [start] = answers.values()
        asked = {"question": "which?", "answers": [{"text": text, "answer_start": start}]}
        rows = [{"title": "W", "paragraphs": [{"context": context, "qas": [asked]}]}]
    else:
        rows = [{"question": "which?", "title": "W", "context": context, "answers": answers}]
    path = write(tmp_path / "covid_qa.jsonl", rows)
    [question] = read_questions(path, pairs=True)
    pieces = ["\n".join(words[at : at + 100]) for at in range(0, 350, 100)]
    assert [passage.text for passage in question.positives] == pieces[1:3]
    assert [passage.text for passage in question.hard_negatives] == [pieces[0], pieces[3]]
    assert {passage.text: passage.title for passage in passages(path)} == dict.fromkeys(pieces, "W")


@pytest.mark.parametrize("head", ["", '"version": "v2.0", '])
def test_squads_articles_are_questions_with_their_paragraphs(tmp_path, head):
    answers = [{"text": "a city", "answer_start": 8}] * 2
    asked = [
        {"question": "What is Bern?", "id": "1", "answers": answers},
        {"question": "Who founded it?", "id": "2", "answers": [], "is_impossible": True},
    ]
    articles = [
        {"title": "Bern_(city)", "paragraphs": [{"context": "Bern is a city.", "qas": asked}]},
        {"paragraphs": [{"context": "Ada wrote it.", "qas": [{"question": "who?"}]}]},
    ]
    content = f'{{{head}"data": {json.dumps(articles, indent=1)}, "other": 1}}'
    path = write(tmp_path / "squad.json", content)
    first, impossible, last = read_questions(path, pairs=True)
    city, other = passages(path)
    assert (city.title, city.text) == ("Bern (city)", "Bern is a city.")
    assert other.text == "Ada wrote it."
    assert (first.id, first.answers, first.positives) == ("1", ("a city",), (city,))
    assert (impossible.positives, impossible.hard_negatives) == ((), (city,))
    assert last.positives == (other,)


GOLD = {"answer": "Bern", "provenance": [{"wikipedia_id": "7", "title": "Bern"}]}


def _query(**fields) -> dict:
    return {"id": "q1", "input": "capital?", "output": [GOLD], **fields}


def test_a_query_with_every_kind_of_provenance(tmp_path):
    place = {"start_paragraph_id": 2, "end_paragraph_id": 3}
    others = [
        {"wikipedia_id": 8, **place, "start_character": 5, "end_character": 9},
        {"wikipedia_id": "8", **place, "start_character": -1, "end_character": -1},
        {"wikipedia_id": None, "passage_id": 12},
    ]
    outputs = [
        {"answer": "Bern", "provenance": [{"wikipedia_id": "7", "title": "Bern", **place}]},
        {"provenance": others},
        {"answer": "the city of Bern"},
        # Or P1 would drop the passages that contain the word "supports".
        {"answer": "SUPPORTS"},
    ]
    record = _query(output=outputs)
    path = write(tmp_path / "q.jsonl.gz", [record, {"id": 5, "input": "blind?"}])
    query, blind = read_kilt(path)
    assert (query.where, query.id, query.text) == (f"{path}:1", "q1", "capital?")
    assert query.answers == ("Bern", "the city of Bern")
    whole = Span((2, 0), (3, PARAGRAPH_END))
    assert [(place.page_id, place.passage, place.span) for place in query.provenance] == [
        ("7", "", whole),
        ("8", "", Span((2, 5), (3, 9))),
        ("8", "", whole),
        ("", "12", None),
    ]
    assert [output.provenance is None for output in query.outputs] == [False, False, True, True]
    assert query.record == record
    assert (blind.id, blind.outputs) == ("5", ())
    # An array is read as lines are.
    array = write(tmp_path / "q.json", json.dumps([record], indent=1))
    assert [entry.outputs for entry in read_questions(array)] == [query.outputs]


HEADER = "id\ttext\ttitle\n1\ta\tb\n"
PASSAGE = {"_id": "d1", "text": "first"}
HALF = r"one half of a character of two .*such as \\ud800"
OPEN = r': a quote left open, which rows follow\n.*close the quote, or write ""'
# Name and content of a file, and what is said of it.
BAD_PASSAGES = [
    ("p.tsv", f"{HEADER}2\tno title\n", ":3: 2 columns, not 3: id, text"),
    ("p.tsv", f"{HEADER}2\t \t\n", ":3, field 'text': it is empty"),
    ("p.tsv", f"{HEADER}\ta\tb\n", ":3, field 'id': the id is empty"),
    ("p.tsv", "1\ta\tA\ttab\n", r":1: 4 columns, not 2 or 3(.|\n)*newlines within a text"),
    ("p.tsv", "id\ttext\tparagraph_id\n1\ta\tx\n", ":2, field 'paragraph_id': found 'x'"),
    ("p.csv", "Frage;Antwort\n", r":1: 1 columns(.|\n)*fix: name the columns in a first line"),
    ("p.csv", "id,text,text\na,b,c\n", ":1.*two columns have one name: id, text, text"),
    ("p.tsv", "1\tBern\tA city.\n", r".*third column, the title, is longer(.|\n)*a first line"),
    ("p.tsv", "id\ttext\n", ": there is no passage in it"),
    # An open quote that another closes swallows no rows.
    ("p.csv", 'id,text\np1,a\np2,"open\np3,b\np4,5"\np5,c\n', f":3{OPEN}"),
    ("p.csv", 'id,title,text\n1,"a,b\n12,c",d\n', f":2{OPEN}"),
    ("p.tsv", 'id\ttext\ttitle\n8\t"He left\tA\n9\tIt was she"\tB\n', f":2{OPEN}"),
    ("p.csv", 'id;text\n7;"open\n8;he is 6"\n', f":2{OPEN}"),
    ("c.jsonl", [PASSAGE, {"text": "x"}], ":2, field 'id': the id is empty"),
    ("c.jsonl", [PASSAGE, {"_id": "d9"}], ":2, field 'text': no field 'text'"),
    ("c.jsonl", [PASSAGE, {**PASSAGE, "title": [3]}], r":2, field 'title': found \[3\]"),
    ("c.jsonl", [PASSAGE, {**PASSAGE, "text": "a \ud83d"}], rf":2, field 'text': {HALF}"),
    ("c.jsonl", [PASSAGE, {**PASSAGE, "_id": "\udc00"}], rf":2, field '_id': {HALF}"),
    ("c.jsonl", TERMS[:1], r": there is no passage(.|\n)*a definition"),
    ("k.jsonl", [PAGE, {**PAGE, "wikipedia_id": None}], ":2: .*field 'wikipedia_id'"),
    ("k.jsonl", [PAGE, {**PAGE, "text": "A city."}], ":2, field 'text': .* expected a list"),
    ("d.trec", "<DOC>\n<DOCNO>1</DOCNO> a\n</DOC>\n<DOC>\nb\n", ":4: a <doc> that does not end"),
    ("d.trec", "<DOC>\nb\n<DOC>\n</DOC>\n", ":1: a <doc> that does not end"),
    ("desc.xml", MESH[:-40], ":14: not complete XML"),
    ("desc.xml", "no xml", ":1: not complete XML"),
    ("desc.xml", MESH.replace("ScopeNote", "Note"), r": there is no passage(.|\n)*a ScopeNote"),
]
BAD_QRELS = [
    ("q1 0 d1 1\nq1 d2 1\n", ":2: 3 columns"),
    ("query-id\tcorpus-id\tscore\nq1\t0\td1\t1\n", ":2: 4 columns"),
    ("query-id,corpus-id,rank\nq1,d1,1\n", ":2: its columns are query-id, corpus-id, rank"),
    ("q1\td1\t2\nq2\td2\n", r":2: 2 columns, not TREC's 4"),
    ("q1,0,d1,1\n", r":1: 1 columns, not TREC's 4(.|\n)*nor named by a header"),
    ("q1 0 d1 yes\n", ":1: the grade is 'yes'"),
    (f"q1 0 d1 {10**30}\n", r":1: the grade is '10{30}'(.|\n)*32 bits"),
]
BAD_ROWS = [
    ({"answers": "Ada"}, r"field 'answers': expected a list(.|\n)*fix: write a list"),
    ({"answers": [["Ada"]]}, r"field 'answers', field '\[0\]'"),
    ({"question": [3]}, r"field 'question': found \[3\]"),
    ({"positive_ctxs": [3]}, "field 'positive_ctxs', field 'text': text is 3"),
    ({"positive_ctxs": [{"passage_id": [1]}]}, "field 'positive_ctxs', field 'passage_id'"),
    ({"qid": True}, "field 'qid': found True"),
    ({"qid": 1.0}, r"field 'qid': found 1.0\n  fix: write a string or an integer"),
]
SQUAD = '{"data": [\n{"paragraphs": [{"qas": [{"question": 1}]}]}]}'
BAD_QUESTIONS = [
    ("q.qa.csv", "who?\tAda\n", ":1, field 'answers': expected a list"),
    ("q.qa.csv", "who?\t[__import__('os').getcwd()]\n", ":1, field 'answers': expected a list"),
    ("q.qa.csv", "who?\n", ":1: 1 columns, not 2: a question and answers"),
    ("q.tsv", "q1 who?\n", ":1: 1 columns"),
    ("q.jsonl", [{"_id": "q1", "text": "\ud800"}], rf":1, field 'text': {HALF}"),
    ("q.jsonl", [_query(output="Bern")], ":1, field 'output': .*: expected a list"),
    ("q.jsonl", [_query(output=[{"provenance": [7]}])], r":1, .*output\[0\].provenance\[0\]"),
    ("q.jsonl", [{"id": "1", "answers": ["Ada"]}], ":1, field 'question': no field 'question'"),
    ("squad.json", SQUAD, r":2, field .*\n  fix: write {title, paragraphs"),
]


@pytest.mark.parametrize(
    ("read", "name", "content", "message"),
    [
        *((read_passages, *bad) for bad in BAD_PASSAGES),
        *((read_qrels, "qrels.tsv", *bad) for bad in BAD_QRELS),
        *((read_questions, "t.jsonl", [ROW, ROW | row], f":2, {bad}") for row, bad in BAD_ROWS),
        *((read_questions, *bad) for bad in BAD_QUESTIONS),
    ],
)
def test_a_bad_file_names_line_and_field(tmp_path, read, name, content, message):
    with pytest.raises(DataError, match=name.replace(".", r"\.") + message):
        list(read(write(tmp_path / name, content)))
