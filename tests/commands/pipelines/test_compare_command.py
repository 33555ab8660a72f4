"""`taser compare` on two small BEIR folders, run again, and its Gin file by other commands."""

from __future__ import annotations

import json
import pathlib
import random

import pytest
import tiny_training
from bert_checkpoints import write_with_vocabulary
from small_world import never, refused, succeed

from taser_jax import Retriever
from taser_jax.commands.pipelines import compare as workflow
from taser_jax.commands.pipelines import taser
from taser_jax.commands.pipelines.compare_plan import FittedLength
from taser_jax.commands.pipelines.stages import Stages
from taser_jax.commands.train import TrainSummary
from taser_jax.data.collections.store import QuerySet, list_tasks
from taser_jax.data.token_store.store import TokenStore

WORDS = ("river", "sea", "hill", "lake", "moor", "wood", "cliff", "marsh", "field", "shore")


def _beir(folder: pathlib.Path, seed: int) -> str:
    """Forty passages and as many questions, which repeat three of their words."""
    draw = random.Random(seed)
    (folder / "qrels").mkdir(parents=True)
    texts = [" ".join(draw.choices(WORDS, k=8)) + f" {seed}{n}" for n in range(40)]
    corpus = [{"_id": f"d{n}", "text": text, "title": ""} for n, text in enumerate(texts)]
    queries = [{"_id": f"q{n}", "text": " ".join(t.split()[-3:])} for n, t in enumerate(texts)]
    for name, lines in (("corpus", corpus), ("queries", queries)):
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / f"{name}.jsonl").write_text(text)
    for split, numbers in (("train", range(28)), ("test", range(28, 40))):
        rows = "".join(f"q{n}\td{n}\t1\n" for n in numbers)
        (folder / "qrels" / f"{split}.tsv").write_text("query-id\tcorpus-id\tscore\n" + rows)
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
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    folders = [_beir(tmp_path / "hills", 1), _beir(tmp_path / "seas", 2)]
    output = tmp_path / "out"
    arguments = [
        *("compare", *folders, f"--pretrained={_minilm_like(tmp_path / 'bert')}"),
        *(f"--out={output}", "--gin.TRAIN_STEPS=2", "--gin.BATCH_SIZE=8"),
        "--gin.VALIDATION_SHARE=0.3",
    ]
    succeed(*arguments)
    printed = capsys.readouterr()
    gin_file = output / "hills_seas.gin"
    written = gin_file.read_text()
    # Each decision is said with its line, and the lines are those of the file.
    said = [line.removeprefix("  ") for line in printed.err.splitlines()]
    for line in ("TRAIN_STEPS = 2", "ObjectiveConfig.temperature = 0.05", "VALIDATION_SHARE = 0.3"):
        assert line in written.splitlines()
        assert line in said
    assert "decided: lengths: 0.0% of query texts are cut" in printed.err
    assert "decided: about " in printed.err
    rows = ("BM25", "Pretrained, untrained", "TASER (mined negatives)", "TASER + BM25")
    assert all(row in (output / "table.md").read_text() for row in rows)
    assert "Difference from BM25" in printed.out
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
    model = json.loads((output / "taser-2" / "model" / "model.json").read_text())
    assert "mean" in json.dumps(model)
    assert "l2" in json.dumps(model)
    hits = Retriever.load(output, task="seas").search(["river sea 20"], k=2)
    assert len(hits[0]) == 2

    finished = Stages(output).finished()
    monkeypatch.setattr(workflow, "_measure", never(workflow._measure))
    monkeypatch.setattr(taser, "train", never(taser.train))
    succeed(*arguments)
    # What training says comes before the table.
    assert printed.out.endswith(capsys.readouterr().out)
    assert Stages(output).finished() == finished
    message = refused(capsys, *arguments, "--systems=taser,dpr")
    assert "systems was ['taser']" in message
    _repeat_each_step(output, gin_file, capsys)


# All but the preparation of data, in the order in which a step reads what another wrote.
_STEPS = ("train", "encode", "index", "search", "mine", "hybrid", "evaluate", "export", "ask")


def _repeat_each_step(
    output: pathlib.Path, gin_file: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each step by its command with the Gin file alone: the same once more, nothing replaced."""

    def files(folder: str) -> dict[str, bytes]:
        return {
            str(path.relative_to(output / folder)): path.read_bytes()
            for path in (output / folder).rglob("*")
            if path.is_file()
        }

    places = ("taser-2/model", "taser-2/embeddings", "taser-2/runs", "export")
    before, table = {place: files(place) for place in places}, (output / "table.md").read_text()
    for step in ("prepare beir", "tokenize", *_STEPS, "bm25"):
        capsys.readouterr()
        succeed(*step.split(), f"--gin_file={gin_file}")
        if step == "ask":
            lines = capsys.readouterr().out.splitlines()
            assert sum(line.startswith("? ") for line in lines) == 3
    for place in places:
        found = files(place)
        changed = {name for name, content in before[place].items() if found[name] != content}
        # The same settings are of another command, and training queries are encoded now, too.
        assert changed <= {"config.gin", "checksums.txt"}, place
    # Mining of the first round's model, and the fusion of the last.
    assert files("mined") == files("taser-1/negatives")
    assert files("hybrid") == files("taser-2-bm25/runs")
    # A row beside the others, which stay.
    repeated = (output / "table.md").read_text()
    assert "| TASER (repeated) |" in repeated
    rows = [line for line in table.splitlines() if line.startswith("| TASER (mined negatives) |")]
    assert rows[0] in repeated
    message = refused(capsys, "vocab", f"--gin_file={gin_file}")
    assert "a vocabulary of pretrained weights" in message


@pytest.mark.release
def test_a_budget_freezes_blocks_that_the_untrained_model_shares(tmp_path: pathlib.Path):
    # Of six blocks TASER's experts are in the third and the sixth, and three are frozen.
    pretrained = _minilm_like(tmp_path / "bert", num_layers=6)
    output = tmp_path / "out"
    succeed(
        *("compare", _beir(tmp_path / "hills", 1), f"--pretrained={pretrained}"),
        *(f"--out={output}", "--minutes=0.01", "--gin.BATCH_SIZE=8"),
        "--gin.VALIDATION_SHARE=0.3",
    )
    facts = json.loads((output / "taser-1" / "model" / "run.json").read_text())
    assert facts["train_from_block"] == 3
    assert "taser/ExpertConfig.blocks = [6]" in (output / "hills.gin").read_text()
    assert "Pretrained, untrained" in (output / "table.md").read_text()


def test_bad_arguments(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]):
    folder = _beir(tmp_path / "hills", 1)
    assert "taser compare DIRECTORY" in refused(capsys, "compare")
    output = f"--out={tmp_path / 'out'}"
    assert "taser, shared, dpr" in refused(capsys, "compare", folder, output, "--systems=bert")
    (tmp_path / "hills" / "qrels" / "train.tsv").unlink()
    message = refused(capsys, "compare", folder, output)
    assert "task hills has no train split" in message
    assert "different names" in refused(capsys, "compare", folder, folder, f"{output}2")


def test_a_killed_measurement_begins_again(tmp_path: pathlib.Path, monkeypatch):
    left = tmp_path / "measured" / "checkpoint_20"
    left.mkdir(parents=True)

    class Fake:
        root, pretrained, systems, passages = tmp_path, None, ["taser"], range(10)

        def run(self, *_: object) -> TrainSummary:
            assert not left.exists()
            left.mkdir(parents=True)
            return TrainSummary(1, {}, steps_per_second=4.0, seconds=5.0)

    monkeypatch.setattr(workflow, "read_model_config", lambda _: tiny_training.model_config())
    length = FittedLength(tokens=8, cut=0.0, mean=8.0, median=8)
    costs = workflow._measure(Fake(), {"query": length, "passage": length}, 8)
    assert costs.step_seconds == 0.25
    assert not left.exists()
