"""Power cuts: what is on the disk if everything that no fsync has followed is lost.

    python benchmarks/power_cuts.py --directory=/tmp/power_cuts

`taser train`, `taser encode` and the building of an index run once on tiny data, below
power_cuts.c, which notes each change of a name and each fsync, with the content then. Of each, 50
prefixes of these notes are replayed, in two ways: names that no fsync of their folder has followed
are lost, too, or all names are kept (as most journals do), and what was not synced is an empty
file. In both, the artefact must be what it was before the command or what the command makes of it:
absent and said to be unfinished, or open with the undisturbed bits. Needs a C compiler.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
from trials import environment, gin

# isort: split
# Found only where `trials` has been imported.
import tiny_command
import tiny_training

from taser_jax.retrieval.embeddings import Embeddings
from taser_jax.retrieval.index import open_index
from taser_jax.storage.errors import TaserError
from taser_jax.training.checkpoints import set_aside_damaged

# As `taser search` does first.
INDEX = """
import sys
from taser_jax.commands.search import index
from taser_jax.retrieval.index import IndexConfig, IndexKind
index(embeddings_dir=sys.argv[1], index_dir=sys.argv[2], config=IndexConfig(IndexKind.EXACT))
"""
Note = tuple[str, str, str]
"""Kind, path, and a second path or the copy of what was synced."""


@dataclasses.dataclass
class File:
    """A file; `copy` has its content when it was last synced, None if it never was."""

    copy: pathlib.Path | None = None


@dataclasses.dataclass
class Folder:
    """A folder: its names, and those that its last fsync has put on the disk."""

    names: dict[str, File | Folder] = dataclasses.field(default_factory=dict)
    synced: dict[str, File | Folder] = dataclasses.field(default_factory=dict)


class Disk:
    """A folder as it was, and what notes make of it.

    Args:
        root: the folder's path in the notes.
        before: a copy of it; all of it is on the disk.
    """

    def __init__(self, root: pathlib.Path, before: pathlib.Path) -> None:
        self._root, self._top = root, _read(before)

    def play(self, notes: Iterable[Note]) -> Disk:
        """Follows notes in their order. Returns self."""
        for kind, path, second in notes:
            folder, name = self._place(path)
            if kind == "sync":
                node = folder.names.get(name) if name else self._top
                if isinstance(node, Folder):
                    node.synced = dict(node.names)
                elif node is not None:
                    node.copy = pathlib.Path(second)
            elif kind in ("file", "folder"):
                folder.names[name] = File() if kind == "file" else Folder()
            elif kind == "remove":
                folder.names.pop(name, None)
            else:
                other, new = self._place(second)
                if kind == "exchange":
                    pair = folder.names[name], other.names[new]
                    other.names[new], folder.names[name] = pair
                else:
                    # What comes from outside has not been synced here.
                    node = folder.names.get(name, File())
                    if kind == "rename":
                        folder.names.pop(name, None)
                    other.names[new] = node
        return self

    def _place(self, path: str) -> tuple[Folder, str]:
        """The folder of a path, and the name in it; folders outside are empty ones."""
        given = pathlib.Path(path)
        if not given.is_relative_to(self._root) or given == self._root:
            return Folder(), ""
        *above, name = given.relative_to(self._root).parts
        folder = self._top
        for part in above:
            entry = folder.names.get(part)
            folder = entry if isinstance(entry, Folder) else Folder()
        return folder, name

    def write(self, target: pathlib.Path, *, all_names: bool) -> None:
        """Writes what is on the disk into a new folder."""
        _write(self._top, target, all_names)


def _read(before: pathlib.Path) -> Folder:
    names: dict[str, File | Folder] = {
        path.name: _read(path) if path.is_dir() else File(path) for path in before.iterdir()
    }
    return Folder(names, dict(names))


def _write(folder: Folder, target: pathlib.Path, all_names: bool) -> None:
    target.mkdir()
    for name, node in (folder.names if all_names else folder.synced).items():
        if isinstance(node, Folder):
            _write(node, target / name, all_names)
        elif node.copy is None:
            (target / name).touch()
        else:
            shutil.copyfile(node.copy, target / name)


def recorded(
    command: Sequence[str], root: pathlib.Path, notes: pathlib.Path, **variables: str
) -> list[Note]:
    """Runs a command and returns what it noted below a folder.

    Args:
        command: its words.
        root: the folder.
        notes: a new folder for notes and copies.
        variables: of its environment.
    """
    notes.mkdir()
    source, library = pathlib.Path(__file__).with_suffix(".c"), notes / "power_cuts.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    own = {"LD_PRELOAD": str(library), "CUTS_ROOT": str(root), "CUTS_NOTES": str(notes)}
    subprocess.run(command, check=True, env=os.environ | variables | own)
    lines = (notes / "notes").read_text().splitlines() if (notes / "notes").exists() else []
    return [(kind, path, second) for kind, path, second in (line.split("\t") for line in lines)]


def outcomes(
    notes: Sequence[Note],
    root: pathlib.Path,
    before: pathlib.Path,
    opened: Callable[[pathlib.Path], str],
    *,
    prefixes: int = 50,
) -> dict[str, collections.Counter[str]]:
    """What opens after power cuts at evenly spread moments.

    Args:
        notes: of a command.
        root: the folder that it wrote.
        before: a copy of that from before.
        opened: opens a folder and says in a word what is there.
        prefixes: number of moments.

    Returns:
        Which names reached the disk -> word -> moments.
    """
    moments = np.unique(np.linspace(0, len(notes), prefixes).round().astype(int))
    counts = {}
    for names in ("synced names", "all names"):
        counts[names] = collections.Counter[str]()
        for moment in moments:
            with tempfile.TemporaryDirectory() as scratch:
                place = pathlib.Path(scratch, "disk")
                disk = Disk(root, before).play(notes[:moment])
                disk.write(place, all_names=names == "all names")
                counts[names][opened(place)] += 1
    return counts


def table(rows: Mapping[str, tuple[int, Mapping[str, Mapping[str, int]]]]) -> str:
    """Markdown: command -> number of notes, and `outcomes`."""
    lines = ["| command | changes and syncs | what reached the disk | then there is |"]
    lines.append("|---|---:|---|---|")
    for command, (count, by_names) in rows.items():
        for names, words in by_names.items():
            told = ", ".join(f"{word}: {number}" for word, number in sorted(words.items()))
            lines.append(f"| `{command}` | {count:,} | synced files, {names} | {told} |")
    return "\n".join(lines)


class Judge:
    """Says what a disk holds of each command's artefact.

    Args:
        world: the folder that the commands write, undisturbed.
    """

    def __init__(self, world: pathlib.Path) -> None:
        self._world = world
        # Steps whose checkpoints have given way to others are known from where they are seen first.
        self._states: dict[int, bytes] = {}

    def train(self, disk: pathlib.Path) -> str:
        """The newest checkpoint, as a training that resumes finds it."""
        set_aside_damaged(disk / "model")
        steps = [int(path.name[-1]) for path in (disk / "model").glob("checkpoint_?")]
        if not steps:
            return "nothing"
        state = tiny_command.final_state(disk / "model", max(steps))
        content = b"".join(array.tobytes() for array in state.values())
        if self._states.setdefault(max(steps), content) != content:
            return "OTHER BITS"
        return f"checkpoint {max(steps)}"

    def encode(self, disk: pathlib.Path) -> str:
        """The embeddings."""
        if not (disk / "embeddings" / "metadata.json").exists():
            return "nothing finished"
        embeddings, whole = (Embeddings(root / "embeddings") for root in (disk, self._world))
        same = np.array_equal(embeddings[:], whole[:])
        return "all embeddings" if same else "OTHER BITS"

    def index(self, disk: pathlib.Path) -> str:
        """What the index finds."""
        if not (disk / "index" / "metadata.json").exists():
            return "nothing finished"
        queries = Embeddings(self._world / "embeddings")[:8]
        hits, whole = (
            open_index(root / "index").search(queries, 5) for root in (disk, self._world)
        )
        return "the index" if np.array_equal(hits.rows, whole.rows) else "OTHER BITS"


def judged(judge: Callable[[pathlib.Path], str]) -> Callable[[pathlib.Path], str]:
    """With what is refused as damaged."""

    def opened(disk: pathlib.Path) -> str:
        try:
            return judge(disk)
        except TaserError as error:
            return f"DAMAGED: {error.problem}"

    return opened


def main() -> None:
    """Records the commands, replays their prefixes and prints the table."""
    parser = argparse.ArgumentParser(description="power cuts")
    parser.add_argument("--directory", type=pathlib.Path, required=True)
    parser.add_argument("--prefixes", type=int, default=50)
    options = parser.parse_args()
    root = options.directory.resolve()
    shutil.rmtree(root, ignore_errors=True)
    world = root / "world"
    world.mkdir(parents=True)
    tiny_command.TinyCommand(root, world / "tokens", train_steps=6).prepare()
    tiny_training.write_token_store(world / "tokens")
    tokens, model = gin(TOKEN_STORE=world / "tokens"), gin(MODEL_DIR=world / "model")
    steps = (f"--gin_file={root / 'tiny.gin'}", *gin(TRAIN_STEPS=6, CHECKPOINT_PERIOD=2))
    embeddings, taser = world / "embeddings", ("-m", "taser_jax.cli.main")
    commands = {
        "train": (*taser, "train", *steps, *model, *tokens),
        "encode": (*taser, "encode", *model, *tokens, *gin(EMBEDDINGS_DIR=embeddings)),
        "index": ("-c", INDEX, str(embeddings), str(world / "index")),
    }
    judge, rows = Judge(world), {}
    for name, words in commands.items():
        before = root / f"before-{name}"
        shutil.copytree(world, before)
        notes = recorded(
            [sys.executable, *words], world, root / f"notes-{name}", **environment(root)
        )
        opened = judged(getattr(judge, name))
        rows[name] = len(notes), outcomes(notes, world, before, opened, prefixes=options.prefixes)
        print(name, rows[name], flush=True)
    print(table(rows))


if __name__ == "__main__":
    main()
