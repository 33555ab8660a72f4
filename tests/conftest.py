"""Eight fake CPU devices, shapes of signatures checked as tests run, compiled programs kept."""

import contextlib
import gc
import importlib.metadata
import importlib.util
import os
import pathlib
import platform
import re
import sys
import time
from collections.abc import Iterator

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# Tests run most programs once or twice: compiling less hard is a third of the time of it all.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + " --xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
)
# Later compilers do not know the flag, and end the process.
if importlib.metadata.version("jax").startswith("0.10."):
    os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"

import jax
import pytest
from jaxtyping import install_import_hook

jax.config.update("jax_num_cpu_devices", 8)
# PyTorch's triton ends a process that has TensorFlow.
sys.modules["triton"] = None  # type: ignore[assignment]
# What tests write need not outlast a power cut: a pipeline waits nine seconds for the disk.
os.fsync = lambda handle: None
# Tracing makes many objects and little garbage, which Python's 700 would look for too often.
gc.set_threshold(30_000)

_CHECKED = (
    *("taser_jax.models", "taser_jax.optim", "taser_jax.training", "taser_jax.retrieval"),
    # Not evaluation.specialty, whose tests have batches of their own.
    *(f"taser_jax.evaluation.{name}" for name in ("answers", "kilt", "metrics", "significance")),
    *(f"taser_jax.systems.muf.{name}" for name in ("confidence", "members", "oracle", "tables")),
    "taser_jax.data.batches.one_task",
)
install_import_hook(_CHECKED, "beartype.beartype")

pytest_plugins = ("buckets", "file_times", "worlds")

_KEEP_SECONDS = 30 * 24 * 3600


def keep_compiled_programs() -> None:
    """Compiles every program once per machine: other processes and later runs read it from disk.

    JAX's key covers the program, the compiler's flags and its version, so nothing becomes stale;
    programs older than 30 days are deleted. JAX_COMPILATION_CACHE_DIR names another directory.
    """
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    if jax.config.jax_compilation_cache_dir is not None:
        return
    cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
    # Programs are machine code: a home directory may be shared by different processors.
    directory = cache / "taser_jax" / "tests" / platform.node()
    directory.mkdir(parents=True, exist_ok=True)
    if "PYTEST_XDIST_WORKER" not in os.environ:
        for program in directory.iterdir():
            # Another run may have deleted it meanwhile.
            with contextlib.suppress(FileNotFoundError):
                if program.stat().st_mtime < time.time() - _KEEP_SECONDS:
                    program.unlink()
    jax.config.update("jax_compilation_cache_dir", str(directory))


keep_compiled_programs()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips a test whose `needs` marks name a module that is not installed."""
    for mark in item.iter_markers("needs"):
        for module in mark.args:
            # Not imported: `import scann` loads TensorFlow.
            if importlib.util.find_spec(module) is None:
                pytest.skip(f"{module} is not installed: it has no wheel for every Python")


# Python 3.14 has no wheels of them yet.
_ABSENT = [
    name
    for name in ("tensorflow", "tensorflow_text", "seqio")
    if importlib.util.find_spec(name) is None
]


def _skip_if_absent(report: pytest.TestReport | pytest.CollectReport, where: pathlib.Path) -> None:
    missing = re.search(r"No module named '(\w+)", str(report.longrepr))
    if report.failed and missing is not None and missing[1] in _ABSENT:
        report.outcome = "skipped"
        report.longrepr = (str(where), 0, f"Skipped: {missing[1]} is not installed")


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    """Skips a file that imports TensorFlow or SeqIO where it is not installed."""
    report = yield
    _skip_if_absent(report, collector.path)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Skips a test that imports it."""
    report = yield
    _skip_if_absent(report, item.path)
    return report


def pytest_collection_finish() -> None:
    """Exempts imported modules, a million objects, from every later garbage collection."""
    gc.collect()
    gc.freeze()
    orbax = sys.modules.get("orbax.checkpoint")
    if orbax is not None:
        # A save would divide small arrays among the devices: a program for each shape and device.
        # The two processes of tests/distributed save so.
        handler = orbax.type_handlers.get_type_handler(jax.Array)
        handler._min_slice_bytes_for_replica_parallel = 2**20
