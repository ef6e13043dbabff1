"""The sizes of a model, read from the configuration that describes it."""

from collections.abc import Mapping
from typing import Any

from .._config import read_field
from .._errors import ParallelDimsError, Violation, join_words, raise_errors
from .._model import SPELLINGS
from ._values import integer_violations

# What the rules of a mesh read is spelled as there.
SIZES: Mapping[str, tuple[str, ...]] = {
    "layers": SPELLINGS["layers"],
    "hidden": ("hidden_size", "n_embd", "d_model", "dim", "hidden"),
    "heads": SPELLINGS["heads"],
    "kv_heads": SPELLINGS["kv_heads"],
    "head_dim": ("head_dim",),
    "ffn": (*SPELLINGS["ffn"], "n_inner", "hidden_dim"),
    "vocab": SPELLINGS["vocab"],
    "experts": SPELLINGS["experts"],
    "top_k": ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k"),
    "expert_ffn": SPELLINGS["expert_ffn"],
    "shared_ffn": ("shared_expert_intermediate_size", "shared_ffn"),
    "dense_layers": ("first_k_dense_replace", "dense_layers"),
    "groups": ("n_group", "groups"),
    "top_groups": ("topk_group", "top_groups"),
}
REQUIRED = ("layers", "hidden", "heads", "vocab")
# Model families whose feed-forward part is two matrices with an activation between.
UNGATED = (
    *("gpt2", "gpt_neo", "gpt_neox", "gptj", "gpt_bigcode", "opt", "bloom", "falcon", "phi", "mpt"),
    *("starcoder2", "nemotron", "bert"),
)
# Those that leave the width of the feed-forward part out where it is the usual one.
USUAL_WIDTH = ("bloom", "falcon", "mpt", "gpt_neo")


def read_shape(config: object) -> dict[str, Any]:
    """Return the constructor arguments of a shape that a configuration gives.

    Raises `ParallelDimsError` that names every size which is missing.
    """
    source = read_field(config, "config") or config
    source = read_field(source, "text_config") or source
    sizes = {field: _first(source, names) for field, names in SIZES.items()}
    raise_errors(integer_violations({n: v for n, v in sizes.items() if v is not None}, minimum=0))
    family = read_field(source, "model_type") or ""
    usual = family in USUAL_WIDTH or read_field(source, "n_embd")  # GPT-2 and what follows it
    if sizes["ffn"] is None and sizes["hidden"] is not None and usual:
        sizes["ffn"] = (_count(source, "expansion_ratio") or 4) * sizes["hidden"]
    one_for_all = read_field(source, "multi_query") is True
    if one_for_all and not read_field(source, "new_decoder_architecture"):
        sizes["kv_heads"] = 1  # Falcon writes another number there
    missing = [field for field in (*REQUIRED, "ffn") if sizes[field] is None]
    if missing:
        raise ParallelDimsError([_missing(field) for field in missing])
    name = read_field(source, "name") or read_field(source, "_name_or_path") or family
    glu = read_field(source, "glu")
    shape = {field: value for field, value in sizes.items() if value is not None}
    shape |= {
        "name": str(name),
        "glu": family not in UNGATED if glu is None else bool(glu),
        "tied": bool(_first(source, SPELLINGS["tied"])),
    }
    return shape | _latent(source, shape) | _experts(source, shape)


def _latent(source: object, shape: Mapping[str, Any]) -> dict[str, Any]:
    """Return the heads and the latent of attention whose keys and values come from one."""
    latent, width = _count(source, "kv_lora_rank"), _count(source, "v_head_dim")
    if not latent or not width:
        return {}
    return {"head_dim": width, "kv_heads": shape["heads"], "latent": latent}


def _experts(source: object, shape: Mapping[str, Any]) -> dict[str, Any]:
    if not shape.get("experts"):
        names = ("experts", "top_k", "shared_ffn", "dense_layers", "groups", "top_groups")
        return dict.fromkeys(names, 0)
    found: dict[str, Any] = {}
    if shape.get("groups", 0) <= 1 or not shape.get("top_groups"):
        found |= {"groups": 0, "top_groups": 0}  # one group is no limit
    width = shape.get("expert_ffn") or shape["ffn"]
    shared = _count(source, "n_shared_experts")
    if shared:
        found["shared_ffn"] = shared * width
    dense_width = _count(source, "intermediate_size_mlp")
    if dense_width:  # Llama 4: experts have the plain name, and each layer of them one shared
        found |= {"ffn": dense_width, "expert_ffn": shape["ffn"], "shared_ffn": shape["ffn"]}
    step = _count(source, "interleave_moe_layer_step") or _count(source, "decoder_sparse_step")
    if step:
        found["dense_layers"] = shape["layers"] - shape["layers"] // step
    dense = read_field(source, "mlp_only_layers")
    if isinstance(dense, list | tuple):
        found["dense_layers"] = found.get("dense_layers", 0) + len(dense)
    return found


def _count(source: object, name: str) -> int:
    """Return a number that the configuration may have, 0 where it has none."""
    value = read_field(source, name)
    if value is None:
        return 0
    raise_errors(integer_violations({name: value}, minimum=0))
    return int(value)


def _first(source: object, names: tuple[str, ...]) -> Any:
    for name in names:
        value = read_field(source, name)
        if value is not None:
            return value
    return None


def _missing(field: str) -> Violation:
    return Violation(
        rule="number",
        values={field: None},
        reason=f"the configuration has no {field}; give {join_words(SIZES[field])}",
    )
