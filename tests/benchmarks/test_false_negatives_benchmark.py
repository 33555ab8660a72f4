"""The benchmark of false negatives on two small sets, with results in place of a model's."""

import csv

import numpy as np
from script_calls import load_script
from written_files import write

from taser_jax.retrieval.runs import top_k

script = load_script("false_negatives.py")


def test_counts_and_samples_of_each_option(tmp_path, monkeypatch, capsys):
    """Three passages and three questions of each set; the last positive comes too late."""
    for name, files in script.SETS.items():
        passages, questions = (tmp_path / file for file in files)
        rows = [f"{number}\t{name} text {number}\ttitle\n" for number in range(3)]
        write(passages, "".join(["id\ttext\ttitle\n", *rows]))
        asked = {"question": f"{name} question", "answers": ["text 0"]}
        contexts = [[{"passage_id": str(number)}] for number in range(3)]
        records = [{**asked, "qid": n, "positive_ctxs": own} for n, own in enumerate(contexts)]
        write(questions, records)

    def retrieve(pretrained, store, queries, *, length):
        assert [passage.id for passage in store] == ["squad-0", "squad-1", "nq-0", "nq-1"]
        assert [query.positives for query in queries] == [(0,), (1,), (2,), (3,)]
        scores = np.array([[1.0, 0.98, 0.5, 0.25]] * 4, np.float32)
        return top_k(np.broadcast_to(np.arange(4), (4, 4)), scores, 100)

    monkeypatch.setattr(script, "retrieve", retrieve)
    out = tmp_path / "out"
    script.main([str(tmp_path), str(out), "model", "--passages=2"])
    lines = capsys.readouterr().out.splitlines()
    # 3 negatives for each of 4 queries; rows 0 and 2 hold "text 0".
    assert lines[0].startswith("top 5: 50.0% contain an answer; 12 negatives")
    # Rows 2 and 3 for each of the first two queries, row 3 for the third, nothing for the last.
    assert lines[1].startswith("at most 95% of the positive's score: 40.0% contain an answer; 5 ")
    assert "without an answer: 0.0% contain an answer; 6 negatives" in lines[3]
    samples = sorted(path.name for path in out.glob("*.tsv"))
    assert samples == [f"sample-{number}.tsv" for number in range(len(script.OPTIONS))]
    with open(out / "sample-0.tsv", newline="") as file:
        pairs = list(csv.DictReader(file, delimiter="\t"))
    assert len(pairs) == 12
    assert {pair["is_answered_by_negative"] for pair in pairs} == {""}
