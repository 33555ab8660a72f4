"""docs/errors.md is what its slips lead to."""

import importlib
import os
import pathlib
import re
import subprocess
import sys

import pytest

DOCS = pathlib.Path(__file__).resolve().parents[1] / "docs"
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
    monkeypatch.syspath_prepend(str(DOCS))
    return importlib.import_module("generate_errors")


def test_a_sample_of_the_slips_is_as_the_page_says(generator, tmp_path):
    worlds = generator.Worlds(tmp_path)
    text = (DOCS / "errors.md").read_text(encoding="utf-8")
    for words in SAMPLE:
        (slip,) = [slip for slip in generator.SLIPS if words in slip.title]
        assert generator.section(slip, worlds) in text, "run: python docs/generate_errors.py"


def test_the_page_has_every_slip_once(generator):
    text = (DOCS / "errors.md").read_text(encoding="utf-8")
    assert re.findall("^## (.*)$", text, re.MULTILINE) == [slip.title for slip in generator.SLIPS]


def test_a_slip_that_is_none_is_noticed(generator, tmp_path):
    with pytest.raises(RuntimeError, match="no error, status 0"):
        generator.Worlds(tmp_path).answer(generator.Slip("fine", ("--version",)))


@pytest.mark.release
def test_all_slips_are_as_the_page_says(tmp_path):
    # In a process of its own, with one device: the tests' eight want larger batches.
    environment = {name: v for name, v in os.environ.items() if name != "XLA_FLAGS"}
    script, written = DOCS / "generate_errors.py", tmp_path / "errors.md"
    subprocess.run([sys.executable, script, written], check=True, env=environment)
    assert (DOCS / "errors.md").read_text(encoding="utf-8") == written.read_text(encoding="utf-8")
