import pytest
from written_files import write

from taser_jax.data.readers import kilt
from taser_jax.data.readers.kilt import Output
from taser_jax.data.readers.located import PARAGRAPH_END, Provenance, Span
from taser_jax.storage.errors import DataError

GOLD = {"answer": "Bern", "provenance": [{"wikipedia_id": "7", "title": "Bern"}]}


def _query(**fields) -> dict:
    return {"id": "q1", "input": "capital?", "output": [GOLD], **fields}


def test_a_query_with_every_kind_of_provenance(tmp_path):
    place = {"start_paragraph_id": 2, "end_paragraph_id": 3}
    record = _query(
        output=[
            {"answer": "Bern", "provenance": [{"wikipedia_id": "7", "title": "Bern", **place}]},
            {
                "provenance": [
                    {"wikipedia_id": 8, **place, "start_character": 5, "end_character": 9},
                    {"wikipedia_id": "8", **place, "start_character": -1, "end_character": -1},
                    {"wikipedia_id": None, "passage_id": 12},
                ]
            },
            {"answer": "the city of Bern"},
        ]
    )
    path = write(tmp_path / "q.jsonl.gz", [record])
    [query] = kilt.read_queries(path)
    whole = Span((2, 0), (3, PARAGRAPH_END))
    assert (query.where, query.id, query.text) == (f"{path}:1", "q1", "capital?")
    assert query.outputs == (
        Output("Bern", (Provenance("7", "Bern", span=whole),)),
        Output(
            None,
            (
                Provenance("8", span=Span((2, 5), (3, 9))),
                Provenance("8", span=whole),
                Provenance("", passage_id="12"),
            ),
        ),
        Output("the city of Bern", None),
    )
    assert query.record == record


def test_a_blind_test_set_has_no_outputs(tmp_path):
    path = write(tmp_path / "q.jsonl", [{"id": 5, "input": "capital?"}])
    [query] = kilt.read_queries(path)
    assert (query.id, query.outputs) == ("5", ())


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (
            _query(id="q2", output="Bern"),
            r":2, field 'output': output is \"Bern\": expected a list",
        ),
        (_query(id="q2", output=["Bern"]), r":2, field 'output\[0\]': .* expected an object"),
        (
            _query(id="q2", output=[{"answer": 3}]),
            r"field 'output\[0\].answer': .* is 3: expected a string",
        ),
        (
            _query(id="q2", output=[{"provenance": {}}]),
            r"field 'output\[0\].provenance': .* expected a list",
        ),
        (
            _query(id="q2", output=[GOLD, {"provenance": [7]}]),
            r"field 'output\[1\].provenance\[0\]': .* is 7",
        ),
        (_query(id="q2", input=" "), r":2, field 'input': the input is empty"),
        (_query(id="q2", input=["x"]), r":2, field 'input': input is \[\"x\"\]"),
        (_query(id=""), r":2, field 'id': the id is empty"),
        (_query(), r":2, field 'id': the id 'q1' was already used on line 1"),
        (
            _query(id="q2", output=[{"provenance": [{"start_paragraph_id": "two"}]}]),
            r"provenance\[0\].start_paragraph_id': .* is \"two\"",
        ),
        (
            _query(
                id="q2", output=[{"provenance": [{"start_paragraph_id": 4, "end_paragraph_id": 3}]}]
            ),
            r"provenance\[0\], field 'end_paragraph_id': paragraphs 4 to 3",
        ),
    ],
)
def test_bad_queries_name_line_and_field(tmp_path, record, message):
    path = write(tmp_path / "q.jsonl", [_query(), record])
    with pytest.raises(DataError, match=r"q\.jsonl:2") as error:
        list(kilt.read_queries(path))
    assert error.match(message)


def test_a_verdict_is_no_answer():
    """Or P1 would drop the passages that contain the word "supports"."""
    outputs = tuple(Output(answer, None) for answer in ("SUPPORTS", "Bern", "", None, "Bern"))
    query = kilt.KiltQuery("f:1", "q", "text", outputs, {"id": 5, "input": "text"})
    question = kilt.as_question(query)
    assert question.answers == ("Bern",)
    # The official gold keeps all of it, with the id that queries have.
    assert question.record == {"id": "q", "input": "text"}
