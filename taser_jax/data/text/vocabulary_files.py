"""Shared by all kinds of vocabularies: the directory on disk."""

from __future__ import annotations

from typing import Any

from etils import epath

from taser_jax.storage.artifacts import check_version, read_json, replacing, write_json
from taser_jax.storage.errors import DataError, FingerprintError
from taser_jax.storage.json_fields import JsonField, JsonType

METADATA = "vocabulary.json"
FORMAT_VERSION = 1
# For vocabularies that split words differently from BERT's cased and uncased ones.
UNUSUAL_SPLITTING_VERSION = 2
SPLITTING = ("lower_case", "strip_accents", "split_ideographs")
FIELDS = {
    "kind": JsonField(JsonType.STRING),
    "fingerprint": JsonField(JsonType.STRING),
    "extra_ids": JsonField(JsonType.INTEGER, minimum=0),
    **dict.fromkeys(SPLITTING, JsonField(JsonType.BOOLEAN)),
}


def whole(text: str) -> str:
    """The text with "?" for lone surrogates, which JSON can contain but UTF-8 cannot."""
    return text.encode("utf-8", "replace").decode("utf-8")


def read_bytes(path: str) -> bytes:
    """Reads a local or `gs://` file.

    Raises:
        DataError: it is missing or cannot be read.
    """
    try:
        return epath.Path(path).read_bytes()
    except OSError as error:
        raise DataError(
            f"cannot be read ({error})",
            where=path,
            expected="a vocabulary directory, a BERT vocab.txt or a SentencePiece .model",
            fix="give its path, or make one with `taser vocab`",
        ) from error


def save_directory(
    directory: str,
    *,
    kind: str,
    fingerprint: str,
    size: int,
    data: tuple[str, bytes],
    **extra: object,
) -> None:
    """Writes the vocabulary's own file, then `vocabulary.json`.

    Args:
        directory: local or `gs://`; created if missing.
        kind: "wordpiece" or "sentencepiece".
        fingerprint: content fingerprint, checked on loading.
        size: number of ids.
        data: name and content of the vocabulary's own file.
        extra: further fields of `vocabulary.json`.
    """
    unusual = {"strip_accents", "split_ideographs"} & extra.keys()
    version = UNUSUAL_SPLITTING_VERSION if unusual else FORMAT_VERSION
    metadata = {"format_version": version, "kind": kind, "size": size}
    name, content = data
    with replacing(epath.Path(directory) / name) as scratch:
        scratch.write_bytes(content)
    write_json(epath.Path(directory) / METADATA, {**metadata, "fingerprint": fingerprint, **extra})


def read_metadata(directory: str) -> dict[str, Any]:
    """`vocabulary.json` of a saved vocabulary.

    Raises:
        DataError: not JSON, without a kind, or of another format version.
    """
    path, again = f"{directory}/{METADATA}", "make the vocabulary again with `taser vocab`"
    metadata = read_json(path, fields=FIELDS, fix=again)
    if metadata.get("format_version") != UNUSUAL_SPLITTING_VERSION:
        check_version(metadata, FORMAT_VERSION, where=path, fix=again)
    if "kind" not in metadata:
        raise DataError("not a vocabulary's metadata: no kind", where=path, fix=again)
    return metadata


def check_fingerprint(directory: str, metadata: dict[str, Any], found: str) -> None:
    """Raises `FingerprintError` if the files are not the ones that were saved."""
    if metadata.get("fingerprint", found) != found:
        raise FingerprintError(
            f"the vocabulary's files have fingerprint {found}",
            where=directory,
            expected=f"{metadata['fingerprint']}, as recorded in {METADATA}",
            fix="the file was changed after saving: restore it, or make the vocabulary again",
        )
