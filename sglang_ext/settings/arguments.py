"""What each of SGLang's arguments may be with the plugin: an allow-list over all of them.

Every argument of the tested SGLang is either in ``LIMITED``, with the values under which stored KV
is right, or in ``FREE``, because what it does ends before or begins behind the KV. One that is in
neither was never looked at, and is refused when it is set (``unknown_arguments``). Imports no
SGLang; docs/compatibility.md is generated from here.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REMOVE = "leave it out"


@dataclass(frozen=True)
class Limit:
    """The values of one argument that were shown to work.

    Attributes:
        values: the allowed ones; None, which is SGLang's "not decided", always is.
        expected: what a refusal says is needed.
        why: what would go wrong, for the docs.
        advice: what a refusal says to do.
    """

    values: tuple[Any, ...]
    expected: str
    why: str
    advice: str = REMOVE

    def allows(self, value: Any) -> bool:
        """Whether an argument may have this value."""
        # 1 == True would let a switch pass for a number.
        return value is None or any(value == v and type(value) is type(v) for v in self.values)


def _off(expected: str, why: str) -> Limit:
    return Limit((False,), expected, why, "remove one of the two flags")


def _unset(expected: str, why: str, *values: Any) -> Limit:
    return Limit(values, expected, why)


def flag(name: str) -> str:
    """`tp_size` -> `tp-size`."""
    return name.replace("_", "-")


_OTHER_CACHE = "two stores would answer for the same prefix"
_SPREAD = "spread the model with --tp-size"
_HIDDEN_WEIGHTS = (
    "the namespace is a digest of the model's tensors, and these weights are not among them, so "
    "another model's KV could pass for this one's"
)
_JOIN = "ranks that come and go have not agreed on what is stored"
_PLAIN = "the pool is laid out in another way"
_CAPTURED = (
    "SGLang keeps it by row of the pool, beside the KV, and answers of a loaded page would tell "
    "that of whichever request had its rows before"
)

LIMITED: dict[str, Limit] = {
    # Ranks.
    "cp_strategy": Limit(
        ("zigzag",),
        "--cp-strategy zigzag",
        "interleave is of CUDA kernels that nobody ran with the plugin (sparse attention)",
        "leave --attn-cp-size and --enable-prefill-cp out",
    ),
    "dcp_size": Limit(
        (1,),
        "--dcp-size 1 (with more a rank's pool has each N-th token of a page)",
        "a rank's pool has each N-th token of a page only, and nothing joins them",
        _SPREAD,
    ),
    "enable_dp_attention_local_control_broadcast": _off(
        "control messages that reach all ranks in the same step",
        "ranks agree on the weights in the step that changes them",
    ),
    "dwdp_size": Limit((1,), "--dwdp-size 1", "ranks of one group serve different requests"),
    "enable_cp_tp_group_sharing": _off(
        "prefills of a model with states that ranks do not share by tokens",
        "SGLang keeps states in shares of the ranks, beside KV that each rank has whole, and has "
        "kernels for it on GPUs only (GLM-5.3, Qwen 4)",
    ),
    "enable_cp_decode_attn_tp": _off(
        "decode steps that ranks do not divide where they share prefills by tokens",
        "SGLang has it for models with sparse attention (DeepSeek V4, GLM-5), whose prefills on "
        "several ranks nobody ran with the plugin",
    ),
    "enable_dsa_cache_layer_split": _off(
        "all layers of a page on each rank",
        "a rank's pool has some of the layers only, and nothing joins them",
    ),
    "enable_kv_cache_sharding": _off(
        "a KV cache that is not divided among ranks by pages",
        "a rank's pool has each N-th page only, and SGLang itself refuses it with any other radix "
        "cache backend",
    ),
    "elastic_ep_backend": _unset(
        "experts that stay where they are",
        "a rank that recovers reloads experts by itself, whatever the weights are by now",
    ),
    "ep_join_mode": _unset("a fixed number of ranks", _JOIN),
    "ep_join_rank_offset": _unset("a fixed number of ranks", _JOIN, 0),
    "elastic_ep_initial_size": _unset("a fixed number of ranks", _JOIN),
    "max_ep_size": _unset("a fixed number of ranks", _JOIN),
    # Modes.
    "speculative_algorithm": Limit(
        ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "NGRAM"),
        "speculative decoding by EAGLE, EAGLE3, STANDALONE or NGRAM, or none",
        "nobody looked at which of their rows are of tokens that are not verified",
    ),
    "decoupled_spec_role": _unset(
        "drafts of this server's own", "the draft model's KV is in another server", "null"
    ),
    "dllm_algorithm": Limit(
        (),
        "a model that generates from left to right",
        "KV of a token depends on the tokens after it in its block, which no page hash covers",
        "leave one of the two out",
    ),
    "disaggregation_decode_retraction_backup": _unset(
        "no other hierarchical cache (a host pool of HiCache)", _OTHER_CACHE, "cpu_tensor", "none"
    ),
    "enable_pd_role_switch": _off(
        "a server that stays what it is", "a decode server loads nothing and has no use for plans"
    ),
    "enable_pdmux": _off(
        "prefill and decode on one stream", "loads are ordered behind one forward stream, not two"
    ),
    "encoder_only": _off("a server with a KV cache", "an image encoder has none"),
    "language_only": _off(
        "images encoded in this server", "a request waits for its images after it was looked up"
    ),
    "use_ray": _off("SGLang's own process launcher", "Ray's actors do not load plugins"),
    # The pool.
    "kv_cache_dtype": Limit(
        ("auto", "bf16", "bfloat16", "fp8_e4m3", "fp8_e5m2"),
        "a KV cache of 8 bits or more without block scales",
        "the scales of a block lie beside the pool and would not be stored",
        "choose auto, bfloat16 or fp8_e4m3",
    ),
    "enable_page_major_kv_layout": _off("a plain KV pool", _PLAIN),
    "enable_unified_memory": _off("a plain KV pool", _PLAIN),
    "enable_hisparse": _off("a plain KV pool", _PLAIN),
    "prefill_only_disable_kv_cache": _off("a KV cache", "there is nothing to store"),
    "kv_canary": _unset(
        "no --kv-canary", "its marks beside the pool are not stored, so it would find them gone",
        "none",
    ),
    "device": Limit(
        ("cuda", "cpu"), "a GPU or a CPU", "there are no kernels for others", "use another device"
    ),
    "enable_return_routed_experts": _off("answers without routed experts", _CAPTURED),
    "enable_return_indexer_topk": _off("answers without what an index chose", _CAPTURED),
    # The cache.
    "disable_radix_cache": _off("SGLang's radix cache", "what is stored are its nodes"),
    "radix_cache_backend": Limit(
        ("hier_kv",), "its own radix cache backend", _OTHER_CACHE, "remove it"
    ),
    "enable_hierarchical_cache": _off("no other hierarchical cache (HiCache)", _OTHER_CACHE),
    "hicache_storage_backend": _unset("no other hierarchical cache (HiCache)", _OTHER_CACHE),
    "enable_int8_mamba_checkpoint": _off(
        "no checkpoints of states", "SGLang keeps them in its own radix cache only"
    ),
    "enable_lmcache": _off("no other hierarchical cache (LMCache)", _OTHER_CACHE),
    "enable_flexkv": _off("no other hierarchical cache (FlexKV)", _OTHER_CACHE),
    "enable_unified_cache_external_linker": _off("no other external linker", _OTHER_CACHE),
    # Weights.
    "load_format": Limit(
        (
            *("auto", "pt", "safetensors", "instanttensor", "npcache", "dummy", "sharded_state"),
            *("presharded", "gguf", "bitsandbytes", "mistral", "layered", "flash_rl", "remote"),
            *("remote_instance", "fastsafetensors", "private", "runai_streamer"),
        ),
        "all weights in the model",
        _HIDDEN_WEIGHTS,
        "choose another format",
    ),
    "kt_weight_path": _unset("all experts in the model", _HIDDEN_WEIGHTS),
    "enable_paged_experts": _off("all experts in the model", _HIDDEN_WEIGHTS),
    "offload_group_size": _unset("weights that stay in place", _HIDDEN_WEIGHTS, -1, 0),
    "ple_offload_embedding": Limit(
        (False,), "all embeddings in the model", _HIDDEN_WEIGHTS, "set it to false"
    ),
    "forward_hooks": _unset(
        "the model's own forward", "what a hook changes would be stored as the model's own"
    ),
}  # fmt: skip

_SCHEDULING = "which request runs when, and how much fits"
_HYBRIDS = "hybrids (what such a model is decides, see the table of models)"
NUMBER_FORMATS = (
    "number formats of activations between experts (in the namespace where one is chosen)"
)

# What has no bearing on stored KV, or is part of the namespace already, by what it is about.
_FREE = {
    "where the model comes from, and its precision (all weights are in the namespace)": """
        model_path model_loader_extra_config trust_remote_code context_length is_embedding revision
        model_impl model_config_parser json_model_override_args dtype quantization
        quantization_param_path modelopt_quant modelopt_checkpoint_restore_path
        modelopt_checkpoint_save_path modelopt_export_path quantize_and_serve rl_quant_profile
        startup_weight_load_mode custom_weight_loader weight_loader_disable_mmap
        weight_loader_prefetch_checkpoints weight_loader_prefetch_num_threads
        weight_loader_drop_cache_after_load remote_instance_weight_loader_seed_instance_ip
        remote_instance_weight_loader_seed_instance_service_port
        remote_instance_weight_loader_send_weights_group_ports remote_instance_weight_loader_backend
        remote_instance_weight_loader_start_seed_via_transfer_engine engine_info_bootstrap_port
        modelexpress_config download_dir model_checksum delete_ckpt_after_loading
        decrypted_config_file decrypted_draft_config_file
        checkpoint_engine_wait_weights_before_ready weight_cache_mode weight_cache_socket
        weight_cache_timeout qsa_indexer_dtype cpu_offload_gb offload_num_in_group
        offload_prefetch_step offload_mode ple_offload_backend ple_offload_dir""",
    "adapters (each has a namespace of its own)": """
        enable_lora enable_lora_overlap_loading max_lora_rank lora_target_modules lora_paths
        max_loaded_loras max_loras_per_batch lora_eviction_policy lora_backend max_lora_chunk_size
        experts_shared_outer_loras lora_use_virtual_experts lora_strict_loading
        lora_drain_wait_threshold""",
    "the front: HTTP, tokenizer, templates, parsers, keys": """
        tokenizer_path tokenizer_mode tokenizer_backend tokenizer_worker_num detokenizer_worker_num
        skip_tokenizer_init host port fastapi_root_path grpc_mode smg_grpc_mode grpc_port
        grpc_worker_threads
        sidecar sidecar_args skip_server_warmup warmups enable_http2 http2_max_concurrent_streams
        http2_initial_connection_window_size ssl_keyfile ssl_certfile ssl_ca_certs
        ssl_keyfile_password enable_ssl_refresh api_key admin_api_key served_model_name
        weight_version chat_template trust_request_chat_template hf_chat_template_name
        completion_template file_storage_path enable_cache_report return_input_ids
        return_output_ids reasoning_parser default_chat_template_kwargs strip_thinking_cache
        enable_strict_thinking tool_call_parser tool_server sampling_defaults
        asr_max_buffer_seconds asr_max_concurrent_sessions preferred_sampling_params
        allow_auto_truncate stream_interval batch_notify_size
        stream_response_default_include_usage incremental_streaming_output
        enable_streaming_session constrained_json_whitespace_pattern
        constrained_json_disable_any_whitespace constrained_json_max_whitespace_cnt
        enable_dynamic_batch_tokenizer dynamic_batch_tokenizer_batch_size
        dynamic_batch_tokenizer_batch_timeout enable_tokenizer_batch_encode
        disable_tokenizer_batch_decode enable_response_store grpc_response_timeout_secs
        enable_http_worker_reuseport grammar_backend""",
    'images, sound (what is stored of their requests is in "Images" above)': """
        enable_multimodal mm_attention_backend enable_broadcast_mm_inputs_process
        enable_prefix_mm_cache mm_enable_dp_encoder mm_process_config mm_processor_worker_num
        mm_io_worker_num allowed_media_domains media_url_max_file_size_mb
        mm_preprocess_cache_size_mb trust_mm_content_hashes limit_mm_data_per_request
        enable_mm_global_cache image_processor_backend mm_global_cache_backend
        disable_fast_image_processor mm_feature_transport language_model_only
        encoder_transfer_backend encoder_urls encoder_bootstrap_port encoder_register_urls
        enable_adaptive_dispatch_to_encoder enable_precise_embedding_interpolation""",
    "what is returned, sampling, watermarks": """
        enable_custom_logit_processor enable_return_hidden_states return_hidden_states_mode
        sampling_mask_max_tokens disable_outlines_disk_cache enable_mis enable_watermark
        watermark_config watermark_key watermark_key_b watermark_context_window
        watermark_mixing_probability
        watermark_max_probability watermark_default_enabled watermark_enforce_all
        enable_return_aux_hidden_states aux_hidden_state_capture return_aux_hidden_state_layer_ids
        sampling_backend random_seed mlx_enable_sampling""",
    _SCHEDULING: """
        mem_fraction_static max_running_requests max_queued_requests max_total_tokens
        chunked_prefill_size prefill_decode_interval prefill_decode_interval_min_bs
        enable_dynamic_chunking max_prefill_tokens prefill_max_requests schedule_policy
        enable_priority_scheduling disable_priority_preemption default_priority_value
        abort_on_priority_when_disabled schedule_low_priority_values_first
        priority_scheduling_preemption_threshold retraction_policy schedule_conservativeness
        page_size c128_page_size disable_chunked_prefix_cache disable_overlap_schedule
        num_continuous_decode_steps scheduler_recv_interval enable_mixed_chunk
        enable_prefill_delayer prefill_delayer_max_delay_passes
        prefill_delayer_token_usage_low_watermark prefill_delayer_forward_passes_buckets
        prefill_delayer_wait_seconds_buckets prefill_delayer_queue_min_ratio
        prefill_delayer_max_delay_ms min_free_slots_delay radix_eviction_policy
        radix_eviction_policy_config _radix_eviction_policy_explicitly_set
        enable_session_radix_cache num_reserved_decode_tokens pp_max_micro_batch_size
        pp_async_batch_depth load_balance_method""",
    _HYBRIDS: """
        swa_full_tokens_ratio _swa_full_tokens_ratio_explicitly_set swa_prefix_tails
        disable_hybrid_swa_memory enable_encoder_swa_bounded_replay
        enable_decoder_swa_bounded_replay max_mamba_cache_size mamba_full_memory_ratio
        mamba_backend mamba_ssm_dtype mamba_max_states_per_path
        enable_mamba_cache_stochastic_rounding mamba_cache_philox_rounds
        mamba_radix_cache_strategy uses_mamba_radix_cache mamba_track_interval
        int8_mamba_ckpt_size linear_attn_backend
        linear_attn_decode_backend linear_attn_prefill_backend linear_attn_verify_backend
        enable_linear_replayssm linear_replayssm_cache_len enable_linear_replayssm_spec""",
    "prefill and decode servers (what they must be is in docs/disaggregation.md)": """
        disaggregation_mode disaggregation_transfer_backend disaggregation_bootstrap_port
        disaggregation_ib_device disaggregation_decode_enable_radix_cache
        disaggregation_decode_enable_offload_kvcache disaggregation_decode_extra_slots
        disaggregation_decode_polling_interval disaggregation_enable_kv_checksum
        disaggregation_decode_host_receive_threshold disaggregation_decode_allocation_policy
        optimistic_prefill_attempts""",
    "of features that are refused themselves": """
        hicache_host_memory_mode hicache_ratio hicache_size hicache_write_policy hicache_io_backend
        hicache_mem_layout hicache_storage_prefetch_policy hicache_storage_backend_extra_config
        hicache_storage_prefetch_retry_poll_interval hicache_storage_prefetch_retry_max_attempts
        hicache_host_memory_fraction unified_cache_external_linker_backend
        unified_cache_external_linker_config enable_linker_mla_dedup hisparse_config
        lmcache_config_file flexkv_config_file decoupled_spec_bind_endpoint
        decoupled_spec_connect_endpoints decoupled_spec_rank pdmux_config_path sm_group_num
        uno_lora_path speculative_draft_model_path speculative_draft_model_revision
        speculative_draft_load_format speculative_num_steps speculative_eagle_topk
        speculative_num_draft_tokens speculative_dflash_block_size speculative_dspark_block_size
        speculative_dspark_sps_table_path speculative_dspark_confidence_sts_path
        speculative_dspark_align_verify_tokens_to_graph_tier speculative_accept_threshold_single
        speculative_accept_threshold_acc speculative_use_rejection_sampling speculative_token_map
        speculative_attention_mode speculative_draft_attention_backend
        speculative_dsa_topk_backend speculative_draft_kv_cache_dtype
        speculative_draft_window_size speculative_moe_runner_backend speculative_moe_a2a_backend
        speculative_enable_w4a4_mxfp4_megamoe speculative_draft_model_quantization
        _speculative_draft_quantization_explicitly_set enable_multi_layer_eagle
        speculative_adaptive speculative_adaptive_config spec_trace_dir
        speculative_ngram_min_bfs_breadth speculative_ngram_max_bfs_breadth
        speculative_ngram_match_type speculative_ngram_max_trie_depth speculative_ngram_capacity
        speculative_ngram_external_corpus_path speculative_ngram_external_sam_budget
        speculative_ngram_external_corpus_max_tokens speculative_domino_candidate_pool_size
        speculative_boundary_reduction speculative_use_block_verification
        speculative_skip_dp_mlp_sync
        speculative_draft_sink_size enable_draft_weights_cpu_backup dllm_algorithm_config dllm_fdfo
        dcp_comm_backend dcp_replicate_q_proj kv_canary_real_data
        kv_canary_sweep_interval kt_method kt_cpuinfer kt_threadpool_count kt_num_gpu_experts
        kt_max_deferred_experts_per_token paged_experts_num_resident
        elastic_ep_scale_timeout""",
    "ranks, and what they exchange": """
        nnodes nccl_port dist_timeout dist_init_addr gated_launch_port node_rank tp_size pp_size
        dp_size attn_dp_size enable_dp_attention attn_cp_size enable_prefill_cp moe_dp_size
        enable_dp_lm_head
        enable_tp_lm_head_all_to_all enable_attn_tp_input_scattered
        enable_shared_experts_attn_tp shared_experts_tp_size enable_dense_mlp_attn_tp
        enable_layernorm_sp enable_megamoe_for_layernorm_sp disable_attn_tp_gather
        enable_p2p_check ep_size moe_dense_tp_size enable_layerwise_nvtx_marker enable_nccl_nvls
        enable_symm_mem disable_custom_all_reduce enable_mscclpp enable_torch_symm_mem
        enable_scattered_sconv pre_warm_nccl boundary_reduction enable_quant_communications
        enable_flashinfer_allreduce_fusion enforce_disable_flashinfer_allreduce_fusion
        flashinfer_allreduce_fusion_backend enable_aiter_allreduce_fusion
        disable_aiter_allreduce_fusion_in_prefill disable_aiter_allreduce_fusion_in_decode
        base_gpu_id gpu_id_step numa_node""",
    "kernels, graphs, experts: how a forward is computed": """
        attention_backend decode_attention_backend enable_lean_attention prefill_attention_backend
        fp8_gemm_runner_backend fp4_gemm_runner_backend bf16_gemm_backend dsa_prefill_backend
        dsv4_prefill_backend dsa_decode_backend dsa_paged_mqa_logits_backend dsa_topk_backend
        disable_flashinfer_autotune flashinfer_autotune_skip_ops triton_attention_reduce_in_fp32
        triton_attention_num_kv_splits triton_attention_split_tile_size
        flashinfer_mla_disable_ragged enable_fused_qk_norm_rope enable_deepseek_v4_fp4_indexer
        prefill_kv_cache_dequant_dtype dsv4_attn_backend enable_amd_monokernel dsa_triton_union
        enable_dsa_fused_indexer enable_nvidia_megakernel enable_fp32_lm_head enable_tf32_matmul
        enable_memory_saver enable_weights_cpu_backup cuda_graph_config cuda_graph_backend_decode
        cuda_graph_backend_prefill cuda_graph_max_bs_decode cuda_graph_max_bs_prefill
        cuda_graph_bs_decode cuda_graph_bs_prefill cuda_graph_prefill_max_context
        disable_prefill_cuda_graph disable_decode_cuda_graph disable_cuda_graph
        disable_cuda_graph_padding enable_profile_cuda_graph enable_cudagraph_gc debug_cuda_graph
        enable_torch_compile enable_torch_compile_debug_mode torch_compile_max_bs
        cuda_graph_max_seq_len_prefill enable_fused_moe_sum_all_reduce moe_a2a_backend
        deepep_v2_mode moe_runner_backend deepep_mode fuseep_mode ep_num_redundant_experts
        ep_dispatch_algorithm init_expert_location enable_eplb eplb_algorithm
        eplb_rebalance_num_iterations eplb_rebalance_layers_per_chunk
        eplb_min_rebalancing_utilization_threshold expert_distribution_recorder_mode
        expert_distribution_recorder_buffer_size expert_balancedness_report_mode deepep_config
        enable_elastic_expert_backup mooncake_ib_device enable_waterfill
        disable_flashinfer_cutlass_moe_fp4_allgather disable_shared_experts_fusion
        enforce_shared_experts_fusion enable_two_batch_overlap enable_single_batch_overlap
        tbo_token_distribution_threshold
        enable_deterministic_inference rl_on_policy_target""",
    NUMBER_FORMATS: """
        deepep_dispatcher_output_dtype flashinfer_a2a_dispatch_type flashinfer_mxfp4_moe_precision
        enable_w4a4_mxfp4_megamoe""",
    "logs, metrics, traces, watchdogs": """
        log_level log_level_http log_requests log_requests_level log_requests_format
        log_requests_target uvicorn_access_log_exclude_prefixes crash_dump_folder show_time_cost
        enable_metrics smg_http_sidecar_port enable_mfu_metrics enable_metrics_for_all_schedulers
        load_snapshot_publish_interval tokenizer_metrics_custom_labels_header
        tokenizer_metrics_allowed_custom_labels extra_metric_labels bucket_time_to_first_token
        bucket_inter_token_latency bucket_e2e_request_latency prompt_tokens_buckets
        generation_tokens_buckets gc_warning_threshold_secs decode_log_interval
        enable_request_time_stats_logging kv_events_config load_publish_endpoint
        enable_forward_pass_metrics forward_pass_metrics_worker_id forward_pass_metrics_ipc_name
        enable_trace trace_modules otlp_traces_endpoint otlp_service_name export_metrics_to_file
        export_metrics_to_file_dir stat_loggers debug_tensor_dump_output_folder
        debug_tensor_dump_layers debug_tensor_dump_input_file msprobe_dump_config
        watchdog_timeout soft_watchdog_timeout sleep_on_idle custom_sigquit_handler
        gc_threshold""",
}
# Of these some are in older releases of SGLang only.
OF_OLDER = frozenset({"speculative_skip_dp_mlp_sync"})
FREE: dict[str, tuple[str, ...]] = {about: tuple(text.split()) for about, text in _FREE.items()}
KNOWN = frozenset(LIMITED).union(*FREE.values())

_NOT_CHOSEN = (None, False, "auto", "default")
# Variables of SGLang's that choose number formats as well.
_FORMAT_VARIABLES = (
    "SGLANG_DEEPEP_BF16_DISPATCH",
    "SGLANG_MOE_NVFP4_DISPATCH",
    "SGLANG_NIXL_EP_BF16_DISPATCH",
)
# Variables that say which layers a stage has, and which dtypes a state: a rank's namespace has its
# own, and what it computes comes from the other ranks, too.
_NODE_VARIABLES = (
    "SGLANG_PP_LAYER_PARTITION",
    "SGLANG_MAMBA_CONV_DTYPE",
    "SGLANG_MAMBA_SSM_DTYPE",
)

# Nodes are started by command lines of their own. Where one of these differs, ranks run other
# batches, compute with another KV or sample other tokens, and what they store outlives the mistake.
# Where weights come from may differ, as a digest of them is in the namespace, and so may what a
# node has room for.
_ALIKE = """
    dtype quantization json_model_override_args context_length max_loras_per_batch
    lora_eviction_policy lora_drain_wait_threshold enable_lora_overlap_loading
    speculative_num_steps speculative_eagle_topk speculative_num_draft_tokens
    speculative_accept_threshold_single speculative_accept_threshold_acc
    speculative_ngram_min_bfs_breadth speculative_ngram_max_bfs_breadth
    speculative_ngram_match_type speculative_ngram_max_trie_depth speculative_ngram_capacity
    speculative_use_rejection_sampling speculative_use_block_verification speculative_token_map
    speculative_draft_window_size speculative_adaptive speculative_adaptive_config
    sampling_backend grammar_backend enable_deterministic_inference
    enable_custom_logit_processor
    attn_dp_size attn_cp_size enable_prefill_cp moe_dp_size ep_size moe_dense_tp_size
    enable_dp_lm_head"""
# A node may have this file elsewhere; what it says has to be the same.
_CHAINS = "speculative_adaptive_config"
_SAID = ("_radix_eviction_policy_explicitly_set", "_swa_full_tokens_ratio_explicitly_set")
ON_ALL_NODES = frozenset(LIMITED).union(
    *(FREE[about] for about in (_SCHEDULING, _HYBRIDS, NUMBER_FORMATS)), _ALIKE.split()
) - {"load_format", "mem_fraction_static", *_SAID}


def on_all_nodes(read: Callable[[str], Any]) -> dict[str, Any]:
    """What must be the same on every node, by flag; as text where it is no plain value.

    Args:
        read: an argument's value by its name; None where this release has none of that name.
    """
    values = {f"--{flag(name)}": read(name) for name in ON_ALL_NODES}
    values[f"--{flag(_CHAINS)}"] = _lengths_of_chains(read)
    values |= dict.fromkeys(_FORMAT_VARIABLES) | _formats_of_environment()
    values |= {name: os.environ.get(name) for name in _NODE_VARIABLES}
    return {
        name: value if value is None or isinstance(value, str | int | float) else repr(value)
        for name, value in values.items()
    }


def _lengths_of_chains(read: Callable[[str], Any]) -> str | None:
    """What the file of `--speculative-adaptive` says, wherever it lies; None where none is read."""
    path = read(_CHAINS)
    if path is None or not read("speculative_adaptive"):
        return None
    try:
        content: object = json.loads(Path(path).read_text())
    except (OSError, ValueError):  # SGLang has read it, and it is gone since
        return str(path)
    return json.dumps(content, sort_keys=True)


def number_formats(read: Callable[[str], Any]) -> dict[str, Any]:
    """The number formats of activations that somebody chose, by argument; for the namespace.

    KV of later layers is computed from them, and neither weights nor configuration say which they
    are. What SGLang chooses where nobody does is left out: it follows from model and device.

    Args:
        read: an argument's value by its name; None where this release has none of that name.
    """
    values = {name: read(name) for name in FREE[NUMBER_FORMATS]}
    chosen = {name: value for name, value in values.items() if value not in _NOT_CHOSEN}
    # Here "auto" is not what SGLang does without the flag.
    if values["flashinfer_a2a_dispatch_type"] is not None:
        chosen["flashinfer_a2a_dispatch_type"] = values["flashinfer_a2a_dispatch_type"]
    return chosen | _formats_of_environment()


def _formats_of_environment() -> dict[str, str]:
    return {name: os.environ[name] for name in _FORMAT_VARIABLES if name in os.environ}


def outside_limits(read: Callable[[str], Any]) -> Iterator[tuple[str, Any, Limit]]:
    """Arguments whose value is not among the allowed ones.

    Args:
        read: an argument's value by its name; None where it is not decided.
    """
    for name, limit in LIMITED.items():
        value = read(name)
        if not limit.allows(value):
            yield name, value, limit


def unknown_arguments(defaults: Iterable[tuple[str, Any]], read: Callable[[str], Any]) -> list[str]:
    """Arguments that nobody looked at and that are not at their default.

    Args:
        defaults: name and default of all of SGLang's arguments.
        read: an argument's value as it was given.
    """
    return [name for name, default in defaults if name not in KNOWN and read(name) != default]
