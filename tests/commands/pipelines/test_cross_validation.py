"""The stages of a choice on a collection of twenty passages, with lists written by hand."""

import json
import math
import pathlib
import types

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from written_files import run_of, write_run

from taser_jax.commands.pipelines import cross_validation
from taser_jax.commands.pipelines.cross_validation import choose, choose_bm25, fold_numbers
from taser_jax.data.collections.store import PassageStore, QuerySet, write_collection, write_queries
from taser_jax.data.token_store.negatives import read_negatives, write_negatives
from taser_jax.retrieval.bm25 import Bm25Config
from taser_jax.retrieval.fusion import DEFAULT_SHARE, ScoreNormalization
from taser_jax.storage.records import Passage, Query

QUERIES = 12
TOY = {"collection": "toy", "measure": "nDCG@10"}


@pytest.fixture
def data_dir(tmp_path) -> str:
    """Passage n is on word n; query n asks for it, in splits of twelve queries."""
    data_dir = str(tmp_path / "data")
    write_collection(data_dir, "toy", [Passage(f"p{n}", f"word{n} other") for n in range(20)])
    for split in ("train", "validation", "test"):
        queries = [Query(f"{split}{n}", f"word{n}", "words", (n,)) for n in range(QUERIES)]
        write_queries(data_dir, "toy", "words", split, queries)
    return data_dir


def write_lists(
    directory: pathlib.Path, split: str, lists: list[list[int]], top: float = 1.0
) -> pathlib.Path:
    """Lists of rows, best first, with scores top, top / 2, ..."""
    scored = [{f"p{row}": top / rank for rank, row in enumerate(rows, start=1)} for rows in lists]
    ranked = {f"{split}{n}": scores for n, scores in enumerate(scored)}
    write_run(directory / f"words.{split}.trec", ranked)
    return directory


def write_all_negatives(data_dir: str, root: pathlib.Path, *tasks: str) -> str:
    """One negative for each training query: passage 19, 18, ..."""
    store = PassageStore.open(data_dir, "toy")
    for task in tasks:
        ids = [query.id for query in QuerySet.open(data_dir, "toy", task, "train")]
        write_negatives(
            *(root, task, "train"),
            query_ids=ids,
            rows=[[19 - n] for n in range(len(ids))],
            scores=[[1.0]] * len(ids),
            metadata={"collection_fingerprint": store.fingerprint, "source": "runs"},
        )
    return str(root)


def hold(data_dir: str, root: pathlib.Path, runs: dict[str, str], **options) -> list[str]:
    """`hold_out` of task "words", or of others."""
    given = {"data_dir": data_dir, "collection": "toy", "tasks": ["words"], "embeddings_dirs": {}}
    return cross_validation.hold_out(**given | options, runs_dirs=runs, output_dir=str(root))


def choose_from(data_dir: str, dense: dict[str, list], sparse: list, **changes):
    """`choose` by the queries of task "words", or of others."""
    by = {"tasks": ["words"], "baseline": "untrained + BM25"} | changes
    return choose(**TOY, **by, data_dir=data_dir, dense_dirs=dense, sparse_dirs=sparse, k=10)


def test_a_fold_is_held_out_of_negatives_and_ranked_in_its_pool(data_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(cross_validation, "DEPTH", 1)
    runs = write_lists(tmp_path / "runs", "train", [[n, (n + 1) % 20, 19] for n in range(QUERIES)])
    ids = [f"train{n}" for n in range(QUERIES)]
    negatives_dir = write_all_negatives(data_dir, tmp_path / "negatives", "words")
    seen: list[str] = []
    for fold in range(3):
        root = tmp_path / str(fold)
        hold(data_dir, root, {"bm25": str(runs)}, negatives_dir=negatives_dir, fold=fold, folds=3)
        fold_json = json.loads((root / "fold.json").read_text())
        held = fold_json["queries"]["words"]
        numbers = fold_numbers([f"word{n}" for n in range(QUERIES)], 3)
        assert held == [ids[n] for n in np.flatnonzero(numbers == fold)]
        lines = read_negatives(root / "negatives", "words", "train", ids)
        for number, (id, line) in enumerate(zip(ids, lines, strict=True)):
            assert line.is_dropped == (id in held)
            assert line.rows.tolist() == ([] if id in held else [19 - number])
        # The pool has the first passage of each list: what is not in it is cut from the lists.
        pool = {int(id.removeprefix("train")) for id in held}
        assert set(fold_json["pool"]) == pool
        run = run_of(root / "bm25" / "words.train.trec")
        assert list(run) == held
        for id, scores in run.items():
            number = int(id.removeprefix("train"))
            assert list(scores) == [f"p{row}" for row in (number, number + 1) if row in pool]
        seen += held
    assert sorted(seen) == sorted(ids)


def test_a_task_of_few_queries_has_none_in_some_folds(data_dir, tmp_path):
    """Two tasks: one asks for what the other asks, and has fewer queries than there are folds."""
    write_queries(data_dir, "toy", "few", "train", [Query("few0", "word0", "few", positives=(0,))])
    tasks = ["words", "few"]
    runs = write_lists(tmp_path / "runs", "train", [[n, 19] for n in range(QUERIES)])
    write_run(runs / "few.train.trec", {"few0": {"p0": 1.0, "p19": 0.5}})
    options = {"negatives_dir": write_all_negatives(data_dir, tmp_path / "negatives", *tasks)}
    options |= {"tasks": tasks, "folds": 5}
    folds = [tmp_path / "folds" / str(fold) for fold in range(5)]
    both = {"bm25": str(runs), "dense": str(runs)}
    emptied = [hold(data_dir, root, both, fold=fold, **options) for fold, root in enumerate(folds)]
    # The other task must not be trained on the text that is ranked.
    held = [json.loads((root / "fold.json").read_text())["queries"] for root in folds]
    assert sorted(emptied) == [[], [], [], [], ["few"]]
    (fold,) = [fold for fold, queries in enumerate(held) if "few" in queries]
    assert emptied[fold] == ["few"]
    assert "train0" in held[fold]["words"]
    dense, sparse = ([str(root / name) for root in folds] for name in ("dense", "bm25"))
    by = {"tasks": tasks, "split": "train", "baseline": "dense + BM25"}
    chosen = choose_from(data_dir, {"dense": dense}, sparse, **by)
    assert chosen.queries == QUERIES + 1


def test_no_list_has_the_querys_own_passage(data_dir, tmp_path, monkeypatch):
    """Query pN is passage pN, too, which BM25 and embeddings would find first."""
    ids, vectors = [f"p{n}" for n in range(QUERIES)], np.eye(20, dtype=np.float32)
    queries = [Query(id, f"word{n} other", "own", (n + 1,)) for n, id in enumerate(ids)]
    write_queries(data_dir, "toy", "own", "train", queries)
    store = PassageStore.open(data_dir, "toy")
    where = {"data_dir": data_dir, "collection": "toy", "own_passage_tasks": ["own"]}
    grid = {"candidates": [Bm25Config()], "output_dir": str(tmp_path / "grid")}
    choose_bm25(**where, **grid, splits=["train"], measure="nDCG@10")
    negatives_dir = write_all_negatives(data_dir, tmp_path / "negatives", "own")

    encoded = types.SimpleNamespace(fingerprints={}, query_ids=ids, take=lambda rows: vectors[rows])
    model = types.SimpleNamespace(encode_fn=lambda *_, **__: None)
    texts = {"passages": None, "of_queries": lambda _: encoded}
    tokens = types.SimpleNamespace(queries=lambda *_: encoded, **texts)
    monkeypatch.setattr(cross_validation, "Embeddings", lambda _: encoded)
    monkeypatch.setattr(cross_validation.QueryEmbeddings, "of_split", lambda *_, **__: encoded)
    monkeypatch.setattr(cross_validation.TokenStore, "open", lambda _: tokens)
    monkeypatch.setattr(cross_validation, "load_model", lambda _: model)
    monkeypatch.setattr(cross_validation, "encode_rows", lambda _, __, rows, **___: vectors[rows])
    runs, fold = str(tmp_path / "grid" / "0" / "runs"), tmp_path / "fold"
    options = {"tasks": ["own"], "own_passage_tasks": ["own"], "fold": 0, "folds": 2}
    options |= {"negatives_dir": negatives_dir, "embeddings_dirs": {"dense": "embeddings"}}
    hold(data_dir, fold, {"bm25": runs, "dense": runs}, **options)
    rank = {"model_dir": "model", "token_store": "tokens", "fold_dir": str(fold), "k": 3}
    cross_validation.rank_held_out(**where, **rank, output_dir=str(fold / "trained"))
    held = json.loads((fold / "fold.json").read_text())
    assert {store.row_of(id) for id in held["queries"]["own"]} & set(held["pool"])
    for folder in (pathlib.Path(runs), *(fold / name for name in ("bm25", "dense", "trained"))):
        run = run_of(folder / "own.train.trec")
        assert run, folder
        assert not any(query in scores for query, scores in run.items()), folder


def choice(data_dir: str, tmp_path: pathlib.Path, trained: list[list[int]], split="validation"):
    """The untrained model has each positive second, BM25 never."""
    others = [[18, n] for n in range(QUERIES)]
    dense = {
        "untrained": [write_lists(tmp_path / "untrained", split, others)],
        "trained": [write_lists(tmp_path / "trained", split, trained, top=60.0)],
    }
    sparse = write_lists(tmp_path / "bm25", split, [[18, 19]] * QUERIES, top=6.0)
    return choose_from(data_dir, dense, [sparse], split=split)


def test_a_model_that_gains_everywhere_is_chosen(data_dir, tmp_path):
    chosen = choice(data_dir, tmp_path, [[n, 18] for n in range(QUERIES)])
    # nDCG of a positive at rank 1 is 1, at rank 2 it is 1 / log2(3).
    gain, error = chosen.gains["trained"]
    assert gain == pytest.approx(1 - 1 / math.log2(3))
    assert error == pytest.approx(0, abs=1e-12)
    assert chosen.row == "trained"
    assert chosen.queries == QUERIES
    assert chosen.gains["untrained"] == pytest.approx((0, 0))
    assert set(chosen.alphas) == {"trained", "untrained"}


def test_test_queries_choose_nothing_and_alpha_follows_the_widths_of_the_lists(data_dir, tmp_path):
    """The first list has cosines, the second is ten times as wide as BM25's."""
    chosen = choice(data_dir, tmp_path, [[n, 18] for n in range(QUERIES)], split="test")
    assert (chosen.row, chosen.queries, chosen.gains) == ("untrained + BM25", 0, {})
    assert chosen.alphas == {"untrained": DEFAULT_SHARE, "trained": 10 * DEFAULT_SHARE}
    plain = {name: kind is ScoreNormalization.NONE for name, kind in chosen.normalizations.items()}
    assert plain == {"untrained": False, "trained": True}


def test_bm25_keeps_the_default_unless_another_is_better(data_dir, tmp_path):
    chosen = choose_bm25(
        **TOY,
        data_dir=data_dir,
        splits=["train", "validation"],
        candidates=[Bm25Config(), Bm25Config(k1=1.5, b=0.75)],
        output_dir=str(tmp_path / "grid"),
    )
    # Both find every word.
    assert chosen == 0
    assert (tmp_path / "grid" / "1" / "runs" / "words.validation.trec").exists()


@given(st.lists(st.sampled_from("abcdefghijklmnop"), min_size=1), st.integers(2, 5))
def test_folds_part_the_queries_and_keep_equal_texts_together(texts, folds):
    numbers = fold_numbers(texts, folds)
    assert len(numbers) == len(texts)
    assert set(numbers.tolist()) <= set(range(folds))
    one_each = dict(zip(texts, numbers.tolist(), strict=True))
    assert [one_each[text] for text in texts] == numbers.tolist()
    # The distinct texts are spread evenly.
    sizes = [list(one_each.values()).count(fold) for fold in range(folds)]
    assert max(sizes) - min(sizes) <= 1
