"""SentencePiece vocabularies: T5's, and others with BERT's special tokens."""

from __future__ import annotations

import functools
import itertools
import os
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import sentencepiece

from taser_jax.data.text import vocabulary_files
from taser_jax.storage.artifacts import fingerprint
from taser_jax.storage.errors import DataError

if TYPE_CHECKING:
    import tensorflow as tf
    import tensorflow_text as tf_text

MODEL_FILE = "sentencepiece.model"
EXTRA_ID = re.compile(r"<extra_id_(\d+)>")


class SentencePieceVocabulary:
    """Splits text with a SentencePiece model.

    `encode` uses the SentencePiece library. `encode_tf`, for programs without Python, gives the
    same ids except where several ways to split a text have the same score.

    [CLS] and [SEP] are the ids that SentencePiece calls bos and eos. T5's model has only pad and
    eos, so `cls_id` is None and nothing is put before its texts.

    T5 has ids after those of its SentencePiece file: `<extra_id_N>`, the spans of its pre-training
    (Raffel et al., 2020, section 3.1.4). As in SeqIO, the first has the last id. Text never yields
    them: such a name in a text is split like any other word.

    Example:
        T5's 32,000 pieces and 100 extra ids: `<extra_id_0>` is 32,099, `<extra_id_99>` 32,000.

    Args:
        model: the serialised model.
        where: file that the model came from, for messages.
        extra_ids: number of ids after the model's.

    Raises:
        DataError: not a SentencePiece model, pad is not id 0, there is no end piece, or there are
            extra ids for a model that already has such pieces.
    """

    kind = "sentencepiece"
    pad_id = 0

    def __init__(self, model: bytes, *, where: str = MODEL_FILE, extra_ids: int = 0) -> None:
        self.model = model
        self.extra_ids = extra_ids
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        except RuntimeError as error:
            raise DataError(f"not a SentencePiece model ({error})", where=where) from error
        if not model:
            raise DataError("the vocabulary is empty", where=where)
        pad_id, eos_id = self._processor.pad_id(), self._processor.eos_id()
        if pad_id != 0 or eos_id < 0:
            problem = f"pad is id {pad_id} and the end of a text id {eos_id}, not 0 and another"
            fix = "train it with pad_id=0 and eos_id set"
            raise DataError(problem, where=where, fix=fix)
        if extra_ids < 0:
            raise DataError(f"{extra_ids} extra ids", where=where, fix="give 0 or more")
        if extra_ids and self._piece_id(_extra_id_name(0)) is not None:
            problem = f"{extra_ids} extra ids for a model that has pieces of their names"
            fix = "set tokenize.extra_ids=0: the model has its own"
            raise DataError(problem, where=where, fix=fix)
        bos_id = self._processor.bos_id()
        self.cls_id = bos_id if bos_id >= 0 else None
        self.sep_id = eos_id
        self.unk_id = self._processor.unk_id()

    @classmethod
    def from_file(cls, path: str, *, extra_ids: int = 0) -> SentencePieceVocabulary:
        """Reads a `.model` file."""
        return cls(vocabulary_files.read_bytes(path), where=path, extra_ids=extra_ids)

    @classmethod
    def from_directory(
        cls, directory: str, metadata: vocabulary_files.VocabularyMetadata
    ) -> SentencePieceVocabulary:
        """Reads what `save` wrote."""
        extra_ids = metadata.get("extra_ids", 0)
        vocabulary = cls.from_file(f"{directory}/{MODEL_FILE}", extra_ids=extra_ids)
        vocabulary_files.check_fingerprint(directory, metadata, vocabulary.fingerprint)
        return vocabulary

    @property
    def trackables(self) -> tuple[tf.Module, ...]:
        """Objects that a `tf.Module` must hold so that it can be saved with `encode_tf`."""
        return (self._tokenizer,)

    @property
    def size(self) -> int:
        """Number of ids."""
        return self._processor.get_piece_size() + self.extra_ids

    @functools.cached_property
    def fingerprint(self) -> str:
        """Fingerprint of the model and of any extra ids."""
        extra = [f"{self.extra_ids} extra ids"] if self.extra_ids else []
        return fingerprint([self.kind, self.model, *extra])

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, without special tokens. Lone surrogates become "?"."""
        return self._processor.encode([vocabulary_files.whole(text) for text in texts])

    def encode_tf(self, texts: tf.Tensor) -> tf.RaggedTensor:
        """Ids of each text, without special tokens. [texts] -> [texts, (pieces)], int32."""
        import tensorflow as tf

        with tf.init_scope():
            tokenizer = self._tokenizer
        return tokenizer.tokenize(texts)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids, without padding and control pieces such as [CLS]; extra ids by name."""
        pieces = self._processor.get_piece_size()
        parts = [
            [_extra_id_name(self.size - 1 - id) for id in run]
            if is_extra
            else [self._processor.decode(list(run))]
            for is_extra, run in itertools.groupby(map(int, ids), lambda id: id >= pieces)
        ]
        return " ".join(word for part in parts for word in part if word)

    def id_of(self, piece: str) -> int | None:
        """Id of a piece by its name, such as "<extra_id_1>"; None if there is no such piece."""
        own = self._piece_id(piece)
        if own is not None:
            return own
        name = EXTRA_ID.fullmatch(piece)
        if name is None or int(name[1]) >= self.extra_ids:
            return None
        return self.size - 1 - int(name[1])

    def _piece_id(self, piece: str) -> int | None:
        id = self._processor.piece_to_id(piece)
        return id if self._processor.id_to_piece(id) == piece else None

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Writes `sentencepiece.model` and `vocabulary.json`."""
        vocabulary_files.save_directory(
            str(directory),
            kind=self.kind,
            fingerprint=self.fingerprint,
            size=self.size,
            data=(MODEL_FILE, self.model),
            **({"extra_ids": self.extra_ids} if self.extra_ids else {}),
        )

    @functools.cached_property
    def _tokenizer(self) -> tf_text.SentencepieceTokenizer:
        import tensorflow as tf
        import tensorflow_text as tf_text

        return tf_text.SentencepieceTokenizer(model=self.model, out_type=tf.int32)


def _extra_id_name(number: int) -> str:
    return f"<extra_id_{number}>"
