"""The five open-domain question-answering sets of DPR and TASER, and EntityQuestions.

`taser prepare --gin_file=runs/odqa_prepare.gin` makes the collection "odqa" over Wikipedia. Of
its two mixtures "odqa" has the five sets, and "odqa_entities" EntityQuestions' relations too, which
have test questions alone: one token store then serves training and the evaluation on both.
"""

from taser_jax.tasks import QueryNormalization, add_retrieval_mixture, add_retrieval_task

# NQ, TriviaQA, WebQuestions, CuratedTREC and SQuAD.
TASKS = ("nq", "trivia", "webq", "trec", "squad")

# Wikidata's numbers of EntityQuestions' relations; each is a task, named "eq_p17" and so on.
# fmt: off
RELATIONS = (
    17, 19, 20, 26, 36, 40, 50, 69, 106, 112, 127, 131,
    136, 159, 170, 175, 176, 264, 276, 407, 413, 495, 740, 800,
)
# fmt: on
ENTITY_TASKS = tuple(f"eq_p{number}" for number in RELATIONS)

for _task in (*TASKS, *ENTITY_TASKS):
    add_retrieval_task(
        f"odqa_{_task}",
        collection="odqa",
        task=_task,
        normalization=QueryNormalization.CURLY_APOSTROPHE,
    )

_SETS = [f"odqa_{task}" for task in TASKS]
add_retrieval_mixture("odqa", _SETS)
# The rate of a task that is never trained on says nothing.
add_retrieval_mixture("odqa_entities", [*_SETS, *((f"odqa_{task}", 1.0) for task in ENTITY_TASKS)])
