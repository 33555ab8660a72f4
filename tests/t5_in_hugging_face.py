"""A T5's parameters as Hugging Face has them: what its models load."""

from taser_jax.interop.t5 import t5_leaves
from taser_jax.interop.tensors import params_to_tensors


def t5_to_tensors(params, config):
    """Tensors by Hugging Face's names."""
    return params_to_tensors(params, t5_leaves(config))
