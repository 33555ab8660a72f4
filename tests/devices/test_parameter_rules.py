import numpy as np
import pytest

from taser_jax.devices.partitioning import assign, leaves_by_path
from taser_jax.storage.errors import ConfigError

PARAMS = {"encoder": {"layers_0": {"kernel": np.ones(2), "bias": np.ones(1)}, "scale": np.ones(1)}}


def test_paths_are_written_as_t5x_writes_them():
    assert list(leaves_by_path(PARAMS)) == [
        "encoder/layers_0/bias",
        "encoder/layers_0/kernel",
        "encoder/scale",
    ]


def test_each_parameter_gets_its_rules_value():
    rules = ((".*/kernel", 1), (".*/(bias|scale)", 2))
    assert assign(rules, PARAMS, table="t") == {
        "encoder": {"layers_0": {"kernel": 1, "bias": 2}, "scale": 2}
    }


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ((("encoder/.*/.*", 1),), "t: parameter encoder/scale matches 0 rules"),
        (((".*", 1), (".*/bias", 2)), "encoder/layers_0/bias matches 2 rules: '\\.\\*', '"),
        (((".*", 1), ("decoder/.*", 2)), "rule 'decoder/\\.\\*' matches no parameter"),
        ((("kernel", 1), (".*", 1)), "rule 'kernel' matches no parameter"),
        ((("(", 1),), "'\\(' is no regular expression of"),
    ],
)
def test_tables_must_cover_every_parameter_exactly_once(rules, message):
    with pytest.raises(ConfigError, match=message):
        assign(rules, PARAMS, table="t")
