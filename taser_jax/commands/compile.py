"""`taser compile`: compiles a recipe for a TPU pod on a machine without TPUs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

import jax
from etils import epath

from taser_jax.assembly.config import TrainingConfig
from taser_jax.assembly.data import open_store, training_queries
from taser_jax.assembly.model_directory import embed
from taser_jax.assembly.plans import TextLengths, lengths_in
from taser_jax.assembly.program import Program, make_program
from taser_jax.devices.compiler import CompiledStep, CompilerEffort, OutOfMemory, compile_step
from taser_jax.devices.mesh import make_mesh
from taser_jax.devices.partitioning import Partitioner, placed
from taser_jax.devices.step_report import RealWork, StepRefusal, StepReport
from taser_jax.devices.topologies import Topology, one_host, open_topology, require_compiler
from taser_jax.models.batch import BatchShape, DocumentsShape, Role
from taser_jax.models.dual_encoder import ModelConfig
from taser_jax.models.layers import Remat
from taser_jax.models.parameters import abstract_params
from taser_jax.retrieval.encoding import EncodeConfig
from taser_jax.storage.artifacts import storage_errors, write_json, write_text
from taser_jax.storage.errors import ConfigError
from taser_jax.storage.progress import logger, phase

REPORT_JSON, REPORT_TEXT = "report.json", "report.txt"


def compile_recipe(
    *,
    topology: str | None,
    model: ModelConfig,
    training: TrainingConfig,
    feature_lengths: Mapping[str, int] | None = None,
    num_slices: int = 1,
    task_sizes: Mapping[str, int] | None = None,
    text_lengths: TextLengths | None = None,
    documents: int = 10,
    token_store: str = "",
    tasks: Sequence[str] | None = None,
    encoding: EncodeConfig | None = EncodeConfig(),
    compiler_effort: CompilerEffort = CompilerEffort.FULL,
    output_dir: str = "",
) -> list[StepReport]:
    """Compiles the steps of a training recipe for a TPU topology, with no TPU and no data.

    The TPU compiler comes with libtpu (the extra `tpu`). For the training step and the encoding of
    passages it prints memory per device beside the chip's, FLOPs beside the model's formulas,
    bytes, collectives, float32 products and a roofline estimate. Nothing is run: times are bounds,
    not measurements. Each report is printed and written before a step that does not fit stops the
    command.

    Args:
        topology: "<generation>:<chips along each axis>", such as v5e:4x4.
        model: the dual encoder.
        training: how it is trained; mesh, batch and chunks are what matters here.
        feature_lengths: {"query": ..., "passage": ...}, tokens.
        num_slices: slices of the topology.
        task_sizes: task -> training queries, for recipes with a batch of every task.
        text_lengths: {"query": {quantile: tokens}, "passage": ...}: how long texts are, which
            decides the groups of `TrainingConfig.length_buckets` and the report's share of padding;
            None pads all to `feature_lengths`.
        documents: documents fused with each query, K, for models that fuse them; 0 compiles
            queries alone.
        token_store: token store to take `task_sizes`, `feature_lengths` and `text_lengths` from.
        tasks: tasks to train on, of those in the token store.
        encoding: batches of passages to encode; None compiles the training step alone.
        compiler_effort: full, as a training run gets, or quick.
        output_dir: where report.json and report.txt go; empty writes no files.

    Returns:
        A report for each step, if all of them fit.

    Raises:
        ConfigError: no such topology, a mesh or batch that does not fit its devices, no libtpu, or
            a step that needs more memory than a chip has; the message says what would fit.
    """
    # Nothing is run: a TPU of this machine stays unused.
    jax.config.update("jax_platforms", "cpu")
    target = open_topology(topology, num_slices=num_slices)
    require_compiler(target)
    documents = documents if model.fuses else 0
    store = open_store(token_store, dry_run=not token_store)
    queries = {} if store is None else training_queries(store, task_names=tasks)
    if store is not None:
        text_lengths = lengths_in(store, queries)
    program = make_program(
        model,
        training,
        partitioner=Partitioner(make_mesh(training.mesh, devices=target.devices)),
        store=store,
        queries=queries,
        feature_lengths=feature_lengths or {},
        task_sizes=task_sizes,
        text_lengths=text_lengths,
        documents=documents,
    )
    with storage_errors(output_dir):
        output = epath.Path(output_dir) if output_dir else None
        if output is not None:
            output.mkdir(parents=True, exist_ok=True)
        logger.info(
            "compiling for %d devices with %s effort: this takes minutes",
            program.partitioner.mesh.size,
            compiler_effort.value,
        )
        steps = [_training_step(target, program, training, text_lengths, effort=compiler_effort)]
        if encoding is not None:
            steps += _encoding_steps(
                target, program, encoding, documents=documents, effort=compiler_effort
            )
        reports: list[StepReport | StepRefusal] = []
        for step in steps:
            reports.append(step.compiled())
            # A later step may not fit.
            print(f"{reports[-1]}\n", flush=True)
            if output is not None:
                write_text(output / REPORT_TEXT, "\n\n".join(map(str, reports)) + "\n")
                write_json(output / REPORT_JSON, [report.as_json() for report in reports])
            step.check(reports[-1])
    return [report for report in reports if isinstance(report, StepReport)]


@dataclasses.dataclass(frozen=True)
class _Step:
    """A step to compile.

    Attributes:
        name: the step's name.
        topology: the target.
        compile: runs the compiler.
        report: makes the report of what the compiler says (`compiled`).
        advice: settings to change where the step does not fit.
    """

    name: str
    topology: Topology
    compile: Callable[[], CompiledStep]
    report: Callable[..., StepReport]
    advice: str

    def compiled(self) -> StepReport | StepRefusal:
        try:
            with phase(f"compile the {self.name}"):
                compiled = self.compile()
        except OutOfMemory as error:
            return StepRefusal(self.name, self.topology, error.needed, error.available)
        return self.report(name=self.name, topology=self.topology, compiled=compiled)

    def check(self, report: StepReport | StepRefusal) -> None:
        """Raises `ConfigError` where the step needs more memory than a chip has."""
        if isinstance(report, StepRefusal):
            needed, available = report.needed, report.available
        elif report.fits:
            return
        else:
            # The compiler accepts programs that need more than the chip's published memory.
            needed, available = report.compiled.memory.peak, self.topology.chip.hbm_bytes
        problem = (
            f"the {self.name} needs {needed / 2**30:.2f} GiB per device, and the chip leaves "
            f"{available / 2**30:.2f} GiB to it"
        )
        raise ConfigError(problem, where=self.topology.name, fix=self.advice)


def _training_step(
    target: Topology,
    program: Program,
    training: TrainingConfig,
    text_lengths: TextLengths | None,
    *,
    effort: CompilerEffort,
) -> _Step:
    partitioner, config = program.partitioner, program.model.config
    shapes = program.plan.shapes.values()
    batches = placed(program.plan.abstract_batches(), partitioner.batch_sharding)
    queries = sum(shape.queries for shape in shapes)
    passages = sum(shape.passages for shape in shapes)
    return _Step(
        "training step",
        target,
        functools.partial(
            compile_step,
            *(program.train_step, program.state, batches),
            mesh=partitioner.mesh,
            effort=effort,
        ),
        functools.partial(
            StepReport,
            about=f"{queries} queries and {passages} passages over "
            f"{partitioner.batch_devices} parts",
            mesh=dict(partitioner.mesh.shape),
            model_flops=sum(config.training_flops(shape) for shape in shapes)
            / partitioner.mesh.size,
            real=None if text_lengths is None else _real_work(program, text_lengths),
            copied=program.copied_axes,
        ),
        what_would_fit(config, training),
    )


def _real_work(program: Program, text_lengths: TextLengths) -> RealWork:
    """What a step computes of typical texts."""
    config, padded = program.model.config, program.plan.shapes.values()
    real = program.plan.real_shapes(text_lengths).values()
    return RealWork(
        tokens=sum(shape.tokens for shape in real),
        padded_tokens=sum(shape.tokens for shape in padded),
        flops=sum(map(config.training_flops, real)),
        padded_flops=sum(map(config.training_flops, padded)),
    )


def what_would_fit(model: ModelConfig, training: TrainingConfig) -> str:
    """Settings to change where a training step needs too much memory."""
    fixes = [
        "MESH_FSDP splits parameters and optimiser state",
        f"TrainingConfig.num_chunks={2 * training.num_chunks} encodes a part of the batch at a "
        "time",
        "more chips, over which the batch is split",
    ]
    if model.transformer.remat is Remat.NONE:
        name = type(model.transformer).__name__
        fixes.insert(1, f"{name}.remat=block recomputes each block in the backward pass")
    return "; or ".join(fixes)


def _encoding_steps(
    target: Topology,
    program: Program,
    encoding: EncodeConfig,
    *,
    documents: int,
    effort: CompilerEffort,
) -> list[_Step]:
    """Encodes passages, and queries with documents, as `taser encode` does.

    Each host encodes its own, on replicated parameters.
    """
    host = one_host(target)
    partitioner = Partitioner(make_mesh(devices=host.devices))
    devices = partitioner.batch_devices
    multiple = devices * -(-max(encoding.batch_multiple, 8) // devices)
    encoding = dataclasses.replace(encoding, batch_multiple=multiple)
    batch_tokens = "the default" if encoding.batch_tokens is None else f"{encoding.batch_tokens:,}"
    model, length = program.model, program.passage_length
    config = model.config
    params = placed(abstract_params(model), partitioner.replicated)

    def step(
        name: str, role: Role, size: int, *, about: str, memory: DocumentsShape | None = None
    ) -> _Step:
        batch = BatchShape(size, program.query_length, size, length, memory=memory).abstract()
        texts = batch.passages if role is Role.PASSAGE else batch.queries
        flops = config.forward_flops(
            batch_size=size,
            length=length if memory is None else program.query_length,
            memory=memory,
        )
        return _Step(
            name,
            host,
            functools.partial(
                compile_step,
                *(embed, params, placed(texts, partitioner.batch_sharding)),
                mesh=partitioner.mesh,
                effort=effort,
                model=model,
                role=role,
                task=next(iter(model.query_tasks), None) if role is Role.QUERY else None,
            ),
            functools.partial(
                StepReport,
                about=about,
                mesh=dict(partitioner.mesh.shape),
                model_flops=flops / devices,
            ),
            f"lower EncodeConfig.batch_tokens, now {batch_tokens}; it decides the batch",
        )

    size = encoding.batch_size(length, platform="tpu")
    about = f"{size} passages of {length} tokens"
    steps = [step("encoding of passages, on one host", Role.PASSAGE, size, about=about)]
    if documents:
        memory = config.documents_shape(documents, length)
        own = program.query_length + (0 if memory.dim else memory.per_query * memory.length)
        size = encoding.batch_size(own, platform="tpu")
        about = f"{size} queries of {program.query_length} tokens, {documents} documents each"
        name = "encoding of queries with documents, on one host"
        steps.append(step(name, Role.QUERY, size, about=about, memory=memory))
    return steps
