"""`taser compile` and `taser plan` on a small recipe; libtpu, the TPU compiler, must load here."""

import dataclasses
import json
import pathlib
import runpy
import types

import pytest
from small_world import gin

from taser_jax.cli import main as cli
from taser_jax.commands import compile as compile_module
from taser_jax.devices.compiler import CompiledStep, Memory, OutOfMemory
from taser_jax.devices.mesh import PRICES, MeshConfig
from taser_jax.models.batch import abstract_batch
from taser_jax.models.bert import BertConfig
from taser_jax.models.bert_dual_encoder import DualEncoderConfig
from taser_jax.storage.errors import ConfigError

SMALL = (
    "--gin_file=runs/taser_base.gin",
    *gin("BertConfig", num_layers=1, embed_dim=128, num_heads=2, mlp_dim=256, vocab_size=512),
    *gin("BertConfig", dropout_rate=0.0, attention_dropout_rate=0.0),
    *gin("ExpertConfig", shared_per_specialized=0),
    *gin(BATCH_SIZE=16, TASK_FEATURE_LENGTHS={"query": 32, "passage": 64}, TEXT_LENGTHS=None),
    *gin("TrainingConfig", length_buckets=()),
)
BERT = BertConfig(vocab_size=512, embed_dim=128, num_layers=1, num_heads=2, mlp_dim=256)


def run(*arguments: str) -> int:
    return cli.run(["compile", *SMALL, *arguments])


@pytest.mark.slow
def test_a_small_recipe(tmp_path, capsys):
    directory = tmp_path / "report"
    where = gin("compile_recipe", output_dir=directory)
    assert run("--topology=v5e:2x2", "--gin.MESH_FSDP=2", *where) == 0
    shown = capsys.readouterr().out
    assert shown.strip() == (directory / "report.txt").read_text().strip()
    training = json.loads((directory / "report.json").read_text())
    assert training["mesh"] == {"replica": 1, "data": 2, "fsdp": 2, "model": 1}
    assert 0 < training["memory"]["peak"] < training["memory"]["hbm"] == 16 * 2**30

    # What is traced is what the formulas say, on each of four devices.
    batch = abstract_batch((16, 32), (32, 64))
    flops = training["flops"]
    assert flops["model"] == DualEncoderConfig(bert=BERT).training_flops(batch) / 4
    assert flops["matrix_products"] == flops["model"]
    assert flops["model"] == pytest.approx(flops["compiler"], rel=0.5)

    # Parameters that are split are gathered, their gradients reduced; the state is donated.
    kinds = {each["kind"] for each in training["collectives"]}
    assert "all-gather" in kinds
    assert kinds & {"all-reduce", "reduce-scatter"}
    memory = training["memory"]
    assert 0.9 * memory["outputs"] < memory["aliased"] <= memory["outputs"]

    # The loss alone multiplies in float32.
    assert "3 float32 matrix products" in shown


def texts_of(lengths: object) -> list[str]:
    return ["--topology=v5e:2x2", f"--gin.TEXT_LENGTHS={lengths}"]


QUERY = {"query": {0: 8, 1: 27}}
TOO_FAR = {"query": {0: 8, 2: 27}, "passage": {0: 16, 1: 64}}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--topology=v5e:7x9"], "v5e:1x1, v5e:2x2, v5e:2x4"),
        ([], "--gin.compile_recipe.topology=..."),
        (["--topology=v5e:2x4", "--gin.TrainingConfig.num_chunks=4"], "16 rows in 4 chunks on 8"),
        (["--topology=v5e:2x2", "--gin.TASK_FEATURE_LENGTHS=None"], "no lengths of queries"),
        (["--topology=v5e:2x2", "--gin_file=optim/tsage.gin"], "set compile_recipe.task_sizes"),
        (texts_of(QUERY), "TEXT_LENGTHS: lengths of query"),
        (texts_of(TOO_FAR), "TEXT_LENGTHS: quantiles of query: 0, 2"),
        (texts_of({**QUERY, "passage": {}}), "TEXT_LENGTHS: quantiles of passage: none"),
    ],
)
def test_what_cannot_be_compiled_is_reported_first(arguments, words, capsys, monkeypatch):
    monkeypatch.setattr(compile_module, "compile_step", lambda *_, **__: pytest.fail("compiled"))
    assert run(*arguments) == 2
    printed = capsys.readouterr().err
    assert words in printed
    # Lengths are told with how they are written.
    assert ("TEXT_LENGTHS: " in printed) == ('fix: write --gin.TEXT_LENGTHS="{' in printed)


SMALL_MEMORY = Memory(arguments=1, outputs=1, aliased=0, temporaries=0, program=0)
LARGE_MEMORY = dataclasses.replace(SMALL_MEMORY, arguments=2**34)


@pytest.fixture
def compiler(monkeypatch, tmp_path):
    """In place of the compiler: its answer, the batches it is given, and the command's report."""
    stand_in = types.SimpleNamespace(answer=SMALL_MEMORY, batches=[])

    def compile_step(step, *arguments, mesh, effort):
        stand_in.batches.append(arguments[1])
        if isinstance(stand_in.answer, Exception):
            raise stand_in.answer
        return CompiledStep(stand_in.answer, 1.0, 1.0, (), ())

    monkeypatch.setattr(compile_module, "compile_step", compile_step)
    stand_in.report = lambda: json.loads((tmp_path / "report.json").read_text())
    return stand_in


def on_four_chips(tmp_path, *arguments: str, small: tuple[str, ...] = SMALL) -> int:
    where = ("--topology=v5e:2x2", f"--gin.compile_recipe.output_dir={tmp_path}")
    return cli.run(["compile", *small, *where, *arguments])


CHUNKED = ["--gin.TrainingConfig.num_chunks=2", "--gin.BertConfig.remat=block"]


@pytest.mark.parametrize(
    ("arguments", "words", "absent"),
    [
        ([], ["num_chunks=2", "BertConfig.remat=block"], "num_chunks=4"),
        (CHUNKED, ["num_chunks=4"], "remat="),
    ],
)
def test_a_recipe_that_does_not_fit_says_what_would(
    arguments, words, absent, tmp_path, capsys, compiler
):
    compiler.answer = OutOfMemory(needed=40 * 2**30, available=15 * 2**30)
    assert on_four_chips(tmp_path, *arguments) == 2
    shown = capsys.readouterr()
    assert "needs 40.00 GiB per device, and the chip leaves 15.00 GiB" in shown.err
    assert all(word in shown.err for word in ["MESH_FSDP", *words, "more chips"]), shown.err
    assert absent not in shown.err
    assert "does not fit, 40.00 of 15.00 GiB" in shown.out
    assert compiler.report() == {"fits": False, "memory": {"peak": 40 * 2**30, "hbm": 15 * 2**30}}


def test_a_training_step_that_compiles_and_does_not_fit_shows_its_figures(
    tmp_path, capsys, compiler
):
    compiler.answer = LARGE_MEMORY
    # Two heads over four parts are said when it starts, and in the report.
    assert on_four_chips(tmp_path, "--gin.NUM_MODEL_PARTITIONS=4") == 2
    shown = capsys.readouterr()
    for stream in (shown.err, shown.out):
        assert "heads of 2 cannot be split over model = 4" in stream
    assert "the training step needs 16.00 GiB per device" in shown.err
    assert "16.000 of 16 (100%)" in shown.out
    training = compiler.report()
    assert not training["fits"]
    assert training["memory"]["arguments"] == 2**34


TSAGE = [
    *("--gin_file=optim/tsage.gin", *gin("TaskBatchingConfig", total=16, num_negatives=1)),
    *gin("compile_recipe", task_sizes={"large": 1, "small": 1}),
]


@pytest.mark.parametrize(("flags", "tasks"), [([], {"any": 16}), (TSAGE, {"large": 8, "small": 8})])
def test_texts_of_known_lengths_are_in_groups(flags, tasks, tmp_path, capsys, compiler):
    """Queries of 8 tokens, passages of 16 in a bucket of 32: 3 in 9 positions are padding."""
    lengths = "{'query': {0: 8, 1: 8}, 'passage': {0: 16, 1: 16}}"
    buckets = [f"--gin.TEXT_LENGTHS={lengths}", "--gin.TrainingConfig.length_buckets=(8, 32)"]
    assert on_four_chips(tmp_path, *buckets, *flags) == 0
    groups = {
        task: [[each.ids.shape for each in side.groups] for side in (batch.queries, batch.passages)]
        for task, batch in compiler.batches[0].items()
    }
    # A hard negative for each query.
    assert groups == {task: [[(size, 8)], [(2 * size, 32)]] for task, size in tasks.items()}
    training = compiler.report()
    real, padded = 16 * 8 + 32 * 16, 16 * 8 + 32 * 32
    assert training["padding"] == pytest.approx(1 - real / padded)
    model = DualEncoderConfig(bert=BERT)
    flops = [model.training_flops(abstract_batch((16, 8), (32, length))) for length in (16, 32)]
    estimate = training["roofline"]
    shares = estimate["mfu_of_real_tokens"] / estimate["mfu"]
    assert shares == pytest.approx(flops[0] / flops[1], rel=1e-3)
    assert f"44.4% padding: {real} tokens in {padded:,} positions" in capsys.readouterr().out


def test_frozen_blocks_have_no_backward_pass(tmp_path, compiler):
    frozen = gin(**{"BertConfig.num_layers": 2, "TrainingConfig.train_from_block": 1})
    assert on_four_chips(tmp_path, *frozen) == 0
    model = DualEncoderConfig(bert=dataclasses.replace(BERT, num_layers=2))
    flops = model.training_flops(abstract_batch((16, 32), (32, 64)), frozen_blocks=1)
    assert compiler.report()["flops"]["model"] == flops / 4


@pytest.mark.parametrize("documents", ["tokens", "embeddings"])
def test_queries_with_documents_are_compiled(documents, tmp_path, compiler):
    """What the step is given has K documents for each query, which cost what the formulas say."""
    model = [
        "--gin_file=models/bert_fusion.gin",
        "--gin.BertFusionConfig.decoder_layers=1",
        f"--gin.BertFusionConfig.documents={documents}",
    ]
    small = tuple(flag for flag in SMALL if "ExpertConfig" not in flag)
    flops = []
    for count in (3, 0):
        number = f"--gin.compile_recipe.documents={count}"
        assert on_four_chips(tmp_path, *model, number, small=small) == 0
        flops.append(compiler.report()["flops"]["model"])
    assert flops[0] > flops[1]
    (batch,) = compiler.batches[0].values()
    each = {"tokens": (16, 3, 64), "embeddings": (16, 3, 128)}[documents]
    retrieved = batch.queries.documents
    assert (retrieved.ids if documents == "tokens" else retrieved).shape == each
    assert batch.queries.present.shape == (16, 3)


def plan_in(directory, *arguments: str) -> int:
    where = ("--topology=v5e:2x2", f"--gin.plan_recipe.output_dir={directory}")
    return cli.run(["plan", *SMALL, *where, *arguments])


def report(*, fits: bool = True, seconds: float = 0.25, peak: int = 3) -> dict:
    roofline = {"bound": "ICI", "step_seconds": seconds, "mfu": 0.5, "mfu_of_real_tokens": 0.4}
    return {"fits": fits, "memory": {"peak": peak * 2**30}, "roofline": roofline}


@pytest.fixture
def planned(monkeypatch):
    """A compiler that answers from a list; the last answer for ever."""
    asked, answers = [], [report()]

    def compile_recipe(*, training, output_dir, **given):
        asked.append((training.mesh.fsdp, training.mesh.model))
        answer = answers[min(len(asked), len(answers)) - 1]
        pathlib.Path(output_dir).mkdir(parents=True)
        pathlib.Path(output_dir, compile_module.REPORT_JSON).write_text(json.dumps(answer))
        if not answer["fits"]:
            raise ConfigError("does not fit")

    monkeypatch.setattr(compile_module, "compile_recipe", compile_recipe)
    return asked, answers


def test_the_compiler_decides_among_three_meshes_and_is_asked_once(tmp_path, capsys, planned):
    asked, answers = planned
    answers[:] = [report(fits=False), report(seconds=0.125), report(seconds=0.25)]
    assert plan_in(tmp_path) == 0
    first = capsys.readouterr().out
    # The recipe's own, parameters split over all devices, products split over two.
    assert asked == [(1, 1), (4, 1), (1, 2)]
    assert first.startswith("v5e:2x2\n\n| mesh (data, fsdp, model) |")
    rows = first.splitlines()[4:7]
    assert rows[0] == "| 1, 4, 1 | 3.00 | ICI | 125.00 | 50% | 40% | 0.17 |"
    assert rows[1].startswith("| 2, 1, 2 | 3.00 | ICI | 250.00 |")
    assert rows[2].startswith("| 4, 1, 1 | 3.00 | does not fit |")
    assert "\nMESH_FSDP = 4\nNUM_MODEL_PARTITIONS = 1\n" in first
    assert plan_in(tmp_path) == 0
    assert capsys.readouterr().out == first
    assert len(asked) == 3
    # Another recipe is another row.
    assert plan_in(tmp_path, "--gin.BATCH_SIZE=32") == 0
    assert len(asked) == 6


@pytest.mark.parametrize(
    ("own", "devices", "heads", "meshes"),
    [
        # One device has one mesh, and three heads cannot be split over two.
        ((1, 1), 1, 12, [(1, 1)]),
        ((1, 1), 4, 3, [(1, 1), (4, 1)]),
        # All devices compute the twelve heads that the recipe's own mesh does not divide.
        ((1, 8), 8, 12, [(1, 8)]),
        # The batch has as many parts as in the recipe, or fewer.
        ((2, 2), 8, 12, [(2, 2), (1, 2), (4, 2)]),
        # Meshes of a larger topology.
        ((8, 1), 4, 12, [(1, 1), (4, 1), (1, 2)]),
        ((1, 8), 4, 16, [(1, 1), (4, 1), (1, 2)]),
    ],
)
def test_meshes_divide_devices_and_heads(own, devices, heads, meshes):
    topology = types.SimpleNamespace(devices=[None] * devices)
    mesh = MeshConfig(fsdp=own[0], model=own[1])
    configs = compile_module._meshes(mesh, topology, num_heads=heads)
    assert [(mesh.fsdp, mesh.model) for mesh in configs] == meshes


@pytest.mark.parametrize(("other", "fsdp"), [(0.192, 4), (0.188, 1)])
def test_the_recipes_own_mesh_stays_unless_another_is_faster_by_5_percent(
    tmp_path, capsys, planned, other, fsdp
):
    asked, answers = planned
    answers[:] = [report(seconds=0.2), report(seconds=other), report(seconds=0.3)]
    assert plan_in(tmp_path, "--gin.MESH_FSDP=4") == 0
    assert asked == [(4, 1), (1, 1), (1, 2)]
    assert f"MESH_FSDP = {fsdp}\n" in capsys.readouterr().out


def test_prices_are_those_of_the_launchers():
    launch = pathlib.Path(__file__).parents[2] / "launch"
    tables = runpy.run_path(str(launch / "_tables.py"))
    names = {"v5litepod": "v5e"}
    listed = {names.get(name, name): kind.price for name, kind in tables["KINDS"].items()}
    assert {name: price for name, price in listed.items() if price} == PRICES


def test_a_recipe_that_fits_nowhere_is_told_what_comes_nearest(tmp_path, capsys, planned):
    planned[1][:] = [report(fits=False, peak=peak) for peak in (9, 5, 7)]
    assert plan_in(tmp_path) == 2
    error = capsys.readouterr().err
    assert "v5e:2x2: nothing fits" in error
    assert "MESH_FSDP = 4, NUM_MODEL_PARTITIONS = 1, with 5.00 GiB per device on v5e:2x2" in error
    assert "BertConfig.remat=block" in error
