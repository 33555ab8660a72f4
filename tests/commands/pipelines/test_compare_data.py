"""The collection of `taser compare`: its name, and what tells that its files have changed."""

from __future__ import annotations

import json

from taser_jax.commands.pipelines.compare_parts import collection_name, file_sizes, fit_lengths
from taser_jax.data.collections.store import write_collection, write_queries
from taser_jax.data.text.hugging_face import WordPieceVocabulary
from taser_jax.storage.records import Passage, Query


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


def test_lengths_have_room_for_prompts(tmp_path):
    """Five words and two special tokens are 7; with 10 tokens of a prompt 17, rounded up to 32."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a"]
    WordPieceVocabulary(words).save(str(tmp_path / "words"))
    write_collection(tmp_path, "c", [Passage("p", "a a a a a")])
    write_queries(tmp_path, "c", "t", "test", [Query("q", "a a a a a", "t", (0,))])

    def tokens(**prompts: str) -> dict[str, int]:
        settings = json.dumps({"prompts": prompts})
        (tmp_path / "words" / "config_sentence_transformers.json").write_text(settings)
        fitted = fit_lengths(
            data_dir=str(tmp_path),
            collection="c",
            vocabulary=str(tmp_path / "words"),
            own_length=None,
            given={},
        )
        return {side: fit.tokens for side, fit in fitted.items()}

    assert tokens() == {"query": 16, "passage": 16}
    assert tokens(query="a " * 10) == {"query": 32, "passage": 16}
    assert tokens(passage="a " * 10) == {"query": 16, "passage": 32}
