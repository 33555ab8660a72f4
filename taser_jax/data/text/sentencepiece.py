"""SentencePiece vocabularies: T5's, and others with BERT's special tokens."""

from __future__ import annotations

import re
from collections.abc import Sequence

import sentencepiece

from taser_jax.data.text.vocabulary_files import SavedVocabulary, read_bytes, whole
from taser_jax.storage.errors import DataError

MODEL_FILE = "sentencepiece.model"
_EXTRA_ID = re.compile(r"<extra_id_(\d+)>")


class SentencePieceVocabulary(SavedVocabulary):
    """Splits text with a SentencePiece model.

    `encode` uses the SentencePiece library. `text_graph`, for programs without Python, gives the
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
    file = MODEL_FILE

    def __init__(self, model: bytes, *, where: str = MODEL_FILE, extra_ids: int = 0) -> None:
        self.extra_ids = extra_ids
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        except RuntimeError as error:
            raise DataError(f"not a SentencePiece model ({error})", where=where) from error
        if not model:
            raise DataError("the vocabulary is empty", where=where)
        pad_id, bos_id = self._processor.pad_id(), self._processor.bos_id()
        self.cls_id = bos_id if bos_id >= 0 else None
        self.sep_id: int = self._processor.eos_id()
        self.unk_id: int = self._processor.unk_id()
        if pad_id != 0 or self.sep_id < 0:
            problem = (
                f"pad is id {pad_id} and the end of a text id {self.sep_id}, not 0 and another"
            )
            fix = "train it with pad_id=0 and eos_id set"
            raise DataError(problem, where=where, fix=fix)
        if extra_ids and self._piece_id("<extra_id_0>") is not None:
            problem = f"{extra_ids} extra ids for a model that has pieces of their names"
            fix = "set tokenize.extra_ids=0: the model has its own"
            raise DataError(problem, where=where, fix=fix)
        super().__init__(
            model,
            size=self._processor.get_piece_size() + extra_ids,
            deciding=[model, *([f"{extra_ids} extra ids"] if extra_ids else [])],
            **({"extra_ids": extra_ids} if extra_ids else {}),
        )

    @classmethod
    def from_file(cls, path: str, *, extra_ids: int = 0) -> SentencePieceVocabulary:
        """Reads a `.model` file."""
        return cls(read_bytes(path), where=path, extra_ids=extra_ids)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, without special tokens. Lone surrogates become "?"."""
        return self._processor.encode([whole(text) for text in texts])

    def id_of(self, piece: str) -> int | None:
        """Id of a piece by its name, such as "<extra_id_1>"; None if there is no such piece."""
        own = self._piece_id(piece)
        if own is not None:
            return own
        name = _EXTRA_ID.fullmatch(piece)
        if name is None or int(name[1]) >= self.extra_ids:
            return None
        return self.size - 1 - int(name[1])

    def _piece_id(self, piece: str) -> int | None:
        id = self._processor.piece_to_id(piece)
        return id if self._processor.id_to_piece(id) == piece else None
