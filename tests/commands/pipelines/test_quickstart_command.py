"""`taser quickstart` from nothing to answers, on three small packages; run again it reuses all."""

import functools

import pytest
from small_world import SIX_STEPS, gin, never, refused, succeed
from stage_calls import check_every_argument, without_work

from taser_jax.commands.pipelines import retrieval_stages, taser
from taser_jax.commands.pipelines.stages import Stages
from taser_jax.evaluation.reports import ResultsTable
from taser_jax.evaluation.results import SystemResult, TaskResult


@pytest.mark.slow
def test_quickstart_and_again(tmp_path, monkeypatch, capsys):
    packages = functools.partial(taser.prepare_pydocs, packages=("json", "statistics", "optax"))
    monkeypatch.setattr(taser, "prepare_pydocs", packages)
    output, questions = tmp_path / "out", ["median of some numbers", "write json to a file"]
    # Sizes are those of the small comparison, so that nothing compiles anew.
    arguments = [
        "quickstart",
        *gin(OUTPUT_DIR=output, DATA_DIR=output / "data", TOKEN_STORE=output / "tokens"),
        "--gin_file=runs/quickstart_scratch.gin",
        "--gin.SYSTEMS={'TASER': @taser/System()}",
        *gin("quickstart", rounds=1, vocabulary_size=1000, query_length=16, passage_length=32),
        "--gin.taser/ExpertConfig.shared_per_specialized=1",
        *SIX_STEPS,
        *gin(TASKS=["lookup"], QUESTIONS=questions),
    ]
    succeed(*arguments)
    first = capsys.readouterr().out
    for module, names in (
        (taser, ("prepare_pydocs", "make_vocabulary", "tokenize", "hybrid")),
        (retrieval_stages, ("train", "bm25", "encode", "index", "search", "mine", "evaluate")),
    ):
        for name in names:
            monkeypatch.setattr(module, name, never(getattr(module, name)))
    succeed(*arguments)
    again = capsys.readouterr().out
    assert all(row in again for row in ("BM25", "TASER (BM25 negatives)", "TASER + BM25"))
    assert all(f"? {question}\n  1. " in again for question in questions)
    # What training says comes before the table; the rest is the same to the letter.
    assert first.endswith(again)

    message = refused(capsys, *arguments, "--gin.quickstart.vocabulary_size=600")
    assert "size was 1000" in message
    assert "now 600" in message


def test_every_argument_of_every_stage_counts(small_world, tmp_path, monkeypatch):
    """Those of `pipeline taser` among them, without their work; each is changed in turn."""
    output = tmp_path / "out"
    row = SystemResult("TASER (mined negatives)", {"code": TaskResult({"R@20": 0.5}, 9)})
    monkeypatch.setattr(taser, "print_table", lambda *_, **__: ResultsTable([row]))
    monkeypatch.setattr(taser, "ask", lambda *_, **__: None)
    with monkeypatch.context() as patched:
        calls = without_work(patched)
        succeed(
            "quickstart",
            *("--gin_file=runs/quickstart_scratch.gin", "--gin.BatchingConfig.rates={}"),
            *gin(OUTPUT_DIR=output, DATA_DIR=small_world.data_dir),
            *gin(TOKEN_STORE=small_world.token_store),
        )
    assert {"prepare_pydocs", "make_vocabulary", "tokenize", "train", "hybrid"} < calls.keys()
    assert len(calls) == 3 + 8
    # Of several sets, the second round has the first one's negatives alone.
    trained = Stages(output).record("taser-2-train").inputs
    assert [trained[name] for name in trained if "negatives_dirs." in name] == ["taser-1/negatives"]
    check_every_argument(output, calls)
