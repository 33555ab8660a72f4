"""The scripts behind docs/results.md: splits that hold still, and both trainings end to end."""

import json

import numpy as np
import pytest
import tiny_training
from script_calls import load_script
from written_files import write

pytestmark = pytest.mark.slow

collapse = load_script("routing_collapse.py")
# sha256("t\npassage N"), first 8 bytes, divisible by 16; found with hashlib alone.
VALIDATION = {8, 18, 27, 37, 49, 68, 79, 85, 96, 111, 112, 114, 120, 158}


def test_questions_are_split_by_a_hash_of_their_passage(tmp_path):
    contexts = [[{"title": "t", "text": f"passage {number // 5}"}] for number in range(1000)]
    asked = [{"question": f"q{n}", "positive_ctxs": own} for n, own in enumerate(contexts)]
    path = write(tmp_path / "set.dpr.jsonl", asked)
    lines = path.read_text().splitlines()
    script = load_script("open_qa/split_questions.py")
    written = script.split_file(path, tmp_path / "out", one_in=16)
    questions = {split: file.read_text().splitlines() for split, file in written.items()}
    assert questions["validation"] == [
        line for number, line in enumerate(lines) if number // 5 in VALIDATION
    ]
    assert sorted(questions["train"] + questions["validation"]) == sorted(lines)


@pytest.mark.release
def test_routing_cases_are_measured_and_kept(tmp_path):
    store = tiny_training.write_token_store(tmp_path / "tokens")
    case = collapse.Case("mean", "information_up", 0.1, seed=0)
    command = [f"--token_store={store.directory}", f"--output_dir={tmp_path}", "--steps=2"]
    command += ["--batch_size=16", "--layers=1", "--embed_dim=32", "--shared_per_specialized=0"]
    command += ["--settings=mean/information_up:0.1", "--seeds=0"]
    collapse.main(command)
    result = tmp_path / case.name / "result.json"
    report = json.loads(result.read_text())
    result.write_text(json.dumps(report | {"validation_mrr": 0.5}))
    # The untrained model's statistics are those of the weights that training began with.
    assert report["initial_logit_spread"] != report["logit_spread"]
    collapse.main(command)
    table = (tmp_path / "table.md").read_text()
    assert "| mean | information_up | 0.1 | 1 |" in table
    assert "| 0.500 |" in table


def test_a_block_that_uses_one_expert_counts_as_collapsed():

    def side(first, second):
        return collapse.RoutingStatistics(
            probability_sum=np.array([[first, second]]),
            entropy_sum=np.array([0.0]),
            choice_count=np.array([[first, second]]),
            count=np.array([first + second]),
            logit_sum=np.array([[second - first, first - second]]),
            logit_square_sum=np.array([[4.0 * (first + second)] * 2]),
        )

    case = collapse.Case("token", "none", 0.0, seed=0)
    # Queries 98:2 and passages 94:6 average to 96% for expert 0.
    roles = {collapse.Role.QUERY: side(98, 2), collapse.Role.PASSAGE: side(188, 12)}
    report = collapse.report(case, roles, {"mrr": 0.25}, initial=roles)
    assert report["largest_share"] == [0.96]
    # (286 - 14) / 300, doubled for the difference of two logits; a mean square of 4.
    assert report["logit_offset"] == report["initial_logit_offset"] == [1.8133]
    assert report["logit_spread"] == pytest.approx([2 * np.sqrt(4 - (272 / 300) ** 2)], abs=1e-4)
    assert report["collapsed_blocks"] == 1


def test_role_information_by_hand():

    def chosen(*blocks):
        zero, counts = np.zeros(len(blocks)), np.array(blocks, float)
        return collapse.RoutingStatistics(
            counts, zero, counts, counts.sum(1), 0 * counts, 0 * counts
        )

    # Blocks: never meet; always the same; 3 : 1 against 1 : 3 (passages twice as many).
    information = collapse.role_information(
        chosen((4, 0), (4, 0), (3, 1)), chosen((0, 8), (8, 0), (2, 6))
    )
    expected = [np.log(2), 0.0, 0.75 * np.log(1.5) + 0.25 * np.log(0.5)]
    np.testing.assert_allclose(information, expected, rtol=1e-6, atol=1e-12)
