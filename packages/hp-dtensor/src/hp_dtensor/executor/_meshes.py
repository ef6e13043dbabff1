"""Numbers that stand for meshes in what is kept between calls, which must not keep them alive."""

import weakref
from itertools import count

from torch.distributed.device_mesh import DeviceMesh

_numbers: dict[int, int] = {}  # by id, of those that live
_meshes: weakref.WeakValueDictionary[int, DeviceMesh] = weakref.WeakValueDictionary()
_next = count(1)


def number_of(mesh: DeviceMesh) -> int:
    """Return the mesh's number, which no other mesh has had or will have in this process.

    Equal meshes may have different groups, so that each has its own.
    """
    number = _numbers.get(id(mesh))
    if number is None:
        number = _numbers[id(mesh)] = next(_next)
        _meshes[number] = mesh
        weakref.finalize(mesh, _numbers.pop, id(mesh), None).atexit = False
    return number


def mesh_of(number: int) -> DeviceMesh:
    """Return the mesh of a number that `number_of` gave."""
    return _meshes[number]
