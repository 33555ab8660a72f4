"""BERT's WordPiece vocabulary as one TensorFlow graph, with Hugging Face `tokenizers`' ids."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import tensorflow as tf
import tensorflow_text as tf_text

from taser_jax.artifacts import fingerprint
from taser_jax.data.text import vocabulary_files
from taser_jax.errors import DataError

VOCAB_FILE = "vocab.txt"
_MAX_WORD_CHARACTERS = 100
# RE2's \s is ASCII only: other white space becomes a space first.
_DELIMITERS = r"\s+"
# BERT treats ASCII symbols such as $ and ^ as punctuation, and each CJK ideograph as a word.
_WORDS_OF_ONE_CHARACTER = (
    r"[!-/:-@\[-`{-~\p{P}]|[\x{3400}-\x{4DBF}\x{4E00}-\x{9FFF}\x{F900}-\x{FAFF}"
    r"\x{20000}-\x{2A6DF}\x{2A700}-\x{2CEAF}\x{2F800}-\x{2FA1F}]"
)


class WordPieceVocabulary:
    """Splits text into BERT's word pieces.

    Ids equal those of `tokenizers.BertWordPieceTokenizer`, with two exceptions: "[CLS]" and the
    like in a text are ordinary text, and characters newer than its tables (Unicode 8) are
    classified by TensorFlow Text's tables. Accents are removed before lower-casing, which never
    folds: ß stays ß, and Σ always becomes σ (the graph's lower-casing would make a final Σ ς).

    Example:
        vocabulary = WordPieceVocabulary(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "un", "##do"])
        vocabulary.encode(["Undo it"])   # [[4, 5, 1]]

    Args:
        pieces: the pieces in the order of their ids; "##" starts those that continue a word.
        lower_case: lower-case and strip accents, as BERT's uncased vocabularies require.
        where: file that the pieces came from, for messages.

    Raises:
        DataError: no pieces, a repeated piece, or a missing special token.
    """

    kind = "wordpiece"
    pad_id = 0

    def __init__(
        self, pieces: Sequence[str], *, lower_case: bool = True, where: str = VOCAB_FILE
    ) -> None:
        self.pieces = tuple(pieces)
        self.lower_case = lower_case
        self._ids = ids = _index(self.pieces, where)
        self.unk_id, self.cls_id, self.sep_id = (
            ids[name] for name in vocabulary_files.SPECIAL_TOKENS[1:4]
        )
        self._special_ids = {ids[name] for name in ("[PAD]", "[CLS]", "[SEP]")}
        self._tokenizer = tf_text.FastWordpieceTokenizer(
            list(self.pieces),
            token_out_type=tf.int32,
            unknown_token="[UNK]",
            no_pretokenization=True,
            # In bytes. BERT's limit is in characters and is applied here.
            max_bytes_per_word=4 * _MAX_WORD_CHARACTERS,
        )

    @classmethod
    def from_file(cls, path: str, *, lower_case: bool = True) -> WordPieceVocabulary:
        """Reads a BERT `vocab.txt`: one piece per line; the id is the line number minus one."""
        try:
            text = vocabulary_files.read_bytes(path).decode("utf-8")
        except UnicodeDecodeError as error:
            raise DataError(f"not UTF-8 ({error})", where=path) from error
        # Not splitlines(): a piece may be one of the characters that it treats as line ends.
        pieces = [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]
        return cls(pieces if text else [], lower_case=lower_case, where=path)

    @classmethod
    def from_directory(cls, directory: str, metadata: dict) -> WordPieceVocabulary:
        """Reads what `save` wrote."""
        path = f"{directory}/{VOCAB_FILE}"
        vocabulary = cls.from_file(path, lower_case=metadata["lower_case"])
        vocabulary_files.check_fingerprint(directory, metadata, vocabulary.fingerprint)
        return vocabulary

    @property
    def trackables(self) -> tuple[tf.Module, ...]:
        """Objects that a `tf.Module` must hold so that it can be saved with `encode_tf`: none."""
        return ()

    @property
    def size(self) -> int:
        """Number of ids."""
        return len(self.pieces)

    @functools.cached_property
    def fingerprint(self) -> str:
        """Fingerprint of everything that decides the ids of a text."""
        return fingerprint([self.kind, str(self.lower_case), *self.pieces])

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, without special tokens."""
        return vocabulary_files.encode_eagerly(self.encode_tf, texts)

    def encode_tf(self, texts: tf.Tensor) -> tf.RaggedTensor:
        """Ids of each text, without special tokens. [texts] -> [texts, (pieces)], int32."""
        return self._encode(texts)

    @functools.cached_property
    def _encode(self) -> tf.types.experimental.GenericFunction:
        # Traced once for all data sets and exports: building the graph takes most of a second.
        texts = tf.TensorSpec([None], tf.string)
        return tf.function(self._pieces_of, input_signature=[texts], autograph=False)

    def _pieces_of(self, texts: tf.Tensor) -> tf.RaggedTensor:
        words = tf_text.regex_split(
            self._normalize(texts),
            f"{_DELIMITERS}|{_WORDS_OF_ONE_CHARACTER}",
            _WORDS_OF_ONE_CHARACTER,
        )
        characters = tf.strings.length(words.values, unit="UTF8_CHAR")
        known = tf.where(characters > _MAX_WORD_CHARACTERS, "[UNK]", words.values)
        return self._tokenizer.tokenize(words.with_values(known)).merge_dims(1, 2)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids as words joined by spaces, without padding, [CLS] and [SEP]."""
        pieces = (self.pieces[i] for i in map(int, ids) if i not in self._special_ids)
        return " ".join(pieces).replace(" ##", "")

    def id_of(self, piece: str) -> int | None:
        """Id of a piece by its name, such as "[unused1]"; None if there is no such piece."""
        return self._ids.get(piece)

    def save(self, directory: str) -> None:
        """Writes `vocab.txt` and `vocabulary.json`."""
        vocabulary_files.save_directory(
            str(directory),
            kind=self.kind,
            fingerprint=self.fingerprint,
            size=self.size,
            data=(VOCAB_FILE, "".join(f"{piece}\n" for piece in self.pieces).encode("utf-8")),
            lower_case=self.lower_case,
        )

    def _normalize(self, texts: tf.Tensor) -> tf.Tensor:
        # Control, format, private and replacement characters are removed; tabs and line ends
        # separate words.
        texts = tf.strings.regex_replace(texts, r"[^\P{C}\t\n\r]|\x{FFFD}", "")
        texts = tf.strings.regex_replace(texts, r"\p{Z}", " ")
        if not self.lower_case:
            return texts
        texts = tf_text.normalize_utf8(texts, "NFD")
        texts = tf.strings.regex_replace(texts, r"\p{Mn}", "")
        texts = tf.strings.regex_replace(texts, "Σ", "σ")
        return tf.strings.lower(texts, encoding="utf-8")


def _index(pieces: Sequence[str], where: str) -> dict[str, int]:
    if not any(pieces):
        raise DataError("the vocabulary is empty", where=where, expected="one piece per line")
    ids: dict[str, int] = {}
    for i, piece in enumerate(pieces):
        if not piece:
            raise DataError(
                "an empty line", where=f"{where}:{i + 1}", expected="one piece per line"
            )
        if piece in ids:
            raise DataError(
                f"piece {piece!r} is also on line {ids[piece] + 1}",
                where=f"{where}:{i + 1}",
                expected="each piece once",
            )
        ids[piece] = i
    for name in vocabulary_files.SPECIAL_TOKENS[:4]:
        if name not in ids:
            raise DataError(
                f"no line {name!r}",
                where=where,
                expected=f"lines {', '.join(vocabulary_files.SPECIAL_TOKENS[:4])}",
                fix="check that this is a BERT vocab.txt; `taser vocab` makes one",
            )
    if ids["[PAD]"] != 0:
        raise DataError(
            "[PAD] is not id 0", where=f"{where}:{ids['[PAD]'] + 1}", expected="[PAD] first"
        )
    return ids
