"""KILT's eight tasks with the lengths and prompts of TACO-DR (Table 5).

`taser prepare --gin_file=runs/kilt_full_prepare.gin` makes the collection "kilt",
with the tasks below. Four mixtures, by what is put before the queries: "kilt" nothing,
"kilt_name" the task's name and the end of a text,
"kilt_name_t5" the name and <extra_id_1> as in TACO-DR's code (a T5 vocabulary with extra ids),
"kilt_marker" its family's marker.
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
    "nq": ("NQ", Family.QUESTION_ANSWERING, 32),
    "tqa": ("TQA", Family.QUESTION_ANSWERING, 32),
    "hopo": ("HOPO", Family.QUESTION_ANSWERING, 36),
    "wow": ("WOW", Family.DIALOGUE, 256),
    "trex": ("TREX", Family.SLOT_FILLING, 32),
    "fever": ("FEVER", Family.FACT_CHECKING, 64),
    "zsre": ("ZSRE", Family.SLOT_FILLING, 32),
    "aida": ("AIDA", Family.ENTITY_LINKING, 128),
}

# Mixture -> kind of prompt, and what separates it from the query (None: the end of a text).
MIXTURES = {
    "kilt": (Prompt.NONE, None),
    "kilt_name": (Prompt.NAME, None),
    "kilt_name_t5": (Prompt.NAME, "<extra_id_1>"),
    "kilt_marker": (Prompt.MARKER, None),
}

for _mixture, (_prompt, _separator) in MIXTURES.items():
    for _task, (_name, _family, _length) in TASKS.items():
        add_retrieval_task(
            f"{_mixture}_{_task}",
            collection="kilt",
            task=_task,
            prompt=TaskPrompt(_prompt, name=_name, family=_family, separator=_separator),
            query_length=_length,
        )
    add_retrieval_mixture(_mixture, [f"{_mixture}_{_task}" for _task in TASKS])
