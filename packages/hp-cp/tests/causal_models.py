"""Small models of every type that transformers registers for causal language modelling."""

from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

TYPES: dict[str, Any] = dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
VOCAB = 50
LARGEST = 8_000_000  # parameters
NAMES_OF = {  # sizes, by what configs call them
    VOCAB: "vocab_size vocab_size_per_layer_input",
    128: "max_position_embeddings n_positions n_ctx max_seq_len max_target_positions seq_length "
    "max_source_positions context_length max_sequence_length block_size",
    100: "ngram_vocab_size_base encoder_hash_byte_group_vocab",
    64: "hidden_size_global",
    40: "intermediate_size ffn_dim n_inner encoder_ffn_dim decoder_ffn_dim intermediate_size_mlp "
    "d_ff dense_intermediate_size",
    32: "hidden_size d_model n_embd n_embed dim embedding_size mamba_d_ssm encoder_hidden_size "
    "lru_width cross_attention_hidden_size hidden_dim",
    20: "pronunciation_vocab_size shape_vocab_size",
    16: "moe_intermediate_size shared_expert_intermediate_size q_lora_rank qk_head_dim "
    "attention_chunk_size expert_ffn_hidden_size index_topk shared_experts_intermediate_size",
    12: "v_head_dim",
    9: "sliding_window attention_window attention_window_size window_size",
    8: "head_dim kv_lora_rank qk_nope_head_dim qk_rope_head_dim global_head_dim state_size "
    "hidden_size_per_layer_input mamba_d_state mamba_n_heads mamba_d_head mamba_num_heads "
    "mamba_head_dim ssm_state_size linear_key_head_dim linear_value_head_dim d_kv index_head_dim "
    "kv_channels o_lora_rank hc_lowrank pronunciation_embed_dim shape_embed_dim indexer_head_dim "
    "indexer_budget attention_head_size",
    4: "num_attention_heads n_head n_heads num_heads encoder_attention_heads conv_kernel "
    "decoder_attention_heads num_experts num_local_experts n_routed_experts moe_num_experts "
    "linear_num_value_heads rotary_dim indexer_compress_ratio laurel_rank",
    2: "num_key_value_heads num_kv_heads n_layer n_layers num_layers num_hidden_layers "
    "encoder_layers decoder_layers num_decoder_layers num_encoder_layers num_experts_per_tok "
    "moe_k moe_topk n_group type_vocab_size linear_num_key_heads index_n_heads o_groups "
    "num_global_key_value_heads hc_count split_ngram_parts heads_per_ngram indexer_n_heads "
    "eos_token_id",
    1: "n_shared_experts topk_group first_k_dense_replace mamba_n_groups n_groups "
    "indexer_kv_heads bos_token_id",
    0: "pad_token_id num_kv_shared_layers",
}
SIZES = {name: size for size, names in NAMES_OF.items() for name in names.split()}
SMALL: dict[str, Any] = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2}
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
OPTIONS: dict[str, dict[str, Any]] = {  # that one type has, or wants otherwise
    "blt": {
        f"{part}_config": {**SMALL, "hidden_size_global": 64, "intermediate_size": 40}
        for part in ("encoder", "decoder", "patcher", "global")
    },
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"sliding_attention": ROPE, "full_attention": ROPE},
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 40, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dots3_note_text": {
        "head_dim": 16,
        "num_hidden_layers": 2,
        "layer_types": ["full_attention"] * 2,
        "mlp_layer_types": ["dense", "sparse"],
    },
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma3n_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "intermediate_size": [40] * 4,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
    },
    "gemma4_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
    },
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "lfm2": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "ministral3": {  # scales queries by position
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "llama_4_scaling_beta": 0.3,
        }
    },
    "phimoe": {"sliding_window": None},
    "reformer": {"is_decoder": True, "axial_pos_embds": False, "attn_layers": ["local", "local"]},
    "roc_bert": {"enable_shape": False, "enable_pronunciation": False},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
}
OPTIONS["gemma4_unified_text"] = OPTIONS["gemma4_text"]


def small(config: Any) -> dict[str, Any]:
    """Return options that make a config small, with a layer of each kind."""
    given: dict[str, Any] = config.to_dict()
    aliases: dict[str, str] = getattr(config, "attribute_map", None) or {}
    options: dict[str, Any] = {k: SIZES[k] for k in (*given, *aliases) if k in SIZES}
    options = {k: x for k, x in options.items() if aliases.get(k) not in options}
    for name, x in given.items():
        if ("drop" in name or "jitter" in name) and type(x) in (int, float):
            options[name] = 0.0
    layers = getattr(config, "num_hidden_layers", None) or 0
    by_layer = {
        k: x for k, x in given.items() if isinstance(x, list | tuple) and len(x) == layers > 3
    }
    if by_layer:
        kinds = list(zip(*(map(str, x) for x in by_layer.values()), strict=True))
        picked = [i for i, kind in enumerate(kinds) if kinds.index(kind) == i][:6]
        picked += [1] if picked == [0] else []
        options |= {name: [x[i] for i in picked] for name, x in by_layer.items()}
        options |= {k: len(picked) for k in ("num_hidden_layers", "n_layer") if k in options}
    for name in ("text_config", "vision_config", "audio_config", "decoder", "encoder"):
        part = getattr(config, name, None)
        if hasattr(part, "to_dict"):
            options[name] = small(part)
    if "kv_lora_rank" in given:
        options["num_key_value_heads"] = 4
    return {**options, **OPTIONS.get(config.model_type, {})}


def causal_model(model_type: str, **given: Any) -> Any:
    """Return a small model of a type in float64, the same in every process."""
    config_class: Any = CONFIG_MAPPING[model_type]
    model_class = getattr(transformers, TYPES[model_type])
    config = config_class(
        **{**small(config_class()), **given},
        attn_implementation="eager",
        experts_implementation="eager",
    )
    if not isinstance(config, model_class.config_class):
        config = config.get_text_config(decoder=True)
    with torch.device("meta"):
        size = sum(x.numel() for x in model_class(config).parameters())
    if size > LARGEST:
        raise ValueError(f"{model_type} has {size} parameters")
    torch.manual_seed(0)
    model = model_class(config).double().train()
    torch.manual_seed(1)
    for parameter in model.parameters():  # the library makes zeros of some
        nn.init.normal_(parameter, std=0.2)
    return model
