"""ScaNN: recall against exact, shards, padding, reuse and refusals."""

import subprocess
import sys

import numpy as np
import pytest

from taser_jax.retrieval import scann
from taser_jax.retrieval.exact import ExactSearcher, measure_recall
from taser_jax.retrieval.runs import SearchResult
from taser_jax.retrieval.scann import ScannConfig, ScannSearcher, Structure
from taser_jax.storage.errors import DataError

pytestmark = pytest.mark.needs("scann")
FINGERPRINTS = {"model": "m1", "collection": "c1"}


RNG = np.random.default_rng(0)
CENTRES = RNG.standard_normal((40, 16))
# Passages around centres and queries near them: what trees and codes are made for.
PASSAGES, QUERIES = (
    (CENTRES[RNG.integers(0, 40, n)] + 0.3 * RNG.standard_normal((n, 16))).astype(np.float32)
    for n in (3000, 100)
)


def build(directory, passages=PASSAGES, queries=QUERIES, **config):
    return scann.build_scann(
        passages,
        directory,
        fingerprints=FINGERPRINTS,
        config=ScannConfig(**{"recall_k": 10, "threads": 1, **config}),
        sample_queries=queries,
    )


@pytest.mark.parametrize("structure", [Structure.BRUTE_FORCE, Structure.HASHED, Structure.TREE])
@pytest.mark.parametrize("shard_passages", [3000, 1100])
def test_recall_target_is_met_with_true_scores(tmp_path, structure, shard_passages):
    options = {"structure": structure, "shard_passages": shard_passages, "recall_target": 0.9}
    searcher = build(tmp_path / "index", **options)
    assert len(list((tmp_path / "index").glob("shard-*"))) == -(-3000 // shard_passages)
    hits = searcher.search(QUERIES, 10)
    exact = ExactSearcher(PASSAGES).search(QUERIES, 10)
    assert measure_recall(hits, exact) >= 0.9
    assert searcher.effort.recall >= 0.9
    products = np.einsum("qd,qkd->qk", QUERIES, PASSAGES[hits.rows])
    np.testing.assert_allclose(hits.scores, products, rtol=1e-4, atol=1e-4)
    if structure is Structure.BRUTE_FORCE:
        np.testing.assert_array_equal(hits.rows, exact.rows)


def test_missing_results_never_become_row_0(tmp_path):
    searcher = build(tmp_path / "index", structure=Structure.TREE)
    # One leaf of 54 holds far fewer than 1,000 passages: ScaNN fills up with id 0 and NaN.
    effort = scann.SearchEffort(leaves=1, reorder=1000, recall=0.0)
    few = searcher._shards.search(QUERIES, 1000, effort)
    missing = few.rows == -1
    assert missing.any()
    assert np.isneginf(few.scores[missing]).all()
    assert np.isfinite(few.scores[~missing]).all()
    assert ((few.rows == 0).sum(axis=1) <= 1).all()
    products = np.einsum("qd,qkd->qk", QUERIES, PASSAGES[few.rows])
    np.testing.assert_allclose(few.scores[~missing], products[~missing], rtol=1e-4, atol=1e-4)


def test_fewer_passages_than_k(tmp_path):
    searcher = build(tmp_path / "index", np.eye(3, dtype=np.float32), None)
    hits = searcher.search(np.array([[3, 1, 2]], np.float32), 5)
    assert hits.rows.tolist() == [[0, 2, 1, -1, -1]]
    assert hits.scores.tolist() == [[3, 2, 1, -np.inf, -np.inf]]
    assert searcher.search(np.zeros((0, 3), np.float32), 5).rows.shape == (0, 5)


def test_built_once_and_reused(tmp_path, monkeypatch):
    first = build(tmp_path / "index", structure=Structure.HASHED)
    monkeypatch.setattr(scann, "build_shard", None)
    again = build(tmp_path / "index", structure=Structure.HASHED)
    opened = ScannSearcher(tmp_path / "index", fingerprints=FINGERPRINTS)
    monkeypatch.setattr(scann, "_RESIDENT_BYTES", 0)
    streamed = ScannSearcher(tmp_path / "index")
    for searcher in (again, opened, streamed, streamed):
        hits, expected = searcher.search(QUERIES, 10), first.search(QUERIES, 10)
        np.testing.assert_array_equal(hits.rows, expected.rows)
        np.testing.assert_array_equal(hits.scores, expected.scores)


def test_a_killed_build_keeps_its_finished_shards(tmp_path, monkeypatch):
    sizes = []
    real = scann.build_shard

    def killed_at_the_third(rows, structure, config):
        sizes.append(len(rows))
        if len(sizes) == 3:
            raise KeyboardInterrupt
        return real(rows, structure, config)

    monkeypatch.setattr(scann, "build_shard", killed_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        build(tmp_path / "index", shard_passages=1000)
    with pytest.raises(DataError, match="no finished scann index"):
        ScannSearcher(tmp_path / "index")
    build(tmp_path / "index", shard_passages=1000)
    assert sizes == [1000] * 4, "the third once more"


def test_structure_follows_the_number_of_passages():
    sizes = {100: Structure.BRUTE_FORCE, 50_000: Structure.HASHED, 3_000_000: Structure.TREE}
    assert {size: scann.structure_for(size, ScannConfig()) for size in sizes} == sizes
    assert scann.structure_for(100, ScannConfig(structure=Structure.TREE)) is Structure.TREE


def test_recall_by_hand():
    def result(rows, scores):
        return SearchResult(np.array(rows, np.int32), np.array(scores, np.float32))

    exact = result([[1, 2, 3, 4], [5, -1, -1, -1]], [[9, 8, 7, 6], [1, -np.inf, -np.inf, -np.inf]])
    hits = result([[1, 3, 9, -1], [5, 6, -1, -1]], [[9, 7, 6, -np.inf], [1, 0, -np.inf, -np.inf]])
    # Row 9 ties with the exact fourth: 3 of 4 and 1 of 1.
    assert measure_recall(hits, exact) == pytest.approx(4 / 5)
    assert measure_recall(exact, exact) == 1.0


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
    command = [sys.executable, "-c", imported + program]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_scann_searches_and_does_not_load_tensorflow() -> None:
    assert run(SEARCH + "import sys\nprint('tensorflow' in sys.modules)") == "False\n"


@pytest.mark.slow
@pytest.mark.needs("tensorflow")
@pytest.mark.parametrize("first", ["tensorflow", pytest.param("scann", marks=pytest.mark.release)])
def test_scann_and_tensorflow_live_in_one_process(first: str) -> None:
    imports = ["import tensorflow as tf\nkept = tf\n", "scann_library()\nimport tensorflow as tf\n"]
    used = "import sys\nassert sys.modules['tensorflow'] is tf\nprint(int(tf.constant(2) + 3))"
    assert run(imports[first == "scann"] + SEARCH + used) == "5\n"
