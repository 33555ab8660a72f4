"""Every packaged Gin file resolves for its command."""

from __future__ import annotations

import dataclasses
import importlib

import pytest

from taser_jax import cli, configuration

RECIPES = {
    "train": (
        ("runs/taser_base.gin",),
        ("runs/dpr_base.gin",),
        ("runs/taser_base.gin", "models/bert_pretrained.gin"),
        ("runs/train.gin", "models/t5_base.gin", "optim/adamw.gin"),
        ("runs/train.gin", "models/t5_base.gin", "optim/adamw.gin", "models/t5_pretrained.gin"),
        ("runs/dpr_base.gin", "models/query_specific.gin"),
        ("runs/train.gin", "models/t5_base.gin", "optim/adamw.gin", "models/query_specific.gin"),
        *(
            ("runs/taser_base.gin", f"optim/{combiner}.gin", "runs/multitask.gin")
            for combiner in ("naive", "pcgrad", "cgd", "gradnorm", "tsage")
        ),
    ),
    "tokenize": (("runs/kilt_full_tokenize.gin",),),
    "prepare kilt": (("runs/kilt_mini_prepare.gin",), ("runs/kilt_full_prepare.gin",)),
    "prepare dpr": (("runs/odqa_prepare.gin",),),
    "evaluate": (("runs/entity_questions.gin",),),
    "pipeline taser": (
        ("runs/open_qa.gin",),
        ("runs/open_qa_pretrained.gin",),
        ("runs/open_qa_pretrained.gin", "runs/taser_claims.gin"),
        ("runs/odqa.gin",),
        ("runs/yardstick.gin",),
    ),
    "pipeline ance": (
        ("runs/kilt_mini_ance.gin",),
        ("runs/kilt_mini_ance.gin", "optim/tsage.gin", "runs/kilt_mini_tsage.gin"),
        ("runs/taco_dr_kilt.gin",),
        *(
            ("runs/kilt_mini_ance.gin", f"optim/{other}.gin")
            for other in ("pcgrad", "cgd", "gradnorm")
        ),
    ),
    "quickstart": (("runs/quickstart_pretrained.gin",),),
}
PAIRS = sorted(
    {(name, command.gin_files()) for name, command in cli.COMMANDS.items()}
    | {(name, files) for name, recipes in RECIPES.items() for files in recipes}
)


@pytest.mark.parametrize(("name", "gin_files"), PAIRS)
def test_it_resolves(name, gin_files):
    command = cli.COMMANDS[name]
    module = importlib.import_module(f"taser_jax.{command.module}")
    function = getattr(module, command.function)
    flags = configuration.GinFlags(files=gin_files)
    resolved = configuration.resolve(
        function,
        configurables=module.CONFIGURABLES,
        flags=flags,
        allow_unset=True,
        recipe_of=command.recipe_of,
    )
    # Pretrained weights bring their own sizes, and query towers are for BERT and T5 alike.
    overlaid = len(gin_files) > 1 and any(
        "pretrained" in file or "query_specific" in file for file in gin_files
    )
    assert not resolved.unused or overlaid, resolved.unused
    assert all(macro == macro.upper() for macro in resolved.unset)
    # What is required can be set by its macro, and then nothing is left open.
    bindings = tuple((macro, "something") for macro in resolved.unset)
    flags = dataclasses.replace(flags, bindings=bindings)
    again = configuration.resolve(function, configurables=module.CONFIGURABLES, flags=flags)
    assert again.unset == ()
