"""From KILT's query records to queries: input texts, gold rows and answers."""

from __future__ import annotations

from taser_jax.data.prepare.kilt_gold import Gold, ProvenanceIndex
from taser_jax.data.prepare.kilt_options import KiltOptions
from taser_jax.data.prepare.questions import IncompleteQuestions
from taser_jax.data.readers.kilt import KiltQuery
from taser_jax.storage.errors import DataError
from taser_jax.storage.records import Query

# The answers of fact checking; no passage contains them as answers.
_VERDICTS = frozenset({"SUPPORTS", "REFUTES", "DISPUTED", "NOT ENOUGH INFO"})
MENTION_START, MENTION_END = "[START_ENT]", "[END_ENT]"


class KiltQueryMapper:
    """Turns KILT's queries into ours.

    Attributes:
        counts: "without_positive", "missing_positives" and "whole_page".
        without_positive: as in `IncompleteQuestions`.
    """

    def __init__(self, task: str, split: str, index: ProvenanceIndex, options: KiltOptions) -> None:
        self._task, self._index, self._options = task, index, options
        self._gold = Gold.PAGE if task in options.page_gold_tasks else options.gold
        self._incomplete = IncompleteQuestions(split, options.strictness)
        self.counts = self._incomplete.counts
        self.without_positive = self._incomplete.without_positive

    def query(self, query: KiltQuery) -> Query | None:
        """The query with its gold rows; None where it is dropped for having none."""
        positives = self._positives(query)
        if not positives and not self._incomplete.keeps_without_positive(
            "no output has a provenance in the collection",
            where=f"{query.where}, field 'output'",
            expected="at least one gold passage",
        ):
            return None
        answers = [one.answer for one in query.outputs if one.answer is not None]
        return Query(
            id=query.id,
            text=self._text(query),
            task=self._task,
            positives=positives,
            answers=tuple(answer for answer in dict.fromkeys(answers) if answer not in _VERDICTS),
        )

    def _text(self, query: KiltQuery) -> str:
        options = self._options
        if self._task in options.entity_tasks:
            return entity_input(query.text, left_words=options.left_words, where=query.where)
        if self._task in options.dialogue_turns:
            return dialogue_input(query.text, turns=options.dialogue_turns[self._task])
        return query.text

    def _positives(self, query: KiltQuery) -> tuple[int, ...]:
        found: dict[int, None] = {}
        for number, output in enumerate(query.outputs):
            for place, provenance in enumerate(output.provenance or ()):
                where = f"{query.where}, output[{number}].provenance[{place}]"
                if not self._index.has_page(provenance.page_id):
                    self._missing(f"the page {provenance.page_id!r}", where)
                    continue
                rows, whole_page = self._index.rows(provenance, self._gold, where)
                if not rows:
                    self._missing("the place in the page", where)
                self.counts["whole_page"] += whole_page
                found.update(dict.fromkeys(rows))
        return tuple(found)

    def _missing(self, what: str, where: str) -> None:
        self._incomplete.missing_positive(
            DataError(
                f"{what} is not in the collection",
                where=f"{where}, field 'wikipedia_id'",
                expected="a page, and a place in it, that the passages cover",
                fix="give the passages or knowledge source that the queries were made from, or "
                "drop such provenance with PrepareOptions.missing_positives = 'drop'",
            )
        )


def entity_input(text: str, *, left_words: int, where: str) -> str:
    """A document around a marked mention, with only the last words before it.

    The tokeniser truncates on the right, so the mention is never lost, as in TACO-DR's AIDA inputs.

    Example:
        >>> entity_input("a b c [START_ENT] Bern [END_ENT] d", left_words=2, where="line 1")
        'b c [START_ENT] Bern [END_ENT] d'

    Args:
        text: the whole input.
        left_words: words kept before the mention; TACO-DR keeps 64.
        where: file:line, for the message.

    Raises:
        DataError: the text does not have exactly one mention between [START_ENT] and [END_ENT].
    """
    left, start, rest = text.partition(MENTION_START)
    mention, end, right = rest.partition(MENTION_END)
    if not start or not end or not mention.strip() or MENTION_START in rest:
        raise DataError(
            f"{text.count(MENTION_START)} {MENTION_START}, {text.count(MENTION_END)} {MENTION_END}",
            where=f"{where}, field 'input'",
            expected=f"one mention, as {MENTION_START} Bern {MENTION_END}",
            fix="leave the task out of entity_tasks if it is not entity linking",
        )
    words = left.split()
    kept = words[max(0, len(words) - left_words) :]
    return " ".join(
        [*kept, MENTION_START, *mention.split(), MENTION_END, *right.split()],
    )


def dialogue_input(text: str, *, turns: int) -> str:
    r"""The last turns of a dialogue, one per line, oldest first.

    The last turn is the one to answer, and would be the first to be lost by truncation.

    Example:
        >>> dialogue_input("Hello\nHi\nSeen it?", turns=2)
        'Hi\nSeen it?'
    """
    lines = [line for line in text.split("\n") if line.strip()]
    return "\n".join(lines[max(0, len(lines) - turns) :])
