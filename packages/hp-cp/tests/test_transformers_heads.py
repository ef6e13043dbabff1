"""Heads that select or normalise rows of a whole sequence are refused; a base model serves them."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hp_cp import InputError, Zigzag, unshard_sequence
from hp_cp.transformers import context_parallel, shard_batch
from hp_dtensor.testing import SimulatedCollectives, SimulatedWorld

from .strategies import cp_mesh

transformers = pytest.importorskip("transformers")

from .causal_models import small  # noqa: E402
from .test_hugging_face import BOUND, Run, exact, gradients_of, one_rank  # noqa: E402
from .test_transformers_models import error_of  # noqa: E402

SEQ_LEN = 21
LENGTHS = torch.tensor([SEQ_LEN, 13])
CHOSEN = torch.tensor([True, False])


def model_of(name: str, config: str, **options: Any) -> Any:
    config_class = getattr(transformers, f"{config}Config")
    settings = {**small(config_class()), "num_labels": 1, **options}
    torch.manual_seed(0)
    model_class = getattr(transformers, name)
    model = model_class(config_class(**settings, attn_implementation="eager")).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model


def ids() -> Tensor:
    tokens = torch.randint(3, 50, (2, SEQ_LEN), generator=torch.Generator().manual_seed(1))
    return tokens.masked_fill(torch.arange(SEQ_LEN) >= LENGTHS[:, None], 0)


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("LlamaForSequenceClassification", "Llama"),
        ("Gemma2ForSequenceClassification", "Gemma2"),
        ("GPT2ForSequenceClassification", "GPT2"),
        ("EuroBertForSequenceClassification", "EuroBert"),  # the mean of all rows
        ("LlamaForQuestionAnswering", "Llama"),
        ("BertForQuestionAnswering", "Bert"),
    ],
)
def test_heads_of_the_library_are_refused_with_the_way_to_use_their_base(
    name: str, config: str
) -> None:
    mesh, _ = one_rank()
    model = model_of(name, config)
    prefix = model.base_model_prefix
    with pytest.raises(InputError) as error:
        context_parallel(model, mesh)
    said = str(error.value)
    assert f"{name} selects or normalises rows of whole sequences" in said
    assert f"give context_parallel its base model (.{prefix})" in said
    assert "unshard_sequence" in said
    context_parallel(getattr(model, prefix), mesh)


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("BertModel", "Bert"),
        ("ErnieForPreTraining", "Ernie"),
        ("BertForNextSentencePrediction", "Bert"),
    ],
)
def test_poolers_are_refused_but_not_the_model_without_one(name: str, config: str) -> None:
    mesh, _ = one_rank()
    model = model_of(name, config)
    said = "has a pooler, which selects rows of whole sequences.*add_pooling_layer=False"
    with pytest.raises(InputError, match=said):
        context_parallel(model, mesh)
    model.base_model.pooler = None
    context_parallel(model.base_model, mesh)


class Reward(transformers.LlamaPreTrainedModel):  # type: ignore[misc,name-defined]
    """A reward model of a user: the value of the last token, or of each token."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = transformers.LlamaModel(config)
        self.value = nn.Linear(config.hidden_size, 1)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        each: bool = False,
        return_dict: bool = True,
        **kwargs: Any,
    ) -> Any:
        """Return values and rows, by name or in this order."""
        rows = self.model(input_ids, position_ids=position_ids, **kwargs)[0]
        values = self.value(rows if each else rows[:, -1])
        outputs = {"values": values, "last_hidden_state": rows}
        return outputs if return_dict else tuple(outputs.values())


def reward() -> Any:
    config = transformers.LlamaConfig(
        **small(transformers.LlamaConfig()), attn_implementation="eager"
    )
    return Reward(config).double()


@pytest.mark.parametrize(
    ("make", "output"),
    [
        (reward, "values"),
        (lambda: model_of("GPT2DoubleHeadsModel", "GPT2"), "mc_logits"),
        (lambda: model_of("CLIPTextModel", "CLIPText"), "pooler_output"),
    ],
    ids=["own", "GPT2", "CLIP"],
)
@pytest.mark.parametrize("as_dict", [True, False])
def test_outputs_of_whole_sequences_are_refused_on_every_rank(
    make: Any, output: str, as_dict: bool
) -> None:
    model = make()

    def rank(rank: int, collectives: SimulatedCollectives) -> str:
        mesh = collectives.mesh((2,), ("cp",))
        mine = context_parallel(copy.deepcopy(model), mesh, collectives=collectives)
        part = shard_batch({"input_ids": ids()}, mesh)
        with pytest.raises(InputError) as error:
            mine(**part, return_dict=as_dict)
        return str(error.value)

    first, second = SimulatedWorld(2).run(rank)
    assert first == second
    shape = r"(2,)" if output == "mc_logits" else f"(2, {1 if output == 'values' else 32})"
    assert f"of shape {shape}, but ranks hold" in first
    assert f"returned {output if as_dict else 'output'}" in first


def test_outputs_of_each_token_are_those_of_one_process() -> None:
    model = reward()
    classes = model_of("LlamaForTokenClassification", "Llama", num_labels=2).eval()
    with exact():
        expected = model(ids(), each=True)["values"], classes(ids()).logits

    def rank(rank: int, collectives: SimulatedCollectives) -> list[Tensor]:
        mesh = collectives.mesh((2,), ("cp",))
        part = shard_batch({"input_ids": ids()}, mesh)
        mine = (
            context_parallel(copy.deepcopy(x), mesh, collectives=collectives)
            for x in (model, classes)
        )
        return [next(mine)(**part, each=True)["values"], next(mine)(**part).logits]

    with exact():
        found = zip(*SimulatedWorld(2).run(rank), strict=True)
    for parts, whole in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=BOUND, atol=1e-12)


def test_labels_of_whole_sequences_are_refused_without_advising_what_cannot_serve() -> None:
    mesh, collectives = one_rank()
    labels = torch.tensor([1.0, 0.0])
    said = r"labels of shape \(2,\) are one for each sequence.*unshard_sequence"
    with pytest.raises(InputError, match=said) as error:
        shard_batch({"input_ids": ids(), "labels": labels}, mesh)
    model = context_parallel(reward(), mesh, collectives=collectives)
    part = shard_batch({"input_ids": ids()}, mesh)
    with pytest.raises(InputError, match=said) as called:
        model(**part, labels=labels)
    assert "cut the batch with shard_batch" not in f"{error.value} {called.value}"


def preference(scores: Tensor) -> Tensor:
    """Return the loss of a reward model: the chosen sequence is to score above the other one."""
    return -nn.functional.logsigmoid(scores[CHOSEN] - scores[~CHOSEN]).mean()


def by_base(model: Any, mesh: Any, collectives: Any = None) -> Run:
    """Return this rank's shares of loss and gradients, by the steps of the guide."""
    base = context_parallel(model.base_model, mesh, layout=Zigzag(), collectives=collectives)
    part = shard_batch({"input_ids": ids()}, mesh, Zigzag())
    rows = unshard_sequence(
        base(**part)[0], mesh, Zigzag(), seq_dim=1, seq_len=SEQ_LEN, collectives=collectives
    )
    scores = model.score(rows[torch.arange(2), LENGTHS - 1])
    loss = preference(scores) / 2  # as many ranks have it
    loss.backward()
    return loss.detach(), gradients_of(model)


REWARDS = ("Llama", "Gemma2", "GPT2")


def alone(model: Any) -> Run:
    with exact():
        loss = preference(model(ids(), use_cache=False).logits)
    loss.backward()
    return loss.detach(), gradients_of(model)


def on_rank(rank: int) -> list[Run]:
    """Return loss and gradients of each model, summed over real ranks."""
    found = []
    for name in REWARDS:
        with exact():
            loss, grads = by_base(model_of(f"{name}ForSequenceClassification", name), cp_mesh(2))
        for x in (loss, *grads.values()):
            torch.distributed.all_reduce(x)
        found.append((loss, grads))
    return found


def test_a_reward_model_trains_by_its_base_as_in_one_process(ranks: Any) -> None:
    expected = [alone(model_of(f"{name}ForSequenceClassification", name)) for name in REWARDS]
    for found in ranks(2).run(on_rank):
        for run, of_one in zip(found, expected, strict=True):
            assert error_of(run, of_one) <= BOUND
