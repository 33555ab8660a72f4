"""Answer matching on real passages and questions against the rule written out list by list."""

import ast
import csv
import gzip
import random

import numpy as np
import pytest
from answer_oracle import oracle_has_answer, oracle_regex, oracle_tokens
from read_by_hand import lines

from taser_jax.evaluation.metrics import AnswerMatch, AnswerMatcher, tokenize

pytestmark = pytest.mark.slow


def passages(path):
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        return [line["text"] for line in csv.DictReader(file, delimiter="\t")]


def answer_lists(path):
    return [ast.literal_eval(line.split("\t")[1]) for line in lines(path)]


@pytest.mark.parametrize("name", ["squad", "nq_qed"])
def test_equals_the_oracle(shared_data, name):
    folder, split = shared_data / name, "squad_split_dev" if name == "squad" else "nq_qed_dev"
    texts = passages(folder / f"psgs_{name if name == 'nq_qed' else 'squad_dev'}.tsv.gz")
    answers = answer_lists(folder / f"{split}.qa.csv.gz")
    assert list(map(tokenize, texts)) == list(map(oracle_tokens, texts))
    rng = random.Random(0)
    asked = rng.sample(range(len(answers)), 300)
    rows = np.array([rng.sample(range(len(texts)), 60) for _ in asked], np.int32)
    expected = [
        [oracle_has_answer(answers[query], texts[row]) for row in line]
        for query, line in zip(asked, rows.tolist(), strict=True)
    ]
    matcher = AnswerMatcher(lambda passage_rows: [texts[row] for row in passage_rows])
    hits = matcher.hits(rows, [answers[query] for query in asked])
    np.testing.assert_array_equal(hits, expected)
    assert hits.any()


def test_curated_trec_patterns(shared_data):
    patterns = answer_lists(shared_data / "qa" / "curatedtrec_curated_train.qa.csv.gz")
    texts = passages(shared_data / "squad" / "psgs_squad_dev.tsv.gz")[:400]
    rng = random.Random(0)
    rows = np.array([rng.sample(range(400), 20) for _ in patterns], np.int32)
    matcher = AnswerMatcher(
        lambda passage_rows: [texts[row] for row in passage_rows], match=AnswerMatch.REGEX
    )
    hits = matcher.hits(rows, patterns)
    for query, answers in enumerate(patterns):
        assert hits[query].tolist() == [oracle_regex(answers, texts[row]) for row in rows[query]]
    assert hits.any()
