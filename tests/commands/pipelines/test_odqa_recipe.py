"""The collection of the five sets and EntityQuestions, from files in DPR's layout."""

import json

from small_world import gin, succeed
from written_files import write_all

from taser_jax.data.collections.store import QuerySet, list_tasks
from taser_jax.tasks.odqa import ENTITY_TASKS, RELATIONS, TASKS

FILES = {"nq": "nq", "trivia": "trivia", "webq": "webq", "trec": "curatedtrec", "squad": "squad1"}


def _passage(number: int) -> dict[str, str]:
    return {"psg_id": str(number), "text": f"It lies on stream{number}.", "title": f"town{number}"}


def _question(number: int) -> dict[str, object]:
    return {"question": f"on which river lies town{number}", "answers": [f"stream{number}"]}


def test_the_collection_has_all_sets_and_relations(tmp_path):
    """Files as DPR's downloader and EntityQuestions leave them, eight questions a training set."""
    rows = ["\t".join(_passage(number).values()) for number in range(40)]
    files = {"wikipedia_split/psgs_w100.tsv": "\n".join(["id\ttext\ttitle", *rows, ""])}
    for name in FILES.values():
        for split, numbers in (("train", range(8)), ("dev", range(8, 16))):
            records = [_question(n) | {"positive_ctxs": [_passage(n)]} for n in numbers]
            files[f"retriever/{name}-{split}.json"] = json.dumps(records)
        lines = ["{question}\t{answers}\n".format(**_question(n)) for n in range(30, 34)]
        files[f"retriever/qas/{name}-test.csv"] = "".join(lines)
    for place, relation in enumerate(RELATIONS):
        question = json.dumps([_question(place)])
        files[f"entity_questions/test/P{relation}.test.json"] = question
    source, data_dir = write_all(tmp_path / "source", files), tmp_path / "data"
    recipe = "--gin_file=runs/odqa_prepare.gin"
    succeed("prepare", recipe, *gin(DATA_DIR=data_dir, SOURCE_DIR=source))
    tasks = list_tasks(data_dir, "odqa")
    assert set(tasks) == {*TASKS, *ENTITY_TASKS}
    assert len(ENTITY_TASKS) == 24
    for task in TASKS:
        assert set(tasks[task]) == {"train", "validation", "test"}
        assert len(QuerySet.open(data_dir, "odqa", task, "train")) == 8
    assert all(tasks[task] == ["test"] for task in ENTITY_TASKS)
