"""JSON as types: each field is what its annotation says, or file and field are named."""

import dataclasses
import json
import math
import random

import msgspec
import pytest

from taser_jax.commands.evaluate import EvaluationConfig, Judge
from taser_jax.data.batches.every_task import TaskBatchingConfig
from taser_jax.retrieval.scann import ScannConfig, Structure
from taser_jax.storage.errors import ConfigError, DataError
from taser_jax.storage.typed_files import Natural, Share, flatten, read_typed, to_plain, typed


class Model(msgspec.Struct):
    type: str


class File(msgspec.Struct):
    size: Natural
    rate: Share = 0.5
    names: list[str | dict] = []
    files: dict[str, str] = {}
    model: Model | None = None


def test_right_fields_come_back_with_defaults_for_absent_and_null_ones(tmp_path):
    value = {"size": 3, "rate": None, "names": ["a", {"b": 1}], "model": {"type": "x"}, "own": 7}
    (tmp_path / "a.json").write_text(json.dumps(value))
    file = read_typed(tmp_path / "a.json", File)
    assert file == File(3, names=["a", {"b": 1}], model=Model("x"))
    absent = File(0)
    assert read_typed(tmp_path / "no.json", File, absent=absent) is absent


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"size": None}, "required field 'size'"),
        ({"size": True}, "field 'size': size is true: expected an integer, got true or false"),
        ({"size": 2.0}, "size is 2.0"),
        ({"size": -1}, "size is -1: expected an integer, 0 or more"),
        ({"rate": 1.5}, "rate is 1.5: expected a number, 1 or less"),
        ({"rate": 10**400}, "field 'rate'"),
        ({"rate": float("nan")}, "rate is NaN"),
        ({"rate": "0.1"}, "expected a number, got a string"),
        ({"names": "ab"}, 'names is "ab": expected a list, got a string'),
        ({"names": ["a", 1]}, r"field 'names\[1\]': names\[1\] is 1"),
        ({"files": {"a": []}}, r"field 'files\[...\]': expected a string, got a list"),
        ({"model": []}, "expected an object or null, got a list"),
        ({"model": {}}, "field 'model': model is {}: object missing required field 'type'"),
    ],
)
def test_wrong_fields_are_named_with_their_file(tmp_path, changed, message):
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"size": 3} | changed))
    with pytest.raises(DataError, match=message) as raised:
        read_typed(path, File, fix="get another")
    assert str(raised.value).startswith(str(path))
    assert "fix: get another" in str(raised.value)


VALUES = (None, True, 0, 1, 7, 101, 0.5, -1.0, float("inf"), "", "a", [], ["a"], [1], {}, {"a": 1})


def test_what_passes_has_the_annotated_types_and_the_rest_is_a_data_error():
    draw, passed = random.Random(0), 0
    for _ in range(5_000):
        names = draw.sample(File.__struct_fields__, draw.randint(0, 5))
        value = {name: draw.choice(VALUES) for name in names} | {"size": draw.choice(VALUES)}
        try:
            file = typed(value, File, where="a.json")
        except DataError:
            continue
        passed += 1
        assert type(file.size) is int
        assert file.size >= 0
        assert 0 <= file.rate <= 1
        assert all(isinstance(name, str | dict) for name in file.names)
        assert all(isinstance(name, str) for name in file.files.values())
        assert file.model is None or isinstance(file.model.type, str)
    assert 20 < passed < 4_000


def test_every_setting_has_its_path():
    config = EvaluationConfig(judge=Judge.ANSWERS)
    assert flatten(evaluation=config, rates={"nq": 2.0}, tasks=("a", "b"), k=3) == {
        "evaluation.judge": "answers",
        "evaluation.measures": ["R@1", "R@5", "R@20", "MRR@10", "nDCG@10"],
        "evaluation.page_only_tasks": [],
        "evaluation.qrels_tasks": [],
        "evaluation.regex_tasks": [],
        "rates.nq": 2.0,
        "tasks": ["a", "b"],
        "k": 3,
    }


def test_configurations_are_read_back_by_type():
    config = ScannConfig(structure=Structure.TREE, recall_target=1.0)
    assert typed(json.loads(json.dumps(to_plain(config))), ScannConfig, where="x") == config
    assert to_plain({"a": (Judge.ANSWERS, None), "b": config})["a"] == ["answers", None]
    assert typed({"recall_target": 1}, ScannConfig, where="x") == ScannConfig(recall_target=1.0)
    with pytest.raises(DataError, match="structure is \"shrub\": expected one of 'auto'"):
        typed({"structure": "shrub"}, ScannConfig, where="x")


def test_what_json_has_no_word_for():
    @dataclasses.dataclass(frozen=True)
    class Config:
        threshold: float = math.inf
        dtype: type = int

    assert to_plain({3: Config()}) == {"3": {"threshold": math.inf, "dtype": "<class 'int'>"}}


@pytest.mark.parametrize("seed", [-1, 1 << 63])
def test_seeds_are_what_keys_take(seed):
    with pytest.raises(ConfigError, match=f"TaskBatchingConfig: seed is {seed}"):
        TaskBatchingConfig(seed=seed)
