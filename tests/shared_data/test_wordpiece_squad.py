import csv
import gzip

import pytest
import sentencepiece
import tokenizers
from sentence_models import save_bert_pieces

from taser_jax.data.text.vocabularies import WordPieceVocabulary, load_vocabulary, train_vocabulary

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def passages(shared_data) -> list[str]:
    path = shared_data / "squad" / "psgs_squad_dev.tsv.gz"
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        rows = list(csv.reader(file, delimiter="\t"))[1:]
    return [text for _, text, _ in rows] + [title for _, _, title in rows]


@pytest.mark.parametrize("lower_case", [True, False])
def test_wordpiece_ids_equal_hugging_face_on_all_squad_passages(passages, tmp_path, lower_case):
    made = train_vocabulary(passages, size=6000, output_dir=tmp_path)
    WordPieceVocabulary(made.pieces, lower_case=lower_case).save(tmp_path)
    ours = load_vocabulary(tmp_path).encode(passages)
    oracle = tokenizers.BertWordPieceTokenizer(str(tmp_path / "vocab.txt"), lowercase=lower_case)
    theirs = oracle.encode_batch(passages, add_special_tokens=False)
    assert len(ours) == 2 * 2067
    assert [i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b.ids] == []


def test_sentencepiece_is_its_library_and_the_graph_equals_it_up_to_ties(passages, tmp_path):
    import tensorflow as tf

    from taser_jax.interop.saved_model import TextGraph

    save_bert_pieces(tmp_path, passages, 4000)
    library = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "sentencepiece.model"))
    vocabulary, theirs = load_vocabulary(tmp_path), library.encode(passages)
    assert vocabulary.encode(passages) == theirs
    graph = TextGraph(vocabulary)
    ours = graph.encode(tf.constant([text.encode() for text in passages])).to_list()
    differing = [(a, b) for a, b in zip(ours, theirs, strict=True) if a != b]
    assert len(differing) < 5
    for a, b in differing:
        scores = [sum(map(library.get_score, ids)) for ids in (a, b)]
        assert scores[0] == pytest.approx(scores[1], rel=1e-6)
