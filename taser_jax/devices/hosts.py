"""Several hosts running one program: joining, agreement, work done once, by host 0, and locks.

Each host of a pod runs the same command. Joint computation needs no special treatment, but work
that must be done once does, and hosts must be started with equal settings.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import os
import pickle
import re
import socket
import string
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import ParamSpec, TypeVar, cast

import jax
import numpy as np
from jax.experimental import multihost_utils

from taser_jax.storage import progress
from taser_jax.storage.artifacts import FilePath, check_kind, fingerprint, is_remote
from taser_jax.storage.errors import ConfigError, HostLostError, TaserError
from taser_jax.storage.publishing import one_writer

P = ParamSpec("P")
T = TypeVar("T")

COORDINATOR_TIMEOUT = 300
# Seconds that JAX's runtime waits longer than we do.
_GRACE = 60
# Seconds that a host that failed gives the other hosts to end.
_LEAVING = 20
# Words of JAX's errors about a lost host, for which it has no exception type.
_LOST = re.compile(
    "gloo|nccl|heartbeat|coordination|another task died|barrier|"
    "connection reset by peer|connection closed by peer|broken pipe|socket closed"
)
# Variables that JAX does not read itself (it reads the coordinator's address), by its arguments.
_VARIABLES = {"num_processes": "JAX_NUM_PROCESSES", "process_id": "JAX_PROCESS_ID"}
_joined: list[int] = []
# What host 0 does while the others wait.
_alone: list[str] = []


def initialize(*, timeout: int = COORDINATOR_TIMEOUT) -> None:
    """Joins the other hosts; afterwards only host 0 logs and shows progress.

    On TPU pods, Slurm and Kubernetes JAX finds the coordinator itself. Elsewhere set the
    environment variables JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID.

    Args:
        timeout: seconds to wait for the coordinator and for the hosts.

    Raises:
        ConfigError: no coordinator is known, its port is taken, it or a host did not answer in
            time, or joining failed for another reason.
    """
    address = os.environ.get("JAX_COORDINATOR_ADDRESS")
    options = _from_environment()
    if address is not None:
        elsewhere = "JAX_COORDINATOR_BIND_ADDRESS" in os.environ
        _check_address(address, serves=options.get("process_id") == 0 and not elsewhere)
    failures: list[Exception] = []

    def join() -> None:
        try:
            jax.distributed.initialize(
                num_processes=options.get("num_processes"),
                process_id=options.get("process_id"),
                initialization_timeout=timeout + _GRACE,
            )
        except Exception as error:
            failures.append(error)

    # JAX's runtime aborts the process when its own time is up, without a helpful message. So
    # ours ends before, and the thread is left behind.
    thread = threading.Thread(target=join, daemon=True)
    thread.start()
    thread.join(timeout)
    if thread.is_alive():
        raise ConfigError(
            f"the coordinator{f' at {address}' if address else ''} did not answer, or not all "
            f"hosts came, within {timeout} s",
            where="--multihost",
            fix="check that host 0 runs, its port is reachable and every host was started; "
            "--coordinator_timeout=SECONDS waits longer",
        )
    if failures:
        failure = failures[0]
        variables = f"JAX_COORDINATOR_ADDRESS, {', '.join(_VARIABLES.values())}"
        if address is None:
            problem = f"no coordinator, as TPU pods, Slurm and Kubernetes have one ({failure})"
            fix = f"leave out --multihost on one host, or set {variables} (0 on the first host)"
        else:
            problem = f"the hosts could not be joined ({type(failure).__name__}: {failure})"
            fix = f"check {variables}, and the output of the other hosts"
        raise ConfigError(problem, where="--multihost", fix=fix) from failure
    _joined.append(jax.process_index())
    if not is_first():
        progress.silence()
        logging.getLogger("taser").setLevel(logging.WARNING)


def joined_as() -> int | None:
    """This host's number, if `initialize` has joined it to others; does not query devices."""
    return _joined[-1] if _joined else None


@contextlib.contextmanager
def naming_lost_hosts() -> Iterator[None]:
    """Turns the errors that JAX raises when another host is gone into a `HostLostError`.

    Raises:
        HostLostError: joint work failed since another host has ended or cannot be reached.
    """
    try:
        yield
    except (RuntimeError, ValueError, TimeoutError) as error:
        # JAX raises RuntimeErrors, compiled programs also ValueErrors, and Orbax TimeoutErrors.
        if not _joined or not _LOST.search(str(error).lower()):
            raise
        reason = str(error).partition("\n")[0]
        raise HostLostError(f"joint work with another host failed ({reason})") from error


def leave(status: int) -> None:
    """Ends this process if it failed after it had joined other hosts; else does nothing.

    At exit JAX waits minutes for all hosts. A host that is lost, or still waits for this one in a
    joint computation, would never come; the others get some seconds to fail and report why.

    Args:
        status: the process's exit status; 0 is success.
    """
    if status == 0 or not _joined:
        return
    thread = threading.Thread(target=_shut_down, daemon=True)
    thread.start()
    thread.join(_LEAVING)
    if thread.is_alive():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _shut_down() -> None:
    # Hosts that are gone have been reported already.
    with contextlib.suppress(Exception):
        jax.distributed.shutdown()


def _from_environment() -> dict[str, int]:
    """JAX's arguments by the environment's variables."""
    try:
        return {
            key: int(os.environ[name]) for key, name in _VARIABLES.items() if name in os.environ
        }
    except ValueError as error:
        where = " or ".join(_VARIABLES.values())
        raise ConfigError(str(error), where=where, fix="set whole numbers") from error


def _check_address(address: str, *, serves: bool) -> None:
    """Refuses addresses to which JAX's runtime reacts with an IndexError or a crash."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        problem, where = f"{address!r} is no HOST:PORT", "JAX_COORDINATOR_ADDRESS"
        fix = "give host 0's name or IP address, and a free port of it"
        raise ConfigError(problem, where=where, fix=fix)
    if not serves:
        return
    try:
        socket.create_server(("", int(port))).close()
    except OSError as error:
        problem = f"host 0 cannot listen on port {port} ({os.strerror(error.errno or 0)})"
        fix = "end the process of an earlier start, or use another port on all hosts"
        raise ConfigError(problem, where="JAX_COORDINATOR_ADDRESS", fix=fix) from error


def keep_compiled_programs(directory: FilePath) -> None:
    """Lets later runs read this one's compiled programs from `directory`/compilation_cache.

    A directory that JAX has already, from JAX_COMPILATION_CACHE_DIR or an enclosing pipeline,
    stays; else TASER_CACHE names one for all models, and empty keeps none. Nothing is kept where
    the directory cannot be written.

    Args:
        directory: the model's, or the pipeline's output, local or gs://.
    """
    chosen = os.environ.get("TASER_CACHE", f"{directory}/compilation_cache")
    writable = is_remote(chosen) or os.access(directory, os.W_OK) or "TASER_CACHE" in os.environ
    # Not an attribute that type checkers of all JAX versions know: it is set as JAX loads.
    if getattr(jax.config, "jax_compilation_cache_dir") is None and chosen and writable:  # noqa: B009
        jax.config.update("jax_compilation_cache_dir", chosen)
        # A training compiles dozens of programs that take less than a second each.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def is_first() -> bool:
    """Whether this is host 0, which does all work that is done once."""
    return jax.process_index() == 0


def require_same(facts: Mapping[str, str]) -> None:
    """Raises on every host if any host was started with other facts.

    Example:
        require_same({"configuration": gin_text, "data": stream.fingerprint})

    Args:
        facts: name -> text that must be equal on all hosts. The names must be, too.

    Raises:
        ConfigError: names what differs, and on which hosts.
    """
    if jax.process_count() == 1:
        return
    mine = [fingerprint([name, text]) for name, text in facts.items()]
    digits = np.array([list(digest.encode()) for digest in mine], np.uint8)
    everyone = np.asarray(multihost_utils.process_allgather(digits))
    differ = (everyone != everyone[0]).any(axis=2)
    differences = [
        f"{name} differs on host {', '.join(map(str, np.flatnonzero(on_hosts)))} from host 0"
        for name, on_hosts in zip(facts, differ.T, strict=True)
        if on_hosts.any()
    ]
    if differences:
        where = f"hosts 0 to {jax.process_count() - 1}"
        fix = "copy the same checkout, Gin files and data to all hosts, then start them again"
        raise ConfigError("; ".join(differences), where=where, fix=fix)


def first_host_only(work: Callable[P, T]) -> Callable[P, T]:
    """Makes a function run on host 0 only; the other hosts wait and return its result.

    All hosts must call it, but for work that is part of such work. The result is sent between them
    and must be picklable.

    Raises:
        TaserError: on the other hosts, if host 0 failed.
    """

    @functools.wraps(work)
    def on_first(*args: P.args, **kwargs: P.kwargs) -> T:
        if jax.process_count() == 1 or _alone:
            return work(*args, **kwargs)
        result, failure = None, None
        if is_first():
            _alone.append(work.__name__)
            try:
                result = work(*args, **kwargs)
            except BaseException as error:
                failure = error
            _alone.clear()
        message = None if failure is None else f"{type(failure).__name__}: {failure}"
        result, message = _from_first((result, message))
        if failure is not None:
            raise failure
        if message is not None:
            raise TaserError(f"host 0 stopped ({message})", where=work.__name__)
        return cast(T, result)

    return on_first


def _from_first(value: T) -> T:
    """Host 0's value, on every host."""
    data = np.frombuffer(pickle.dumps(value), np.uint8) if is_first() else np.zeros(0, np.uint8)
    size = int(multihost_utils.broadcast_one_to_all(np.array(len(data), np.int32)))
    data = data if is_first() else np.zeros(size, np.uint8)
    # As int32, which every backend's collectives can sum without a change of type.
    received = np.asarray(multihost_utils.broadcast_one_to_all(data.astype(np.int32)))
    return pickle.loads(received.astype(np.uint8).tobytes())


def writes(
    *directories: str, kinds: Sequence[str] | None = None, may_be_remote: bool = False
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Makes a command the only writer of its directories while it runs, on whichever host.

    All hosts must call the command. A dry run writes nothing and takes no lock.

    Example:
        @writes("{setting.output_dir}")
        def pipeline(*, setting: Setting) -> None: ...

    Args:
        directories: paths with the command's arguments and their fields in braces; a path whose
            argument is None or empty is skipped.
        kinds: the kinds of artefacts that the directories may hold before; [] is none, and None
            leaves the check to what the command calls.
        may_be_remote: whether the command can write to a bucket.

    Raises:
        BusyError: another process writes there.
        ConfigError: a directory in a bucket, and the command writes to local ones alone; or one
            with an artefact of another kind.
    """

    def decorate(command: Callable[P, T]) -> Callable[P, T]:
        signature = inspect.signature(command)

        @functools.wraps(command)
        def locked(*args: P.args, **kwargs: P.kwargs) -> T:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            given = bound.arguments
            paths = [_filled(pattern, given) for pattern in directories]
            remote = next((path for path in paths if path and is_remote(path)), None)
            if remote is not None and not may_be_remote:
                fix = "write to a local directory, and copy it with gcloud storage cp -r"
                raise ConfigError(f"{command.__name__} writes no buckets", where=remote, fix=fix)
            with contextlib.ExitStack() as held:
                if not given.get("dry_run"):
                    first_host_only(_lock)(held, paths, kinds)
                return command(*args, **kwargs)

        vars(locked)["directories"] = directories
        return locked

    return decorate


def written_by(command: Callable[..., object], arguments: Mapping[str, object]) -> list[str]:
    """The directories that a command with `writes` writes with these arguments."""
    patterns: Sequence[str] = getattr(command, "directories", ())
    return [path for pattern in patterns if (path := _filled(pattern, arguments))]


def _filled(pattern: str, arguments: Mapping[str, object]) -> str | None:
    """A path with its fields filled in; None where one is empty."""
    formatter = string.Formatter()
    fields = [name for _, name, _, _ in formatter.parse(pattern) if name]
    if not all(formatter.get_field(name, (), arguments)[0] for name in fields):
        return None
    return pattern.format(**arguments)


def _lock(
    held: contextlib.ExitStack, directories: Sequence[str | None], kinds: Sequence[str] | None
) -> None:
    for directory in filter(None, directories):
        held.enter_context(one_writer(directory))
        if kinds is not None:
            check_kind(directory, kinds)


def wait_for_all(name: str) -> None:
    """Waits until all hosts have reached this point."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)
