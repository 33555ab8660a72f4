"""Stages run once, are recorded whole or not at all, and refuse other arguments and artefacts."""

import enum
import json
import os
import pathlib
import shutil
from dataclasses import dataclass
from unittest import mock

import pytest
from small_world import never
from written_files import write

from taser_jax.commands.pipelines.stages import Stages, stage_inputs
from taser_jax.commands.tokenize import tokenize
from taser_jax.data.collections.store import write_collection, write_queries
from taser_jax.devices.hosts import writes
from taser_jax.storage.artifacts import fingerprint_json, write_json
from taser_jax.storage.errors import ConfigError, DataError
from taser_jax.storage.records import Passage, Query


def work(**_):
    return {"path": "model", "values": [1, 2]}


@pytest.mark.parametrize(
    ("inputs", "named"),
    [
        ({"steps": 4, "tasks": ["x"]}, "steps was 3 when this stage ran, now 4"),
        ({"tasks": ["x"]}, "steps"),
        ({"steps": 3, "tasks": ["x"], "seed": 0}, "seed"),
        ({"steps": 3, "tasks": ["x"], "checksums": {"films.details.tsv": "0"}}, "details.tsv"),
        # Tasks may have any names, too, such as those of places and of what is no input.
        ({"steps": 3, "tasks": ["x"], "rates": {"memories": 2.0}}, "rates.memories"),
        ({"steps": 3, "tasks": ["x"], "rates": {"details": 2.0}}, "rates.details"),
    ],
)
def test_other_inputs_are_named(tmp_path, inputs, named):
    stages = Stages(tmp_path)
    for tasks, function in ((("x",), work), (["x"], never(work))):
        stages.run("train", function, steps=3, tasks=tasks)
    with pytest.raises(ConfigError, match=rf"(?s)train\.json.*{named}.*choose another directory"):
        stages.run("train", never(work), **inputs)


def test_a_record_killed_while_written_is_no_record(tmp_path):
    stages = Stages(tmp_path)
    killed = mock.patch.object(os, "replace", side_effect=KeyboardInterrupt)
    with killed, pytest.raises(KeyboardInterrupt):
        stages.run("train", work)
    assert not stages.finished()
    stages.run("train", work)
    assert stages.record("train").outputs == work()
    # One of another format is none, either.
    path = tmp_path / "stages" / "train.json"
    path.write_text(path.read_text().replace('"format_version": 2', '"format_version": 9'))
    (path.parent / "checksums.txt").unlink()
    with pytest.raises(DataError, match="format version 9"):
        stages.run("train", work)


class Choice(enum.Enum):
    SAMPLE = "sample"


@dataclass(frozen=True)
class Mining:
    count: int = 3
    choice: Choice = Choice.SAMPLE
    states_dir: str | None = None


@writes("{output_dir}")
def mine(
    *,
    output_dir: str,
    runs_dir: str,
    token_store: str,
    split: str = "train",
    mining: Mining = Mining(),
    negatives_dirs: list[str] | None = None,
    config_text: str = "",
):
    assert not pathlib.Path(output_dir).is_dir() or "negatives.jsonl" not in os.listdir(output_dir)
    assert isinstance(runs_dir, str)
    pathlib.Path(output_dir, "negatives.jsonl").write_text("")
    return {"negatives": pathlib.Path(output_dir) / "negatives.jsonl", "mining": mining}


CHECKSUMS, TRAIN = "out/runs/checksums.txt", "0000000a 1 nq.train.trec\n"


@pytest.fixture
def world(tmp_path):
    """An output directory with runs of two splits, and a token store elsewhere."""
    write(tmp_path / CHECKSUMS, f"{TRAIN}0000000b 2 nq.test.trec\n")
    write_json(tmp_path / "tokens" / "metadata.json", {"fingerprint": "f1d0149f7140d346"})
    return tmp_path


def run_mine(world):
    output = world / "out"
    return Stages(output).run(
        "mine",
        mine,
        output_dir=output / "negatives",
        runs_dir=output / "runs",
        token_store=str(world / "tokens"),
        negatives_dirs=[output / "runs"],
    )


def test_a_record_has_arguments_and_fingerprints_and_no_absolute_path(world):
    run_mine(world)
    record = json.loads((world / "out" / "stages" / "mine.json").read_text())
    assert record.pop("seconds") >= 0
    # Of the training split alone, which the stage reads.
    train = fingerprint_json({"nq.train.trec": [(1, "0000000a")]})
    both = fingerprint_json({"nq.test.trec": [(2, "0000000b")], "nq.train.trec": [(1, "0000000a")]})
    assert train != both
    assert record == {
        "format_version": 2,
        "name": "mine",
        "inputs": {
            "output_dir": "negatives",
            "runs_dir": "runs",
            "runs_dir.fingerprint": train,
            "token_store.fingerprint": "f1d0149f7140d346",
            "split": "train",
            "mining.count": 3,
            "mining.choice": "sample",
            "mining.states_dir": None,
            "negatives_dirs.0": "runs",
            "negatives_dirs.0.fingerprint": train,
        },
        "outputs": {
            "negatives": "negatives/negatives.jsonl",
            "mining": {"count": 3, "choice": "sample", "states_dir": None},
        },
    }


def test_another_split_may_be_added_to_an_artefact_or_all_of_it_deleted(world):
    outputs = run_mine(world)
    with open(world / CHECKSUMS, "a") as file:
        file.write("0000000c 3 nq.validation.trec\n")
    assert run_mine(world) == outputs
    shutil.rmtree(world / "out" / "runs")
    assert run_mine(world) == outputs


@pytest.mark.parametrize(
    ("file", "content", "named"),
    [
        (CHECKSUMS, "0000000d 1 nq.train.trec\n", "negatives_dirs.0"),
        # Another task, named after a split.
        (CHECKSUMS, f"{TRAIN}0000000e 1 a.test.b.train.trec\n", "negatives_dirs.0"),
        ("tokens/metadata.json", '{"fingerprint": "other"}', "token_store"),
    ],
)
def test_a_changed_artefact_is_refused(world, file, content, named):
    run_mine(world)
    # Written anew, not damaged.
    (world / "tokens" / "checksums.txt").unlink(missing_ok=True)
    (world / file).write_text(content)
    message = f"{named}.fingerprint was '.*' when this stage ran, now '"
    with pytest.raises(ConfigError, match=message):
        run_mine(world)


def test_a_training_depends_on_the_weights_of_the_mixture(world):
    """Tokenising writes them anew where all else is the same."""
    mixture = world / "tokens" / "mixture.json"
    out = world / "out"

    def train(function=never(work)):
        data = {"token_store": str(world / "tokens")}
        return Stages(out).run("train", function, data=data)

    mixture.write_text('{"weights": {"nq": 1.0, "squad": 1.0}}')
    train(work)
    train()
    mixture.write_text('{"weights": {"nq": 1.0, "squad": 2.0}}')
    message = r"token_store.fingerprint.weights was .*'squad': 1.0.* 2"
    with pytest.raises(ConfigError, match=message):
        train()
    # A record of before has none.
    record = out / "stages" / "train.json"
    content = json.loads(record.read_text())
    del content["inputs"]["data.token_store.fingerprint.weights"]
    write_json(record, content)
    train()


def test_other_pretrained_weights_at_the_same_place_are_refused(tmp_path):
    """Known by name and content; what reads as before, or is gone by now, is no other input."""
    weights = tmp_path / "bert"
    write(weights / "model.safetensors", b"one")

    def load(function, source=weights):
        pretrained = {"source": str(source), "num_layers": 2}
        return Stages(tmp_path / "out").run("train", function, training={"pretrained": pretrained})

    load(work)
    (weights / "README.md").write_text("A model.")
    load(never(work))
    (weights / "model.safetensors").write_bytes(b"two")
    named = r"training\.pretrained\.source\.fingerprint was '.*' when this stage ran, now '"
    with pytest.raises(ConfigError, match=named):
        load(never(work))
    shutil.rmtree(weights)
    load(never(work))
    with pytest.raises(ConfigError, match=r"training\.pretrained\.source was"):
        load(never(work), "google-bert/bert-base-uncased")


@pytest.mark.parametrize("module", ["small_tasks", None])
def test_tokenising_depends_on_the_passages_and_queries_of_its_tasks(tmp_path, module):
    """A mixture's own tasks, or all of a collection that is named in place of a mixture."""
    data_dir, collection = str(tmp_path / "data"), "small" if module else "collection"

    def fingerprint():
        arguments = {
            "data_dir": data_dir,
            "mixture_or_task": collection,
            "module": module,
            "vocabulary": "vocabulary",
            "feature_lengths": {"query": 8, "passage": 8},
            "output_dir": str(tmp_path / "tokens"),
        }
        return stage_inputs(tokenize, arguments, tmp_path)["data_dir.fingerprint"]

    def written(task, text):
        write_queries(data_dir, collection, task, "train", [Query("q", text, task, (0,))])
        return fingerprint()

    write_collection(data_dir, collection, [Passage("p", "text")])
    before = [fingerprint(), written("code", "one"), written("summary", "two")]
    assert (written("another", "three") == before[-1]) == (module is not None)
    after = [written("code", "other")]
    write_collection(data_dir, collection, [Passage("p", "changed")])
    after.append(fingerprint())
    assert len({*before, *after}) == 5
