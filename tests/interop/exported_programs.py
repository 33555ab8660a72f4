"""What others read of an export: the model card's snippet, and TensorFlow's own reader."""

import types

import tensorflow as tf
from flax.traverse_util import unflatten_dict

from taser_jax.interop.stablehlo import LOAD_SNIPPET


def run_snippet(directory, role, ids, mask):
    """What the snippet of the model card defines: `params`, `embeddings`, ..."""
    names = {"directory": directory, "ids": ids, "mask": mask}
    exec(LOAD_SNIPPET.replace("encode_query", f"encode_{role.value}"), names)
    return types.SimpleNamespace(**names)


def saved_model_params(directory):
    """The variables below `params` of a SavedModel, as nested dicts of arrays."""
    prefix, suffix = "params/", "/.ATTRIBUTES/VARIABLE_VALUE"
    reader = tf.train.load_checkpoint(str(directory / "variables" / "variables"))
    names = [n for n in reader.get_variable_to_shape_map() if n.startswith(prefix)]
    variables = {n.removeprefix(prefix).removesuffix(suffix): reader.get_tensor(n) for n in names}
    return unflatten_dict(variables, sep="/")
