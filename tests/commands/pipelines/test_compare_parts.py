"""What `taser compare` measures and derives: costs, chunks, lengths, names and sizes of files."""

import dataclasses
import functools
import json
import pathlib
from unittest import mock

import jax
import pytest
import tiny_training
from written_files import tsv, write_all

from taser_jax.commands.pipelines import compare_parts
from taser_jax.commands.pipelines.compare_plan import FittedLength, Plan
from taser_jax.commands.train import TrainSummary
from taser_jax.data.collections.store import collection_directory, write_collection, write_queries
from taser_jax.data.text.wordpiece import WordPieceVocabulary
from taser_jax.retrieval.bm25 import Bm25Config
from taser_jax.retrieval.encoding import EncodeConfig
from taser_jax.storage.errors import ConfigError
from taser_jax.storage.records import Passage, Query


@pytest.mark.parametrize(
    ("frozen", "chunks", "step_seconds"),
    [
        (0, 1, 0.25),
        # One of three blocks is passed once and two three times: seven passes of nine.
        (1, 1, 0.25 * 9 / 7),
        # Encoded twice: nine passes, as many as without chunks and frozen blocks.
        (1, 2, 0.25),
    ],
)
def test_a_measurement_begins_again_and_counts_what_it_computed(
    tmp_path, monkeypatch, frozen, chunks, step_seconds
):
    left = tmp_path / "measured" / "checkpoint_6"
    left.mkdir(parents=True)
    # Training begins at 0 and ends at 5; the first encoding compiles.
    clock = iter((0.0, 5.0, 5.0, 12.0, 12.5))

    def train(**_: object) -> TrainSummary:
        assert not left.exists()
        left.mkdir(parents=True)
        return TrainSummary(1, {}, steps_per_second=4.0, seconds=5.0)

    def encode_rows(_, __, rows, **___) -> None:
        assert (rows[0], rows[-1], len(rows)) == (0, 1279, 64)

    monkeypatch.setattr(compare_parts, "time", mock.Mock(monotonic=clock.__next__))
    monkeypatch.setattr(compare_parts, "train", train)
    monkeypatch.setattr(compare_parts, "encode_rows", encode_rows)
    monkeypatch.setattr(compare_parts, "load_model", lambda _: mock.Mock())
    monkeypatch.setattr(compare_parts.TokenStore, "open", lambda _: mock.Mock(passages=range(1280)))
    training = tiny_training.training_config(train_steps=6)
    costs = compare_parts.measure(
        model_dir=str(tmp_path / "measured"),
        token_store="",
        model=tiny_training.model_config().with_transformer(num_layers=3),
        training=dataclasses.replace(training, train_from_block=frozen, num_chunks=chunks),
        encode=EncodeConfig(),
    )
    # Of five seconds, six steps took one and a half.
    expected = {"step_seconds": step_seconds, "start_seconds": 3.5, "encode_seconds": 10.0}
    assert costs == pytest.approx(expected)
    assert not left.exists()


def test_batches_are_encoded_in_chunks_that_fit():
    """A token of a trained block: 8 x 32 + 3 x 64 + 2 x 4 x 128 = 1,472 floats, 5,888 bytes."""
    sizes = {"embed_dim": 32, "mlp_dim": 64, "num_heads": 4, "head_dim": 8, "num_layers": 2}
    model = tiny_training.model_config().with_transformer(**sizes)
    sides = {"query": FittedLength(16, 0.0, 16), "passage": FittedLength(128, 0.0, 128)}
    batch = 2**12
    plan = Plan(batch, 1, 1e-3, frozen_blocks=0, rounds=1, folds=0)
    # A query of 16 tokens, whose bucket saves three quarters, and two passages of 128.
    gib = batch * (16 + 2 * 128) * 2 * 5888 / 2**30
    fitting = functools.partial(compare_parts.chunks_that_fit, model, sides=sides)
    # One and a half GiB are for all else.
    assert fitting(plan, gib=1.51 + gib) == 1
    assert fitting(plan, gib=1.49 + gib) == 2
    assert fitting(dataclasses.replace(plan, frozen_blocks=1), gib=1.51 + gib / 2) == 1
    assert fitting(plan, gib=1.49 + gib / 2) == 4
    # Passages of 64 tokens: 960 floats.
    short = dataclasses.replace(plan, passage_tokens=64)
    cut = gib * (16 + 2 * 64) * 960 / ((16 + 2 * 128) * 1472)
    assert fitting(short, gib=1.51 + cut) == 1
    assert fitting(short, gib=1.49 + cut) == 2
    # 7.5 GiB in chunks of half a GiB, which divide the batch: 15 do not divide 2,500.
    assert fitting(dataclasses.replace(plan, batch_size=2500), gib=1.0) == 20


@pytest.mark.parametrize(
    ("validation", "folds", "period", "patience"),
    # With folds the last checkpoint is kept: no other is validated.
    [(299, 0, 10, 0), (300, 0, 10, 2), (299, 2, 0, 0), (300, 2, 0, 0)],
)
def test_many_validation_queries_end_a_training_that_gets_no_better(
    validation, folds, period, patience
):
    training = tiny_training.training_config(train_steps=1)
    plan = Plan(8, 40, 1e-3, frozen_blocks=0, rounds=1, folds=folds)
    options = {"num_chunks": 1, "states_dir": None, "is_pretrained": True}
    loop = compare_parts.planned(training, plan, validation=validation, **options).loop
    assert (loop.train_steps, loop.evaluation_period, loop.patience) == (40, period, patience)
    assert loop.validates_first == (folds == 0)


def test_folds_that_cannot_be_are_refused():
    for allowed in (0, 2, 9):
        compare_parts.check_folds(allowed, queries=9)
    for folds in (1, 10):
        with pytest.raises(ConfigError, match=f"{folds} folds of 9"):
            compare_parts.check_folds(folds, queries=9)


def test_what_was_set_is_not_decided():
    assert compare_parts.filled(Bm25Config(b=0.5), k1=1.2, b=0.75) == Bm25Config(k1=1.2, b=0.5)


def test_a_collection_is_named_after_its_folders():
    assert compare_parts.collection_name(["data/Sci Facts/", "b-2"]) == "sci_facts_b_2"
    assert compare_parts.collection_name(["2024"]) == "c_2024"
    # What collections may be called: ASCII, and no longer than 200 bytes.
    assert compare_parts.collection_name(["Données", "文档"]) == "donn_es"
    assert collection_directory("data", compare_parts.collection_name(["文档"])).name == "c_"
    long = compare_parts.collection_name(["x" * 150] * 2)
    assert collection_directory("data", long).name == "x" * 150 + "_" + "x" * 39


def test_files_of_all_folders_have_their_checksums(tmp_path, monkeypatch):
    """But not what `taser compare .` writes into the folder."""
    files = {"a/qrels/test.tsv": "123", "b/p.tsv": "", "a/results/config.gin": "4", "b/.git/x": "5"}
    write_all(tmp_path, files)
    monkeypatch.chdir(tmp_path / "a")

    def checksums() -> dict[str, str]:
        return compare_parts.file_checksums([str(tmp_path / "a"), str(tmp_path / "b")], "results")

    before = checksums()
    assert before.keys() == {f"{tmp_path}/a/qrels/test.tsv", f"{tmp_path}/b/p.tsv"}
    assert checksums() == before
    # As long as before.
    write_all(tmp_path, {"a/qrels/test.tsv": "124"})
    assert checksums() != before


def test_lengths_have_room_for_prompts(tmp_path):
    """Five words and two special tokens are 7; with 10 tokens of a prompt 17, rounded up to 32."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a"]
    WordPieceVocabulary(words).save(str(tmp_path / "words"))
    write_collection(tmp_path, "c", [Passage("p", "a a a a a")])
    write_queries(tmp_path, "c", "t", "test", [Query("q", "a a a a a", "t", (0,))])
    where = {"data_dir": str(tmp_path), "collection": "c", "vocabulary": str(tmp_path / "words")}

    def tokens(**prompts: str) -> dict[str, int]:
        settings = json.dumps({"prompts": prompts})
        (tmp_path / "words" / "config_sentence_transformers.json").write_text(settings)
        fitted = compare_parts.fit_lengths(**where, own_length=None, given={})
        return {side: fit.tokens for side, fit in fitted.items()}

    assert tokens() == {"query": 16, "passage": 16}
    assert tokens(query="a " * 10) == {"query": 32, "passage": 16}
    assert tokens(passage="a " * 10) == {"query": 16, "passage": 32}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("flags : fpu avx512f avx512_bf16 amx_tile", True),
        ("Features : fp asimd bf16 sve", True),
        ("flags : fpu avx2", False),
        (FileNotFoundError(), False),
    ],
)
def test_linux_says_which_processor_multiplies_bfloat16(monkeypatch, words, expected):
    # JAX reads other files when it is first asked.
    jax.default_backend()
    with monkeypatch.context() as patched:
        patched.setattr(pathlib.Path, "read_text", mock.Mock(side_effect=[words]))
        assert compare_parts.multiplies_bfloat16() is expected


def test_a_task_whose_files_are_gone_is_gone_with_them(tmp_path):
    """Also where a run has prepared them that was killed, or that a file then ended."""
    questions = {"q1": ("red", "d1"), "q2": ("blue", "d2")}
    asked = [f"{task}.{split}" for task in ("first", "second") for split in ("train", "test")]
    passages = {"d1": "a red hill", "d2": "a blue lake"}
    folder = tsv(tmp_path / "own", passages, dict.fromkeys(asked, questions))

    def prepared():
        names = {"data_dir": str(tmp_path / "data"), "collection": "own"}
        return compare_parts.prepare_detected(directories=[str(folder)], checksums={}, **names)

    assert prepared().keys() == {"first", "second"}
    for path in folder.glob("first.*"):
        path.rename(folder / f"third{path.name.removeprefix('first')}")
    (folder / "second.train.queries.tsv").unlink()
    (folder / "second.train.qrels.tsv").unlink()
    after = prepared()
    assert after.keys() == {"second", "third"}
    assert after["second"] == ["test"]
