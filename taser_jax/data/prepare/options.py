"""What is prepared and how: files of questions, by task and split, and options of all formats."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping

from taser_jax.data.collections.store import SPLITS
from taser_jax.storage.artifacts import FilePath
from taser_jax.storage.errors import ConfigError
from taser_jax.storage.typed_files import Checked, Natural, Positive, Rate, Share

VALIDATION = "validation"
# Shares of the splits of a file that holds several.
SHARES: Mapping[str, float] = {"train": 0.8, VALIDATION: 0.1, "test": 0.1}


@dataclasses.dataclass(frozen=True, slots=True)
class QuestionFiles:
    """The files with the questions of one task and split.

    Attributes:
        questions: of any format (`read_questions`).
        qrels: judgements (TREC or BEIR columns), for queries whose file has none; they replace the
            positives in `questions`, and questions that are not judged are left out unless they
            have answers.
        passages: label of the passage file whose ids the questions and qrels use. Needed if several
            files are merged and an id means different passages in them.
    """

    questions: FilePath
    qrels: FilePath | None = None
    passages: str = ""


@dataclasses.dataclass(frozen=True)
class PrepareOptions(Checked):
    """How files become a collection; options named after tasks are for these tasks only.

    Attributes:
        strict: whether to refuse, at their first, empty passages, repeated passages, positives and
            judged ids that are not in the files; otherwise they are left out, counted and listed.
        validation_share: share of the training questions that become a validation split, where a
            task comes without one; never of the test questions. 0 makes none.
        task_shares: task -> shares of the splits of its file, where one holds several, in place of
            `SHARES`.
        validation_last: number of questions at the end of a file with several splits that are its
            validation split, instead of a share (TACO-DR: the last 500 of each training file); 0
            uses the shares.
        split_groups: task -> pattern; questions whose ids have the same match share a split.
        split_by_page: tasks of KILT's whose questions share a split where their positives are on
            one page: no split has a page of another's (CMU DoG's films).
        train_samples: task -> number of training questions that are kept, chosen by hash, before a
            validation share is taken from them; with `validation_last`, the number kept of the
            whole file, before its last questions are split off (TACO-DR: zsRE's 99,500 are 100,000
            less 500).
        page_gold_tasks: tasks of KILT's whose gold is always the whole page, as TACO-DR's AIDA.
        passage_words: words of a passage of what is cut: text files and KILT's pages. Set it to
            what the model reads in one piece.
        entity_tasks: tasks whose questions mark a mention with [START_ENT] and [END_ENT].
        distractors: share of the passages that are kept although no question has them as a
            positive, chosen by a hash of their ids. Below 1 the collection is smaller and still has
            every positive.
    """

    strict: bool = False
    validation_share: Rate = 0.0
    task_shares: Mapping[str, Mapping[str, float]] = dataclasses.field(default_factory=dict)
    validation_last: Natural = 0
    split_groups: Mapping[str, str] = dataclasses.field(default_factory=dict)
    split_by_page: tuple[str, ...] = ()
    train_samples: Mapping[str, int] = dataclasses.field(default_factory=dict)
    page_gold_tasks: tuple[str, ...] = ()
    passage_words: Positive = 100
    entity_tasks: tuple[str, ...] = ()
    distractors: Share = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.validation_last and (self.split_groups or self.split_by_page):
            problem = "validation_last, whose questions may be part of a group of the others"
            fix = "set validation_last = 0, or leave out split_groups and split_by_page"
            raise ConfigError(problem, where="PrepareOptions", fix=fix)

    def check_tasks(self, tasks: Mapping[str, object]) -> None:
        """Checks that the tasks that options name are tasks of the files.

        Raises:
            ConfigError: naming the first option with another task.
        """
        for field in dataclasses.fields(self):
            named = getattr(self, field.name)
            if not isinstance(named, Mapping | tuple | list):
                continue
            if unknown := [task for task in named if task not in tasks]:
                raise ConfigError(
                    f"it names {', '.join(map(repr, unknown))}; the tasks are {', '.join(tasks)}",
                    where=f"PrepareOptions.{field.name}",
                    fix="correct the name, or leave the option out",
                )


# A file may hold several splits.
WHOLE = "+".join(SPLITS)
Files = FilePath | QuestionFiles
Tasks = Mapping[str, Files | Mapping[str, Files]]


def by_task_and_split(tasks: Tasks, base: FilePath = "") -> dict[str, dict[str, QuestionFiles]]:
    """Question files by task and split.

    Example:
        {"code": {"test": "b.tsv"}, "faq": "a.tsv"} gives {"code": {"test": QuestionFiles("b.tsv")},
        "faq": {"train+validation+test": QuestionFiles("a.tsv")}}.

    Args:
        tasks: task -> split -> file, or task -> file of all three splits.
        base: folder of relative paths; "" is the current one.
    """
    return {
        task: {
            split: _below(base, split_files)
            for split, split_files in (
                files if isinstance(files, Mapping) else {WHOLE: files}
            ).items()
        }
        for task, files in tasks.items()
    }


def _below(base: FilePath, files: Files) -> QuestionFiles:
    if not isinstance(files, QuestionFiles):
        files = QuestionFiles(files)
    qrels = None if files.qrels is None else os.path.join(base, files.qrels)
    return dataclasses.replace(files, questions=os.path.join(base, files.questions), qrels=qrels)
