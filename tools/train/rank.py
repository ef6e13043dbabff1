"""One rank of a run: join the others, train, save, and leave."""

import contextlib
import datetime
import gc
import os
import platform
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import (
    FileStore,
    PrefixStore,
)
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.rendezvous import rendezvous

from hp_cp import ContextParallelError
from hp_dtensor import Collectives, RecordingCollectives
from hp_ep import ExpertConfigError
from hp_fsdp import CheckpointError as WeightsError
from hp_mesh import ParallelMesh

from .attempt import store_of_attempt
from .checkpoint import CheckpointError, Checkpoints, WriteError, load
from .config import ModelError, TransformersConfig
from .data import Samples
from .hugging_face import build_transformers, forward_alone
from .launch import RENDEZVOUS, STOPPED_STATUS, USAGE_STATUS, note_failure
from .loop import Diverged, Trainer, largest_of_ranks
from .memory import peak_memory
from .model import Forward, LanguageModel, build_model, call_built_in
from .options import NO_COMPILER, Options, default_out, how_to_resume
from .parallelize import parallelize
from .peers import Peers, from_all_ranks, from_rank_0, is_rank_0, set_timeout
from .pipeline import build_pipeline
from .profile import Profiler
from .report import Counts, Report
from .run_folder import CHECKPOINT
from .text import TextError, read_corpus
from .weights import export, keep_files, load_weights, starts_from_weights

SHARED_SECONDS = 5.0
GROUP_TIMEOUT = datetime.timedelta(minutes=5)  # at least, until the first step has been made
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
# Errors of a model, a checkpoint or options, before the first step, on every rank.
REFUSALS = (
    *(ModelError, TextError, CheckpointError, WeightsError),
    *(ContextParallelError, ExpertConfigError),
)
# Errors that end a run between steps, on every rank, whose message suffices.
ENDS = (WriteError, WeightsError, Diverged)


class Refused(ValueError):
    """The run cannot begin: the packages do not support the model or an option."""


def run_rank(options: Options) -> int:
    """Run this process's part of the run and return its exit status.

    A rank that fails ends without closing its process groups, which would wait for the others. An
    error of all ranks is one message. The status is 2 if the run was refused, else 1. After SIGTERM
    the current step is the last one, it is saved, and the status is that of the signal.
    """
    local, leads = RENDEZVOUS in os.environ, os.environ.get("RANK", "0") == "0"
    if not local and signal.getsignal(signal.SIGINT) == signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    peers = Peers()
    try:
        stopped = record(_run)(options, peers)
    except BaseException as error:  # noqa: BLE001 - it is shown, and ends this rank
        status = 1
        if isinstance(error, KeyboardInterrupt):
            status = 128 + signal.SIGINT
        elif isinstance(error, (Refused, *ENDS)):
            if local or leads:
                print(f"train: error: {error}", file=sys.stderr)
            status = USAGE_STATUS if isinstance(error, Refused) else 1
        elif (lost := peers.explain(error)) is None:
            traceback.print_exc()
        elif lost:
            print(f"train: error: {lost}", file=sys.stderr)
        # A launcher prints this when all ranks have ended. Only ranks know a default folder.
        known = options.out_given or options.reference
        if status != USAGE_STATUS and leads and known and not local:
            print(how_to_resume(options), file=sys.stderr)
        if status == 1 and local:
            note_failure(int(os.environ["RANK"]))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return STOPPED_STATUS if stopped else 0


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    try:
        yield
    except REFUSALS as error:
        raise Refused(str(error)) from error


class _Termination:
    """Whether ranks have received SIGTERM, which they agree on after each step.

    Creates a process group of all ranks, which the mesh does not have. From then on the signal
    does not end this process.
    """

    def __init__(self, timeout: datetime.timedelta) -> None:
        self.received = False  # by this rank
        self.stopped = False  # the run was stopped before its last step
        group = dist.new_group(timeout=timeout, backend="gloo") if dist.is_initialized() else None
        self._group = group
        signal.signal(signal.SIGTERM, self._receive)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = True

    def agree(self, failed: bool) -> tuple[bool, bool]:
        """Return whether any rank has received the signal, and whether any has ``failed``."""
        if self._group is None:
            return self.received, failed
        found = torch.tensor([self.received, failed], dtype=torch.int32)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self._group)
        return bool(found[0]), bool(found[1])

    def leave(self) -> None:
        """Drop the group, so that it can be destroyed."""
        self._group = None


def _run(options: Options, peers: Peers) -> bool:
    """Run this rank; return whether the run was stopped before its last step."""
    device = _device(options)
    torch.set_num_threads(1)
    if device.type == "cpu":
        _share_processors()
    mesh = None
    if not options.reference:
        timeout = max(GROUP_TIMEOUT, datetime.timedelta(seconds=options.comm_timeout))
        _join(options, peers, timeout)
        check_agreement(options)
        mesh = options.dims.build_mesh(device.type, timeout=timeout)
        if not options.out_given:  # all ranks must write to the same folder
            started = largest_of_ranks(int(time.time()), mesh, device)
            options = replace(options, out=default_out(started))
        for folder in (options.export, None if options.only_exports else options.out):
            if folder is not None:
                check_shared(folder)
        keep_files(options)
    profiler = Profiler(options.profile, options.out)
    collectives = RecordingCollectives(profiler.collectives)
    with _refusals():
        if mesh is None:
            trainer = _reference(options, device)
        else:
            trainer = _parallel_trainer(options, mesh, device, collectives)
        if options.resume is not None:
            load(trainer, options.resume)
    report = stopped = None
    if not options.only_exports:
        report = _report(options, trainer.step)
        termination = _train(trainer, options, report, collectives, profiler)
        stopped = termination.stopped
    if not stopped:
        export(trainer.model, options)
    peak = peak_memory(device)
    peak = peak if mesh is None else largest_of_ranks(peak, mesh, device)
    del trainer
    if mesh is not None:
        # gloo aborts at exit if a mesh or an autograd graph still holds one of its groups.
        dist.barrier()
        gc.collect()
        mesh.close()
        mesh = None
        gc.collect()
        dist.destroy_process_group()
    if report is not None:
        report.totals(peak, collectives.by_axis)
        if options.compare and not stopped:
            _repeat_on_one_process(options, report, termination)
        report.finish()
    return bool(stopped)


def _share_processors() -> None:
    """Use a scheduling policy in which a process that wakes up does not interrupt another one.

    The sender of a message holds the lock of its connection. If the receiver interrupts it, a
    thread of gloo spins on that lock.
    """
    if hasattr(os, "SCHED_BATCH"):  # Linux
        with contextlib.suppress(OSError):  # without the permission training is slower
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _train(
    trainer: Trainer,
    options: Options,
    report: Report | None,
    collectives: RecordingCollectives,
    profiler: Profiler,
) -> _Termination:
    """Train up to the last step, or to SIGTERM, and save."""
    data = _samples(options)
    first = saved = trainer.step
    checkpoints = Checkpoints(options.out / CHECKPOINT, options.run_fields, options.keep)
    termination = _Termination(datetime.timedelta(seconds=options.comm_timeout))
    if options.resumes_in_place:
        checkpoints.tidy(options.resume)
    before: Mapping[str, Counts] = {}
    while trainer.step < options.steps and not termination.stopped:
        profiler.before(trainer.step + 1, trainer.model)
        with _refusals() if trainer.step == first else contextlib.nullcontext():
            result = trainer.train_step(data)
        if trainer.mesh is not None and trainer.step == first + 1:
            set_timeout(trainer.mesh, options.comm_timeout)  # compilers work in the first step
            if trainer.pipeline is not None:
                trainer.pipeline.set_timeout(trainer.mesh, options.comm_timeout)
        profiler.after(trainer.step)
        moved = _difference(collectives.by_axis, before)
        if _is_due(options.eval_every, trainer.step) or (
            options.eval_every and trainer.step == options.steps
        ):
            result = replace(result, eval_loss=trainer.evaluate(data))
        before = collectives.by_axis
        if report is not None:
            try:
                report.step(result, peak_memory(trainer.device), moved)
            except WriteError as error:  # ends all ranks after this step
                checkpoints.fail(str(error))
        received, failed = termination.agree(checkpoints.poll())
        if failed:
            checkpoints.finish()
        # A model without finite gradients replaces no checkpoint.
        if _is_due(options.checkpoint_every, trainer.step) and not trainer.skipped:
            checkpoints.start(trainer)
            saved = trainer.step
        termination.stopped = received and trainer.step < options.steps
    profiler.close()
    if saved != trainer.step:
        checkpoints.start(trainer)
    checkpoints.finish()
    termination.leave()
    return termination


def _is_due(every: int | None, step: int) -> bool:
    return every is not None and step % every == 0


def _repeat_on_one_process(options: Options, report: Report, termination: _Termination) -> None:
    """Repeat the first steps in this process alone, up to SIGTERM, and report their losses."""
    trainer = _reference(options, _device(options))
    data = _samples(options)
    while trainer.step < min(options.steps, options.compare) and not termination.received:
        report.reference_step(trainer.train_step(data))


def _samples(options: Options) -> Samples:
    return Samples(
        read_corpus(options.source).parts,
        options.train.seq_len,
        options.train.seed,
        held_out=options.eval_every is not None,
        vocab_size=options.model.vocab_size,
    )


def _build(options: Options, device: torch.device) -> nn.Module:
    """Return the unsharded model with its initial values, or without any if they are loaded."""
    kept, _ = _dtypes(options)
    config, train = options.model, options.train
    values = not starts_from_weights(options)
    if isinstance(config, TransformersConfig):
        parts = train.accumulate
        return build_transformers(config, train.seed, kept, device, parts, values=values)
    # Each microbatch adds its own auxiliary loss; the batch has their mean.
    coefficient = config.router_aux_loss_coef / train.accumulate
    config = replace(config, router_aux_loss_coef=coefficient)
    return build_model(config, train.seed, kept, device, values=values)


def _dtypes(options: Options) -> tuple[torch.dtype, torch.dtype | None]:
    """Return the dtype of weights and, if it differs, the dtype of computation."""
    if options.dtype == "bfloat16":
        return torch.float32, torch.bfloat16
    return getattr(torch, options.dtype), None


def _parallel_trainer(
    options: Options, mesh: ParallelMesh, device: torch.device, collectives: Collectives
) -> Trainer:
    """Return the trainer of the model that is distributed over the mesh."""
    model, pipeline = _build(options, device), None
    kept, computed = _dtypes(options)
    distribute = partial(
        parallelize,
        mesh=mesh,
        dims=options.dims,
        collectives=collectives,
        checkpoint_activations=options.checkpoint_activations,
        compiler=None if options.compile == NO_COMPILER else options.compile,
        compute_dtype=computed,
    )
    forward: Forward = call_built_in
    if options.dims.pp > 1 and isinstance(model, LanguageModel):
        model, pipeline = build_pipeline(
            model,
            mesh,
            options.train,
            schedule=options.pp_schedule,
            stages_per_rank=options.stages_per_rank,
            parallelize_stage=distribute,
            dtype=computed or kept,
            device=device,
        )
    else:
        forward = distribute(model)
    load_weights(model, options, device)
    return Trainer(
        model,
        options.train,
        mesh=mesh,
        device=device,
        collectives=collectives,
        forward=forward,
        pipeline=pipeline,
    )


def _reference(options: Options, device: torch.device) -> Trainer:
    model = _build(options, device)
    load_weights(model, options, device)
    return Trainer(
        model,
        options.train,
        device=device,
        forward=forward_alone if isinstance(options.model, TransformersConfig) else call_built_in,
        compute_dtype=_dtypes(options)[1],
    )


def _device(options: Options) -> torch.device:
    if options.device == "cpu":
        return torch.device("cpu")
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if local >= torch.cuda.device_count():
        raise RuntimeError(
            f"local rank {local} has no GPU of its own, this machine has "
            f"{torch.cuda.device_count()}; start one process per GPU"
        )
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


def _join(options: Options, peers: Peers, timeout: datetime.timedelta) -> None:
    """Join the world that the launcher or torchrun describes in the environment."""
    backend = "gloo" if options.device == "cpu" else "cpu:gloo,cuda:nccl"
    if RENDEZVOUS not in os.environ:
        shared, rank, size = next(rendezvous("env://", timeout=timeout))
        store = store_of_attempt(shared, rank, size, timeout)
    else:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
        rank, size = int(os.environ["RANK"]), options.world_size
        store = FileStore(str(Path(os.environ[RENDEZVOUS]) / "store"), size)
    peers.join(PrefixStore("peers", store), rank, size)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)


def check_agreement(options: Options) -> None:
    """Raise `Refused` on all ranks unless they have the same options, checkpoint and text.

    Each rank has read its own command line and files, which may differ between nodes.
    """
    own = {name: str(value) for name, value in options.shared_values.items()}
    found = from_all_ranks(own)
    for rank, other in enumerate(found):
        differing = [name for name in own if other[name] != found[0][name]]
        if differing:
            first, its = (
                " ".join(f"{name}={each[name]}" for name in differing) for each in (found[0], other)
            )
            raise Refused(
                f"rank 0 has {first}, rank {rank} has {its}; give all ranks the same options, "
                "text, Python's library and checkpoint"
            )


def _report(options: Options, done: int) -> Report | None:
    """Return the report on rank 0. Raise on all ranks if it cannot be started."""
    report, error = None, None
    if is_rank_0():
        try:
            report = Report(options, done)
        except WriteError as found:
            error = str(found)
    if (error := from_rank_0(error)) is not None:
        raise WriteError(error)
    return report


def check_shared(out: Path) -> None:
    """Raise `Refused` on all ranks unless each sees a file that rank 0 writes to ``out``.

    Each rank writes its own file of a checkpoint, so the folder must not be local to a node.
    """
    name, text = None, ""
    if is_rank_0():
        try:
            out.mkdir(parents=True, exist_ok=True)
            descriptor, path = tempfile.mkstemp(prefix=".shared-", dir=out)
            os.close(descriptor)
            name, text = os.path.basename(path), os.path.abspath(out)
        except OSError as error:
            text = f"out={out} is no folder that can be written: {error.strerror}; give another"
    name, text = from_rank_0((name, text))
    if name is None:
        raise Refused(text)
    own = None if _appears(out / name) else f"({platform.node()}: {os.path.abspath(out)})"
    found = from_all_ranks(own)
    if is_rank_0():
        (out / name).unlink(missing_ok=True)
    lacking = [f"rank {rank} {each}" for rank, each in enumerate(found) if each is not None]
    if lacking:
        raise Refused(
            f"out={text} of rank 0 is not seen by {', '.join(lacking)}; give all nodes one shared "
            "folder, by its absolute path"
        )


def _appears(path: Path) -> bool:
    """Return whether a file exists; a network file system may show it some seconds late."""
    deadline = time.monotonic() + SHARED_SECONDS
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def _difference(after: Mapping[str, Counts], before: Mapping[str, Counts]) -> dict[str, Counts]:
    return {
        axis: (now[0] - before.get(axis, (0, 0))[0], now[1] - before.get(axis, (0, 0))[1])
        for axis, now in after.items()
    }
