"""Links, paths, commands and Python of all pages are there, and do what the page says.

docs/errors.md is what its slips lead to.
"""

import ast
import importlib
import inspect
import os
import pathlib
import re
import shlex
import subprocess
import sys

import pytest

from taser_jax.cli import command_table, configuration, gin_files
from taser_jax.cli import main as cli
from taser_jax.commands.init import init

ROOT = pathlib.Path(__file__).resolve().parents[1]
# The page of commands is written when the site is built.
PAGES = sorted(
    {ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md")}
    - {ROOT / "docs" / "commands.md"}
)
ERRORS = ROOT / "docs" / "errors.md"
HUB_ID = '"sentence-transformers/all-MiniLM-L6-v2"'
# Folders of the repository: a path in backquotes that starts with one of them is there.
FOLDERS = ("taser_jax", "gin_configs", "tasks", "launch", "tests", "benchmarks", "docs")


def name(page):
    return str(page.relative_to(ROOT))


def blocks(page, language):
    """(text before, content) of the page's fenced blocks of a language."""
    text = page.read_text(encoding="utf-8")
    for match in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        if match.group(1) == language:
            yield text[: match.start()], match.group(2)


def prose(page):
    """The page without its fenced blocks."""
    text = page.read_text(encoding="utf-8")
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(page):
    """Anchors as GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in headings}


def commands(page):
    """The `taser` commands of a page's shell blocks, as argument lists."""
    for _, content in blocks(page, "bash"):
        for line in content.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
                words.pop(0)
            if words and words[0] == "taser":
                yield [word.replace("$split", "test") for word in words[1:]]


def test_pages_have_commands_to_check():
    assert len(list(commands(ROOT / "README.md"))) >= 8
    assert len(list(commands(ROOT / "docs" / "from_text_to_table.md"))) >= 14


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_relative_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{name(page)} links to {link}"
        if anchor:
            assert anchor in anchors(target), f"{name(page)} links to {link}"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_paths_in_backquotes_exist(page):
    for text in re.findall(r"`([^`\s]+)`", prose(page)):
        path = text.removeprefix("./")
        if "<" in path or "*" in path:
            continue
        if path.startswith(("models/", "optim/", "runs/")) and path.endswith(".gin"):
            assert (ROOT / "gin_configs" / path).exists(), f"{name(page)} names {text}"
        elif path.split("/")[0] in FOLDERS and "/" in path and path != "taser_jax/gin_configs/":
            assert (ROOT / path).exists(), f"{name(page)} names {text}"


def test_calls_of_our_functions_on_all_pages_have_arguments_that_these_take():
    calls = 0
    for page in PAGES:
        for _, block in blocks(page, "python"):
            nodes = list(ast.walk(ast.parse(block)))
            ours = {
                name.name: getattr(importlib.import_module(str(node.module)), name.name)
                for node in nodes
                if isinstance(node, ast.ImportFrom) and str(node.module).startswith("taser_jax")
                for name in node.names
            }
            for call in nodes:
                if isinstance(call, ast.Call) and getattr(call.func, "id", None) in ours:
                    names = dict.fromkeys(word.arg for word in call.keywords if word.arg)
                    inspect.signature(ours[call.func.id]).bind(*call.args, **names)
                    calls += 1
    assert calls > 10


def run_blocks(page, minilm, capsys):
    """Runs a page's Python as it stands, from a directory of MiniLM; (code, lines printed)."""
    names = {}
    for _, block in blocks(page, "python"):
        exec(compile(block.replace(HUB_ID, repr(str(minilm))), str(page), "exec"), names)
        yield block, capsys.readouterr().out.splitlines()


def test_python_example_of_the_readme(minilm, capsys):
    block, printed = next(run_blocks(ROOT / "README.md", minilm, capsys))
    assert block.count(HUB_ID) == 1
    assert printed == [
        "which river runs through the capital of France? -> Seine",
        "what is Python? -> Python",
    ]


@pytest.mark.release
def test_code_of_the_python_page(minilm, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    first, second = run_blocks(ROOT / "docs" / "python.md", minilm, capsys)
    assert first[1][:1] == re.findall(r"# (\[\(.*)$", first[0], re.MULTILINE)
    # Two blocks of MiniLM, one of them with a second feed-forward.
    assert second[1][0].endswith("parameters")
    assert len(second[1]) >= 4
    assert (tmp_path / "model" / "config.gin").is_file()


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_commands_are_commands_with_options_they_have(page, tmp_path):
    """Names of files, macros and parameters are checked as the command itself does."""
    for before, content in blocks(page, "gin"):
        named = re.findall(r"`(\w+\.gin)`", before.rpartition("\n#")[2])
        if named:
            (tmp_path / named[-1]).write_text(content, encoding="utf-8")
    for words in commands(page):
        if words in (["--help"], []):
            continue
        if words[0] == "init":
            # What it writes is what later commands read.
            init(name=words[1], directory=str(tmp_path))
            continue
        arguments = cli.parse([*words, f"--gin_search_paths={tmp_path}"])
        files = arguments.flags.files
        local = [file for file in files if not (gin_files.gin_directory() / file).exists()]
        if any(not (tmp_path / file).exists() for file in local):
            assert page.name == "configuration.md", f"{name(page)}: {' '.join(words)}"
            continue
        # As a person gives it: whatever is required is given, or the run is a dry one.
        configuration.resolve_command(
            arguments.command, arguments.flags, allow_unset=arguments.dry_run
        )


def test_page_of_commands_has_every_command_with_its_options_and_objects(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    generator = importlib.import_module("generate_commands")
    monkeypatch.setattr(generator, "PATH", tmp_path / "commands.md")
    generator.main()
    text = (tmp_path / "commands.md").read_text(encoding="utf-8")
    assert re.findall(r"^## taser (.*)$", text, re.MULTILINE) == list(command_table.COMMANDS)
    assert set(re.findall(r"\]\(#([^)]+)\)", text)) <= anchors(tmp_path / "commands.md")
    train = text.partition("## taser train\n")[2].partition("\n## taser")[0]
    assert "| `TOKEN_STORE` | **required** | tokens of passages and queries" in train
    assert "[ExpertConfig](#expertconfig)" in train
    experts = text.partition("### ExpertConfig\n")[2].partition("\n### ")[0]
    assert "| `num_experts` | `1` |" in experts
    assert "One of `deterministic`, `sequence`, `token`." in experts


# Neither tokens nor a model is needed for these.
SAMPLE = (
    "`dev.tsv`, prepared",
    "`taser hybrid` without",
    "query id that occurs twice",
    "without a positive",
    "folder that is misspelled",
    "batch size that is",
)


@pytest.fixture
def generator(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    return importlib.import_module("generate_errors")


def test_a_sample_of_the_slips_is_as_the_page_says(generator, tmp_path):
    worlds = generator.Worlds(tmp_path)
    text = ERRORS.read_text(encoding="utf-8")
    for words in SAMPLE:
        (slip,) = [slip for slip in generator.SLIPS if words in slip.title]
        assert generator.section(slip, worlds) in text, "run: python docs/generate_errors.py"


def test_the_page_has_every_slip_once(generator):
    text = ERRORS.read_text(encoding="utf-8")
    assert re.findall("^## (.*)$", text, re.MULTILINE) == [slip.title for slip in generator.SLIPS]


def test_a_slip_that_is_none_is_noticed(generator, tmp_path):
    with pytest.raises(RuntimeError, match="no error, status 0"):
        generator.Worlds(tmp_path).answer(generator.Slip("fine", ("--version",)))


@pytest.mark.release
def test_all_slips_are_as_the_page_says(tmp_path):
    # In a process of its own, with one device: the tests' eight want larger batches.
    environment = {name: v for name, v in os.environ.items() if name != "XLA_FLAGS"}
    script, written = ROOT / "docs" / "generate_errors.py", tmp_path / "errors.md"
    subprocess.run([sys.executable, script, written], check=True, env=environment)
    assert ERRORS.read_text(encoding="utf-8") == written.read_text(encoding="utf-8")
