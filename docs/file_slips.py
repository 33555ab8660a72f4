"""Files from elsewhere that are not what they should be, each as the command that reads it."""

from __future__ import annotations

import json

from slips import PREPARE, Slip, add_line

FILE_SLIPS = (
    Slip(
        "An id with a no-break space",
        "found after training, when the run file was written",
        (PREPARE,),
        change=add_line("shop/corpus.jsonl", '{"_id": "p\u00a012", "text": "The crane."}'),
    ),
    Slip(
        "Half of a character in JSON",
        "a traceback",
        (PREPARE,),
        change=add_line("shop/queries.jsonl", json.dumps({"_id": "q9", "text": "what \ud83e"})),
    ),
)
