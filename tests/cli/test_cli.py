"""Commands, flags and exit codes of `taser`."""

import contextlib
import signal
import subprocess
import sys
from unittest import mock

import pytest

import taser_jax
from taser_jax.cli import command_line, command_table, gin_files
from taser_jax.cli import main as cli
from taser_jax.storage.errors import Preempted, StorageError

# Gin keeps the first function of a name.
ACT = mock.Mock()


def toy_command(*, message: str = "", config_text: str = ""):
    ACT(message, config_text)


@pytest.fixture
def toy(monkeypatch, tmp_path):
    """What the command `toy` does."""
    monkeypatch.setitem(sys.modules, "taser_jax.commands.toy_module", sys.modules[__name__])
    path = tmp_path / "toy.gin"
    path.write_text("MESSAGE = 'hello'\ntoy_command.message = %MESSAGE\n")
    command = command_table.Command("commands.toy_module", "toy_command", "a toy", str(path))
    monkeypatch.setitem(command_table.COMMANDS, "toy", command)
    ACT.reset_mock(side_effect=True)
    return ACT


def test_a_finished_command_returns_0(toy):
    assert cli.run(["toy", "--gin.MESSAGE=a b"]) == 0
    assert cli.run(["toy", "--gin.MESSAGE", "c"]) == 0
    assert cli.run(["toy", "--gin_bindings=MESSAGE = d"]) == 0
    messages, texts = zip(*(call.args for call in toy.call_args_list), strict=True)
    assert messages == ("a b", "c", "d")
    assert "MESSAGE = 'a b'" in texts[0]


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (StorageError("disk full", fix="free space"), 2, "error: disk full\n  fix: free space\n"),
        (Preempted("saved"), 75, "preempted: saved; rerun the command to resume\n"),
        (KeyboardInterrupt("saved"), 130, "interrupted: saved; rerun the command to resume\n"),
        (ZeroDivisionError("a defect"), None, ""),
    ],
)
def test_how_a_command_ends_without_a_traceback(toy, capsys, error, status, said):
    toy.side_effect = error
    # But for a defect.
    with contextlib.nullcontext() if status else pytest.raises(ZeroDivisionError):
        assert cli.run(["toy"]) == status
    assert capsys.readouterr().err == said


WAITS = """
import time
from taser_jax.cli import main

def wait(*_):
    try:
        print("begun", flush=True)
        time.sleep(60)
    finally:
        print("ending", flush=True)
        time.sleep(60)

main._execute = wait
main.main(["verify", "."])
"""


def test_a_second_interrupt_ends_at_once_without_a_traceback():
    process = subprocess.Popen(
        [sys.executable, "-c", WAITS], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    for said in ("begun\n", "ending\n"):
        assert process.stdout.readline() == said
        process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Traceback" not in errors


SWALLOWS = """
import gc, os, signal, time
from taser_jax.cli import main

def swallow(phase, info):
    gc.callbacks.remove(swallow)
    os.kill(os.getpid(), signal.SIGINT)

def wait(*_):
    gc.callbacks.append(swallow)
    gc.collect()
    time.sleep(60)

main._execute = wait
main.main(["verify", "."])
"""


def test_an_interrupt_that_a_callback_of_the_garbage_collector_swallows_is_not_lost():
    arguments = [sys.executable, "-c", SWALLOWS]
    ended = subprocess.run(arguments, capture_output=True, text=True, timeout=50)
    assert ended.returncode == 130
    assert ended.stderr == "interrupted: finished work is kept; rerun the command to resume\n"


TASER_BASE = "--gin_file=runs/taser_base.gin"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["trian"], "did you mean `taser train`?"),
        (["pipeline"], "did you mean `taser pipeline"),
        (["pipeline", "tazer"], "did you mean `taser pipeline taser`?"),
        (["prepare"], "DATA_DIR not set"),
        (["verify"], "write `taser verify DIRECTORY`"),
        (["zzz"], "run `taser --help`"),
        (["train", "now"], "no command 'train now'"),
        (["--gin_file=a.gin"], "no command ''"),
        (["train", "--gin_fil=a.gin"], "unknown flag '--gin_fil=a.gin'"),
        (["train", "--gin_fil=a.gin"], "did you mean --gin_file?"),
        (["compare", "x", "--pretraind=minilm"], "did you mean --pretrained?"),
        (["ask", "what", "--from=nowhere"], "nowhere: no retriever.json"),
        (["train", "--gin_file=a", "stray"], "unknown flag 'stray'"),
        (["compare", "--pretrained=minilm", "my_beir"], "flags: `taser compare my_beir ...`"),
        (["train", "--gin_file"], "--gin_file has no value"),
        (["train", "--gin.MODEL_DIR="], "--gin.MODEL_DIR has no value"),
        (["train", "--coordinator_timeout=soon"], "invalid int value: 'soon'"),
        (["ask", "--multihost"], "`taser ask` runs on one host"),
        (["prepare", "pydocs", "--multihost"], "runs on one host"),
        (["compare", "my_beir", "--multihost"], "`taser compare` runs on one host"),
        # A macro of another command is answered with the nearest of this one's.
        (["encode", "--gin.RUNS_DIR=2"], "macro RUNS_DIR is set"),
        (["encode", "--gin.RUNS_DIR=2"], "fix: did you mean EMBEDDINGS_DIR?"),
        (["train", "--gin_file=runs/taser_bse.gin"], "did you mean runs/taser_base.gin?"),
        (["train"], "--gin_file=models/taser.gin --gin.MODEL_DIR=..."),
        (["encode", "--dry_run"], "`taser encode` has no dry run"),
        (["train", "--dry_run", TASER_BASE, "--gin.MODEL=None"], "train.model = %MODEL"),
    ],
)
def test_wrong_command_lines_return_2(argv, words, capsys):
    assert cli.run(argv) == 2
    captured = capsys.readouterr()
    assert words in captured.err
    assert "Path not found" not in captured.err
    assert "In call to configurable" not in captured.err


def test_parsing():
    arguments = cli.parse(
        [
            *("pipeline", "muf", "--gin_file=a.gin", "--gin_file", "b.gin", "--dry-run"),
            *("--gin.X=1=2", "--gin_search_paths=c,d", "--multihost", "--coordinator_timeout=9"),
        ]
    )
    assert arguments.command == "pipeline muf"
    assert arguments.flags.files == ("a.gin", "b.gin")
    assert arguments.flags.bindings == (("X", "1=2"),)
    assert arguments.flags.search_paths == ("c", "d")
    assert arguments.coordinator_timeout == 9
    assert (arguments.dry_run, arguments.multihost, arguments.help) == (True, True, False)
    assert cli.parse(["train"]).flags.files == ("runs/train.gin",)


def test_the_words_after_ask_are_one_question():
    arguments = cli.parse(["ask", "how", "do", "I", "sort", "--from=out"])
    assert arguments.flags.bindings == (("QUESTIONS", "['how do I sort']"), ("DIRECTORY", "out"))
    assert cli.parse(["compare", "a", "b"]).flags.bindings == (("DIRECTORIES", "['a', 'b']"),)


def test_a_reader_that_leaves_is_no_traceback():
    command = [sys.executable, "-m", "taser_jax.cli.main", "--help"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"], ["help"]])
def test_the_overview_lists_every_command(argv, capsys):
    assert cli.run(argv) == 0
    printed = capsys.readouterr().out
    for name, command in command_table.COMMANDS.items():
        assert name in printed
        assert command.summary in printed


def test_the_help_of_a_group_lists_its_commands(capsys):
    assert cli.run(["pipeline", "--help"]) == 0
    printed = capsys.readouterr().out
    assert "pipeline ance" in printed
    assert "quickstart" not in printed


def test_the_version_is_the_packages(capsys):
    assert cli.run(["--version"]) == 0
    assert capsys.readouterr().out == f"taser_jax {taser_jax.__version__}\n"


TINY = [
    *("train", "--dry_run", "--gin_file=models/bert_tiny.gin", "--gin_file=models/taser.gin"),
    *("--gin.TRAIN_STEPS=9", "--gin.WARMUP_STEPS=1"),
    "--gin.TASK_FEATURE_LENGTHS={'query': 8, 'passage': 8}",
]


@pytest.mark.parametrize(
    ("arguments", "absent", "said"),
    [
        (["--help"], {"jax", "tensorflow", "numpy"}, ["without a command:"]),
        # Each of them is a large part of the two seconds that a dry run may take to start.
        (
            TINY,
            {"tensorflow", "tensorflow_datasets", "orbax.checkpoint", "scipy", "matplotlib"},
            ["total ", "GiB per device", "set: MODEL_DIR, TOKEN_STORE", "negatives per"],
        ),
    ],
)
def test_what_starts_soon_loads_only_what_it_uses(arguments, absent, said):
    program = (
        "import sys; from taser_jax.cli import main as cli; "
        f"assert cli.run({arguments!r}) == 0; print(*sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    loaded = set(done.stdout.splitlines()[-1].split())
    assert "taser_jax.cli.main" in loaded
    assert not absent & loaded
    assert [words for words in said if words not in done.stdout + done.stderr] == []


def test_the_help_of_a_command_shows_its_options(capsys):
    assert cli.run(["train", "--help"]) == 0
    printed = capsys.readouterr().out
    assert "Trains a dual encoder" in printed
    assert "  TOKEN_STORE = required\n      tokens of passages and queries" in printed
    assert "  LEARNING_RATE = 2e-5\n      peak rate. (OptimizerConfig.learning_rate)" in printed
    assert "Without --gin_file it reads runs/train.gin." in printed
    assert cli.run(["hybrid", "--help"]) == 0
    assert "  hybrid.alpha = None\n" in capsys.readouterr().out
    assert cli.run(["prepare", "--help"]) == 0
    assert "  --strict  sets STRICT = True\n" in capsys.readouterr().out
    assert cli.run(["compile", "--help"]) == 0
    printed = capsys.readouterr().out
    assert "--topology=VALUE  sets compile_recipe.topology" in printed
    assert "runs/compile.gin and then runs/taser_base.gin" in printed


def test_the_help_of_a_command_is_made_once_for_its_sources(monkeypatch, tmp_path):
    texts = [f"pipeline muf\n\nhelp {number}" for number in (1, 2, 3)]
    monkeypatch.setattr(command_line, "help_text", mock.Mock(side_effect=texts))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for _ in range(2):
        assert command_line.command_help("pipeline muf") == texts[0]
    (path,) = tmp_path.rglob("*.txt")
    path.write_text("another version\nold")
    assert command_line.command_help("pipeline muf") == texts[1]
    # No cache can be made below a file.
    monkeypatch.setenv("XDG_CACHE_HOME", str(path))
    assert command_line.command_help("pipeline muf") == texts[2]


def test_gin_files_are_listed_and_printed(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.gin").write_text("# My model. It is small.\nX = 1\n")
    assert cli.run(["--show_gin"]) == 0
    first, *others = capsys.readouterr().out.splitlines()
    assert first.split(maxsplit=1) == ["mine.gin", "My model"]
    packaged = gin_files.gin_directory()
    assert len(others) == len(list(packaged.rglob("*.gin")))
    assert all(len(line.split(maxsplit=1)) == 2 for line in others), "a file without a comment"
    for name, folder in (("models/taser.gin", packaged), ("mine.gin", tmp_path)):
        assert cli.run(["--show_gin", name]) == 0
        assert capsys.readouterr().out == (folder / name).read_text()
    assert cli.run(["--show_gin", "models/tasr.gin"]) == 2
    assert "did you mean models/taser.gin?" in capsys.readouterr().err
