"""Paths that no file can have, and Gin files that import: named, with status 2."""

import pathlib
import re
import resource
import sys

import pytest
from etils import epath
from small_world import refused

from taser_jax.storage.artifacts import storage_errors, write_text
from taser_jax.storage.errors import ConfigError, StorageError

LONG = "n" * 300
PREPARE = ("prepare", "--gin.COLLECTION=c", "--gin.DIRECTORIES={'t': 'beir'}")


@pytest.mark.parametrize(
    ("data_dir", "message"),
    [
        ("loop", "Too many levels of symbolic links(?s:.*)this one leads to itself"),
        ("loop/data", "Too many levels of symbolic links(?s:.*)this one leads to itself"),
        (LONG, "File name too long(?s:.*)each part of a path has at most 255 bytes"),
    ],
)
def test_a_data_dir_that_cannot_be(tmp_path, monkeypatch, capsys, data_dir, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    assert re.search(message, refused(capsys, *PREPARE, f"--gin.DATA_DIR={data_dir}"))


@pytest.mark.parametrize(
    "arguments",
    [
        ("train", f"--gin_file={LONG}.gin"),
        ("verify", LONG),
        ("init", LONG),
        ("import", f"--gin.PRETRAINED={LONG}", "--gin.MODEL_DIR=out"),
    ],
)
def test_names_of_300_characters(tmp_path, monkeypatch, capsys, arguments):
    monkeypatch.chdir(tmp_path)
    message = refused(capsys, *arguments)
    assert "Traceback" not in message
    # Later Pythons take such a file for one that is not there.
    if sys.version_info < (3, 14):
        assert "File name too long" in message
        assert f"taser {arguments[0]}" in message


def test_a_path_with_a_nul_is_a_storage_error():
    with pytest.raises(StorageError, match="embedded null"), storage_errors("x"):
        pathlib.Path("a\0b").read_text()


def test_too_many_open_files_are_a_storage_error(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        with pytest.raises(StorageError, match=r"Too many open files(.|\n)*ulimit -n"):
            write_text(tmp_path / "a.txt", "x")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


UNRESOLVED = "Error executing an HTTP request: libcurl code 6, Could not resolve"


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        (RuntimeError("Unable to initialize backend 'tpu': NOT_FOUND"), "no tpu is here"),
        (NotImplementedError("File system scheme 's3' not implemented"), "s3:// is no kind"),
        (RuntimeError(UNRESOLVED), "x: the bucket cannot be reached: libcurl code 6"),
    ],
)
def test_what_is_absent_is_named(raised, said):
    with pytest.raises(ConfigError, match=said), storage_errors("x"):
        raise raised


def test_http_is_no_kind_of_path():
    with pytest.raises(ConfigError, match="http:// is no kind"), storage_errors("http://a/b"):
        epath.Path("http://a/b")


@pytest.fixture
def gin_file(tmp_path, monkeypatch):
    (tmp_path / "runs_code.py").write_text("import pathlib\npathlib.Path('ran').touch()\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "runs_code", raising=False)

    def write(text: str) -> str:
        (tmp_path / "a.gin").write_text(f"SPLIT = 'test'\n{text}\n")
        return "--gin_file=a.gin"

    return write


def test_a_gin_files_import_runs_nothing_unless_allowed(gin_file, tmp_path, capsys):
    flag = gin_file("import runs_code")
    message = refused(capsys, "search", flag)
    assert "a.gin:2: import of 'runs_code', which runs the code of that module" in message
    assert "--gin_import=runs_code" in message
    assert not (tmp_path / "ran").exists()
    # Names that merely begin alike are not allowed.
    assert "import of 'runs_code'" in refused(capsys, "search", flag, "--gin_import=runs_")
    message = refused(capsys, "search", flag, "--gin_import=runs_code")
    assert "not set" in message
    assert (tmp_path / "ran").exists()


def test_a_gin_files_task_module_runs_nothing_unless_allowed(gin_file, tmp_path, capsys):
    flag = gin_file("MIXTURE_OR_TASK_MODULE = 'runs_code'")
    message = refused(capsys, "tokenize", flag)
    assert "a.gin:2: import of 'runs_code', which runs the code of that module" in message
    assert "--gin_import=runs_code" in message
    assert "not set" in refused(capsys, "tokenize", flag, "--gin_import=runs_code")
    # The command line is the user's own, and other commands import nothing.
    assert "not set" in refused(capsys, "tokenize", "--gin.MIXTURE_OR_TASK_MODULE=runs_code")
    assert "not set" in refused(capsys, "search", flag)
    assert not (tmp_path / "ran").exists()


def test_own_modules_may_be_imported(gin_file, capsys):
    assert "not set" in refused(capsys, "search", gin_file("import taser_jax.storage.records"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("from __gin__ import dynamic_registration", "import of '__gin__.dynamic_registration'"),
        ("import taser_jax.no_such_module", "cannot import 'taser_jax.no_such_module'"),
        ("from os import system", "import of 'os.system'"),
    ],
)
def test_what_a_gin_file_may_not_import(gin_file, capsys, line, message):
    printed = refused(capsys, "search", gin_file(line))
    assert f"a.gin:2: {message}" in printed
    assert "--gin_import=__gin__" not in printed


@pytest.mark.parametrize("value", ["[" * 5000, "9" * 5000])
def test_a_gin_files_values_beyond_pythons_limits(gin_file, capsys, value):
    assert "a.gin: " in refused(capsys, "search", gin_file(f"TOP_K = {value}"))


def test_files_that_include_one_another_without_end(gin_file, tmp_path, capsys):
    for number in range(1200):
        (tmp_path / f"{number}.gin").write_text(f"include '{number + 1}.gin'\n")
    assert "recursion" in refused(capsys, "search", gin_file("include '0.gin'"))


def test_gin_files_as_editors_leave_them(gin_file, tmp_path, capsys):
    plain = refused(capsys, "search", gin_file(""))
    (tmp_path / "a.gin").write_bytes(b"\xef\xbb\xbfSPLIT = 'test'\r\n\tTOP_K = 3")
    assert refused(capsys, "search", "--gin_file=a.gin") == plain
