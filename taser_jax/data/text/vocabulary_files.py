"""What every kind of vocabulary shares: its directory on disk, and eager encoding."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from taser_jax.errors import DataError, FingerprintError, StorageError

FORMAT_VERSION = 1
METADATA = "vocabulary.json"
SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_ENCODE_BATCH = 1024


def encode_eagerly(
    encode_tf: Callable[[tf.Tensor], tf.RaggedTensor], texts: Sequence[str]
) -> list[list[int]]:
    """Ids of Python strings through a vocabulary's TensorFlow graph, in batches.

    Lone surrogates, which JSON can spell and UTF-8 cannot, become "?".
    """
    ids: list[list[int]] = []
    for start in range(0, len(texts), _ENCODE_BATCH):
        batch = [text.encode("utf-8", "replace") for text in texts[start : start + _ENCODE_BATCH]]
        ids.extend(encode_tf(tf.constant(batch, tf.string)).to_list())
    return ids


def read_bytes(path: str) -> bytes:
    """A local or `gs://` file.

    Raises:
        DataError: it is absent or cannot be read.
    """
    try:
        return tf.io.gfile.GFile(path, "rb").read()
    except (tf.errors.OpError, OSError) as error:
        raise DataError(
            f"cannot be read ({error})",
            where=path,
            expected="a vocabulary directory, a BERT vocab.txt or a SentencePiece .model",
            fix="give its path, or make one with `taser vocab`",
        ) from error


def save_directory(
    directory: str, *, kind: str, fingerprint: str, size: int, data: tuple[str, bytes], **extra: Any
) -> None:
    """Writes the vocabulary's own file, then `vocabulary.json`.

    Args:
        directory: made where absent; local or `gs://`.
        kind: "wordpiece" or "sentencepiece".
        fingerprint: content fingerprint, checked on loading.
        size: number of ids.
        data: name and content of the vocabulary's own file.
        extra: further fields of `vocabulary.json`.
    """
    metadata = {"format_version": FORMAT_VERSION, "kind": kind, "size": size}
    metadata |= {"fingerprint": fingerprint, **extra}
    text = json.dumps(metadata, indent=2, sort_keys=True) + "\n"
    try:
        tf.io.gfile.makedirs(directory)
        for name, content in (data, (METADATA, text.encode())):
            with tf.io.gfile.GFile(f"{directory}/{name}", "wb") as file:
                file.write(content)
    except (tf.errors.OpError, OSError) as error:
        raise StorageError(
            f"the vocabulary cannot be written ({error})",
            where=directory,
            fix="free space or choose another directory",
        ) from error


def read_metadata(directory: str) -> dict[str, Any]:
    """`vocabulary.json` of a saved vocabulary.

    Raises:
        DataError: not JSON, no kind, or of another format version.
    """
    path = f"{directory}/{METADATA}"
    try:
        metadata = json.loads(read_bytes(path).decode("utf-8"))
        version, _ = metadata["format_version"], metadata["kind"]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"not a vocabulary's metadata ({error})",
            where=path,
            fix="make the vocabulary again with `taser vocab`",
        ) from error
    if version != FORMAT_VERSION:
        raise DataError(
            f"format version {version}",
            where=path,
            expected=f"format version {FORMAT_VERSION}",
            fix="make the vocabulary again with `taser vocab`",
        )
    return metadata


def check_fingerprint(directory: str, metadata: dict[str, Any], found: str) -> None:
    """Raises `FingerprintError` where the files are not the ones that were saved."""
    if metadata.get("fingerprint", found) != found:
        raise FingerprintError(
            f"the vocabulary's files have fingerprint {found}",
            where=directory,
            expected=f"{metadata['fingerprint']}, as recorded in {METADATA}",
            fix="the file was changed after saving: restore it, or make the vocabulary again",
        )
