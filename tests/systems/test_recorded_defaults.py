"""Stages that call commands record the defaults of these commands among their inputs."""

from __future__ import annotations

import inspect

import pytest

from taser_jax.commands.evaluate import evaluate
from taser_jax.commands.pipelines.stages import NO_INPUTS, stage_inputs
from taser_jax.commands.train import train
from taser_jax.systems.moma import stages as moma
from taser_jax.systems.moma.augment import augment, look_up
from taser_jax.systems.muf import stages as muf
from taser_jax.systems.muf.fuse import fuse_specialists


@pytest.mark.parametrize(
    ("stage", "commands"),
    [
        (moma._train, [train]),
        (look_up, [augment]),
        (muf._fuse_and_evaluate, [fuse_specialists, evaluate]),
    ],
)
def test_every_default_is_an_input(stage, commands, tmp_path):
    required = {
        name: None
        for name, parameter in inspect.signature(stage).parameters.items()
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD
    }
    recorded = {key.split(".")[0] for key in stage_inputs(stage, required, tmp_path)}
    for command in commands:
        defaults = {
            name
            for name, parameter in inspect.signature(command).parameters.items()
            if parameter.default is not inspect.Parameter.empty
            # A mapping is recorded by its entries.
            and parameter.default != {}
        }
        assert defaults - NO_INPUTS <= recorded
        assert defaults - NO_INPUTS
