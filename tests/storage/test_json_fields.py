"""JSON from elsewhere: each field is what its description says, or file and field are named."""

import json
import random

import pytest

from taser_jax.storage.artifacts import read_json
from taser_jax.storage.errors import DataError
from taser_jax.storage.json_fields import JsonField, JsonType, checked_fields

SIZE = JsonField(JsonType.INTEGER, required=True, minimum=1, maximum=100)
FIELDS = {
    "size": SIZE,
    "rate": JsonField(JsonType.NUMBER, above=0.0),
    "names": JsonField(JsonType.LIST, items=JsonField((JsonType.STRING, JsonType.OBJECT))),
    "files": JsonField(JsonType.OBJECT, items=JsonField(JsonType.STRING)),
    "model": JsonField(JsonType.OBJECT, fields={"type": JsonField(JsonType.STRING, required=True)}),
}


def test_right_fields_come_back_without_null_ones(tmp_path):
    value = {"size": 3, "rate": None, "names": ["a", {"b": 1}], "model": {"type": "x"}, "own": None}
    (tmp_path / "a.json").write_text(json.dumps(value))
    found = read_json(tmp_path / "a.json", fields=FIELDS)
    assert found == {name: item for name, item in value.items() if name != "rate"}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"size": None}, "no field 'size'"),
        ({"size": True}, "size is true"),
        ({"size": 2.0}, "size is 2.0"),
        ({"size": 0}, "at least 1, at most 100"),
        ({"size": 101}, "at least 1, at most 100"),
        ({"size": 10**400}, "size is 1000"),
        ({"rate": 0}, "above 0"),
        ({"rate": 10**400}, "a finite number"),
        ({"rate": float("nan")}, "rate is NaN"),
        ({"rate": "0.1"}, "a finite number"),
        ({"names": "ab"}, r"a list \[...\]"),
        ({"names": ["a", 1]}, r"field 'names\[1\]'"),
        ({"files": {"a": []}}, "field 'files.a'"),
        ({"model": []}, r"an object \{...\}"),
        ({"model": {}}, "no field 'model.type'"),
    ],
)
def test_wrong_fields_are_named_with_their_file(tmp_path, changed, message):
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"size": 3} | changed))
    with pytest.raises(DataError, match=message) as raised:
        read_json(path, fields=FIELDS, fix="get another")
    assert str(raised.value).startswith(str(path))
    assert "fix: get another" in str(raised.value)


VALUES = (None, True, 0, 1, 7, 101, 0.5, -1.0, float("inf"), "", "a", [], ["a"], [1], {}, {"a": 1})


def test_what_passes_has_the_described_types_and_the_rest_is_a_data_error():
    draw, passed = random.Random(0), 0
    for _ in range(5_000):
        names = draw.sample(sorted(FIELDS), draw.randint(0, len(FIELDS)))
        value = {name: draw.choice(VALUES) for name in names} | {"size": draw.choice(VALUES)}
        try:
            found = checked_fields(value, FIELDS, where="a.json")
        except DataError:
            continue
        passed += 1
        assert type(found["size"]) is int
        assert 1 <= found["size"] <= 100
        assert 0 < found.get("rate", 1) < float("inf")
        assert all(isinstance(name, str | dict) for name in found.get("names", []))
        assert isinstance(found.get("model", {"type": ""})["type"], str)
    assert 20 < passed < 4_000
