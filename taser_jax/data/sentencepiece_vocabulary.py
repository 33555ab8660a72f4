"""SentencePiece vocabularies: ours with BERT's special tokens, and foreign ones such as T5's."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import sentencepiece
import tensorflow as tf
import tensorflow_text as tf_text

from taser_jax.data.vocabulary_files import (
    check_fingerprint,
    encode_eagerly,
    read_bytes,
    save_directory,
)
from taser_jax.errors import DataError
from taser_jax.fingerprint import fingerprint

MODEL_FILE = "sentencepiece.model"


class SentencePieceVocabulary:
    """Splits text by a SentencePiece model, the same in Python and in TensorFlow graphs.

    Ours name their special pieces [PAD], [CLS] and [SEP] and give them the ids that SentencePiece
    calls pad, bos and eos; T5's model has pad and eos only, so that `cls_id` is None and nothing
    is put before its texts.

    Args:
        model: the serialised model.
        where: file it came from, for messages.

    Raises:
        DataError: not a SentencePiece model, pad is not id 0, or there is no end piece.
    """

    kind = "sentencepiece"
    pad_id = 0

    def __init__(self, model: bytes, *, where: str = MODEL_FILE) -> None:
        self._model = model
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        except RuntimeError as error:
            raise DataError(f"not a SentencePiece model ({error})", where=where) from error
        if not model:
            raise DataError("the vocabulary is empty", where=where)
        if self._processor.pad_id() != 0:
            raise DataError(
                f"pad is id {self._processor.pad_id()}",
                where=where,
                expected="id 0",
                fix="train with pad_id=0, or make one with `taser vocab`",
            )
        if self._processor.eos_id() < 0:
            raise DataError(
                "no end piece ([SEP] or </s>)", where=where, fix="train with eos_id set"
            )
        bos_id = self._processor.bos_id()
        self.cls_id = bos_id if bos_id >= 0 else None
        self.sep_id = self._processor.eos_id()
        self.unk_id = self._processor.unk_id()

    @classmethod
    def from_file(cls, path: str) -> SentencePieceVocabulary:
        """Reads a `.model` file."""
        return cls(read_bytes(path), where=path)

    @classmethod
    def from_directory(cls, directory: str, metadata: dict) -> SentencePieceVocabulary:
        """Reads what `save` wrote."""
        vocabulary = cls.from_file(f"{directory}/{MODEL_FILE}")
        check_fingerprint(directory, metadata, vocabulary.fingerprint)
        return vocabulary

    @property
    def trackables(self) -> tuple[tf.Module, ...]:
        """What a `tf.Module` that calls `encode_tf` must hold to be saved."""
        return (self._tokenizer,)

    @property
    def size(self) -> int:
        """Number of ids."""
        return self._processor.get_piece_size()

    @functools.cached_property
    def fingerprint(self) -> str:
        """Fingerprint of the model."""
        return fingerprint([self.kind, self._model])

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, without special tokens."""
        return encode_eagerly(self.encode_tf, texts)

    def encode_tf(self, texts: tf.Tensor) -> tf.RaggedTensor:
        """Ids of each text, without special tokens. [texts] -> [texts, (pieces)], int32."""
        with tf.init_scope():
            tokenizer = self._tokenizer
        return tokenizer.tokenize(texts)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids, without padding and control pieces such as [CLS]."""
        return self._processor.decode([int(i) for i in ids])

    def id_of(self, piece: str) -> int | None:
        """Id of a piece by its name, such as "<extra_id_1>"; None where there is none."""
        found = self._processor.piece_to_id(piece)
        return found if self._processor.id_to_piece(found) == piece else None

    def save(self, directory: str) -> None:
        """Writes `sentencepiece.model` and `vocabulary.json`."""
        save_directory(
            str(directory),
            kind=self.kind,
            fingerprint=self.fingerprint,
            size=self.size,
            data=(MODEL_FILE, self._model),
        )

    @functools.cached_property
    def _tokenizer(self) -> tf_text.SentencepieceTokenizer:
        return tf_text.SentencepieceTokenizer(model=self._model, out_type=tf.int32)
