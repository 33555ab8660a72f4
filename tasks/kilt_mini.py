"""Seven tasks of four families over one small collection of Wikipedia passages.

`taser prepare --gin_file=runs/kilt_mini_prepare.gin` makes the collection "kilt_mini".
Four mixtures, by what is put before the queries: "kilt_mini" nothing,
"kilt_mini_name" the task's name and the end of a text,
"kilt_mini_name_t5" the name and <extra_id_1> as in TACO-DR's code (a T5 vocabulary with extra ids),
"kilt_mini_marker" its family's marker.
"""

from taser_jax.tasks import (
    Family,
    Prompt,
    TaskPrompt,
    add_retrieval_mixture,
    add_retrieval_task,
)

# Task of the collection -> name in its prompt, family, tokens of a query.
TASKS = {
    "squad": ("SQUAD", Family.QUESTION_ANSWERING, 32),
    "nq_qed": ("NQ", Family.QUESTION_ANSWERING, 32),
    "selqa": ("SELQA", Family.QUESTION_ANSWERING, 32),
    "fm2": ("FM2", Family.FACT_CHECKING, 64),
    "climate_fever": ("CLIMATE", Family.FACT_CHECKING, 64),
    "fewrel": ("FEWREL", Family.SLOT_FILLING, 32),
    "cmu_dog": ("DIALOGUE", Family.DIALOGUE, 128),
}

# Mixture -> kind of prompt, and what separates it from the query (None: the end of a text).
MIXTURES = {
    "kilt_mini": (Prompt.NONE, None),
    "kilt_mini_name": (Prompt.NAME, None),
    "kilt_mini_name_t5": (Prompt.NAME, "<extra_id_1>"),
    "kilt_mini_marker": (Prompt.MARKER, None),
}

for _mixture, (_prompt, _separator) in MIXTURES.items():
    for _task, (_name, _family, _length) in TASKS.items():
        add_retrieval_task(
            f"{_mixture}_{_task}",
            collection="kilt_mini",
            task=_task,
            prompt=TaskPrompt(_prompt, name=_name, family=_family, separator=_separator),
            query_length=_length,
        )
    add_retrieval_mixture(_mixture, [f"{_mixture}_{_task}" for _task in TASKS])
