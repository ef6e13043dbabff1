"""Read the sizes of a model from its configuration.

A field is one size under its hp-mesh name, such as ``"heads"``. The tables list the names that
families of models use for each field, such as ``"num_attention_heads"``. `read_numbers` reads the
fields that the rules of `ParallelDims.check` compare. `read_model_fields` reads these fields and
the fields that only the planner uses.
"""

from collections.abc import Iterator, Mapping
from math import gcd
from numbers import Number
from typing import Any

from ._config import check_named, read_field
from ._errors import (
    LARGEST,
    Violation,
    as_integer,
    broken,
    join_words,
    read_integer,
    refusal,
    show,
)

# Key: field, such as "heads". Value: a pair of the field's name in the configuration, such as
# "num_attention_heads", and the field's value.
Fields = dict[str, tuple[str, Any]]


def _table(**rows: str) -> Mapping[str, tuple[str, ...]]:
    """Create a table of names.

    Args:
        **rows: The name of an argument is a field, such as ``heads``. The value has the names of
            this field in configurations, with spaces between them.

    Returns:
        A dict. A key is a field, and the value is a tuple of its names in configurations.
    """
    return {row: tuple(names.split()) for row, names in rows.items()}


# Fields that the rules read. Each row has the names of one field in configurations, the most common
# name first. Hugging Face configurations, research code and the planner's `ModelShape` use them.
RULED = _table(
    heads="num_attention_heads n_heads num_heads n_head heads",
    kv_heads="num_key_value_heads n_kv_heads num_kv_heads kv_n_heads kv_heads",
    experts="num_experts num_local_experts n_routed_experts moe_num_experts experts",
    ffn="intermediate_size ffn_hidden_size ffn_dim n_inner hidden_dim dff ffn",
    vocab="vocab_size vocab",
    layers="num_hidden_layers n_layers num_layers n_layer layers",
    expert_ffn="moe_intermediate_size moe_ffn_hidden_size expert_ffn_hidden_size expert_ffn",
    dense_layers="first_k_dense_replace num_dense_layers moe_layer_start_index dense_layers",
    tied="tie_word_embeddings weight_tying tie_embeddings tied",
)
# Fields that only the planner reads.
SIZES = _table(
    hidden="hidden_size n_embd d_model dim hidden",
    head_dim="head_dim",
    latent="kv_lora_rank latent",
    query_latent="q_lora_rank query_latent",
    nope_dim="qk_nope_head_dim nope_dim",
    rope_dim="qk_rope_head_dim rope_dim",
    top_k="num_experts_per_tok num_experts_per_token moe_topk moe_top_k moe_k top_k",
    shared_ffn="shared_expert_intermediate_size moe_shared_expert_intermediate_size shared_ffn",
    groups="n_group groups",
    top_groups="topk_group top_groups",
)
# Integers from which `_derive` computes other fields.
COUNTS = _table(
    value_head_dim="v_head_dim",
    shared_experts=("n_shared_experts num_shared_experts num_shared_expert moe_num_shared_experts"),
    dense_ffn="intermediate_size_mlp",
    expert_step="interleave_moe_layer_step decoder_sparse_step",
    expansion="expansion_ratio",
)
# Strings, bools and lists from which `_derive` computes other fields.
WORDS = _table(
    family="model_type",
    name="name _name_or_path model_type",
    glu="glu",
    with_experts="is_moe",
    one_kv_head="multi_query",
    many_kv_heads="new_decoder_architecture",
    dense_list="mlp_only_layers",
    mlp_types="mlp_layer_types",
    gpt2_width="n_embd",
    layer_types="layer_types",
)
# A model with one of these names has layers that the planner cannot estimate. `OTHER_LAYERS` is
# ignored if the configuration lists the type of every layer and all types are attention.
OTHER_LAYERS = _table(
    **{
        "state-space layers": (
            "mamba_d_state mamba_n_heads mamba_num_heads n_mamba_heads mamba_expand ssm_state_size "
            "state_size time_step_rank ssm_cfg hybrid_override_pattern attn_layer_period "
            "attn_layer_indices hybrid_layer_ids"
        ),
        "linear attention": (
            "linear_num_key_heads linear_num_value_heads linear_num_heads linear_attn_config "
            "linear_attn_alpha_factor full_attention_interval layer_group_size"
        ),
        "recurrent layers": "lru_width",
        "convolutions": "conv_L_cache",
    }
)
OTHER_MODELS = _table(
    **{
        "state-space heads beside attention": "mamba_d_ssm",
        "sparse attention": "index_topk",
        "layers of several sizes": "block_configs",
        "an encoder": "is_encoder_decoder",
    }
)
# Families with layers that the planner cannot estimate. Their configurations have none of the names
# above.
OTHER_FAMILIES: Mapping[str, str] = {
    "dory": "a gate projection in attention",
    "gemma4": "heads of several sizes",
    "gemma4_text": "heads of several sizes",
    "gemma4_unified": "heads of several sizes",
    "gemma4_unified_text": "heads of several sizes",
    "hrm_text": "layers that run more than once",
    "jetmoe": "experts in attention",
    "longcat_flash": "two attentions in a layer, and experts without parameters",
    "moshi": "a second decoder",
}
# Families of encoders. The families of `DECODERS_TOO` have decoder classes too.
ENCODERS, DECODERS_TOO = _table(
    encoders=(
        "albert beit clip clip_text_model convbert data2vec-audio data2vec-vision deberta "
        "deberta-v2 deit dinov2 distilbert esm esmc eurobert gte hubert ibert jina_embeddings_v3 "
        "layoutlm layoutlmv2 layoutlmv3 longformer luke mobilebert modernbert mpnet mra nomic_bert "
        "nystromformer siglip siglip_text_model splinter squeezebert tapas vit vit_mae wav2vec2 "
        "wavlm yoso"
    ),
    decoders_too=(
        "bert big_bird camembert data2vec-text electra ernie megatron-bert rembert roberta "
        "roberta-prelayernorm roc_bert roformer xlm-roberta xlm-roberta-xl xmod"
    ),
).values()
# Ends of names in the field ``architectures``.
ENCODER_CLASSES = ("ForMaskedLM", "ForPreTraining", "ForImageClassification", "ForCTC")
DECODER_CLASSES = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
# Fields that list the type of each layer.
LAYER_TYPES = ("layer_types", "layers_block_type", "block_types", "attn_type_list")
# Types of layers with softmax attention.
ATTENTION = ("full_attention", "attention", "sliding_attention", "chunked_attention", 1)
# A model can have submodules or lists with these names, so values that are neither numbers nor
# strings are ignored. Each key of `RULED` can be the name of its field in a configuration too.
AMBIGUOUS = (*RULED, "hidden", "dim", "groups")
# If a configuration has two names of one of these fields, their values must be equal. ``layers`` is
# absent because LongCat-Flash counts pairs of layers in ``num_layers``.
ONE_VALUE = ("heads", "kv_heads", "experts", "ffn", "vocab", "expert_ffn")
# Fields that can have a list with one number per layer.
PER_LAYER = ("intermediate_size",)
# Fields that can be 0.
CAN_BE_ZERO = ("experts", "dense_layers")
# Names of nested configurations: language model, attention, feed-forward part.
NESTED = ("text_config", "attn_config", "ffn_config")
# Configurations of these families omit the feed-forward width if it is 4 * hidden.
USUAL_WIDTH = ("bloom", "falcon", "mpt", "gpt_neo")
USUAL_EXPANSION = 4
# Families that tie input and output embeddings by default in transformers. Their configurations
# omit the field.
TIED = (
    *("bert", "bert-generation", "big_bird", "biogpt", "bloom", "camembert", "cohere", "cohere2"),
    *("cohere2_moe", "cohere_compass_text", "ctrl", "data2vec-text", "electra", "ernie"),
    *("ernie4_5", "ernie4_5_moe", "falcon", "gemma", "gemma2", "gemma3", "gemma3_text", "gemma3n"),
    *("gemma3n_text", "gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text", "gpt-sw3"),
    *("gpt2", "gpt_bigcode", "gpt_neo", "granite_swa", "jetmoe", "lfm2", "megatron-bert"),
    *("minicpm3", "modernbert-decoder", "mpt", "openai-gpt", "opt", "roberta"),
    *("roberta-prelayernorm", "roc_bert", "roformer", "smollm3", "starcoder2", "vaultgemma"),
    *("xglm", "xlm-roberta", "xlm-roberta-xl", "xmod", "youtu"),
)


def read_model_fields(model: object) -> Fields:
    """Read all fields of a model that hp-mesh knows.

    If the model has a nested ``text_config``, values in ``text_config`` have priority. A field with
    the value None has no entry in the result.

    Args:
        model: A mapping, a configuration object, or an object with an attribute ``config``. The
            values in ``config`` have priority over the object's attributes.

    Returns:
        A dict. A key is an hp-mesh name of a field, such as ``"heads"``. The value is a pair: the
        field's name in the configuration, such as ``"num_attention_heads"``, and its value.

    Raises:
        ParallelDimsError: ``model`` has neither keys nor attributes (for example a string), or two
            names of one field have different values.
    """
    check_named("model", model)
    sources, fields = [*_sources(model)], Fields()
    for field, names in {**RULED, **SIZES, **COUNTS, **WORDS}.items():
        for source in sources:
            given = {name: value for name in names if (value := _read(source, name)) is not None}
            if given:
                fields[field] = next(iter(given.items()))
                if field in ONE_VALUE:
                    _check_one_value(field, given)
                break
    _derive(fields)
    return fields


def _check_one_value(field: str, given: Mapping[str, Any]) -> None:
    numbers = {name: number for name, value in given.items() if (number := read_integer(value))}
    if len({*numbers.values()}) > 1:
        texts = join_words((f"{name}={number}" for name, number in numbers.items()), "and")
        reason = f"{texts} differ, but all of them are names of {field}; give one of them"
        raise refusal("names", reason, numbers)


def read_other_layers(model: object) -> dict[str, dict[str, Any]]:
    """Find layers in a model that the planner cannot estimate.

    Returns:
        A dict. A key describes a kind of layers, such as ``"linear attention"``. The value is a
        dict with the evidence: names and values in the configuration that only models with such
        layers have. The outer dict is empty if the planner can estimate all layers.
    """
    sources = [*_sources(model)]

    def read(name: str) -> Any:
        return next((v for s in sources if (v := _read(s, name)) is not None), None)

    found: dict[str, dict[str, Any]] = {}
    types = [(name, kinds) for name in LAYER_TYPES if isinstance(kinds := read(name), list | tuple)]
    for name, kinds in types:
        others = dict.fromkeys(kind for kind in map(_word, kinds) if kind not in ATTENTION)
        if others:
            found.setdefault("other layers than attention", {})[name] = [*others]
    tables = OTHER_MODELS if types and not found else {**OTHER_LAYERS, **OTHER_MODELS}
    for kind, names in tables.items():
        given = {name: value for name in names if _is_set(value := read(name))}
        if given:
            found[kind] = given
    family = read("model_type")
    if isinstance(family, str) and family in OTHER_FAMILIES and not found:
        found[OTHER_FAMILIES[family]] = {"model_type": family}
    return found or _read_encoder(family, read("architectures"))


def _read_encoder(family: object, classes: object) -> dict[str, dict[str, Any]]:
    """Return the evidence that a model is an encoder, as `read_other_layers` does.

    Args:
        family: Value of ``model_type``.
        classes: Value of ``architectures``: a list with the names of the model's classes.
    """
    names = [str(name) for name in classes] if isinstance(classes, list | tuple) else []
    is_decoder = any(name.endswith(DECODER_CLASSES) for name in names)
    if any(name.endswith(ENCODER_CLASSES) for name in names) or (
        family in DECODERS_TOO and names and not is_decoder
    ):
        return {"an encoder": {"architectures": names}}
    return {"an encoder": {"model_type": family}} if family in ENCODERS else {}


def _read(source: object, name: str) -> Any:
    """Read one entry of a mapping, or one attribute of an object.

    Returns:
        The value. None if the entry or attribute does not exist, is a submodule, or cannot be read.
        Some configurations raise an error for an attribute that differs between layers.
    """
    try:
        value = read_field(source, name)
    except Exception:  # noqa: BLE001 (properties of other libraries may raise anything)
        return None
    return value if name not in AMBIGUOUS or isinstance(value, Number | str) else None


def _word(value: object) -> Any:
    """Convert a layer type to a hashable value.

    Returns a string or an integer unchanged. Returns the (shortened) ``repr`` of any other value.
    """
    return value if isinstance(value, str | int) else show(value)


def _is_set(value: object) -> bool:
    """Return whether a value is a nonzero integer, or a nonempty string, list, tuple or dict."""
    kinds = (str, int, list, tuple, dict)  # not a submodule with the name of the field
    return isinstance(value, kinds) and bool(value)


def _sources(model: object) -> Iterator[object]:
    for source in (read_field(model, "config"), model):
        if source is not None:
            inner, *parts = (read_field(source, name) for name in NESTED)
            yield from (each for each in (inner, source, *parts) if each is not None)


def _derive(fields: Fields) -> None:
    """Add fields that follow from others, and convert fields that a family defines differently.

    For example, ``multi_query=True`` means that ``kv_heads`` is 1. In Llama 4,
    ``intermediate_size`` is the width of the experts, not the width of dense layers.

    Args:
        fields: Result of `read_model_fields` so far. The dict is changed in place.
    """
    given = {name: value for name, (_, value) in fields.items()}
    if "tied" not in fields and given.get("family") in TIED:
        fields["tied"] = "tie_word_embeddings", True
    if given.get("one_kv_head") is True and not given.get("many_kv_heads"):
        fields["kv_heads"] = "kv_heads", 1  # Falcon's field has another number
    if given.get("latent") and "heads" in fields:  # multi-head latent attention
        fields["kv_heads"] = fields["heads"]
        if "value_head_dim" in fields:
            fields["head_dim"] = fields["value_head_dim"]
    if given.get("with_experts") is False:
        fields["experts"] = "is_moe", 0
    dense = _dense_layers(given)
    if dense is not None:
        fields["dense_layers"] = "dense_layers", dense
    if given.get("dense_ffn"):
        # Llama 4: ``intermediate_size`` is the width of the experts and of the shared expert.
        if "ffn" in fields:
            fields["expert_ffn"] = fields["shared_ffn"] = fields["ffn"]
        fields["ffn"] = fields["dense_ffn"]
    usual = given.get("family") in USUAL_WIDTH or "gpt2_width" in fields
    hidden, expansion = given.get("hidden"), given.get("expansion") or USUAL_EXPANSION
    if "ffn" not in fields and usual and isinstance(hidden, int) and isinstance(expansion, int):
        fields["ffn"] = "ffn", expansion * hidden


def _dense_layers(given: Mapping[str, Any]) -> int | None:
    """Return the number of layers without experts.

    Configurations give this number by three names:

    - ``mlp_layer_types`` lists the type of each layer.
    - ``decoder_sparse_step=n`` means that every n-th layer has experts.
    - ``mlp_only_layers`` lists the indices of additional layers without experts.

    Args:
        given: Values of the configuration, by the name of the field in hp-mesh. The key
            ``"mlp_types"`` has the value of ``mlp_layer_types``.

    Returns:
        The number of layers. None if the configuration has none of the three names, or a number is
        invalid.
    """
    types, listed = given.get("mlp_types"), given.get("dense_list")
    if isinstance(types, list | tuple):
        return types.count("dense")
    numbers = (given.get("layers"), given.get("expert_step"), given.get("dense_layers", 0))
    layers, step, first = (as_integer(number) or 0 for number in numbers)
    if not all(isinstance(number, int) and number >= 0 for number in (layers, step, first)):
        return None
    count = layers - layers // step if step else first
    if isinstance(listed, list | tuple):
        after = range(0 if step else first, layers)
        return count + len({i for i in listed if i in after and (i + 1) % (step or 1) == 0})
    return count if step else None


def read_numbers(
    model: object, seq_len: object, global_batch: object
) -> tuple[dict[str, tuple[str, int]], dict[str, Violation]]:
    """Read the sizes that the rules of `ParallelDims.check` compare with degrees.

    If a field has one number per layer, the result has the greatest common divisor of the numbers.
    A degree divides all numbers if and only if it divides their greatest common divisor.

    Args:
        model: A mapping, a configuration object, or an object with an attribute ``config``.
        seq_len: Number of tokens per sequence, or None.
        global_batch: Number of sequences per optimizer step, or None.

    Returns:
        A pair of dicts. A key of both is an hp-mesh name of a field, such as ``"heads"``.

        - The first dict has the fields with a valid value. A value of the dict is a pair: the
          field's name in the configuration, and the number.
        - The second dict has the fields with an invalid value. A value of the dict is a
          `Violation` that describes the problem.

        A field that is absent or None is in neither dict.

    Raises:
        ParallelDimsError: ``model`` has neither keys nor attributes (for example a string), or two
            names of one field have different values.
    """
    given = {name: found for name, found in read_model_fields(model).items() if name in RULED}
    given |= {"seq_len": ("seq_len", seq_len), "global_batch": ("global_batch", global_batch)}
    numbers: dict[str, tuple[str, int]] = {}
    wrong: dict[str, Violation] = {}
    for field, (name, value) in given.items():
        if value is None:
            continue
        shown, number = _parse_number(field, name, value)
        if number is not None:
            numbers[field] = shown, number
        else:
            reason = f"{name}={show(value)} is not {_legal(field, value)}"
            wrong[field] = broken("number", reason, {name: value})
    return numbers, wrong


def _parse_number(field: str, name: str, value: Any) -> tuple[str, int | None]:
    """Convert the value of one field to a number.

    Args:
        field: hp-mesh name of the field, such as ``"ffn"``.
        name: Name of the field in the configuration, such as ``"intermediate_size"``.
        value: The value in the configuration. It may be a list with one number per layer.

    Returns:
        A pair: a name for messages, and the number.

        - If ``value`` is one number, the pair has ``name`` and the number.
        - If ``value`` is a list, the number is the greatest common divisor of the list. The name is
          ``"gcd(intermediate_size)"`` if the list has different numbers, otherwise ``name``.
        - If ``field`` is ``"tied"``, the number is a bool.
        - If ``value`` is invalid, the number is None.
    """
    if field == "tied":
        return name, value if isinstance(value, bool) else None
    if field in CAN_BE_ZERO and value is not False and value == 0:
        return name, 0
    values = value if name in PER_LAYER and isinstance(value, list | tuple) else [value]
    numbers = [n for n in map(read_integer, values) if n is not None and 0 < n <= LARGEST]
    if not numbers or len(numbers) < len(values):
        return name, None
    return name if len({*numbers}) == 1 else f"gcd({name})", gcd(*numbers)


def _legal(field: str, value: Any) -> str:
    if field == "tied":
        return "True or False"
    too_large = isinstance(value, int) and value > LARGEST
    return f"at most {LARGEST}" if too_large else "a positive integer"
