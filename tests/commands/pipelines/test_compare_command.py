"""`taser compare` on small BEIR folders: run again, without training queries, and by a budget."""

import functools
import json
import math
import pathlib
import random
import tempfile
from unittest import mock

import pytest
from bert_checkpoints import write_modules, write_with_vocabulary
from small_world import figures, gin, never, refused, succeed
from stage_calls import check_every_argument, without_work
from written_files import beir, run_of, write_all

from taser_jax import Retriever
from taser_jax.commands.pipelines import compare, compared_rows, retrieval_stages
from taser_jax.commands.pipelines.cross_validation import rank_held_out
from taser_jax.commands.pipelines.stages import Stages
from taser_jax.data.collections.store import PassageStore, QuerySet, list_tasks
from taser_jax.data.token_store.store import TokenStore
from taser_jax.storage.records import Query

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
    """A tiny BERT, as a flag, with the files that say how it pools, normalises and prompts."""
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS, *map(str, range(10))]
    pieces += [f"##{digit}" for digit in range(10)] + ["find", ":"]
    model = write_with_vocabulary(folder, pieces, num_layers=num_layers)
    write_modules(model, max_length=32, prompts={"query": "find: "})
    return f"--pretrained={model}"


@pytest.mark.release
def test_two_folders_to_a_retriever(tmp_path, monkeypatch, capsys):
    folders = [_beir(tmp_path / "hills", 1), _beir(tmp_path / "seas", 2)]
    output = tmp_path / "out"
    arguments = ["compare", *folders, _minilm_like(tmp_path / "bert"), f"--out={output}"]
    arguments += gin(TRAIN_STEPS=2, BATCH_SIZE=8, FOLDS=2, VALIDATION_SHARE=0.3)
    succeed(*arguments)
    printed = capsys.readouterr()
    # Each decision is said with its line, and the lines are those of the file.
    written = (output / "decided.gin").read_text().splitlines()
    said = [line.removeprefix("  ") for line in printed.err.splitlines()]
    for line in ("TRAIN_STEPS = 2", "ObjectiveConfig.temperature = 0.05", "FOLDS = 2"):
        assert line in written
        assert line in said
    rows = ["BM25", "Pretrained, untrained", "Shared (BM25 negatives)", "TASER (BM25 negatives)"]
    rows += ["Pretrained, untrained + BM25", "Shared + BM25", "TASER + BM25"]
    assert list(dict.fromkeys(line["system"] for line in figures(output))) == rows
    assert "Difference from Pretrained, untrained + BM25" in printed.out
    assert printed.out.count("\n? ") == 3
    assert (output / "export" / "sentence_transformers" / "modules.json").is_file()
    # One collection, a task each; what was missing was made of training queries.
    tasks = list_tasks(output / "data", "hills_seas")
    assert tasks == {name: ["train", "validation", "test"] for name in ("hills", "seas")}
    # Pooling, normalisation and prompt are those of the pretrained directory.
    settings = TokenStore.open(output / "tokens").metadata
    assert all(entry.prompt for entry in settings.queries)
    assert settings.titles == "join"
    model = (output / "taser-1" / "model" / "model.json").read_text()
    assert '"mean"' in model
    assert '"l2"' in model
    _check_choice(output, printed.out)
    assert len(Retriever.load(output, task="seas").search(["river sea 20"], k=2)[0]) == 2

    finished = Stages(output).finished()
    monkeypatch.setattr(retrieval_stages, "train", never(retrieval_stages.train))
    succeed(*arguments)
    # What training says comes before the table.
    assert printed.out.endswith(capsys.readouterr().out)
    assert Stages(output).finished() == finished
    with open(pathlib.Path(folders[0]) / "corpus.jsonl", "a") as file:
        file.write("\n")
    assert "checksums" in refused(capsys, *arguments)


def _check_choice(output: pathlib.Path, printed: str) -> None:
    """The choice is by queries that a fold's model has not seen, and never by test queries."""
    chosen = json.loads((output / "recommended.json").read_text())
    assert f"\nRecommended: {chosen['row']}\n" in printed
    for fold in (output / "folds").iterdir():
        ranked = json.loads((fold / "fold.json").read_text())["queries"]["hills"]
        assert run_of(fold / "taser" / "hills.train.trec").keys() == set(ranked)
    counts = [
        len(QuerySet.open(output / "data", "hills_seas", task, "train"))
        for task in ("hills", "seas")
    ]
    assert chosen["queries"] == sum(counts)
    trained = {f"{name}{hybrid}" for name in ("Shared", "TASER") for hybrid in ("", " + BM25")}
    assert set(chosen["gains"]) == {"Pretrained, untrained", *trained}


@pytest.mark.release
def test_without_training_queries_the_untrained_model_is_compared(tmp_path, capsys):
    folder = pathlib.Path(_beir(tmp_path / "hills", 1))
    (folder / "qrels" / "train.tsv").unlink()
    output = tmp_path / "out"
    succeed("compare", str(folder), _minilm_like(tmp_path / "bert"), f"--out={output}")
    rows = {line["system"]: line for line in figures(output)}
    assert list(rows) == ["BM25", "Pretrained, untrained", "Pretrained, untrained + BM25"]
    # Cosines and BM25's scores have the same range: α is the stated share.
    assert rows["Pretrained, untrained + BM25"]["alpha"] == "0.5 (default)"
    assert "Recommended: Pretrained, untrained + BM25" in capsys.readouterr().out
    assert (output / "export" / "sentence_transformers" / "modules.json").is_file()


@pytest.mark.release
def test_queries_are_made_and_the_whole_passages_are_searched(tmp_path, capsys):
    draw = random.Random(1)
    output, files = tmp_path / "out", {}
    for number in range(60):
        sentences = [" ".join(draw.choices(WORDS, k=5)).capitalize() for _ in range(3)]
        files[f"{number}.txt"] = " ".join(f"{sentence} {number}." for sentence in sentences)
    folder = write_all(tmp_path / "notes", files)
    flags = ["--queries=make", *gin(TRAIN_STEPS=2, BATCH_SIZE=8, FOLDS=2), f"--out={output}"]
    succeed("compare", str(folder), _minilm_like(tmp_path / "bert"), *flags)
    assert "Recommended: " in capsys.readouterr().out
    retriever = Retriever.load(output)
    (hits,) = retriever.search(["river sea hill"], k=60, hybrid=retriever.has_hybrid)
    assert {hit.passage.text for hit in hits} == set(files.values())


@pytest.mark.release
def test_a_budget_freezes_blocks_that_the_untrained_model_shares_and_cuts_passages(
    tmp_path, monkeypatch, capsys
):
    # Of six blocks TASER's experts are in the third and the sixth, and five are frozen.
    monkeypatch.setattr(compare.compare_plan, "_SHORTEST", 16)
    monkeypatch.setattr(compare.compare_parts, "multiplies_bfloat16", lambda: True)
    folder, output = _beir(tmp_path / "hills", 1, words=16), tmp_path / "out"
    flags = ["--minutes=0.01", *gin(BATCH_SIZE=8, VALIDATION_SHARE=0.3), f"--out={output}"]
    arguments = ["compare", folder, _minilm_like(tmp_path / "bert", num_layers=6), *flags]
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
    assert '"dtype": "bfloat16"' in json.dumps(model)
    decided = (output / "decided.gin").read_text()
    assert "FOLDS = 2" in decided
    assert "BertConfig.dtype = 'bfloat16'" in decided
    assert "Pretrained, untrained" in (output / "table.md").read_text()
    # A fold's queries are ranked on the frozen blocks' states as on tokens.
    fold, name = output / "folds" / "0", "hills.train.trec"
    rank_held_out(
        model_dir=str(fold / "models" / "taser"),
        token_store=str(output / "tokens-cut"),
        data_dir=str(output / "data"),
        collection="hills",
        fold_dir=str(fold),
        output_dir=str(tmp_path / "plain"),
        k=100,
    )
    on_states, plain = run_of(fold / "taser" / name), run_of(tmp_path / "plain" / name)
    assert on_states.keys() == plain.keys()
    for query, scores in plain.items():
        assert on_states[query] == pytest.approx(scores, abs=0.02)
    assert any((output / "states" / "queries").rglob("states.npy"))
    # What has finished is not run again.
    succeed(*arguments)
    assert Retriever.load(output, task="hills").search(["river sea 20"], k=2)


def test_bad_arguments(tmp_path, capsys):
    def told(*arguments: str) -> str:
        return refused(capsys, "compare", *arguments, f"--out={tempfile.mkdtemp(dir=tmp_path)}")

    folder, other = _beir(tmp_path / "hills", 1), _beir(tmp_path / "moors", 1)
    assert "taser compare DIRECTORY" in refused(capsys, "compare")
    assert "dpr, shared, taser" in told(folder, "--systems=bert")
    misspelt = "--gin.TASK_FEATURE_LENGTHS={'querry': 40}"
    assert "no length of querry" in told(folder, misspelt)
    assert "the same name" in told(folder, folder)
    assert "there are queries of hills" in told(folder, "--queries=make")
    notes = write_all(tmp_path / "notes", {"a.txt": "A river.", "b.txt": "A sea."})
    assert "write --queries=make" in told(str(notes), "--queries=mine")
    for budget in ("--memory=0", "--minutes=-1"):
        assert "expected: a number above 0" in told(folder, budget)
    assert "no task has a validation split" in told(folder, "--gin.VALIDATION_SHARE=0.0")
    files = {"passages.tsv": "1\tA river.\triver\n", "faq.test.qa.csv": "what?\t['river']\n"}
    answered, bert = write_all(tmp_path / "faq", files), _minilm_like(tmp_path / "bert")
    message = told(str(answered), bert)
    assert "task 'faq': no test query has a positive" in message
    assert "EvaluationConfig.judge=answers" in message
    (tmp_path / "hills" / "qrels" / "train.tsv").unlink()
    assert "hills: no train split, and nothing is pretrained" in told(folder)
    (tmp_path / "moors" / "qrels" / "test.tsv").unlink()
    assert "task moors has no test split" in told(other)


def test_a_text_that_two_tasks_ask_is_one_query_of_the_folds(monkeypatch):
    texts = {"a": ["what?", "where?"], "b": ["what?"], "c": ["how?"]}
    splits = {"a": ["train", "test"], "b": ["train"], "c": ["test"]}
    monkeypatch.setattr(
        QuerySet, "open", lambda task, split: [Query(text, text, task) for text in texts[task]]
    )
    run = mock.Mock(splits=splits, data={})
    run.tasks_with = functools.partial(compare._Run.tasks_with, run)
    assert compare._Run._distinct_queries(run, "train") == 2


_ALPHAS = {"Shared": 0.5, "TASER": 0.5, "own": 0.5, "Pretrained, untrained": 0.5}
_LENGTH = {"tokens": 16, "cut": 0.0, "median": 8}
_OUTPUTS = {
    "prepare_detected": {"hills": ["train", "validation", "test"]},
    "fit_lengths": {"query": _LENGTH, "passage": _LENGTH},
    "measure": {"step_seconds": 1.0, "start_seconds": 1.0, "encode_seconds": 1.0},
    "choose_bm25": 1,
    "choose": {
        "row": "TASER",
        "alphas": _ALPHAS,
        # A task of one query has no standard error.
        "gains": {"TASER": [0.1, 0.01], "Shared": [0.1, math.inf]},
        "queries": 20,
    },
}


@pytest.mark.parametrize("pretrained", [True, False], ids=["pretrained", "scratch"])
def test_every_argument_of_every_stage_counts(
    small_world, tmp_path, monkeypatch, capsys, pretrained
):
    """The stages of `compare` without their work; what is set reaches every training."""
    output, folder = tmp_path / "out", _beir(tmp_path / "hills", 1)
    flags = [_minilm_like(tmp_path / "bert")] if pretrained else []
    tokens = TokenStore.open(small_world.token_store)
    queries = [Query(id=f"{n}", text=f"{n}", task="hills", positives=(n,)) for n in range(40)]
    settings = tmp_path / "own.gin"
    lines = ["ObjectiveConfig.temperature = 0.1", "OptimizerConfig.weight_decay = 0.5"]
    lines += ["OptimizerConfig.learning_rate = 3e-4", "OptimizerConfig.warmup_steps = 7"]
    lines += [
        "first/MiningConfig.depth = 20",
        *["TrainingConfig.train_from_block = 2"] * pretrained,
    ]
    candidates = ["shared", "taser", "own"]
    systems = ", ".join(f"{name!r}: @{name}/System()" for name in candidates)
    lines += [f"compare.candidates = {{{systems}}}", "own/System.model = @dpr/DualEncoderConfig()"]
    settings.write_text("\n".join(lines) + "\n")
    flags.append(f"--systems={','.join(candidates)}")
    with monkeypatch.context() as patched:
        patched.setattr(PassageStore, "open", lambda *_, **__: range(40))
        patched.setattr(TokenStore, "open", lambda _: tokens)
        patched.setattr(QuerySet, "open", lambda *_, **__: queries)
        patched.setattr(compared_rows, "print_table", lambda *_, **__: None)
        patched.setattr(compared_rows, "ask", lambda *_, **__: None)
        row = "TASER + BM25" if pretrained else "TASER"
        calls = without_work(patched, _OUTPUTS | {"choose": {**_OUTPUTS["choose"], "row": row}})
        succeed("compare", folder, f"--out={output}", f"--gin_file={settings}", *flags)
    finished = Stages(output).finished()
    assert {"prepare", "measure", "shared-1-train", "own-1-train", "choose", "export"} < finished
    folds = {"fold-0", "fold-1-taser-rank", "pretrained-untrained-import"}
    assert (folds <= finished) == pretrained
    for path in (output / "stages").glob("*-train.json"):
        inputs = json.loads(path.read_text())["inputs"]
        if "training.objective.temperature" in inputs:
            assert inputs["training.objective.temperature"] == 0.1
            assert inputs["training.optimizer.weight_decay"] == 0.5
            assert inputs["training.optimizer.learning_rate"] == 3e-4
            assert inputs["training.optimizer.warmup_steps"] == 7
            assert (inputs["training.loop.evaluation_period"] == 0) == pretrained
            assert inputs["training.train_from_block"] == 2 * pretrained
    assert Stages(output).record("bm25-mine").inputs["config.depth"] == 20
    # The card of what is exported has no figures of a hybrid.
    assert Stages(output).record("export").inputs["system"].startswith("TASER (")
    frozen = f"TrainingConfig.train_from_block = {2 * pretrained}\n"
    assert frozen in (output / "decided.gin").read_text()
    assert "differences below ± 2.0 points" in capsys.readouterr().err
    recommended = (output / "recommended.json").read_text()
    assert json.loads(recommended, parse_constant=pytest.fail)["gains"]["Shared"] == [0.1, None]
    check_every_argument(output, calls)


def test_a_collection_without_queries_is_encoded_and_indexed(
    small_world, tmp_path, monkeypatch, capsys
):
    """The stages without their work: nothing is trained, searched or judged."""
    output, tokens = tmp_path / "out", TokenStore.open(small_world.token_store)
    monkeypatch.setattr(PassageStore, "open", lambda *_, **__: range(40))
    monkeypatch.setattr(TokenStore, "open", lambda _: tokens)
    without_work(monkeypatch, _OUTPUTS | {"prepare_detected": {}})
    flags = [_minilm_like(tmp_path / "bert"), f"--out={output}"]
    folder = _beir(tmp_path / "hills", 1)
    for written in (folder, f"{folder}/"):
        succeed("compare", written, *flags)
    assert f"under {output}: index, export." in capsys.readouterr().out
    assert Stages(output).finished() == {
        *("prepare", "lengths", "tokenize", "export"),
        *(f"pretrained-untrained-{stage}" for stage in ("import", "encode", "index")),
    }
    left = json.loads((output / "retriever.json").read_text())
    assert left["model_dir"] == "pretrained-untrained/model"
    # A run that is refused leaves the record of the one before.
    records = [output / name for name in ("config.gin", "decided.gin")]
    before = [path.read_text() for path in records]
    lengths = "--gin.TASK_FEATURE_LENGTHS={'query': 8, 'passage': 8}"
    assert "given" in refused(capsys, "compare", folder, *flags, lengths)
    assert [path.read_text() for path in records] == before
    tokenized = Stages(output).record("tokenize").inputs
    assert (tokenized["mixture_or_task"], tokenized["collection"]) == (None, "hills")
    # A file that has changed, if not in size, is another input; a hidden one is none.
    write_all(tmp_path / "hills", {".DS_Store": "x"})
    succeed("compare", folder, *flags)
    qrels = tmp_path / "hills" / "qrels" / "test.tsv"
    qrels.write_text(qrels.read_text().replace("\t1\n", "\t0\n", 1))
    assert "test.tsv" in refused(capsys, "compare", folder, *flags)
