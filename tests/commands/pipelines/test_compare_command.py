"""`taser compare` on small BEIR folders: run again, without training queries, and by a budget."""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
import random
import types

import pytest
import tiny_training
from bert_checkpoints import write_with_vocabulary
from small_world import SmallWorld, figures, never, refused, succeed
from stage_calls import check_every_argument, noted
from written_files import beir

from taser_jax import Retriever
from taser_jax.commands.pipelines import compare_parts, compare_plan, compared_rows, taser
from taser_jax.commands.pipelines.compare_parts import collection_name, file_sizes, fit_lengths
from taser_jax.commands.pipelines.compare_plan import FittedLength, Plan
from taser_jax.commands.pipelines.cross_validation import rank_held_out
from taser_jax.commands.pipelines.stages import Stages
from taser_jax.commands.train import TrainSummary
from taser_jax.data.collections.store import QuerySet, list_tasks, write_collection, write_queries
from taser_jax.data.text.hugging_face import WordPieceVocabulary
from taser_jax.data.token_store.store import TokenStore
from taser_jax.retrieval.bm25 import Bm25Config
from taser_jax.retrieval.encoding import EncodeConfig
from taser_jax.retriever_parts import RetrieverParts, read_parts
from taser_jax.storage.records import Passage, Query

WORDS = ("river", "sea", "hill", "lake", "moor", "wood", "cliff", "marsh", "field", "shore")


def _beir(folder: pathlib.Path, seed: int, *, words: int = 8) -> str:
    """Forty passages and as many questions, which repeat three of their words."""
    draw = random.Random(seed)
    texts = [" ".join(draw.choices(WORDS, k=words)) + f" {seed}{n}" for n in range(40)]
    beir(
        folder,
        corpus={f"d{n}": text for n, text in enumerate(texts)},
        queries={f"q{n}": " ".join(text.split()[-3:]) for n, text in enumerate(texts)},
        train=[f"q{n} d{n} 1" for n in range(28)],
        test=[f"q{n} d{n} 1" for n in range(28, 40)],
    )
    return str(folder)


def _minilm_like(folder: pathlib.Path, *, num_layers: int = 3) -> str:
    """A tiny BERT with the files that say how it pools, normalises and prompts."""
    (folder / "words").mkdir(parents=True)
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS, *map(str, range(10))]
    pieces += [f"##{digit}" for digit in range(10)] + ["find", ":"]
    (folder / "words" / "vocab.txt").write_text("\n".join(pieces) + "\n")
    model = write_with_vocabulary(folder / "model", folder / "words", num_layers=num_layers)
    modules = [
        {"path": path, "type": f"sentence_transformers.models.{name}"}
        for path, name in (("", "Transformer"), ("1_Pooling", "Pooling"), ("2", "Normalize"))
    ]
    (model / "1_Pooling").mkdir()
    for name, value in (
        ("modules.json", modules),
        ("1_Pooling/config.json", {"pooling_mode_mean_tokens": True}),
        ("sentence_bert_config.json", {"max_seq_length": 32}),
        ("config_sentence_transformers.json", {"prompts": {"query": "find: "}}),
    ):
        (model / name).write_text(json.dumps(value))
    return str(model)


@pytest.mark.release
def test_two_folders_to_a_retriever(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    folders = [_beir(tmp_path / "hills", 1), _beir(tmp_path / "seas", 2)]
    output = tmp_path / "out"
    arguments = [
        *("compare", *folders, f"--pretrained={_minilm_like(tmp_path / 'bert')}"),
        *(f"--out={output}", "--gin.TRAIN_STEPS=2", "--gin.BATCH_SIZE=8", "--gin.FOLDS=2"),
        "--gin.VALIDATION_SHARE=0.3",
    ]
    succeed(*arguments)
    printed = capsys.readouterr()
    written = (output / "decided.gin").read_text().splitlines()
    # Each decision is said with its line, and the lines are those of the file.
    said = [line.removeprefix("  ") for line in printed.err.splitlines()]
    for line in ("TRAIN_STEPS = 2", "ObjectiveConfig.temperature = 0.05", "FOLDS = 2"):
        assert line in written
        assert line in said
    assert "decided: lengths: 0.0% of query texts are cut" in printed.err
    assert "decided: about " in printed.err
    rows = ["BM25", "Pretrained, untrained", "Shared (BM25 negatives)", "TASER (BM25 negatives)"]
    rows += ["Pretrained, untrained + BM25", "Shared + BM25", "TASER + BM25"]
    assert list(dict.fromkeys(line["system"] for line in figures(output))) == rows
    assert "Difference from Pretrained, untrained + BM25" in printed.out
    assert printed.out.count("\n? ") == 3
    for name in ("table.png", "table.csv", "export/sentence_transformers/modules.json"):
        assert (output / name).is_file()
    # One collection, a task each; what was missing was made of training queries.
    tasks = list_tasks(output / "data", "hills_seas")
    assert tasks == {name: ["train", "validation", "test"] for name in ("hills", "seas")}
    test = QuerySet.open(output / "data", "hills_seas", "hills", "test")
    assert sorted(query.id for query in test) == sorted(f"q{n}" for n in range(28, 40))
    # Pooling, normalisation and prompt are those of the pretrained directory.
    settings = TokenStore.open(output / "tokens").metadata
    assert all(entry.prompt for entry in settings.queries)
    assert settings.titles == "join"
    model = json.loads((output / "taser-1" / "model" / "model.json").read_text())
    assert "mean" in json.dumps(model)
    assert "l2" in json.dumps(model)
    _check_choice(output, printed.out)
    hits = Retriever.load(output, task="seas").search(["river sea 20"], k=2)
    assert len(hits[0]) == 2

    finished = Stages(output).finished()
    monkeypatch.setattr(compared_rows, "train", never(compared_rows.train))
    monkeypatch.setattr(taser, "train", never(taser.train))
    succeed(*arguments)
    # What training says comes before the table.
    assert printed.out.endswith(capsys.readouterr().out)
    assert Stages(output).finished() == finished
    with open(pathlib.Path(folders[0]) / "corpus.jsonl", "a") as file:
        file.write("\n")
    assert "sizes" in refused(capsys, *arguments)


def _check_choice(output: pathlib.Path, printed: str) -> None:
    """The choice is by queries that a fold's model has not seen, and never by test queries."""
    chosen = json.loads((output / "recommended.json").read_text())
    assert f"\nRecommended: {chosen['row']}\n" in printed
    held: list[str] = []
    for fold in (output / "folds").iterdir():
        ranked = json.loads((fold / "queries.json").read_text())["hills"]
        lines = (fold / "negatives" / "hills.train.jsonl").read_text().splitlines()
        dropped = {line["query_id"] for line in map(json.loads, lines) if line.get("dropped")}
        assert set(ranked) == dropped
        assert all(not line["rows"] for line in map(json.loads, lines) if line.get("dropped"))
        run = (fold / "taser" / "hills.train.trec").read_text().splitlines()
        assert {line.split()[0] for line in run} == dropped
        held += ranked
    train = [query.id for query in QuerySet.open(output / "data", "hills_seas", "hills", "train")]
    assert sorted(held) == sorted(train)
    assert chosen["queries"] == sum(
        len(QuerySet.open(output / "data", "hills_seas", task, "train"))
        for task in ("hills", "seas")
    )
    assert set(chosen["gains"]) == {
        "Pretrained, untrained",
        *(f"{name}{hybrid}" for name in ("Shared", "TASER") for hybrid in ("", " + BM25")),
    }
    if chosen["row"].endswith(" + BM25"):
        assert chosen["alpha"] > 0


@pytest.mark.release
def test_without_training_queries_the_untrained_model_is_compared(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
):
    folder = pathlib.Path(_beir(tmp_path / "hills", 1))
    (folder / "qrels" / "train.tsv").unlink()
    output = tmp_path / "out"
    succeed(
        *("compare", str(folder), f"--pretrained={_minilm_like(tmp_path / 'bert')}"),
        f"--out={output}",
    )
    rows = {line["system"]: line for line in figures(output)}
    assert list(rows) == ["BM25", "Pretrained, untrained", "Pretrained, untrained + BM25"]
    # Cosines and BM25's scores have the same range: α is the stated share.
    assert rows["Pretrained, untrained + BM25"]["alpha"] == "0.5 (default)"
    assert "Recommended: Pretrained, untrained + BM25" in capsys.readouterr().out
    assert (output / "export" / "sentence_transformers" / "modules.json").is_file()


def test_without_questions_an_index_is_left(tmp_path: pathlib.Path):
    parts = taser.answer(
        (), root=tmp_path, folder=tmp_path / "row", data_dir=str(tmp_path), collection="hills"
    )
    for folder in (parts.model_dir, parts.index_dir):
        pathlib.Path(folder).mkdir(parents=True)
    assert read_parts(tmp_path) == parts


@pytest.mark.release
def test_queries_are_made_and_the_whole_passages_are_searched(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
):
    draw = random.Random(1)
    folder, output = tmp_path / "notes", tmp_path / "out"
    folder.mkdir()
    for number in range(60):
        sentences = [" ".join(draw.choices(WORDS, k=5)) + f" {number}." for _ in range(3)]
        (folder / f"{number}.txt").write_text(" ".join(one.capitalize() for one in sentences))
    succeed(
        *("compare", str(folder), f"--pretrained={_minilm_like(tmp_path / 'bert')}"),
        *(f"--out={output}", "--queries=make", "--gin.TRAIN_STEPS=2", "--gin.BATCH_SIZE=8"),
        "--gin.FOLDS=2",
    )
    assert "Recommended: " in capsys.readouterr().out
    retriever = Retriever.load(output)
    (hits,) = retriever.search(["river sea hill"], k=60, hybrid=retriever.has_hybrid)
    texts = {hit.passage.text for hit in hits}
    assert texts == {path.read_text() for path in folder.iterdir()}
    with_own = _beir(tmp_path / "hills", 1)
    own = f"--out={tmp_path / 'own'}"
    problem = refused(capsys, "compare", with_own, own, "--queries=make")
    assert "there are queries of hills" in problem
    none = f"--out={tmp_path / 'none'}"
    problem = refused(capsys, "compare", str(folder), none, "--queries=mine")
    assert "write --queries=make" in problem


@pytest.mark.release
def test_a_budget_freezes_blocks_that_the_untrained_model_shares_and_cuts_passages(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    # Of six blocks TASER's experts are in the third and the sixth, and five are frozen.
    monkeypatch.setattr(compare_plan, "_SHORTEST", 16)
    pretrained = _minilm_like(tmp_path / "bert", num_layers=6)
    output = tmp_path / "out"
    arguments = [
        *("compare", _beir(tmp_path / "hills", 1, words=16), f"--pretrained={pretrained}"),
        *(f"--out={output}", "--minutes=0.01", "--gin.BATCH_SIZE=8"),
        "--gin.VALIDATION_SHARE=0.3",
    ]
    succeed(*arguments)
    printed = capsys.readouterr().err
    assert "0.0% of passage texts are cut" in printed
    assert "100.0% of passage texts are cut" in printed
    assert "even the shortest comparison takes longer than 0.01 minutes" in printed
    for folder, length in (("tokens", 32), ("tokens-cut", 16)):
        assert TokenStore.open(output / folder).metadata.passage_length == length
    facts = json.loads((output / "taser-1" / "model" / "run.json").read_text())
    assert facts["train_from_block"] == 5
    model = json.loads((output / "taser-1" / "model" / "model.json").read_text())
    assert '"blocks": [6]' in json.dumps(model)
    assert "FOLDS = 2" in (output / "decided.gin").read_text()
    assert "Pretrained, untrained" in (output / "table.md").read_text()
    # A fold's queries are ranked on the frozen blocks' states as on tokens, but for bfloat16.
    fold, name = output / "folds" / "0", "hills.train.trec"
    rank_held_out(
        model_dir=str(fold / "models" / "taser"),
        token_store=str(output / "tokens-cut"),
        data_dir=str(output / "data"),
        collection="hills",
        lists_dirs=[str(fold / "bm25"), str(fold / "pretrained-untrained")],
        output_dir=str(tmp_path / "plain"),
        k=100,
    )
    on_states, plain = (
        {tuple(line.split()[0:3:2]): float(line.split()[4]) for line in path.open()}
        for path in (fold / "taser" / name, tmp_path / "plain" / name)
    )
    assert on_states == pytest.approx(plain, abs=0.02)
    assert on_states != plain
    # What has finished is not run again.
    succeed(*arguments)
    assert Retriever.load(output, task="hills").search(["river sea 20"], k=2)


def test_bad_arguments(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]):
    folder = _beir(tmp_path / "hills", 1)
    assert "taser compare DIRECTORY" in refused(capsys, "compare")
    output = f"--out={tmp_path / 'out'}"
    assert "shared, taser, dpr" in refused(capsys, "compare", folder, output, "--systems=bert")
    assert "the same name" in refused(capsys, "compare", folder, folder, f"{output}2")
    (tmp_path / "hills" / "qrels" / "train.tsv").unlink()
    message = refused(capsys, "compare", folder, output)
    assert "hills: no train split, and nothing is pretrained" in message
    other = pathlib.Path(_beir(tmp_path / "moors", 1))
    (other / "qrels" / "test.tsv").unlink()
    message = refused(capsys, "compare", str(other), f"{output}3")
    assert "task moors has no test split" in message


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
    tmp_path: pathlib.Path, monkeypatch, frozen: int, chunks: int, step_seconds: float
):
    left = tmp_path / "measured" / "checkpoint_6"
    left.mkdir(parents=True)
    clock, encodings = [0.0], [7.0, 0.5]

    def train(**_: object) -> TrainSummary:
        assert not left.exists()
        left.mkdir(parents=True)
        clock[0] += 5.0
        return TrainSummary(1, {}, steps_per_second=4.0, seconds=5.0)

    def encode_rows(_, __, rows, **___) -> None:
        assert (rows[0], rows[-1], len(rows)) == (0, 1279, 64)
        clock[0] += encodings.pop(0)

    monkeypatch.setattr(compare_parts, "time", types.SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(compare_parts, "train", train)
    monkeypatch.setattr(compare_parts, "encode_rows", encode_rows)
    loaded = types.SimpleNamespace(encode_fn=lambda role: None)
    monkeypatch.setattr(compare_parts, "load_model", lambda _: loaded)
    store = types.SimpleNamespace(passages=range(1280))
    monkeypatch.setattr(compare_parts.TokenStore, "open", lambda _: store)
    costs = compare_parts.measure(
        model_dir=str(tmp_path / "measured"),
        token_store="",
        model=tiny_training.model_config().with_transformer(num_layers=3),
        training=dataclasses.replace(
            tiny_training.training_config(train_steps=6),
            train_from_block=frozen,
            num_chunks=chunks,
        ),
        encode=EncodeConfig(),
    )
    assert costs == pytest.approx(
        # Of five seconds, six steps took one and a half; the first encoding compiles.
        {"step_seconds": step_seconds, "start_seconds": 3.5, "encode_seconds": 10.0}
    )
    assert not left.exists()


def test_batches_are_encoded_in_chunks_that_fit():
    """A token of a trained block: 8 x 32 + 3 x 64 + 2 x 4 x 128 = 1,472 floats, 5,888 bytes."""
    sizes = {"embed_dim": 32, "mlp_dim": 64, "num_heads": 4, "head_dim": 8, "num_layers": 2}
    model = tiny_training.model_config().with_transformer(**sizes)
    sides = {
        "query": FittedLength(16, 0.0, 16.0, 16),
        "passage": FittedLength(128, 0.0, 128.0, 128),
    }
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


def test_what_was_set_is_not_decided():
    assert compare_parts.filled(Bm25Config(b=0.5), k1=1.2, b=0.75) == Bm25Config(k1=1.2, b=0.5)


_ALPHAS = {"Shared": 0.5, "TASER": 0.5, "Pretrained, untrained": 0.5}
_LENGTH = {"tokens": 16, "cut": 0.0, "mean": 9.0, "median": 8}
_OUTPUTS = {
    "prepare_detected": {"hills": ["train", "validation", "test"]},
    "fit_lengths": {"query": _LENGTH, "passage": _LENGTH},
    "measure": {"step_seconds": 1.0, "start_seconds": 1.0, "encode_seconds": 1.0},
    "choose_bm25": 1,
    "choose": {"row": "TASER", "alphas": _ALPHAS, "gains": {"TASER": [0.1, 0.01]}, "queries": 36},
}


@pytest.mark.parametrize("pretrained", [True, False], ids=["pretrained", "scratch"])
def test_every_argument_of_every_stage_counts(
    small_world: SmallWorld,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    pretrained: bool,
):
    """The stages of `compare` without their work; what is set reaches all of them."""
    output, folder = tmp_path / "out", _beir(tmp_path / "hills", 1)
    flags = [f"--pretrained={_minilm_like(tmp_path / 'bert')}"] if pretrained else []
    tokens = TokenStore.open(small_world.token_store)
    queries = [Query(id=f"{n}", text=f"{n}", task="hills") for n in range(40)]
    settings = tmp_path / "own.gin"
    settings.write_text("ObjectiveConfig.temperature = 0.1\nOptimizerConfig.weight_decay = 0.5\n")
    with monkeypatch.context() as patched:
        patched.setattr(compared_rows.PassageStore, "open", lambda *_: range(40))
        patched.setattr(compared_rows.TokenStore, "open", lambda _: tokens)
        patched.setattr(compared_rows.QuerySet, "open", lambda *_, **__: queries)
        patched.setattr(compared_rows, "print_table", lambda *_, **__: None)
        parts = RetrieverParts(f"{output}/taser-1/model", "index", "data", "hills")
        patched.setattr(compared_rows, "answer", lambda *_, **__: parts)
        calls = noted(patched, works=False, outputs=_OUTPUTS)
        succeed("compare", folder, f"--out={output}", f"--gin_file={settings}", *flags)
    assert {"prepare_detected", "measure", "train", "choose", "export_model"} < calls.keys()
    assert ({"hold_out", "rank_held_out", "import_model"} <= calls.keys()) == pretrained
    for path in (output / "stages").glob("*-train.json"):
        inputs = json.loads(path.read_text())["inputs"]
        if "training.objective.temperature" in inputs:
            assert inputs["training.objective.temperature"] == 0.1
            assert inputs["training.optimizer.weight_decay"] == 0.5
            assert inputs["training.loop.validates_first"] == pretrained
    check_every_argument(output, calls)


def test_a_collection_without_queries_is_encoded_and_indexed(
    small_world: SmallWorld, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    """The stages without their work: nothing is trained, searched or judged."""
    output, tokens = tmp_path / "out", TokenStore.open(small_world.token_store)
    parts = RetrieverParts(f"{output}/pretrained-untrained/model", "index", "data", "hills")
    monkeypatch.setattr(compared_rows.PassageStore, "open", lambda *_: range(40))
    monkeypatch.setattr(compared_rows.TokenStore, "open", lambda _: tokens)
    monkeypatch.setattr(compared_rows, "answer", lambda *_, **__: parts)
    noted(monkeypatch, works=False, outputs=_OUTPUTS | {"prepare_detected": {}})
    pretrained = f"--pretrained={_minilm_like(tmp_path / 'bert')}"
    succeed("compare", _beir(tmp_path / "hills", 1), f"--out={output}", pretrained)
    untrained = ("import", "encode", "index")
    assert set(Stages(output).finished()) == {
        *("prepare", "lengths", "tokenize", "export"),
        *(f"pretrained-untrained-{stage}" for stage in untrained),
    }
    tokenized = Stages(output).record("tokenize").inputs
    assert (tokenized["mixture_or_task"], tokenized["collection"]) == (None, "hills")


def test_a_collection_is_named_after_its_folders():
    assert collection_name(["data/Sci Facts/", "b-2"]) == "sci_facts_b_2"
    assert collection_name(["2024"]) == "c_2024"


def test_files_of_all_folders_have_their_sizes(tmp_path):
    (tmp_path / "a" / "qrels").mkdir(parents=True)
    (tmp_path / "a" / "qrels" / "test.tsv").write_text("123")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "p.tsv").write_text("")
    found = file_sizes([str(tmp_path / "a"), str(tmp_path / "b")])
    assert found == {f"{tmp_path}/a/qrels/test.tsv": 3, f"{tmp_path}/b/p.tsv": 0}


def test_lengths_have_room_for_prompts(tmp_path):
    """Five words and two special tokens are 7; with 10 tokens of a prompt 17, rounded up to 32."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a"]
    WordPieceVocabulary(words).save(str(tmp_path / "words"))
    write_collection(tmp_path, "c", [Passage("p", "a a a a a")])
    write_queries(tmp_path, "c", "t", "test", [Query("q", "a a a a a", "t", (0,))])

    def tokens(**prompts: str) -> dict[str, int]:
        settings = json.dumps({"prompts": prompts})
        (tmp_path / "words" / "config_sentence_transformers.json").write_text(settings)
        fitted = fit_lengths(
            data_dir=str(tmp_path),
            collection="c",
            vocabulary=str(tmp_path / "words"),
            own_length=None,
            given={},
        )
        return {side: fit.tokens for side, fit in fitted.items()}

    assert tokens() == {"query": 16, "passage": 16}
    assert tokens(query="a " * 10) == {"query": 32, "passage": 16}
    assert tokens(passage="a " * 10) == {"query": 16, "passage": 32}
