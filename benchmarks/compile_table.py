r"""What the TPU compiler says of TASER base and DPR base on pods: a table, one row at a time.

    nice python benchmarks/compile_table.py --results compile_results      # an hour or two
    python benchmarks/compile_table.py --results compile_results --print   # the rows there are

Needs libtpu (the extra `tpu`), no TPU. Texts are as long as runs/wikipedia_lengths.gin says, and
padded to the recipe's length_buckets, or all to 256 tokens with `--padding full`. A row is one run
of `taser compile` in a process of its own, and its report one directory of --results: what is there
is not compiled again, and has to be of the same --effort and --padding. A batch that would not fit
starts with the number of chunks that an estimate asks for; what the compiler refuses all
the same is compiled again with the chunks that the command's message names. The compiler works
with quick effort; `--effort full`, in another directory, takes four times as long. Prints Markdown.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import pathlib
import re
import subprocess
import sys
import time
from typing import Any

import jax

from taser_jax.commands.compile import REPORT_JSON
from taser_jax.devices.mesh import CHIPS
from taser_jax.storage.errors import EXIT_USER_ERROR

ROW_FILE = "row.json"
TOPOLOGIES = ("v5e:2x4", "v5e:4x8", "v5p:4x4x4", "v6e:4x8", "v4:2x2x4")
MODELS = ("taser", "dpr")
BATCHES = (256, 4096)
NUM_NEGATIVES, LENGTH = 1, 256
MOST_ATTEMPTS = 3
# --padding -> what it binds.
PADDING: dict[str, tuple[str, ...]] = {
    "buckets": (),
    "full": ("--gin.TrainingConfig.length_buckets=()",),
}


@dataclasses.dataclass(frozen=True)
class Row:
    """One configuration of the table."""

    model: str
    batch: int
    topology: str

    @property
    def name(self) -> str:
        """Of its directory."""
        return f"{self.model}-{self.batch}-{self.topology.replace(':', '-')}"


# What most people ask first comes first: a run that is cut short is still of use.
FIRST = (
    Row("taser", 256, "v5e:2x4"),
    Row("taser", 4096, "v5e:4x8"),
    Row("dpr", 256, "v5e:2x4"),
    Row("taser", 4096, "v5p:4x4x4"),
    Row("dpr", 4096, "v5e:4x8"),
    Row("taser", 4096, "v6e:4x8"),
)
ROWS = tuple(
    dict.fromkeys(
        (
            *FIRST,
            *(
                Row(model, batch, topology)
                for topology in TOPOLOGIES
                for batch in BATCHES
                for model in MODELS
            ),
        )
    )
)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--results", type=pathlib.Path, required=True)
    parser.add_argument("--print", action="store_true", help="compile nothing")
    parser.add_argument(
        "--effort", choices=("quick", "full"), default="quick", help="of the compiler"
    )
    parser.add_argument("--padding", choices=PADDING, default="buckets", help="of the texts")
    parser.add_argument("--rows", type=int, default=len(ROWS), help="how many, from the first")
    return parser.parse_args()


def num_chips(topology: str) -> int:
    return math.prod(int(size) for size in topology.split(":")[1].split("x"))


def likely_chunks(row: Row) -> int:
    """The least power of two whose activations are estimated to leave a fifth of the memory.

    Of a token each of BERT-base's 12 blocks stores about 9 vectors of width 768, 2 of 3,072 and 12
    rows of attention maps, in bfloat16.
    """
    devices, chunks = num_chips(row.topology), 1
    stored = 2 * 12 * (9 * 768 + 2 * 3072 + 12 * LENGTH)
    needed = row.batch * (2 + NUM_NEGATIVES) * LENGTH * stored / devices
    room = 0.8 * CHIPS[row.topology.split(":")[0]].hbm_bytes
    while needed / chunks > room and row.batch % (2 * chunks * devices) == 0:
        chunks *= 2
    return chunks


def compile_row(row: Row, results: pathlib.Path, *, effort: str, padding: str) -> None:
    """Compiles until it fits; leaves a row.json either way."""
    directory, chunks, tried = results / row.name, likely_chunks(row), []
    directory.mkdir(parents=True, exist_ok=True)
    for _ in range(MOST_ATTEMPTS):
        command = [
            *(sys.executable, "-m", "taser_jax.cli.main", "compile", f"--topology={row.topology}"),
            f"--gin_file=runs/{row.model}_base.gin",
            f"--gin.BATCH_SIZE={row.batch}",
            f"--gin.TrainingConfig.num_chunks={chunks}",
            *PADDING[padding],
            f"--gin.compile_recipe.compiler_effort={effort}",
            f"--gin.compile_recipe.output_dir={directory}",
        ]
        print(row.name, f"num_chunks={chunks}", flush=True)
        # A report that is there afterwards is this run's.
        (directory / REPORT_JSON).unlink(missing_ok=True)
        start = time.monotonic()
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        seconds = time.monotonic() - start
        (directory / "log.txt").write_text(done.stdout + done.stderr)
        fits = training_step_fits(directory / REPORT_JSON)
        if done.returncode != (0 if fits else EXIT_USER_ERROR) or fits is None:
            raise SystemExit(f"{' '.join(command)}\n{done.stderr[-4000:]}")
        tried.append({"num_chunks": chunks, "fits": fits, "seconds": seconds})
        advice = re.search(r"num_chunks=(\d+)", done.stderr)
        if fits or advice is None:
            break
        chunks = int(advice.group(1))
    about = dataclasses.asdict(row) | {
        "attempts": tried,
        "effort": effort,
        "padding": padding,
        "jax": jax.__version__,
    }
    (directory / ROW_FILE).write_text(json.dumps(about, indent=2) + "\n")


def training_step_fits(report: pathlib.Path) -> bool | None:
    """What the command wrote of the training step; None if it did not come as far."""
    return json.loads(report.read_text())["fits"] if report.exists() else None


def check_options(results: pathlib.Path, **options: str) -> None:
    """Ends the program where a row that is there was compiled with other options."""
    for row in ROWS:
        path = results / row.name / ROW_FILE
        about = json.loads(path.read_text()) if path.exists() else options
        for name, value in options.items():
            if about[name] != value:
                raise SystemExit(
                    f"{path}: compiled with {about[name]} {name}, and --{name} is {value}: one "
                    "table has rows of one kind; name another directory with --results"
                )


def markdown(results: pathlib.Path) -> str:
    """The rows there are."""
    lines = [
        "| model | batch | topology | chunks | peak GiB | of HBM | TFLOPs | x model | traffic GiB "
        "| sent MiB | compute ms | HBM ms | ICI ms | bound by | MFU at most | of real tokens "
        "| padding |",
        "|---|---:|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---|---:|---:|---:|",
    ]
    for row in ROWS:
        path = results / row.name / ROW_FILE
        if path.exists():
            about = json.loads(path.read_text())
            lines.append(_line(row, about["attempts"][-1], results / row.name / REPORT_JSON))
    return "\n".join(lines)


def _line(row: Row, attempt: dict[str, Any], report: pathlib.Path) -> str:
    start = [row.model, f"{row.batch:,}", row.topology, str(attempt["num_chunks"])]
    if not attempt["fits"]:
        return f"| {' | '.join([*start, 'does not fit', *[''] * 12])} |"
    step = json.loads(report.read_text())
    memory, flops, estimate = step["memory"], step["flops"], step["roofline"]
    sent = sum(each["sent"] for each in step["collectives"])
    cells = [
        *start,
        f"{memory['peak'] / 2**30:.2f}",
        f"{memory['peak'] / memory['hbm']:.0%}",
        f"{flops['matrix_products'] / 1e12:.2f}",
        f"{flops['matrix_products'] / flops['model']:.2f}",
        f"{step['bytes_accessed'] * flops['loop_factor'] / 2**30:.0f}",
        f"{sent / 2**20:.0f}",
        *(f"{1e3 * estimate[resource]:.1f}" for resource in ("compute", "hbm", "ici")),
        estimate["bound"],
        f"{estimate['mfu']:.0%}",
        f"{estimate['mfu_of_real_tokens']:.0%}",
        f"{step['padding']:.0%}",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    arguments = parse()
    options = {"effort": arguments.effort, "padding": arguments.padding}
    if not arguments.print:
        check_options(arguments.results, **options)
    for row in () if arguments.print else ROWS[: arguments.rows]:
        if not (arguments.results / row.name / ROW_FILE).exists():
            compile_row(row, arguments.results, **options)
    print(markdown(arguments.results))


if __name__ == "__main__":
    main()
