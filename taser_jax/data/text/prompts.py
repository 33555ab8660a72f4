"""Prompts by which the encoder distinguishes the tasks of queries."""

from __future__ import annotations

import dataclasses
import enum

from taser_jax.data.text.vocabularies import Vocabulary
from taser_jax.storage.errors import ConfigError


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
        needed = {
            Prompt.NAME: ("name", self.name),
            Prompt.MARKER: ("family", self.family),
            Prompt.TEXT: ("text", self.text),
        }
        if self.kind in needed and not needed[self.kind][1]:
            raise ConfigError(
                f"a prompt of kind {self.kind.value!r} without a {needed[self.kind][0]}",
                where="TaskPrompt",
                fix=f"give {needed[self.kind][0]}",
            )

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
            raise ConfigError(
                f"{self.separator!r} is not a piece of the vocabulary",
                where="TaskPrompt.separator",
                expected=f"one of its {vocabulary.size:,} pieces, or None for the end of text",
                fix="<extra_id_N>: give the vocabulary extra ids, tokenize.extra_ids=100 (T5's)",
            )
        return id
