"""ScaNN is imported without TensorFlow, and TensorFlow is as it was afterwards."""

import subprocess
import sys

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.needs("scann")]

SEARCH = """
import numpy as np
rows = np.eye(8, dtype=np.float32)
searcher = scann_library().builder(rows, 3, "dot_product").score_brute_force().build()
ids, scores = searcher.search(rows[5])
assert ids[0] == 5 and scores[0] == 1.0, (ids, scores)
"""


def run(program: str) -> str:
    """What a Python of its own prints, for modules stay imported."""
    imported = "from taser_jax.retrieval.scann import scann_library\n"
    done = subprocess.run(
        [sys.executable, "-c", imported + program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_scann_searches_and_does_not_load_tensorflow() -> None:
    left = run(SEARCH + "import sys\nprint('tensorflow' in sys.modules)")
    assert left == "False\n"


@pytest.mark.needs("tensorflow")
@pytest.mark.parametrize("first", ["tensorflow", pytest.param("scann", marks=pytest.mark.release)])
def test_scann_and_tensorflow_live_in_one_process(first: str) -> None:
    imports = ["import tensorflow as tf\nkept = tf\n", "scann_library()\nimport tensorflow as tf\n"]
    used = "import sys\nassert sys.modules['tensorflow'] is tf\nprint(int(tf.constant(2) + 3))"
    assert run(imports[first == "scann"] + SEARCH + used) == "5\n"
