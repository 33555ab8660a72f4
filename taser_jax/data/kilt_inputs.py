"""Input formats of KILT's entity linking and dialogue tasks."""

from __future__ import annotations

from taser_jax.errors import DataError

MENTION_START, MENTION_END = "[START_ENT]", "[END_ENT]"


def entity_input(text: str, *, left_words: int, where: str) -> str:
    """A document around a marked mention, with the last words of what stands before it.

    With the right side cut by the tokeniser, the mention is never lost, as TACO-DR's AIDA inputs.

    Example:
        >>> entity_input("a b c [START_ENT] Bern [END_ENT] d", left_words=2, where="line 1")
        'b c [START_ENT] Bern [END_ENT] d'

    Args:
        text: the whole input.
        left_words: words kept before the mention; TACO-DR keeps 64.
        where: file:line, for the message.

    Raises:
        DataError: the text has not one mention between [START_ENT] and [END_ENT].
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
    r"""The last turns of a dialogue, one a line, oldest first.

    The last turn is the one to answer, and the first that truncation on the right would lose.

    Example:
        >>> dialogue_input("Hello\nHi\nSeen it?", turns=2)
        'Hi\nSeen it?'
    """
    lines = [line for line in text.split("\n") if line.strip()]
    return "\n".join(lines[max(0, len(lines) - turns) :])
