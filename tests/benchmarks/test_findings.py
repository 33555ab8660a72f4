"""Effects, intervals and verdicts of claims, by hand and against SciPy; their files."""

import dataclasses
import json
import re

import numpy as np
import pytest
from scipy import stats
from script_calls import REPOSITORY, load_script, run_python

from taser_jax.evaluation.metrics import Evaluation

claims = load_script("claims.py")


def evaluation(values, prefix: str = "q") -> Evaluation:
    ids = tuple(f"{prefix}{number}" for number in range(len(values)))
    return Evaluation(ids, {"R@20": np.asarray(values, np.float64)})


def row(*seeds, task: str = "nq") -> dict[int, dict[str, Evaluation]]:
    return {seed: {task: evaluation(values)} for seed, values in enumerate(seeds)}


NOTHING = (0, 0, 0, 0)


@pytest.mark.parametrize(
    ("effect", "queries", "seeds", "smallest", "planned", "expected"),
    [
        (2.0, (1.0, 3.0), (0.5, 3.5), 1.0, 3, "shown"),
        # Significant, too small to matter for certain, and too small for certain.
        (0.9, (0.2, 1.6), (0.1, 1.7), 1.0, 3, "undecided"),
        (0.4, (0.1, 0.9), (0.1, 0.7), 1.0, 3, "refuted"),
        # Zero is within one of the intervals.
        (2.0, (0.0, 4.0), (0.5, 3.5), 1.0, 3, "undecided"),
        (2.0, (1.0, 3.0), (-0.5, 4.5), 1.0, 3, "undecided"),
        (1.0, (0.5, 1.5), (0.1, 1.9), 1.0, 3, "shown"),
        # One seed decides what one was planned for, and refutes.
        (2.0, (1.0, 3.0), None, 1.0, 3, "undecided"),
        (2.0, (1.0, 3.0), None, 0.0, 1, "shown"),
        (-3.0, (-4.0, -2.0), None, 1.0, 3, "refuted"),
        (0.5, (0.1, 1.0), None, 1.0, 3, "undecided"),
        # A margin of a point: level is enough, for certain.
        (-0.2, (-0.8, 0.4), (-0.9, 0.5), -1.0, 3, "shown"),
        (-0.2, (-1.2, 0.8), (-0.9, 0.5), -1.0, 3, "undecided"),
        (-2.0, (-2.8, -1.2), (-3.0, -1.0), -1.0, 3, "refuted"),
    ],
)
def test_verdicts(effect, queries, seeds, smallest, planned, expected):
    verdict = claims.verdict(
        effect,
        claims.Interval(*queries, 0.5),
        None if seeds is None else claims.Interval(*seeds, 0.5),
        smallest=smallest,
        seeds=1 if seeds is None else max(planned, 2),
        planned_seeds=planned,
    )
    assert verdict == expected


def test_the_numbered_claims_are_those_of_the_page():
    page = (REPOSITORY / "docs" / "claims.md").read_text(encoding="utf-8")
    lines = re.findall(r"^\| (\d+) \| (.+) \|$", page, re.MULTILINE)
    assert [int(number) for number, _ in lines] == list(claims.REGISTERED) == [*range(1, 12)]
    for number, rest in lines:
        text, _, measures, seeds, smallest = rest.split(" | ")
        line = claims.REGISTERED[int(number)]
        assert line.text == text
        assert len(line.measures) == 1 + measures.count("@") - ("page" not in measures)
        assert all(
            name.replace("PageRprec", "page R-precision") in measures for name in line.measures
        )
        assert line.seeds == min(int(count) for count in seeds.split(", "))
        assert line.smallest == float(smallest.replace("−", "-").removesuffix(" (margin)"))


def test_one_pair_by_hand():
    """A query in four gains: how many of four drawn ones do is binomial."""
    pair = claims.Pair("a over b", row((1, 1, 0, 0)), row((0, 1, 0, 0)))
    [finding] = claims.find([claims.Claim("a is ahead", [pair])], "R@20", command="run.sh")
    # P(3 or fewer of 4) = 0.9961, P(2 or fewer) = 0.9492; P(none) = 0.75 ** 4 = 0.316.
    interval = finding.over_queries
    assert (finding.effect, interval.low, interval.high) == (25.0, 0.0, 75.0)
    assert finding.over_queries.p_value == pytest.approx(2 * 0.75**4, abs=0.03)
    assert finding.over_seeds is None
    assert (finding.seeds, finding.verdict, finding.tasks) == (1, "undecided", {"nq": 25.0})


def test_mixes_of_the_same_queries_are_no_more_queries():
    """As one pair by hand: twice the same four queries are four."""
    rows = {
        name: {0: dict.fromkeys(("mix 1", "mix 2"), evaluation(values))}
        for name, values in (("a", (1, 1, 0, 0)), ("b", (0, 1, 0, 0)))
    }
    claim = claims.over("a", "b", rows, claims.TaskQueries.MIXED)
    [finding] = claims.find([claim], "R@20", command="run.sh")
    interval = finding.over_queries
    assert (finding.effect, interval.low, interval.high) == (25.0, 0.0, 75.0)
    assert finding.tasks == {"mix 1": 25.0, "mix 2": 25.0}
    apart = dataclasses.replace(claim, queries=claims.TaskQueries.OWN)
    [narrower] = claims.find([apart], "R@20", command="run.sh")
    assert narrower.over_queries.high < 75


def test_the_mean_of_pairs_averages_each_querys_differences():
    pairs = [
        claims.Pair("a", row((1, 1, 0, 0), (1, 0, 0, 0)), row(NOTHING, NOTHING)),
        claims.Pair("b", row((1, 0, 0, 0), (0, 0, 0, 0)), row((0, 1, 0, 0), (0, 1, 0, 0))),
    ]
    [finding] = claims.find([claims.registered(2, pairs)], "R@20", command="run.sh")
    # By query: seed 0 gains 1, 0, 0, 0 and seed 1 gains 0.5, -0.5, 0, 0.
    assert finding.rows == "mean of a, b"
    assert finding.effect == pytest.approx(12.5)
    assert finding.tasks == {"nq": pytest.approx(12.5)}
    assert (finding.number, finding.smallest, finding.headline) == (2, 1, True)
    # Averaged over pairs and seeds: 0.75, -0.25, 0, 0, of which four are drawn.
    differences = np.array([0.75, -0.25, 0.0, 0.0])
    drawn = np.random.default_rng(3).choice(differences, (100_000, 4)).mean(axis=1)
    expected_ends = 100 * np.quantile(drawn, [0.025, 0.975])
    ends = [finding.over_queries.low, finding.over_queries.high]
    assert ends == pytest.approx(expected_ends, abs=1e-9)


def test_the_smallest_of_several_effects_counts():
    """Here on different tasks, as in the claim about the worst one."""
    pairs = [
        claims.Pair("on nq", row((1, 1, 1, 0), task="nq"), row(NOTHING, task="nq")),
        claims.Pair("on squad", row((1, 0, 0), task="squad"), row((0, 0, 1), task="squad")),
        claims.Pair("on fm2", row((1, 1), task="fm2"), row((0, 0), task="fm2")),
    ]
    claim = claims.registered(11, pairs, claims.Combined.SMALLEST)
    [finding] = claims.find([claim], "R@20", command="run.sh")
    assert (finding.rows, finding.effect, finding.tasks) == ("on squad", 0.0, {"squad": 0.0})
    [other] = claims.find([dataclasses.replace(claim, pairs=pairs[::2])], "R@20", command="run.sh")
    assert (other.rows, other.effect, other.verdict) == ("on nq", 75.0, "shown")


def test_over_seeds_is_scipys_paired_test_of_the_seeds_means():
    """Of a row with 60% of hits and one with 50%, of three seeds and two tasks."""
    generator = np.random.default_rng(5)
    first, second = [
        {
            seed: {
                task: evaluation(generator.random(count) < share, prefix=task)
                for task, count in (("nq", 150), ("squad", 80))
            }
            for seed in range(3)
        }
        for share in (0.6, 0.5)
    ]
    claim = claims.Claim("a", [claims.Pair("a", first, second)])
    [finding] = claims.find([claim], "R@20", command="run.sh")
    means = [
        [np.mean([task.values["R@20"].mean() for task in tasks.values()]) for tasks in row.values()]
        for row in (first, second)
    ]
    expected = stats.ttest_rel(*means)
    interval = expected.confidence_interval(0.95)
    assert finding.effect == pytest.approx(100 * np.mean(np.subtract(*means)))
    assert finding.over_seeds.low == pytest.approx(100 * interval.low)
    assert finding.over_seeds.high == pytest.approx(100 * interval.high)
    assert finding.over_seeds.p_value == pytest.approx(expected.pvalue)


def test_the_eleven_lines_come_from_the_files_alone(tmp_path):
    """Of claims 3 and 1, in this order, and of one beside them."""
    for name in ("open_qa", "kilt_mini"):
        (tmp_path / "results" / name).mkdir(parents=True)
    three, four = (1, 1, 1, 0), (1, 1, 1, 1)
    pairs = [
        claims.Pair("hybrid over BM25", row(three, four), row(NOTHING, NOTHING)),
        claims.Pair("hybrid over Det-R", row(three, three), row(NOTHING, NOTHING)),
    ]
    third = claims.registered(3, pairs, claims.Combined.SMALLEST)
    beside = claims.Claim("a", [pairs[0]])
    first = claims.registered(1, [claims.Pair("a", row(NOTHING), row(NOTHING))])
    written = claims.find([third, beside], "R@20", command="run.sh SOURCE")
    written += claims.find([first], "R@20", command="run.sh")
    file = tmp_path / "results" / "open_qa" / "claims.json"
    claims.write_json(written, file)
    assert claims.read_json(file) == written
    of_third, beside, of_first = json.loads(file.read_text())
    assert of_third["over_seeds"] == {"low": 75.0, "high": 75.0, "p_value": 0.0}
    assert (beside["number"], beside["headline"], of_first["over_seeds"]) == (None, False, None)
    claims.write_json([], tmp_path / "results" / "kilt_mini" / "claims.json")
    figure = tmp_path / "claims.png"
    lines = run_python("opening.py", tmp_path / "results", f"--figure={figure}").splitlines()[2:]
    assert [int(line.split(".")[0].removeprefix("| ")) for line in lines] == [*range(1, 12)]
    assert [line.split(" | ")[-2] for line in lines] == [
        *("refuted", "not run yet", "undecided"),
        *["not run yet"] * 8,
    ]
    assert lines[2] == (
        "| 3. A hybrid is ahead of both its parts | open_qa: hybrid over Det-R | R@20 | +75.0 "
        "| [+25.0, +100.0] | [+75.0, +75.0] | 2 | undecided | `run.sh SOURCE` |"
    )
    assert figure.read_bytes().startswith(b"\x89PNG")
