"""A project: two files written, and every command run with one of them alone."""

import pathlib
import re

import pytest
import recipes
from small_world import figures, gin, refused, succeed

from taser_jax.cli import configuration
from taser_jax.cli import main as cli
from taser_jax.cli.command_table import COMMANDS, configurable_names, configurables_of, load
from taser_jax.data.collections.store import list_tasks

TOPICS = ("river", "castle", "violin", "comet", "glacier", "beetle", "harbour", "orchard")
SPLITS = {"train": range(5), "validation": range(5, 6), "test": range(6, 8)}

# What a user would change in the project's file, here so that it takes seconds.
SMALLER = """
VOCAB_SIZE = 150
TASK_FEATURE_LENGTHS = {'query': 16, 'passage': 24}
BertConfig.num_layers = 3
BertConfig.embed_dim = 16
BertConfig.num_heads = 2
BertConfig.head_dim = 8
BertConfig.mlp_dim = 32
ValidationConfig.pool = None
ValidationConfig.num_batches = 0
BATCH_SIZE = 16
TRAIN_STEPS = 3
WARMUP_STEPS = 1
"""


def write_files(folder: pathlib.Path) -> None:
    """Two tasks over 64 passages: each asks for the passage that has two words together."""
    folder.mkdir()
    lines = [
        f"{a}-{b}\tThe {TOPICS[a]} lies beside a {TOPICS[b]} and is old.\t{TOPICS[a]} {TOPICS[b]}\n"
        for a in range(8)
        for b in range(8)
    ]
    (folder / "passages.tsv").write_text("id\ttext\ttitle\n" + "".join(lines))
    for task, words in (("where", "where is the"), ("what", "what of the")):
        for split, numbers in SPLITS.items():
            pairs = [(a, b) for a in range(8) for b in numbers]
            questions = [
                f"{task}{a}{b}\t{words} {TOPICS[a]} with a {TOPICS[b]}\n" for a, b in pairs
            ]
            judgements = [f"{task}{a}{b}\t0\t{a}-{b}\t1\n" for a, b in pairs]
            (folder / f"{task}.{split}.queries.tsv").write_text("".join(questions))
            (folder / f"{task}.{split}.qrels.tsv").write_text("".join(judgements))


@pytest.fixture
def project(tmp_path, monkeypatch) -> pathlib.Path:
    """A folder with faq.gin and faq_tasks.py."""
    monkeypatch.chdir(tmp_path)
    succeed("init", "FAQ", *gin("init", tasks=["where", "what"]))
    return tmp_path


def run(command: str, *arguments: str) -> None:
    """A command with the project's file alone, and what only this run changes."""
    succeed(*command.split(), "--gin_file=faq.gin", *arguments)


@pytest.mark.release
@pytest.mark.slow
def test_from_files_to_a_table_with_one_gin_file(project, capsys):
    write_files(project / "faq")
    with open("faq.gin", "a") as file:
        file.write(SMALLER)
    run("prepare")
    assert list_tasks("faq/data", "faq") == {task: list(SPLITS) for task in ("what", "where")}
    run("tokenize", "--gin_import=faq_tasks")
    for split in SPLITS:
        run("bm25", *gin(SPLIT=split))
    run("mine", *gin(RUNS_DIR="faq/bm25/runs"))
    run("train", *gin(NEGATIVES_DIRS=["faq/negatives"]))
    run("encode")
    for split in ("validation", "test"):
        run("search", *gin(SPLIT=split))
    run("evaluate")
    run("evaluate", *gin(RUNS_DIR="faq/bm25/runs", SYSTEM="BM25"))
    run("hybrid")
    run("ask", *gin(QUESTIONS=["where is the comet"]))
    assert "? where is the comet" in capsys.readouterr().out
    rows = {row["system"]: row for row in figures(project / "faq/results") if row["task"] == "what"}
    assert rows.keys() == {"TASER", "BM25"}
    assert float(rows["BM25"]["R@20"]) > 0.5
    assert sorted(path.name for path in (project / "faq" / "hybrid").glob("*.trec")) == [
        "what.test.trec",
        "where.test.trec",
    ]


# Commands that need nothing else.
FLOW = ("prepare", "tokenize", "train", "encode", "search", "evaluate", "bm25")
FLOW += ("mine", "hybrid", "analyze", "export", "pipeline taser", "pipeline ance")


def text(project: pathlib.Path) -> str:
    """The project's Gin file."""
    return (project / "faq.gin").read_text()


def resolve(name: str, *arguments: str) -> configuration.Resolved:
    """What the command line resolves to, with whatever is still required left open."""
    parsed = cli.parse([*name.split(), *arguments])
    return configuration.resolve_command(parsed.command, parsed.flags, allow_unset=True)


@pytest.mark.parametrize(
    "name", [name for name in COMMANDS if name not in ("init", "compare", "push", "verify")]
)
def test_every_command_takes_it_alone(name, project):
    resolved = resolve(name, "--gin_file=faq.gin", "--gin_import=faq_tasks")
    # What is still required is not the project's: other formats' files, pretrained weights, ...
    assert not set(resolved.unset) & set(re.findall(r"^(\w+) = ", text(project), re.MULTILINE))
    assert not resolved.unset or name not in FLOW
    # Its questions are TSV, and its model is trained from scratch.
    pretrained = {"pretrained_bert", "pretrained_pooling", "pretrained_normalization"}
    allowed = {
        "import": pretrained,
        "quickstart": pretrained,
        "pipeline moma": {"BertFusionConfig"},
    }.get(name, set())
    assert {binding.split(".")[0] for binding in resolved.unused} <= allowed


def test_training_reads_the_defaults_and_the_project(project):
    training = recipes.value("train", "training", "runs/train.gin", "faq.gin")
    assert (training.loop.train_steps, training.batching.batch_size) == (300, 32)
    resolved = resolve("train", "--gin_file=faq.gin").text
    assert "MODEL_DIR = 'faq/model'" in resolved
    assert "train.model_dir = %MODEL_DIR" in resolved
    # A recipe configures the command itself; the project's file only changes what it sets.
    resolved = resolve("train", "--gin_file=runs/taser_base.gin", "--gin_file=faq.gin").text
    assert "BertConfig.dtype = 'bfloat16'" in resolved
    assert "TRAIN_STEPS = 300" in resolved


def test_names_read_from_sources_have_all_that_commands_may_be_configured_with():
    targets = [target for name in COMMANDS for target in (load(name), *configurables_of(name))]
    assert {target.__name__ for target in targets} <= configurable_names()


def test_refusals(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert "the name '7 faqs'" in refused(capsys, "init", "7 faqs")
    assert "no task" in refused(capsys, "init", "FAQ", *gin("init", tasks=[]))
    assert "taser init NAME" in refused(capsys, "init")
    succeed("init", "My FAQ!", *gin("init", directory=tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["my_faq.gin", "my_faq_tasks.py"]
    assert "my_faq.gin and my_faq_tasks.py exist" in refused(capsys, "init", "my faq")
    # As collections may be called.
    succeed("init", "Données")
    assert "COLLECTION = 'donn_es'" in (tmp_path / "donn_es.gin").read_text()
