"""Vocabularies that are a `tokenizer.json`: byte-level BPE, Unigram, or WordPiece unlike BERT's."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from etils import epath

from taser_jax.data.text import vocabulary_files
from taser_jax.data.text.vocabulary_files import TOKENIZER_FILE
from taser_jax.storage.artifacts import fingerprint
from taser_jax.storage.errors import ConfigError, DataError

if TYPE_CHECKING:
    import tensorflow as tf


class TokenizerJsonVocabulary:
    """Splits text as a file of Hugging Face's `tokenizers` says: RoBERTa, XLM-R, MPNet, ModernBERT.

    The ids before and after a text are those of the file's own template. The names of special
    tokens in a text, such as "</s>", are ordinary text, except in Unigram models, whose pieces they
    are.

    Args:
        content: the file's.
        where: the file, for messages.

    Raises:
        DataError: not a tokenizer of `tokenizers`.
        ConfigError: it does not put one id before a text and one after it.
    """

    kind = "tokenizer_json"

    def __init__(self, content: bytes, *, where: str = TOKENIZER_FILE) -> None:
        import tokenizers

        self.content = content
        self._where = where
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(content)
        except Exception as error:
            problem = f"not a tokenizer of `tokenizers` ({error})"
            raise DataError(problem, where=where) from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        around = self._tokenizer.encode("").ids
        if len(around) != 2:
            raise ConfigError(
                f"{len(around)} special tokens around a text",
                where=where,
                expected="one before and one after it, as encoders have",
                fix="choose a checkpoint of an encoder",
            )
        self.cls_id, self.sep_id = around
        self._tokenizer.encode_special_tokens = True

    @classmethod
    def from_file(cls, path: str) -> TokenizerJsonVocabulary:
        """Reads a `tokenizer.json`; refuses more ids than the weights beside it have rows."""
        vocabulary = cls(vocabulary_files.read_bytes(path), where=path)
        vocabulary_files.check_rows(os.path.dirname(path), vocabulary.size, where=path)
        return vocabulary

    @classmethod
    def from_directory(
        cls, directory: str, metadata: vocabulary_files.VocabularyMetadata
    ) -> TokenizerJsonVocabulary:
        """Reads what `save` wrote."""
        vocabulary = cls.from_file(f"{directory}/{TOKENIZER_FILE}")
        vocabulary_files.check_fingerprint(directory, metadata, vocabulary.fingerprint)
        return vocabulary

    @property
    def trackables(self) -> tuple[tf.Module, ...]:
        """Objects that a `tf.Module` must hold: none."""
        return ()

    @property
    def size(self) -> int:
        """Number of ids, up to the largest."""
        return 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())

    @functools.cached_property
    def fingerprint(self) -> str:
        """Fingerprint of the file."""
        return fingerprint([self.kind, self.content])

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, without special tokens. Lone surrogates become "?"."""
        whole = [vocabulary_files.whole(text) for text in texts]
        encoded = self._tokenizer.encode_batch_fast(whole, add_special_tokens=False)
        return [encoding.ids for encoding in encoded]

    def encode_tf(self, texts: tf.Tensor) -> tf.RaggedTensor:
        """Refuses: TensorFlow has no such tokenizer.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            f"TensorFlow has no tokenizer for a {TOKENIZER_FILE} that is not BERT's",
            where=self._where,
            fix="export as sentence_transformers, onnx or stablehlo",
        )

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids, without special tokens."""
        return self._tokenizer.decode([int(id) for id in ids])

    def piece(self, id: int) -> str:
        """Name of an id."""
        return self._tokenizer.id_to_token(id) or ""

    def id_of(self, piece: str) -> int | None:
        """Id of a piece by its name, such as "<mask>"; None if there is no such piece."""
        return self._tokenizer.token_to_id(piece)

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Writes `tokenizer.json` and `vocabulary.json`."""
        vocabulary_files.save_directory(
            str(directory),
            kind=self.kind,
            fingerprint=self.fingerprint,
            size=self.size,
            data=(TOKENIZER_FILE, self.content),
        )


def is_own_kind(path: str) -> bool:
    """Whether a file exists and has other pieces or special tokens than BERT's tokenizers."""
    try:
        model = json.loads(epath.Path(path).read_text(encoding="utf-8"))["model"]
        return model["type"] != "WordPiece" or "[CLS]" not in model["vocab"]
    except (OSError, ValueError, LookupError, TypeError):
        # Absent, or so damaged that the reader of BERT's says what is wrong.
        return False
