"""`taser mine` on passages and questions checked by hand."""

import os
import pathlib

import pytest
import recipes
from capitals import IDS, mined
from small_world import gin, succeed
from written_files import run_of

from taser_jax.assembly.data import training_queries
from taser_jax.commands.mine import mine
from taser_jax.data.collections.store import PassageStore, QuerySet
from taser_jax.data.token_store.negatives import read_metadata, write_negatives
from taser_jax.data.token_store.store import TokenStore
from taser_jax.storage.errors import FingerprintError


@pytest.fixture(scope="module")
def runs_dir(capitals, tmp_path_factory) -> pathlib.Path:
    directory = tmp_path_factory.mktemp("bm25") / "runs"
    capitals.bm25(directory, SPLIT="train")
    return directory


def test_drop_leaves_out_positives_and_passages_with_an_answer(capitals, runs_dir, tmp_path):
    arguments = ["mine", *capitals.where, *gin(RUNS_DIR=runs_dir)]
    succeed(*arguments, *gin(NEGATIVES_DIR=tmp_path / "keep"))
    drop = gin("MiningConfig", answer_containing="drop")
    succeed(*arguments, *gin(NEGATIVES_DIR=tmp_path / "drop"), *drop)
    # Every passage with "capital", "France" or "Italy" but the gold; p1 names Paris, the answer.
    france, italy = mined(tmp_path / "keep", "capital")
    assert france == {"p1", "p2", "p3", "p4", "p6"}
    assert italy == {"p0", "p2", "p4", "p5", "p6"}
    assert mined(tmp_path / "drop", "capital") == [france - {"p1"}, italy]
    metadata = read_metadata(tmp_path / "drop")
    store = PassageStore.open(capitals.root / "data", "capitals")
    assert metadata["collection_fingerprint"] == store.fingerprint
    facts = metadata["files"]["capital.train.jsonl"]
    assert facts["mining"]["answer_containing"] == "drop"
    statistics = facts["statistics"]
    # Both positives, and p1, which names Paris.
    assert (statistics["left_out"]["positive"], statistics["left_out"]["answer"]) == (2, 1)
    assert (statistics["queries"], statistics["negatives"]) == (2, 9)


def test_queries_without_answers_are_judged_by_qrels(capitals, runs_dir, tmp_path):
    """Into a folder below a link: ".." leads from where that link leads."""
    (tmp_path / "far" / "away").mkdir(parents=True)
    (tmp_path / "linked").symlink_to(tmp_path / "far" / "away")
    output = tmp_path / "linked" / "negatives"
    succeed(
        *("mine", *capitals.where),
        *gin(RUNS_DIR=runs_dir, NEGATIVES_DIR=output, TASKS=["rivers"]),
        *gin("MiningConfig", answer_containing="drop"),
    )
    # "river in France": all that names France or a river, but p0 and p1, which are judged.
    assert mined(output, "rivers") == [{"p2", "p5"}, {"p1", "p3", "p4"}]
    assert os.path.samefile(output / read_metadata(output)["source"], runs_dir)


@pytest.mark.parametrize("round_of", ["first_mining", "second_mining"])
def test_compare_mines_no_positive(capitals, runs_dir, tmp_path, round_of):
    """No passage of a grade above 0 is a negative; of grade 0, p2 is one like any other."""
    setting = recipes.value("compare", "setting", "runs/compare.gin")
    data = {"data_dir": str(capitals.root / "data"), "collection": "capitals"}
    config = getattr(setting, round_of)
    mine(runs_dir=str(runs_dir), output_dir=str(tmp_path), config=config, **data)
    for task in ("capital", "rivers"):
        run = run_of(runs_dir / f"{task}.train.trec")
        queries = QuerySet.open(**data, task=task, split="train")
        for query, negatives in zip(queries, mined(tmp_path, task), strict=True):
            positives = {IDS[row] for row in query.positives}
            assert positives <= run[query.id].keys(), "else this cannot fail"
            assert negatives
            assert not negatives & positives
    assert mined(tmp_path, "rivers")[0] == {"p2", "p5"}


def test_training_leaves_out_dropped_queries_and_refuses_rows_of_another_collection(
    small_world, tmp_path
):
    tokens = TokenStore.open(small_world.token_store)
    ids = tokens.queries("code", "train").query_ids
    own = tokens.metadata.collection_fingerprint
    rows = [[]] + [[1]] * (len(ids) - 1)

    def write(name: str, rows: list[list[int]], dropped=(), collection: str = own) -> str:
        write_negatives(
            *(tmp_path / name, "code", "train"),
            query_ids=ids,
            rows=rows,
            scores=[[0.5] * len(line) for line in rows],
            dropped=dropped,
            metadata={"collection_fingerprint": collection, "source": "hand"},
        )
        return str(tmp_path / name)

    def read(*directories: str) -> list[str]:
        queries = training_queries(tokens, task_names=["code"], negatives_dirs=directories)
        return queries["code"].query_ids

    drop, other = write("drop", rows, {ids[0]}), write("other", [[2]] * len(ids))
    assert read(drop) == ids[1:]
    assert read(write("random", rows)) == ids
    assert read(drop, other) == ids, "another directory has a negative for it"
    with pytest.raises(FingerprintError, match=f"(?s)another.*{own}"):
        read(write("foreign", rows, collection="another"))
