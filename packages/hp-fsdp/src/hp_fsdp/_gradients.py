"""Gradients packed for a reduction as autograd has them, instead of once at the end."""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from hp_dtensor import Collectives

from ._errors import StateError
from ._offsets import GradientRows, ShardSpec
from ._param import ShardedParameter
from ._torch import accumulates, inside_forward_ad, inside_transform


class GradientBucket:
    """Rows ``[degree, width]`` that gradients are added to one after another.

    The first of a parameter overwrites what was there; what no gradient reached becomes zero at
    the end.
    """

    def __init__(self, rows: GradientRows, flat: Tensor) -> None:
        """Write into ``flat``, whose contents are arbitrary."""
        self._rows = rows
        self._flat = flat
        self.written = [False] * len(rows.extents)  # which gradients came

    def add(self, index: int, gradient: Tensor) -> None:
        """Add the gradient of the parameter at ``index``: one copy or addition, or two."""
        extent = self._rows.extents[index]
        count = extent.full * extent.run_shape[0]
        first = self._first(index)
        if extent.spec.dim or not extent.left:
            full = extent.full_runs(self._flat)
            _write(full, extent.spec.by_rank(gradient).view(full.shape), first)
            return
        if count:
            full = extent.full_runs(self._flat)
            _write(full, gradient[:count].view(full.shape), first)
        _write(extent.tail(self._flat), gradient[count:], first)

    def add_product(self, index: int, left: Tensor, right: Tensor) -> None:
        """Add ``left.T @ right``, for ``[tokens, out]`` and ``[tokens, in]``, without a copy.

        One matrix product writes the full runs, another the rows of a run that is not full.
        """
        extent = self._rows.extents[index]
        runs, rows = extent.full, extent.run_shape[0]
        count = runs * rows
        beta = 0 if self._first(index) else 1
        if runs:
            full = extent.full_runs(self._flat)
            parts = left[:, :count].unflatten(1, (runs, rows)).permute(1, 2, 0)
            torch.baddbmm(full, parts, right.expand(runs, *right.shape), beta=beta, out=full)
        if extent.left:
            tail = extent.tail(self._flat)
            torch.addmm(tail, left[:, count:].t(), right, beta=beta, out=tail)

    def add_rows(self, index: int, ids: Tensor, rows: Tensor) -> None:
        """Add ``rows[i]`` of ``[tokens, ...]`` to row ``ids[i]`` of the gradient."""
        extent = self._rows.extents[index]
        whole = extent.full_runs(self._flat, self._rows.degree)  # rows of padding are in no id
        if self._first(index):
            whole.zero_()
        where = (ids // extent.run_shape[0], ids % extent.run_shape[0])
        whole.index_put_(where, rows.to(whole.dtype), accumulate=True)

    def takes_products(self, index: int, dtype: torch.dtype) -> bool:
        """Return whether `add_product` can write gradients of that dtype."""
        spec = self._rows.extents[index].spec
        return not spec.dim and self._flat.dtype == dtype and len(spec.shape) == 2

    def takes_rows(self, dtype: torch.dtype) -> bool:
        """Return whether rows of that dtype add up here in no fewer bits."""
        return _keeps_bits(dtype, self._flat.dtype)

    def _first(self, index: int) -> bool:
        first, self.written[index] = not self.written[index], True
        return first

    def finish(self, tag_flags: Tensor) -> Tensor:
        """Return the packed rows, flat. Parameters without a gradient have zeros.

        In each row a flag per parameter says whether it has a gradient; then come ``tag_flags``,
        of shape ``[TAG_FLAGS]``.
        """
        rows = self._flat.view(self._rows.degree, self._rows.width)
        for extent, written in zip(self._rows.extents, self.written, strict=True):
            first = extent.full if written else 0
            if written and extent.left:
                rows[first, extent.start + extent.padded : extent.end].zero_()
                first += 1
            if first < self._rows.degree and extent.end > extent.start:
                rows[first:, extent.start : extent.end].zero_()
        for _, start, end in self._rows.gaps:
            rows[:, start:end].zero_()
        if not self._rows.flags_apart:
            flags = rows[:, self._rows.flags : self._rows.flags + len(self.written)]
            flags.fill_(1)
            start = self._rows.flags + len(self.written)
            rows[:, start : start + len(tag_flags)] = tag_flags
            for i, written in enumerate(self.written):
                if not written:
                    flags[:, i].zero_()
        return self._flat


def _write(target: Tensor, source: Tensor, first: bool) -> None:
    if first:
        target.copy_(source)
    else:
        target.add_(source)


Add = Callable[[Tensor, Tensor], None]


class _FusedLinear(torch.autograd.Function):
    """``functional.linear`` whose weight gradient goes to ``add_product``, not to autograd."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, add_product: Add
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.add_product = add_product
        return functional.linear(x, weight, bias)

    @staticmethod
    def backward(
        ctx: Any, *gradients: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        (gradient,) = gradients
        to_input = gradient @ weight if ctx.needs_input_grad[0] else None
        flat = gradient.reshape(-1, gradient.shape[-1])
        to_bias = flat.sum(0) if ctx.needs_input_grad[2] else None
        to_weight = None
        if ctx.needs_input_grad[1]:
            rows = x.reshape(-1, x.shape[-1])
            if not torch.is_grad_enabled() and accumulates(ctx, 1):
                ctx.add_product(flat, rows)
            else:  # a backward that does not accumulate gradients, or one with create_graph=True
                to_weight = flat.t() @ rows
        return to_input, to_weight, to_bias, None


class _FusedEmbedding(torch.autograd.Function):
    """``functional.embedding`` whose weight gradient goes to ``add_rows``, not to autograd."""

    @staticmethod
    def forward(
        ctx: Any, ids: Tensor, weight: Tensor, padding_idx: int | None, add_rows: Add
    ) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.weight_shape = weight.shape
        ctx.padding_idx = padding_idx
        ctx.add_rows = add_rows
        return functional.embedding(ids, weight, padding_idx)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor | None, None, None]:
        ids = ctx.saved_tensors[0].flatten()
        rows = gradients[0].reshape(-1, ctx.weight_shape[1])
        if ctx.padding_idx is not None:  # a mask of rows to keep would wait for the device
            rows = rows.masked_fill((ids == ctx.padding_idx).unsqueeze(1), 0)
        if not torch.is_grad_enabled() and accumulates(ctx, 1):
            ctx.add_rows(ids, rows)
            return None, None, None, None
        # a backward that does not accumulate gradients, or one with create_graph=True
        return None, rows.new_zeros(ctx.weight_shape).index_add_(0, ids, rows), None, None


def can_fuse(module: nn.Module, name: str) -> bool:
    """Return whether ``name`` is the weight of a plain ``nn.Linear`` or ``nn.Embedding``.

    Of an embedding with dense gradients, that is, which neither renormalises nor weighs by
    frequency.
    """
    if name != "weight" or "forward" in vars(module):
        return False
    if type(module) is nn.Embedding:
        return not (module.max_norm is not None or module.scale_grad_by_freq or module.sparse)
    return type(module) is nn.Linear


def fuse(module: nn.Module, is_own: Callable[[Tensor], bool], add: Add) -> None:
    """Replace the forward of a module that `can_fuse`: ``add`` gets what its gradients are made of.

    That is both factors of a linear layer's, ids and rows of an embedding's. Where the weight that
    stands there is not ``is_own``, takes no gradient, or autocast changes a linear layer's dtype,
    in compiled modules, in transforms of ``torch.func`` and in forward-mode differentiation, it
    computes as it always did.
    """

    def linear(self: nn.Linear, x: Tensor) -> Tensor:
        weight = self.weight
        if torch.compiler.is_compiling() or inside_transform() or inside_forward_ad():
            return functional.linear(x, weight, self.bias)
        fused = torch.is_grad_enabled() and weight.requires_grad and is_own(weight)
        if not fused or torch.is_autocast_enabled(x.device.type) or x.dtype != weight.dtype:
            return functional.linear(x, weight, self.bias)
        apply: Any = _FusedLinear.apply
        return cast(Tensor, apply(x, weight, self.bias, add))

    def embedding(self: nn.Embedding, ids: Tensor) -> Tensor:
        weight = self.weight
        fused = not (torch.compiler.is_compiling() or inside_transform() or inside_forward_ad())
        fused &= torch.is_grad_enabled()
        if not fused or not weight.requires_grad or not is_own(weight):
            return functional.embedding(ids, weight, self.padding_idx)
        apply: Any = _FusedEmbedding.apply
        return cast(Tensor, apply(ids, weight, self.padding_idx, add))

    forward: Callable[..., Tensor] = linear if type(module) is nn.Linear else embedding
    vars(module)["forward"] = MethodType(forward, module)


# A product per rank of fewer rows than a tile of an accelerator's matrix unit has computes rows
# that nobody asked for, and so takes longer than one product and a copy.
LEAST_ROWS = 128


def why_not_fused(
    module: nn.Module,
    name: str,
    spec: ShardSpec,
    computed: torch.dtype,
    reduced: torch.dtype,
    device_type: str,
) -> str:
    """Return why the gradient of a module's parameter is not written by fused products; "" if so.

    The product of a linear layer is batched, one for each rank that has a row of the packed
    gradients (``spec.degree``, 1 in the ragged layout). On accelerators each needs `LEAST_ROWS`
    rows to be as fast as one; a CPU has no such tiles, and there the smallest ones gain too.
    """
    if not can_fuse(module, name):
        return "not the weight of a plain nn.Linear or nn.Embedding"
    if spec.dim:
        return f"cut along dim {spec.dim}"
    if said := dtypes_apart(module, computed, reduced):
        return said
    if (
        type(module) is nn.Linear
        and device_type != "cpu"
        and spec.degree > 1
        and spec.rows < LEAST_ROWS
    ):
        return f"{spec.rows} rows per rank, fewer than {LEAST_ROWS}"
    return ""


def dtypes_apart(module: nn.Module, computed: torch.dtype, reduced: torch.dtype) -> str:
    """Return why a module's products, in their dtype, are no gradients to reduce; "" if they are.

    Rows of an embedding are cast one by one, and may add up in more bits.
    """
    rows = isinstance(module, nn.Embedding) and _keeps_bits(computed, reduced)
    if rows or computed == reduced:
        return ""
    return f"computed in {_short(computed)}, reduced in {_short(reduced)}"


def _keeps_bits(dtype: torch.dtype, sums: torch.dtype) -> bool:
    return torch.promote_types(dtype, sums) == sums


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class BucketHooks:
    """Writes each large gradient of a group to its bucket when autograd has it, and adds others.

    Of ``fused`` parameters, linear layers' and embeddings', the gradients are written there by the
    matrix product, or row by row, itself. The small ones come last, as do those of DTensors, which
    may have to be redistributed: a hook for each would cost more host time than it saves.
    """

    def __init__(
        self,
        parameters: Sequence[ShardedParameter],
        large: Collection[int],
        reduced: Callable[[], list[int]],
        rows_of: Callable[[Sequence[int]], GradientRows],
        take: Callable[[int], Tensor],
        fused: Collection[int],
    ) -> None:
        """Hook nothing before `register`; ``large`` says which of ``parameters`` will be.

        No module is changed before `fuse`; those of ``fused`` have no reason of `why_not_fused`.
        ``reduced`` says which parameters the next reduction is of, in the order to pack them in.
        """
        self._parameters = parameters
        self._large = [i for i in large if parameters[i].is_plain]
        self.fused = fused
        self._reduced = reduced
        self._rows_of = rows_of
        self._take = take
        self._bucket: GradientBucket | None = None
        self._chosen: list[int] = []
        self._rows: GradientRows | None = None
        self.on_gradient: Callable[[], None] | None = None  # called where autograd sees none

    def fuse(self) -> None:
        """Replace the forwards of the modules whose products write the gradients."""
        for i in self.fused:
            parameter = self._parameters[i]
            for module in (o.module for o in parameter.owners if can_fuse(o.module, o.name)):
                add = self._add_product if type(module) is nn.Linear else self._add_rows
                fuse(module, parameter.is_unsharded, partial(add, i))

    def register(self) -> None:
        """Hook the unsharded parameters, which were made anew."""
        self._rows = None
        for i in self._large:
            unsharded = self._parameters[i].unsharded
            if unsharded.is_floating_point():
                unsharded.requires_grad_(True)  # hooks need it; it is set right when they are shown
                unsharded.register_post_accumulate_grad_hook(partial(self._add, i))

    def _begin(self) -> GradientBucket:
        if self._bucket is None:
            chosen = self._reduced()
            if self._rows is None or chosen != self._chosen:
                self._chosen, self._rows = chosen, self._rows_of(chosen)
            self._bucket = GradientBucket(self._rows, self._take(self._rows.numel))
        return self._bucket

    def _place(self, index: int) -> tuple[GradientBucket, int] | None:
        """Return where a gradient goes; None for what was frozen since its forward: it is dropped.

        Raises `StateError` for what was unfrozen since gradients of others began to add up.
        """
        if not self._parameters[index].sharded.requires_grad:
            return None
        bucket = self._begin()
        if index not in self._chosen:
            raise StateError(
                f"a gradient of {self._parameters[index].name}, which was frozen when gradients "
                "began to add up; unfreeze parameters only after a reduction"
            )
        return bucket, self._chosen.index(index)

    @torch.no_grad()
    def _add(self, index: int, unsharded: Tensor) -> None:
        gradient, unsharded.grad = unsharded.grad, None
        if gradient is not None and (place := self._place(index)) is not None:
            bucket, position = place
            bucket.add(position, gradient.contiguous())

    @torch.no_grad()
    def _add_product(self, index: int, left: Tensor, right: Tensor) -> None:
        if (place := self._place(index)) is None:
            return
        bucket, position = place
        if bucket.takes_products(position, left.dtype):
            bucket.add_product(position, left, right)
        else:
            bucket.add(position, left.t() @ right)
        if self.on_gradient is not None:
            self.on_gradient()

    @torch.no_grad()
    def _add_rows(self, index: int, ids: Tensor, rows: Tensor) -> None:
        if (place := self._place(index)) is None:
            return
        bucket, position = place
        if bucket.takes_rows(rows.dtype):
            bucket.add_rows(position, ids, rows)
        else:
            shape = self._parameters[index].shape
            bucket.add(position, rows.new_zeros(shape).index_add_(0, ids, rows))
        if self.on_gradient is not None:
            self.on_gradient()

    def finish(
        self, chosen: Sequence[int], collectives: Collectives, tag_flags: Tensor
    ) -> tuple[Tensor, list[bool]]:
        """Return the packed gradients of the parameters at ``chosen``, and begin anew.

        With them, for each parameter, whether it has any.
        """
        bucket = self._begin()
        if self._chosen != list(chosen):
            names = [self._parameters[i].name for i in self._chosen]
            raise StateError(
                f"gradients of {names} were added up, and since then other parameters were "
                "unfrozen; do so only after a reduction"
            )
        for position, index in enumerate(self._chosen):
            gradient = self._parameters[index].take_gradient(collectives)
            if gradient is not None:
                bucket.add(position, gradient)
        self._bucket = None
        return bucket.finish(tag_flags), bucket.written

    def drop(self) -> None:
        """Forget what was added up."""
        self._bucket = None
