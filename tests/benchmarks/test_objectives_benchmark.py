"""Trainings that differ in their objective alone: their rows and claims, and that they resume."""

import json

import pytest
from bert_checkpoints import write_with_vocabulary
from script_calls import load_script
from written_files import kilt_mini

pytestmark = [pytest.mark.slow, pytest.mark.release]


def test_rows_differ_in_their_objective_alone(tmp_path, monkeypatch, capsys):
    """Of thirty claims and their passages, from a tiny BERT that knows their words."""
    folder = kilt_mini(tmp_path / "data" / "kilt_mini", queries=30)
    digits = [str(n) for n in range(10)]
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "text", "title", "claim", *digits]
    words += [f"##{digit}" for digit in digits]
    bert = write_with_vocabulary(tmp_path / "bert", words, num_layers=2)
    objectives = load_script("objectives.py")
    monkeypatch.setattr(objectives, "FEW", 4)
    monkeypatch.setattr(objectives, "BATCH_SIZE", 8)
    monkeypatch.setattr(objectives, "LENGTHS", {"query": 8, "passage": 16})
    flags = [f"--data={folder.parent}", f"--pretrained={bert}", f"--out={tmp_path / 'out'}"]
    flags += ["--set=fm2", "--steps=2", "--seeds=0,1"]
    objectives.main(flags)
    assert "### nDCG@10" in capsys.readouterr().out
    findings = json.loads((tmp_path / "out" / "claims.json").read_text())
    assert {finding["seeds"] for finding in findings[1:]} == {1, 2}
    assert [finding["rows"] for finding in findings if finding["measure"] == "R@20"] == [
        "labels over untrained",
        "Matryoshka over labels",
        "Matryoshka, 4 dimensions over labels, 4 dimensions",
        "labels, 4 dimensions over labels",
    ]
    labels, matryoshka = (
        json.loads((tmp_path / "out/seed-1" / name / "model/run.json").read_text())["settings"]
        for name in ("labels", "matryoshka")
    )
    differing = {key for key in matryoshka if matryoshka[key] != labels.get(key)}
    assert differing
    assert all(key.startswith("training.objective.") for key in differing)
    monkeypatch.setattr("taser_jax.commands.pipelines.stages.Stages._write", None)
    objectives.main(flags)
