"""Calls between modules from the degrees to a mesh, as the page *inside* states them."""

from pathlib import Path
from types import FrameType
from typing import Any

from rank_pool import profile

from hp_mesh import ParallelDims, _mesh

from .fakes import fake_world

ROOT = Path(_mesh.__file__).parent
UTILITIES = {"_errors", "_torch"}
MODULES = ["_dims", "_degrees", "_rules", "_mesh", "_layout", "_groups"]
# Calls into a module that was entered earlier: the world size is known when the mesh is built.
AGAIN = {
    ("_mesh", "_dims"),
    ("_dims", "_degrees"),
    ("_degrees", "_rules"),
    ("_mesh", "_layout"),
}


def module_of(frame: FrameType | None) -> str | None:
    """Return the module of hp-mesh that a frame runs or was called by, without utilities."""
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(ROOT) and path.stem not in UTILITIES:
            return path.stem
        frame = frame.f_back
    return None


def test_calls_go_down_the_modules() -> None:
    entered: list[str] = []
    again: list[tuple[str, str, str]] = []

    def note(frame: FrameType, event: str, argument: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event != "call" or not path.is_relative_to(ROOT) or path.stem in UTILITIES:
            return
        caller = module_of(frame.f_back)
        if path.stem not in entered:
            entered.append(path.stem)
        elif caller is not None and caller != path.stem:
            again.append((caller, path.stem, frame.f_code.co_name))

    with fake_world(16):
        profile(lambda: ParallelDims(tp=2, ep=4).build_mesh()["fsdp"], note)
    assert entered == MODULES
    assert {(caller, callee) for caller, callee, _ in again} == AGAIN
    assert len(set(again)) == len(AGAIN)
