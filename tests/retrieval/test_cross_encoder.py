"""A cross-encoder's scores against one forward pass for each pair."""

import numpy as np
import pytest

from taser_jax.retrieval.pair_scores import CrossEncoder
from taser_jax.storage.errors import ConfigError

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefgh"]
QUERIES = ["a b", "c", "d e f", "a b"]
PASSAGES = ["c d", "e f g h a b c d e f g h a b", "a", "h g f e"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    import torch
    import transformers

    directory = tmp_path_factory.mktemp("cross-encoder")
    (directory / "vocab.txt").write_text("\n".join(WORDS) + "\n", encoding="utf-8")
    transformers.BertTokenizerFast(str(directory / "vocab.txt")).save_pretrained(directory)
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(WORDS),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=16,
        num_labels=1,
        initializer_range=0.5,
    )
    transformers.BertForSequenceClassification(config).save_pretrained(directory)
    return directory


def test_batches_give_the_scores_of_single_pairs(checkpoint):
    import torch
    import transformers

    found = CrossEncoder(checkpoint, max_length=16).scores(QUERIES, PASSAGES)
    model = transformers.BertForSequenceClassification.from_pretrained(checkpoint).eval()
    ids = {word: number for number, word in enumerate(WORDS)}
    for query, passage, score in zip(QUERIES, PASSAGES, found, strict=True):
        # Written out: [CLS] query [SEP] passage [SEP], the passage cut at 16 tokens in all.
        words = ["[CLS]", *query.split(), "[SEP]"]
        first = len(words)
        words += [*passage.split()[: 16 - first - 1], "[SEP]"]
        with torch.inference_mode():
            logits = model(
                input_ids=torch.tensor([[ids[word] for word in words]]),
                token_type_ids=torch.tensor([[0] * first + [1] * (len(words) - first)]),
            ).logits
        assert score == pytest.approx(float(logits[0, 0]), abs=1e-5)
    assert len(set(np.round(found, 4))) == len(found)


def test_a_classifier_of_several_classes_is_refused(checkpoint, tmp_path):
    import transformers

    transformers.AutoTokenizer.from_pretrained(checkpoint).save_pretrained(tmp_path)
    config = transformers.BertConfig.from_pretrained(checkpoint, num_labels=3)
    transformers.BertForSequenceClassification(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="a classifier with 3 outputs"):
        CrossEncoder(tmp_path)
