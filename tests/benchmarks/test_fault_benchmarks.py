"""benchmarks/faults.py and host_faults.py: what they do to processes and files, and judgements."""

import sys

import numpy as np
import pytest
from script_calls import load_script
from written_files import contents, write_all

from taser_jax.storage.artifacts import write_json

faults = load_script("faults.py")

# A host that says where it is, and loses the other one if that dies.
HOST = """
import os, sys, time
say = lambda text: print(text, file=sys.stderr, flush=True)
say("first: started")
say("train: started")
time.sleep(0.1 if os.environ["JAX_PROCESS_ID"] == "0" else 60)
say("error on host 0: joint work with another host failed (UNKNOWN)")
sys.exit(134)
"""


def test_a_host_is_killed_in_a_stage_and_the_other_ends_by_itself(tmp_path, monkeypatch):
    host_faults = load_script("host_faults.py")
    write_all(tmp_path / "taser_jax", {"__init__.py": "", "cli.py": HOST})
    monkeypatch.chdir(tmp_path)
    pair = host_faults.Pair([], tmp_path, {})
    try:
        assert pair.reaches("train")
        ending = pair.kill(1)
        assert (ending.status, ending.told) == (134, "named")
        assert pair.wait() == [134, -9]
        assert not pair.reaches("another")
    finally:
        pair.end()


def test_damage_is_one_bit_and_forgotten_stages(tmp_path):
    files = {f"out/stages/{name}.json": "" for name in "abc"} | {"data/numbers": bytes(100)}
    write_all(tmp_path, files)
    before = contents(tmp_path)
    job = faults.Job(lambda world: [], "out", ["data"])
    told = faults.damage(tmp_path, job, np.random.default_rng(1), flips=True)
    after = contents(tmp_path)
    assert [name for name in after if after[name] != before[name]] == ["data/numbers"]
    assert sum(byte.bit_count() for byte in after["data/numbers"]) == 1
    assert told.startswith(f"{len(after) - 1} stages kept, byte ")
    assert told.endswith(" of data/numbers")


KILL = {"kind": "kill", "first": -9, "last": 0, "verify": 0, "same": True, "orphans": []}
FLIP = {"kind": "flip", "last": 0, "verify": 0, "same": True, "restored": True, "named": False}


@pytest.mark.parametrize(
    ("line", "is_trial", "is_right"),
    [
        (KILL, True, True),
        ({**KILL, "orphans": [".writer"]}, True, False),
        ({**KILL, "verify": 2}, True, False),
        ({**KILL, "kind": "none", "first": None, "same": False}, None, False),
        # The fault did not come about.
        ({**KILL, "first": 0}, False, None),
        ({**KILL, "kind": "full disk", "first": 0}, False, None),
        ({**KILL, "kind": "full disk", "first": 2}, True, True),
        (FLIP, True, True),
        # Nobody has noticed: another answer, or the damaged file still there.
        ({**FLIP, "same": False}, True, False),
        ({**FLIP, "restored": False}, True, False),
        # A refusal that names another file.
        ({**FLIP, "last": 2, "same": False}, True, False),
        ({**FLIP, "last": 2, "same": False, "named": True}, True, True),
        # Found, but too late: the answer is another already.
        ({**FLIP, "verify": 2, "named": True, "same": False}, True, False),
    ],
)
def test_what_is_a_trial_and_how_it_is_judged(line, is_trial, is_right):
    if is_trial is not None:
        assert faults.counts(line) is is_trial
        rows = faults.table([{"first": None, "orphans": [], **line}]).splitlines()
        assert len(rows) == 2 + is_trial
    if is_right is not None:
        assert faults.is_right(line) is is_right


# A command that reads one artefact and writes another.
ANSWER = """
import sys, zlib
from taser_jax.storage.artifacts import read_json, write_text
from taser_jax.storage.errors import TaserError
try:
    text = read_json(sys.argv[1] + "/data/text.json")["text"]
except TaserError as error:
    sys.exit(print(f"error: {error}", file=sys.stderr) or 2)
write_text(sys.argv[1] + "/out/answer.csv", f"{zlib.crc32(text.encode())}\\n")
"""
UNCHECKED = """
from taser_jax.storage import checksums
checksums._check = lambda *_, **__: None
checksums._compared_files = lambda root: [(root, None)]
"""


def test_without_checksums_the_harness_reports_wrong_results(tmp_path):
    write_all(tmp_path / "modules", {"sitecustomize.py": UNCHECKED})

    def make(world):
        write_json(world / "data" / "text.json", {"text": 1000 * "a"})

    command = faults.Job(lambda world: [sys.executable, "-c", ANSWER, str(world)], "out", ["data"])
    wrong = {}
    for name, modules in (("checked", []), ("unchecked", [tmp_path / "modules"])):
        trials = faults.Trials(
            tmp_path / name, {"answer": command}, seed=1, make=make, modules=modules
        )
        # Of the text, and of its checksum.
        for number in range(2):
            trials.run("flip", number)
        wrong[name] = [not faults.is_right(line) for line in trials.notes.lines]
    assert wrong == {"checked": [False, False], "unchecked": [True, True]}
