"""Names of degrees that `from_config` does not read, and whole configurations."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hp_mesh import ParallelDims, ParallelDimsError
from hp_mesh._config import NAMES, UNREAD

# The first parent with the pages: of the repository, or of the folder that vendored tests run in.
PAGES = Path("tools", "docs", "pages", "hp-mesh")
PAGE = (
    next(up / PAGES for up in Path(__file__).parents if (up / PAGES).is_dir()) / "guide-config.md"
)


def refused(config: Any, world: int = 32) -> str:
    with pytest.raises(ParallelDimsError) as caught:
        ParallelDims.from_config(config, world)
    return str(caught.value)


def test_no_name_is_both_read_and_an_error() -> None:
    assert {*NAMES} & {*UNREAD} == set()


def test_the_page_lists_every_name() -> None:
    text = PAGE.read_text(encoding="utf-8")
    own = {*ParallelDims().to_dict()}
    names = {name for name in NAMES if not name.startswith("parallelism_config_")} - own
    assert [name for name in sorted(names | {*UNREAD}) if f"`{name}`" not in text] == []


def test_an_error_of_a_dp_shard_that_follows_names_what_was_given() -> None:
    config = {"dp_replicate": 1, "data_parallel_size": 4}
    with pytest.raises(ParallelDimsError, match="dp_shard is read from data_parallel_size=4"):
        ParallelDims.from_config(config, 32)


@pytest.mark.parametrize(
    ("config", "named", "meant"),
    [
        ({"tp": 2, "pipeline": {"stages": 4}}, "pipeline.stages=4", "pp"),
        ({"dp_shard_size": 4, "tp_size": 2, "pp_size": 4}, "pp_size=4", "pp"),
        ({"ep_size": 4, "etp_size": 2, "tp_size": 2}, "etp_size=2", "etp"),
        ({"tp": 2, "pp_degree": "4"}, "pp_degree='4'", "pp"),
        ({"dp": 2, "cp_degree": 4}, "cp_degree=4", "cp"),
        ({"tp": 2, "dp_degree": 4}, "dp_degree=4", "dp_replicate or dp_shard"),
        ({"tp": 2, "dp_size": 4}, "dp_size=4", "dp_replicate or dp_shard"),
        ({"cp": 2, "tensor_parallel_size": 4}, "tensor_parallel_size=4", "tp"),
        ({"cp": 2, "pipeline_parallel_size": 10**30}, f"pipeline_parallel_size={10**30}", "pp"),
        ({"cp": 2, "expert_parallel_size": 4}, "expert_parallel_size=4", "ep"),
        ({"tp": 2, "model_parallel_size": 4}, "model_parallel_size=4", "tp or pp"),
        ({"tp": 2, "fsdp_size": 4}, "fsdp_size=4", "dp_shard"),
    ],
)
@pytest.mark.parametrize("kind", [dict, SimpleNamespace])
def test_a_known_name_that_is_not_read_is_an_error_with_the_name_to_use(
    config: dict[str, Any], named: str, meant: str, kind: Any
) -> None:
    first = refused(kind(**config)).splitlines()[0]
    assert first == f"from_config does not read {named}; use {meant}"
    for field in meant.split(" or "):
        config = {"cp": 2, "dp_replicate": -1, "free_etp": True, field: 2}
        assert getattr(ParallelDims.from_config(config, 32), field) == 2


def test_degrees_whose_dp_size_is_computed_are_a_configuration() -> None:
    dims = ParallelDims(dp_replicate=2, dp_shard=2, tp=2, world_size=8)
    assert dims.dp_size == 4
    assert ParallelDims.from_config(dims) == dims


def test_a_configuration_with_only_unread_names_lists_them() -> None:
    message = refused({"pp_size": 4, "tensor_parallel_size": 2})
    assert "has none of the names" in message
    assert "from_config does not read pp_size=4; use pp" in message
    assert "from_config does not read tensor_parallel_size=2; use tp" in message


@pytest.mark.parametrize(
    "other",
    [
        {"PP": 4},
        {"pipeline_degree": 4},
        {"dp_shards": 4},
        {"expert_paralel_degree": 4},
        {"parallel": {"pp": 4}},
        {"virtual_pipeline_model_parallel_size": 4},
    ],
    ids=str,
)
def test_a_name_that_no_framework_has_is_ignored(other: dict[str, Any]) -> None:
    assert ParallelDims.from_config({"tp": 2, **other}, 8).dp_shard == 4


@pytest.mark.parametrize("value", [1, None, 0, -1, "auto", False, True, "1", [1, 1], "1f1b", 0.5])
def test_a_known_name_of_at_most_one_is_ignored(value: Any) -> None:
    for name in ("pp_size", "pp_degree", "hierarchical_context_parallel_sizes"):
        assert ParallelDims.from_config({"tp": 2, name: value}, 8).dp_shard == 4
    config = {"tp": 2, "zero_optimization": {"zero_hpz_partition_size": value}}
    assert ParallelDims.from_config(config, 8).dp_shard == 4


@pytest.mark.parametrize(
    ("config", "advice"),
    [
        ({"zero_optimization": {"zero_hpz_partition_size": 8}}, "dp_shard=8 with dp_replicate"),
        ({"zero_optimization": {"mics_shard_size": 8}}, "dp_shard=8 with dp_replicate"),
        ({"hierarchical_context_parallel_sizes": [2, 2]}, "cp with ulysses_degree"),
        ({"encoder_tensor_model_parallel_size": 2}, "one ParallelDims for each"),
        ({"encoder_pipeline_model_parallel_size": 2}, "one ParallelDims for each"),
    ],
)
def test_what_a_framework_has_and_no_degree_says_is_refused_with_what_to_give(
    config: dict[str, Any], advice: str
) -> None:
    message = refused({"tensor_model_parallel_size": 2, **config})
    assert message.startswith("from_config does not read ")
    assert f"; use {advice}" in message


def test_instances_of_megatron_s_distributed_optimizer_are_replicas() -> None:
    config = {"tensor_model_parallel_size": 2, "num_distributed_optimizer_instances": 2}
    found = ParallelDims.from_config(config, 32)
    assert found == ParallelDims(dp_replicate=2, dp_shard=8, tp=2, etp=2, world_size=32)
    data = ParallelDims.from_config({**config, "data_parallel_size": 16}, 32)
    assert data == found


MAPPED = ("dp_replicate", "dp_shard", "pp", "ep", "cp", "tp")


@pytest.mark.parametrize(
    ("given", "order"),
    [
        ({"order": "tp-cp-ep-dp-pp"}, ("pp", "dp_replicate", "dp_shard", "ep", "cp", "tp")),
        ({"order": "tp-cp-ep-pp-dp"}, MAPPED),
        ({"order": "tp-cp-pp-dp"}, tuple(name for name in MAPPED if name != "ep")),
        ({"use_tp_pp_dp_mapping": True}, MAPPED),
        ({"use_tp_pp_dp_mapping": False}, ParallelDims().order),
    ],
)
def test_an_order_of_megatron_is_the_same_ranks_innermost_first(
    given: dict[str, Any], order: tuple[str, ...]
) -> None:
    degrees = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
    found = ParallelDims.from_config({**degrees, **given}, 16)
    assert found == ParallelDims(tp=2, pp=2, etp=2, order=order, world_size=16)
    if order == MAPPED:  # neighbours in pp are tp ranks apart, as rank = (dp * pp + stage) * tp + t
        assert found.layout().group("pp", rank=0) == (0, 2)
        assert found.layout().group("tp", rank=0) == (0, 1)


def test_two_orders_that_differ_are_refused() -> None:
    config = {"tp": 2, "order": "tp-cp-ep-dp-pp", "use_tp_pp_dp_mapping": True}
    assert "use_tp_pp_dp_mapping" in refused(config)


def test_the_names_of_a_nested_table_are_told_where_no_other_is_given() -> None:
    message = refused({"job": {"steps": 1}, "parallelism": {"tensor_parallel_degree": 4}})
    assert message.endswith("its parallelism has such names; pass that")


def test_the_world_of_a_configuration_holds_where_none_is_given() -> None:
    expected = ParallelDims(tp=2, etp=2, world_size=8)
    assert ParallelDims.from_config({"tp": 2, "world_size": 8}) == expected
    with pytest.raises(ParallelDimsError, match=r"^world_size=None is not a degree"):
        ParallelDims.from_config({"tp": 2})


TOML = """
[training]
seq_len = 8192
[parallelism]
data_parallel_replicate_degree = 2
data_parallel_shard_degree = -1
tensor_parallel_degree = 4
pipeline_parallel_degree = 2
pipeline_parallel_schedule = "1F1B"
"""
YAML = """
distributed_type: FSDP
num_processes: 16
parallelism_config:
  parallelism_config_dp_replicate_size: 2
  parallelism_config_dp_shard_size: 4
  parallelism_config_tp_size: 2
  parallelism_config_cp_size: 1
"""


def test_tables_of_frameworks_are_read_from_files_as_from_configurations(tmp_path: Path) -> None:
    toml, document = tmp_path / "run.toml", tmp_path / "run.yaml"
    toml.write_text(TOML)
    document.write_text(YAML)
    expected = ParallelDims(dp_replicate=2, dp_shard=2, tp=4, pp=2, world_size=32)
    assert ParallelDims.from_toml(toml, "parallelism", 32) == expected
    unknown = ParallelDims.from_toml(toml, "parallelism")
    assert unknown.world_size is None
    assert unknown.resolve(32) == expected
    found = ParallelDims.from_yaml(document, "parallelism_config", world_size=16)
    assert found == ParallelDims(dp_replicate=2, dp_shard=4, tp=2, world_size=16)
    with pytest.raises(ParallelDimsError, match=r"give table='parallelism'$"):
        ParallelDims.from_toml(toml)
    toml.write_text(TOML.replace("pipeline_parallel_degree", "pp_degree"))
    with pytest.raises(ParallelDimsError, match=r"from_config does not read pp_degree=2; use pp$"):
        ParallelDims.from_toml(toml, "parallelism", 32)
    toml.write_text("tp = 2\n")
    assert ParallelDims.from_toml(toml, None, 8) == ParallelDims(tp=2, world_size=8)


TITAN = {
    "job": {"dump_folder": "./outputs", "description": "Llama 3 70B training", "print_args": False},
    "model": {"name": "llama3", "flavor": "70B", "hf_assets_path": "./assets/hf/Llama-3.1-70B"},
    "optimizer": {"name": "AdamW", "lr": 1.5e-4, "eps": 1e-8, "early_step_in_backward": False},
    "lr_scheduler": {"warmup_steps": 2000, "decay_ratio": 0.8, "min_lr_factor": 0.1},
    "training": {"local_batch_size": 8, "global_batch_size": 512, "seq_len": 8192, "steps": 1000},
    "activation_checkpoint": {"mode": "selective", "selective_ac_option": "2"},
    "checkpoint": {"enable": False, "interval": 500, "keep_latest_k": 10, "async_mode": "disabled"},
    "comm": {"init_timeout_seconds": 300, "trace_buf_size": 20000},
    "fault_tolerance": {"enable": False, "replica_id": 0, "group_size": 0, "min_replica_size": 1},
    "data_parallel_replicate_degree": 2,
    "data_parallel_shard_degree": -1,
    "fsdp_reshard_after_forward": "default",
    "tensor_parallel_degree": 2,
    "disable_loss_parallel": False,
    "enable_async_tensor_parallel": True,
    "pipeline_parallel_degree": 1,
    "pipeline_parallel_split_points": ["layers.4"],
    "module_fqns_per_model_part": None,
    "pipeline_parallel_first_stage_less_layers": 2,
    "pipeline_parallel_last_stage_less_layers": 2,
    "pipeline_parallel_layers_per_stage": 4,
    "pipeline_parallel_schedule": "Interleaved1F1B",
    "pipeline_parallel_schedule_csv": "",
    "pipeline_parallel_microbatch_size": 2,
    "pipeline_parallel_expert_parallel_overlap": True,
    "context_parallel_degree": 1,
    "context_parallel_rotate_method": "allgather",
    "context_parallel_load_balancer": "headtail",
    "expert_parallel_degree": 1,
    "expert_tensor_parallel_degree": 1,
    "expert_parallel_comm_backend": "standard",
}
MEGATRON = {
    "tensor_model_parallel_size": 2,
    "pipeline_model_parallel_size": 1,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "data_parallel_size": 4,
    "virtual_pipeline_model_parallel_size": 4,
    "num_layers_per_virtual_pipeline_stage": 5,
    "num_virtual_stages_per_pipeline_rank": 2,
    "microbatch_group_size_per_vp_stage": 4,
    "num_layers_in_first_pipeline_stage": 11,
    "num_layers_in_last_pipeline_stage": 11,
    "decoder_first_pipeline_num_layers": 11,
    "decoder_last_pipeline_num_layers": 11,
    "transformer_pipeline_model_parallel_size": 2,
    "pipeline_model_parallel_split_rank": 2,
    "pipeline_model_parallel_comm_backend": "nccl",
    "sequence_parallel": True,
    "hybrid_context_parallel": False,
    "cp_comm_type": "p2p",
    "tp_comm_overlap": True,
    "tp_comm_overlap_ag": True,
    "tp_only_amax_red": False,
    "tp_comm_bootstrap_backend": "nccl",
    "defer_embedding_wgrad_compute": False,
    "wgrad_deferral_limit": 22,
    "pipeline_dtype": "bfloat16",
    "batch_p2p_comm": True,
    "barrier_with_L1_time": True,
    "moe_extended_tp": False,
    "moe_router_topk": 8,
    "moe_router_num_groups": 8,
    "moe_layer_freq": 2,
    "moe_token_dispatcher_type": "alltoall",
    "moe_expert_capacity_factor": 2,
    "moe_per_layer_logging": True,
    "moe_shared_expert_intermediate_size": 2048,
    "num_experts": 64,
    "num_layers": 48,
    "encoder_num_layers": 48,
    "decoder_num_layers": 48,
    "hidden_size": 8192,
    "ffn_hidden_size": 28672,
    "num_attention_heads": 64,
    "num_query_groups": 8,
    "group_query_attention": True,
    "seq_length": 8192,
    "encoder_seq_length": 8192,
    "max_position_embeddings": 8192,
    "padded_vocab_size": 128256,
    "make_vocab_size_divisible_by": 128,
    "micro_batch_size": 2,
    "global_batch_size": 1024,
    "rampup_batch_size": ["16", "16", "1000"],
    "train_iters": 5000,
    "eval_iters": 10,
    "num_workers": 2,
    "rank": 3,
    "local_rank": 3,
    "tensor_model_parallel_rank": 3,
    "data_parallel_random_init": False,
    "data_parallel_sharding_strategy": "no_shard",
    "ddp_bucket_size": 40000000,
    "ddp_num_buckets": 8,
    "ddp_average_in_collective": False,
    "fsdp_double_buffer": False,
    "use_distributed_optimizer": True,
    "num_distributed_optimizer_instances": 1,
    "distributed_timeout_minutes": 10,
    "nccl_communicator_config_path": None,
    "recompute_num_layers": 4,
    "dist_ckpt_workers": 2,
    "ckpt_fully_parallel_save": True,
    "retro_num_layers": 4,
    "mtp_num_layers": 2,
    "mup_expert_width": 2,
    "fp16": False,
    "seed": 1234,
}
DEEPSPEED = {
    "train_batch_size": 256,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 8,
    "steps_per_print": 100,
    "gradient_clipping": 1.0,
    "sequence_parallel_size": 1,
    "tensor_parallel": {
        "autotp_size": 2,
        "tp_grain_size": 64,
        "tp_overlap_comm": False,
        "partition_config": {"use_default_specs": False},
    },
    "pipeline": {"stages": "auto", "partition": "best", "activation_checkpoint_interval": 2},
    "zero_optimization": {
        "stage": 3,
        "sub_group_size": 1000000000,
        "reduce_bucket_size": 500000000,
        "allgather_bucket_size": 500000000,
        "stage3_prefetch_bucket_size": 50000000,
        "stage3_param_persistence_threshold": 100000,
        "stage3_max_live_parameters": 1000000000,
        "zero_hpz_partition_size": 1,
        "zero_quantized_weights": True,
        "mics_shard_size": -1,
        "mics_hierarchical_params_gather": False,
        "offload_param": {"device": "cpu", "buffer_count": 5, "buffer_size": 100000000},
        "offload_optimizer": {"device": "nvme", "pipeline_read": True, "buffer_count": 4},
    },
    "bf16": {"enabled": True},
    "fp16": {"enabled": False, "initial_scale_power": 16, "loss_scale_window": 1000},
    "aio": {"block_size": 1048576, "queue_depth": 8, "thread_count": 2},
    "elasticity": {"enabled": False, "model_parallel_size": 1, "num_gpus_per_node": 8},
    "activation_checkpointing": {"partition_activations": True, "number_checkpoints": 4},
    "flops_profiler": {"profile_step": 5, "module_depth": 3, "top_modules": 2},
    "data_efficiency": {"data_sampling": {"num_workers": 4}, "data_routing": {"min_value": 128}},
    "monitor_config": {"tensorboard": {"enabled": True}},
}
ACCELERATE = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "FSDP",
    "num_machines": 2,
    "num_processes": 8,
    "machine_rank": 3,
    "main_process_port": 29500,
    "mixed_precision": "bf16",
    "fsdp_config": {
        "fsdp_version": 2,
        "fsdp_min_num_params": 100000000,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_cpu_ram_efficient_loading": True,
    },
    "deepspeed_config": {"zero_stage": 3, "gradient_accumulation_steps": 4},
    "megatron_lm_config": {"megatron_lm_num_micro_batches": 4},
    "dp_replicate_size": 1,
    "tp_size": 2,
    "cp_size": 1,
    "sp_size": 1,
    "sp_backend": "deepspeed",
    "sp_handler": SimpleNamespace(sp_seq_length=4096, sp_seq_length_is_variable=True),
    "cp_handler": SimpleNamespace(cp_comm_strategy="allgather"),
    "tp_handler": SimpleNamespace(enable_async_tp=False),
}
NEMO = {
    "name": "megatron_gpt",
    "trainer": {"devices": 8, "num_nodes": 4, "accelerator": "gpu", "precision": "bf16"},
    "exp_manager": {"checkpoint_callback_params": {"save_top_k": 10, "every_n_train_steps": 50}},
    "micro_batch_size": 4,
    "global_batch_size": 8,
    "rampup_batch_size": None,
    "tensor_model_parallel_size": 2,
    "pipeline_model_parallel_size": 1,
    "virtual_pipeline_model_parallel_size": None,
    "encoder_seq_length": 512,
    "max_position_embeddings": 512,
    "num_layers": 12,
    "hidden_size": 768,
    "num_attention_heads": 12,
    "transformer_block_type": "pre_ln",
    "num_micro_batches_with_partial_activation_checkpoints": 2,
    "activations_checkpoint_num_layers": 4,
    "gradient_as_bucket_view": True,
    "sync_batch_comm": False,
    "data": {"seq_length": 512, "num_workers": 2, "splits_string": "900,50,50"},
    "optim": {"name": "fused_adam", "lr": 2e-4, "bucket_cap_mb": 128, "sched": {"warmup": 500}},
    "nsys_profile": {"start_step": 10, "end_step": 11, "ranks": [0]},
    "ub_tp_comm_overlap": True,
    "num_moe_experts": 8,
    "expert_model_parallel_size": 1,
}
NANOTRON = {
    "dp": 4,
    "pp": 1,
    "tp": 2,
    "pp_engine": "1f1b",
    "tp_mode": "REDUCE_SCATTER",
    "tp_linear_async_communication": True,
    "recompute_layer": False,
    "tp_recompute_allgather": True,
    "expert_parallel_size": 1,
    "context_parallel_size": 1,
    "general": {"project": "debug", "seed": 42, "step": 10, "consumed_train_samples": 1000},
    "model": {"model_config": {"hidden_size": 2048, "num_hidden_layers": 24, "pad_token_id": 2}},
    "optimizer": {"zero_stage": 1, "accumulate_grad_in_fp32": True, "clip_grad": 1.0},
    "tokens": {"sequence_length": 4096, "micro_batch_size": 2, "batch_accumulation_per_replica": 8},
    "data_stages": [
        {"name": "stable", "start_training_step": 1, "data": {"num_loading_workers": 4}}
    ],
    "lighteval": {"parallelism": None, "batch_size": 16},
    "slurm": {"nodes": 8, "gpus_per_node": 8, "cpus_per_task": 32},
}


@pytest.mark.parametrize(
    "config",
    [TITAN, MEGATRON, DEEPSPEED, ACCELERATE, NEMO, NANOTRON],
    ids=["torchtitan", "Megatron-LM", "DeepSpeed", "accelerate", "NeMo", "nanotron"],
)
@pytest.mark.parametrize("kind", ["mapping", "object"])
def test_what_is_no_degree_in_a_whole_configuration_is_ignored(
    config: dict[str, Any], kind: str
) -> None:
    given = config if kind == "mapping" else SimpleNamespace(**config)
    assert ParallelDims.from_config(given, 8).tp == 2
