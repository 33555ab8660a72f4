import pytest
from written_files import write

from taser_jax.data.readers import kilt
from taser_jax.data.readers.located import PARAGRAPH_END, Span
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
            # Or P1 would drop the passages that contain the word "supports".
            {"answer": "SUPPORTS"},
        ]
    )
    path = write(tmp_path / "q.jsonl.gz", [record, {"id": 5, "input": "blind?"}])
    query, blind = kilt.read_queries(path)
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


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (_query(output="Bern"), r", field 'output': output is \"Bern\": expected a list"),
        (
            _query(output=[GOLD, {"provenance": [7]}]),
            r", field 'output\[1\].provenance\[0\]': .* is 7",
        ),
        (
            _query(output=[{"provenance": [{"start_paragraph_id": "two"}]}]),
            r".*provenance\[0\].start_paragraph_id': .* is \"two\"",
        ),
        (_query(input=" "), r", field 'input': the input is empty"),
    ],
)
def test_bad_queries_name_line_and_field(tmp_path, record, message):
    path = write(tmp_path / "q.jsonl", [_query(id="q2"), record])
    with pytest.raises(DataError, match=r"q\.jsonl:2" + message):
        list(kilt.read_queries(path))
