"""Files from elsewhere that are not what they should be, each as the command that reads it."""

from __future__ import annotations

import gzip
import json
import pathlib
import struct
from collections.abc import Callable

from slips import IMPORT, PREPARE, TRAIN, Slip, World, add_line, bert


def one_long_line(path: str) -> Callable[[pathlib.Path], None]:
    """A gzip of 100 MiB without a line end."""

    def change(directory: pathlib.Path) -> None:
        (directory / path).unlink()
        (directory / f"{path}.gz").write_bytes(gzip.compress(b"x" * (100 << 20), compresslevel=1))

    return change


def eight_bits(directory: pathlib.Path) -> None:
    """A checkpoint whose only tensor has floats of 8 bits."""
    bert()(directory)
    header = {"w": {"dtype": "F8_E4M3", "shape": [2048], "data_offsets": [0, 2048]}}
    text = json.dumps(header).encode()
    content = struct.pack("<Q", len(text)) + text + bytes(2048)
    (directory / "bert" / "model.safetensors").write_bytes(content)


def nested(directory: pathlib.Path) -> None:
    """A config.json of a million brackets."""
    bert()(directory)
    (directory / "bert" / "config.json").write_text("[" * 1_000_000)


def wrong_prompt(directory: pathlib.Path) -> None:
    """A prompt as text, where a run records its ids."""
    path = directory / "model" / "run.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "query_prompt": "query: "}))
    (directory / "model" / "checksums.txt").unlink()


FILE_SLIPS = (
    Slip(
        "An id with a no-break space",
        (PREPARE,),
        change=add_line("shop/corpus.jsonl", '{"_id": "p\u00a012", "text": "The crane."}'),
    ),
    Slip(
        "Half of a character in JSON",
        (PREPARE,),
        change=add_line("shop/queries.jsonl", json.dumps({"_id": "q9", "text": "what \ud83e"})),
    ),
    Slip(
        "A gzip that unpacks to one endless line",
        (PREPARE,),
        change=one_long_line("shop/corpus.jsonl"),
    ),
    Slip("JSON nested a million deep", (IMPORT,), change=nested),
    Slip(
        "A Gin file that imports a module",
        (TRAIN,),
        change=add_line("faq.gin", "import subprocess"),
    ),
    Slip(
        "A DATA_DIR that is a link to itself",
        (f"{PREPARE} --gin.DATA_DIR=loop",),
        change=lambda directory: (directory / "loop").symlink_to("loop"),
    ),
    Slip("Weights of 8 bits", (IMPORT,), change=eight_bits),
    Slip(
        "A `run.json` whose prompt is not a list of ids",
        ("export --gin_file=faq.gin --gin.EXPORT_DIR=out",),
        world=World.MODEL,
        change=wrong_prompt,
    ),
)
