"""Tensor classes with all-gather extensions: bfloat16, eight bits with scales, plain values."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

# Operators of torch's fully_shard and DTensor whose results must keep the class.
KEPT = {
    "aten.detach.default",
    "aten.new_zeros.default",
    "aten.slice.Tensor",
    "aten.split.Tensor",
    "aten.view.default",
    "aten.as_strided.default",
    "aten.empty_like.default",
    "aten._to_copy.default",
}


class Wrapped(Tensor):
    """Plain values, a record of the hook calls, and a switch that makes a hook raise."""

    plain: Tensor
    notes: list[str]

    @staticmethod
    def __new__(cls, plain: Tensor, notes: list[str] | None = None) -> "Wrapped":
        """Return a tensor with the metadata of ``plain``."""
        made: Wrapped = Tensor._make_wrapper_subclass(
            cls,
            plain.shape,
            strides=plain.stride(),
            dtype=plain.dtype,
            device=plain.device,
            requires_grad=plain.requires_grad,
        )
        return made

    def __init__(self, plain: Tensor, notes: list[str] | None = None) -> None:
        """Store ``plain``. Copies and slices share the list ``notes``."""
        self.plain = plain
        self.notes = [] if notes is None else notes

    def __repr__(self) -> str:  # type: ignore[override]
        """Return the name of the class and the plain values."""
        return f"{type(self).__name__}({self.plain})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Compute with plain values; keep the class for the operators in ``KEPT``."""
        notes: list[list[str]] = []

        def unwrap(wrapped: Wrapped) -> Tensor:
            notes.append(wrapped.notes)
            return wrapped.plain

        plain_args, plain_kwargs = tree_map_only(Wrapped, unwrap, (args, kwargs or {}))
        out = func(*plain_args, **plain_kwargs)
        if str(func) in KEPT:
            return tree_map_only(Tensor, lambda tensor: cls(tensor, notes[0]), out)
        if func._schema.is_mutable and isinstance(args[0], Wrapped):
            return args[0]
        return out

    def write(self, out: Tensor, values: Tensor) -> None:
        """Write without autograd, as torch's `fully_shard` requires."""
        out.data.copy_(values)

    def note(self, what: str) -> None:
        """Record a call. Raise if the test requested a failure of this call."""
        self.notes.append(what)
        if f"fail {what}" in self.notes:
            self.notes.remove(f"fail {what}")
            raise ArithmeticError(what)


class Restored(Wrapped):
    """A class whose post-all-gather hook creates the unsharded values or writes them to `out`."""

    def restored(
        self, outputs: Sequence[Tensor], metadata: Any, dtype: torch.dtype
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the unsharded values in ``dtype``, and the tensors that hold memory for them."""
        raise NotImplementedError

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: Sequence[Tensor],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """Return the unsharded values and the tensors to free, or write the values to ``out``."""
        self.note("post" if out is None else "post out")
        whole, inner = self.restored(all_gather_outputs, metadata, param_dtype)
        if out is None:
            return whole, inner
        self.write(out, whole)
        return None


class Halved(Restored):
    """Gathers bfloat16 and pads uneven rows. Its hook takes all five arguments."""

    padded = True

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        """Return the rows in bfloat16, padded with zeros."""
        self.note(f"pre over {mesh.size()} of {mesh.ndim}-D, {type(module).__name__}")
        rows = -(-outer_size[0] // mesh.size()) if self.padded else len(self.plain)
        half = torch.zeros(rows, *outer_size[1:], dtype=torch.bfloat16)
        half[: len(self.plain)] = self.plain
        return (half,), (tuple(outer_size), tuple(outer_stride), mp_policy.param_dtype)

    def restored(
        self, outputs: Sequence[Tensor], metadata: Any, dtype: torch.dtype
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the rows without padding."""
        (half,) = outputs
        whole = half[: metadata[0][0]].to(dtype, copy=True)
        return whole, (half, whole)


class EightBits(Restored):
    """Gathers int8 values and one scale per rank. Its hook takes only the mesh."""

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[Tensor, ...], Any]:
        """Return values and a scale."""
        self.note(f"pre over {mesh.size()} of {mesh.ndim}-D")
        scale = self.plain.abs().max() / 127
        return ((self.plain / scale).round().to(torch.int8), scale), "eight bits"

    def restored(
        self, outputs: Sequence[Tensor], metadata: Any, dtype: torch.dtype
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the values multiplied by the scale of their rank."""
        if metadata != "eight bits":
            raise AssertionError(metadata)
        values, scales = outputs
        by_rank = values.view(len(scales), -1).to(dtype) * scales[:, None].to(dtype)
        whole = by_rank.view(values.shape)
        return whole, (whole,)


class Blocks(Restored):
    """Gathers int8 values and one scale for each block of four rows."""

    ROWS = 4

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[Tensor, ...], Any]:
        """Return the values and the scales of this rank's blocks. A rank can have no blocks."""
        self.note(f"pre of {len(self.plain)} rows")
        return quantized(self.plain), None

    def restored(
        self, outputs: Sequence[Tensor], metadata: Any, dtype: torch.dtype
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the values multiplied by the scale of their block."""
        whole = dequantized(*outputs).to(dtype)
        return whole, (whole,)


def quantized(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return int8 values and one scale for each block of four rows."""
    blocks = rows.split(Blocks.ROWS) if len(rows) else ()
    scales = torch.tensor([block.abs().max().item() / 127 for block in blocks])
    return (rows / spread(scales, rows)).round().to(torch.int8), scales


def dequantized(values: Tensor, scales: Tensor) -> Tensor:
    """Return the values multiplied by the scales of their blocks."""
    return values * spread(scales, values)


def spread(scales: Tensor, rows: Tensor) -> Tensor:
    """Return the scale of each row, as a column."""
    return scales.repeat_interleave(Blocks.ROWS)[: len(rows), None]


def elements_of_block(parameter: Tensor) -> int:
    """Return the number of elements of a block of four rows, for ``granularity``."""
    return Blocks.ROWS * math.prod(parameter.shape[1:])


class Whole(Wrapped):
    """Gathers plain values. Modules compute with this class over the gathered values."""

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[Tensor, ...], Any]:
        """Return the rows."""
        return (self.plain,), None

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: Sequence[Tensor],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """Wrap the gathered values. Later gathers must use the same memory."""
        self.note("post" if out is None else "post out")
        (values,) = all_gather_outputs
        if out is None:
            return Whole(values), (values,)
        if not isinstance(out, Whole) or out.plain.data_ptr() != values.data_ptr():
            raise AssertionError("gathered elsewhere")
        return None


def rounded(kind: type[Wrapped], whole: Tensor, degree: int) -> Tensor:
    """Return the unsharded values after ``degree`` ranks gathered the rows of ``whole``."""
    if issubclass(kind, Halved):
        return whole.to(torch.bfloat16).to(whole.dtype)
    if issubclass(kind, Whole):
        return whole
    if kind is Blocks:
        return dequantized(*quantized(whole))
    parts = [part / part.abs().max() * 127 for part in whole.chunk(degree)]
    scales = [part.abs().max() / 127 for part in whole.chunk(degree)]
    return torch.cat([part.round() * scale for part, scale in zip(parts, scales, strict=True)])


class Layers(nn.Module):
    """Two linear layers with a bias. Their weights have all-gather extensions."""

    def __init__(self, kind: type[Wrapped] | None, hidden: int = 12) -> None:
        super().__init__()
        self.up = nn.Linear(8, hidden)
        self.down = nn.Linear(hidden, 8)
        if kind is not None:
            self.up.weight = nn.Parameter(kind(self.up.weight.detach()))
            self.down.weight = nn.Parameter(kind(self.down.weight.detach()))

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the same shape as ``x``."""
        out: Tensor = self.down(torch.tanh(self.up(x)))
        return out
