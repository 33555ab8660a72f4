"""`taser compile`: compiles a recipe for a TPU pod on a machine without TPUs."""

from __future__ import annotations

import dataclasses
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
from taser_jax.devices.partitioning import Partitioner, bytes_per_device, placed
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
_TRAINING, _ENCODING = "training step", "encoding of passages, on one host"
_FUSED = "encoding of queries with documents, on one host"


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
        reports = _Reports(output)
        _training_report(
            reports, target, program, training, text_lengths=text_lengths, effort=compiler_effort
        )
        if encoding is not None:
            _encoding_reports(
                reports, target, program, encoding, documents=documents, effort=compiler_effort
            )
    return [report for report in reports.all if isinstance(report, StepReport)]


class _Reports:
    """Prints and writes each report as soon as it is known, since a later step may not fit.

    Args:
        output: directory of the files; None writes none.
    """

    def __init__(self, output: epath.Path | None) -> None:
        self._output = output
        self.all: list[StepReport | StepRefusal] = []

    def add(self, report: StepReport | StepRefusal) -> None:
        self.all.append(report)
        print(f"{report}\n", flush=True)
        if self._output is not None:
            write_text(self._output / REPORT_TEXT, "\n\n".join(map(str, self.all)) + "\n")
            facts = [report.as_json() for report in self.all]
            write_json(self._output / REPORT_JSON, facts)


def _training_report(
    reports: _Reports,
    target: Topology,
    program: Program,
    training: TrainingConfig,
    *,
    text_lengths: TextLengths | None,
    effort: CompilerEffort,
) -> None:
    partitioner, state, config = program.partitioner, program.state, program.model.config
    shapes = program.plan.shapes.values()
    batches = placed(program.plan.abstract_batches(), partitioner.batch_sharding)
    queries = sum(shape.queries for shape in shapes)
    passages = sum(shape.passages for shape in shapes)
    _report(
        reports,
        _TRAINING,
        target,
        compile_=lambda: compile_step(
            program.train_step, state, batches, mesh=partitioner.mesh, effort=effort
        ),
        describe=lambda compiled: StepReport(
            name=_TRAINING,
            about=f"{queries} queries and {passages} passages over "
            f"{partitioner.batch_devices} parts",
            topology=target,
            mesh=dict(partitioner.mesh.shape),
            compiled=compiled,
            model_flops=sum(config.training_flops(shape) for shape in shapes)
            / partitioner.mesh.size,
            real=None if text_lengths is None else real_work(program, text_lengths),
            copied=program.copied_axes,
        ),
        advise=lambda needed, available: what_would_fit(
            config,
            training,
            partitioner=partitioner,
            smallest_batch=min(shape.queries for shape in shapes),
            needed=needed,
            available=available,
            state_bytes=sum(map(bytes_per_device, jax.tree.leaves(state))),
        ),
    )


def real_work(program: Program, text_lengths: TextLengths) -> RealWork:
    """What a step computes of typical texts.

    Args:
        program: the step, with its padded batches.
        text_lengths: how long texts are.
    """
    config, padded = program.model.config, program.plan.shapes.values()
    real = program.plan.real_shapes(text_lengths).values()
    return RealWork(
        tokens=sum(shape.tokens for shape in real),
        padded_tokens=sum(shape.tokens for shape in padded),
        flops=sum(map(config.training_flops, real)),
        padded_flops=sum(map(config.training_flops, padded)),
    )


def _encoding_reports(
    reports: _Reports,
    target: Topology,
    program: Program,
    encoding: EncodeConfig,
    *,
    documents: int,
    effort: CompilerEffort,
) -> None:
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

    def add(
        name: str, role: Role, size: int, *, about: str, memory: DocumentsShape | None = None
    ) -> None:
        batch = BatchShape(size, program.query_length, size, length, memory=memory).abstract()
        texts = batch.passages if role is Role.PASSAGE else batch.queries
        task = next(iter(model.query_tasks), None) if role is Role.QUERY else None
        flops = config.forward_flops(
            batch_size=size,
            length=length if memory is None else program.query_length,
            memory=memory,
        )
        _report(
            reports,
            name,
            host,
            compile_=lambda: compile_step(
                embed,
                params,
                placed(texts, partitioner.batch_sharding),
                mesh=partitioner.mesh,
                effort=effort,
                model=model,
                role=role,
                task=task,
            ),
            describe=lambda compiled: StepReport(
                name=name,
                about=about,
                topology=host,
                mesh=dict(partitioner.mesh.shape),
                compiled=compiled,
                model_flops=flops / devices,
            ),
            advise=lambda *_: (
                f"lower EncodeConfig.batch_tokens, now {batch_tokens}; it decides the batch"
            ),
        )

    size = encoding.batch_size(length, platform="tpu")
    add(_ENCODING, Role.PASSAGE, size, about=f"{size} passages of {length} tokens")
    if documents:
        memory = config.documents_shape(documents, length)
        own = program.query_length + (0 if memory.dim else memory.per_query * memory.length)
        size = encoding.batch_size(own, platform="tpu")
        about = f"{size} queries of {program.query_length} tokens, {documents} documents each"
        add(_FUSED, Role.QUERY, size, about=about, memory=memory)


def _report(
    reports: _Reports,
    name: str,
    target: Topology,
    *,
    compile_: Callable[[], CompiledStep],
    describe: Callable[[CompiledStep], StepReport],
    advise: Callable[[int, int], str],
) -> None:
    """Compiles and reports a step; raises `ConfigError` afterwards if it does not fit."""
    try:
        with phase(f"compile the {name}"):
            compiled = compile_()
    except OutOfMemory as error:
        needed, available = error.needed, error.available
        reports.add(StepRefusal(name=name, topology=target, needed=needed, available=available))
    else:
        report = describe(compiled)
        reports.add(report)
        # The compiler accepts programs that need more than the chip's published memory.
        needed, available = compiled.memory.peak, target.chip.hbm_bytes
        if report.fits:
            return
    gib, room = needed / 2**30, available / 2**30
    problem = f"the {name} needs {gib:.2f} GiB per device, and the chip leaves {room:.2f} GiB to it"
    raise ConfigError(problem, where=target.name, fix=advise(needed, available))


# Largest share of the memory for parameters, gradients and moments; activations need the rest.
_STATE_SHARE = 0.5


def what_would_fit(
    model: ModelConfig,
    training: TrainingConfig,
    *,
    partitioner: Partitioner,
    smallest_batch: int,
    needed: int,
    available: int,
    state_bytes: int,
) -> str:
    """Settings to change, depending on what takes the memory.

    Args:
        model: the model that did not fit.
        training: its training.
        partitioner: devices along each axis.
        smallest_batch: queries of the step's smallest batch.
        needed: bytes that the step needs per device.
        available: bytes that a device has.
        state_bytes: the part of `needed` for parameters and optimiser state.
    """
    fixes = []
    room = available * _STATE_SHARE
    if state_bytes > room:
        free = partitioner.mesh.shape["data"] * partitioner.mesh.shape["fsdp"]
        now = partitioner.mesh.shape["fsdp"]
        splits = [size for size in range(now + 1, free + 1) if free % size == 0]
        wide = [size for size in splits if state_bytes * now / size <= room]
        if splits:
            fixes.append(
                f"MESH_FSDP={(wide or splits[-1:])[0]} splits parameters and optimiser state"
            )
        else:
            fixes.append("more chips, or NUM_MODEL_PARTITIONS, to split parameters and state")
    activations = needed - state_bytes
    if activations > available - min(state_bytes, room):
        if model.transformer.remat is Remat.NONE:
            fixes.append(
                f"{type(model.transformer).__name__}.remat=block recomputes each block in the "
                "backward pass"
            )
        rows = smallest_batch // partitioner.batch_devices
        factor = activations / max(available - min(state_bytes, room), 1)
        chunks = [
            size
            for size in range(training.num_chunks + 1, rows + 1)
            if rows % size == 0 and size >= factor * training.num_chunks
        ]
        if chunks:
            fixes.append(
                f"TrainingConfig.num_chunks={chunks[0]} encodes a part of the batch at a time"
            )
    fixes.append("more chips, over which the batch is split")
    return "; or ".join(fixes)
