"""Vocabularies of Hugging Face's tokenizers: BERT's word pieces, and others in `tokenizer.json`."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from etils import epath

from taser_jax.data.text import vocabulary_files
from taser_jax.data.text.vocabulary_files import (
    MAX_WORD_CHARACTERS,
    SPECIAL_TOKENS,
    TOKENIZER_FILE,
    VOCAB_FILE,
    BertFiles,
    WordSplitting,
    piece_ids,
    read_vocab_txt,
)
from taser_jax.storage.artifacts import fingerprint
from taser_jax.storage.errors import ConfigError, DataError

if TYPE_CHECKING:
    import tensorflow as tf
    import tokenizers

_BATCH = 1024


class WordPieceVocabulary:
    """Splits text into BERT's word pieces.

    `encode` uses Hugging Face's `tokenizers`, except that "[CLS]" and the like in a text are
    ordinary text. `encode_tf`, for programs without Python, gives the same ids except for 614
    characters (uncased; cased 150), nearly all newer than Unicode 3.2, that TensorFlow Text
    classifies differently.

    Example:
        vocabulary = WordPieceVocabulary(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "un", "##do"])
        vocabulary.encode(["Undo it"])   # [[4, 5, 1]]

    Args:
        pieces: the pieces in the order of their ids; "##" starts those that continue a word.
        lower_case: lower-case and strip accents, as BERT's uncased vocabularies require.
        splitting: how texts become words; replaces `lower_case`.
        where: file that the pieces came from, for messages.

    Raises:
        DataError: no pieces, a repeated piece, or a missing special token.
    """

    kind = "wordpiece"
    pad_id = 0

    def __init__(
        self,
        pieces: Sequence[str],
        *,
        lower_case: bool = True,
        splitting: WordSplitting | None = None,
        where: str = VOCAB_FILE,
    ) -> None:
        self.pieces = tuple(pieces)
        self.splitting = splitting or WordSplitting(lower_case=lower_case)
        self._ids = ids = piece_ids(self.pieces, where)
        self.unk_id, self.cls_id, self.sep_id = (ids[name] for name in SPECIAL_TOKENS[1:4])
        self._special_ids = {ids[name] for name in ("[PAD]", "[CLS]", "[SEP]")}

    @classmethod
    def from_files(cls, files: BertFiles) -> WordPieceVocabulary:
        """The vocabulary of a Hugging Face directory, from `read_bert_files`."""
        return cls(files.pieces, splitting=files.splitting, where=files.where)

    @classmethod
    def from_directory(
        cls, directory: str, metadata: vocabulary_files.VocabularyMetadata
    ) -> WordPieceVocabulary:
        """Reads what `save` wrote."""
        path = f"{directory}/{VOCAB_FILE}"
        saved = {name: metadata[name] for name in vocabulary_files.SPLITTING if name in metadata}
        splitting = WordSplitting(**saved)
        vocabulary = cls(read_vocab_txt(path), splitting=splitting, where=path)
        vocabulary_files.check_fingerprint(directory, metadata, vocabulary.fingerprint)
        return vocabulary

    @property
    def lower_case(self) -> bool:
        """Whether letters are lower-cased."""
        return self.splitting.lower_case

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
        unusual = [f"{name} {value}" for name, value in self.splitting.unusual.items()]
        return fingerprint([self.kind, str(self.lower_case), *unusual, *self.pieces])

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, without special tokens. Lone surrogates become "?"."""
        return _encoded(self._tokenizer, texts)

    def encode_tf(self, texts: tf.Tensor) -> tf.RaggedTensor:
        """Ids of each text, without special tokens. [texts] -> [texts, (pieces)], int32."""
        import tensorflow as tf

        with tf.init_scope():
            graph = self._graph
        return graph(texts)

    @functools.cached_property
    def _tokenizer(self) -> tokenizers.Tokenizer:
        return wordpiece_tokenizer(self._ids, self.splitting)

    @functools.cached_property
    def _graph(self) -> tf.types.experimental.GenericFunction:
        from taser_jax.data.text.text_graph import wordpiece_graph

        return wordpiece_graph(self.pieces, self.splitting)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids as words joined by spaces, without padding, [CLS] and [SEP]."""
        pieces = (self.pieces[i] for i in map(int, ids) if i not in self._special_ids)
        return " ".join(pieces).replace(" ##", "")

    def id_of(self, piece: str) -> int | None:
        """Id of a piece by its name, such as "[unused1]"; None if there is no such piece."""
        return self._ids.get(piece)

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Writes `vocab.txt` and `vocabulary.json`."""
        vocabulary_files.save_directory(
            str(directory),
            kind=self.kind,
            fingerprint=self.fingerprint,
            size=self.size,
            data=(VOCAB_FILE, "".join(f"{piece}\n" for piece in self.pieces).encode("utf-8")),
            lower_case=self.lower_case,
            **self.splitting.unusual,
        )


def wordpiece_tokenizer(ids: dict[str, int], splitting: WordSplitting) -> tokenizers.Tokenizer:
    """BERT's tokenizer in the `tokenizers` library, without special tokens.

    Args:
        ids: piece -> id.
        splitting: how texts become words.
    """
    import tokenizers
    from tokenizers import decoders, models, normalizers, pre_tokenizers

    tokenizer = tokenizers.Tokenizer(
        models.WordPiece(ids, unk_token="[UNK]", max_input_chars_per_word=MAX_WORD_CHARACTERS)
    )
    tokenizer.normalizer = normalizers.BertNormalizer(
        lowercase=splitting.lower_case,
        strip_accents=splitting.strip_accents,
        handle_chinese_chars=splitting.split_ideographs,
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


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
        return _encoded(self._tokenizer, texts)

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
        # MPNet has BERT's pieces after special tokens of its own.
        is_bert = model["type"] == "WordPiece" and "[CLS]" in model["vocab"]
        return not is_bert or model["vocab"].get("<s>") == 0
    except (OSError, ValueError, LookupError, TypeError):
        # Absent, or so damaged that the reader of BERT's says what is wrong.
        return False


def _encoded(tokenizer: tokenizers.Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """Ids of each text, without special tokens."""
    ids: list[list[int]] = []
    for start in range(0, len(texts), _BATCH):
        batch = [vocabulary_files.whole(text) for text in texts[start : start + _BATCH]]
        encoded = tokenizer.encode_batch_fast(batch, add_special_tokens=False)
        ids += [encoding.ids for encoding in encoded]
    return ids
