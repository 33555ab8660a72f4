"""Compressed files of real data, read without the package."""

import gzip
import pathlib


def lines(path: pathlib.Path) -> list[str]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [line.rstrip("\n") for line in file]
