"""Sizes of decoder models, read from a configuration or from a table of published models."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from .._errors import (
    ParallelDimsError,
    Violation,
    as_integer,
    flag_violations,
    integer_violations,
    join_words,
    number_violation,
    raise_errors,
    show,
)
from .._model import COUNTS, RULED, SIZES, read_model_fields, read_other_layers
from .._rules import RULES
from ._fields import check_fields

MOST_LAYERS = 100_000  # `plan` takes time in proportion to the number of layers
REQUIRED = ("layers", "hidden", "heads", "vocab", "ffn")
OF_EXPERTS = ("experts", "top_k", "shared_ffn", "dense_layers", "groups", "top_groups")
# Fields of `RULES` that are settings of the training run, not sizes of the model.
OF_RUN = ("seq_len", "global_batch")
# Fields that `to_config` returns under the names of `ModelShape`. Hugging Face models have no
# common name for them.
OWN_NAMES = ("expert_ffn", "dense_layers")
# Model families without gates in their feed-forward layers.
UNGATED = (
    *("gpt2", "gpt_neo", "gpt_neox", "gptj", "gpt_bigcode", "opt", "bloom", "falcon", "phi", "mpt"),
    *("starcoder2", "nemotron", "arcee", "apertus", "jais2", "nanochat", "persimmon", "fuyu"),
    *("codegen", "biogpt", "xglm", "openai-gpt", "ctrl", "bert", "bert-generation", "big_bird"),
    *("camembert", "data2vec-text", "electra", "ernie", "megatron-bert", "rembert", "roberta"),
    *("roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl", "xmod"),
    "apertus1p5_text",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes of a decoder model, dense or with experts.

    Numbers of parameters do not include biases.

    Args:
        name: Name of the model.
        layers: Number of layers.
        hidden: Width of the residual stream.
        heads: Number of query heads.
        kv_heads: Number of key and value heads. Defaults to ``heads``.
        head_dim: Width of one head. Defaults to ``hidden // heads``.
        ffn: Inner width of a dense feed-forward layer. With ``glu``, each of the two input matrices
            has this width.
        vocab: Size of the vocabulary.
        glu: If True, feed-forward layers have a gate: three matrices instead of two.
        tied: If True, the embedding is also used as the output matrix.
        experts: Number of routed experts per layer; 0 for a dense model.
        top_k: Number of experts per token.
        expert_ffn: Inner width of one expert. Defaults to ``ffn``.
        shared_ffn: Total inner width of the shared experts, which process every token.
        dense_layers: Number of layers without experts in a model with experts.
        latent: Width of the compressed keys and values in multi-head latent attention (arXiv
            2405.04434, section 2.1); 0 for other attention.
        query_latent: Width of the compressed queries in multi-head latent attention; 0 if queries
            are not compressed.
        nope_dim: Width of the part of a query head without rotary position embedding, in multi-head
            latent attention. If ``nope_dim`` and ``rope_dim`` are 0, the sizes of the latent
            projections are unknown. Parameters are then counted as if attention had one projection
            to keys and one projection to values, each twice as wide as ``latent``.
        rope_dim: Width of the part of a query head with rotary position embedding, in multi-head
            latent attention.
        groups: Number of groups into which the router divides the experts; 0 without groups.
        top_groups: Number of groups from which the router chooses a token's experts; 0 without
            groups.

    Raises:
        ParallelDimsError: A value is invalid. The error lists all of them.

    Examples:
        >>> shape = ModelShape(layers=2, hidden=512, heads=8, ffn=2048, vocab=1000)
        >>> shape.head_dim, shape.parameters
        (64, 9415168)
    """

    name: str = ""
    layers: int
    hidden: int
    heads: int
    kv_heads: int | None = None
    head_dim: int | None = None
    ffn: int
    vocab: int
    glu: bool = True
    tied: bool = False
    experts: int = 0
    top_k: int = 0
    expert_ffn: int | None = None
    shared_ffn: int = 0
    dense_layers: int = 0
    latent: int = 0
    query_latent: int = 0
    nope_dim: int = 0
    rope_dim: int = 0
    groups: int = 0
    top_groups: int = 0

    def __post_init__(self) -> None:
        raise_errors(check_fields(self))
        raise_errors(_violations(self))
        if self.kv_heads is None:
            object.__setattr__(self, "kv_heads", self.heads)
        if self.head_dim is None:
            object.__setattr__(self, "head_dim", self.hidden // self.heads)
        if self.expert_ffn is None:
            object.__setattr__(self, "expert_ffn", self.ffn)

    @classmethod
    def from_config(cls, config: object) -> "ModelShape":
        """Read the sizes of a model from its configuration.

        Args:
            config: A Hugging Face configuration object, or a mapping such as a parsed
                ``config.json``. It may have a nested ``text_config``. The field names of all known
                model families are accepted, such as ``n_layer`` and ``num_hidden_layers``.

        Returns:
            A `ModelShape` with the sizes.

        Raises:
            ParallelDimsError: A required field is missing. Or the planner cannot estimate some
                layers of the model, such as Mamba layers, which have no softmax attention.

        Examples:
            >>> config = {"n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 100}
            >>> ModelShape.from_config(config | {"model_type": "gpt2"}).ffn
            256
        """
        shape = _read_shape(config)
        try:
            return cls(**shape)
        except ParallelDimsError as error:
            raise _name_sources(error, config) from None

    def to_config(self) -> Mapping[str, int]:
        """Convert to the argument ``model`` of `ParallelDims.check`.

        Returns:
            Dictionary from names in Hugging Face configurations, such as ``"num_hidden_layers"``,
            to sizes. It has all sizes of the model that `ParallelDims.check` needs.
        """
        return {name: getattr(self, field) for field, name in _CONFIG_NAMES.items()}

    @property
    def query_width(self) -> int:
        """Width of the queries of one layer: number of query heads times head width."""
        return self.heads * (self.head_dim or 0)

    @property
    def kv_width(self) -> int:
        """Width of the keys of one layer, which is also the width of its values.

        The width is the number of key heads times the head width. With multi-head latent attention,
        it is ``2 * latent``.
        """
        return 2 * self.latent or (self.kv_heads or 0) * (self.head_dim or 0)

    @property
    def attention_width(self) -> int:
        """Sum of the widths of queries, keys, values and attention output of one layer.

        With multi-head latent attention, each query head has its own keys and values. The sum then
        also includes `latents`.
        """
        if not self.latent:
            return 2 * (self.query_width + self.kv_width)
        return 2 * (self.score_width + self.query_width) + self.latents

    @property
    def latents(self) -> int:
        """Total width of the latents of one layer in multi-head latent attention.

        The latents are the compressed queries, and the compressed keys and values. The key part
        with rotary position embedding (``rope_dim``) is counted too. The width is 0 if the model
        does not use multi-head latent attention.
        """
        return self.latent and self.latent + self.rope_dim + self.query_latent

    @property
    def score_width(self) -> int:
        """Width over which queries and keys are multiplied, summed over all heads of one layer.

        With multi-head latent attention, the width is ``heads * (nope_dim + rope_dim)``. Otherwise
        it equals `query_width`.
        """
        return self.heads * (self.nope_dim + self.rope_dim) or self.query_width

    @property
    def expert_width(self) -> int:
        """The field ``expert_ffn``: inner width of one expert. The type is int, never None."""
        return self.expert_ffn or 0

    @property
    def expert_layers(self) -> int:
        """Number of layers with experts."""
        return self.layers - self.dense_layers if self.experts else 0

    @property
    def matrices(self) -> int:
        """Number of weight matrices of one feed-forward layer: 3 with a gate, else 2."""
        return 3 if self.glu else 2

    @property
    def attention_parameters(self) -> int:
        """Number of parameters of one layer in its attention and its two norms."""
        projections = self.hidden * (2 * self.query_width + 2 * self.kv_width)
        if self.latent and self.nope_dim:
            # The inputs are compressed to latents. The latents are projected to queries, keys and
            # values (arXiv 2405.04434, section 2.1).
            query = self.score_width
            projections = self.hidden * (query if not self.query_latent else self.query_latent)
            projections += self.query_latent * query + self.hidden * (self.latent + self.rope_dim)
            projections += self.latent * (self.heads * self.nope_dim + self.query_width)
            projections += self.query_width * self.hidden
        return projections + 2 * self.hidden

    @property
    def dense_layer_parameters(self) -> int:
        """Number of parameters of one layer without experts."""
        return self.attention_parameters + self.matrices * self.hidden * self.ffn

    @property
    def shared_layer_parameters(self) -> int:
        """Number of parameters of one layer with experts, without its routed experts.

        Counts the attention, the norms, the shared experts and the router.
        """
        shared = self.matrices * self.hidden * self.shared_ffn
        return self.attention_parameters + shared + self.hidden * self.experts

    @property
    def one_expert_parameters(self) -> int:
        """Number of parameters of one routed expert."""
        return self.matrices * self.hidden * self.expert_width

    @property
    def embedding_parameters(self) -> int:
        """Number of parameters of the embedding. The output matrix has equally many."""
        return self.vocab * self.hidden

    @property
    def expert_parameters(self) -> int:
        """Number of parameters of all routed experts in all layers."""
        return self.expert_layers * self.experts * self.one_expert_parameters

    @property
    def dense_parameters(self) -> int:
        """Number of parameters of the whole model, without its routed experts."""
        with_experts = self.expert_layers
        blocks = (self.layers - with_experts) * self.dense_layer_parameters
        blocks += with_experts * self.shared_layer_parameters
        ends = self.embedding_parameters * (1 if self.tied else 2) + self.hidden
        return blocks + ends

    @property
    def parameters(self) -> int:
        """Number of parameters of the whole model."""
        return self.dense_parameters + self.expert_parameters

    @property
    def layer_work(self) -> float:
        """Number of parameters that one token uses in one layer, averaged over all layers."""
        routed = self.expert_layers * self.top_k * self.one_expert_parameters
        blocks = (self.layers - self.expert_layers) * self.dense_layer_parameters
        return (blocks + self.expert_layers * self.shared_layer_parameters + routed) / self.layers

    @property
    def active_parameters(self) -> int:
        """Number of parameters that one token uses in the whole model.

        Each layer with experts counts ``top_k`` routed experts. The embedding and the output matrix
        are included.
        """
        return self.dense_parameters + self.expert_layers * self.top_k * self.one_expert_parameters

    def flops_per_token(self, seq_len: int) -> int:
        """Return the number of floating-point operations per token, forward and backward.

        Each weight that multiplies the token costs six operations. Causal attention over the
        sequence costs additional operations (arXiv 2204.02311, appendix B). Recomputation is not
        counted.

        Args:
            seq_len: Number of tokens of one sequence.

        Returns:
            Number of operations per token.
        """
        inputs = self.embedding_parameters if not self.tied else 0
        attention = 3 * self.layers * (self.score_width + self.query_width) * seq_len
        return 6 * (self.active_parameters - inputs) + attention


def _config_names() -> Mapping[str, str]:
    """Return a dictionary from fields of `ModelShape` to names in Hugging Face configurations.

    The dictionary has the fields that at least one rule of `RULES` needs. Raises `TypeError` if a
    rule needs a model size that is not a field of `ModelShape`, because the planner would silently
    skip this rule.
    """
    read = {field for rule in RULES for field in (*rule.fields, *rule.hints)} - {*OF_RUN}
    known = RULED.keys() & ModelShape.__dataclass_fields__.keys()
    if unknown := sorted(read - known):
        raise TypeError(f"rules read {join_words(unknown, 'and')}, which ModelShape lacks")
    return {field: field if field in OWN_NAMES else RULED[field][0] for field in sorted(read)}


_CONFIG_NAMES = _config_names()


def _violations(shape: ModelShape) -> Iterator[Violation]:
    if shape.layers > MOST_LAYERS:
        yield number_violation("layers", shape.layers, f"1 to {MOST_LAYERS}")
    if shape.head_dim is None and shape.hidden % shape.heads:
        yield number_violation(
            "head_dim", None, f"a width: heads={shape.heads} does not divide hidden={shape.hidden}"
        )
    if shape.kv_heads is not None and shape.heads % shape.kv_heads:
        yield number_violation("kv_heads", shape.kv_heads, f"a divisor of heads={shape.heads}")
    for name, other in (
        ("query_latent", "nope_dim"),
        ("nope_dim", "latent"),
        ("rope_dim", "nope_dim"),
    ):
        if getattr(shape, name) and not getattr(shape, other):
            missing = other if shape.latent else "latent"
            yield number_violation(name, getattr(shape, name), f"0, or give {missing}")
    if shape.experts and not 1 <= shape.top_k <= shape.experts:
        yield number_violation("top_k", shape.top_k, f"1 to experts={shape.experts}")
    if shape.experts and shape.dense_layers >= shape.layers:
        yield number_violation("dense_layers", shape.dense_layers, f"0 to {shape.layers - 1}")
    if shape.groups and (shape.experts % shape.groups or not shape.experts):
        yield number_violation("groups", shape.groups, f"a divisor of experts={shape.experts}")
    if shape.top_groups > shape.groups or (shape.groups and not shape.top_groups):
        legal = f"1 to groups={shape.groups}" if shape.groups else "0, or give groups"
        yield number_violation("top_groups", shape.top_groups, legal)
    for name in ("top_k", "shared_ffn", "dense_layers"):
        if getattr(shape, name) and not shape.experts:
            yield number_violation(name, getattr(shape, name), "0, or give experts")


def _read_shape(config: object) -> dict[str, Any]:
    """Convert a Hugging Face configuration to a dictionary of arguments for `ModelShape`.

    Raises `ParallelDimsError` if a required size is missing or invalid.
    """
    found = {f: (name, as_integer(v)) for f, (name, v) in read_model_fields(config).items()}
    given = {field: value for field, (_, value) in found.items() if value is not None}
    if given.get("experts") and "top_k" not in given:
        raise ParallelDimsError([_missing("top_k")])
    raise_errors(_unsupported_layers(config))
    wrong: list[Violation] = []
    for field in (*RULED, *SIZES, *COUNTS):
        if field in given and field != "tied":
            own = ModelShape.__dataclass_fields__.get(field)
            least = 1 if own and own.default != 0 else 0
            wrong += integer_violations(dict([found[field]]), minimum=least)
    raise_errors(wrong)
    raise_errors(_missing(field) for field in REQUIRED if field not in given)
    raise_errors(_list_violations(found))
    shape = {field: given[field] for field in (*RULED, *SIZES) if field in given}
    shape["name"] = str(given.get("name", ""))
    shape["glu"] = bool(given.get("glu", given.get("family", "") not in UNGATED))
    shape["tied"] = bool(given.get("tied"))
    if not shape.get("experts"):
        return shape | dict.fromkeys(OF_EXPERTS, 0)
    if given.get("groups", 0) <= 1 or not given.get("top_groups"):
        shape |= {"groups": 0, "top_groups": 0}  # one group does not limit the choice of experts
    if given.get("shared_experts"):
        shape["shared_ffn"] = given["shared_experts"] * (given.get("expert_ffn") or given["ffn"])
    return shape


def _name_sources(error: ParallelDimsError, config: object) -> ParallelDimsError:
    """Add the names in ``config`` to the messages, which have the names of `ModelShape`."""
    names = {field: name for field, (name, _) in read_model_fields(config).items()}
    derived = ("mlp_types", "expert_step", "dense_list")
    sources = [names[field] for field in derived if field in names]
    if names.get("dense_layers") == "dense_layers" and sources:
        names["dense_layers"] = join_words(sources, "and")
    violations = []
    for each in error.violations:
        given = [field for field in each.values if names.get(field, field) != field]
        texts = "; ".join(f"{field} is read from {names[field]}" for field in given)
        violations.append(replace(each, reason=f"{each.reason} ({texts})") if texts else each)
    return ParallelDimsError(violations)


def _list_violations(found: Mapping[str, tuple[str, Any]]) -> Iterator[Violation]:
    """Yield the violations of the fields that are read but are not numbers.

    Args:
        found: Dictionary from fields to pairs of the name in the configuration and the value.
    """
    layers = found["layers"][1]
    if "tied" in found:
        yield from flag_violations(dict([found["tied"]]))
    if "layer_types" in found:
        yield from _type_violations(*found["layer_types"], layers)
    if not found.get("experts", ("", 0))[1]:
        return
    if "mlp_types" in found:
        yield from _type_violations(*found["mlp_types"], layers)
        return
    name, step = found.get("expert_step", ("", 1))
    if step == 0:
        yield number_violation(name, step, "a positive integer")
    name, listed = found.get("dense_list", ("", []))
    indices = map(as_integer, listed) if isinstance(listed, list | tuple) else [None]
    if not all(isinstance(index, int) and 0 <= index < layers for index in indices):
        yield number_violation(name, listed, f"a list of integers from 0 to {layers - 1}")


def _type_violations(name: str, types: object, layers: int) -> Iterator[Violation]:
    if not isinstance(types, list | tuple) or len(types) != layers:
        yield number_violation(name, types, f"a list of {layers} types, one for each layer")


def _unsupported_layers(config: object) -> Iterator[Violation]:
    """Yield one violation for each kind of layer in ``config`` that the planner cannot estimate."""
    for what, fields in read_other_layers(config).items():
        texts = join_words((f"{name}={show(value)}" for name, value in fields.items()), "and")
        yield Violation(
            rule="layers",
            values=fields,
            reason=f"{texts}: {what}, which the estimates do not cover; use a decoder whose "
            "layers all have attention and a feed-forward part",
        )


def _missing(field: str) -> Violation:
    names = {**RULED, **SIZES}[field]
    return Violation(
        rule="number",
        values={field: None},
        reason=f"the configuration has no {field}; give {join_words(names)}",
    )


_SCOUT = {"kv_heads": 8, "experts": 16, "top_k": 1, "expert_ffn": 8192, "shared_ffn": 8192}
_MAVERICK = _SCOUT | {"experts": 128, "dense_layers": 24}
_MIXTRAL = {"kv_heads": 8, "experts": 8, "top_k": 2}
_QWEN3 = {"kv_heads": 4, "head_dim": 128, "experts": 128, "top_k": 8}
_DEEPSEEK = {"head_dim": 128, "latent": 512, "query_latent": 1536, "nope_dim": 128, "rope_dim": 64}
_DEEPSEEK |= {"experts": 256, "top_k": 8, "expert_ffn": 2048, "shared_ffn": 2048}
_DEEPSEEK |= {"dense_layers": 3, "groups": 8, "top_groups": 4}
_PUBLISHED: tuple[tuple[str, int, int, int, int, int, dict[str, Any]], ...] = (
    # Name, layers, hidden, heads, ffn, vocab, and other sizes.
    # The Llama 3 Herd of Models, table 3.
    ("llama3-8b", 32, 4096, 32, 14336, 128256, {"kv_heads": 8}),
    ("llama3-70b", 80, 8192, 64, 28672, 128256, {"kv_heads": 8}),
    ("llama3-405b", 126, 16384, 128, 53248, 128256, {"kv_heads": 8}),
    # arXiv 2205.05198, table 3.
    ("gpt-22b", 48, 6144, 64, 24576, 51200, {"glu": False}),
    ("gpt-175b", 96, 12288, 96, 49152, 51200, {"glu": False}),
    ("gpt-530b", 105, 20480, 128, 81920, 51200, {"glu": False}),
    ("gpt-1t", 128, 25600, 160, 102400, 51200, {"glu": False}),
    # The configuration files that the authors of the models published.
    ("mixtral-8x7b", 32, 4096, 32, 14336, 32000, _MIXTRAL),
    ("mixtral-8x22b", 56, 6144, 48, 16384, 32768, _MIXTRAL),
    ("qwen3-30b-a3b", 48, 2048, 32, 6144, 151936, {**_QWEN3, "expert_ffn": 768}),
    ("qwen3-235b-a22b", 94, 4096, 64, 12288, 151936, {**_QWEN3, "expert_ffn": 1536}),
    ("llama4-scout", 48, 5120, 40, 16384, 202048, _SCOUT),
    ("llama4-maverick", 48, 5120, 40, 16384, 202048, _MAVERICK),
    ("deepseek-v3", 61, 7168, 128, 18432, 129280, _DEEPSEEK),
)
MODELS: Mapping[str, ModelShape] = MappingProxyType(
    {
        name: ModelShape(
            name=name, layers=layers, hidden=hidden, heads=heads, ffn=ffn, vocab=vocab, **others
        )
        for name, layers, hidden, heads, ffn, vocab, others in _PUBLISHED
    }
)
"""Sizes of published models, by name."""
