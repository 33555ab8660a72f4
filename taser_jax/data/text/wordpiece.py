"""BERT's word pieces, and what all vocabularies share: the directory that each is saved to."""

from __future__ import annotations

import collections
import functools
import itertools
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from etils import epath

from taser_jax.storage.artifacts import fingerprint, replacing, write_json
from taser_jax.storage.errors import ConfigError, DataError
from taser_jax.storage.progress import phase, track

if TYPE_CHECKING:
    import tokenizers

METADATA = "vocabulary.json"
FORMAT_VERSION = 1
VOCAB_FILE = "vocab.txt"
TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
MAX_WORD_CHARACTERS = 100
_MAX_ALPHABET = 1000
_MIN_SIZE = 64
_BATCH = 1024


class SavedVocabulary:
    """A vocabulary that `save` writes to a directory of its own.

    Attributes:
        kind: its kind in `vocabulary.json`.
        file: name of its own file.
        content: content of that file.
        size: number of ids, up to the largest.
        fingerprint: fingerprint of everything that decides the ids of a text.

    Args:
        content: content of its own file.
        size: number of ids.
        deciding: what decides the ids of a text.
        settings: further fields of `vocabulary.json`.
    """

    kind: ClassVar[str]
    file: ClassVar[str]

    def __init__(
        self, content: bytes, *, size: int, deciding: Sequence[str | bytes], **settings: object
    ) -> None:
        self.content, self.size, self._settings = content, size, settings
        self.fingerprint = fingerprint([self.kind, *deciding])

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Writes the vocabulary's own file, then `vocabulary.json`."""
        folder = epath.Path(directory)
        with replacing(folder / self.file) as scratch:
            scratch.write_bytes(self.content)
        metadata = {"format_version": FORMAT_VERSION, "kind": self.kind, "size": self.size}
        metadata |= {"fingerprint": self.fingerprint, **self._settings}
        write_json(folder / METADATA, metadata)


def whole(text: str) -> str:
    """The text with "?" for lone surrogates, which JSON can contain but UTF-8 cannot."""
    return text.encode("utf-8", "replace").decode("utf-8")


def read_bytes(path: str | os.PathLike[str]) -> bytes:
    """Reads a local or `gs://` file.

    Raises:
        DataError: it is missing or cannot be read.
    """
    try:
        return epath.Path(path).read_bytes()
    except OSError as error:
        fix = (
            "give a vocabulary directory, a BERT vocab.txt or a SentencePiece .model, or a "
            "VOCAB_SIZE with which `taser tokenize` trains one"
        )
        raise DataError(f"cannot be read ({error})", where=os.fspath(path), fix=fix) from error


class WordPieceVocabulary(SavedVocabulary):
    """Splits text into BERT's word pieces.

    `encode` uses Hugging Face's `tokenizers`, except that "[CLS]" and the like in a text are
    ordinary text. `TextGraph`, for programs without Python, gives the same ids except for 614
    characters (uncased; cased 150), nearly all newer than Unicode 3.2, that TensorFlow Text
    classifies differently.

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
    file = VOCAB_FILE

    def __init__(
        self, pieces: Sequence[str], *, lower_case: bool = True, where: str = VOCAB_FILE
    ) -> None:
        self.pieces = tuple(pieces)
        self.lower_case = lower_case
        self._ids = piece_ids(self.pieces, where)
        self.cls_id, self.sep_id = self._ids["[CLS]"], self._ids["[SEP]"]
        super().__init__(
            "".join(f"{piece}\n" for piece in self.pieces).encode("utf-8"),
            size=len(self.pieces),
            deciding=[str(lower_case), *self.pieces],
            lower_case=lower_case,
        )

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, without special tokens. Lone surrogates become "?"."""
        return token_ids(self._tokenizer, texts)

    @functools.cached_property
    def _tokenizer(self) -> tokenizers.Tokenizer:
        return wordpiece_tokenizer(self._ids, lower_case=self.lower_case)

    def id_of(self, piece: str) -> int | None:
        """Id of a piece by its name, such as "[unused1]"; None if there is no such piece."""
        return self._ids.get(piece)


def wordpiece_tokenizer(ids: dict[str, int], *, lower_case: bool) -> tokenizers.Tokenizer:
    """BERT's tokenizer in the `tokenizers` library, without special tokens.

    Args:
        ids: piece -> id.
        lower_case: whether letters are lower-cased, and lose their accents.
    """
    import tokenizers
    from tokenizers import decoders, models, normalizers, pre_tokenizers

    tokenizer = tokenizers.Tokenizer(
        models.WordPiece(ids, unk_token="[UNK]", max_input_chars_per_word=MAX_WORD_CHARACTERS)
    )
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lower_case)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def is_berts(tokenizer: dict[str, Any]) -> bool:
    """Whether a file of `tokenizers` splits texts into BERT's pieces, and has no other tokens."""
    if tokenizer["model"]["type"] != "WordPiece":
        return False
    ids, normalizer = tokenizer["model"]["vocab"], tokenizer["normalizer"] or {}
    lower_case = bool(normalizer.get("lowercase"))
    berts = json.loads(wordpiece_tokenizer(ids, lower_case=lower_case).to_str())
    if normalizer.get("strip_accents") == lower_case:
        berts["normalizer"]["strip_accents"] = lower_case
    return (
        all(tokenizer[part] == berts[part] for part in ("model", "normalizer", "pre_tokenizer"))
        # MPNet has BERT's pieces after special tokens of its own.
        and ids.get("[PAD]") == 0
        and {"[UNK]", "[CLS]", "[SEP]"} <= ids.keys()
        and sorted(ids.values()) == list(range(len(ids)))
        and all(
            # Special tokens that are pieces are ordinary text inside texts.
            ids.get(token["content"]) == token["id"]
            and (token["special"] or token["content"] in SPECIAL_TOKENS)
            for token in tokenizer["added_tokens"]
        )
    )


def read_vocab_txt(path: str | os.PathLike[str]) -> list[str]:
    """The pieces of a `vocab.txt`: one per line; the id is the line number minus one.

    Raises:
        DataError: it cannot be read, or is not UTF-8.
    """
    try:
        text = read_bytes(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"not UTF-8 ({error})", where=os.fspath(path)) from error
    # Not splitlines(): a piece may be one of the characters that it treats as line ends.
    lines = text.removesuffix("\n").split("\n") if text else []
    return [line.removesuffix("\r") for line in lines]


def piece_ids(pieces: Sequence[str], where: str) -> dict[str, int]:
    """Piece -> id, checked.

    Raises:
        DataError: no pieces, an empty or repeated one, or a missing special token.
    """
    fix = "check that this is a BERT vocab.txt, one piece per line"
    ids: dict[str, int] = {}
    for id, piece in enumerate(pieces):
        if not piece or ids.setdefault(piece, id) != id:
            problem = f"piece {id} is {piece!r}, which is {'a repetition' if piece else 'empty'}"
            raise DataError(problem, where=where, fix=fix)
    missing = [name for name in SPECIAL_TOKENS[:4] if name not in ids]
    if missing or ids["[PAD]"] != 0:
        problem = f"no piece {', '.join(missing)}" if missing else "[PAD] is not id 0"
        raise DataError(problem, where=where, fix=fix)
    return ids


def tokenizer_of(content: bytes, where: str) -> tokenizers.Tokenizer:
    """A tokenizer of Hugging Face's library, from the content of its file."""
    # A training machine has no tokenizers, unless its weights are pretrained.
    import tokenizers

    try:
        return tokenizers.Tokenizer.from_buffer(content)
    except Exception as error:
        problem = f"not a tokenizer of `tokenizers` ({error})"
        raise DataError(problem, where=where) from error


def token_ids(tokenizer: tokenizers.Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """Ids of each text, without special tokens."""
    ids: list[list[int]] = []
    for start in range(0, len(texts), _BATCH):
        batch = [whole(text) for text in texts[start : start + _BATCH]]
        encoded = tokenizer.encode_batch_fast(batch, add_special_tokens=False)
        ids += [encoding.ids for encoding in encoded]
    return ids


def train_vocabulary(
    texts: Iterable[str], *, size: int, output_dir: str | os.PathLike[str]
) -> WordPieceVocabulary:
    """Trains a WordPiece vocabulary and saves it where `load_vocabulary` finds it.

    Byte-pair merges by count (what `tokenizers` calls WordPiece training). Only counts of distinct
    words are stored. The same texts give the same vocabulary, in any process.

    The trainer numbers letters in the order in which a hash map yields words, and breaks ties
    between merges by these numbers. To make the result deterministic, all letters, including those
    that continue words, are numbered before it starts.

    Args:
        texts: texts to learn from; read once.
        size: number of ids; few texts may give a smaller vocabulary.
        output_dir: created if missing.

    Returns:
        The vocabulary, uncased, [PAD] = 0, [UNK] = 1, [CLS] = 2, [SEP] = 3, [MASK] = 4.

    Raises:
        ConfigError: too small a size.
        DataError: no words in the texts.
    """
    import tokenizers
    from tokenizers import models, pre_tokenizers, trainers

    if size < _MIN_SIZE:
        raise ConfigError(f"size {size}", where="train_vocabulary", fix=f"give {_MIN_SIZE} or more")
    counts = _count_words(track(texts, "reading texts", unit="text"))
    if not counts:
        raise DataError("no words in the texts", where="train_vocabulary")
    letters: collections.Counter[str] = collections.Counter()
    for word, count in counts.items():
        for letter in word:
            letters[letter] += count
    # At most half of a small vocabulary goes to letters (each stands alone and as ##letter).
    limit = min(_MAX_ALPHABET, size // 4)
    alphabet = {c for c, _ in sorted(letters.items(), key=lambda item: (-item[1], item[0]))[:limit]}
    continuing = {f"##{c}" for word in counts for c in word[1:] if c in alphabet}
    trainer = trainers.WordPieceTrainer(
        vocab_size=size,
        min_frequency=2,
        special_tokens=[*SPECIAL_TOKENS, *sorted(continuing)],
        initial_alphabet=sorted(alphabet),
        limit_alphabet=len(alphabet),
        show_progress=False,
    )
    tokenizer = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    with phase("learning word pieces"):
        tokenizer.train_from_iterator(_repeat(counts), trainer)
    ids = tokenizer.get_vocab()
    vocabulary = WordPieceVocabulary(sorted(ids, key=ids.__getitem__))
    vocabulary.save(os.fspath(output_dir))
    return vocabulary


def _count_words(texts: Iterable[str]) -> collections.Counter[str]:
    from tokenizers import normalizers, pre_tokenizers

    normalizer = normalizers.BertNormalizer(lowercase=True)
    splitter = pre_tokenizers.BertPreTokenizer()
    counts: collections.Counter[str] = collections.Counter()
    for text in texts:
        words = splitter.pre_tokenize_str(normalizer.normalize_str(text))
        counts.update(word for word, _ in words if len(word) <= MAX_WORD_CHARACTERS)
    return counts


def _repeat(counts: collections.Counter[str]) -> Iterator[str]:
    """Repeats each word as often as it was counted, in texts of at most 1,000 words."""
    for word in sorted(counts):
        whole, rest = divmod(counts[word], 1000)
        yield from itertools.repeat(f"{word} " * 1000, whole)
        yield f"{word} " * rest
