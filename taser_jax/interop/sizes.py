"""Compares a checkpoint's sizes with a model's and reports differences with both numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from taser_jax.storage.errors import ConfigError


def check_sizes(
    checkpoint: object,
    model: object,
    *,
    names: Sequence[str],
    where: str,
    fix: str,
    fixes: Mapping[str, str],
) -> None:
    """Refuses weights whose sizes differ from the model's.

    Example:
        "the checkpoint has mlp_dim 24, num_layers 4; expected: mlp_dim 48, num_layers 2, as the
        model is configured"

    Args:
        checkpoint: configuration of the checkpoint.
        model: configuration of the model, of the same type.
        names: fields that must be equal.
        where: the checkpoint.
        fix: advice for all cases.
        fixes: field -> additional advice if that field differs.

    Raises:
        ConfigError: naming every field that differs.
    """
    differing = [name for name in names if getattr(checkpoint, name) != getattr(model, name)]
    if differing:
        raise ConfigError(
            f"the checkpoint has {size_words(checkpoint, differing)}",
            where=where,
            expected=f"{size_words(model, differing)}, as the model is configured",
            fix="; ".join([fix, *(fixes[name] for name in differing if name in fixes)]),
        )


def size_words(config: object, names: Sequence[str]) -> str:
    """Fields of a configuration in words, such as "mlp_dim 24, num_layers 4"."""
    values = {name: getattr(config, name) for name in names}
    return ", ".join(f"{name} {getattr(v, 'value', v)}" for name, v in values.items())
