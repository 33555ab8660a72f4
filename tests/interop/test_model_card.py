import dataclasses
import json

import numpy as np
import pytest
from huggingface_hub import ModelCard

from taser_jax.data.text.wordpiece import WordPieceVocabulary
from taser_jax.data.token_store.store import QueryNormalization, QuerySettings, Titles
from taser_jax.interop import onnx, sentence_transformers, stablehlo
from taser_jax.interop.export_source import CardTexts, ExportSource, card, metadata, write_card
from taser_jax.models.batch import Normalization
from taser_jax.models.bert import BertConfig
from taser_jax.models.bert_dual_encoder import DualEncoderConfig
from taser_jax.models.routing import ExpertConfig
from taser_jax.models.t5_dual_encoder import T5DualEncoderConfig

VOCABULARY = WordPieceVocabulary(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a"])
TEXTS = CardTexts("stablehlo", "Programs.", "answer = 6 * 7", ("jax",))


@pytest.fixture
def source(tmp_path):
    VOCABULARY.save(str(tmp_path))
    return ExportSource(
        config=DualEncoderConfig(
            bert=BertConfig(embed_dim=24, num_layers=6), experts=ExpertConfig(num_experts=2)
        ),
        params={"encoder": {"a": np.zeros((3, 4)), "b": np.zeros(5)}},
        vocabulary_dir=tmp_path,
        query_length=32,
        passage_length=100,
        fingerprint="0f3a",
        facts={"data_fingerprint": "d474", "negatives_per_query": "31 = 16 x 2 - 1"},
        metrics={"nq R@20": 0.81234},
        config_text="TOKEN_STORE = '/home/someone/tokens'\nLEARNING_RATE = 2e-05\n",
    )


def test_card_has_model_lengths_data_metrics_and_how_to_load_it(source):
    text = card(source, TEXTS)
    for line in (
        "# TASER, a dense retriever",
        "- jax",
        "| query | `[CLS] text [SEP]` | 32 |",
        "| passage | `[CLS] title [SEP] text [SEP]`, without title `[CLS] text [SEP]` | 100 |",
        "```python\nanswer = 6 * 7\n```",
        "| parameters | 17 |",
        "| specialised blocks | 3, 6 |",
        "| encoder | BERT, 6 blocks of width 24 |",
        "| experts | 2, by deterministic routing |",
        "| model fingerprint | `0f3a` |",
        f"| vocabulary fingerprint | `{VOCABULARY.fingerprint}` |",
        "| data fingerprint | d474 |",
        "| negatives per query | 31 = 16 x 2 - 1 |",
        "| nq R@20 | 0.8123 |",
        "TOKEN_STORE = 'tokens'\nLEARNING_RATE = 2e-05\n",
    ):
        assert line in text
    assert "embeddings of 24 numbers" in text
    assert "the hidden state of [CLS]" in text


def test_a_card_says_which_model_it_is_and_what_is_done_to_texts(source):
    text = card(dataclasses.replace(source, config=T5DualEncoderConfig()), TEXTS)
    assert "# T5 dual encoder, a dense" in text
    assert "first decoder output" in text
    assert "do not score by cosine" in text
    changed = dataclasses.replace(
        source,
        config=dataclasses.replace(source.config, normalization=Normalization.L2),
        query_settings=QuerySettings(QueryNormalization.CURLY_APOSTROPHE, (7, 3)),
        titles=Titles.OMIT,
    )
    text = card(changed, TEXTS)
    for line in (
        "| query | `[CLS] prompt text [SEP]` | 32 |",
        "| passage | `[CLS] text [SEP]` | 100 |",
        "’ is replaced by '",
        "The prompt is the token ids [7, 3].",
        "without their titles",
        "this is their cosine",
    ):
        assert line in text
    fields = metadata(changed, "onnx")
    assert fields["model"]["experts"]["num_experts"] == 2
    assert fields["training"] == source.facts
    assert fields["embedding_dim"] == 24


@pytest.mark.parametrize(
    ("titles", "passage"),
    [
        (Titles.INCLUDE, '("Paris", "Paris lies on the Seine.")'),
        (Titles.JOIN, '"Paris Paris lies on the Seine."'),
        (Titles.OMIT, '"Paris lies on the Seine."'),
    ],
)
@pytest.mark.parametrize("format", [sentence_transformers, onnx, stablehlo])
def test_code_gives_the_tokenizer_passages_as_in_training(source, titles, passage, format):
    plain = dataclasses.replace(source, config=DualEncoderConfig(), titles=titles)
    text = card(plain, format.card_texts(plain))
    assert passage in text
    assert ("(title, text)" in text) == (titles is Titles.INCLUDE and format is not stablehlo)


def test_the_hub_reads_licence_library_base_model_and_measures(source):
    facts = {"pretrained": "someone/encoder"}
    given = dataclasses.replace(source, license="apache-2.0", facts=facts)
    data = ModelCard(card(given, TEXTS)).data
    assert (data.license, data.base_model) == ("apache-2.0", "someone/encoder")
    assert (data.library_name, data.pipeline_tag) == (TEXTS.library, "sentence-similarity")
    (result,) = data.eval_results
    assert (result.dataset_name, result.metric_type) == ("nq", "R@20")
    assert result.metric_value == 0.81234
    assert metadata(given, "onnx")["license"] == "apache-2.0"


def test_names_and_settings_stay_within_their_places(source):
    settings = 'SYSTEM = """\n```\n# Injected\n````\n"""'
    names = {"facts": {"pretrained": "x | y\n<script>"}, "metrics": {"a|b\n# c": 0.5}}
    text = card(dataclasses.replace(source, config_text=settings, **names), TEXTS)
    assert f"\n`````\n{settings}\n`````\n" in text
    assert "| pretrained | x \\| y &lt;script> |" in text
    assert "| a\\|b # c | 0.5000 |" in text


def test_no_folder_of_this_machine_is_in_either_file(source, tmp_path):
    kept = {"updates": r"layers_\d+/.*", "note": 'it\'s\n"quoted"', "steps": 32}
    paths = {"pretrained": "/home/someone/weights/minilm", "memories": {"a": ["/home/someone/b"]}}
    settings = """A = ["/data/me/", "gs://bucket/runs/x"]\nB = {'~/x/y': 'a/b and c'}  # 'it' /"""
    moved = dataclasses.replace(source, facts=kept | paths, config_text=settings)
    write_card(moved, tmp_path, TEXTS)
    written = json.loads((tmp_path / "export.json").read_text())["training"]
    assert written == kept | {"pretrained": "minilm", "memories": {"a": ["b"]}}
    text = (tmp_path / "README.md").read_text()
    assert """A = ["me", "x"]\nB = {'y': 'a/b and c'}  # 'it' /""" in text
    assert "someone" not in text
