import itertools

import numpy as np
import pytest

from taser_jax.data.pydocs.build import find_leaks
from taser_jax.data.pydocs.objects import jaccard, shingles, similar_pairs
from taser_jax.data.pydocs.parse import words


def test_shingles_and_jaccard_by_hand():
    assert shingles("A b, c d", 2) == {("a", "b"), ("b", "c"), ("c", "d")}
    assert shingles("one", 2) == {("one",)}
    assert shingles("...", 2) == frozenset()
    # {ab, bc} and {ab, bd}: one shared of three.
    assert jaccard(shingles("a b c", 2), shingles("a b d e", 2)) == pytest.approx(1 / 4)
    assert jaccard(frozenset(), frozenset()) == 0.0


@pytest.mark.parametrize("threshold", [0.3, 0.6, 0.9, 1.0])
def test_similar_pairs_equal_all_pairs(threshold):
    rng = np.random.default_rng([7, int(threshold * 10)])
    sizes = rng.integers(0, 9, size=120)
    sets = [frozenset((str(w),) for w in rng.integers(0, 12, size=size)) for size in sizes]
    every = itertools.combinations(range(len(sets)), 2)
    expected = {(i, j) for i, j in every if jaccard(sets[i], sets[j]) >= threshold}
    pairs = list(similar_pairs(sets, threshold))
    assert len(pairs) == len(set(pairs))
    assert set(pairs) == expected
    assert expected


def test_leaks_equal_a_naive_search():
    rng = np.random.default_rng(3)
    passages = [" ".join(map(str, rng.integers(0, 3, size=60))) for _ in range(30)]
    queries = [" ".join(map(str, rng.integers(0, 3, size=n))) for n in rng.integers(1, 12, 300)]
    found = [len(words(q)) >= 5 and any(f" {q} " in f" {p} " for p in passages) for q in queries]
    assert find_leaks(queries, passages) == np.flatnonzero(found).tolist()
    assert 0 < sum(found) < len(queries)


def test_leaks_are_found_across_punctuation_and_case():
    passage = "First. The Sum, of\ntwo `numbers`; and more."
    assert find_leaks(["the sum of two numbers"], [passage]) == [0]
    assert find_leaks(["sum of two numbers"], [passage]) == []  # four words are no quotation
    assert find_leaks(["the sum of two number"], [passage]) == []
