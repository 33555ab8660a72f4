"""Prompts that tell the encoder which task a query is of."""

from __future__ import annotations

import dataclasses
import enum

from taser_jax.data.text.vocabularies import Vocabulary
from taser_jax.errors import ConfigError


class Prompt(enum.Enum):
    """What is put before a task's queries.

    NONE: nothing.
    NAME: the task's name and a separator, as TACO-DR's prompts.
    MARKER: one token of the task's family, as Maillard et al., 2021; coarser, since several tasks
        share a family.
    """

    NONE = "none"
    NAME = "name"
    MARKER = "marker"


class Family(enum.Enum):
    """KILT's families of tasks; the value is the marker's text where no spare piece is left."""

    QUESTION_ANSWERING = "question answering"
    FACT_CHECKING = "fact checking"
    SLOT_FILLING = "slot filling"
    ENTITY_LINKING = "entity linking"
    DIALOGUE = "dialogue"


@dataclasses.dataclass(frozen=True)
class TaskPrompt:
    """The prompt of one task.

    Example:
        `TaskPrompt(Prompt.NAME, name="NQ")` makes of "who wrote it", in BERT's vocabulary,
        [CLS] nq [SEP] who wrote it [SEP]

    Attributes:
        kind: which prompt.
        name: of the task, for NAME.
        family: of the task, for MARKER: BERT's spare piece [unused1] for the first family, and so
            on; a vocabulary without such pieces gets the family's name as ordinary text.
        separator: piece between name and query, such as "<extra_id_1>"; None is the vocabulary's
            own end of text ([SEP], T5's </s>). TACO-DR's paper says [SP], its code <extra_id_1>,
            one of T5's extra ids.
    """

    kind: Prompt = Prompt.NONE
    name: str = ""
    family: Family | None = None
    separator: str | None = None

    def __post_init__(self) -> None:
        needed = {Prompt.NAME: ("name", self.name), Prompt.MARKER: ("family", self.family)}
        if self.kind in needed and not needed[self.kind][1]:
            raise ConfigError(
                f"a prompt of kind {self.kind.value!r} without a {needed[self.kind][0]}",
                where="TaskPrompt",
                fix=f"give {needed[self.kind][0]}",
            )

    def ids(self, vocabulary: Vocabulary) -> list[int]:
        """The prompt's token ids.

        Raises:
            ConfigError: the separator is no piece of the vocabulary.
        """
        if self.kind is Prompt.NAME:
            return [*vocabulary.encode([self.name])[0], self._separator_id(vocabulary)]
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
                f"{self.separator!r} is no piece of the vocabulary",
                where="TaskPrompt.separator",
                expected=f"one of its {vocabulary.size:,} pieces, or None for the end of text",
                fix="<extra_id_N>: give the vocabulary extra ids, EXTRA_IDS=100 (T5's)",
            )
        return id
