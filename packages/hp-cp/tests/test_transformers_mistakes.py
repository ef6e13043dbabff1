"""Scripts with a mistake that no error would show: all ranks raise in the first step."""

import contextlib
import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from rank_pool import cached
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

from hp_cp import Contiguous, InputError, Layout, MaskSpec, Zigzag
from hp_cp.transformers import context_parallel, shard_batch
from hp_dtensor import RecordingCollectives
from hp_dtensor.testing import SimulatedCollectives, SimulatedWorld

from .strategies import cp_mesh

transformers = pytest.importorskip("transformers")

SEQ_LEN = 24
VOCAB = 50
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
WINDOWS = {
    "sliding_window": 9,
    "head_dim": 8,
    "layer_types": ["sliding_attention", "full_attention"],
}
DENSE: dict[str, tuple[str, str, dict[str, Any]]] = {
    "sdpa": ("LlamaForCausalLM", "LlamaConfig", {}),
    "eager": ("LlamaForCausalLM", "LlamaConfig", {"attn_implementation": "eager"}),
    "one layer": ("LlamaForCausalLM", "LlamaConfig", {"num_hidden_layers": 1}),
    "flex": ("LlamaModel", "LlamaConfig", {"attn_implementation": "flex_attention"}),
    "windows": ("Gemma3ForCausalLM", "Gemma3TextConfig", WINDOWS),
    "learned positions": ("GPT2LMHeadModel", "GPT2Config", {}),
    "encoder": ("BertModel", "BertConfig", {}),
}


def model_of(kind: str = "eager") -> Any:
    """Return a small model in float64, the same in every process."""
    name, config, options = DENSE[kind]
    config = getattr(transformers, config)(**{**SIZES, **options})
    model = getattr(transformers, name)(config).double().train()
    generator = torch.Generator().manual_seed(0)  # simulated ranks share torch's own
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2, generator=generator)
    return model


def tokens(rows: int = 2, length: int = SEQ_LEN, seed: int = 1) -> Tensor:
    return torch.randint(VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


def batch_of(ids: Tensor) -> dict[str, Tensor]:
    return {"input_ids": ids, "labels": ids}


def said(call: Callable[[], object]) -> str:
    """Return the message of the `InputError` that a call raises, "" if it raises none."""
    try:
        call()
    except InputError as error:
        return str(error)
    return ""


def step(model: Any, batch: Any) -> None:
    model(**batch, use_cache=False).loss.backward()


def on_two(
    script: Callable[[int, Any, DeviceMesh], object], layout: Layout | None = None
) -> list[str]:
    """Return what each of two simulated ranks says when it runs a script with its model."""

    def rank(rank: int, collectives: SimulatedCollectives) -> str:
        mesh: Any = collectives.mesh((2,), ("cp",))
        model = context_parallel(model_of(), mesh, layout=layout, collectives=collectives)
        return said(lambda: script(rank, model, mesh))

    return SimulatedWorld(2).run(rank)


# shard_batch is used, but context_parallel was forgotten.


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("kind", DENSE)
def test_a_model_that_context_parallel_was_not_given_refuses_a_part(kind: str, train: bool) -> None:
    def rank(rank: int, collectives: SimulatedCollectives) -> str:
        mesh = collectives.mesh((2,), ("cp",))
        model = model_of(kind).train(train)
        part = shard_batch({"input_ids": tokens()}, mesh, Zigzag())
        with torch.set_grad_enabled(train):
            return said(lambda: model(**part))

    for message in SimulatedWorld(2).run(rank):
        assert "cut by shard_batch, but this model was not given to context_parallel" in message


def test_a_reference_model_that_was_forgotten_refuses_a_part_that_the_policy_takes() -> None:
    def script(rank: int, model: Any, mesh: Any) -> None:
        part = shard_batch(batch_of(tokens()), mesh)
        step(model, part)
        with torch.no_grad():
            model_of()(**part)

    assert all("not given to context_parallel" in message for message in on_two(script))


def test_plain_models_take_whole_batches_beside_others() -> None:
    expected = model_of()(**batch_of(tokens())).loss

    def script(rank: int, model: Any, mesh: Any) -> None:
        reference = model_of().eval()
        step(model, shard_batch(batch_of(tokens()), mesh))
        with torch.no_grad():
            loss = reference(**batch_of(tokens()), attention_mask=torch.ones(2, SEQ_LEN)).loss
        torch.testing.assert_close(loss, expected.detach())

    assert on_two(script) == ["", ""]


def test_one_rank_needs_no_context_parallel() -> None:
    mesh: Any = SimulatedCollectives(SimulatedWorld(1), 0).mesh((1,), ("cp",))
    model = model_of()
    found = model(**shard_batch(batch_of(tokens()), mesh)).loss
    torch.testing.assert_close(found, model(**batch_of(tokens())).loss)


def test_batches_may_be_cut_before_and_sent_through_a_loaders_queue() -> None:
    """By workers without a model; a copy and a part of the model take them too."""

    def rank(rank: int, collectives: SimulatedCollectives) -> float:
        mesh = collectives.mesh((2,), ("cp",))
        part = copy.deepcopy(pickle.loads(pickle.dumps(shard_batch(batch_of(tokens()), mesh))))
        model = context_parallel(model_of(), mesh, collectives=collectives)
        inputs = {key: x for key, x in part.items() if key not in ("labels", "shift_labels")}
        with torch.no_grad():
            copy.deepcopy(model)(**part)
            model.model(**inputs)
            model(inputs.pop("input_ids"), inputs.pop("attention_mask"), **inputs)
            found: float = model(**part).loss.item()
        return found

    expected = model_of()(**batch_of(tokens())).loss.item()
    assert sum(SimulatedWorld(2).run(rank)) == pytest.approx(expected)


def test_the_mask_of_a_part_is_none_of_a_tensors() -> None:
    """Callers ask what they may do with a batch's values: nothing, as with sequence_shard."""
    mesh: Any = SimulatedCollectives(SimulatedWorld(2), 0).mesh((2,), ("cp",))
    part = shard_batch({"input_ids": tokens()}, mesh)
    assert not any(hasattr(part["attention_mask"], name) for name in ("to", "device", "shape"))


# Position ids of a rank's own rows are set after shard_batch.


LOCAL = SEQ_LEN // 2


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("layout", [Zigzag(), Contiguous()])
def test_local_position_ids_set_after_shard_batch_are_refused(layout: Layout, whole: bool) -> None:
    """With Contiguous they are those of the first rank, which raises all the same."""

    def script(rank: int, model: Any, mesh: Any) -> None:
        part = shard_batch({"input_ids": tokens()}, mesh, layout)
        part["position_ids"] = torch.arange(LOCAL)[None]
        (model if whole else model.model)(**part)

    for message in on_two(script, layout):
        assert "position_ids are not those that shard_batch returned" in message
        assert "give shard_batch position_ids of the whole sequences" in message


def test_position_ids_may_be_cast_repeated_and_split() -> None:
    def script(rank: int, model: Any, mesh: Any) -> None:
        mask = MaskSpec(causal=True, cu_seqlens=(0, SEQ_LEN))
        part = shard_batch({"input_ids": tokens()}, mesh)
        positions = part["position_ids"].expand(2, -1)
        model(**{**part, "position_ids": positions.to(torch.int32)})
        strides = torch.tensor([[1], [3]]) * torch.arange(SEQ_LEN + 2)
        given = {"input_ids": tokens(length=SEQ_LEN + 2), "position_ids": strides}
        mask = MaskSpec(causal=True, cu_seqlens=(0, SEQ_LEN + 2))
        part = shard_batch(given, mesh, mask=mask)
        micro = {key: part[key][1:] for key in ("input_ids", "position_ids")}
        model(**{**part, **micro})

    assert on_two(script) == ["", ""]


# Ranks that share a sequence are given different batches.


def test_ranks_of_a_sequence_that_are_given_different_data_raise() -> None:
    def on_rank_data(rank: int, model: Any, mesh: Any) -> None:
        step(model, shard_batch(batch_of(tokens(seed=rank)), mesh))

    def on_rank_data_again(rank: int, model: Any, mesh: Any) -> None:
        with contextlib.suppress(InputError):
            on_rank_data(rank, model, mesh)
        on_rank_data(rank, model, mesh)

    def on_rank_labels(rank: int, model: Any, mesh: Any) -> None:
        labels = tokens(seed=rank)
        step(model, shard_batch({"input_ids": tokens(), "labels": labels}, mesh))

    def on_rank_documents(rank: int, model: Any, mesh: Any) -> None:
        mask = MaskSpec(causal=True, cu_seqlens=(0, 5 + rank, SEQ_LEN))
        model(**shard_batch({"input_ids": tokens()}, mesh, mask=mask))

    def on_rank_seed(rank: int, model: Any, mesh: Any) -> None:
        model(**shard_batch({"input_ids": tokens()}, mesh, dropout_seed=rank))

    def on_rank_order(rank: int, model: Any, mesh: Any) -> None:
        model(**shard_batch({"input_ids": tokens().flip(0) if rank else tokens()}, mesh))

    for script in (
        on_rank_data,
        on_rank_data_again,
        on_rank_labels,
        on_rank_documents,
        on_rank_seed,
        on_rank_order,
    ):
        for message in on_two(script):
            assert "ranks that share a sequence were given different batches" in message


@pytest.mark.parametrize(
    ("shapes", "message"),
    [(((2, 24), (2, 26)), "24 to 26 tokens"), (((1, 24), (2, 24)), "1 to 2 rows")],
)
def test_ranks_of_a_sequence_that_are_given_different_lengths_raise(
    shapes: tuple[tuple[int, int], ...], message: str
) -> None:
    def script(rank: int, model: Any, mesh: Any) -> None:
        model(**shard_batch({"input_ids": tokens(*shapes[rank])}, mesh))

    for answer in on_two(script):
        assert f"ranks that share a sequence were given batches of {message}" in answer


def test_a_batch_that_was_cut_for_other_ranks_is_refused() -> None:
    """Data is equal, but the ranks of ``tp`` hold the parts of ``cp``."""

    def rank(rank: int, collectives: SimulatedCollectives) -> str:
        mesh = collectives.mesh((2, 2), ("cp", "tp"))
        model = context_parallel(model_of(), mesh["cp"], collectives=collectives)
        part = shard_batch({"input_ids": tokens()}, mesh["tp"])
        return said(lambda: model(**part))

    for message in SimulatedWorld(4).run(rank):
        assert "shard_batch was given another mesh than context_parallel" in message


def test_data_parallel_ranks_have_batches_of_their_own() -> None:
    def rank(rank: int, collectives: SimulatedCollectives) -> tuple[str, ...]:
        mesh = collectives.mesh((2, 2), ("dp", "cp"))
        models = [context_parallel(model_of(), mesh["cp"], collectives=collectives) for _ in "ab"]
        row = mesh["dp"].get_local_rank()
        part = shard_batch(batch_of(tokens(1, SEQ_LEN + 2 * row, seed=row)), mesh["cp"])
        return tuple(said(partial(step, model, part)) for model in models)

    assert SimulatedWorld(4).run(rank) == [("", "")] * 4


@pytest.mark.parametrize("differ", [True, False])
def test_a_mesh_of_two_axes_is_compared_over_both(differ: bool) -> None:
    def rank(rank: int, collectives: SimulatedCollectives) -> str:
        mesh = collectives.mesh((2, 2), ("outer", "ulysses"))
        options: dict[str, Any] = {"ulysses_degree": 2, "collectives": collectives}
        model = context_parallel(model_of(), mesh, **options)
        ids = tokens(seed=int(differ and rank == 2))
        return said(lambda: step(model, shard_batch(batch_of(ids), mesh)))

    for message in SimulatedWorld(4).run(rank):
        assert ("different batches" in message) is differ


def test_batches_are_compared_for_the_first_shapes_only() -> None:
    """One all-reduce each for eight new shapes; a shape that was seen costs nothing."""

    def rank(rank: int, collectives: SimulatedCollectives) -> list[int]:
        counted = RecordingCollectives(collectives)
        mesh = collectives.mesh((2,), ("cp",))
        model = context_parallel(model_of(), mesh, collectives=counted)
        counts = []
        for length in (24, 24, *range(26, 46, 2)):
            model(**shard_batch({"input_ids": tokens(length=length)}, mesh))
            found = counted.by_call.get(("cp", "all_reduce"))
            counts.append(0 if found is None else found.calls)
        return counts

    expected = [1, 1, 2, 3, 4, 5, 6, 7, 8, 8, 8, 8]
    assert SimulatedWorld(2).run(rank) == [expected, expected]


class HostReads(TorchDispatchMode):
    """Counts the numbers that are read from tensors, for which an accelerator's host waits."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.reads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator."""
        self.reads += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_steps_of_a_known_shape_read_no_more_on_the_host_than_the_library() -> None:
    """It looks once for documents in position ids."""
    with HostReads() as plain:
        step(model_of(), {**batch_of(tokens()), "position_ids": torch.arange(SEQ_LEN)[None]})
    assert plain.reads == 1

    def script(rank: int, model: Any, mesh: Any) -> None:
        step(model, shard_batch(batch_of(tokens()), mesh))
        with HostReads() as known:
            part = shard_batch(batch_of(tokens()), mesh)
            assert known.reads == 0
            step(model, part)
        assert known.reads == plain.reads

    assert on_two(script) == ["", ""]


def unequal_on_rank(rank: int) -> list[str]:
    """Run a step with other data and one with another length than the other rank."""
    mesh, found = cp_mesh(2), []
    for ids in (tokens(seed=rank), tokens(length=SEQ_LEN + 2 * rank)):
        model = context_parallel(model_of(), mesh, layout=Zigzag())
        part = shard_batch(batch_of(ids), mesh, Zigzag())
        found.append(said(partial(step, model, part)))
    return found


def test_processes_with_other_data_or_lengths_raise(ranks: Any) -> None:
    for other_data, other_length in ranks(2).run(unequal_on_rank):
        assert "different batches" in other_data
        assert "batches of 24 to 26 tokens" in other_length


# Parameters are sharded over ranks without those that share a sequence.


def sharded(mesh: DeviceMesh | None, cp: DeviceMesh, *, by_layer: bool = True) -> Any:
    model = context_parallel(model_of("one layer"), cp, layout=Zigzag())
    for layer in model.model.layers if by_layer else ():
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def sharded_on_rank(rank: int) -> dict[str, str]:
    """Return what a training step, and calls without one, say for meshes of each kind."""
    mesh = cached("dp_cp", lambda: init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp")))
    swapped = cached("cp_dp", lambda: init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "dp")))
    dp, cp = mesh["dp"], mesh["cp"]

    def trained(model: Any) -> str:
        return said(lambda: step(model, shard_batch(batch_of(tokens()), cp, Zigzag())))

    found = {
        "dp by layer": trained(sharded(dp, cp)),
        "dp as one": trained(sharded(dp, cp, by_layer=False)),
        "all ranks": trained(sharded(None, cp)),
        "cp": trained(sharded(cp, cp)),
        "replicas over cp": trained(sharded(swapped, cp)),
        "plain": trained(context_parallel(model_of("one layer"), cp, layout=Zigzag())),
    }
    for change in ("eval", "no_grad", "frozen"):
        model = sharded(dp, cp)
        model.train(change != "eval").requires_grad_(change != "frozen")
        part = shard_batch({"input_ids": tokens()}, cp, Zigzag())
        with torch.set_grad_enabled(change != "no_grad"):
            found[change] = said(partial(model, **part))
    model = context_parallel(model_of("one layer"), cp, layout=Zigzag())
    style = ColwiseParallel(output_layouts=Replicate())
    parallelize_module(model, dp, {"lm_head": style})
    found["tensor parallel"] = trained(model)
    for layer in model.model.layers:
        fully_shard(layer, mesh=cp)
    found["beside tensor parallel"] = trained(model)
    return found


def test_parameters_that_are_not_sharded_over_the_ranks_of_a_sequence_are_refused(
    ranks: Any,
) -> None:
    for found in ranks(4).run(sharded_on_rank):
        for wrong in ("dp by layer", "dp as one"):
            message = found.pop(wrong)
            assert "which do not hold the ranks that share its sequences" in message
            assert "fully_shard sharded the model over ranks" in message
        assert not any(found.values()), found


def test_the_check_of_parameters_does_not_keep_a_model() -> None:
    import gc
    import weakref

    mesh: Any = SimulatedCollectives(SimulatedWorld(2), 0).mesh((2,), ("cp",))
    model: nn.Module = context_parallel(model_of(), mesh)
    gone = weakref.ref(model)
    shard_batch({"input_ids": tokens()}, mesh)
    del model
    gc.collect()
    assert gone() is None
