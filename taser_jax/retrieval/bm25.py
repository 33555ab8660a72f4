"""BM25 with Lucene's scoring, through bm25s: the sparse baseline, and one half of the hybrid."""

from __future__ import annotations

import dataclasses
import enum
import itertools
import pathlib
import re
import sys
import unicodedata
from collections.abc import Iterable, Mapping, Sequence

import bm25s
import numpy as np
import regex
import Stemmer
from bm25s.tokenization import Tokenizer

from taser_jax.retrieval.runs import NO_ROW, SearchResult
from taser_jax.storage import artifacts, checksums
from taser_jax.storage.errors import ConfigError, DataError, FingerprintError
from taser_jax.storage.progress import track
from taser_jax.storage.publishing import one_writer
from taser_jax.storage.records import UNSPACED, Passage
from taser_jax.storage.typed_files import Checked, NaturalNumber, Share, to_plain

_KIND = "bm25 index"
_VERSION = 2
# Words of queries whose stems are not computed again; about 50 MiB.
_REMEMBERED = 1 << 18
_WORD = re.compile(r"\w+")
# Letters with their marks of scripts without spaces between words; a run of them, or a word.
_LETTER = regex.compile(rf"(?=[\p{{L}}\p{{N}}])[{UNSPACED}]\p{{M}}*")
_RUN = regex.compile(rf"(?:{_LETTER.pattern})+|(?:(?!{_LETTER.pattern})[\p{{L}}\p{{N}}\p{{M}}_])+")
# Full-width letters and digits, and half-width kana.
_OF_OTHER_WIDTH = re.compile("[\uff01-\uff9f]+")
# What the standard library's faster engine splits otherwise.
_NEEDS_RUNS = regex.compile(rf"[{UNSPACED}\p{{M}}\uff01-\uff9f]")
# With a straight, curly or full-width apostrophe, as in Lucene.
_POSSESSIVE = re.compile(r"(?<=\w)['\u2019\uff07]s\b")


class Stemming(enum.Enum):
    """The stemmer (Snowball's algorithms)."""

    PORTER = "porter"
    ENGLISH = "english"
    NONE = "none"


class Stopwords(enum.Enum):
    """Stop words: none, or Lucene's 33 English ones."""

    NONE = "none"
    ENGLISH = "english"


class Possessives(enum.Enum):
    """Treatment of a possessive 's.

    STRIP removes it, as Lucene's English analyser does. SPLIT makes it a word "s", which Porter's
    stemmer reduces to an empty term that many passages share.
    """

    STRIP = "strip"
    SPLIT = "split"


@dataclasses.dataclass(frozen=True)
class Bm25Config(Checked):
    """Parameters of scoring and tokenisation; the defaults are Anserini's.

    Attributes:
        k1: saturation of term frequency; raise it (1.5) for long passages.
        b: strength of length normalisation, 0 to 1; raise it (0.75) where lengths differ widely.
        stemming: PORTER is that of Lucene's English analyser; set NONE for other languages. Those
            without spaces between words have letters and pairs of letters as words.
        stopwords: words to ignore; set NONE for other languages.
        possessives: treatment of a possessive 's.
    """

    k1: NaturalNumber = 0.9
    b: Share = 0.4
    stemming: Stemming = Stemming.PORTER
    stopwords: Stopwords = Stopwords.ENGLISH
    possessives: Possessives = Possessives.STRIP


def title_and_text(passage: Passage) -> str:
    """The text that BM25 indexes: title and text as one field."""
    return f"{passage.title} {passage.text}" if passage.title else passage.text


class _Metadata(artifacts.Metadata, frozen=True):
    config: Bm25Config


class Bm25Index:
    """An opened index, memory-mapped; `build` makes one.

    score(q, p) = Σ_w∈q idf(w) · tf / (tf + k1·(1 - b + b·|p|/mean|p|)),
    idf(w) = ln(1 + (N - n_w + 0.5) / (n_w + 0.5))

    Source: Kamphuis et al., "Which BM25 do you mean?", ECIR 2020, table 1, "Lucene (accurate)".

    Args:
        directory: directory of the index.
        fingerprints: required fingerprints, {"collection": ...}.

    Raises:
        DataError: no finished index there.
        FingerprintError: it was built from another collection.
    """

    def __init__(
        self, directory: artifacts.FilePath, *, fingerprints: Mapping[str, str] | None = None
    ) -> None:
        fix = "delete the directory to build it again, or name another"
        metadata = artifacts.read_metadata(
            directory, _KIND, _VERSION, _Metadata, fingerprints=fingerprints, fix=fix
        )
        self.config, self.fingerprints = metadata.config, metadata.fingerprints
        self._index = bm25s.BM25.load(directory, mmap=True)
        self._tokenizer = _tokenizer(self.config)
        self._tokenizer.get_vocab_dict().update(self._index.vocab_dict)

    def __len__(self) -> int:
        return int(self._index.scores["num_docs"])

    @classmethod
    def build(
        cls,
        texts: Iterable[str],
        directory: artifacts.FilePath,
        *,
        config: Bm25Config | None = None,
        fingerprints: Mapping[str, str] | None = None,
    ) -> Bm25Index:
        """Indexes texts, row by row, and opens the result.

        An existing index is opened instead, without reading `texts`.

        Args:
            texts: text of each row of the passage store; see `title_and_text`.
            directory: directory of the index.
            config: parameters.
            fingerprints: {"collection": ...}.

        Raises:
            DataError: no text holds a word.
            ConfigError: the directory holds an artefact of another kind.
            FingerprintError: the directory holds an index of another collection or parameters.
            StorageError: the directory cannot be written.
        """
        config, fingerprints = config or Bm25Config(), dict(fingerprints or {})
        artifacts.check_kind(directory, [_KIND])
        if (pathlib.Path(directory) / artifacts.METADATA).exists():
            index = cls(directory, fingerprints=fingerprints)
            if index.config != config:
                problem = f"built with {index.config}, not with {config}"
                fix = "delete the directory to build it again, or name another"
                raise FingerprintError(problem, where=str(directory), fix=fix)
            return index

        tokenizer = _tokenizer(config)
        shown = track(texts, "BM25: words", unit="passage")
        rows = list(tokenizer.streaming_tokenize(shown, allow_empty=False))
        vocabulary = tokenizer.get_vocab_dict()
        if not vocabulary:
            problem = f"{len(rows)} passages without a single word"
            raise DataError(problem, where=str(directory), fix="prepare passages that have text")
        index = bm25s.BM25(k1=config.k1, b=config.b, method="lucene")
        index.index((rows, vocabulary), show_progress=sys.stderr.isatty())
        with one_writer(directory), artifacts.storage_errors(directory):
            index.save(directory, show_progress=False)
            checksums.seal(directory)
            artifacts.write_json(
                pathlib.Path(directory) / artifacts.METADATA,
                {
                    "format_version": _VERSION,
                    "kind": _KIND,
                    "config": to_plain(config),
                    "fingerprints": fingerprints,
                    "bm25s": bm25s.__version__,
                    "num_passages": len(rows),
                },
            )
        return cls(directory)

    def search(self, texts: Sequence[str], k: int) -> SearchResult:
        """Top k rows of each query; passages that share no word with it are excluded.

        Args:
            texts: the queries.
            k: results per query.

        Raises:
            ConfigError: k below 1.
        """
        if k < 1:
            raise ConfigError(f"k is {k}", where="search", fix="take at least 1")
        rows = np.full((len(texts), k), NO_ROW, np.int32)
        best = np.full((len(texts), k), -np.inf, np.float32)
        shown = track(texts, "BM25: search", unit="query")
        ids = self._tokenizer.streaming_tokenize(shown, update_vocab=False, allow_empty=False)
        for line, words in enumerate(ids):
            if not words:
                continue
            scores = self._index.get_scores_from_ids(sorted(words))
            ranked = _best_rows(scores, k)
            rows[line, : len(ranked)] = ranked
            best[line, : len(ranked)] = scores[ranked]
        # The tokenizer remembers all words of queries, which would fill a server's memory.
        if len(self._tokenizer.word_to_stem) > _REMEMBERED:
            self._tokenizer.word_to_stem.clear()
            self._tokenizer.word_to_id.clear()
        return SearchResult(rows, best)


def _best_rows(scores: np.ndarray, k: int) -> np.ndarray:
    """Rows of the k highest positive scores, highest first, ties by row."""
    candidates = np.flatnonzero(scores > 0)
    if len(candidates) > k:
        least = np.partition(scores[candidates], len(candidates) - k)[len(candidates) - k]
        candidates = candidates[scores[candidates] >= least]
    return candidates[np.argsort(-scores[candidates], kind="stable")][:k]


def _words(text: str) -> list[str]:
    """Words, of composed characters; of a script without spaces letters and pairs of them.

    Example:
        >>> _words("Tokyo は東京")
        ['Tokyo', 'は', '東', '京', 'は東', '東京']
    """
    text = unicodedata.normalize("NFC", text)
    if text.isascii() or not _NEEDS_RUNS.search(text):
        return _WORD.findall(text)
    text = _OF_OTHER_WIDTH.sub(lambda run: unicodedata.normalize("NFKC", run[0]), text)
    words: list[str] = []
    for run in _RUN.findall(text):
        letters = _LETTER.findall(run)
        words += letters + list(map("".join, itertools.pairwise(letters))) if letters else [run]
    return words


def _tokenizer(config: Bm25Config) -> Tokenizer:
    """Text -> ids of stems; each distinct word is stemmed once."""
    strips = config.possessives is Possessives.STRIP
    stems = config.stemming is not Stemming.NONE

    def split(text: str) -> list[str]:
        return _words(_POSSESSIVE.sub("", text) if strips else text)

    return Tokenizer(
        splitter=split,
        stopwords="en" if config.stopwords is Stopwords.ENGLISH else None,
        stemmer=Stemmer.Stemmer(config.stemming.value) if stems else None,
    )
