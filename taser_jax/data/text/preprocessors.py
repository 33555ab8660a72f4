"""Turns texts into token ids, in the same way for token stores and typed questions; prompts.

`interop.saved_model` has the same functions as TensorFlow graphs.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence

from taser_jax.data.text.vocabularies import Vocabulary
from taser_jax.data.token_store.arrays import pack_tokens
from taser_jax.data.token_store.store import QueryNormalization, QuerySettings, Titles
from taser_jax.models.batch import Tokens
from taser_jax.storage.errors import ConfigError
from taser_jax.storage.records import Passage

_MIN_LENGTH = 4


class Prompt(enum.Enum):
    """The tokens before a task's queries.

    NONE: nothing.
    NAME: the task's name and a separator, as in TACO-DR.
    MARKER: one token for the task's family, as in Maillard et al., 2021; coarser, since several
        tasks share a family.
    TEXT: any text, as in sentence-transformers models ("query: ").
    """

    NONE = "none"
    NAME = "name"
    MARKER = "marker"
    TEXT = "text"


class Family(enum.Enum):
    """KILT's families of tasks; the value is the marker for vocabularies without spare pieces."""

    QUESTION_ANSWERING = "question answering"
    FACT_CHECKING = "fact checking"
    SLOT_FILLING = "slot filling"
    ENTITY_LINKING = "entity linking"
    DIALOGUE = "dialogue"


@dataclasses.dataclass(frozen=True)
class TaskPrompt:
    """The prompt of one task.

    Example:
        `TaskPrompt(Prompt.NAME, name="NQ")` turns "who wrote it", in BERT's vocabulary, into
        [CLS] nq [SEP] who wrote it [SEP]

    Attributes:
        kind: the kind of prompt.
        name: the task's name, for NAME.
        text: the text before each query, for TEXT.
        family: the task's family, for MARKER: BERT's spare piece [unused1] for the first family,
            and so on; with vocabularies without such pieces, the family's name as ordinary text.
        separator: piece between name and query, such as "<extra_id_1>"; None is the vocabulary's
            end-of-text token ([SEP], T5's </s>). TACO-DR's paper has [SP], its code <extra_id_1>,
            one of T5's extra ids.
    """

    kind: Prompt = Prompt.NONE
    name: str = ""
    text: str = ""
    family: Family | None = None
    separator: str | None = None

    def __post_init__(self) -> None:
        needed = {Prompt.NAME: self.name, Prompt.MARKER: self.family, Prompt.TEXT: self.text}
        if not needed.get(self.kind, True):
            problem = f"{self.kind.value!r} without its name, family or text"
            raise ConfigError(problem, where="TaskPrompt.kind")

    def ids(self, vocabulary: Vocabulary) -> list[int]:
        """The prompt's token ids.

        Raises:
            ConfigError: the separator is not a piece of the vocabulary.
        """
        if self.kind is Prompt.NAME:
            return [*vocabulary.encode([self.name])[0], self._separator_id(vocabulary)]
        if self.kind is Prompt.TEXT:
            return vocabulary.encode([self.text])[0]
        if self.kind is Prompt.MARKER:
            assert self.family is not None
            piece = f"[unused{1 + list(Family).index(self.family)}]"
            id = vocabulary.id_of(piece)
            return vocabulary.encode([self.family.value])[0] if id is None else [id]
        return []

    def _separator_id(self, vocabulary: Vocabulary) -> int:
        if self.separator is None:
            return vocabulary.sep_id
        id = vocabulary.id_of(self.separator)
        if id is None:
            problem = f"{self.separator!r} is not a piece of the vocabulary"
            fix = "<extra_id_N>: give the vocabulary extra ids, tokenize.extra_ids=100 (T5's)"
            raise ConfigError(problem, where="TaskPrompt.separator", fix=fix)
        return id


def query_ids(
    texts: Sequence[str],
    vocabulary: Vocabulary,
    length: int | None,
    settings: QuerySettings = QuerySettings(),
) -> list[list[int]]:
    """`[CLS] prompt text [SEP]`, with the text normalised, and truncated to fit.

    Args:
        texts: queries.
        vocabulary: splits the texts; without a [CLS] token nothing precedes them.
        length: maximum tokens, special ones and the prompt included; None truncates nothing.
        settings: normalisation, and the prompt's ids, which are never truncated.

    Returns:
        Ids of each query.

    Raises:
        ConfigError: the prompt leaves no room for the text.
    """
    if settings.normalization is QueryNormalization.CURLY_APOSTROPHE:
        texts = [text.replace("’", "'") for text in texts]
    prompt, space = without_space(settings.prompt, vocabulary)
    room = None if length is None else query_room(vocabulary, length, prompt=prompt)
    before, encoded = [*_start(vocabulary), *prompt], vocabulary.encode(_after(space, texts))
    return [[*before, *ids[:room], vocabulary.sep_id] for ids in encoded]


def passage_ids(
    titles: Sequence[str],
    texts: Sequence[str],
    vocabulary: Vocabulary,
    length: int | None,
    *,
    prompt: Sequence[int] = (),
) -> list[list[int]]:
    """`[CLS] title [SEP] text [SEP]`, or `[CLS] text [SEP]` where the title is the empty string.

    The ids are those of Hugging Face's `tokenizers` for the pair (title, text), or for the text
    alone; a title of only blanks has no tokens but keeps its [SEP]. If title and text do not fit,
    the longer of the two is truncated first; if the room for both is odd, the longer one gets the
    odd token, or the text if they are equal. With t and x tokens and room for r:
    t' = min(t, max(r - x, ⌊(r + [t > x]) / 2⌋)), x' = min(x, r - t').

    Args:
        titles: titles of the passages; empty for those without one.
        texts: texts of the passages.
        vocabulary: splits the texts.
        length: maximum tokens, special ones included; None truncates nothing.
        prompt: ids put before every title or text; never truncated.

    Returns:
        Ids of each passage.
    """
    prompt, space = without_space(prompt, vocabulary)
    if length is not None:
        check_length(length, len(prompt))
    start, end = [*_start(vocabulary), *prompt], vocabulary.sep_id
    rows = []
    of_titles, of_texts = (vocabulary.encode(_after(space, each)) for each in (titles, texts))
    for shown, title, text in zip(titles, of_titles, of_texts, strict=True):
        if length is not None:
            room = length - 1 - len(start) - bool(shown)
            title = title[: max(room - len(text), (room + (len(title) > len(text))) // 2)]
            text = text[: room - len(title)]
        rows.append([*start, *title, *([end] if shown else []), *text, end])
    return rows


def without_space(prompt: Sequence[int], vocabulary: Vocabulary) -> tuple[Sequence[int], str]:
    """A prompt's ids without those of the space at its end, and that space; "" where it has none.

    Byte-level vocabularies have the space as part of the word after it: that of a prompt belongs to
    the texts, whose first word is then as in the whole, "query: who".
    """
    [space] = vocabulary.encode([" "]) if prompt else [[]]
    if not space or list(prompt[-len(space) :]) != space:
        return prompt, ""
    return prompt[: -len(space)], " "


def _after(space: str, texts: Sequence[str]) -> list[str]:
    return [f"{space}{text}" if text else "" for text in texts]


def encode_queries(
    texts: Sequence[str],
    vocabulary: Vocabulary,
    *,
    length: int,
    settings: QuerySettings = QuerySettings(),
) -> Tokens:
    """Token ids of questions, padded to `length`, as in a token store."""
    ids = query_ids(texts, vocabulary, length, settings)
    return pack_tokens(ids, length, vocabulary.size, str).tokens(range(len(ids)))


def encode_passages(
    passages: Sequence[Passage],
    vocabulary: Vocabulary,
    *,
    length: int,
    titles: Titles = Titles.INCLUDE,
    prompt: Sequence[int] = (),
) -> Tokens:
    """Token ids of passages, padded to `length`, as in a token store."""
    shown, texts = titles.applied([p.title for p in passages], [p.text for p in passages])
    ids = passage_ids(shown, texts, vocabulary, length, prompt=prompt)
    return pack_tokens(ids, length, vocabulary.size, str).tokens(range(len(ids)))


def query_room(
    vocabulary: Vocabulary, length: int, *, prompt: Sequence[int] = (), where: str = ""
) -> int:
    """Tokens that remain for a query's own text.

    Args:
        vocabulary: its special tokens are counted.
        length: maximum tokens, special ones and the prompt included.
        prompt: ids put before the text.
        where: whose queries they are, for the message.

    Raises:
        ConfigError: none remain.
    """
    room = check_length(length) - 1 - (vocabulary.cls_id is not None) - len(prompt)
    if room < 1:
        problem = f"the prompt of {len(prompt)} tokens leaves no room for the query"
        fix = f"shorten the prompt, or give {length - room + 1} tokens or more"
        raise ConfigError(problem, where=f"{where}query length {length}", fix=fix)
    return room


def check_length(length: int, prompt: int = 0) -> int:
    """The length; `ConfigError` if special tokens and prompt leave no room for title and text."""
    if length - prompt < _MIN_LENGTH:
        beside = f" beside the {prompt} of the prompt" if prompt else ""
        raise ConfigError(f"length {length}", expected=f"{_MIN_LENGTH} tokens or more{beside}")
    return length


def _start(vocabulary: Vocabulary) -> list[int]:
    return [] if vocabulary.cls_id is None else [vocabulary.cls_id]
