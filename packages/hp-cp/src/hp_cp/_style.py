"""The parallel style: a core-attention module whose attention spans the ranks of a mesh.

It binds the arguments of a call and hands them to the attention that users call, or runs the
module's own forward between two exchanges.
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from hp_dtensor import AxisMesh, Collectives
from hp_dtensor.torch_compat import autocast_dtype, keep_eager

from ._arguments import (
    Call,
    as_sdpa,
    check_bare,
    check_causal,
    check_grouped,
    check_options,
    check_others,
    check_replaceable,
    take_local_rows,
)
from ._attention import (
    TORCH,
    AttentionOptions,
    as_autocast,
    check_dims,
    check_rows,
    check_tensors,
    compare_rows,
    dropout_of,
    plan_inputs,
    sharded_attention,
)
from ._blockwise import repeat_heads
from ._errors import BackendError, InputError, described
from ._layouts import Contiguous, Layout, check_size, checked_layout
from ._lineage import check_lineage, note_rows
from ._masks import MaskSpec, check_mask
from ._mesh import default_degree, device_of, place_of, rank_groups_of
from ._plan import check_balance
from ._routes import Schedule, check_schedule, ring_of
from ._ulysses import exchange_of, heads_to_rows, rows_to_heads
from .kernels._choose import check_backend_name, check_device
from .kernels._interface import PLAIN, AttentionBackend, ScoreOptions


class ContextParallel(ParallelStyle):
    """Parallel style that makes an attention module attend over a sequence sharded over ranks.

    Apply it with ``parallelize_module`` to a core-attention module: a module with the arguments of
    ``scaled_dot_product_attention``. The module then takes q, k and v of this rank's positions and
    returns the outputs of these positions. DTensor inputs are used as their local shards. They must
    be sharded on the sequence over the ranks of the mesh; other mesh axes may shard only the batch
    or the heads. Outputs are plain tensors.

    The arguments decide whether the module's own forward runs:

    - The forward runs if all ranks exchange rows for heads (``ulysses_degree``), the layout is
      `Contiguous` and ``mask`` is None. The forward then gets the whole sequence for a part of the
      heads, and all other arguments unchanged. Outputs with the shape of its q, alone or in a tuple
      or list, are exchanged back.
    - Otherwise, `context_parallel_attention` replaces the forward, and **the body of the forward
      does not run**. A scale, dropout, normalization of q and k, or transposed output in this body
      is lost without an error. Do these around the module, or call `context_parallel_attention` in
      the forward instead of using the style.

    If `context_parallel_attention` replaces the forward:

    - Calls may pass ``scale``, ``sinks``, and ``dropout_p`` with ``dropout_seed``.
    - A module with parameters raises an error.
    - If the forward takes ``*args``, they are read in the order of
      ``scaled_dot_product_attention``, and calls must pass ``is_causal`` unless the style has a
      mask.

    Args:
        seq_dim: Dim of the positions in q, k and v: 2 for ``[batch, heads, rows, size]``, 1 for
            ``[batch, rows, heads, size]``.
        head_dim: Dim of the heads in q, k and v: 1 for ``[batch, heads, rows, size]``, 2 for
            ``[batch, rows, heads, size]``.
        ulysses_degree: Number of neighbouring ranks that exchange rows for heads. With 1, no ranks
            do. With another divisor of the number of ranks, ``schedule`` runs over the groups of
            these ranks. Defaults to None: all ranks of a mesh with one axis, or the last axis of a
            mesh with two axes.
        qkv_indices: Positions of q, k and v in the arguments of the forward. Defaults to
            ``(0, 1, 2)``.
        qkv_kwarg_names: Keyword names of q, k and v. Defaults to the parameter names at
            ``qkv_indices``.
        load_balance: If True, rank ``r`` of ``n`` swaps the second half of its queries with rank
            ``n - 1 - r``, so that all ranks have equal work with a causal mask. Only for
            `Contiguous`, ``ulysses_degree=1`` and ``"gather"``. Defaults to False.
        schedule: How keys and values reach other ranks, as for `context_parallel_attention`.
            Defaults to None: ``"gather"``. Do not pass it if all ranks exchange rows for heads.
        layout: Positions of each rank. Defaults to None: `Contiguous`.
        mask: Attention mask. If a call passes ``is_causal``, or the forward has the default
            ``is_causal=True``, the mask must have the same ``causal``. Defaults to None: the mask
            follows ``is_causal`` of each call.
        backend: Kernel, as for `context_parallel_attention`. Defaults to ``"auto"``.
        softcap: Bound of the scores, as for `context_parallel_attention`. Defaults to None.
        seq_len: Length of the whole sequence, in positions. Defaults to None: the global length if
            q is a DTensor sharded over the mesh, else as for `context_parallel_attention`.
        collectives: Implementation of the collectives. Defaults to None: ``torch.distributed``.

    Raises:
        InputError: An argument is invalid. Calls of the module raise the error, too. If all ranks
            call the module with equal options, all raise before communication for:

            - a dense ``attn_mask``, dropout without a seed, or another argument that has no effect;
            - ``enable_gqa=False`` with grouped heads if the forward is replaced;
            - an ``is_causal`` that contradicts the mask, or that is not a bool if there is no mask;
            - queries and keys of different lengths, or inputs from a layer that used another
              layout.

            If q does not have the number of rows that the layout assigns to this rank, only this
            rank raises, and the others wait. If the module's own forward runs and returns no tensor
            with the shape of its q, ranks with such an output raise after the first exchange.
        BackendError: ``backend`` is not an `AttentionBackend`, or is an unknown name.

    Examples:
        On 4 ranks:

        >>> from torch.distributed.tensor.parallel import parallelize_module
        >>> class Core(nn.Module):
        ...     def forward(self, q, k, v, is_causal=False):
        ...         return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
        >>> style = ContextParallel(seq_dim=2, head_dim=1, layout=Zigzag())
        >>> core = parallelize_module(Core(), init_device_mesh("cpu", (4,)), style)
        >>> q, k, v = torch.randn(3, 1, 8, 16, 32)  # this rank's 16 of 64 rows
        >>> core(q, k, v, is_causal=True).shape
        torch.Size([1, 8, 16, 32])
    """

    def __init__(
        self,
        *,
        seq_dim: int,
        head_dim: int,
        ulysses_degree: int | None = None,
        qkv_indices: tuple[int, int, int] = (0, 1, 2),
        qkv_kwarg_names: tuple[str, ...] = (),
        load_balance: bool = False,
        schedule: Schedule | None = None,
        layout: Layout | None = None,
        mask: MaskSpec | None = None,
        backend: str | AttentionBackend = "auto",
        softcap: float | None = None,
        seq_len: int | None = None,
        collectives: Collectives | None = None,
    ) -> None:
        check_dims(seq_dim, head_dim)
        if ulysses_degree is not None and (type(ulysses_degree) is not int or ulysses_degree < 1):
            raise InputError(
                f"ulysses_degree={ulysses_degree!r} is no number of ranks; use a divisor of the "
                f"context parallel size, or None for all of it"
            )
        check_backend_name(backend)
        if not _are_different(qkv_indices, int) or min(qkv_indices) < 0:
            raise InputError(
                f"qkv_indices are the positions of q, k and v, got {qkv_indices!r}; give three "
                f"different ints from 0 on"
            )
        if qkv_kwarg_names != () and not _are_different(qkv_kwarg_names, str):
            raise InputError(
                f"qkv_kwarg_names are the names of q, k and v, got {qkv_kwarg_names!r}; give three "
                f"different ones, or none to use those of the module's forward"
            )
        layout = checked_layout(layout)
        if schedule is not None:
            check_schedule(schedule)
        if mask is not None:
            check_mask(mask)
        if seq_len is not None:
            check_size(1, seq_len)
        self.ulysses_degree = ulysses_degree
        self.qkv_indices = qkv_indices
        self.qkv_kwarg_names = qkv_kwarg_names
        self.mask = mask
        self.schedule = schedule
        self.options = AttentionOptions(  # of each call, but for what a mesh and the call tell
            mask=MaskSpec(causal=False) if mask is None else mask,
            layout=layout,
            ulysses_degree=1,
            schedule="gather" if schedule is None else schedule,
            backend=backend,
            scores=ScoreOptions(softcap=softcap),
            seq_dim=seq_dim,
            head_dim=head_dim,
            seq_len=seq_len,
            load_balance=load_balance,
            collectives=TORCH if collectives is None else collectives,
        )

    def apply(self, module: nn.Module, mesh: AxisMesh) -> nn.Module:
        """Replace the forward of a module, as ``parallelize_module`` does.

        All ranks of the mesh must apply the style: on devices other than a CPU, the first style on
        a process group exchanges one element between all of its ranks. On one rank, the forward is
        replaced under the same conditions as on several ranks. If its own forward would run, the
        module is left unchanged.

        Args:
            module: Core-attention module. It is changed in place.
            mesh: Mesh of the ranks that share the sequence: one axis, or two axes
                ``(outer, ulysses)``.

        Returns:
            ``module``.

        Raises:
            InputError: The mesh has more than two axes; ``ulysses_degree`` or ``schedule`` is
                invalid for the number of ranks; or the module has this style already. Also if the
                forward would be replaced, but the module has parameters or defaults that would be
                lost, or the forward has no ``is_causal`` and the style no mask. All ranks raise
                together before communication.
            BackendError: The backend does not support the device of the mesh, or a backend is given
                although the module's own forward runs.
        """
        degree = default_degree(mesh) if self.ulysses_degree is None else self.ulysses_degree
        options, (n, _) = self.options, place_of(mesh)
        if degree == n > 1 and self.schedule is not None:
            raise InputError(
                f"schedule={self.schedule!r} would not be used where all {n} ranks exchange heads; "
                f"use ulysses_degree=1, or a smaller divisor of {n}, or leave the schedule out"
            )
        if n == 1:  # nothing to exchange or to bring, in whatever way
            degree, options = 1, options._replace(schedule="gather", load_balance=False)
        options = options._replace(ulysses_degree=degree)
        groups = rank_groups_of(mesh, degree, options.collectives)
        ring_of(options.schedule, n // degree)
        if options.load_balance:
            check_balance(options.layout, n, 0, degree, options.schedule)
        if isinstance(module.forward, ContextParallelForward):
            raise InputError("this module is context parallel already; apply the style once")
        forward = ContextParallelForward(module, mesh, n, self, options)
        if not forward.runs_inner:
            groups.ring.connect(device_of(mesh))
        if n > 1 or not forward.runs_inner:
            module.forward = forward
        return module

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return self.apply(module, device_mesh)


class ContextParallelForward:
    """A module's forward over the ranks of a mesh; keeps nothing between calls."""

    def __init__(
        self,
        module: nn.Module,
        mesh: AxisMesh,
        n: int,
        style: ContextParallel,
        options: AttentionOptions,
    ) -> None:
        """Stand for the forward of ``module`` on ``n`` ranks.

        Raises `InputError` where that will not run and what it computes cannot be told from its
        arguments, or needs parameters of the module, and `BackendError` for a backend that is not
        used or has no kernels for the devices of ``mesh``.
        """
        inner = module.forward
        functools.update_wrapper(self, inner)
        self._inner = inner
        self._parameters = tuple(inspect.signature(inner).parameters.values())
        self._mesh = mesh
        self._style = style
        self._options = options
        # One rank decides as several do: a degree above one is all of them there.
        of_all = style.ulysses_degree is None and options.ulysses_degree == n
        of_all |= (style.ulysses_degree or 0) >= max(n, 2)
        in_order = of_all and isinstance(options.layout, Contiguous)
        self.runs_inner = in_order and style.mask is None  # the module's own forward attends
        if self.runs_inner and options.scores != PLAIN:
            scores = ((x.name, getattr(options.scores, x.name)) for x in fields(ScoreOptions))
            given = ", ".join(f"{name}={value!r}" for name, value in scores if value is not None)
            raise InputError(
                f"{given} would not be used where the module's own forward runs; leave it out, or "
                f"give the style a mask, a layout or a ulysses_degree under which the forward is "
                f"replaced"
            )
        if not self.runs_inner:
            check_bare(module)
            self._parameters = as_sdpa(self._parameters, style.qkv_indices)
            names = style.qkv_kwarg_names
            check_replaceable(self._parameters, style.qkv_indices, names, style.mask)
            check_device(options.backend, mesh)
        elif options.backend != "auto":
            raise BackendError(
                f"backend={described(options.backend)} would not be used where the module's own "
                f"forward runs; leave it 'auto', or give the style a mask, a layout or a "
                f"ulysses_degree under which the forward is replaced"
            )

    @keep_eager  # a plan is no tensor program
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the module returns, with this rank's rows of the attention."""
        style, options = self._style, self._options
        call = Call.of(self._parameters, args, kwargs)
        names = style.qkv_kwarg_names or (None, None, None)
        keys = [call.key(i, name) for i, name in zip(style.qkv_indices, names, strict=True)]
        q, k, v = (call.values[key] for key in keys)
        check_tensors(q, k, v)
        (q, k, v), seq_len = take_local_rows(
            (q, k, v), self._mesh, options.seq_dim, options.layout, options.seq_len
        )
        check_options(call, self.runs_inner)
        mask = style.mask or MaskSpec(causal=call.option("is_causal") is True)
        options = options._replace(mask=mask, seq_len=seq_len)
        if self.runs_inner:

            def inner(*whole: Tensor) -> Any:
                args, kwargs = call.rebuild(dict(zip(keys, whole, strict=True)))
                return self._inner(*args, **kwargs)

            return exchange_around(inner, q, k, v, self._mesh, options)
        dropout = dropout_of(call.option("dropout_p") or 0.0, call.given("dropout_seed"))
        scores = replace(options.scores, scale=call.option("scale"), dropout=dropout)
        check_others(call, keys)
        check_causal(call, style.mask)
        check_grouped(call, q.shape[options.head_dim], k.shape[options.head_dim])
        options = options._replace(scores=scores)
        out, _ = sharded_attention(q, k, v, self._mesh, options, call.given("sinks"))
        return out


def exchange_around(
    forward: Callable[[Tensor, Tensor, Tensor], Any],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mesh: AxisMesh,
    options: AttentionOptions,
) -> Any:
    """Return what ``forward`` returns for the whole sequence of this rank's heads, as local rows.

    Tensors shaped like the q that it gets, with the head size of v, come back as this rank's rows
    of all heads, whether alone or in a tuple or list, which keep their type; other values pass.
    Communicates as `rows_to_heads` does and as `heads_to_rows` does for each such tensor. Raises
    `InputError` after the first exchange where there is none.
    """
    groups = rank_groups_of(mesh, options.ulysses_degree, options.collectives)
    if (dtype := autocast_dtype(q.device)) is not None:
        q, k, v = (as_autocast(x, dtype) for x in (q, k, v))
    plan = plan_inputs(q, k, v, groups, options)
    check_lineage((q, k, v), plan, q.shape[options.seq_dim])
    compare_rows(q, groups, options)
    check_rows(q, plan, groups, options)
    exchange = exchange_of(plan, groups)
    order = [3 - options.seq_dim - options.head_dim, options.seq_dim, options.head_dim, 3]
    at = [order.index(dim) for dim in range(4)]
    q, k, v = (x.permute(order) for x in (q, k, v))
    q, k, v = rows_to_heads(q, k, v, exchange)
    repeats = plan.heads[groups.ulysses.index].repeats  # the module groups heads evenly
    k, v = (repeat_heads(x, repeats) for x in (k, v))
    q, k, v = (x.permute(at) for x in (q, k, v))
    shape = (*q.shape[:3], v.shape[3])
    result = forward(q, k, v)

    def has_rows(value: Any) -> bool:
        return isinstance(value, Tensor) and value.shape == shape

    if not any(map(has_rows, result if isinstance(result, (tuple, list)) else [result])):
        raise InputError(
            f"the module returned {_describe(result)}, and nothing shaped like the q that it got, "
            f"{tuple(shape)}; return the attention of that shape, alone or in a tuple or list, or "
            f"use ulysses_degree=1"
        )

    def back(value: Any) -> Any:
        if not has_rows(value):
            return value
        mine = heads_to_rows(value.permute(order), exchange)
        return note_rows(mine, plan).permute(at)

    if isinstance(result, tuple) and hasattr(result, "_fields"):
        return type(result)(*map(back, result))
    if isinstance(result, (tuple, list)):
        return type(result)(map(back, result))
    return back(result)


def _are_different(given: object, kind: type) -> bool:
    """Return whether these are three different values of a type, for q, k and v."""
    if not isinstance(given, (list, tuple)) or not all(type(x) is kind for x in given):
        return False
    return len(given) == len(set(given)) == 3


def _describe(result: Any) -> str:
    """Return the shapes of what a forward returned, and the types of what is no tensor."""
    if isinstance(result, Tensor):
        return f"a tensor of shape {tuple(result.shape)}"
    if isinstance(result, (tuple, list)):
        return f"a {type(result).__name__} of [{', '.join(map(_describe, result))}]"
    return f"a {type(result).__name__}"
