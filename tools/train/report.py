"""The output of a run: progress lines, log, summary and loss curves."""

import contextlib
import datetime
import errno
import itertools
import json
import math
import os
import statistics
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TextIO

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .accelerators import peak_flops
from .checkpoint import WriteError, free_mebibytes
from .loop import StepResult
from .options import Options, counted, name_degrees
from .plot import largest_difference, plot_losses
from .run_folder import CHECKPOINT, LOG_FILE, SUMMARY_FILE, last_step, log_records

Counts = tuple[int, int]  # calls, bytes received
SECONDS_BETWEEN_LINES = 10.0  # on a terminal, of lines that are not overwritten
STEPS_OF_PACE = 100  # latest steps from which the remaining time is estimated


class Report:
    """The report of a run on rank 0. Writes the log step by step, all other files at `finish`.

    A run that continues in its folder appends to the log. Bytes and calls are counted on
    this rank: the payload that it has received through the collectives of the packages.

    Args:
        options: The run. Files are written to ``options.out``.
        done: Number of steps before this run.
    """

    def __init__(self, options: Options, done: int = 0) -> None:
        self._options = options
        self._console = Console(highlight=False, soft_wrap=True)
        self._logged: list[dict[str, Any]] = []  # records of the log from before this run
        self._losses: dict[int, float] = {}  # by step, of the whole run if it continues in place
        self._held_out: dict[int, float] = {}
        self._speeds: list[float] = []
        self._step = done
        self._ends: deque[float] = deque(maxlen=STEPS_OF_PACE)  # times of the latest steps
        self._reference: dict[int, float] = {}
        self._peak_memory = 0
        self._traffic: Mapping[str, Counts] = {}
        shape = options.model.shape
        self._flops = None if shape is None else shape.flops_per_token(options.train.seq_len)
        self._peak = peak_flops(options.dtype) if options.device == "cuda" else None
        with _file_errors(f"no log was started in {options.out}", options.out):
            options.out.mkdir(parents=True, exist_ok=True)
            self._log = self._open_log(options.out / LOG_FILE, done)
        self._live = self._console.status("") if self._console.is_terminal else None
        self._shown_at = -math.inf
        start = f"resuming from step {done} of {options.resume}: " if options.resume else ""
        if options.steps > done:
            start += f"training {counted(options.steps - done, 'step')}"
        else:
            start += f"all {counted(done, 'step')} are made, summary and curves are not; steps"
        tokens = options.train.batch_size * options.train.seq_len
        processes = "process" if options.world_size == 1 else "processes"
        self._print(
            f"{start} of {tokens:,} {options.unit}s in {options.dtype} on {options.world_size} "
            f"{options.device} {processes}: {options.dims.summary()}"
        )
        self._print(f"writing to {escape(str(options.out))}")
        self._board: Any = None
        try:
            self._board = _board(options.out, done)
        except OSError as error:
            self._lose_board(error)

    def step(self, result: StepResult, peak_memory: int, traffic: Mapping[str, Counts]) -> None:
        """Show and log one step, with this rank's traffic of the step by axis.

        Raises:
            WriteError: It was not written to the log.
        """
        speed, last = result.tokens / result.seconds, result.step == self._options.steps
        self._speeds.append(speed)
        self._note(result.step, result.loss, result.eval_loss)
        self._ends.append(time.monotonic())
        record = {
            **asdict(result),
            **self._rates(speed),
            "peak_memory_bytes": peak_memory,
            "bytes_by_axis": _plain(traffic),
        }
        self._write({name: _or_none(value) for name, value in record.items()})
        self._add_events(record)
        # The pace includes evaluation and waiting for checkpoints, which are not part of a step.
        paces = len(self._ends) - 1
        pace = (self._ends[-1] - self._ends[0]) / paces if paces else result.seconds
        left = datetime.timedelta(seconds=round((self._options.steps - result.step) * pace))
        flops, mfu = record["model_flops_per_second"], record["mfu"]
        moved = "  ".join(f"{axis} {_size(count)}" for axis, (_, count) in sorted(traffic.items()))
        parts = [
            f"{self._count(result.step)}  [bold]loss {result.loss:.4f}[/]",
            "" if result.eval_loss is None else f"held-out loss {result.eval_loss:.4f}",
            "" if math.isfinite(result.grad_norm) else "[bold]no update: not finite[/]",
            f"{left} left  {speed:,.0f} tokens/s",
            "" if flops is None else f"{_size(flops, 'FLOP')}/s",
            "" if mfu is None else f"MFU {mfu:.1%}",
            f"peak {_size(peak_memory)}",
            f"[dim]moved {moved}[/]" if moved else "",
        ]
        special = result.eval_loss is not None or not math.isfinite(result.grad_norm)
        self._progress("  ".join(filter(None, parts)), keep=special or last)

    def _rates(self, tokens_per_second: float) -> dict[str, float | None]:
        """Return speed, FLOP/s of the model, and its share of the peak of the accelerators (MFU).

        Recomputed operations do not count (Chowdhery et al., PaLM, arXiv 2204.02311, appendix B).
        """
        flops = None if self._flops is None else tokens_per_second * self._flops
        peak = None if self._peak is None else self._peak * self._options.world_size
        return {
            "tokens_per_second": tokens_per_second,
            "model_flops_per_second": flops,
            "mfu": None if flops is None or peak is None else flops / peak,
        }

    def _write(self, record: Mapping[str, Any]) -> None:
        path = self._options.out / LOG_FILE
        with _file_errors(f"step {record['step']} was not written to {path}", path):
            self._log.write(json.dumps(record) + "\n")
            self._log.flush()
            if not os.fstat(self._log.fileno()).st_nlink:
                raise OSError(errno.ENOENT, "the file has been removed")

    def _add_events(self, record: Mapping[str, Any]) -> None:
        """Write the numbers of a step for TensorBoard; continue without it if that fails."""
        if self._board is None:
            return
        try:
            for name in ("loss", "eval_loss", "grad_norm", "learning_rate", "tokens_per_second"):
                if record[name] is not None:
                    self._board.add_scalar(name, record[name], record["step"])
        except OSError as error:
            self._lose_board(error)

    def _lose_board(self, error: OSError) -> None:
        self._board = None
        self._print(f"no more events for TensorBoard: {escape(str(error))}")

    def reference_step(self, result: StepResult) -> None:
        """Keep one loss of the single-process reference; show some of them."""
        last = min(self._options.steps, self._options.compare)
        if result.step == 1:
            self._print(f"the same {counted(last, 'step')} on one process, as the reference:")
        self._reference[result.step] = result.loss
        if result.step % 10 == 0 or result.step == last:
            self._print(f"{self._count(result.step)}  reference loss {result.loss:.4f}")

    def totals(self, peak_memory: int, traffic: Mapping[str, Counts]) -> None:
        """Take the largest peak memory of all ranks, and this rank's traffic of the run."""
        self._peak_memory = peak_memory
        self._traffic = dict(traffic)

    def finish(self) -> None:
        """Draw the curves if possible, write the summary and show it."""
        with contextlib.suppress(OSError):  # all records have been flushed
            self._log.close()
        if self._live is not None:
            self._live.stop()
        try:
            if self._board is not None:
                self._board.close()
        except OSError as error:
            self._lose_board(error)
        options, out = self._options, self._options.out
        if not self._speeds:
            self._take_from_log()
        losses = list(self._losses.values())
        difference = largest_difference(self._losses, self._reference)
        summary = {
            "steps": self._step,
            "first_loss": _or_none(losses[0]),
            "final_loss": _or_none(losses[-1]),
            "reference_max_rel_diff": None if difference is None else difference.relative,
            **self._rates(statistics.median(self._speeds)),
            "peak_memory_bytes": self._peak_memory,
            "dims": options.dims.to_dict(),
            "world_size": options.world_size,
            "torch": torch.__version__,
            "bytes_by_axis": _plain(self._traffic),
            "checkpoint": str(out / CHECKPOINT),
        }
        curves = self._draw()
        # The last file: a run that has it is complete.
        partial = out / (SUMMARY_FILE + ".partial")
        with _file_errors(f"{out / SUMMARY_FILE} was not written", out):
            partial.write_text(json.dumps(summary, indent=1) + "\n")
            os.replace(partial, out / SUMMARY_FILE)
        self._show(summary, curves)

    def _take_from_log(self) -> None:
        """Take speed, memory and traffic from the log if this run has made no step itself."""
        self._speeds = [float(each.get("tokens_per_second") or 0) for each in self._logged] or [0.0]
        peaks = [int(each.get("peak_memory_bytes") or 0) for each in self._logged]
        self._peak_memory = max(peaks, default=self._peak_memory)
        totals: dict[str, Counts] = {}
        for each in self._logged:
            for axis, moved in (each.get("bytes_by_axis") or {}).items():
                calls, received = totals.get(axis, (0, 0))
                totals[axis] = (calls + moved["calls"], received + moved["bytes"])
        self._traffic = totals
        self._losses = self._losses or {self._step: math.nan}

    def _draw(self) -> str:
        """Draw the curves and return their paths, or the reason why there are none, in one line."""
        options, out = self._options, self._options.out
        title = name_degrees(options.dims.to_dict())
        try:
            plot_losses(self._losses, self._reference, title, out, options.unit, self._held_out)
        except Exception as error:  # noqa: BLE001 - the run is complete and saved without curves
            reason = escape(" ".join(f"{type(error).__name__}: {error}".split()))
            missing = isinstance(error, ImportError)
            return f"not drawn: {reason}" + ("; pip install matplotlib" if missing else "")
        return f"{out}/loss.png, loss.svg"

    def _show(self, summary: Mapping[str, Any], curves: str) -> None:
        options, losses = self._options, list(self._losses.values())
        first, final = losses[0], losses[-1]
        rows = [("loss", f"{first:.4f} -> {final:.4f} ({final / first - 1:+.1%})")]
        if self._held_out:
            rows.append(("held-out loss", f"{list(self._held_out.values())[-1]:.4f}"))
        if self._step < options.steps:
            rows.append(("stopped", f"by SIGTERM after step {self._step}, and saved"))
        if (difference := summary["reference_max_rel_diff"]) is not None:
            rows.append(("largest difference", f"{difference:.1e} relative to one process"))
        made, asked = len(self._reference), min(options.steps, options.compare)
        if made < asked and self._step == options.steps:
            rows.append(("compared", f"{made} of {counted(asked, 'step')}, then SIGTERM"))
        rows += [
            ("speed", f"{summary['tokens_per_second']:,.0f} tokens/s (median step)"),
            ("peak memory", f"{_size(self._peak_memory)} (largest rank)"),
        ]
        for axis, (calls, received) in sorted(self._traffic.items()):
            moved = f"{_size(received)} in {counted(calls, 'call')} (rank 0 received)"
            rows.append((f"moved over {axis}", moved))
        if options.dims.tp > 1:
            rows.append(("not counted", "traffic of torch's tensor parallel styles over tp"))
        if options.dims.pp > 1:
            rows.append(("not counted", "traffic of torch's pipelines between stages"))
        rows += [("checkpoint", summary["checkpoint"]), ("curves", curves)]
        rows += [("log, summary", f"{options.out}/{LOG_FILE}, {SUMMARY_FILE}")]
        if not self._console.is_terminal:
            for name, value in rows:
                self._print(f"{name:25}{value}")
            return
        table = Table(show_header=False, title="run finished", title_justify="left")
        for name, value in rows:
            table.add_row(f"[bold]{name}[/]", value)
        self._console.print(table)

    def _open_log(self, path: Path, done: int) -> TextIO:
        """Return the open log. If the run continues in place, it has the steps up to ``done``.

        Later steps were not saved and are repeated. If this is interrupted, the old log remains.
        """
        records = []
        if self._options.resumes_in_place:
            records = [each for each in log_records(path) if each[1]["step"] <= done]
            self._report_missing(path, {record["step"] for _, record in records}, done)
        else:
            self._set_aside(path)
        new = path.with_name(path.name + ".partial")
        with new.open("w") as file:
            for line, record in records:
                file.write(line)
                self._logged.append(record)
                self._note(record["step"], record.get("loss"), record.get("eval_loss"))
        os.replace(new, path)
        return path.open("a")

    def _report_missing(self, path: Path, logged: set[int], done: int) -> None:
        """Print how many steps the log lacks.

        The log of a run that started from another run's checkpoint begins at a later step.
        """
        missing = [step for step in range(min(logged, default=1), done + 1) if step not in logged]
        if missing:
            self._print(
                f"{path} lacks {counted(len(missing), 'step')} before step {done + 1}, the first "
                f"is {missing[0]}; curves and summary lack them too"
            )

    def _set_aside(self, path: Path) -> None:
        """Rename the log of a run that ended before its first checkpoint."""
        last = last_step(path)
        if not last:
            return
        names = (path.with_name(f"log.{number}.jsonl") for number in itertools.count(1))
        aside = next(name for name in names if not name.exists())
        os.rename(path, aside)
        self._print(
            f"a run in this folder ended after step {last}, before its first checkpoint; this one "
            f"starts at step 1, and the other's log is {aside}"
        )

    def _note(self, step: int, loss: float | None, held_out: float | None) -> None:
        self._step = step
        self._losses[step] = math.nan if loss is None else loss
        if held_out is not None:
            self._held_out[step] = held_out

    def _progress(self, text: str, *, keep: bool) -> None:
        """Show a line. On a terminal the next one overwrites it, unless ``keep`` is true."""
        if self._live is None:
            self._print(text)
            return
        self._live.update(text)
        self._live.start()
        if keep or time.monotonic() - self._shown_at > SECONDS_BETWEEN_LINES:
            self._shown_at = time.monotonic()
            self._print(text)
        if self._step == self._options.steps:
            self._live.stop()

    def _print(self, text: str) -> None:
        self._console.print(text)
        self._console.file.flush()

    def _count(self, step: int) -> str:
        steps = str(self._options.steps)
        return f"step {step:{len(steps)}}/{steps}"


def _plain(traffic: Mapping[str, Counts]) -> dict[str, dict[str, int]]:
    items = sorted(traffic.items())
    return {axis: {"calls": calls, "bytes": received} for axis, (calls, received) in items}


def _size(count: float, unit: str = "B") -> str:
    for prefix in ("", "k", "M", "G"):
        if count < 1000:
            digits = {"": 0, "G": 2}.get(prefix, 1)
            return f"{count:.{digits}f} {prefix}{unit}"
        count /= 1000
    return f"{count:.2f} T{unit}"


def _or_none(value: Any) -> Any:
    """Replace numbers that JSON does not have by None."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextlib.contextmanager
def _file_errors(message: str, path: Path) -> Iterator[None]:
    """Raise `WriteError` with a message, the reason and the free space for an OSError."""
    try:
        yield
    except OSError as error:
        raise WriteError(
            f"{message} ({error.strerror or error}), where {free_mebibytes(path):,} MiB are free"
        ) from None


def _board(folder: Path, done: int) -> Any:
    """Return a writer of TensorBoard events, None if it is not installed.

    TensorBoard drops earlier events of steps after ``done``, which are repeated.
    """
    if find_spec("tensorboard") is None:
        return None
    show = threading.excepthook

    def show_others(found: threading.ExceptHookArgs) -> None:
        # The writing thread keeps its error for the next call, and also raises it.
        writer = type(found.thread).__module__.startswith("tensorboard.")
        if not (writer and issubclass(found.exc_type, OSError)):
            show(found)

    threading.excepthook = show_others
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder), purge_step=done + 1)
