import dataclasses
import functools
import re
import subprocess
import sys
import types

import jax
import numpy as np
import pytest
import tokenizers
from jax import export
from tiny_models import tiny_tokens
from tiny_source import PIECES, QUERY_LENGTH, embed, embed_queries, exported, t5_source, tiny_source

from taser_jax.data.text.preprocessors import passage_ids
from taser_jax.data.text.vocabularies import load_vocabulary
from taser_jax.data.token_store.store import QuerySettings
from taser_jax.interop.stablehlo import LOAD_SNIPPET, PARAMETERS_FILE, card_texts, export_stablehlo
from taser_jax.models.batch import Role
from taser_jax.models.bert_dual_encoder import Pooling
from taser_jax.models.bert_layers import AttentionKernel
from taser_jax.models.dual_encoder import Towers
from taser_jax.models.routing import GateSharing, Routing
from taser_jax.models.stack import Remat

pytestmark = pytest.mark.slow

TOKEN_ROUTING = {"num_experts": 2, "routing": Routing.TOKEN, "gate_sharing": GateSharing.SHARED}
MODELS = {
    "tok_r": functools.partial(tiny_source, experts=TOKEN_ROUTING, pooling=Pooling.MEAN),
    # QSpec: a query encoder a task, as TACO-DR embeds.
    "t5": functools.partial(t5_source, towers=Towers.SEPARATE, query_tasks=("nq", "fever")),
}


def run_snippet(directory, role, ids, mask):
    """What the snippet of the model card defines: `params`, `embeddings`, ..."""
    names = {"directory": directory, "ids": ids, "mask": mask}
    exec(LOAD_SNIPPET.replace("encode_query", f"encode_{role.value}"), names)
    return types.SimpleNamespace(**names)


@pytest.mark.parametrize("name", MODELS)
def test_embeddings_equal_ours_at_every_size(tmp_path, name):
    source = MODELS[name](tmp_path)
    directory = exported(export_stablehlo, source, tmp_path)
    tolerance = {"atol": 1e-5} if name == "t5" else {"rtol": 1e-6, "atol": 2e-6}
    for role in Role:
        tokens = tiny_tokens(5, source.length(role))
        expected = embed(source, role, tokens)
        # The last text has one token; T5's programs pad what is shorter than training's lengths.
        for rows, length in ((slice(5), None), (slice(1), None), (slice(4, 5), 3)):
            ids, mask = (array[rows, :length] for array in (tokens.ids, tokens.mask))
            embeddings = run_snippet(directory, role, ids, mask).embeddings
            np.testing.assert_allclose(embeddings, expected[rows], **tolerance)
        too_long = np.zeros((2, 1 + (source.config.max_length or source.length(role))), np.int32)
        with pytest.raises(ValueError, match="refining shapes"):
            run_snippet(directory, role, too_long, too_long == 0)
    ids, mask = tokens.ids[:1, :QUERY_LENGTH], tokens.mask[:1, :QUERY_LENGTH]
    both = [run_snippet(directory, role, ids, mask).embeddings for role in Role]
    # Learned routing and one tower treat both roles alike; experts by role and towers do not.
    assert np.allclose(*both, atol=1e-6) == (name == "tok_r")


def test_bfloat16_activations_stay(tmp_path):
    source = tiny_source(tmp_path, bert={"dtype": "bfloat16"})
    directory, tokens = exported(export_stablehlo, source, tmp_path), tiny_tokens(5, QUERY_LENGTH)
    embeddings = run_snippet(directory, Role.QUERY, tokens.ids, tokens.mask).embeddings
    exact = tiny_source(tmp_path)
    np.testing.assert_allclose(embeddings, embed(source, Role.QUERY, tokens), atol=0.1)
    assert np.abs(np.asarray(embeddings) - embed(exact, Role.QUERY, tokens)).max() > 1e-4
    assert embeddings.dtype == np.float32


def test_programs_are_of_three_platforms_and_without_weights(tmp_path):
    """These lie there once, and come back bit for bit.

    Exported with a kernel that no CPU has, as models trained on GPUs come.
    """
    bert = {"attention": AttentionKernel.CUDNN, "remat": Remat.BLOCK}
    source, on_gpu = tiny_source(tmp_path), tiny_source(tmp_path, bert=bert)
    directory = exported(export_stablehlo, on_gpu, tmp_path)
    tokens = tiny_tokens(2, QUERY_LENGTH)
    params = run_snippet(directory, Role.QUERY, tokens.ids, tokens.mask).params
    jax.tree.map(np.testing.assert_array_equal, params, source.params)
    assert load_vocabulary(directory / "vocabulary").fingerprint == source.vocabulary.fingerprint
    for role in Role:
        data = (directory / f"encode_{role.value}.stablehlo").read_bytes()
        program = export.deserialize(bytearray(data))
        assert program.platforms == ("cpu", "cuda", "tpu")
        (embeddings,) = program.out_avals
        assert (embeddings.shape[1:], str(embeddings.dtype)) == ((16,), "float32")
        assert b".py" not in data, "paths of this machine"
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(source.params))
    assert (directory / PARAMETERS_FILE).stat().st_size < 1.5 * size


def test_the_code_of_the_card_runs_without_taser_jax(tmp_path):
    """From texts to embeddings, with prompts; passages have their own tokenizer."""
    prompt = (PIECES.index("the"), PIECES.index("[SEP]"))
    settings = {"query_settings": QuerySettings(prompt=prompt), "passage_prompt": prompt[:1]}
    source = dataclasses.replace(tiny_source(tmp_path), **settings)
    directory = exported(export_stablehlo, source, tmp_path)
    texts = ["paris is a", "[SEP] " + "the city in france un " * 9, "CITY?"]
    code = card_texts(source).code.replace('directory = "."', f"directory = {str(directory)!r}")
    program = (
        re.sub(r"^texts = .*$", f"texts = {texts!r}", code, flags=re.M)
        + "import sys\n"
        + "np.save(sys.argv[1], embeddings)\n"
        + "foreign = ('taser_jax', 'flax', 'tensorflow')\n"
        + "assert not [name for name in sys.modules if name.partition('.')[0] in foreign]\n"
    )
    subprocess.run([sys.executable, "-c", program, tmp_path / "embeddings.npy"], check=True)
    embeddings = np.load(tmp_path / "embeddings.npy")
    np.testing.assert_allclose(embeddings, embed_queries(source, texts), atol=2e-6)
    vocabulary, file = source.vocabulary, directory / "passage_tokenizer" / "tokenizer.json"
    passages = passage_ids(texts[:1], texts[2:], vocabulary, 20, prompt=source.passage_prompt)
    assert [tokenizers.Tokenizer.from_file(str(file)).encode(texts[0], texts[2]).ids] == passages
