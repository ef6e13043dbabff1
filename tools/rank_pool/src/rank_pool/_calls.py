"""Record the Python calls of an operation, to test how many calls and modules it needs."""

import sys
from collections.abc import Callable, Sequence
from itertools import groupby
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")


def profile(call: Callable[[], T], record: Callable[[FrameType, str, Any], object]) -> T:
    """Run a function under ``sys.setprofile``.

    A lambda adds one call of its own to the record. A ``functools.partial`` adds none.

    Args:
        call: Function without arguments.
        record: Profile function. It gets the frame, the event (``"call"``, ``"c_call"``,
            ``"return"``, ...) and the argument of the event. The last event is the ``"c_call"``
            that removes the profile function.

    Returns:
        The result of ``call``.
    """
    sys.setprofile(record)
    try:
        return call()
    finally:
        sys.setprofile(None)


def modules_called(call: Callable[[], object], package: str) -> list[str]:
    """Return the module of each Python call that a function makes in a package.

    Calls of the package's ``__init__`` module and of functions in C are not recorded.

    Args:
        call: Function without arguments.
        package: Import name of the package, such as ``"hp_fsdp"``.

    Returns:
        Module names relative to the package, one per call, in the order of the calls.

    Example:
        >>> modules_called(lambda: redistribute(x, placements), "hp_dtensor")
        ['_redistribute', '_run', '_prepare', '_execute']
    """
    modules: list[str] = []

    def record(frame: FrameType, event: str, _: object) -> None:
        name = frame.f_globals.get("__name__", "")
        if event == "call" and name.startswith(f"{package}."):
            modules.append(name.removeprefix(f"{package}."))

    profile(call, record)
    return modules


def count_returns(modules: Sequence[str]) -> int:
    """Return how often the calls come back to a module that they entered earlier.

    Args:
        modules: Module of each call, as `modules_called` returns them.

    Returns:
        The number of changes to an earlier module.

    Example:
        >>> count_returns(["_run", "_plan", "_plan", "_run", "_plan"])
        2
    """
    route = [name for name, _ in groupby(modules)]
    return len(route) - len({*route})


def count_upward_calls(call: Callable[[], object], package: str) -> int:
    """Return how often a call enters a module that is already active further up the call stack.

    A call from a module to itself does not count. If calls only go down the layers of a package,
    the result is 0.

    Args:
        call: Function without arguments.
        package: Import name of the package, such as ``"hp_fsdp"``.

    Returns:
        The number of calls that go back up.

    Example:
        >>> count_upward_calls(lambda: redistribute(x, placements), "hp_dtensor")
        0
    """
    active: list[str] = []  # modules of the frames on the stack, "" for other packages
    found = 0

    def record(frame: FrameType, event: str, _: object) -> None:
        nonlocal found
        if event == "call":
            name = frame.f_globals.get("__name__", "")
            module = name if name.startswith(f"{package}.") else ""
            callers = [each for each in active if each]
            found += bool(module and module in callers and callers[-1] != module)
            active.append(module)
        elif event == "return" and active:
            active.pop()

    profile(call, record)
    return found
