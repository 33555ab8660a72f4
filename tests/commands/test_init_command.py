"""A project: two files written, and every command run with one of them alone."""

import re

import pytest
from bert_checkpoints import write_modules, write_with_vocabulary
from small_world import gin, refused, succeed
from written_files import tsv

from taser_jax import Retriever
from taser_jax.cli import configuration
from taser_jax.cli import main as cli
from taser_jax.cli.command_table import COMMANDS, configurable_names, configurables_of, load

# Commands that need nothing else.
FLOW = ("prepare", "tokenize", "train", "encode", "search", "evaluate", "bm25")
FLOW += ("mine", "hybrid", "analyze", "export", "pipeline taser", "pipeline ance")


@pytest.mark.parametrize(
    "name", [name for name in COMMANDS if name not in ("init", "compare", "push", "verify")]
)
def test_every_command_takes_it_alone(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    succeed("init", "FAQ", *gin("init", tasks=["where", "what"]))
    parsed = cli.parse([*name.split(), "--gin_file=faq.gin", "--gin_import=faq_tasks"])
    resolved = configuration.resolve_command(parsed.command, parsed.flags, allow_unset=True)
    # What is still required is not the project's: other formats' files, pretrained weights, ...
    macros = re.findall(r"^(\w+) = ", (tmp_path / "faq.gin").read_text(), re.MULTILINE)
    assert not set(resolved.unset) & set(macros)
    assert not resolved.unset or name not in FLOW
    # Its questions are TSV, and its model is trained from scratch.
    pretrained = {"pretrained_bert", "pretrained_pooling", "pretrained_normalization"}
    allowed = dict.fromkeys(("import", "quickstart"), pretrained)
    allowed["pipeline moma"] = {"BertFusionConfig"}
    unused = {binding.split(".")[0] for binding in resolved.unused}
    assert unused <= allowed.get(name, set())


def test_pretrained_weights_are_trained_and_load_in_the_retriever(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "danube", "seine", "river"]
    bert = write_with_vocabulary(tmp_path / "bert", words, num_layers=4)
    write_modules(bert, max_length=16)
    succeed("init", "FAQ", f"--pretrained={bert}")
    text = (tmp_path / "faq.gin").read_text()
    for line in (
        "TASK_FEATURE_LENGTHS = {'query': 16, 'passage': 16}",
        "TrainingConfig.train_from_block = 2",
        "ExpertConfig.blocks = (4,)",
        "ObjectiveConfig.temperature = 0.05",
    ):
        assert line in text
    asked = {
        f"questions.{split}": {f"{split}{n}": (f"Danube {n} {split}", f"p{n}") for n in range(8)}
        for split in ("train", "validation", "test")
    }
    tsv(tmp_path / "faq", {f"p{n}": f"the Danube {'river ' * n}" for n in range(8)}, asked)
    flags = ("--gin_file=faq.gin", *gin(BATCH_SIZE=8, TRAIN_STEPS=1, WARMUP_STEPS=1))
    for command in ("prepare", "tokenize", "train", "encode", "search", "evaluate"):
        more = ("--gin_import=faq_tasks",) if command == "tokenize" else ()
        succeed(command, *(flags if command == "train" else flags[:1]), *more)
    places = {"index_dir": "faq/index", "data_dir": "faq/data", "collection": "faq"}
    retriever = Retriever.load("faq/model", **places)
    assert [len(hits) for hits in retriever.search(["Danube"], k=2)] == [2]
    assert "no such directory" in refused(capsys, "init", "other", "--pretrained=nowhere")


def test_names_read_from_sources_have_all_that_commands_may_be_configured_with():
    targets = [target for name in COMMANDS for target in (load(name), *configurables_of(name))]
    assert {target.__name__ for target in targets} <= configurable_names()


def test_refusals(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert "the name '7 faqs'" in refused(capsys, "init", "7 faqs")
    assert "no task" in refused(capsys, "init", "FAQ", *gin("init", tasks=[]))
    assert "taser init NAME" in refused(capsys, "init")
    succeed("init", "My FAQ!", *gin("init", directory=tmp_path))
    assert f"then run\n  cd {tmp_path}\n  taser prepare" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["my_faq.gin", "my_faq_tasks.py"]
    assert "my_faq.gin and my_faq_tasks.py exist" in refused(capsys, "init", "my faq")
    # As collections may be called.
    succeed("init", "Données")
    assert "COLLECTION = 'donn_es'" in (tmp_path / "donn_es.gin").read_text()
