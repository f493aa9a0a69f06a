"""Which of vLLM's options a block's name covers: all of them, except what stands here.

Tested against every option of vLLM 0.31, 0.32 and 0.33. An option that stands in none of these
tables counts. The tables of what counts are there for the test, which fails for an option that
stands in no table. `SINCE` and `UNTIL` have the options that not every version has.
"""

from __future__ import annotations

NET = "addresses, ports, ranks and processes"
MEMORY = "how much memory there is, or how it is shared out"
RELOADS = "weights that are changed in memory are summed there"
SPEED = "how the work is cut up and scheduled; sums differ in their last bits"
OBSERVE = "what is counted, logged and traced"
TEXT = "how prompts are written, tokens are drawn, and answers are returned"
SAFE = "what requests may ask for, and what is refused"
DERIVED = "follows from options that are walked themselves"
NAMED = "has a part of the name of its own"
OFFLOAD = "where weights lie while they are not used"

# Option -> why it cannot change keys and values, by the configuration that it is in.
HARMLESS: dict[str, dict[str, str]] = {
    "": {
        "names for people, random ids": """
            instance_id
        """,
        SPEED: """
            optimization_level performance_mode
        """,
        NET: """
            shutdown_timeout
        """,
        RELOADS: """
            weight_transfer_config
        """,
        "made from model_config.quantization_config, the model's configuration and its files": """
            quant_config
        """,
        "set or not, what is in it is walked": """
            model_config
            lora_config speculative_config
        """,
        OBSERVE: """
            kv_events_config logging_config observability_config profiler_config
        """,
        TEXT: """
            structured_outputs_config reasoning_config watermark_config
        """,
        "says where blocks are stored": """
            kv_transfer_config ec_transfer_config
        """,
    },
    "attention_config": {
        SPEED: """
            flash_attn_max_num_splits_for_cuda_graph tokenspeed_mla_min_split_kv
            tq_max_kv_splits_for_cuda_graph sparse_mla_prefill_workspace_factor flex_attn_block_m
            flex_attn_block_n flex_attn_q_block_size flex_attn_kv_block_size
            indexer_tp_shard_min_rows
        """,
    },
    "aux_output_config": {
        TEXT: """
            enable_return_routed_experts max_bytes
        """,
    },
    "cache_config": {
        MEMORY: """
            gpu_memory_utilization num_gpu_blocks_override num_gpu_blocks num_cpu_blocks
            kv_cache_size_tokens kv_cache_max_concurrency kv_cache_memory_bytes kv_offloading_size
            kv_offloading_backend simple_cpu_offload_num_blocks
        """,
        "which blocks vLLM's own cache keeps, finds or gives up": """
            enable_prefix_caching prefix_match_unit prefix_cache_retention_interval
            enable_mamba_shared_prefix_checkpoint cache_hit_alignment_tokens swa_bounded_replay
        """,
        NAMED: """
            prefix_caching_hash_algo kv_cache_layout
        """,
        DERIVED: """
            user_specified_block_size user_specified_mamba_block_size _block_size_resolved
            is_attention_free
            effective_attention_block_size hash_block_size mamba_page_size_padded
            skip_page_size_padded
        """,
    },
    "compilation_config": {
        SPEED: """
            mode backend custom_ops ir_enable_torch_wrap splitting_ops compile_mm_encoder
            cudagraph_mm_encoder encoder_cudagraph_token_budgets
            encoder_cudagraph_max_vision_items_per_batch encoder_cudagraph_max_frames_per_batch
            cudagraph_decoder_replay decoder_replay_cudagraph_capture_sizes
            decoder_replay_trim_threshold compile_sizes compile_ranges_endpoints
            inductor_compile_config cudagraph_mode cudagraph_num_of_warmups cudagraph_capture_sizes
            cudagraph_copy_inputs cudagraph_specialize_lora use_inductor_graph_partition
            max_cudagraph_capture_size dynamic_shapes_config fast_moe_cold_start
        """,
        OBSERVE: """
            debug_dump_path traced_files compilation_time encoder_compilation_time
            enabled_custom_ops disabled_custom_ops
        """,
        "where compiled code is kept": """
            cache_dir compile_cache_save_format local_cache_dir
        """,
        "the layers themselves; what they hold is in the layout": """
            static_forward_context static_all_moe_layers
        """,
    },
    "compilation_config.pass_config": {
        SPEED: """
            fuse_norm_quant fuse_act_quant fuse_attn_quant eliminate_noops fuse_allreduce_rms
            enable_qk_norm_rope_fusion fuse_rope_kvcache_cat_mla fuse_act_padding
            fuse_mla_dual_rms_norm fuse_rope_kvcache fuse_qk_norm_rope_kvcache
            rope_kvcache_fusion_max_token_num fi_allreduce_fusion_max_size_mb enable_sp
            sp_min_token_num fuse_gemm_comms
        """,
    },
    "compilation_config.dynamic_shapes_config": {
        SPEED: """
            type evaluate_guards assume_32_bit_indexing
        """,
    },
    "device_config": {
        NAMED: """
            device device_type
        """,
    },
    "ec_manager_config": {
        MEMORY: """
            encoder_cache_manager_cls manager_config
        """,
    },
    "ec_transfer_config": {
        "says where the encoder's outputs are": """
            ec_connector engine_id ec_buffer_device ec_buffer_size ec_role ec_ip ec_port
            ec_connector_extra_config ec_connector_module_path mm_encoder_output_widths ec_rank
            ec_parallel_size
        """,
    },
    "kv_events_config": {
        OBSERVE: """
            enable_kv_cache_events publisher endpoint replay_endpoint buffer_steps hwm
            max_queue_size topic
        """,
    },
    "kv_transfer_config": {
        "says where blocks are stored": """
            kv_connector engine_id kv_buffer_device kv_role kv_port kv_connector_extra_config
            kv_connector_module_path enable_permute_local_kv kv_load_failure_policy kv_buffer_size
            kv_ip kv_parallel_size kv_rank
        """,
    },
    "kernel_config": {
        SPEED: """
            enable_flashinfer_autotune enable_rocm_segmented_attn_autotune enable_cutedsl_warmup
            enable_jit_warmup
        """,
    },
    "kernel_config.ir_op_priority": {
        SPEED: """
            rms_norm fused_add_rms_norm gelu_and_mul_sparse
        """,
    },
    "load_config": {
        "how weights reach the memory; the same weights": """
            safetensors_load_strategy safetensors_prefetch_num_threads
            safetensors_prefetch_block_size device use_tqdm_on_load pt_load_map_location
            download_dir
        """,
    },
    "logging_config": {
        OBSERVE: """
            log_level formatter configure_logging pylogging_config_file
        """,
    },
    "lora_config": {
        MEMORY: """
            max_loras max_cpu_loras max_lora_rank
        """,
        SPEED: """
            fully_sharded_loras specialize_active_lora enable_mixed_moe_lora_format
        """,
        TEXT: """
            max_lora_cls_labels
        """,
    },
    "model_config": {
        "the same files under another path, and what they are is fingerprinted": """
            model model_weights hf_config_path revision tokenizer_revision
            config_format
        """,
        "the resolved configuration counts": """
            hf_overrides hf_text_config word_embeddings_untied_by_checkpoint
        """,
        "blocks are named by token ids": """
            tokenizer tokenizer_mode skip_tokenizer_init
        """,
        SAFE: """
            allowed_local_media_path allowed_media_domains max_logprobs enable_prompt_embeds
            allow_deprecated_quantization
        """,
        TEXT: """
            return_sampling_mask logprobs_mode use_fp64_gumbel enable_trace_replay generation_config
            override_generation_config logits_processors io_processor_plugin renderer_num_workers
            pooler_config
        """,
        SPEED: """
            enforce_eager disable_cascade_attn
        """,
        MEMORY: """
            enable_sleep_mode sleep_preserve_parameter_names sleep_mode_backend
            sleep_mode_offload_cudagraph enable_nccl_comm_suspend enable_cumem_allocator
        """,
        "names for people, random ids": """
            served_model_name
        """,
        "a secret": """
            hf_token
        """,
        "counts for weights that are made from it, in their fingerprint": """
            seed
        """,
        "whether foreign code may run; the code counts": """
            trust_remote_code
        """,
        DERIVED: """
            spec_target_max_model_len is_submodel_config runner convert
        """,
    },
    "model_config.multimodal_config": {
        SAFE: """
            limit_per_prompt enable_mm_embeds allow_missing_mm_embeddings
        """,
        MEMORY: """
            mm_processor_cache_gb mm_processor_cache_type mm_shm_cache_max_object_size_mb
            skip_mm_profiling mm_tensor_ipc mm_ipc_gpu_memory_gb
        """,
        SPEED: """
            mm_encoder_tp_mode
        """,
        OBSERVE: """
            mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin
        """,
        "the prompt's tokens count": """
            interleave_mm_strings
        """,
    },
    "model_config.pooler_config": {
        TEXT: """
            task pooling_type seq_pooling_type tok_pooling_type use_activation
            enable_flash_late_interaction dimensions enable_chunked_processing max_embed_len
            logit_mean logit_sigma step_tag_id returned_token_ids
        """,
    },
    "observability_config": {
        OBSERVE: """
            show_hidden_metrics_for_version otlp_traces_endpoint collect_detailed_traces
            per_request_spec_decode_metrics kv_cache_metrics kv_cache_metrics_sample
            custom_histogram_buckets cudagraph_metrics enable_layerwise_nvtx_tracing
            enable_mfu_metrics enable_mm_processor_stats enable_logging_iteration_details
            jit_monitor_mode jit_monitor_verbose
        """,
    },
    "offload_config": {
        OFFLOAD: """
            offload_backend
        """,
    },
    "offload_config.uva": {
        OFFLOAD: """
            cpu_offload_gb cpu_offload_params
        """,
    },
    "offload_config.prefetch": {
        OFFLOAD: """
            offload_group_size offload_num_in_group offload_prefetch_step offload_params
        """,
    },
    "parallel_config": {
        NAMED: """
            tensor_parallel_size pipeline_parallel_size decode_context_parallel_size
            prefill_context_parallel_size
        """,
        NET: """
            data_parallel_size data_parallel_size_local data_parallel_rank data_parallel_rank_local
            data_parallel_master_ip data_parallel_rpc_port data_parallel_master_port
            data_parallel_backend data_parallel_external_lb data_parallel_hybrid_lb
            distributed_executor_backend master_addr master_port node_rank nnodes numa_bind
            numa_bind_nodes numa_bind_cpus assigned_physical_gpu_ids distributed_timeout_seconds
            cpu_distributed_timeout_seconds world_size rank _data_parallel_master_port_list
            _coord_store_port data_parallel_index _api_process_count _api_process_rank
            ray_runtime_env placement_group ray_workers_use_nsight max_parallel_loading_workers
            enable_fault_tolerance
        """,
        SPEED: """
            dp_sync_interval enable_batch_sharded_sampling disable_custom_all_reduce
            enable_shm_tensor_arena enable_dbo ubatch_size dbo_decode_token_threshold
            dbo_prefill_token_threshold disable_nccl_for_dp_synchronization all2all_backend
        """,
        "which rank has which expert: experts have no KV": """
            enable_expert_parallel enable_ep_weight_filter enable_eplb expert_placement_strategy
            enable_elastic_ep elastic_ep_max_dp_size is_moe_model
        """,
        "of context parallelism, which kvdepot refuses": """
            dcp_kv_cache_interleave_size dcp_comm_backend dcp_q_replicate
            cp_kv_cache_interleave_size _allow_auto_resolve_cp_interleave_size
        """,
    },
    "parallel_config.eplb_config": {
        "which rank has which expert: experts have no KV": """
            window_size step_interval num_redundant_experts log_balancedness
            log_balancedness_interval use_async policy communicator enable_migration_batching
        """,
    },
    "parallel_config.fault_tolerance_config": {
        NET: """
            engine_recovery_timeout_sec
        """,
    },
    "profiler_config": {
        OBSERVE: """
            profiler torch_profiler_dir torch_profiler_activities proton_profiler_dir proton_context
            proton_data proton_backend proton_mode proton_hook proton_output_format
            proton_graph_attribution torch_profiler_with_stack torch_profiler_with_flops
            torch_profiler_use_gzip torch_profiler_dump_cuda_time_total torch_profiler_record_shapes
            torch_profiler_with_memory capture_torch_profiler detailed_trace_annotation
            ignore_frontend delay_iterations max_iterations warmup_iterations active_iterations
            wait_iterations
        """,
    },
    "reasoning_config": {
        TEXT: """
            reasoning_parser reasoning_start_str reasoning_end_str _reasoning_start_token_ids
            _reasoning_end_token_ids _natural_reasoning_end_token_ids _enabled
        """,
    },
    "scheduler_config": {
        SPEED: """
            max_num_batched_tokens max_num_scheduled_tokens max_num_seqs max_num_active_seqs
            long_prefill_token_threshold long_prefill_token_threshold_adaptive
            enable_chunked_prefill max_num_encoder_input_tokens encoder_cache_size policy
            disable_chunked_mm_input scheduler_reserve_full_isl watermark prefill_schedule_interval
            async_scheduling stream_interval
        """,
        SAFE: """
            max_num_queued_reqs max_num_queued_tokens
        """,
        DERIVED: """
            runner_type is_multimodal_model disable_hybrid_kv_cache_manager
        """,
    },
    "speculative_config": {
        SPEED: """
            enforce_eager num_speculative_tokens disable_padded_drafter_batch
            use_local_argmax_reduction prompt_lookup_max prompt_lookup_min
            num_speculative_tokens_per_batch_size suffix_decoding_max_tree_depth
            suffix_decoding_max_cached_requests suffix_decoding_max_spec_factor
            suffix_decoding_min_token_prob enable_adaptive_verification
        """,
        TEXT: """
            rejection_sample_method synthetic_acceptance_rates synthetic_acceptance_length
            draft_sample_method draft_lm_head_quantization xpress_topc fly_window_size
            fly_entropy_threshold fly_entropy_top_k
        """,
        NAMED: """
            disable_lookahead_block_hashes
        """,
        "walked by itself": """
            target_model_config target_parallel_config draft_parallel_config
        """,
        "the same files under another path, and what they are is fingerprinted": """
            model revision code_revision
        """,
    },
    "structured_outputs_config": {
        TEXT: """
            backend disable_any_whitespace disable_additional_properties reasoning_parser
            reasoning_parser_plugin enable_in_reasoning
        """,
    },
    "watchdog_config": {
        OBSERVE: """
            timeout check_interval dump_dir
        """,
    },
    "watermark_config": {
        TEXT: """
            key algorithm alpha context_width deduplicate_contexts deduplicate_contexts_max_history
            prf allow_target_only_watermarking
        """,
    },
    "weight_transfer_config": {
        RELOADS: """
            backend
        """,
    },
}

# Options that somebody has looked at, and that count.
COUNTS: dict[str, str] = {
    "": """
        additional_config
    """,
    "model_config": """
        code_revision dtype quantization quantization_config disable_sliding_window
        model_class_overrides model_impl
    """,
    "model_config.quantization_config": """
        ignore targets
    """,
    "model_config.quantization_config.linear": """
        weight activation
    """,
    "model_config.quantization_config.moe": """
        weight activation
    """,
    "model_config.multimodal_config": """
        language_model_only mm_encoder_only
    """,
    "cache_config": """
        block_size cache_dtype sliding_window kv_cache_dtype_skip_layers mamba_block_size
        mamba_cache_dtype mamba_ssm_cache_dtype mamba_cache_mode replayssm_buffer_len use_replayssm
        use_kda_recoverssm kv_sharing_fast_prefill
    """,
    "parallel_config": """
        enable_hc_sp worker_cls worker_extension_cls sd_worker_cls
    """,
    "scheduler_config": """
        scheduler_cls
    """,
    "load_config": """
        load_format model_loader_extra_config ignore_patterns
    """,
    "attention_config": """
        backend minimax_m3_msa_decode_backend backend_per_kind flash_attn_version
        use_trtllm_attention disable_flashinfer_q_quantization mla_prefill_backend
        use_prefill_query_quantization indexer_kv_dtype indexer_sparse_logits use_non_causal
        sparse_mla_force_mqa trtllm_ragged_backend minimax_m3_indexer_cp
    """,
    "attention_config.hisparse_config": """
        device_buffer_size eager_host_mirror
    """,
    "engram_config": """
        cpu_offload embedding_across_dp dp_shared_memory use_thp
    """,
    "mamba_config": """
        backend enable_stochastic_rounding stochastic_rounding_philox_rounds ssu_algorithm
    """,
    "kernel_config": """
        moe_backend sparse_indexer_topk_backend linear_backend linear_backend_per_quant monokernel
    """,
    "speculative_config": """
        method draft_tensor_parallel_size tensor_parallel_size quantization moe_backend
        attention_backend kv_cache_dtype max_model_len index_share_for_mtp_iteration
        disable_eagle_block_drop use_heterogeneous_vocab parallel_drafting dspark_draft_topk
    """,
    "diffusion_config": """
        canvas_length max_denoising_steps
    """,
    "compilation_config": """
        inductor_passes
    """,
}

# Only under an adapter, whose files and numbers they change.
UNDER_ADAPTERS = {
    "lora_config": """
        lora_dtype target_modules default_mm_loras enable_tower_connector_lora
        enable_moe_shared_loras
    """,
}

# Only for what is not text.
FOR_MEDIA = {
    "model_config.multimodal_config": """
        media_io_kwargs mm_processor_kwargs mm_device_do_normalize mm_hasher_algorithm
        mm_encoder_attn_backend mm_encoder_attn_dtype mm_encoder_fp8_scale_path video_pruning_rate
        video_pruning_method
    """,
}

# What was made of them counts: `kvdepot.vllm.options.of` adds it.
RESOLVED = {"model_config": "hf_config max_model_len"}

# Options above that not every version has, by the first version and by the last one with them.
SINCE: dict[str, str] = {
    "0.32": """
        attention_config.sparse_mla_prefill_workspace_factor
        attention_config.tokenspeed_mla_min_split_kv cache_config.cache_hit_alignment_tokens
        cache_config.hash_block_size compilation_config.cudagraph_decoder_replay
        compilation_config.decoder_replay_cudagraph_capture_sizes
        compilation_config.decoder_replay_trim_threshold
        ec_transfer_config.mm_encoder_output_widths
        kernel_config.enable_rocm_segmented_attn_autotune logging_config.formatter
        model_config.pooler_config.enable_flash_late_interaction
        model_config.sleep_mode_offload_cudagraph observability_config.custom_histogram_buckets
        parallel_config.enable_hc_sp parallel_config.enable_shm_tensor_arena
        parallel_config.eplb_config.enable_migration_batching
    """,
    "0.33": """
        attention_config.indexer_tp_shard_min_rows attention_config.minimax_m3_indexer_cp
        attention_config.trtllm_ragged_backend cache_config.simple_cpu_offload_num_blocks
        kernel_config.monokernel speculative_config.disable_lookahead_block_hashes
        speculative_config.draft_lm_head_quantization speculative_config.fly_entropy_threshold
        speculative_config.fly_entropy_top_k speculative_config.fly_window_size
        speculative_config.xpress_topc watchdog_config.check_interval watchdog_config.dump_dir
        watchdog_config.timeout
    """,
}
UNTIL: dict[str, str] = {
    "0.31": """
        cache_config.user_specified_mamba_block_size
        compilation_config.pass_config.enable_sp compilation_config.pass_config.fuse_gemm_comms
        compilation_config.pass_config.sp_min_token_num ec_transfer_config.ec_parallel_size
        ec_transfer_config.ec_rank kv_transfer_config.kv_buffer_size kv_transfer_config.kv_ip
        kv_transfer_config.kv_parallel_size kv_transfer_config.kv_rank
        parallel_config.sd_worker_cls
    """,
}
