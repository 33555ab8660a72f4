"""`taser pipeline moma` from prepared files to its tables, killed and run again."""

import json
import shutil

import pytest
from small_world import SIX_STEPS, figures, gin, refused, succeed
from written_files import beir, write

from taser_jax.assembly.model_directory import load_model
from taser_jax.systems.moma.memories import Mixture


def tokenize(data, vocabulary, tokens, **names):
    where = gin(DATA_DIR=data, VOCABULARY=vocabulary, TOKEN_STORE=tokens, **names)
    succeed("tokenize", *where, *gin(TASK_FEATURE_LENGTHS={"query": 16, "passage": 32}))
    return tokens


def write_target(folder, data, vocabulary, *, shift=0):
    """A BEIR set of test queries alone, each the start of its document; its token store.

    `shift` judges another document relevant.
    """
    texts = [f"the {word} of {i} values" for i in range(15) for word in ("mean", "median")]
    beir(
        folder,
        corpus={f"d{i}": f"{text} and more" for i, text in enumerate(texts)},
        queries={f"q{i}": text for i, text in enumerate(texts)},
        test=[f"q{i} d{(i + shift) % len(texts)} 1" for i in range(len(texts))],
    )
    where = gin(DATA_DIR=data, COLLECTION="other", DIRECTORIES={"other": str(folder)})
    succeed("prepare", *where)
    return tokenize(data, vocabulary, folder / "tokens", MIXTURE_OR_TASK_NAME="other")


def check_provenance(small_world, output_dir, capsys):
    """The last episode's model is asked, and names the documents behind each answer."""
    data, lookup = small_world.data_dir, output_dir / "episode-2-lookup"
    memories = output_dir / "memories" / load_model(lookup / "model").passage_fingerprint[:16]
    end = output_dir / "episode-2"
    index = gin(INDEX_DIR=end / "exact", DATA_DIR=data, COLLECTION="small", MEMORY_DIR=memories)
    capsys.readouterr()
    succeed(
        *("ask", *index, *gin(MODEL_DIR=end / "model", LOOKUP_DIR=lookup / "model")),
        *gin(DOCUMENTS=3, QUESTIONS=["the mean of values"], **{"ask.task": "summary"}),
    )
    printed = capsys.readouterr().out
    assert printed.count("\n  from memory:\n") == 1
    assert printed.count("%  source  [") + printed.count("%  terms  [") == 3


def results_of(directory):
    """Runs and looked-up documents of all targets, by path."""
    paths = [*directory.rglob("*.trec"), *directory.rglob("arrays.npz")]
    return {path.relative_to(directory): path.read_bytes() for path in paths}


def test_what_is_wrong_with_tokens_is_said_before_any_stage(small_world, tmp_path, capsys):
    data, vocabulary = small_world.data_dir, small_world.root / "vocabulary"
    source = str(small_world.token_store)
    alone = str(tokenize(data, vocabulary, tmp_path / "alone", COLLECTION="small"))
    smaller = gin(
        VOCABULARY=tmp_path / "vocabulary", VOCAB_SIZE=900, TOKEN_STORE=tmp_path / "smaller"
    )
    succeed(*small_world.tokenize(tmp_path / "smaller"), *smaller)
    other = str(tmp_path / "smaller")

    def told(tokens=source, memories=(), targets=()):
        return refused(
            capsys,
            *("pipeline", "moma", *gin(DATA_DIR=data, TOKEN_STORE=tokens, TARGETS=dict(targets))),
            *gin(MEMORIES={"source": tokens, **dict(memories)}, OUTPUT_DIR=tmp_path / "moma"),
            *SIX_STEPS,
        )

    assert "the token store has no train queries" in told(alone)
    assert f"{alone}: the token store has no test queries" in told(targets={"small": alone})
    assert "the token store does not exist" in told(targets={"small": f"{alone}_2"})
    for wrong in ({"targets": {"small": other}}, {"memories": {"terms": other}}):
        assert f"token store {other}: made from vocabulary" in told(**wrong)
    assert not (tmp_path / "moma" / "stages").exists()


ROWS = ["No memory", "MoMA without learning", "MoMA"]


@pytest.mark.release
def test_episodes_on_two_memories(small_world, tmp_path, capsys):
    data, vocabulary = small_world.data_dir, small_world.root / "vocabulary"
    lines = [
        {"id": f"T{i}", "name": f"term {i}", "definition": f"the mean of {i} values"}
        for i in range(30)
    ]
    terms = write(tmp_path / "terms.jsonl", lines)
    succeed("prepare", *gin(DATA_DIR=data, COLLECTION="terms", PASSAGES=terms))
    tokens = tokenize(data, vocabulary, tmp_path / "terms", COLLECTION="terms")
    target = write_target(tmp_path / "beir", data, vocabulary)
    output_dir = tmp_path / "moma"
    arguments = [
        *("pipeline", "moma"),
        *gin(DATA_DIR=data, TOKEN_STORE=small_world.token_store, OUTPUT_DIR=output_dir),
        *gin(MEMORIES={"source": str(small_world.token_store), "terms": str(tokens)}),
        *SIX_STEPS,
        *gin("TrainingConfig", train_from_block=1, states_dir=tmp_path / "states"),
        *gin("MomaConfig", documents=3, learned_positives=2, compared=["none", "fixed", "learned"]),
        *gin("BertFusionConfig", documents="tokens"),
        *gin(TARGETS={"other": str(target)}),
        *gin(TRAIN_STEPS=4, WARM_UP_STEPS=4),
    ]
    succeed(*arguments)
    rows = figures(output_dir)
    # A line for each task.
    assert list(dict.fromkeys(row["system"] for row in rows)) == [
        "BM25",
        "MoMA (warm-up, no memory)",
        *(f"{row} (episode-{n})" for row in ROWS for n in (1, 2)),
    ]
    # The warm-up and two episodes' lookups, whose passage towers differ.
    assert len(list((output_dir / "memories").iterdir())) == 3
    lookup = load_model(output_dir / "episode-2-lookup" / "model")
    mixture = Mixture.open(output_dir / "memories" / lookup.passage_fingerprint[:16])
    assert mixture.manifest.names == ["source", "terms"]
    record = json.loads((output_dir / "stages" / "episode-2-distil.json").read_text())
    for shares in record["outputs"]["attention"]:
        assert sum(shares["attention"].values()) == pytest.approx(1, abs=1e-5)
    of_target = [row["system"] for row in figures(output_dir / "targets" / "other")]
    withheld = ["MoMA, no documents", "MoMA without target"]
    assert list(dict.fromkeys(of_target)) == ["BM25", *ROWS[:2], *withheld, ROWS[2]]
    check_provenance(small_world, output_dir, capsys)
    # What a kill leaves: the last stages have no record.
    for stage in ("episode-2-encode", "episode-2-lookup-train", "moma-episode-2-evaluate"):
        (output_dir / "stages" / f"{stage}.json").unlink()
    succeed(*arguments)
    assert figures(output_dir) == rows
    # Other judgments of the target change neither its runs nor its documents, only its figures.
    before = results_of(output_dir / "targets")
    measured = figures(output_dir / "targets" / "other")
    shutil.rmtree(output_dir / "targets")
    shutil.rmtree(tmp_path / "states" / "targets")
    shuffled = tmp_path / "data"
    shutil.copytree(data, shuffled, ignore=shutil.ignore_patterns("other"))
    other = write_target(tmp_path / "shuffled", shuffled, vocabulary, shift=1)
    succeed(*arguments, *gin(DATA_DIR=shuffled, TARGETS={"other": str(other)}))
    assert results_of(output_dir / "targets") == before
    assert figures(output_dir / "targets" / "other") != measured
