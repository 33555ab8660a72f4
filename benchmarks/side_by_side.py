"""What `train_step.py` and `encode.py` share: timing in turns, memory, peaks, the machine's names.

Import it before anything computes: JAX then takes GPU memory as it needs it, not most of it at
once, so that PyTorch finds room in the same process.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import gc
import importlib.metadata
import json
import os
import pathlib
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

# JAX reads it when it first looks for devices.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax

from taser_jax.models.bert import BertConfig
from taser_jax.models.bert_layers import AttentionKernel


@dataclasses.dataclass
class Times:
    """Seconds of each repeat.

    Attributes:
        wall: by the clock.
        cpu: of all threads of this process together; other jobs on the machine change it less.
    """

    wall: list[float] = dataclasses.field(default_factory=list)
    cpu: list[float] = dataclasses.field(default_factory=list)

    def figures(self, baseline: Times | None) -> dict[str, Any]:
        """Medians in milliseconds; [least, median, most] ratio to the baseline, round by round."""
        wall, cpu = statistics.median(self.wall), statistics.median(self.cpu)
        figures: dict[str, Any] = {
            "milliseconds": 1e3 * wall,
            "cpu_milliseconds": 1e3 * cpu,
            "milliseconds_range": [1e3 * min(self.wall), 1e3 * max(self.wall)],
        }
        if baseline is not None:
            figures["ratio_to_torch"] = spread(self.wall, baseline.wall)
            figures["cpu_ratio_to_torch"] = spread(self.cpu, baseline.cpu)
        return figures


def spread(seconds: Sequence[float], baseline: Sequence[float]) -> list[float]:
    """Least, median and most of the ratios, round by round."""
    ratios = [ours / theirs for ours, theirs in zip(seconds, baseline, strict=True)]
    return [min(ratios), statistics.median(ratios), max(ratios)]


def in_turns(
    calls: Mapping[str, Callable[[], object]], *, repeats: int, uncounted: int = 0
) -> dict[str, Times]:
    """Runs all calls `repeats` times, one after another in each round; no warm-up.

    With `uncounted` each turn starts with that many extra calls, which warm up its memory.
    """
    times = {name: Times() for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            # Threads that finished the last call spin for a moment.
            time.sleep(0.05)
            for _ in range(uncounted):
                call()
            wall, cpu = time.perf_counter(), time.process_time()
            call()
            times[name].wall.append(time.perf_counter() - wall)
            times[name].cpu.append(time.process_time() - cpu)
    return times


class PeakResident:
    """Bytes by which this process grew at most inside the block (Linux); 0 where it can't be told.

    Example:
        >>> with PeakResident() as peak:
        ...     train()
        >>> peak.bytes
    """

    bytes = 0

    def __enter__(self) -> PeakResident:
        gc.collect()
        self._status = pathlib.Path("/proc/self/status")
        if self._status.exists():
            # What the C library keeps for reuse would hide what the block takes.
            ctypes.CDLL(None).malloc_trim(0)
            pathlib.Path("/proc/self/clear_refs").write_text("5")
            self._before = self._read("VmRSS")
        return self

    def __exit__(self, *_: object) -> None:
        if self._status.exists():
            self.bytes = self._read("VmHWM") - self._before

    def _read(self, field: str) -> int:
        lines = self._status.read_text().splitlines()
        (line,) = (line for line in lines if line.startswith(field))
        return int(line.split()[1]) * 2**10


def parse_with_presets(
    parser: argparse.ArgumentParser, presets: Mapping[str, Mapping[str, Any]]
) -> argparse.Namespace:
    """Parses the command line; what it does not say is the chosen preset's."""
    parser.add_argument("--preset", choices=presets, default="cpu")
    for name, value in presets["cpu"].items():
        how: dict[str, Any] = {"type": type(value)}
        if isinstance(value, bool):
            how = {"action": argparse.BooleanOptionalAction}
        parser.add_argument(f"--{name}", **how, help="overrides the preset's")
    parser.add_argument("--sides", nargs="+", choices=["ours", "torch"], default=["ours", "torch"])
    arguments = parser.parse_args()
    for name, value in presets[arguments.preset].items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    return arguments


def matmul_peak(size: int, dtype: str) -> float:
    """FLOPs per second of a square product, best of five."""
    # Of random numbers: GPUs clock higher on constant ones, which flip fewer bits.
    array = jax.random.normal(jax.random.key(0), (size, size), dtype)
    product = jax.jit(lambda x: x @ x)
    jax.block_until_ready(product(array))
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        jax.block_until_ready(product(array))
        seconds.append(time.perf_counter() - began)
    return 2 * size**3 / min(seconds)


def bert_config(arguments: argparse.Namespace, **others: Any) -> BertConfig:
    """The encoder that the presets' sizes describe, with further settings."""
    return BertConfig(
        vocab_size=arguments.vocab_size,
        embed_dim=arguments.embed_dim,
        num_layers=arguments.layers,
        num_heads=arguments.heads,
        head_dim=arguments.embed_dim // arguments.heads,
        mlp_dim=arguments.mlp_dim,
        dtype=arguments.dtype,
        attention=AttentionKernel(arguments.attention),
        **others,
    )


def machine(*packages: str) -> dict[str, Any]:
    """The hardware, its load, and versions of jax and of the packages named."""
    cpu = platform.processor() or platform.machine()
    info = pathlib.Path("/proc/cpuinfo")
    if info.exists():
        names = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        cpu = names[0].split(":", 1)[1].strip() if names else cpu
    return {
        "device": jax.devices()[0].device_kind,
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in ("jax", *packages)},
    }


def show(figure: Mapping[str, Any]) -> None:
    """Prints one JSON line."""
    print(json.dumps({name: _rounded(value) for name, value in figure.items()}), flush=True)


def _rounded(value: Any) -> Any:
    """Floats, alone or in a list, to six figures."""
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value
