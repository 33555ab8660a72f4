"""DPR-MUF on real questions: its command, its tables, and all of it on a few passages."""

import csv
import json
import pathlib

import numpy as np
import pytest
from bert_checkpoints import write_with_vocabulary
from script_calls import load_script, run_for_real, run_python, write_hits
from written_files import beir, write

from taser_jax.data.collections.store import QuerySet

pytestmark = pytest.mark.slow

TASKS = ("squad", "nq_qed", "medquad", "fewrel", "cmu_dog")
WORDS = ("river", "capital", "doctor", "planet", "music", "bridge", "winter", "engine")


def write_seed(directory: pathlib.Path, rows: dict[str, float], auroc: float) -> None:
    """A table of rows whose hits are a share of two tasks' ten queries, and one specialist's w."""
    measures = ("R@1", "R@20", "R@100")
    for system, share in rows.items():
        hits = dict.fromkeys("ab", 10 * share)
        write_hits(directory, system, hits, measures=measures, parameters=1000)
    write(directory / "domains.csv", "\n".join(["system", *rows]))
    lines = ["specialist,task,own,auroc_of_errors,auroc_of_own_queries", f"A,a,True,,{auroc}"]
    write(directory / "uncertainty.csv", "\n".join([*lines, "A,b,False,0.9,0.1"]))


def test_rows_have_their_spread_and_claims_their_intervals(tmp_path):
    unseen = "Joint without the domain"
    rows = {"MUF": 0.8, "Joint": 0.5, "Equal weights": 0.6, unseen: 0.3}
    write_seed(tmp_path / "seed-0", rows, auroc=0.5)
    write_seed(tmp_path / "seed-1", {**rows, "MUF": 0.6}, auroc=0.7)
    (tmp_path / "seed-2").mkdir()
    run_python("muf/table.py", tmp_path)
    text = (tmp_path / "muf.md").read_text()
    assert text.startswith("2 seeds.")
    # Mean of 80 and 60, standard deviation of two values 20 apart.
    assert "| MUF | 70.0 ± 14.1 | 70.0 ± 14.1 | 70.0 ± 14.1 |" in text
    assert "| Joint | 50.0 ± 0.0 |" in text
    assert "| MUF over Joint | +20.0 |" in text
    # Of its own task's line alone, where the AUROC of errors is undefined.
    assert "| A | 0.60 ± 0.14 | - |" in text
    assert "| MUF | 1,000 |" in text
    claims = json.loads((tmp_path / "claims.json").read_text())
    fields = ("number", "rows", "effect", "headline")
    effects = [[claim[name] for name in fields] for claim in claims if claim["measure"] == "R@20"]
    assert effects == [
        [5, f"MUF over {unseen}", pytest.approx(40.0), True],
        [6, "MUF over Equal weights", pytest.approx(10.0), False],
        [None, "MUF over Joint", pytest.approx(20.0), False],
    ]
    assert {claim["seeds"] for claim in claims} == {2}
    assert "Oracle" not in text


@pytest.mark.release
def test_all_of_it_on_a_few_questions(tmp_path):
    shared = tmp_path / "shared"
    write_shared(shared)
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words = [*special, *WORDS, *map(str, range(100)), "about", "?"]
    checkpoint = write_with_vocabulary(tmp_path / "minilm", words, num_layers=6)
    command = [
        *("benchmarks/muf/run.sh", shared, tmp_path / "out", checkpoint),
        *("--gin.WARMUP_STEPS=1", "--gin.BATCH_SIZE=8"),
        *("--gin.EnsembleTraining.epochs=1", "--gin.EnsembleConfig.members=3"),
        *("--gin.Fusion.sizes=(2,)", "--gin.MixedConfig.queries=20"),
        *("--gin.TrainingConfig.length_buckets=(8,)", "--gin.first/MiningConfig.depth=20"),
        *("--gin.FusionConfig.depth=50", "--gin.Weighing.k=50"),
    ]
    environment = {"SEEDS": "0", "STEPS": "1", "PASSAGE_LENGTH": "8", "DISTRACTORS": "1.0"}
    for _ in range(2):
        ran = run_for_real(*command, **environment)
    # The second time nothing was left to do.
    assert "squad-train: reused" in ran.stderr
    text = (tmp_path / "out" / "muf.md").read_text()
    assert "| MUF over Joint |" in text
    assert "| MUF over Oracle indicator |" in text
    check_costs_and_figures(tmp_path / "out" / "seed-0")
    # The joint model sees as many queries as five specialists.
    record = json.loads((tmp_path / "out" / "seed-0" / "joint" / "model" / "run.json").read_text())
    assert record["settings"]["training.loop.train_steps"] == 5
    assert "| MUF without the domain over Joint without the domain |" in text
    claims = json.loads((tmp_path / "out" / "claims.json").read_text())
    assert {claim["number"] for claim in claims} == {5, 6, None}
    # A film is the page of its passages: none is in two splits.
    films = {
        split: {
            row // 6
            for query in QuerySet.open(tmp_path / "out" / "data", "muf_mini", "cmu_dog", split)
            for row in query.positives
        }
        for split in ("train", "validation", "test")
    }
    assert all(films.values())
    assert sum(map(len, films.values())) == len(set.union(*films.values())) == 10
    printed = run_python("muf/other_weights.py", tmp_path / "out")
    assert "| Weights by margin over Equal weights |" in printed
    assert "| Weights by classifier over Equal weights |" in printed
    judged = (tmp_path / "out" / "seed-0" / "domains.csv").read_text()
    assert all(f",{task}," in judged for task in TASKS)


def check_costs_and_figures(directory: pathlib.Path) -> None:
    with (directory / "uncertainty.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [line["task"] for line in lines] == [*TASKS] * 5
    assert [line["task"] for line in lines if line["own"] == "True"] == [*TASKS]
    header, _, *lines = (directory / "costs.md").read_text().splitlines()
    assert header.startswith("| | Joint | Joint without SQuAD | ")
    assert header.endswith(" | MUF, 5 specialists |")
    cells = {line.split(" | ")[0].removeprefix("| "): line.split(" | ")[1:] for line in lines}
    assert len(cells) == 6
    latency = json.loads((directory / "costs.json").read_text())
    assert latency.keys() == {"2", "3"}
    assert all(value > 0 for of_size in latency.values() for value in of_size.values())
    total = sum(latency["3"][part] for part in ("search", "confidence", "fusion"))
    assert cells["search, confidence and fusion of a query"][-1] == f"{total:.1f} ms |"
    assert {path.stem for path in (directory / "figures").iterdir()} == {
        *("confidence", "abstention", "weights", "reliability", "sizes", "examples"),
        *(f"members-{name}" for name in ("squad", "nq", "medquad", "fewrel", "cmu-dog")),
    }


def test_risk_by_coverage_and_shared_queries_by_hand():
    figures = load_script("muf/figures.py")
    risk = figures.risk_coverage(np.array([0.2, 0.9, 0.5]), np.array([False, True, False]))
    np.testing.assert_allclose(risk, [0, 1 / 2, 2 / 3])
    weights = np.array([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0], [1 / 3, 1 / 3, 1 / 3]])
    np.testing.assert_allclose(figures.effective_specialists(weights), [2, 1, 3])


def test_areas_by_hand_and_by_loops_over_pairs():
    uncertainty = load_script("muf/uncertainty.py")
    specialist = uncertainty.SpecialistUncertainty(
        "A",
        ("x",),
        {"x": np.array([0.9, 0.5, 0.7]), "y": np.array([0.6, 0.2])},
        {"x": np.array([True, False, True]), "y": np.array([False, False])},
    )
    assert specialist.error_auroc("x") == 1.0
    assert specialist.error_auroc("y") is None
    # Of six pairs of an own and a foreign query one is the wrong way round: .5 against .6.
    assert specialist.domain_auroc() == pytest.approx(5 / 6)
    first, second = csv.DictReader(uncertainty.uncertainty_csv([specialist]).splitlines())
    assert (first["mean_w"], first["accuracy"], first["own"]) == ("0.7000", "0.6667", "True")
    assert (first["auroc_of_errors"], second["auroc_of_errors"]) == ("1.0000", "")
    assert second["auroc_of_own_queries"] == "0.8333"
    rng = np.random.default_rng(0)
    for size in (5, 60):
        confidence = rng.integers(0, 8, size) / 8
        correct = rng.random(size) < 0.5
        correct[:2] = True, False
        pairs = [
            1.0 if a > b else 0.5 if a == b else 0.0
            for a in confidence[correct]
            for b in confidence[~correct]
        ]
        assert uncertainty.auroc(confidence, correct) == pytest.approx(np.mean(pairs))


def write_shared(root: pathlib.Path) -> None:
    """kilt_mini's files and a BEIR folder, of a word and a number for each passage."""
    texts = [f"{word} {number}" for word in WORDS[:6] for number in range(60)]
    # CMU DoG's passages are the first 60: ten films of six.
    rows = [f"{i}\t{text} about {text}\t{text}\t{page(i)}\t1\n" for i, text in enumerate(texts)]
    header = "id\ttext\ttitle\twikipedia_id\tparagraph_id\n"
    write(root / "kilt_mini/passages.tsv.gz", "".join([header, *rows]))
    for place, name in enumerate(
        ("cmu_dog-train", "squad-train", "squad-dev", "nq_qed-train", "nq_qed-dev", "fewrel-val")
    ):
        records = []
        for i in range(60 * place, 60 * place + 60):
            gold = [{"wikipedia_id": page(i), "passage_id": str(i)}]
            output = [{"answer": texts[i], "provenance": gold}]
            records.append({"id": f"{name}-{i}", "input": f"{texts[i]} ?", "output": output})
        write(root / f"kilt_mini/{name}.jsonl.gz", records)
    ids = [f"medquad{i}" for i in range(60)]
    beir(
        root / "beir/medquad",
        corpus={id: f"{WORDS[6]} {i} about" for i, id in enumerate(ids)},
        queries={id: f"{WORDS[6]} {i} ?" for i, id in enumerate(ids)},
        ending=".gz",
        train=[f"{id} {id} 1" for id in ids[:50]],
        test=[f"{id} {id} 1" for id in ids[50:]],
    )


def page(passage: int) -> str:
    """Six passages of a film, or an article of one."""
    return f"film{passage // 6}" if passage < 60 else str(passage)
