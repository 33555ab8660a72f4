"""Runs commands or prints them; packs git's files; names an image by its digest."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from _options import LaunchError

ROOT = pathlib.Path(__file__).resolve().parents[1]


class Shell:
    """Runs commands; a dry run prints them so that a shell can read them back.

    Args:
        dry_run: whether to print.
    """

    def __init__(self, dry_run: bool) -> None:
        self.dry_run = dry_run
        self.is_ending = False
        self._connections: set[subprocess.Popen[str]] = set()
        self._lock = threading.Lock()

    def step(self, words: Sequence[str]) -> int:
        """Runs a command with this terminal; returns its status."""
        if self.dry_run:
            print(shlex.join(words))
            return 0
        return subprocess.run(words).returncode

    def ask(self, words: Sequence[str]) -> tuple[int, str, str]:
        """Status, output and errors of a command."""
        answer = subprocess.run(words, capture_output=True, text=True, errors="replace")
        return answer.returncode, answer.stdout, answer.stderr

    def request(self, words: Sequence[str]) -> tuple[int, str]:
        """Status and errors of a command, which are shown as they come."""
        errors = []
        with subprocess.Popen(
            words, stderr=subprocess.PIPE, text=True, errors="replace"
        ) as process:
            for line in process.stderr or ():
                sys.stderr.write(line)
                errors.append(line)
        return process.returncode, "".join(errors)

    def follow(self, words: Sequence[str], read: Callable[[str], None] = lambda line: None) -> int:
        """Shows a command's output and errors as they come, and gives each line to `read`.

        The command runs in a process group of its own, which Ctrl-C does not reach.

        Returns:
            The command's status.
        """
        if self.dry_run:
            return self.step(words)
        with self._lock:
            if self.is_ending:
                return 128 + signal.SIGTERM
            process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,
            )
            self._connections.add(process)
        for line in process.stdout or ():
            # On a line of its own, even if a host was cut off within a line.
            sys.stdout.write(line if line.endswith("\n") else line + "\n")
            read(line)
        status = process.wait()
        with self._lock:
            self._connections.discard(process)
        return status if status >= 0 else 128 - status

    def end(self) -> None:
        """Ends everything that is followed."""
        with self._lock:
            self.is_ending = True
            for process in self._connections:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGTERM)

    def sleep(self, seconds: int) -> None:
        """Waits, unless everything is about to end."""
        if not self.is_ending:
            subprocess.run(["sleep", str(seconds)])


@contextlib.contextmanager
def scratch_folder(shell: Shell) -> Iterator[pathlib.Path]:
    """A folder that is deleted at the end."""
    if shell.dry_run:
        folder = pathlib.Path(tempfile.gettempdir(), "taser_launch")
        shell.step(["mkdir", "-p", str(folder)])
        yield folder
        return
    with tempfile.TemporaryDirectory() as name:
        yield pathlib.Path(name)


def archive_checkout(shell: Shell, scratch: pathlib.Path) -> pathlib.Path:
    """Packs the files that git has, as they are here: nothing else is meant for other machines.

    Raises:
        LaunchError: this is no git checkout.
    """
    archive, names = scratch / "taser_jax.tgz", scratch / "files"
    listing = ["git", "-C", str(ROOT), "ls-files", "-z"]
    if shell.dry_run:
        print(f"{shlex.join(listing)} >{shlex.quote(str(names))}")
    else:
        status, output, errors = shell.ask(listing)
        if status:
            raise LaunchError(
                f"git cannot list the files of {ROOT}: {errors.strip()}\n"
                "  fix: launch from a git checkout; an unpacked archive becomes one by "
                "git init && git add ."
            )
        # One that was deleted here is still in git's list.
        names.write_text("\0".join(n for n in output.split("\0") if n and (ROOT / n).exists()))
        new_files = [*listing[:-1], "--others", "--exclude-standard", "--", "*.py", "*.gin"]
        new = shell.ask(new_files)[1].splitlines()
        if new:
            more = f" and {len(new) - 3} more" if len(new) > 3 else ""
            print(
                f"warning: git does not have {', '.join(new[:3])}{more}, "
                "so hosts do not get them; use git add",
                file=sys.stderr,
            )
    words = ["tar", "-czf", str(archive), "-C", str(ROOT), "--null", "-T", str(names)]
    if shell.step(words):
        raise LaunchError("the checkout cannot be packed; see the message of tar")
    return archive


def read_json(text: str) -> Any:
    """What a program printed as JSON; None if it did not."""
    try:
        return json.loads(text)
    except ValueError:
        return None


def pushed_digest(shell: Shell, image: str) -> str:
    """The image that was pushed, named by its digest: a tag may get another image between restarts.

    Example:
        r/taser:1 is r/taser@sha256:0123...

    Raises:
        LaunchError: docker does not know the digest.
    """
    words = ["docker", "image", "inspect", image]
    folder, slash, name = image.rpartition("/")
    repository = folder + slash + name.partition(":")[0]
    if shell.dry_run:
        shell.step(words)
        return f"{repository}@sha256:DIGEST"
    status, output, errors = shell.ask(words)
    images = read_json(output) if status == 0 else None
    for digest in (images or [{}])[0].get("RepoDigests", []):
        if digest.partition("@")[0] == repository:
            return digest
    raise LaunchError(
        f"docker has no digest of {image} after its push {errors.strip()}\n"
        "  fix: give --image=IMAGE@sha256:DIGEST and --skip_build"
    )
