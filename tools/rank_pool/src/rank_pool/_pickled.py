"""Pickle functions by value, with the names of their files.

cloudpickle 3.1.3 replaces the name of a function's file by a placeholder. An error on a rank would
then not name the test's file, and `torch.compile` of torch 2.11 would trace a wrapper of the
function, which imports the test's module by a name that ranks do not know.
"""

import io
from collections import ChainMap
from types import CodeType
from typing import Any

import cloudpickle

PLACEHOLDER = "<dynamic-code>"
_Base: Any = cloudpickle.CloudPickler


def dumps(value: object) -> bytes:
    """Do what ``cloudpickle.dumps`` does, and keep the names of files."""
    with io.BytesIO() as out:
        _Pickler(out).dump(value)
        return out.getvalue()


def _reduced(code: CodeType) -> tuple[Any, ...]:
    make, given = _Base.dispatch_table[CodeType](code)
    return make, tuple(code.co_filename if each == PLACEHOLDER else each for each in given)


class _Pickler(_Base):  # type: ignore[misc]
    dispatch_table = ChainMap({CodeType: _reduced}, _Base.dispatch_table)  # noqa: RUF012
