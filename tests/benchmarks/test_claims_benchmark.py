"""TASER's claims: what their command runs, and their intervals from values by query."""

import json
import pathlib

import pytest
import recipes
import written_files
from bert_checkpoints import write_checkpoint
from script_calls import load_script, run_python, run_script, write_hits

pytestmark = pytest.mark.slow

MEASURES = ("R@1", "R@5", "R@20", "R@100")
QUESTION = {"question": "?", "positive_ctxs": [{"title": "t", "text": "x"}]}
# Row -> how many of a task's ten queries have a hit.
ROWS = {
    "BM25": 6,
    "DPR (BM25 negatives)": 4,
    "DPR (mined negatives)": 5,
    "TASER Det-R (BM25 negatives)": 5,
    "TASER Det-R (mined negatives)": 7,
    "TASER Det-R + BM25": 8,
}


def write(folder: pathlib.Path, rows: dict[str, int], *, seeds: int) -> None:
    """Finished seeds, whose rows are the same."""
    for seed in range(seeds):
        for system, count in rows.items():
            parameters = {"DPR": 1000, "TAS": 600}.get(system[:3])
            hits = {"nq": count, "squad": count}
            directory = folder / "out" / f"seed-{seed}"
            write_hits(directory, system, hits, measures=MEASURES, parameters=parameters)


def cells(text: str, block: str, claim: str) -> list[str]:
    part = text.split(f"### {block}\n")[1].split("###")[0]
    [line] = [line for line in part.splitlines() if line.startswith(f"| {claim} |")]
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


def test_every_claim_has_its_effect_and_intervals(tmp_path):
    write(tmp_path, ROWS, seeds=3)
    for name in ("squad/squad_split_train", "nq_qed/nq_qed_train"):
        written_files.write(tmp_path / "source" / f"{name}.dpr.jsonl.gz", [QUESTION])
    calls, printed = run_script(
        *("benchmarks/open_qa/claims.sh", tmp_path / "source", tmp_path / "out", "minilm"),
        folder=tmp_path,
        SEEDS="0 2",
    )
    text = (tmp_path / "out" / "claims.md").read_text()
    assert text.strip() in printed
    assert all("'passage': 128" in call for call in calls if call.startswith("tokenize"))
    pipelines = [call for call in calls if call.startswith("pipeline taser ")]
    for call, seed in zip(pipelines, (0, 2), strict=True):
        assert f"/seed-{seed} " in call
        assert "--gin_file=runs/open_qa_pretrained.gin --gin.PRETRAINED=minilm" in call
        assert "--gin_file=runs/taser_claims.gin" in call
        assert call.endswith(f"--gin.PRETRAINED_LAYERS=3 --gin.RANDOM_SEED={seed}")
    assert text.startswith("TASER Det-R has 600 parameters, 0.60 of DPR's 1,000.")
    average = cells(text, "R@20, average", "(a) TASER Det-R over DPR")
    assert (average[0], average[5]) == ("+20.0", "3")
    assert cells(text, "R@20, nq", "(c) TASER Det-R + BM25 over BM25")[5] == "3"
    assert "(b) DPR: mined negatives over BM25's" in text
    # The four numbered claims of which the rows are there; the smaller hybrid is that over Det-R.
    findings = json.loads((tmp_path / "out" / "claims.json").read_text())
    headlines = {finding["number"]: finding for finding in findings if finding["headline"]}
    assert headlines.keys() == {1, 3}
    assert headlines[1]["effect"] == pytest.approx(20.0)
    assert (headlines[1]["seeds"], headlines[1]["smallest"]) == (3, 1)
    assert headlines[1]["tasks"].keys() == {"nq", "squad"}
    assert headlines[3]["rows"] == "TASER Det-R + BM25 over TASER Det-R"
    assert {finding["measure"] for finding in findings if finding["number"] == 1} == set(MEASURES)
    # Rows that are not there make no claim.
    assert "Seq-R" not in text
    assert "(c) DPR + BM25" not in text


def test_from_pretrained_weights_level_with_dpr_is_enough(tmp_path):
    rows = {"Pretrained, untrained": 4, "Shared (BM25 negatives)": 5, "Shared (mined negatives)": 6}
    write(tmp_path, ROWS | rows, seeds=2)
    run_python("open_qa/claims.py", tmp_path / "out")
    text = (tmp_path / "out" / "claims.md").read_text()
    assert cells(text, "R@20, average", "TASER Det-R over DPR, non-inferiority")[5] == "2"
    findings = json.loads((tmp_path / "out" / "claims.json").read_text())
    assert {finding["number"] for finding in findings} == {None}
    assert findings[0]["smallest"] == -1
    assert findings[0]["command"].endswith("claims.sh SOURCE_DIR OUTPUT_DIR PRETRAINED")


def test_its_recipe_has_the_systems_that_it_compares(tmp_path):
    checkpoint, _ = write_checkpoint(tmp_path, num_hidden_layers=3)
    files = ("runs/open_qa_pretrained.gin", "runs/taser_claims.gin")
    systems = recipes.value("pipeline taser", "systems", *files, PRETRAINED=str(checkpoint))
    script = load_script("open_qa/claims.py")
    assert list(systems) == [script.DPR, script.SHARED, script.DET_R, *script.LEARNED]
    experts = [system.model.experts for system in systems.values()]
    assert [each.num_experts for each in experts] == [1, 1, 2, 2, 2, 2]
    assert [each.routing.value for each in experts[2:]] == [
        *("deterministic", "sequence", "sequence", "token")
    ]
