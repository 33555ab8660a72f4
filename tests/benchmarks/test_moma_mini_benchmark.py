"""MoMA on two cores: what its command runs, how it divides the data, what its table says."""

import json

import pytest
from script_calls import run_python, run_script, write_hits
from written_files import beir, write

pytestmark = pytest.mark.slow


@pytest.fixture
def shared(tmp_path):
    """Six passages, of which the first two are squad's, and targets of forty documents."""
    root = tmp_path / "shared"
    sources = ["squad", "musique,squad", "fm2", "nq_qed", "fewrel", "fm2,climate_fever"]
    lines = [f"{i}\t{s}\n" for i, s in enumerate(sources)]
    write(root / "kilt_mini/passage_sources.tsv.gz", "".join(["passage_id\tsource\n", *lines]))
    rows = [f'{i}\t"A ""text"" {i}"\ttitle {i}\t{i}\t0\n' for i in range(6)]
    header = "id\ttext\ttitle\twikipedia_id\tparagraph_id\n"
    write(root / "kilt_mini/passages.tsv.gz", "".join([header, *rows]))
    for name in ("squad-train", "squad-dev", "nq_qed-train", "nq_qed-dev"):
        questions = [{"id": f"{name}{i}", "input": "what ?"} for i in range(40)]
        write(root / f"kilt_mini/{name}.jsonl.gz", questions)
    for name in ("fm2-dev", "climate_fever-all"):
        claim = {"id": name, "input": "a claim", "output": [{"provenance": [{"passage_id": "5"}]}]}
        write(root / f"kilt_mini/{name}.jsonl.gz", [claim])
    for target in ("scifact", "medquad"):
        corpus = {f"d{i}": "a text" for i in range(40)}
        judged = {"train": ["q d0 1"], "test": ["q d1 1"]}
        beir(root / "beir" / target, corpus=corpus, queries={"q": "?"}, ending=".gz", **judged)
    return root


def test_the_source_is_taken_out_of_the_encyclopedia(shared, tmp_path):
    folders = (shared, tmp_path / "out")
    printed = run_python("moma_mini/split_data.py", *folders, TARGET_DISTRACTORS="0.25")
    source = (tmp_path / "out/source.tsv").read_text().splitlines()
    assert [line.split("\t")[0] for line in source] == ["id", "0", "1", "3"]
    assert source[1].startswith('0\t"A ""text"" 0"\t')
    wiki = (tmp_path / "out/wiki.tsv").read_text().splitlines()
    # Nor has it the targets' passages.
    assert wiki[1:] == ['4\t"A ""text"" 4"\ttitle 4']
    qrels = (tmp_path / "out/climate_fever/qrels/test.tsv").read_text().splitlines()
    assert qrels[1:] == ["climate_fever-all\t5\t1"]
    assert '"_id": "5"' in (tmp_path / "out/fm2/corpus.jsonl").read_text()
    # Test judgments alone; a share of what answers no test question, and all that does.
    assert [path.name for path in (tmp_path / "out/medquad/qrels").iterdir()] == ["test.tsv"]
    corpus = (tmp_path / "out/medquad/corpus.jsonl").read_text()
    assert '"d1"' in corpus
    assert 4 <= corpus.count("\n") <= 20
    assert "climate_fever: 1 passages" in printed
    assert 10 <= (tmp_path / "out/squad-train.jsonl").read_text().count("\n") <= 30
    assert "squad-dev: 40 questions" in printed


def test_one_pipeline_for_all_rows(shared, tmp_path):
    calls, _ = run_script(
        *("benchmarks/moma_mini/run.sh", shared, tmp_path / "out", "minilm"),
        "--gin.TRAIN_STEPS=7",
        folder=tmp_path,
        SEEDS="3 4",
        ROWS="none learned",
    )
    names = [call.split()[0] for call in calls]
    # The source, wiki, the thesauri and four targets.
    assert names.count("prepare") == 7
    assert names.count("tokenize") == 7
    pipelines = [call for call in calls if call.startswith("pipeline moma")]
    for seed, call in zip((3, 4), pipelines, strict=True):
        assert f"{tmp_path}/out/seed-{seed} " in call
        assert "compared=['none', 'learned', ]" in call
        assert f"'{tmp_path}/out/embeddings'" in call
    assert pipelines[1].endswith("--gin.RANDOM_SEED=4 --gin.TRAIN_STEPS=7")


def test_claim_9_is_about_its_four_targets_and_the_table_about_all(tmp_path):
    for target in ("scifact", "medquad", "fm2", "climate_fever", "pubmedqa"):
        directory = tmp_path / "seed-0" / "targets" / target
        write_hits(directory, "No memory", {target: 2})
        write_hits(directory, "MoMA", {target: 1 if target == "pubmedqa" else 7})
    shares = {"source, other": 0.25, "source, relevant": 0.5, "wiki": 0.25}
    record = {"task": "squad", "attention": shares, "documents": shares, "queries_with_gold": 0.6}
    outputs = json.dumps({"outputs": {"attention": [record]}})
    write(tmp_path / "seed-0/stages/episode-1-distil.json", outputs)
    run_python("moma_mini/table.py", tmp_path)
    findings = json.loads((tmp_path / "claims.json").read_text())
    effects = {finding["number"]: (finding["headline"], finding["effect"]) for finding in findings}
    # Four targets gain 50 points, the fifth loses 10.
    assert effects == {9: (True, pytest.approx(50.0)), None: (False, pytest.approx(38.0))}
    text = (tmp_path / "moma.md").read_text()
    assert "| MoMA | 70.0 | 70.0 | 70.0 | 10.0 | 70.0 | 58.0 |" in text
    assert "| MoMA over No memory | +38.0 |" in text
    assert "squad: source, other: 25.0 of attention" in text
    assert "60.0 of queries have a relevant document" in text


@pytest.mark.parametrize(("hits", "verdict"), [(2, "gate closed"), (4, "undecided")])
def test_the_gate_asks_the_last_episode_of_the_source(tmp_path, hits, verdict):
    rows = {"No memory (episode-1)": 1, "No memory (episode-2)": 3, "MoMA (episode-1)": 9}
    rows |= {"MoMA (episode-2)": hits, "MoMA without learning (episode-2)": 9}
    for system, count in rows.items():
        write_hits(tmp_path / "seed-0", system, {"squad": count})
    run_python("moma_mini/table.py", tmp_path, "--gate")
    first = json.loads((tmp_path / "claims.json").read_text())[0]
    assert (first["number"], first["headline"], first["verdict"]) == (9, True, verdict)
    assert first["effect"] == pytest.approx(10 * (hits - 3))
    assert first["command"].startswith("benchmarks/moma_mini/gate.sh ")
