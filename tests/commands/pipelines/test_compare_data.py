"""The collection of `taser compare`: its name, and what tells that its files have changed."""

from __future__ import annotations

from taser_jax.commands.pipelines.compare_parts import collection_name, file_sizes


def test_a_collection_is_named_after_its_folders():
    assert collection_name(["data/Sci Facts/", "b-2"]) == "sci_facts_b_2"
    assert collection_name(["2024"]) == "c_2024"


def test_files_of_all_folders_have_their_sizes(tmp_path):
    (tmp_path / "a" / "qrels").mkdir(parents=True)
    (tmp_path / "a" / "qrels" / "test.tsv").write_text("123")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "p.tsv").write_text("")
    found = file_sizes([str(tmp_path / "a"), str(tmp_path / "b")])
    assert found == {f"{tmp_path}/a/qrels/test.tsv": 3, f"{tmp_path}/b/p.tsv": 0}
