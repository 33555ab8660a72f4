"""`taser plan`: tables, what is kept of them, and recipes that fit nowhere."""

from __future__ import annotations

import json
import pathlib
import runpy

import pytest

from taser_jax.cli import main as cli
from taser_jax.commands import plan
from taser_jax.devices.topologies import PRICES
from taser_jax.storage.errors import ConfigError

SMALL = (
    *("--gin_file=runs/taser_base.gin", "--gin.BertConfig.num_layers=2"),
    *("--gin.ExpertConfig.shared_per_specialized=1", "--gin.BertConfig.embed_dim=128"),
    *("--gin.BertConfig.num_heads=2", "--gin.BertConfig.mlp_dim=256"),
    *("--gin.BertConfig.vocab_size=512", "--gin.BATCH_SIZE=16"),
    "--gin.TASK_FEATURE_LENGTHS={'query': 32, 'passage': 64}",
)


def run(directory, *arguments: str) -> int:
    return cli.run(["plan", *SMALL, f"--gin.plan_recipe.output_dir={directory}", *arguments])


def report(*, fits: bool = True, seconds: float = 0.25) -> list[dict]:
    roofline = {"bound": "ICI", "step_seconds": seconds, "mfu": 0.5, "mfu_of_real_tokens": 0.4}
    return [{"fits": fits, "memory": {"peak": 3 * 2**30}, "roofline": roofline}]


@pytest.fixture
def compiler(monkeypatch):
    """A compiler that answers from a list; the last answer for ever."""
    asked, answers = [], [report()]

    def compile_recipe(*, training, output_dir, **given):
        asked.append((training.mesh.fsdp, training.mesh.model, training.num_chunks))
        found = answers[min(len(asked), len(answers)) - 1]
        if isinstance(found, BaseException):
            raise found
        with open(f"{output_dir}/{plan.REPORT_JSON}", "w") as file:
            json.dump(found, file)
        if not found[0]["fits"]:
            raise ConfigError("does not fit")

    monkeypatch.setattr(plan, "compile_recipe", compile_recipe)
    return asked, answers


def test_formulas_alone(tmp_path, capsys, compiler):
    options = ("--topology=v5e:2x2", "--gin.plan_recipe.num_compiled=0")
    assert run(tmp_path, *options) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("v5e:2x2\n\n| mesh (data, fsdp, model) |")
    assert "| 4, 1, 1 | none | 1 | formula |" in shown
    assert "\nNUM_MODEL_PARTITIONS = 1\nTrainingConfig.num_chunks = 1\n" in shown
    assert compiler[0] == []


def test_the_compiler_decides_among_the_best_and_is_asked_once(tmp_path, capsys, compiler):
    asked, answers = compiler
    # What formulas like best does not fit.
    answers[:] = [report(fits=False), report(seconds=0.125)]
    assert run(tmp_path, "--topology=v5e:2x2") == 0
    first = capsys.readouterr().out
    assert len(asked) == 2
    rows = [line for line in first.splitlines() if "compiler" in line]
    assert "| ICI | 125.00 | 50% | 40% |" in rows[0]
    assert "| does not fit |" in rows[1]
    fsdp = asked[1][0]
    assert f"MESH_FSDP = {fsdp}\n" in first
    assert run(tmp_path, "--topology=v5e:2x2") == 0
    assert capsys.readouterr().out == first
    assert len(asked) == 2
    # Another recipe is another row.
    assert run(tmp_path, "--topology=v5e:2x2", "--gin.BATCH_SIZE=32") == 0
    assert len(asked) == 4


def test_a_start_that_was_interrupted_is_made_again_and_one_that_died_is_not(
    tmp_path, capsys, compiler
):
    asked, answers = compiler
    answers[:] = [KeyboardInterrupt(), report()]
    assert run(tmp_path, "--topology=v5e:2x2") == 130
    assert run(tmp_path, "--topology=v5e:2x2") == 0
    assert len(asked) == 3
    # As the compiler leaves it that takes the process with it.
    for folder in tmp_path.iterdir():
        (folder / plan.REPORT_JSON).rename(folder / "started")
    capsys.readouterr()
    assert run(tmp_path, "--topology=v5e:2x2") == 0
    assert capsys.readouterr().err.count("delete it to try again") == 2
    assert len(asked) == 3


def test_chips_are_compared(tmp_path, capsys, compiler):
    compiler[1][:] = [report(seconds=0.4), report(seconds=0.5), report(seconds=0.1)]
    assert run(tmp_path, "--topologies=v5e:2x2,v5e:2x4") == 0
    shown = capsys.readouterr().out
    # 4 chips for 0.4 s and 8 chips for 0.1 s, 1,000 times.
    table = shown.splitlines()[-4:]
    assert table[2:] == [
        "| v5e:2x4 | 8 | 100.00 | 0.22 | 0.27 | ICI |",
        "| v5e:2x2 | 4 | 400.00 | 0.44 | 0.53 | ICI |",
    ]


@pytest.mark.parametrize(("other", "fsdp"), [(0.192, 4), (0.188, 2)])
def test_the_recipes_own_mesh_stays_unless_another_is_faster_by_5_percent(
    tmp_path, capsys, compiler, other, fsdp
):
    asked, answers = compiler
    answers[:] = [report(seconds=0.2), report(seconds=other)]
    own = ("--gin.MESH_FSDP=4", "--gin.NUM_MODEL_PARTITIONS=1")
    assert run(tmp_path, "--topology=v5e:2x2", *own) == 0
    assert [each[:2] for each in asked] == [(4, 1), (2, 1)]
    assert f"MESH_FSDP = {fsdp}\n" in capsys.readouterr().out


def test_prices_are_those_of_the_launchers():
    launch = pathlib.Path(__file__).parents[2] / "launch"
    tables = runpy.run_path(str(launch / "_tables.py"))
    names = {"v5litepod": "v5e"}
    listed = {names.get(name, name): kind.price for name, kind in tables["KINDS"].items()}
    assert {name: price for name, price in listed.items() if price} == PRICES


def test_a_recipe_that_fits_nowhere_is_told_what_comes_nearest(tmp_path, capsys, compiler):
    wide = ("--gin.BertConfig.mlp_dim=8000000", "--gin.BertConfig.embed_dim=1024")
    assert run(tmp_path, "--topology=v5e:1x1", *wide) == 2
    error = capsys.readouterr().err
    assert "v5e:1x1: nothing fits" in error
    assert "nearest is MESH_FSDP = 1, NUM_MODEL_PARTITIONS = 1" in error
    assert "GiB per device on v5e:1x1 by formula" in error
    assert compiler[0] == []


def test_a_topology_that_does_not_exist(tmp_path, capsys):
    assert run(tmp_path, "--topologies=v5e:2x4,v5e:3x5x7") == 2
    assert "no topology 'v5e:3x5x7'" in capsys.readouterr().err
