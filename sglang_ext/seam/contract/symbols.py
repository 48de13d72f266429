"""Every name of SGLang's that the plugin imports, hooks, overrides, calls or relies on.

A hook on a name that is not here is refused (`hooking.py`); tests compare the rest with the code.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import NamedTuple


class Use(Enum):
    """What is done with a name, and so what of it must be as it was tested.

    The start is refused where a name is missing, or, but for NAMED, has another signature. Another
    body refuses the start for FOLLOWED, unless the operator allows untested releases. CALLED and
    HOOKED are treated alike: a warning names them, and `hier-kv doctor` and
    `testkit/contract_matrix.py` say which of the two they are.
    """

    NAMED = "imported or read: it exists"
    CALLED = "called as it is: its signature"
    HOOKED = "the plugin's code runs around it: its signature"
    FOLLOWED = "the plugin's code replaces it, or relies on what its body does: both"


class Symbol(NamedTuple):
    """A name of SGLang's.

    Attributes:
        module: within the package `sglang`, dotted.
        name: in the module, dotted; of an attribute that methods of a class assign, too.
        use: what is done with it.
    """

    module: str
    name: str
    use: Use

    @property
    def path(self) -> str:
        """The file, within the package."""
        return f"{self.module.replace('.', '/')}.py"

    def __str__(self) -> str:
        return f"sglang.{self.module}.{self.name}"


_UNIFIED = "srt.mem_cache.unified_radix_cache"
_LINKER = "srt.mem_cache.unified_cache.unified_cache_linker"
_TREE = "srt.mem_cache.unified_cache.unified_tree_core"
_WINDOWS = "srt.mem_cache.unified_cache.components.swa"
_STATES = "srt.mem_cache.unified_cache.components.mamba"
_POOLS = "srt.mem_cache.memory_pool"
_INDEX = "srt.mem_cache.index_key_cache"
_SCHEDULER = "srt.managers.scheduler"
_STAGES = "srt.managers.scheduler_pp_mixin"
_PARTS = "srt.managers.scheduler_components"
_TOKENIZER = "srt.managers.tokenizer_manager"
_DRAFTS = "srt.speculative.base_spec_worker"
_OPENAI = "srt.entrypoints.openai"
_TRACES = "srt.observability"
_PD = "srt.disaggregation"

# Names by use, module and class; a class of "" is the module itself.
_NAMES: dict[Use, dict[tuple[str, str], str]] = {
    Use.HOOKED: {
        ("srt.server_args", "ServerArgs"): "add_cli_args from_cli_args resolve_once",
        (_TOKENIZER, "TokenizerManager"): (
            "__init__ abort_request generate_request _handle_batch_output _send_batch_request "
            "_send_one_request _tokenize_one_request _tokenize_texts _validate_one_request"
        ),
        (f"{_OPENAI}.serving_chat", "OpenAIServingChat"): "_process_messages",
        (f"{_OPENAI}.usage_processor", "UsageProcessor"): (
            "calculate_response_usage calculate_streaming_usage"
        ),
        (_SCHEDULER, "Scheduler"): (
            "__init__ handle_generate_request run_batch process_batch_result flush_cache "
            "init_req_max_new_tokens load_lora_adapter load_lora_adapter_from_tensors "
            "unload_lora_adapter _record_scheduler_state_for_paused_engine"
        ),
        ("srt.managers.schedule_policy", "PrefillAdder"): "preempt_to_schedule",
        (f"{_PARTS}.output_streamer", "SchedulerOutputStreamer"): "get_cached_tokens_details",
        (f"{_PARTS}.internal_state", "SchedulerInternalStateController"): (
            "get_internal_state set_internal_state"
        ),
        (f"{_PARTS}.weight_updater", "SchedulerWeightUpdaterManager"): (
            "update_weights_from_disk update_weights_from_distributed update_weights_from_tensor "
            "update_weights_from_ipc begin_weight_update end_weight_update "
            "release_memory_occupation resume_memory_occupation check_weights"
        ),
        (_DRAFTS, "BaseSpecWorker"): "init_hicache_draft_plan",
        ("srt.model_executor.model_runner", "ModelRunner"): "load_model",
        ("srt.model_loader.loader", ""): "_initialize_model",
        (f"{_PD}.decode", "SchedulerDisaggregationDecodeMixin"): "process_decode_queue",
        (f"{_PD}.decode", "DecodeTransferQueue"): "_do_release",
        (f"{_PD}.decode", "DecodePreallocQueue"): "_pre_alloc",
        ("srt.session.session_controller", "Session"): "_concat_token_arrays",
        ("srt.managers.schedule_batch", "Req"): "__init__ extend_image_inputs",
        ("srt.managers.schedule_batch", "ScheduleBatch"): "check_decode_mem",
    },
    Use.FOLLOWED: {
        (_UNIFIED, "UnifiedRadixCache"): (
            "checkpoint checkpoint_into_tree is_backuped is_root prefetch_from_storage "
            "match_prefix check_prefetch_progress pop_prefetch_loaded_span "
            "prefix_device_indices maybe_hand_to_session claim_kv_row release_aborted_request "
            "check_hicache_events finish_external_linker_loads reset clear_storage_backend "
            "release_host_resources evict_for_alloc swa_retain_floor"
        ),
        (_LINKER, "UnifiedCacheLinkerWrapper"): (
            "__init__ match load_back _offload_node commit_completed_offloads reset "
            "replace_pending_offload_node take_completed_offloads _tail_hashes"
        ),
        (_LINKER, "UnifiedCacheLinker"): (
            "lookup load start_layer_wise_loading finish_layer_wise_loading cancel_queued_load "
            "offload num_completed_offloads pop_completed_offload reset close"
        ),
        ("srt.mem_cache.events", "KVCacheEventRecorder"): (
            "__init__ record_store record_all_cleared take"
        ),
        # What a page is named by, and the replacement of it where no compiler is.
        ("srt.mem_cache.utils", ""): "get_storage_hash_str",
        ("srt.mem_cache.cpp_utils.native_hash", ""): "get_native_hash _native_hash_input",
        # How the front process asks all schedulers for their state; ours gives the request an id.
        ("srt.managers.tokenizer_control_mixin", "TokenizerControlMixin"): (
            "get_internal_state set_internal_state"
        ),
        # When the switches that are set after the scheduler is built have SGLang ask the cache.
        # And that who made others give way is asked next whether it may run.
        (_SCHEDULER, "Scheduler"): "_prefetch_kvcache is_fully_idle _get_new_batch_prefill_raw",
        # Which stage waits for which, in which of its steps; see `ranks/stages.py`.
        (_STAGES, "SchedulerPPMixin"): (
            "event_loop_pp init_pp_loop_state _pp_launch_batch "
            "_pp_commit_send_output_work_and_preprocess_output_tensors "
            "_pp_send_recv_and_preprocess_output_tensors _pp_send_output_to_next_stage"
        ),
        # When a request's KV leaves for another server, and in which rows its metadata travels.
        (f"{_PD}.prefill", "SchedulerDisaggregationPrefillMixin"): (
            "send_kv_chunk _send_kv_chunk process_prefill_chunk maybe_send_cached_prefix_chunk "
            "process_batch_result_disagg_prefill"
        ),
        # When it is known where a request's KV goes, before any of it leaves.
        (f"{_PD}.prefill", "PrefillBootstrapQueue"): "finalize_bootstrap",
        # That all ranks take what has arrived in the same order.
        (f"{_PD}.decode", "DecodeTransferQueue"): (
            "_commit_transfer_to_req pop_transferred resolve_deferred_releases _defer_release"
        ),
        # That the forward which runs while rows are taken is the one that was launched last.
        (f"{_PD}.decode", "SchedulerDisaggregationDecodeMixin"): "event_loop_overlap_disagg_decode",
        # What a decode server keeps of a request that it retracts: no draft's rows; and for which
        # rows of window layers it has room, and which of them come.
        (f"{_PD}.decode", "DecodePreallocQueue"): (
            "resume_retracted_reqs _swa_tail_len _uses_swa_tail_prealloc pop_preallocated"
        ),
        ("srt.managers.schedule_batch", "Req"): "reset_for_retract",
        ("srt.mem_cache.common", ""): "checkpoint_kv_cache release_kv_cache",
        (f"{_PD}.utils", "MetadataBuffers"): "__init__ set_buf get_buf",
        # Which rows of a hybrid's window layers a load fills, and which a tree's node has.
        (_WINDOWS, "SWAComponent"): (
            "build_external_linker_transfer update_external_linker_load "
            "redistribute_on_node_split acquire_component_lock"
        ),
        # How rows of an index lie in pages, which layers have any, and what a forward waits for;
        # which of them go to a decode server, and that a retracted request's come back to it.
        (_INDEX, "IndexKeyCache"): (
            "__init__ _buffer_shape _kernel_view _layer_num_pages get_local_buffer "
            "state_buf_infos cpu_copy load_cpu_copy"
        ),
        (_POOLS, "DSATokenToKVPool"): "get_state_buf_infos get_cpu_copy load_cpu_copy",
        (f"{_PD}.mooncake.conn", "MooncakeKVManager"): "maybe_send_extra transfer_worker",
        # Which slot a load of a state fills, when a state is copied for a request, and which states
        # a tree's nodes keep.
        (_STATES, "MambaComponent"): (
            "build_external_linker_transfer "
            "redistribute_on_node_split acquire_component_lock commit_insert_component_data "
            "prepare_for_caching_req cleanup_after_caching_req finalize_match_result_in_cache "
            "_select_finished_checkpoint"
        ),
        # Which states behind guesses a tree's nodes keep; decision 43.
        ("srt.speculative.spec_utils", ""): (
            "prepare_mamba_track_for_verify _verify_commit_step_indices "
            "commit_mamba_states_after_verify"
        ),
        ("srt.managers.schedule_batch", ""): "set_mamba_track_indices_from_reqs",
        (f"{_PARTS}.batch_result_processor", "SchedulerBatchResultProcessor"): (
            "_mamba_prefix_cache_update _mamba_check_track_boundary"
        ),
        ("srt.managers.schedule_batch", "ScheduleBatch"): (
            "_mamba_radix_cache_v2_req_prepare_for_extend _collect_deferred_mamba_cow_and_clear"
        ),
        (_POOLS, "HybridReqToTokenPool"): (
            "mamba2_layer_cache copy_mamba_state donate_mamba_ping_pong_slot free_mamba_cache"
        ),
    },
    Use.CALLED: {
        ("srt.utils.auth", ""): "auth_level",
        (_TOKENIZER, "TokenizerManager"): "auto_create_handle_loop",
        ("srt.plugins.hook_registry", "HookRegistry"): "register apply_hooks",
        ("srt.mem_cache.registry", ""): (
            "register_radix_cache_backend registered_radix_cache_backends "
            "create_unified_radix_cache"
        ),
        ("srt.session.streaming_session", ""): "is_virtual_node",
        ("srt.utils.rank_consensus_checker", ""): "rank_consensus",
        ("srt.runtime_context", ""): "get_parallel",
        (f"{_PARTS}.dp_attn", "SchedulerDPAttnAdapter"): "maybe_prepare_mlp_sync_batch",
        ("srt.arg_groups.arg_utils", ""): "record_fields",
        ("srt.arg_groups.model_override_base", ""): "model_config_of",
        ("srt.arg_groups.overrides", ""): "resolution_result",
        ("srt.configs.hybrid_arch", ""): "mambaish_config",
        ("srt.distributed.utils", ""): "get_pp_indices",
        ("srt.model_executor.model_runner_components.load_model_utils", ""): (
            "resolve_sliding_window_size"
        ),
        ("srt.configs.model_config", ""): (
            "is_deepseek_dsa is_deepseek_v4 is_minimax_sparse get_dsa_index_kpool"
        ),
        ("srt.model_loader.utils", ""): "get_resolved_model_impl",
        (_UNIFIED, "UnifiedRadixCache"): (
            "__init__ inc_lock_ref dec_lock_ref root_node_handle _apply_cache_actions "
            "mamba_evictable_size"
        ),
        ("srt.mem_cache.unified_cache.components.base", "TreeComponent"): (
            "cleanup_after_caching_req"
        ),
        (_TREE, "UnifiedTreeCore"): (
            "match_prefix match_full_device_prefix collect_full_device_indices node_by_id "
            "root_node_handle get_hash_values get_prefix_hash_values"
        ),
        ("srt.mem_cache.events", "KVCacheEventRecorder"): "enqueue",
        ("srt.mem_cache.radix_cache", "RadixKey"): "__init__ page_aligned maybe_to_bigram_view",
        (_SCHEDULER, "Scheduler"): "process_pending_chunked_abort",
        ("srt.managers.schedule_batch", "Req"): (
            "finished set_finish_with_abort release_mm_inputs_on_abort"
        ),
        ("srt.session.streaming_session", "StreamingSession"): "release_session borrowed_slot",
        (_LINKER, "UnifiedCacheLinkerWrapper"): "release_request",
        ("srt.mem_cache.base_prefix_cache", "IncLockRefResult"): "to_dec_params",
        ("srt.mem_cache.allocator.base", "BaseTokenToKVPoolAllocator"): (
            "get_kvcache available_size clear"
        ),
        (_POOLS, "KVCache"): "register_layer_transfer_counter",
        (_POOLS, "ReqToTokenPool"): "clear",
        (_POOLS, "HybridReqToTokenPool"): "register_layer_transfer_counter",
        ("srt.mem_cache.allocator.swa", "SWATokenToKVPoolAllocator"): (
            "translate_loc_from_full_to_swa set_full_to_swa_mapping free_swa_segment"
        ),
        ("srt.configs.model_config", "ModelConfig"): (
            "get_num_kv_heads get_swa_num_kv_heads from_server_args"
        ),
        ("srt.configs.mamba_utils", "BaseLinearStateParams"): "mamba_cache_per_req",
        ("srt.configs.granitemoehybrid", "GraniteMoeHybridConfig"): "mamba2_cache_params",
        ("srt.speculative.spec_info", "SpeculativeAlgorithm"): "is_none",
        ("srt.model_executor.forward_batch_info", "ForwardMode"): (
            "is_decode is_extend is_split_prefill"
        ),
        (_DRAFTS, "BaseSpecWorker"): "_draft_model_runners",
        ("srt.model_executor.model_runner", "ModelRunner"): "forward",
        ("srt.managers.schedule_batch", "ScheduleBatch"): "init_new prepare_for_extend",
        ("srt.managers.schedule_batch", "MultimodalProcessorOutput"): "build_padded_input_ids",
        (f"{_TRACES}.trace", "TraceReqContext"): (
            "trace_slice_start trace_slice_end trace_set_thread_attrs"
        ),
        (f"{_TRACES}.trace_async", "TraceReqContextAsync"): (
            "trace_slice_start trace_slice_end trace_set_thread_attrs"
        ),
        ("srt.model_executor.forward_batch_info", "ForwardBatch"): "init_new",
        ("srt.model_executor.forward_batch_info", "PPProxyTensors"): "__init__",
        ("srt.distributed.parallel_state", ""): "get_world_group",
        ("srt.distributed.parallel_state", "GroupCoordinator"): (
            "send_tensor_dict recv_tensor_dict is_first_rank is_last_rank"
        ),
        (f"{_PD}.common.conn", "CommonKVManager"): "is_abort_release_safe",
    },
    Use.NAMED: {
        ("srt.plugins.hook_registry", ""): "HookType",
        ("srt.constants", ""): "HEALTH_CHECK_RID_PREFIX",
        ("srt.server_args", ""): "ServerArgs",
        ("srt.entrypoints.engine", "Engine"): "server_args_class",
        ("srt.configs.model_config", ""): "AttentionArch ModelConfig ModelImpl",
        ("srt.configs.model_config", "AttentionArch"): "MHA MLA",
        ("srt.configs.model_config", "ModelImpl"): "TRANSFORMERS",
        ("srt.configs.model_config", "ModelConfig"): (
            "hf_config is_hybrid_swa is_encoder_decoder is_multimodal attention_arch "
            "attention_chunk_size is_hybrid_swa_compress head_dim v_head_dim swa_head_dim "
            "swa_v_head_dim full_attention_layer_ids swa_attention_layer_ids sliding_window_size "
            "hf_text_config vocab_size num_attention_heads kv_lora_rank qk_rope_head_dim "
            "quantization dtype model_path"
        ),
        ("srt.entrypoints.http_server", ""): "app",
        ("srt.utils.auth", "AuthLevel"): "ADMIN_OPTIONAL",
        ("srt.managers.io_struct", ""): "GetInternalStateReq SetInternalStateReqOutput",
        ("srt.managers.io_struct", "GetInternalStateReqOutput"): "internal_state",
        ("srt.managers.io_struct", "SetInternalStateReq"): "server_args",
        ("srt.managers.io_struct", "SetInternalStateReqOutput"): "updated",
        ("srt.managers.io_struct", "GenerateReqInput"): "parallel_sample_num mm_hashes",
        ("srt.managers.io_struct", "TokenizedGenerateReqInput"): "mm_inputs",
        ("srt.managers.schedule_batch", "MultimodalDataItem"): (
            "modality offsets format feature model_specific_data precomputed_embeddings"
        ),
        ("srt.managers.schedule_batch", "MultimodalProcessorOutput"): (
            "mm_items padded_input_ids input_ids"
        ),
        ("srt.managers.schedule_batch", "MultimodalInputs"): (
            "mm_items mrope_positions mrope_position_delta"
        ),
        ("srt.managers.io_struct", "BatchTokenIDOutput"): "cached_tokens_details",
        ("srt.managers.io_struct", "BatchStrOutput"): "cached_tokens_details",
        ("srt.managers.io_struct", "BaseReq"): "rid",
        ("srt.managers.io_struct", "CheckWeightsReqInput"): "action",
        (f"{_OPENAI}.protocol", ""): (
            "ChatCompletionResponse ChatCompletionStreamResponse CompletionResponse "
            "CompletionStreamResponse ResponsesResponse UsageInfo PromptTokensDetails"
        ),
        (f"{_OPENAI}.protocol", "UsageInfo"): "prompt_tokens_details",
        (f"{_OPENAI}.protocol", "ResponsesResponse"): "usage",
        (f"{_OPENAI}.serving_base", "OpenAIServingBase"): "tokenizer_manager",
        ("srt.mem_cache.hicache_storage", ""): "PoolName PoolTransfer",
        ("srt.mem_cache.hicache_storage", "PoolName"): "KV MAMBA SWA",
        ("srt.mem_cache.hicache_storage", "PoolTransfer"): "name keys device_indices",
        ("srt.mem_cache.events", "KVCacheEventRecorder"): (
            "_queue enabled page_size dynamo_format lora_names"
        ),
        (f"{_PD}.utils", ""): "FAKE_BOOTSTRAP_HOST",
        ("srt.disaggregation.kv_events", ""): "BlockRemoved BlockStored StorageMedium",
        ("srt.disaggregation.kv_events", "StorageMedium"): "CPU DISK EXTERNAL GPU",
        ("srt.disaggregation.kv_events", "BlockStored"): (
            "block_hashes parent_block_hash token_ids block_size cache_salt lora_name"
        ),
        ("srt.mem_cache.base_prefix_cache", "MatchPrefixParams"): "key req cow_mamba",
        ("srt.mem_cache.base_prefix_cache", "MatchResult"): (
            "device_prefix_len last_device_node best_match_node last_host_node host_hit_length "
            "cache_actions swa_host_hit_length full_kv_hit_length mamba_host_hit_length "
            "mamba_branching_seqlen"
        ),
        (_LINKER, ""): "ExternalCacheHitMarker _PendingOffload",
        (_LINKER, "ExternalCacheHitMarker"): "tail_hashes device_hit_len",
        (_LINKER, "_PendingOffload"): "publish_node_ids",
        (_LINKER, "UnifiedCacheLinkerWrapper"): (
            "hit_markers pending_offloads inflight_load_rids inflight_load_index "
            "private_load_indices cache_linker"
        ),
        (_TREE, "UnifiedTreeCore"): "eviction_strategy _node_arena kv_events is_eagle",
        (_TREE, "UnifiedTreeNode"): (
            "id key hash_value parent children external_cache_stored write_through_pending_id "
            "component_data"
        ),
        ("srt.mem_cache.unified_cache.component_type", ""): "ComponentType",
        ("srt.mem_cache.unified_cache.component_type", "ComponentType"): "FULL MAMBA SWA",
        ("srt.mem_cache.unified_cache.components.base", "TreeComponent"): "component_type",
        ("srt.mem_cache.unified_cache.components.base", "ComponentData"): "value",
        (_WINDOWS, "SWAComponent"): "full_window_pages",
        (_STATES, "MambaComponent"): "mamba_checkpoint_grid",
        (_POOLS, "HybridLinearKVPool"): "full_kv_pool full_attention_layer_id_mapping",
        (_POOLS, "HybridReqToTokenPool"): "mamba_pool mamba_map mamba_ckpt_pool",
        (_POOLS, "MambaPool"): (
            "mamba_cache replayssm_write_pos enable_linear_replayssm_spec _slot_siblings"
        ),
        (_POOLS, "KVCache"): "layer_num start_layer register_layer_transfer_counter",
        ("srt.mem_cache.base_prefix_cache", "EvictParams"): "mamba_num",
        ("srt.mem_cache.radix_cache", "RadixKey"): "is_bigram",
        ("srt.mem_cache.allocator.base", "BaseTokenToKVPoolAllocator"): "size",
        ("srt.mem_cache.swa_memory_pool", "SWAKVPool"): (
            "full_kv_pool swa_kv_pool layers_mapping page_size"
        ),
        ("srt.layers.radix_attention", "RadixAttention"): (
            "layer_id attn_type tp_q_head_num is_cross_attention sliding_window_size"
        ),
        ("srt.layers.rotary_embedding.base", "RotaryEmbedding"): "cos_sin_cache",
        ("srt.lora.lora_manager", "LoRAManager"): "loras",
        (_UNIFIED, "UnifiedRadixCache"): (
            "session tree_core linker req_to_token_pool token_to_kv_pool_allocator page_size "
            "pp_size components"
        ),
        ("srt.session.session_controller", "Session"): "_inflight session_id streaming",
        ("srt.session.streaming_session", "StreamingSession"): "slots",
        ("srt.session.streaming_session", "SessionSlot"): "kv",
        (_TOKENIZER, "TokenizerManager"): (
            "rid_to_state context_len num_reserved_tokens async_dynamic_batch_tokenizer "
            "server_args is_generation"
        ),
        (_TOKENIZER, "ReqState"): "abort_sent",
        ("srt.managers.schedule_batch", ""): "FINISH_ABORT",
        ("srt.managers.schedule_batch", "Req"): (
            "kv cache_request_handle to_finish full_untruncated_fill_ids prefix_len "
            "origin_input_ids origin_input_ids_unpadded extra_key cache_salt lora_id session "
            "skip_radix_cache_insert discard_output_reason cached_tokens last_node sampling_params "
            "time_stats bootstrap_host bootstrap_room metadata_buffer_index disagg_kv_sender "
            "logprob_start_len extend_end multimodal_inputs output_ids disagg_decode_prefix_len "
            "finished_reason return_logprob input_embeds seqlen priority"
        ),
        ("srt.managers.schedule_batch", "ScheduleBatch"): (
            "reqs forward_mode hicache_consumer_index launch_ts extend_lens prefix_lens input_ids "
            "prefill_input_ids_cpu device"
        ),
        ("srt.model_executor.model_runner", "ModelRunnerOutput"): "logits_output",
        ("srt.model_executor.model_runner", "ModelRunner"): (
            "is_draft_worker server_args model_config lora_manager token_to_kv_pool forward_stream "
            "model req_to_token_pool token_to_kv_pool_allocator"
        ),
        # Layers of the hybrids that are served in stages.
        ("srt.configs.kimi_linear", "KimiLinearConfig"): "linear_layer_ids num_hidden_layers",
        ("srt.configs.nemotron_h", "NemotronHConfig"): "mamba_layer_ids",
        ("srt.managers.tp_worker", "BaseTpWorker"): "model_runner",
        ("srt.managers.tp_worker", "TpModelWorker"): "register_hicache_layer_transfer_counter",
        ("srt.mem_cache.cache_init_params", "CacheInitParams"): "tree_core_backend",
        ("srt.distributed.parallel_state", "GroupCoordinator"): "world_size cpu_group",
        ("srt.mem_cache.registry", "TreeCacheBuildContext"): (
            "server_args params is_hybrid_swa is_hybrid_ssm is_dsa disable_radix_cache tp_worker "
            "model_config tp_size tp_rank tp_group"
        ),
        ("srt.model_executor.cuda_graph_config", "CudaGraphConfig"): "prefill",
        ("srt.model_executor.cuda_graph_config", "PhaseConfig"): "backend",
        ("srt.model_executor.cuda_graph_config", "Backend"): "BREAKABLE",
        (f"{_PARTS}.weight_updater", "SchedulerWeightUpdaterManager"): "offload_tags _session",
        (f"{_TRACES}.req_time_stats", "ReqTimeStatsBase"): "trace_ctx",
        (f"{_TRACES}.trace", "TraceReqContext"): "tracing_enable",
        ("srt.managers.schedule_batch", "ReqKvInfo"): (
            "holds_kv cache_protected_len req_pool_idx get_evicted_seqlen set_evicted_seqlen "
            "holds_mamba mamba_cow_src_index mamba_needs_clear mamba_last_track_seqlen"
        ),
        (_SCHEDULER, "Scheduler"): (
            "enable_unified_cache_external_linker enable_lmcache waiting_queue tree_cache "
            "max_req_len max_req_input_len chunked_req _pending_chunked_abort_req dp_attn_adapter "
            "disagg_prefill_bootstrap_queue disagg_decode_prealloc_queue disagg_metadata_buffers "
            "pp_group attn_tp_group tp_worker spec_algorithm internal_state sliding_window_size "
            "model_config schedule_stream copy_stream future_map enable_overlap last_batch "
            "schedule_low_priority_values_first tokenizer"
        ),
        ("srt.managers.schedule_policy", "PrefillAdder"): (
            "tree_cache running_batch priority_scheduling_preemption_threshold"
        ),
        # Streams that none of ours may be.
        ("srt.managers.overlap_utils", "FutureMap"): "fwd_prepare_d2h_stream",
        (f"{_PD}.prefill", "PrefillBootstrapQueue"): "queue kv_manager",
        (f"{_PD}.decode", "DecodeTransferQueue"): "scheduler metadata_buffers queue",
        (f"{_PD}.decode", "DecodeRequest"): "req metadata_buffer_index kv_receiver",
        # Which rank a request's KV is sent to.
        (f"{_PD}.decode", "DecodePreallocQueue"): "kv_manager tree_cache scheduler",
        (f"{_PD}.common.conn", "CommonKVManager"): "transfer_infos kv_args",
        (f"{_PD}.base.conn", "KVArgs"): "kv_data_ptrs state_data_ptrs state_types",
        (f"{_PD}.base.conn", "StateType"): "DSA",
        (f"{_PD}.common.conn", "CommonKVSender"): "kv_mgr",
        (f"{_PD}.common.conn", "CommonKVReceiver"): "kv_mgr bootstrap_infos abort_notified",
        (f"{_PD}.mooncake.conn", "MooncakeKVManager"): "get_session_id",
        (f"{_PD}.mooncake.conn", "TransferInfo"): (
            "mooncake_session_id is_dummy dst_state_indices"
        ),
        (f"{_PD}.utils", "MetadataBuffers"): "output_ids",
        ("srt.sampling.sampling_params", ""): "SamplingParams",
        ("srt.speculative.spec_info", ""): "SpeculativeAlgorithm",
        (_DRAFTS, "BaseSpecWorker"): "target_worker",
        ("srt.mem_cache.memory_pool", ""): "MHATokenToKVPool MLATokenToKVPool DSATokenToKVPool",
        ("srt.mem_cache.memory_pool", "MHATokenToKVPool"): "k_buffer v_buffer",
        ("srt.mem_cache.memory_pool", "MLATokenToKVPool"): "kv_buffer kv_lora_rank use_dsa",
        (_POOLS, "DSATokenToKVPool"): (
            "index_kpool index_page_size index_head_dim quant_block_size index_k_with_scale_buffer"
        ),
        ("srt.layers.attention.dsa.dsa_indexer", "Indexer"): (
            "use_dsa_indexer_fusion is_neox_style block_size scale_fmt rope_head_dim"
        ),
        ("srt.mem_cache.memory_pool", "ReqToTokenPool"): "req_to_token",
    },
}


def _all() -> Iterator[Symbol]:
    for use, groups in _NAMES.items():
        for (module, holder), names in groups.items():
            for name in names.split():
                yield Symbol(module, f"{holder}.{name}" if holder else name, use)


SYMBOLS: tuple[Symbol, ...] = tuple(_all())
