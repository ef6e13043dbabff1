"""Run nox sessions side by side and say how each ended.

    python tools/checks.py lint "tests(hp-mesh)" "build wheel"

Each word is a job: one session, or several that run one after the other. One job more runs at once
than this process may use processors, four at most, because tests also wait; start the longest
first. What a job prints appears when it ends, whole. The exit status is 1 if a job failed; the
others run to their end.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass

MOST_AT_ONCE = 4  # a test session has up to nine processes, each with torch in its memory


@dataclass(frozen=True, slots=True)
class Job:
    """A command and the name it goes by."""

    name: str
    command: Sequence[str]


@dataclass(frozen=True, slots=True)
class Ended:
    """How a job ended, after how many seconds, and what it printed."""

    name: str
    status: int
    seconds: float
    printed: str


def nox_job(sessions: str) -> Job:
    """Return the job that runs nox sessions, named with spaces between, in this interpreter."""
    command = [sys.executable, "-m", "nox", "--script-mode", "none", "-s", *sessions.split()]
    return Job(sessions, command)


def run_jobs(jobs: Sequence[Job], at_once: int) -> Iterator[Ended]:
    """Run jobs, ``at_once`` at a time, in their order; give each as it ends."""
    threads = ThreadPoolExecutor(at_once)
    try:
        for done in as_completed([threads.submit(_run, job) for job in jobs]):
            yield done.result()
    finally:  # after Ctrl-C, which those that run get too, no further job starts
        threads.shutdown(cancel_futures=True)


def _run(job: Job) -> Ended:
    sys.stdout.write(f"started {job.name}\n")  # at once: other threads write too
    sys.stdout.flush()
    start = time.monotonic()
    done = subprocess.run(
        job.command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    return Ended(job.name, done.returncode, time.monotonic() - start, done.stdout)


def _processors() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def main(sessions: Sequence[str]) -> int:
    """Run the jobs of the command line; return 1 if one failed."""
    at_once = min(_processors() + 1, MOST_AT_ONCE)
    start = time.monotonic()
    ended = []
    for job in run_jobs([nox_job(words) for words in sessions], at_once):
        print(f"\n=== {job.name}\n{job.printed}", flush=True)
        ended.append(job)
    print(f"=== {len(ended)} jobs, {at_once} at a time, {time.monotonic() - start:.0f} s")
    for job in ended:
        print(f"{'failed' if job.status else 'passed'} {job.seconds:5.0f} s  {job.name}")
    return int(any(job.status for job in ended))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
