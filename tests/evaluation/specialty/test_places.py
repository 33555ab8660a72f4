import pytest
from test_specialty import count, draw

from taser_jax.evaluation.specialty.places import Place, by_layer, by_module, place_of


@pytest.mark.parametrize(
    ("path", "place", "kind"),
    [
        (
            "encoder/layers_10/attention/query/kernel",
            Place("encoder", 10, "attention"),
            "encoder/attention",
        ),
        (
            "query_encoder/decoder/layers_0/mlp/wi/kernel",
            Place("query_encoder/decoder", 0, "mlp"),
            "query_encoder/decoder/mlp",
        ),
        (
            "encoder/token_embedder/embedding",
            Place("encoder", None, "token_embedder"),
            "encoder/token_embedder",
        ),
        ("scale", Place("", None, "scale"), "scale"),
    ],
)
def test_paths_are_read(path, place, kind):
    assert place_of(path) == place
    assert place.kind == kind


def test_counts_are_added_up_and_layers_are_in_order():
    leaf = count(draw())["bias"]
    paths = [
        "tower/token_embedder/embedding",
        "tower/layers_10/mlp/wi/kernel",
        "tower/layers_2/mlp/wi/kernel",
        "tower/layers_2/mlp/wo/kernel",
    ]
    leaves = dict.fromkeys(paths, leaf)
    modules = {name: counts.size for name, counts in by_module(leaves).items()}
    assert modules == {"tower/token_embedder": 16, "tower/mlp": 48}
    layers = [(name, counts.size) for name, counts in by_layer(leaves).items()]
    assert layers == [("outside layers", 16), ("tower layer 2", 32), ("tower layer 10", 16)]
