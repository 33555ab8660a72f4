"""`taser export`: what it writes, and what it refuses before anything is computed or written."""

import contextlib
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_world import gin, refused, succeed
from tiny_models import tiny_bert
from tiny_training import draw_params
from written_files import contents, write

from taser_jax.assembly.model_directory import load_model, write_run_record
from taser_jax.commands import export
from taser_jax.data.text.preprocessors import encode_queries
from taser_jax.data.text.wordpiece import WordPieceVocabulary
from taser_jax.evaluation.results import SystemResult, TaskResult, write_result
from taser_jax.interop import onnx, stablehlo
from taser_jax.models.batch import Role
from taser_jax.models.bert_dual_encoder import DualEncoderConfig
from taser_jax.models.dual_encoder import DualEncoder
from taser_jax.models.parameters import parameter_count
from taser_jax.storage import checksums
from taser_jax.training.checkpoints import Checkpoints
from taser_jax.training.state import TrainState

_WORDS = "on which river lies paris it the seine . no title"
PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *_WORDS.split(" ")]
FACTS = {
    "pretrained": "/home/someone/weights",
    "query_length": 8,
    "passage_length": 12,
    "collection": "rivers",
    "data_fingerprint": "ab",
}
FORMATS = ("sentence_transformers", "saved_model", "stablehlo")


def make_model(model_dir, *, facts=FACTS):
    """What `taser train` leaves, at step 0."""
    config = DualEncoderConfig(bert=tiny_bert(vocab_size=len(PIECES), num_layers=1))
    params = draw_params(DualEncoder(config), jax.random.key(0))
    checkpoints = Checkpoints(model_dir)
    checkpoints.save(TrainState(jnp.zeros((), jnp.int32), params, ()), step=0, about={})
    checkpoints.close()
    WordPieceVocabulary(PIECES).save(str(model_dir.parent / "vocabulary"))
    write_run_record(
        model_dir,
        model_config=config,
        facts=facts,
        parameter_table="",
        config_text="MODEL_DIR = '/home/someone/model'\nTRAIN_STEPS = 0\n",
        vocabulary=model_dir.parent / "vocabulary",
    )


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("export") / "model"
    make_model(directory)
    return directory


@pytest.fixture
def nothing_is_read(monkeypatch):
    monkeypatch.setattr(export, "load_model", lambda *_, **__: pytest.fail("the model was read"))


def arguments(model_dir, output_dir, formats=FORMATS, **more):
    what = gin("export_model", formats=list(formats), **more)
    return ["export", *gin(MODEL_DIR=model_dir, EXPORT_DIR=output_dir), *what]


@pytest.fixture(scope="module")
def exported(model_dir):
    output_dir = model_dir.parent / "out"
    for system, value in (("DPR", 0.5), ("TASER", 0.75)):
        row = SystemResult(system=system, tasks={"rivers": TaskResult({"R@1": value}, 3)})
        write_result(model_dir.parent / "results", row)
    more = {"results_dir": model_dir.parent, "system": "TASER"}
    succeed(*arguments(model_dir, output_dir, **more))
    return output_dir


def test_every_format_has_a_directory_a_card_and_facts(exported, model_dir):
    assert checksums.verify(directory=str(exported)) > 0
    # Its vocabulary is a copy, whose record is not that of the source.
    assert (model_dir.parent / "vocabulary" / "checksums.txt").exists()
    assert checksums.verify(directory=str(model_dir)) > 0
    assert sorted(path.name for path in exported.iterdir()) == sorted(FORMATS)
    model = load_model(model_dir)
    for format in FORMATS:
        facts = json.loads((exported / format / "export.json").read_text(encoding="utf-8"))
        assert (facts["format_version"], facts["format"]) == (1, format)
        vocabulary = WordPieceVocabulary(PIECES).fingerprint
        expected = {"model": model.fingerprint, "vocabulary": vocabulary, "data": "ab"}
        assert facts["fingerprints"] == expected
        assert (facts["query_length"], facts["passage_length"]) == (8, 12)
        assert facts["metrics"] == {"rivers R@1": 0.75}
        assert facts["parameters"] == parameter_count(model.params)
        card = (exported / format / "README.md").read_text(encoding="utf-8")
        assert "| rivers R@1 | 0.7500 |" in card
        assert "TRAIN_STEPS = 0" in card
        for name, content in contents(exported / format).items():
            assert b"/home/someone" not in content, name
            assert bytes(model_dir.parent) not in content, name


def test_code_of_the_card_runs(exported, model_dir):
    """That of the other formats is run in tests/interop."""
    card = (exported / "saved_model" / "README.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```$", card, re.MULTILINE | re.DOTALL)
    names: dict = {}
    with contextlib.chdir(exported / "saved_model"):
        exec(code, names)
    tokens = encode_queries(["on which river lies Paris"], WordPieceVocabulary(PIECES), length=8)
    expected = load_model(model_dir).encode_fn(Role.QUERY)(tokens)
    np.testing.assert_allclose(names["query_embeddings"], expected, atol=1e-5)
    assert names["scores"].shape == (1, 2)


def test_a_directory_that_is_not_empty_is_refused(capsys, tmp_path, model_dir, nothing_is_read):
    write(tmp_path / "out" / "stablehlo" / "mine.txt", "precious")
    message = refused(capsys, *arguments(model_dir, tmp_path / "out"))
    assert "stablehlo: there is something here already" in message
    assert [path.name for path in (tmp_path / "out").rglob("*")] == ["stablehlo", "mine.txt"]


def test_the_same_export_again_is_left_as_it_is(capsys, exported, model_dir):
    def state():
        return {str(path): path.stat().st_mtime_ns for path in exported.rglob("*")}

    before = state()
    more = {"results_dir": model_dir.parent, "system": "TASER"}
    succeed(*arguments(model_dir, exported, **more))
    message = refused(capsys, *arguments(model_dir, exported, **more | {"system": "DPR"}))
    assert "there is something here already" in message
    assert state() == before


def test_absent_packages_are_named_with_their_extra(
    capsys, tmp_path, model_dir, nothing_is_read, monkeypatch
):
    monkeypatch.setattr(onnx, "_PACKAGES", ("onnx_that_is_not_there",))
    message = refused(capsys, *arguments(model_dir, tmp_path / "out", ["stablehlo", "onnx"]))
    assert "onnx_that_is_not_there" in message
    assert "[onnx]'" in message
    assert not (tmp_path / "out").exists()


def without_vocabulary(directory):
    for path in (directory / "vocabulary").iterdir():
        path.unlink()


def with_a_larger_vocabulary(directory):
    WordPieceVocabulary([*PIECES, "more"]).save(directory / "vocabulary")


def with_learned_routing(directory):
    change_config(directory, experts={"num_experts": 2, "blocks": [1], "routing": "sequence"})


def that_reads_documents(directory):
    change_config(directory, kind="bert_fusion", query_tasks=[], towers="separate", experts=None)


def change_config(directory, **changes):
    config = json.loads((directory / "model.json").read_text()) | changes
    config = {name: value for name, value in config.items() if value is not None}
    (directory / "model.json").write_text(json.dumps(config))
    (directory / "checksums.txt").unlink(missing_ok=True)


PLAIN_LAST = {"formats": ["stablehlo", "sentence_transformers"]}
DOCUMENTS = (FACTS, that_reads_documents, "an export has no memory")


@pytest.mark.parametrize(
    ("facts", "change", "told", "settings"),
    [
        (FACTS, without_vocabulary, r"vocab\.txt: cannot be read", {}),
        (FACTS, with_a_larger_vocabulary, f"has {len(PIECES) + 1} ids.*most {len(PIECES)}", {}),
        ({"query_length": 8}, None, "passage_length is not known.*export_model.passage_length", {}),
        (FACTS, None, "passage_length is 13.*4 to 12", {"passage_length": 13}),
        # Before the formats that could.
        (FACTS, with_learned_routing, "'sequence' routing.*saved_model or stablehlo", PLAIN_LAST),
        # An export has no memory, so that its queries would come without documents.
        *((*DOCUMENTS, {"formats": [format]}) for format in (*FORMATS, "onnx")),
    ],
)
def test_what_a_model_lacks_is_told(
    capsys, tmp_path, nothing_is_read, facts, change, told, settings
):
    make_model(tmp_path / "model", facts=facts)
    if change is not None:
        change(tmp_path / "model")
    message = refused(capsys, *arguments(tmp_path / "model", tmp_path / "out", **settings))
    assert re.search(told, message, re.DOTALL), message
    assert not (tmp_path / "out").exists()


def test_texts_are_as_in_the_training_of_the_task(capsys, tmp_path):
    by_task = {
        "query_normalization": {"nq": "curly_apostrophe", "fever": "none"},
        "query_prompt": {"nq": [6], "fever": []},
        "query_lengths": {"nq": 7, "fever": 8},
        "titles": "omit",
    }
    make_model(tmp_path / "model", facts={**FACTS, **by_task})
    message = refused(capsys, *arguments(tmp_path / "model", tmp_path / "out"))
    assert "differs among the tasks, and the task is None" in message
    assert "--gin.export_model.task='nq'" in message
    given = {"task": "'nq'", "passage_length": 10}
    succeed(*arguments(tmp_path / "model", tmp_path / "out", ["stablehlo"], **given))
    directory = tmp_path / "out" / "stablehlo"
    facts = json.loads((directory / "export.json").read_text())
    assert facts["passage_length"] == 10
    assert (facts["query_normalization"], facts["query_prompt"]) == ("curly_apostrophe", [6])
    assert (facts["query_length"], facts["titles"]) == (7, "omit")
    assert "’ is replaced by '" in (directory / "README.md").read_text(encoding="utf-8")


def test_one_of_several_systems_must_be_named(capsys, tmp_path, exported, model_dir):
    given = arguments(model_dir, tmp_path / "out", results_dir=model_dir.parent)
    assert "results of 2 systems, 'DPR', 'TASER'" in refused(capsys, *given)


def test_an_export_that_fails_leaves_nothing(tmp_path, model_dir, monkeypatch):
    def fail(source, directory):
        (directory / "half").write_text("written")
        raise RuntimeError("the exporter failed")

    monkeypatch.setattr(stablehlo, "export_stablehlo", fail)
    with pytest.raises(RuntimeError, match="the exporter failed"):
        export.export_model(
            model_dir=str(model_dir), output_dir=str(tmp_path / "out"), formats=["stablehlo"]
        )
    assert list((tmp_path / "out").glob("*")) == []
