"""The scripts in tools/recipes train as one process does, and stay short."""

import ast
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from hp_dtensor.testing import keep_float64

pytest.importorskip("transformers")
pytest.importorskip("peft")

FOLDER = Path(__file__).resolve().parents[1] / "tools" / "recipes"
PAGE = FOLDER.parent / "docs" / "pages" / "recipes.md"
RECIPES = sorted(path.stem for path in FOLDER.glob("*.py"))
BEGIN, END, LINE = (
    "# The parallel part begins here.",
    "# The parallel part ends here.",
    "# parallel",
)

Step = tuple[float, ...]  # losses, then the norm of the gradients


def names_of(recipe: str) -> dict[str, Any]:
    """Return the functions and classes of a script."""
    return runpy.run_path(str(FOLDER / f"{recipe}.py"))


def on_rank(rank: int, recipe: str) -> list[Step]:
    with keep_float64():
        return list(names_of(recipe)["train"]())


def updates(model: nn.Module, lr: float, losses: Callable[[], tuple[Tensor, ...]]) -> list[Step]:
    """Train in one process; the first loss is differentiated."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer, found = torch.optim.AdamW(trained, lr=lr), []
    for _ in range(3):
        values = losses()
        values[0].backward()
        norm = nn.utils.clip_grad_norm_(trained, 1.0)
        found.append((*(value.item() for value in values), norm.item()))
        optimizer.step()
        optimizer.zero_grad()
    return found


def dense() -> list[Step]:
    names = names_of("dense")
    model = names["build_model"]()
    parts = [names["load_microbatch"](i) for i in range(names["MICROBATCHES"])]
    whole = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    labels = F.pad(whole["labels"][:, 1:], (0, 1), value=-100)
    labels[F.pad(whole["position_ids"][:, 1:], (0, 1)) == 0] = -100  # the last of each document

    # With a cache, transformers does not separate the documents.
    inputs = {name: whole[name] for name in ("input_ids", "position_ids")} | {"use_cache": False}

    def loss() -> tuple[Tensor]:
        logits = model(**inputs).logits
        return (F.cross_entropy(logits.flatten(0, 1), labels.flatten()),)

    return updates(model, 1e-2, loss)


def moe() -> list[Step]:
    names = names_of("moe")
    model = names["build_model"]()
    model.set_experts_implementation("eager")

    def losses() -> tuple[Tensor, Tensor]:
        output = model(**names["load_batch"]())
        return output.loss, output.aux_loss

    return updates(model, 1e-2, losses)


def lora() -> list[Step]:
    names = names_of("lora")
    model = names["build_model"]()
    return updates(model, 1e-1, lambda: (model(**names["load_batch"]()).loss,))


def own_model() -> list[Step]:
    torch.manual_seed(0)
    model, tokens = names_of("own_model")["Transformer"](), torch.randint(128, (4, 48))

    def loss() -> tuple[Tensor]:
        logits = model(tokens, torch.arange(48))[:, :-1]
        return (F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()),)

    return updates(model, 1e-2, loss)


@pytest.mark.parametrize(
    ("reference", "size"),
    [
        (dense, 4),
        (moe, 4),
        pytest.param(lora, 4, marks=pytest.mark.long),
        pytest.param(own_model, 8, marks=pytest.mark.long),
    ],
)
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft asks for it
def test_losses_and_norms_are_those_of_one_process(
    ranks: Any, reference: Callable[[], list[Step]], size: int
) -> None:
    with keep_float64():
        expected = reference()
    assert expected[-1][0] < expected[0][0]
    for found in ranks(size).run(on_rank, reference.__name__):
        torch.testing.assert_close(
            torch.tensor(found, dtype=torch.float64),
            torch.tensor(expected, dtype=torch.float64),
            rtol=1e-10,
            atol=0,
        )


# The recipe that starts from a published checkpoint.


@pytest.fixture
def published(tmp_path: Path) -> Path:
    """Write a model as `save_pretrained` does, in bfloat16 and in several files."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    sizes: Any = {"hidden_size": 32, "moe_intermediate_size": 32, "num_hidden_layers": 2}
    heads: Any = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    config = Qwen3MoeConfig(vocab_size=128, num_experts=8, num_experts_per_tok=2, **sizes, **heads)
    folder = tmp_path / "published"
    Qwen3MoeForCausalLM(config).bfloat16().save_pretrained(folder, max_shard_size="40KB")
    assert len([*folder.glob("*.safetensors")]) > 1
    return folder


def pretrained(folder: Path, dtype: torch.dtype) -> Any:
    """Load a folder with transformers."""
    import transformers

    library: Any = transformers.AutoModelForCausalLM
    model = library.from_pretrained(folder, dtype=dtype)
    model.set_experts_implementation("eager")  # the default one computes in float32 at most
    return model


def tokens() -> Tensor:
    return torch.randint(128, (2, 16), generator=torch.Generator().manual_seed(5))


def tuned(
    rank: int, folder: Path, out: Path, ep: int, steps: int, dtypes: Any
) -> tuple[list[Step], Tensor]:
    """Run the recipe; return its steps, and the logits of the sharded model."""
    with keep_float64() if torch.float64 in dtypes else nullcontext():
        run, found = names_of("finetune")["train"](folder, out, ep, steps, *dtypes), []
        while True:
            try:
                found.append(next(run))
            except StopIteration as end:
                with torch.no_grad():
                    return found, end.value.eval()(tokens()).logits


@pytest.mark.parametrize(("ranks_after", "ep_after"), [(2, 1), (2, 2)])
def test_fine_tuning_resumes_on_other_degrees_and_exports(
    ranks: Any, published: Path, tmp_path: Path, ranks_after: int, ep_after: int
) -> None:
    double = (torch.float64, torch.float64)
    out, load_batch = tmp_path / "out", names_of("finetune")["load_batch"]
    with keep_float64():
        model, steps = pretrained(published, torch.float64).train(), count()
        expected = updates(model, 1e-3, lambda: (model(**load_batch(next(steps), 128)).loss,))
    assert expected[2][0] < expected[0][0]  # of the same rows
    parts = [(4, 2, 1), (ranks_after, ep_after, 3)]  # ranks, ep, last step
    found: list[Step] = []
    for size, ep, last in parts:
        results = ranks(size).run(tuned, published, out, ep, last, double)
        assert all(result[0] == results[0][0] for result in results)
        found += results[0][0]
        with keep_float64(), torch.no_grad():
            logits = pretrained(out / f"export-{last}", torch.float64)(tokens()).logits
        for _, sharded in results:
            torch.testing.assert_close(sharded, logits, rtol=1e-12, atol=1e-12)
    assert [step for step, *_ in found] == [0, 1, 2]
    torch.testing.assert_close(
        torch.tensor([row[1:] for row in found], dtype=torch.float64),
        torch.tensor(expected, dtype=torch.float64),
        rtol=1e-10,
        atol=0,
    )


def test_fine_tuning_exports_the_dtype_of_computation(
    ranks: Any, published: Path, tmp_path: Path
) -> None:
    from transformers import AutoConfig

    results = ranks(4).run(tuned, published, tmp_path / "out", 2, 1, ())
    export = tmp_path / "out" / "export-1"
    assert AutoConfig.from_pretrained(export).dtype == torch.bfloat16
    for path in export.glob("*.safetensors"):
        assert {tensor.dtype for tensor in load_file(path).values()} == {torch.bfloat16}
    with torch.no_grad():
        logits = pretrained(export, torch.bfloat16)(tokens()).logits
    for _, sharded in results:
        torch.testing.assert_close(sharded, logits, rtol=0.02, atol=0.02)


def code_lines(text: str) -> Iterator[tuple[str, bool]]:
    """Return the lines with code, and whether they are in the parallel part."""
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(
            node
        ):
            docstrings |= {*range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)}
    parallel = False
    for number, line in enumerate(text.splitlines(), start=1):
        word = line.strip()
        parallel = (parallel or word == BEGIN) and word != END
        if word and not word.startswith("#") and number not in docstrings:
            yield line, parallel or line.endswith(f"  {LINE}")


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_has_30_to_60_lines_and_at_most_15_of_them_are_parallel(recipe: str) -> None:
    text = (FOLDER / f"{recipe}.py").read_text("utf-8")
    lines = list(code_lines(text))
    assert 30 <= len(lines) <= 60
    assert 5 <= sum(parallel for _, parallel in lines) <= 15
    assert text.count(BEGIN) == text.count(END) > 0
    row = next(
        x for x in PAGE.read_text("utf-8").splitlines() if x.startswith(f"| [`{recipe}.py`]")
    )
    assert row.endswith(f"| {sum(parallel for _, parallel in lines)} |")
    outside = "\n".join(line for line, parallel in lines if not parallel and "import" not in line)
    for name in ("mesh", "fully_shard", "shard_batch", "count_labels", "parallelize"):
        assert name not in outside


@pytest.mark.long
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_runs_under_torchrun(recipe: str, published: Path, tmp_path: Path) -> None:
    path = FOLDER / f"{recipe}.py"
    text = path.read_text("utf-8")
    places = {
        f"tools/recipes/{recipe}.py": path,
        "MODEL": published,
        "OUT": tmp_path / "out",
    }
    commands = [line.split()[1:] for line in text.splitlines() if line.startswith("torchrun ")]
    printed = ""
    for words in commands:
        assert f"tools/recipes/{recipe}.py" in words
        command = [str(places.get(word, word)) for word in words]
        done = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", *command],
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        printed += done.stdout
    assert [line.partition(":")[0] for line in printed.splitlines()] == [
        f"step {step}" for step in range(3 * len(commands))
    ]
    if recipe == "dense":
        assert f"```text\n{printed}```" in PAGE.read_text("utf-8")
