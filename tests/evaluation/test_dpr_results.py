import json

import numpy as np
import pytest

from taser_jax.data.readers.questions import read_questions
from taser_jax.evaluation.results import RetrievalResult, RetrievedPassage, write_dpr_results
from taser_jax.storage.errors import StorageError
from taser_jax.storage.records import Passage


def test_dpr_results_are_what_fid_reads(tmp_path):
    best = RetrievedPassage(Passage("12", 'Élan "vital"', "T"), np.float32(80.5), np.bool_(True))
    other = RetrievedPassage(Passage("13", "b"), 3.25, False)
    path = tmp_path / "results.json"
    write_dpr_results(
        path,
        [
            RetrievalResult("who?", ("Ada",), [best, other]),
            RetrievalResult("when?", ["1815"], []),
        ],
    )
    assert json.loads(path.read_text()) == [
        {
            "question": "who?",
            "answers": ["Ada"],
            "ctxs": [
                {
                    "id": "12",
                    "title": "T",
                    "text": 'Élan "vital"',
                    "score": "80.5",
                    "has_answer": True,
                },
                {"id": "13", "title": "", "text": "b", "score": "3.25", "has_answer": False},
            ],
        },
        {"question": "when?", "answers": ["1815"], "ctxs": []},
    ]
    assert [question.text for question in read_questions(path)] == ["who?", "when?"]


def test_no_result_is_an_empty_array(tmp_path):
    write_dpr_results(tmp_path / "r.json", [])
    assert json.loads((tmp_path / "r.json").read_text()) == []


def test_results_appear_only_when_complete(tmp_path):
    def results():
        yield RetrievalResult("who?", ["Ada"], [])
        raise KeyError("a caller's error")

    with pytest.raises(KeyError):
        write_dpr_results(tmp_path / "r.json", results())
    assert not (tmp_path / "r.json").exists()


def test_an_unwritable_place_is_reported(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"r\.json: could not write: File exists"):
        write_dpr_results(tmp_path / "file" / "r.json", [])
