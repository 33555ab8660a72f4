import json

from taser_jax.data.readers.questions import read_questions
from taser_jax.evaluation.results import write_dpr_results


def test_dpr_results_are_read_as_questions_again(tmp_path):
    passage = {"id": "12", "title": "T", "text": 'Élan "vital"', "score": "80.5"}
    results = [
        {"question": "who?", "answers": ["Ada"], "ctxs": [passage | {"has_answer": True}]},
        {"question": "when?", "answers": ["1815"], "ctxs": []},
    ]
    for given in (results, []):
        path = tmp_path / f"{len(given)}.json"
        write_dpr_results(path, given)
        assert json.loads(path.read_text()) == given
    questions = [question.text for question in read_questions(tmp_path / "2.json")]
    assert questions == ["who?", "when?"]
