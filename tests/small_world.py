"""Real docstrings of three packages, prepared, tokenised and compared: all of it in one folder."""

import csv
import dataclasses
import functools
import pathlib
from collections.abc import Callable
from typing import Any

from taser_jax.cli import main as cli

TASKS = ("summary", "code")
SYSTEMS = "{'DPR': @dpr/System(), 'TASER': @taser/System()}"
ROWS = (
    "BM25",
    "DPR (BM25 negatives)",
    "TASER (BM25 negatives)",
    "DPR (mined negatives)",
    "TASER (mined negatives)",
    "TASER + BM25",
)


def gin(target: str = "", /, **values: object) -> list[str]:
    """Bindings of a target's parameters, or of macros, as typed on the command line."""
    prefix = f"{target}." if target else ""
    return [f"--gin.{prefix}{name}={value}" for name, value in values.items()]


# Bindings of a tiny model and its training.
SIX_STEPS = [
    *gin("BertConfig", embed_dim=32, num_layers=2, num_heads=2, head_dim=16, mlp_dim=64),
    *gin(TRAIN_STEPS=6, BATCH_SIZE=16, WARMUP_STEPS=2),
    *gin("BertConfig", dropout_rate=0.0, attention_dropout_rate=0.0),
    *gin("ValidationConfig", num_batches=0),
]


@dataclasses.dataclass(frozen=True)
class SmallWorld:
    """A prepared and tokenised collection of about 500 passages.

    Attributes:
        root: holds data/, vocabulary/ and tokens/.
    """

    root: pathlib.Path

    @property
    def data_dir(self) -> pathlib.Path:
        return self.root / "data"

    @property
    def token_store(self) -> pathlib.Path:
        return self.root / "tokens"

    def make(self) -> None:
        run = succeed
        run(
            *("prepare", "pydocs"),
            *gin(DATA_DIR=self.data_dir, COLLECTION="small", TASKS=list(TASKS)),
            *gin(PACKAGES=["json", "statistics", "optax"]),
        )
        run(*self.tokenize(self.token_store), *gin(VOCAB_SIZE=1000))

    def tokenize(self, token_store: pathlib.Path) -> list[str]:
        """Arguments of `taser tokenize`, with the vocabulary that is there."""
        return [
            *("tokenize", *gin(DATA_DIR=self.data_dir, VOCABULARY=self.root / "vocabulary")),
            *gin(MIXTURE_OR_TASK_NAME="small", MIXTURE_OR_TASK_MODULE="small_tasks"),
            *gin(TASK_FEATURE_LENGTHS={"query": 16, "passage": 32}, TOKEN_STORE=token_store),
        ]

    def compare(self, output_dir: pathlib.Path, *bindings: str) -> list[str]:
        """Arguments of `taser pipeline taser`: six steps of two tiny models in each round."""
        return [
            *("pipeline", "taser"),
            *gin(DATA_DIR=self.data_dir, TOKEN_STORE=self.token_store, OUTPUT_DIR=output_dir),
            *gin("pipeline_taser", systems=SYSTEMS),
            *gin("taser/ExpertConfig", shared_per_specialized=1),
            *gin("dpr/System", model="@dpr/DualEncoderConfig()"),
            *gin("dpr/DualEncoderConfig", towers="separate", bert="@dpr/BertConfig()"),
            # One block is enough for what DPR is here for, and compiles sooner.
            *gin("dpr/BertConfig", num_layers=1),
            *SIX_STEPS,
            *gin(TOP_K=100),
            *gin("IndexConfig", kind="exact"),
            *bindings,
        ]


def succeed(*arguments: str) -> None:
    """Runs a command that must succeed."""
    assert cli.run(list(arguments)) == 0, arguments


def refused(capsys, *arguments: str) -> str:
    """Runs a command that must be refused; what it says."""
    capsys.readouterr()
    assert cli.run(list(arguments)) == 2, arguments
    _, error, message = capsys.readouterr().err.rpartition("error: ")
    assert error
    return message


def never(function: Callable[..., Any]) -> Callable[..., Any]:
    """A command with the same arguments that must not be called."""

    @functools.wraps(function)
    def called(**_: Any) -> None:
        raise AssertionError("a finished stage was run again")

    return called


def figures(output_dir: pathlib.Path) -> list[dict[str, str]]:
    """The table's lines, without how long training took."""
    with open(output_dir / "table.csv", newline="") as file:
        lines = list(csv.DictReader(file))
    return [{name: value for name, value in line.items() if name != "training"} for line in lines]
