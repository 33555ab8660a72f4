"""A full or read-only disk: exit 2, and nothing is left that a later run takes for whole."""

import pathlib

import pytest
from disks import no_room_beyond, read_only
from small_world import SmallWorld, gin, refused, succeed

pytestmark = pytest.mark.slow

# Command -> bytes that its files may have; of a search, 100 are too few for its index.
SIZES = [
    *(("prepare", 3000), ("tokenize", 500), ("tokenize", 5000), ("bm25", 2000)),
    *(("encode", 10_000), ("search", 5000), ("search", 100), ("mine", 2000), ("evaluate", 300)),
    *(("export", 5000), ("import", 5000)),
]


def command(name: str, world: SmallWorld, made: pathlib.Path, out: pathlib.Path) -> list[str]:
    """A command that reads a finished comparison and writes to `out`."""
    data = gin(DATA_DIR=world.data_dir, COLLECTION="small")
    round_1, exported = made / "taser-1", out.parent / "exported"
    docs = gin(COLLECTION="c", TASKS=["summary"], PACKAGES=["json"])
    words = gin(VOCABULARY=out / "words", VOCAB_SIZE=1000)
    model = gin(MODEL_DIR=round_1 / "model", TOKEN_STORE=world.token_store)
    encoded = gin(EMBEDDINGS_DIR=round_1 / "embeddings")
    arguments = {
        "prepare": ["pydocs", *docs, *gin(DATA_DIR=out)],
        "tokenize": [*world.tokenize(out / "tokens")[1:], *words],
        "bm25": [*data, *gin(BM25_RUNS_DIR=out / "runs", BM25_INDEX_DIR=out / "index")],
        "encode": [*model, *gin(EMBEDDINGS_DIR=out)],
        "search": [*data, *encoded, *gin(INDEX_DIR=out / "index", RUNS_DIR=out / "runs")],
        "mine": [*data, *gin(RUNS_DIR=round_1 / "runs", NEGATIVES_DIR=out)],
        "evaluate": [*data, *gin(RUNS_DIR=round_1 / "runs", EVAL_OUTPUT_DIR=out, SYSTEM="s")],
        "export": ["embeddings", *data, *encoded, *gin(MODEL_DIR=None, EXPORT_DIR=out)],
        "import": ["embeddings", *data, *gin(EMBEDDINGS_DIR=out, SOURCE=exported / "embeddings")],
    }
    if name == "import":
        succeed("export", *arguments["export"], *gin(EXPORT_DIR=exported))
    return [name, *arguments[name]]


@pytest.mark.parametrize(("name", "size"), SIZES)
def test_a_full_disk_is_named_and_the_same_command_goes_on(
    small_world, compared, tmp_path, capsys, name, size
):
    arguments = command(name, small_world, compared, tmp_path / "out")
    with no_room_beyond(size):
        message = refused(capsys, *arguments)
    assert "could not " in message
    assert "free some space" in message
    assert not list(tmp_path.rglob("*.partial"))
    succeed(*arguments)
    succeed("verify", str(tmp_path))
    if name == "encode":
        embeddings = compared / "taser-1" / "embeddings"
        for path in embeddings.rglob("*.npy"):
            made = tmp_path / "out" / path.relative_to(embeddings)
            assert path.read_bytes() == made.read_bytes()


@pytest.mark.parametrize("name", dict(SIZES))
def test_a_read_only_disk_is_named(small_world, compared, tmp_path, capsys, monkeypatch, name):
    """A directory that is there; one that is not is named in tests/storage/test_locks.py."""
    out = tmp_path / "out"
    out.mkdir()
    arguments = command(name, small_world, compared, out)
    with read_only(out, monkeypatch):
        message = refused(capsys, *arguments)
    assert "Read-only file system" in message
    assert str(out) in message
    assert "choose a directory you may write to" in message
    assert not list(out.iterdir())
