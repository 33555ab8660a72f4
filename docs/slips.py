"""Ordinary slips, each as commands that make it: what docs/generate_errors.py runs.

To add one: a `Slip` with the commands as typed; all but the last must succeed.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import pathlib
import signal
import types
from collections.abc import Callable, Mapping


class World(enum.IntEnum):
    """What lies in the directory before a slip; each includes those before it."""

    FILES = 0
    TOKENS = 1
    MODEL = 2


@dataclasses.dataclass(frozen=True)
class Slip:
    """A mistake, and the commands that make it.

    Attributes:
        title: the mistake.
        commands: what is typed, without `taser`.
        world: what they need.
        change: files changed first.
        shows: of a command that succeeds: lines with these words.
        interrupted: press Ctrl-C after the first step.
    """

    title: str
    commands: tuple[str, ...]
    world: World = World.FILES
    change: Callable[[pathlib.Path], object] = lambda directory: None
    shows: str = ""
    interrupted: bool = False


ANIMALS = [
    "otter",
    "heron",
    "badger",
    "lynx",
    "marten",
    "osprey",
    "beaver",
    "vole",
    "stoat",
    "hare",
    "kestrel",
    "newt",
]
PREPARE = "prepare --gin_file=faq.gin"
LENGTHS = "{'query':16,'passage':24}"
TOKENIZE = (
    f"tokenize --gin_file=faq.gin --gin_import=faq_tasks --gin.TASK_FEATURE_LENGTHS={LENGTHS}"
)
TRAIN = "train --gin_file=faq.gin"
IMPORT = "import --gin.PRETRAINED=bert --gin.MODEL_DIR=imported"
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "eats", "##er"]
BERT_CONFIG = {
    "model_type": "bert",
    "vocab_size": len(WORDS),
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 32,
}
GIN_FILE = """\
include 'runs/train.gin'
include 'models/bert_tiny.gin'
include 'models/dpr.gin'

DATA_DIR = 'data'
COLLECTION = 'shop'
DIRECTORIES = {'faq': 'shop'}
VOCABULARY = 'vocabulary'
MIXTURE_OR_TASK_NAME = 'shop'
TOKEN_STORE = 'tokens'
MODEL_DIR = 'model'
TRAIN_STEPS = 2

DualEncoderConfig.towers = 'tied'
BertConfig.embed_dim = 16
BertConfig.num_layers = 1
BertConfig.num_heads = 2
BertConfig.head_dim = 8
BertConfig.mlp_dim = 32
BATCH_SIZE = 8
WARMUP_STEPS = 0
BatchingConfig.num_negatives = 0
EVAL_PERIOD = 1
ValidationConfig.num_batches = 1
ValidationConfig.batch_size = 2
"""


def write_files(directory: pathlib.Path) -> None:
    """A BEIR directory of twelve passages and 36 queries, and a Gin file of a tiny model."""
    (directory / "faq.gin").write_text(GIN_FILE)
    (directory / "shop" / "qrels").mkdir(parents=True)
    passages = [
        {"_id": f"p{i}", "title": animal.title(), "text": f"The {animal} eats {i} things a day."}
        for i, animal in enumerate(ANIMALS)
    ]
    queries = [{"_id": f"q{i}", "text": f"what does a {ANIMALS[i % 12]} eat?"} for i in range(36)]
    for name, rows in (("corpus", passages), ("queries", queries)):
        write_lines(directory / "shop" / f"{name}.jsonl", [json.dumps(row) for row in rows])
    for split, numbers in (("train", range(24)), ("test", range(24, 36))):
        lines = [f"q{i}\tp{i % 12}\t1" for i in numbers]
        write_lines(
            directory / "shop" / "qrels" / f"{split}.tsv", ["query-id\tcorpus-id\tscore", *lines]
        )


def write_lines(path: pathlib.Path, lines: list[str]) -> None:
    """Writes a text file."""
    path.write_text("".join(line + "\n" for line in lines))


def add_line(path: str, line: str) -> Callable[[pathlib.Path], None]:
    """Adds a line to a file of the directory."""

    def change(directory: pathlib.Path) -> None:
        with open(directory / path, "a") as file:
            file.write(line + "\n")

    return change


def replace(path: str, old: str, new: str) -> Callable[[pathlib.Path], None]:
    """Replaces words in a file of the directory."""

    def change(directory: pathlib.Path) -> None:
        text = (directory / path).read_text()
        assert old in text, (path, old)
        (directory / path).write_text(text.replace(old, new))

    return change


def truncate(path: str) -> Callable[[pathlib.Path], None]:
    """Takes the last bytes from a file."""

    def change(directory: pathlib.Path) -> None:
        (directory / path).write_bytes((directory / path).read_bytes()[:-7])

    return change


def flip(path: str) -> Callable[[pathlib.Path], None]:
    """Changes a bit of a file's last byte."""

    def change(directory: pathlib.Path) -> None:
        content = (directory / path).read_bytes()
        (directory / path).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))

    return change


def remove(pattern: str) -> Callable[[pathlib.Path], None]:
    """Removes files."""

    def change(directory: pathlib.Path) -> None:
        for path in list(directory.glob(pattern)):
            path.unlink()

    return change


def bert(
    *, config: Mapping[str, object] = types.MappingProxyType({}), **files: object
) -> Callable[[pathlib.Path], None]:
    """Makes bert/, a Hugging Face directory without weights.

    Args:
        config: changes of its config.json.
        files: name without ending -> content of further JSON files.
    """

    def change(directory: pathlib.Path) -> None:
        (directory / "bert").mkdir()
        write_lines(directory / "bert" / "vocab.txt", WORDS)
        contents = {"config": BERT_CONFIG | config, **files}
        for name, value in contents.items():
            (directory / "bert" / f"{name}.json").write_text(json.dumps(value))

    return change


def interrupt(number: int = signal.SIGINT) -> None:
    """Ctrl-C."""
    signal.raise_signal(number)


SLIPS = (
    Slip("A BEIR directory without `dev.tsv`, prepared", (PREPARE,), shows="validation"),
    Slip(
        "A BEIR directory without `dev.tsv`, trained on",
        (
            f"{PREPARE} --gin.COLLECTION=plain",
            f"{TOKENIZE} --gin.MIXTURE_OR_TASK_NAME=plain --gin.TOKEN_STORE=unjudged",
            f"{TRAIN} --gin.TOKEN_STORE=unjudged",
        ),
        world=World.TOKENS,
    ),
    Slip(
        "`taser hybrid` without a validation split",
        (
            PREPARE,
            "hybrid --gin_file=faq.gin --gin.RUNS_DIR=runs --gin.BM25_RUNS_DIR=bm25 "
            "--gin.HYBRID_RUNS_DIR=hybrid",
        ),
    ),
    Slip(
        "A query id that occurs twice in `queries.jsonl`",
        (PREPARE,),
        change=add_line("shop/queries.jsonl", '{"_id": "q3", "text": "another question?"}'),
    ),
    Slip(
        "A query without a positive",
        (PREPARE,),
        change=replace("shop/qrels/test.tsv", "q35\tp11", "q35\tp99"),
        shows="without a positive",
    ),
    Slip("A folder that is misspelled", (f"{PREPARE} --gin.DIRECTORIES=shp",)),
    Slip("One length where there are two", (TOKENIZE.replace(LENGTHS, "128"),)),
    Slip("A misspelled feature", (TOKENIZE.replace("'query'", "'queries'"),), world=World.TOKENS),
    Slip("A length in quotes", (TOKENIZE.replace("16", "'32'"),)),
    Slip("A batch size that is not a number", (f"{TRAIN} --gin.BATCH_SIZE=abc",)),
    Slip("`TASKS` that is not a list", (f"{TRAIN} --gin.TASKS=faq",)),
    Slip("A dry run without its token store", (f"{TRAIN} --dry_run",)),
    Slip(
        "`taser tokenize` into a token store with other lengths",
        (TOKENIZE.replace("16", "12"),),
        world=World.TOKENS,
    ),
    Slip(
        "Resuming with another learning rate",
        (f"{TRAIN} --gin.LEARNING_RATE=1e-3",),
        world=World.MODEL,
    ),
    Slip(
        "Resuming with fewer steps than are done",
        (f"{TRAIN} --gin.TRAIN_STEPS=1",),
        world=World.MODEL,
    ),
    Slip("Ctrl-C", (f"{TRAIN} --gin.MODEL_DIR=stopped",), world=World.TOKENS, interrupted=True),
    Slip(
        "Training without a model",
        ("train --gin.MODEL_DIR=model --gin.TOKEN_STORE=tokens --gin.TRAIN_STEPS=2",),
    ),
    Slip("A directory that cannot be created", ("init FAQ --gin.init.directory=faq.gin/project",)),
    Slip(
        "A model card from a directory without results",
        ("export --gin_file=faq.gin --gin.EXPORT_DIR=out --gin.export_model.results_dir=data",),
        world=World.MODEL,
    ),
    Slip(
        "Pretrained weights with more words than rows",
        (IMPORT,),
        change=bert(config={"vocab_size": 6}),
    ),
    Slip(
        "Pretrained weights with added tokens", (IMPORT,), change=bert(added_tokens={"newword": 7})
    ),
    Slip("A `layer_norm_eps` below zero", (IMPORT,), change=bert(config={"layer_norm_eps": -1})),
    Slip(
        "A `config.json` with 100,000 layers",
        (IMPORT,),
        change=bert(config={"num_hidden_layers": 100_000}),
    ),
    Slip(
        "A Gin file that includes itself", (TRAIN,), change=add_line("faq.gin", "include 'faq.gin'")
    ),
    Slip(
        "A token store with a truncated file",
        (TRAIN,),
        world=World.TOKENS,
        change=truncate("tokens/passages/ids.npy"),
    ),
    Slip(
        "A token store with a flipped bit",
        ("verify tokens",),
        world=World.TOKENS,
        change=flip("tokens/passages/ids.npy"),
    ),
    Slip(
        "Checkpoints with a file missing",
        ("encode --gin_file=faq.gin --gin.EMBEDDINGS_DIR=embeddings",),
        world=World.MODEL,
        change=remove("model/checkpoint_*/state/manifest.ocdbt"),
    ),
)
