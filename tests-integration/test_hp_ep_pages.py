"""The documentation of hp-ep: the public names it uses, and its example that saves a model."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from fragments import fragment, pages_of
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import hp_ep

TEXT = "\n".join(path.read_text("utf-8") for path in pages_of("hp-ep"))


def test_the_pages_name_public_names_and_those_for_people_who_extend_the_package() -> None:
    sentence = TEXT.partition("who extend the package: ")[2].partition(".")[0]
    others = set(re.findall(r"`(\w+)`", sentence))
    assert all(getattr(hp_ep, name) is not None for name in others)
    assert len(others) > 3
    prose = re.sub(r"^```.*?^```", "", TEXT, flags=re.MULTILINE | re.DOTALL)
    used = set(re.findall(r"\b[A-Za-z]\w+\b", "".join(re.findall(r"`[^`\n]+`", prose))))
    used |= set(re.findall(r"\w+", "".join(re.findall(r"from hp_ep import (.*)", TEXT))))
    modules = {"dispatch", "placement", "transformers"}
    assert {name for name in used if hasattr(hp_ep, name)} - modules <= {*hp_ep.__all__} | others
    assert not others & {*hp_ep.__all__}


def mixtral() -> Any:
    """Return a small model, the same in every process."""
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=12,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=4,
    )
    torch.manual_seed(0)
    return transformers.MixtralForCausalLM(config)


def saved_on_rank(rank: int, source: str, folder: str) -> None:
    """Distribute the experts and run the example."""
    from hp_ep.transformers import parallelize_experts

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    model = mixtral()
    parallelize_experts(model, mesh, token_axes=mesh)
    exec(source, {"model": model, "folder": folder})


def test_the_example_of_the_page_on_transformers_writes_the_files_of_the_library(
    ranks: Any, tmp_path: Path
) -> None:
    model = mixtral()
    ranks(2).run(saved_on_rank, fragment("hp-ep", "save_pretrained"), str(tmp_path))
    read: dict[str, Tensor] = type(model).from_pretrained(tmp_path).state_dict()
    expected = model.state_dict()
    assert read.keys() == expected.keys()
    assert all(torch.equal(value, expected[key]) for key, value in read.items())
