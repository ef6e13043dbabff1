"""The examples of public docstrings, run as doctests."""

import doctest
import re
import warnings
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import docstrings
import griffe
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("hp-mesh", "hp-dtensor", "hp-fsdp", "hp-cp", "hp-ep")
ON_RANKS = re.compile(r"^ *On (\d+) ranks", re.MULTILINE)
ON_A_PAGE = re.compile(r"^::: (\w+)\.(\w+)$", re.MULTILINE)
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


class Example(NamedTuple):
    """A docstring with examples; ``module`` is the one that exports the name."""

    module: str
    name: str
    text: str
    file: str
    line: int


class MyBackend:
    """An attention backend that supports nothing."""

    name = "mine"

    def supports(self, *_: object) -> str:
        """Return why a kind of block is not supported."""
        return "it is an example"

    def forward(self, q: object, k: object, v: object, *, causal: bool, options: object) -> None:
        """Compute nothing."""

    def backward(
        self,
        grad: object,
        q: object,
        k: object,
        v: object,
        out: object,
        lse: object,
        *,
        causal: bool,
        options: object,
    ) -> None:
        """Compute nothing."""


MY_BACKEND = MyBackend()  # one object: a name is registered once in a process


def small_model() -> Any:
    """Return a model of transformers with experts, the same on all ranks."""
    transformers = import_module("transformers")
    config = transformers.MixtralConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=12,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
    )
    torch.manual_seed(0)
    return transformers.MixtralForCausalLM(config)


def names_on_page(package: str) -> list[str]:
    """Return the names of a package's root on its reference page, also those for extensions."""
    page = ROOT / "tools" / "docs" / "pages" / package / "reference.md"
    found = ON_A_PAGE.findall(page.read_text("utf-8"))
    return [name for root, name in found if root == package.replace("-", "_")]


def examples(package: str) -> list[Example]:
    """Return the docstrings of a package's reference that have examples."""
    (root,) = docstrings.load([ROOT / "packages" / package / "src"])
    targets = [(root, docstrings.definition_of(root[name])) for name in names_on_page(package)]
    targets += [(export.module, export.target) for export in docstrings.exported([root])]
    found: dict[str, Example] = {}
    for module, target in targets:
        if target is None:
            continue
        members = docstrings.public_members(target) if isinstance(target, griffe.Class) else ()
        for each in (target, *members):
            text = each.docstring.value if each.docstring else ""
            if ">>>" in text:
                place = (module.path, each.path, text, str(each.filepath), each.lineno or 0)
                found[each.path] = Example(*place)
    return list(found.values())


def failures_of(example: Example, folder: str) -> str:
    """Run one docstring in a namespace with the names of its package and module, and torch.

    Some names have no short definition: `folder` of checkpoints, which all ranks share, `model` of
    transformers, and `my_backend`.
    """
    root = import_module(example.module.partition(".")[0])
    module = import_module(example.module)
    shown = names_on_page(root.__name__.replace("_", "-"))
    names: dict[str, Any] = {name: getattr(root, name) for name in (*root.__all__, *shown)}
    names |= {name: getattr(module, name) for name in module.__all__}
    names |= {"torch": torch, "nn": torch.nn, "init_device_mesh": init_device_mesh}
    names |= {"folder": folder, "my_backend": MY_BACKEND}
    if "with a model of transformers" in example.text.lower():
        names["model"] = small_model()
    parser = doctest.DocTestParser()
    test = parser.get_doctest(example.text, names, example.name, example.file, example.line)
    output: list[str] = []
    with warnings.catch_warnings(action="ignore"):  # torch's, on what an example leaves out
        doctest.DocTestRunner(optionflags=FLAGS).run(test, out=output.append)
    return "".join(output)


def run(rank: int, chosen: Sequence[Example], folder: str) -> str:
    """Run docstrings; return what failed."""
    torch.manual_seed(0)
    return "".join(failures_of(each, folder) for each in chosen)


@pytest.mark.parametrize("package", PACKAGES)
def test_examples_of_docstrings_give_what_they_show(
    package: str, ranks: Any, tmp_path: Path
) -> None:
    by_ranks: dict[int, list[Example]] = {}
    for example in examples(package):
        needed = ON_RANKS.search(example.text)
        by_ranks.setdefault(int(needed[1]) if needed else 1, []).append(example)
    failures = run(0, by_ranks.pop(1, []), str(tmp_path))
    assert not failures, failures
    for number, chosen in by_ranks.items():
        for failures in ranks(number).run(run, chosen, str(tmp_path)):
            assert not failures, failures
