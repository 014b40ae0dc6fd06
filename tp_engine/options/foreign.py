"""Options of vLLM and SGLang that this engine does not have, and what becomes of each.  One table for all ways in.

An option that changes speed, memory or logs alone is accepted, and the log says what is done instead.  One that has an
equal here is translated.  One that would change results, or that asks for something which is not there, is refused with
the remedy.  ``OPTIONS`` are whole options, by their name in Python; ``VALUES`` are values of options that exist here.

In the lists below, ``name`` is a switch, ``name=`` takes a value, ``name=*`` takes several, and a short flag such as
``-pp`` belongs to the name before it.
"""

from collections.abc import Mapping

from tp_engine.options.foreign_rows import (
    OFF,
    ForeignOption,
    ForeignValue,
    accepted,
    refused,
    to_adapters,
    to_attention,
    to_choice,
    to_graphs,
    to_key,
    to_option,
    translated,
)

_TASKS = {
    "auto": "auto", "generate": "none", "embed": "embed", "embedding": "embed", "score": "classify",
    "classify": "classify", "reward": "auto",
}  # fmt: skip
_RUNNERS = {"auto": "auto", "generate": "none", "pooling": "pooling"}
_METHODS = {"NEXTN": "mtp", "STANDALONE": "draft_model"}

_TENSOR_PARALLEL = (
    "a model is shared by tensor parallelism alone; set --tensor-parallel-size, or start several servers behind a "
    "router"
)
_TORCHRUN = "torchrun starts the ranks of several hosts: torchrun --nnodes 2 --node-rank 0 ... -m tp_engine serve"

OPTIONS: Mapping[str, ForeignOption] = dict(
    row
    for rows in (
        accepted(
            "always in effect here",
            "calculate_kv_scales disable_frontend_multiprocessing disable_uvicorn_access_log enable_cache_report "
            "enable_cumem_allocator enable_memory_saver enable_metrics enable_mixed_chunk "
            "enable_priority_scheduling enable_prompt_tokens_details enable_request_id_headers "
            "enable_server_load_tracking enable_sleep_mode exclude_tools_when_tool_choice_none use_v2_block_manager",
        ),
        accepted(
            "prompts are computed in parts of --max-num-batched-tokens, which changes no result",
            "enable_chunked_prefill",
            harmless=(None, True),
        ),
        accepted(
            "no code of a model is run: its family is built in, and its tokenizer is data",
            "allow_deprecated_quantization code_revision= model_impl= trust_remote_code",
            harmless=(*OFF, "auto"),
        ),
        accepted(
            "images are read, encoded and cached in one way; audio and video are refused",
            "disable_chunked_mm_input disable_fast_image_processor disable_mm_preprocessor_cache enable_mm_embeds "
            "enable_multimodal image_processor_backend= interleave_mm_strings media_io_kwargs= mm_attention_backend= "
            "mm_enable_dp_encoder mm_encoder_attn_backend= mm_encoder_attn_dtype= mm_encoder_fp8_scale_path= "
            "mm_encoder_only mm_encoder_tp_mode= mm_hasher_algorithm= mm_ipc_gpu_memory_gb= mm_processor_cache_gb= "
            "mm_processor_cache_type= mm_processor_device= mm_shm_cache_max_object_size_mb= mm_tensor_ipc= "
            "skip_mm_profiling trust_request_mm_kwargs video_pruning_method= video_pruning_rate=",
        ),
        translated(
            to_option("limit_mm_per_prompt", lambda is_on: '{"image": 0}' if is_on else None),
            "language_model_only",
            "images are off with --limit-mm-per-prompt '{\"image\": 0}'",
        ),
        accepted(
            "kernels are the engine's own, chosen for the device",
            "additional_config= all2all_backend= deepep_mode= disable_cascade_attn disable_cuda_graph_padding "
            "disable_flashinfer_autotune disable_shared_experts_fusion enable_flashinfer_allreduce_fusion "
            "enable_flashinfer_autotune enable_fused_qk_norm_rope flashinfer_mxfp4_moe_precision= "
            "fp4_gemm_runner_backend= fp8_gemm_runner_backend= gdn_prefill_backend= ir_op_priority= "
            "kda_decode_backend= kda_prefill_backend= kernel_config= kv_sharing_fast_prefill linear_attn_backend= "
            "linear_backend= mamba_backend= mamba_ssu_algorithm= moe_a2a_backend= moe_backend= moe_runner_backend= "
            "monokernel performance_mode= sampling_backend= sparse_indexer_topk_backend= "
            "triton_attention_num_kv_splits= triton_attention_reduce_in_fp32",
        ),
        translated(to_attention, "attention_config= -ac", "how attention is computed is --attention-backend"),
        translated(
            to_graphs, "compilation_config= -cc", "torch compiles nothing; graphs are --cudagraph-capture-sizes"
        ),
        translated(
            to_option("enforce_eager", lambda level: True if level == 0 else None),
            "optimization_level= -O",
            "torch compiles nothing; graphs are --cudagraph-capture-sizes",
        ),
        translated(to_option("cudagraph_capture_sizes"), "cuda_graph_bs=* cuda_graph_bs_decode=* cuda_graph_sizes=*"),
        accepted(
            "decode steps of at most 512 sequences are CUDA graphs; see --cudagraph-capture-sizes",
            "cuda_graph_max_bs= cuda_graph_max_bs_decode= enable_profile_cuda_graph enable_torch_compile "
            "max_cudagraph_capture_size= max_seq_len_to_capture= torch_compile_max_bs=",
        ),
        accepted(
            "how ranks add up is --all-reduce-backend; nccl is NCCL alone",
            "disable_custom_all_reduce disable_nccl_for_dp_synchronization enable_mscclpp enable_nccl_nvls "
            "enable_p2p_check enable_symm_mem enable_torch_symm_mem",
        ),
        accepted(
            "the scheduler shares out each step by itself, which changes no result",
            "disable_async_output_proc disable_chunked_prefix_cache disable_hybrid_kv_cache_manager "
            "enable_batch_sharded_sampling enable_dbo enable_single_batch_overlap enable_two_batch_overlap "
            "long_prefill_token_threshold= long_prefill_token_threshold_adaptive mamba_block_size= "
            "mamba_cache_mode= max_long_partial_prefills= max_num_partial_prefills= multi_step_stream_outputs "
            "num_continuous_decode_steps= num_lookahead_slots= num_scheduler_steps= preemption_mode= "
            "prefill_schedule_interval= prefix_cache_retention_interval= prefix_caching_hash_algo= "
            "prefix_match_unit= radix_eviction_policy= schedule_conservativeness= scheduler_delay_factor= "
            "scheduler_reserve_full_isl skip_server_warmup stream_interval= swa_full_tokens_ratio= swap_space= "
            "ubatch_size= watermark=",
        ),
        accepted(
            "each rank has a fixed part of every expert, or with --enable-expert-parallel some experts",
            "enable_ep_weight_filter enable_eplb ep_num_redundant_experts= eplb_algorithm= eplb_config= "
            "expert_placement_strategy= init_expert_location=",
        ),
        accepted(
            "there is one frontend process, and one process for each rank",
            "api_server_count= -asc detokenizer_worker_num= disable_tokenizer_batch_decode "
            "enable_tokenizer_batch_encode max_parallel_loading_workers= ray_workers_use_nsight renderer_num_workers= "
            "tokenizer_pool_size= tokenizer_pool_type= tokenizer_worker_num=",
        ),
        accepted(
            "weights are read from safetensors files, by the engine's own reader",
            "ignore_patterns=* model_loader_extra_config= pt_load_map_location= safetensors_load_strategy= "
            "safetensors_prefetch_block_size= safetensors_prefetch_num_threads= use_tqdm_on_load "
            "weight_loader_disable_mmap",
        ),
        accepted(
            "config.json and the tokenizer are read in the Hugging Face form, and tekken.json without such files",
            "config_format= tokenizer_backend= tokenizer_mode=",
            harmless=(*OFF, "auto", "hf"),
        ),
        accepted("the tokenizer is loaded if there is one; a prompt of token ids needs none", "skip_tokenizer_init"),
        accepted(
            "structured output has one library, llguidance",
            "disable_outlines_disk_cache grammar_backend= guided_decoding_backend= "
            "structured_outputs_config.backend structured_outputs_config.disable_fallback",
        ),
        accepted(
            "metrics, logs and traces are those of docs/metrics.md",
            "aggregate_engine_logging collect_detailed_traces=* cudagraph_metrics decode_log_interval= "
            "disable_access_log_for_endpoints= enable_layerwise_nvtx_tracing enable_logging_iteration_details "
            "enable_mfu_metrics enable_mm_processor_stats enable_per_request_metrics jit_monitor_mode= "
            "jit_monitor_verbose kv_cache_metrics kv_cache_metrics_sample= log_error_stack log_requests_format= "
            "log_requests_level= log_requests_target= max_log_len= per_request_spec_decode_metrics= "
            "show_hidden_metrics_for_version= show_time_cost",
        ),
        accepted(
            "it is an option of the server, and this is the engine alone",
            "disable_log_stats enable_log_requests otlp_traces_endpoint= served_model_name=*",
        ),
        accepted(
            "every adapter stays in host memory, and has the rank that it was trained with",
            "enable_lora_overlap_loading fully_sharded_loras lora_backend= lora_eviction_policy= "
            "lora_extra_vocab_size= lora_target_modules=* max_cpu_loras= max_loaded_loras= max_lora_chunk_size= "
            "specialize_active_lora",
        ),
        accepted("windows are computed as the model has them, for prompts of every length", "disable_sliding_window"),
        accepted(
            "a draft head runs on the model's ranks, and as the model does",
            "speculative_attention_mode= speculative_config.attention_backend speculative_config.code_revision "
            "speculative_config.disable_padded_drafter_batch speculative_config.draft_load_config "
            "speculative_config.draft_sample_method speculative_config.draft_tensor_parallel_size "
            "speculative_config.enforce_eager "
            "speculative_config.max_model_len speculative_config.moe_backend speculative_config.quantization "
            "speculative_config.use_local_argmax_reduction "
            "speculative_draft_attention_backend= speculative_draft_load_format= speculative_moe_runner_backend= "
            "speculative_ngram_capacity=",
        ),
        translated(to_choice("convert", _TASKS), "task="),
        translated(to_choice("convert", _RUNNERS), "runner=", yields=True),
        translated(to_option("convert", lambda is_asked: "pooling" if is_asked else None), "is_embedding"),
        translated(to_adapters, "lora_paths=*"),
        translated(to_option("max_loras"), "max_loras_per_batch="),
        translated(to_option("gpu_memory_utilization"), "device_memory_utilization="),
        translated(to_option("override_generation_config"), "preferred_sampling_params="),
        translated(to_option("uvicorn_log_level"), "log_level_http="),
        translated(to_option("root_path"), "fastapi_root_path="),
        translated(
            to_option("enable_expert_parallel", lambda size: True if size > 1 else None),
            "ep= ep_size= expert_parallel_size=",
            "each rank has a part of every expert",
        ),
        translated(
            to_choice("generation_config", {"model": "auto", "openai": "vllm", "auto": "auto"}), "sampling_defaults="
        ),
        translated(
            to_key("speculative_config", "method", lambda name: _METHODS.get(name, name.lower())),
            "spec_method= speculative_algorithm=",
        ),
        translated(
            to_key("speculative_config", "model"),
            "spec_model= speculative_draft_model= speculative_draft_model_path= speculative_model=",
        ),
        translated(
            to_key("speculative_config", "num_speculative_tokens", lambda number: number - 1),
            "speculative_num_draft_tokens=",
        ),
        translated(
            to_key("speculative_config", "num_speculative_tokens"),
            "num_speculative_tokens= spec_tokens= speculative_num_steps=",
        ),
        translated(to_key("speculative_config", "prompt_lookup_max"), "ngram_prompt_lookup_max="),
        translated(to_key("speculative_config", "prompt_lookup_min"), "ngram_prompt_lookup_min="),
        translated(to_key("hf_overrides", "rope_scaling"), "rope_scaling="),
        translated(to_key("hf_overrides", "rope_theta"), "rope_theta="),
        refused(
            "a draft token is one line of tokens, not a tree; set 1", "speculative_eagle_topk=", harmless=(None, 1)
        ),
        refused(
            "draft tokens change no token, so that there is no threshold; leave it out",
            "spec_decoding_acceptance_method= speculative_accept_threshold_acc= "
            "speculative_accept_threshold_single= speculative_config.rejection_sample_method speculative_token_map=",
            harmless=(None, 1.0, "rejection_sampler", "standard"),
        ),
        refused(
            _TENSOR_PARALLEL,
            "attn_cp_size= data_parallel_size= -dp data_parallel_size_local= -dpl dcp_size= "
            "decode_context_parallel_size= -dcp dp_size= moe_dense_tp_size= moe_dp_size= "
            "pipeline_parallel_size= -pp pp_size= prefill_context_parallel_size= -pcp",
            harmless=(None, 1),
        ),
        refused(
            _TENSOR_PARALLEL,
            "data_parallel_address= -dpa data_parallel_backend= -dpb data_parallel_external_lb -dpe "
            "data_parallel_hybrid_lb -dph data_parallel_rank= -dpn data_parallel_rpc_port= -dpp "
            "data_parallel_start_rank= -dpr enable_dp_attention enable_dp_lm_head enable_elastic_ep",
        ),
        refused(_TORCHRUN, "nnodes= -n", harmless=(None, 1)),
        refused(_TORCHRUN, "dist_init_addr= headless master_addr= master_port= node_rank= -r"),
        refused(
            "torchrun or rank 0 starts one process for each rank; leave it out (LLM takes external_launcher)",
            "distributed_executor_backend= use_ray",
            harmless=(*OFF, "mp", "uni"),
        ),
        refused(
            "ranks are bound to no node of memory; start the engine under numactl, which binds all of them",
            "numa_bind numa_bind_cpus=* numa_bind_nodes=* numa_node=*",
            harmless=OFF,
        ),
        refused(
            "no code that an option names is run; leave it out",
            "custom_weight_loader=* enable_custom_logit_processor io_processor_plugin= logits_processor_pattern= "
            "logits_processors=* middleware=* model_class_overrides= reasoning_parser_plugin= scheduler_cls= "
            "tool_parser_plugin= worker_cls= worker_extension_cls=",
            harmless=(*OFF, "auto"),
        ),
        refused(
            "there is no disaggregated prefill and no KV cache of another program; see --kv-offloading-size",
            "disaggregation_mode= ec_transfer_config= enable_hierarchical_cache enable_lmcache hicache_ratio= "
            "hicache_size= kv_transfer_config=",
            harmless=(*OFF, "null"),
        ),
        refused(
            "requests run in order of (priority, arrival), and no other; leave it out",
            "schedule_policy= scheduling_policy=",
            harmless=(None, "fcfs", "priority"),
        ),
        refused("see --max-num-queued-reqs", "max_num_queued_tokens="),
        refused("the size of the cache is given in blocks, with --num-gpu-blocks-override", "max_total_tokens="),
        refused("see --max-num-batched-tokens", "max_num_scheduled_tokens= max_prefill_tokens="),
        refused("see --watchdog-warn-s and --watchdog-timeout-s", "watchdog_config= watchdog_timeout="),
        refused(
            "see --collective-timeout-s and --startup-timeout-s",
            "cpu_distributed_timeout_seconds= dist_timeout= distributed_timeout_seconds=",
        ),
        refused("set --attention-backend", "decode_attention_backend= prefill_attention_backend="),
        refused("hub models lie where the environment variable HF_HOME says", "cache_dir= download_dir="),
        refused("set the environment variable HF_TOKEN", "hf_token=", harmless=(*OFF, True)),
        refused("set --tokenizer to a folder; --revision is for model and tokenizer", "tokenizer_revision="),
        refused("config.json is read from the model's folder: put it there", "hf_config_path="),
        refused(
            "weights stay on the device; leave it out, or raise --tensor-parallel-size",
            "cpu_offload_gb= cpu_offload_params=* offload_backend= offload_group_size= offload_num_in_group= "
            "offload_params=* offload_prefetch_step=",
            harmless=(*OFF, "auto"),
        ),
        refused("how a model pools follows its files; see --convert", "override_pooler_config= pooler_config="),
        refused("see --quantization", "modelopt_quant= quantization_config= torchao_config="),
        refused(
            "all layers have the type of --kv-cache-dtype, and scales are measured; leave it out",
            "kv_cache_dtype_skip_layers=* quantization_param_path=",
        ),
        refused(
            "recurrent states are float32; leave it out",
            "enable_mamba_cache_stochastic_rounding mamba_cache_dtype= mamba_ssm_cache_dtype= mamba_ssm_dtype=",
            harmless=(*OFF, "auto", "float32"),
        ),
        refused("adapters have the type of the model; leave it out", "lora_dtype=", harmless=(*OFF, "auto")),
        refused(
            'requests ask for it, with "stream_options": {"include_usage": true}',
            "enable_force_include_usage stream_response_default_include_usage",
        ),
        refused('requests ask for it, with "return_tokens_as_token_ids": true', "return_tokens_as_token_ids"),
        refused("send chat_template_kwargs with each request", "default_chat_template_kwargs="),
        refused("answers have the role assistant; leave it out", "response_role=", harmless=(None, "assistant")),
        refused("see --structured-outputs-config, whitespace_pattern", "constrained_json_whitespace_pattern="),
        refused("see --structured-outputs-config, disable_any_whitespace", "constrained_json_disable_any_whitespace"),
        refused("see --profile and --profile-steps", "profiler_config="),
        refused("see --tp-invariant", "enable_deterministic_inference"),
        refused("see --device-ids", "base_gpu_id= gpu_id_step=", harmless=(*OFF, 1)),
        refused(
            "there is one, in host memory: see --kv-offloading-size",
            "kv_offloading_backend=",
            harmless=(None, "native"),
        ),
        refused("the log goes to standard error; see --log-format", "log_config_file= logging_config="),
        refused("the server runs no tools; leave it out", "tool_server="),
        refused(
            "certificates are read once, and ciphers are Python's; leave it out",
            "enable_ssl_refresh ssl_ciphers= ssl_keyfile_password=",
        ),
        refused(
            "the engine has no such function; leave it out",
            "aux_output_config= default_mm_loras= diffusion_config= dllm_algorithm= enable_fault_tolerance "
            "enable_log_outputs enable_lora_bias enable_prompt_adapter enable_prompt_embeds enable_response_store "
            "enable_return_hidden_states enable_return_routed_experts enable_scale_out "
            "enable_tokenizer_info_endpoint enable_trace_replay engram_config= fault_tolerance_config= "
            "fingerprint_mode= grpc grpc_mode grpc_port= reasoning_config= reasoning_effort_map= "
            "return_sampling_mask tokens_only tool_strict_level= trust_request_chat_template watermark_config= "
            "weight_transfer_config=",
        ),
    )
    for row in rows
)

_READER = "safetensors files are read by the engine's own reader"

VALUES: Mapping[str, tuple[ForeignValue, ...]] = {
    "dtype": (ForeignValue("half", "float16"), ForeignValue("float", "float32")),
    "kv_cache_dtype": (
        ForeignValue("fp8_e4m3", "fp8"),
        ForeignValue("fp8_*", None, "the fp8 of this KV cache is e4m3, with measured scales; set fp8"),
    ),
    "load_format": (
        ForeignValue("fastsafetensors hf instanttensor layered modelexpress runai_streamer", "auto", _READER),
        ForeignValue("mistral", "auto", "the folder's files in the Hugging Face form are read"),
        ForeignValue(
            "*sharded* bitsandbytes gguf ipc_cache npcache pt remote* tensorizer",
            None,
            f"{_READER}; convert the checkpoint, and leave the option out",
        ),
    ),
    "attention_backend": (
        ForeignValue("triton_attn triton_mla", "triton"),
        ForeignValue("fa2 fa3 fa4", "flash_attn"),
        ForeignValue("torch_native torch_sdpa", "torch"),
        ForeignValue(
            "*mla* aiter* ascend cutlass_* flashinfer* flex_attention intel_* rocm_* torch_varlen tree_attn trtllm_* "
            "wave xformers",
            "auto",
            "the engine has no such backend, and a backend changes no result",
        ),
    ),
    "max_model_len": (
        ForeignValue(
            "auto -1", "", "the model's length; if the KV cache is too small for it, the start says what fits"
        ),
    ),
    "chat_template": (
        ForeignValue(
            "*tool_chat_template_gemma4.jinja", "", "that file is vLLM's, and the model's own is used", is_file=True
        ),
        ForeignValue(
            "*tool_chat_template_deepseek*.jinja",
            "",
            "that file is vLLM's, and the model's own is used, which may have no place for tools: give the file's path",
            is_file=True,
        ),
        ForeignValue(
            "*tool_chat_template_*.jinja",
            None,
            "that file is vLLM's: give its path, or leave it out for the model's own template",
            is_file=True,
        ),
    ),
    "quantization": (
        ForeignValue("awq_marlin", "awq"),
        ForeignValue("gptq_marlin", "gptq"),
        ForeignValue("modelopt_*", "modelopt"),
        ForeignValue("ascend", None, "it is for Ascend devices; leave it out"),
    ),
}
