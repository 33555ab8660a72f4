"""`taser plan`: tables, what is kept of them, and recipes that fit nowhere."""

import json
import pathlib
import runpy
import types

import pytest
from test_compile_command import SMALL

from taser_jax.cli import main as cli
from taser_jax.commands import compile as plan
from taser_jax.devices.mesh import PRICES, MeshConfig
from taser_jax.storage.errors import ConfigError


def run(directory, *arguments: str) -> int:
    return cli.run(["plan", *SMALL, f"--gin.plan_recipe.output_dir={directory}", *arguments])


def report(*, fits: bool = True, seconds: float = 0.25, peak: int = 3) -> dict:
    roofline = {"bound": "ICI", "step_seconds": seconds, "mfu": 0.5, "mfu_of_real_tokens": 0.4}
    return {"fits": fits, "memory": {"peak": peak * 2**30}, "roofline": roofline}


@pytest.fixture
def compiler(monkeypatch):
    """A compiler that answers from a list; the last answer for ever."""
    asked, answers = [], [report()]

    def compile_recipe(*, training, output_dir, **given):
        asked.append((training.mesh.fsdp, training.mesh.model))
        answer = answers[min(len(asked), len(answers)) - 1]
        pathlib.Path(output_dir).mkdir(parents=True)
        pathlib.Path(output_dir, plan.REPORT_JSON).write_text(json.dumps(answer))
        if not answer["fits"]:
            raise ConfigError("does not fit")

    monkeypatch.setattr(plan, "compile_recipe", compile_recipe)
    return asked, answers


def test_the_compiler_decides_among_three_meshes_and_is_asked_once(tmp_path, capsys, compiler):
    asked, answers = compiler
    answers[:] = [report(fits=False), report(seconds=0.125), report(seconds=0.25)]
    assert run(tmp_path, "--topology=v5e:2x2") == 0
    first = capsys.readouterr().out
    # The recipe's own, parameters split over all devices, products split over two.
    assert asked == [(1, 1), (4, 1), (1, 2)]
    assert first.startswith("v5e:2x2\n\n| mesh (data, fsdp, model) |")
    rows = first.splitlines()[4:7]
    assert rows[0] == "| 1, 4, 1 | 3.00 | ICI | 125.00 | 50% | 40% | 0.17 |"
    assert rows[1].startswith("| 2, 1, 2 | 3.00 | ICI | 250.00 |")
    assert rows[2].startswith("| 4, 1, 1 | 3.00 | does not fit |")
    assert "\nMESH_FSDP = 4\nNUM_MODEL_PARTITIONS = 1\n" in first
    assert run(tmp_path, "--topology=v5e:2x2") == 0
    assert capsys.readouterr().out == first
    assert len(asked) == 3
    # Another recipe is another row.
    assert run(tmp_path, "--topology=v5e:2x2", "--gin.BATCH_SIZE=32") == 0
    assert len(asked) == 6


@pytest.mark.parametrize(
    ("own", "devices", "heads", "meshes"),
    [
        # One device has one mesh, and three heads cannot be split over two.
        ((1, 1), 1, 12, [(1, 1)]),
        ((1, 1), 4, 3, [(1, 1), (4, 1)]),
        # The batch has as many parts as in the recipe, or fewer.
        ((2, 2), 8, 12, [(2, 2), (1, 2), (4, 2)]),
        # Meshes of a larger topology.
        ((8, 1), 4, 12, [(1, 1), (4, 1), (1, 2)]),
        ((1, 8), 4, 16, [(1, 1), (4, 1), (1, 2)]),
    ],
)
def test_meshes_divide_devices_and_heads(own, devices, heads, meshes):
    topology = types.SimpleNamespace(devices=[None] * devices)
    configs = plan._meshes(MeshConfig(fsdp=own[0], model=own[1]), topology, num_heads=heads)
    assert [(mesh.fsdp, mesh.model) for mesh in configs] == meshes


@pytest.mark.parametrize(("other", "fsdp"), [(0.192, 4), (0.188, 1)])
def test_the_recipes_own_mesh_stays_unless_another_is_faster_by_5_percent(
    tmp_path, capsys, compiler, other, fsdp
):
    asked, answers = compiler
    answers[:] = [report(seconds=0.2), report(seconds=other), report(seconds=0.3)]
    assert run(tmp_path, "--topology=v5e:2x2", "--gin.MESH_FSDP=4") == 0
    assert asked == [(4, 1), (1, 1), (1, 2)]
    assert f"MESH_FSDP = {fsdp}\n" in capsys.readouterr().out


def test_prices_are_those_of_the_launchers():
    launch = pathlib.Path(__file__).parents[2] / "launch"
    tables = runpy.run_path(str(launch / "_tables.py"))
    names = {"v5litepod": "v5e"}
    listed = {names.get(name, name): kind.price for name, kind in tables["KINDS"].items()}
    assert {name: price for name, price in listed.items() if price} == PRICES


def test_a_recipe_that_fits_nowhere_is_told_what_comes_nearest(tmp_path, capsys, compiler):
    compiler[1][:] = [report(fits=False, peak=peak) for peak in (9, 5, 7)]
    assert run(tmp_path, "--topology=v5e:2x2") == 2
    error = capsys.readouterr().err
    assert "v5e:2x2: nothing fits" in error
    assert "MESH_FSDP = 4, NUM_MODEL_PARTITIONS = 1, with 5.00 GiB per device on v5e:2x2" in error
    assert "BertConfig.remat=block" in error
