"""What one rank does: join the others, train, save, and leave in good order."""

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
from .peers import Peers, set_timeout
from .pipeline import build_pipeline
from .profile import Profiler
from .report import Counts, Report
from .run_folder import CHECKPOINT
from .text import TextError, read_corpus

SHARED_SECONDS = 5.0
GROUP_TIMEOUT = datetime.timedelta(minutes=5)  # at least, until the first step has been made
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
# What is refused of a model, a checkpoint or options, before the first step, on every rank alike.
REFUSALS = (ModelError, TextError, CheckpointError, ContextParallelError, ExpertConfigError)
# What ends a run, between steps on every rank alike, and says all that there is to know.
ENDS = (WriteError, Diverged)


class Refused(ValueError):
    """The run cannot begin: there is a model or an option that the packages do not take."""


def run_rank(options: Options) -> int:
    """Run this process's part of the run and return its exit status.

    A rank that fails prints its own traceback, tells the launcher when, and is gone at once:
    closing its groups in order would wait for peers that wait for it. What all ranks refuse is one
    message and status 2; what ends them all, one message and status 1. After SIGTERM the step under
    way is the last, it is saved, and the status is that of the signal.
    """
    if RENDEZVOUS not in os.environ and signal.getsignal(signal.SIGINT) == signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    peers = Peers()
    try:
        stopped = record(_run)(options, peers)
    except KeyboardInterrupt:
        _say_how_to_resume(options)
        sys.stdout.flush()
        os._exit(128 + signal.SIGINT)
    except (Refused, *ENDS) as error:
        if RENDEZVOUS in os.environ or os.environ.get("RANK", "0") == "0":
            print(f"train: error: {error}", file=sys.stderr, flush=True)
        if isinstance(error, Refused):
            os._exit(USAGE_STATUS)
        _say_how_to_resume(options)
        if RENDEZVOUS in os.environ:
            note_failure(int(os.environ["RANK"]))
        sys.stdout.flush()
        os._exit(1)
    except BaseException as error:  # noqa: BLE001 - whatever it is, it ends this rank and is shown
        lost = peers.explain(error)
        if RENDEZVOUS in os.environ:
            note_failure(int(os.environ["RANK"]))
        if lost is None:
            traceback.print_exc()
        elif lost:
            print(f"train: error: {lost}", file=sys.stderr)
        _say_how_to_resume(options)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
    return STOPPED_STATUS if stopped else 0


def _say_how_to_resume(options: Options) -> None:
    """Say it on one rank, unless there is a launcher, which says it when all ranks have ended."""
    leads = RENDEZVOUS not in os.environ and os.environ.get("RANK", "0") == "0"
    if leads and (options.out_given or options.reference):  # else only the ranks know the folder
        print(how_to_resume(options), file=sys.stderr, flush=True)


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    try:
        yield
    except REFUSALS as error:
        raise Refused(str(error)) from error


class _Termination:
    """SIGTERM, which ranks hear at different times, agreed on after each step.

    Making one makes a process group, over which each `agreed` communicates two numbers: no group of
    the mesh has all ranks. From then on the signal ends this process no more: what is left after
    the last step, as the summary, is made.
    """

    def __init__(self, timeout: datetime.timedelta) -> None:
        self.heard = False  # by this rank
        self.stopped = False  # the run, by it, before its last step
        group = dist.new_group(timeout=timeout, backend="gloo") if dist.is_initialized() else None
        self._group = group
        signal.signal(signal.SIGTERM, self._hear)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self.heard = True

    def agreed(self, failed: bool) -> tuple[bool, bool]:
        """Return whether any rank has heard it, and whether any has ``failed``."""
        if self._group is None:
            return self.heard, failed
        found = torch.tensor([self.heard, failed], dtype=torch.int32)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self._group)
        return bool(found[0]), bool(found[1])

    def leave(self) -> None:
        """Drop the group, which nothing may hold when it is destroyed."""
        self._group = None


def _run(options: Options, peers: Peers) -> bool:
    """Return whether the run has been stopped before its last step."""
    device = _device(options)
    torch.set_num_threads(1)
    if device.type == "cpu":
        _share_processors()
    if options.reference:
        termination, report = _train_alone(options, device)
    else:
        termination, report = _train_together(options, device, peers)
    if report is not None:
        if options.compare and not termination.stopped:
            _follow_reference(options, report, termination)
        report.finish()
    return termination.stopped


def _share_processors() -> None:
    """Let no rank, and no thread of gloo in it, interrupt another because it has been woken up.

    Whoever sends a message holds the lock of its connection: interrupted by the reader, it keeps a
    thread of gloo busy with asking for that lock.
    """
    if hasattr(os, "SCHED_BATCH"):  # Linux
        with contextlib.suppress(OSError):  # not allowed here: slower
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _train_alone(options: Options, device: torch.device) -> tuple[_Termination, Report | None]:
    with _refusals():
        trainer = _reference(options, device)
        if options.resume is not None:
            load(trainer, options.resume)
    report = Report(options, trainer.step)
    termination = _train(trainer, options, report, None, Profiler(options.profile, options.out))
    report.totals(peak_memory(device), {})
    return termination, report


def _train_together(
    options: Options, device: torch.device, peers: Peers
) -> tuple[_Termination, Report | None]:
    """Train with the other ranks and leave them; the rank that leads returns the report so far."""
    timeout = max(GROUP_TIMEOUT, datetime.timedelta(seconds=options.comm_timeout))
    _join(options, peers, timeout)
    check_agreement(options)
    mesh = options.dims.build_mesh(device.type, timeout=timeout)
    if not options.out_given:  # every rank of a cluster must write to the same folder
        started = largest_of_ranks(int(time.time()), mesh, device)
        options = replace(options, out=default_out(started))
    check_shared(options.out)
    profiler = Profiler(options.profile, options.out)
    collectives = RecordingCollectives(profiler.collectives)
    with _refusals():
        trainer = _spread(options, mesh, device, collectives)
        if options.resume is not None:
            load(trainer, options.resume)
    report = _report_of_all(options, trainer.step)
    termination = _train(trainer, options, report, collectives, profiler, mesh)
    peak = largest_of_ranks(peak_memory(device), mesh, device)
    if report is not None:
        report.totals(peak, collectives.by_axis)
    # gloo aborts the interpreter's exit when a mesh or a graph still holds one of its groups.
    dist.barrier()
    del trainer
    gc.collect()
    mesh.close()
    del mesh
    gc.collect()
    dist.destroy_process_group()
    return termination, report


def _train(
    trainer: Trainer,
    options: Options,
    report: Report | None,
    collectives: RecordingCollectives | None,
    profiler: Profiler,
    mesh: ParallelMesh | None = None,
) -> _Termination:
    """Train up to the last step, or to SIGTERM, and save; ``report`` is told about each step."""
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
        if mesh is not None and trainer.step == first + 1:
            set_timeout(mesh, options.comm_timeout)  # compilers work in the first step
            if trainer.pipeline is not None:
                trainer.pipeline.set_timeout(mesh, options.comm_timeout)
        profiler.after(trainer.step)
        moved = _difference({} if collectives is None else collectives.by_axis, before)
        if options.eval_every and (
            trainer.step % options.eval_every == 0 or trainer.step == options.steps
        ):
            result = replace(result, eval_loss=trainer.evaluate(data))
        before = {} if collectives is None else collectives.by_axis
        if report is not None:
            try:
                report.step(result, peak_memory(trainer.device), moved)
            except WriteError as error:  # after this step, all ranks end with it
                checkpoints.fail(str(error))
        heard, failed = termination.agreed(checkpoints.poll())
        if failed:
            checkpoints.finish()
        due = options.checkpoint_every and trainer.step % options.checkpoint_every == 0
        if due and not trainer.skipped:  # what gives no finite gradients replaces no checkpoint
            checkpoints.start(trainer)
            saved = trainer.step
        termination.stopped = heard and trainer.step < options.steps
    profiler.close()
    if saved != trainer.step:
        checkpoints.start(trainer)
    checkpoints.finish()
    termination.leave()
    return termination


def _follow_reference(options: Options, report: Report, termination: _Termination) -> None:
    """Make the first steps again in this process alone, for the report to compare, to SIGTERM."""
    trainer = _reference(options, _device(options))
    data = _samples(options)
    while trainer.step < min(options.steps, options.compare) and not termination.heard:
        report.reference_step(trainer.train_step(data))


def _samples(options: Options) -> Samples:
    corpus = read_corpus(options.source)
    train, vocab_size = options.train, options.model.vocab_size
    held_out = options.eval_every is not None
    return Samples(
        corpus.parts, train.seq_len, train.seed, held_out=held_out, vocab_size=vocab_size
    )


def _build(options: Options, device: torch.device) -> nn.Module:
    """Return the whole model with the run's initial values, in the dtype that it is kept in."""
    kept, _ = _dtypes(options)
    config, train = options.model, options.train
    if isinstance(config, TransformersConfig):
        return build_transformers(config, train.seed, kept, device, train.accumulate)
    # Each part of a batch adds the loss of its own loads: their mean is the batch's.
    coefficient = config.router_aux_loss_coef / train.accumulate
    return build_model(replace(config, router_aux_loss_coef=coefficient), train.seed, kept, device)


def _dtypes(options: Options) -> tuple[torch.dtype, torch.dtype | None]:
    """Return the dtype that weights are kept in and, where it is another, the one to compute in."""
    if options.dtype == "bfloat16":
        return torch.float32, torch.bfloat16
    return getattr(torch, options.dtype), None


def _spread(
    options: Options, mesh: ParallelMesh, device: torch.device, collectives: Collectives
) -> Trainer:
    """Return the trainer of the model on all ranks of the mesh."""
    model, pipeline = _build(options, device), None
    kept, computed = _dtypes(options)
    spread = partial(
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
            spread=spread,
            dtype=computed or kept,
            device=device,
        )
    else:
        forward = spread(model)
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
    return Trainer(
        _build(options, device),
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
    """Raise `Refused` on all ranks unless they run the same, from the same step on the same text.

    Each read its own command line, checkpoint and data, which differ where nodes do.
    """
    own = {name: str(value) for name, value in options.shared_values.items()}
    found: list[dict[str, str]] = [{}] * options.world_size
    dist.all_gather_object(found, own)
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


def _report_of_all(options: Options, done: int) -> Report | None:
    """Return the report on rank 0; raise on all ranks if it could not be begun there."""
    report, said = None, [""]
    if dist.get_rank() == 0:
        try:
            report = Report(options, done)
        except WriteError as error:
            said = [str(error)]
    dist.broadcast_object_list(said)
    if said[0]:
        raise WriteError(said[0])
    return report


def check_shared(out: Path) -> None:
    """Raise `Refused` on all ranks unless each sees in ``out`` the file that rank 0 writes there.

    Checkpoints have a file of each rank, which nodes may otherwise write to disks of their own.
    """
    said: list[str | None] = [None, None]  # the file and its folder, or why there is none
    if dist.get_rank() == 0:
        try:
            out.mkdir(parents=True, exist_ok=True)
            descriptor, name = tempfile.mkstemp(prefix=".shared-", dir=out)
            os.close(descriptor)
            said = [os.path.basename(name), os.path.abspath(out)]
        except OSError as error:
            said = [None, f"out={out} is no folder that can be written: {error.strerror}"]
    dist.broadcast_object_list(said)
    if said[0] is None:
        raise Refused(f"{said[1]}; give another")
    where = None if _appears(out / said[0]) else f"({platform.node()}: {os.path.abspath(out)})"
    found: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(found, where)
    if dist.get_rank() == 0:
        (out / said[0]).unlink(missing_ok=True)
    lacking = [f"rank {rank} {each}" for rank, each in enumerate(found) if each is not None]
    if lacking:
        raise Refused(
            f"out={said[1]} of rank 0 is not seen by {', '.join(lacking)}; give all nodes one "
            "shared folder, by its absolute path"
        )


def _appears(path: Path) -> bool:
    """Return whether a file is there, or soon: a file system of a network may show it late."""
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
