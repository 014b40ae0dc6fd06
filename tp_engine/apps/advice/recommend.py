"""``tp_engine.recommend``: which options to use and what fits, computed before anything is loaded."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tp_engine.apps.advice.advise import advise
from tp_engine.apps.advice.question import Hardware, Question, Workload, find_gpu, find_workload
from tp_engine.apps.advice.recommendation import Recommendation
from tp_engine.config import DEMO_MODEL, EngineConfig
from tp_engine.errors import ConfigError
from tp_engine.features.speculation.options import SpeculativeConfig
from tp_engine.images.rules import PROCESSOR_FILES, has_processor
from tp_engine.images.settings import image_settings
from tp_engine.model_config import load_model_config
from tp_engine.model_config.drafting import has_assistant, with_own_head
from tp_engine.model_config.source import QUANTIZATION_FILES
from tp_engine.model_config.spec import ModelSpec
from tp_engine.options.fields import as_json
from tp_engine.options.hf_overrides import parse_overrides
from tp_engine.system.units import parse_bytes
from tp_engine.worker.memory.host_memory import host_memory

CONFIG_FILES = ("config.json", "generation_config.json", *QUANTIZATION_FILES, *PROCESSOR_FILES)


def recommend(  # noqa: PLR0913 (one keyword per question)
    model: str | ModelSpec = str(DEMO_MODEL),
    *,
    workload: str | Workload = "chat",
    tensor_parallel_size: int | None = None,
    gpu: str | None = None,
    device_memory: int | str | None = None,
    dtype: str = "auto",
    quantization: str | None = None,
    kv_cache_dtype: str = "auto",
    gpu_memory_utilization: float | None = None,
    max_model_len: int | None = None,
    block_size: int | None = None,
    revision: str | None = None,
    hf_overrides: Mapping[str, Any] | str | None = None,
    speculative_config: SpeculativeConfig | Mapping[str, Any] | str | None = None,
) -> Recommendation:
    """Block size, blocks, sequences and concurrency for ``model``: a folder, a hub name, or its parsed configuration.

    The device is ``gpu`` (a name such as ``h100``), or one with ``device_memory`` (bytes, or ``"24GiB"``), or else this
    machine's.  ``workload`` is chat, code, long-doc, or another ``Workload``.  ``tensor_parallel_size`` None takes the
    smallest number of ranks that fits.  ``quantization`` is that of ``LLM``; a quantised checkpoint's own format needs
    no option.  ``hf_overrides`` changes keys of config.json.  ``speculative_config`` is that of ``LLM``: a model's own
    head and draft rows need memory.  Raises ``ConfigError`` for a question without an answer.
    A model that does not fit is no error: ``fits`` is False, and ``problems`` and ``remedies`` say why and what to do.
    """
    drafting = SpeculativeConfig.of(speculative_config)
    if isinstance(model, ModelSpec):
        name, config, folder = model.architecture, model, None
    else:
        name = model
        changes = None if hf_overrides is None else parse_overrides(hf_overrides)
        config, folder = load_model_config(model, revision, files=CONFIG_FILES, hf_overrides=changes)
        config = _with_images(config, folder)
    if drafting is not None and (drafting.method == "eagle3" or has_assistant(config, drafting, name, folder)):
        raise ConfigError(
            f"speculative_config is {as_json(drafting)!r}, and the size of a draft head with files of its own is not "
            "known here: leave it out, and lower gpu_memory_utilization by what the head's files take"
        )
    if device_memory is not None:
        hardware = Hardware(name=f"a GPU with {device_memory}", memory=parse_bytes(device_memory))
    else:
        hardware = find_gpu(gpu) if gpu is not None else this_machine()
    from tp_engine.models.weight_sizes import local_weight_bytes  # imports torch, which a server's frontend lacks

    return advise(
        Question(
            name=name,
            weight_bytes=local_weight_bytes,
            model=with_own_head(config, drafting, name=name, folder=folder),
            hardware=hardware,
            workload=find_workload(workload) if isinstance(workload, str) else workload,
            tensor_parallel_size=tensor_parallel_size,
            dtype=dtype,
            quantization=quantization,
            kv_cache_dtype=kv_cache_dtype,
            gpu_memory_utilization=gpu_memory_utilization,
            max_model_len=max_model_len,
            block_size=block_size,
            speculative_config=drafting,
        )
    )


def _with_images(model: ModelSpec, folder: Path) -> ModelSpec:
    """``model`` with the size of its largest image; without the tower, if it is served as text."""
    vision = model.vision
    if vision is None or not has_processor(folder):
        return dataclasses.replace(model, vision=None)
    settings = image_settings(EngineConfig(), vision, folder)
    assert settings is not None, "images have no limit here"
    return dataclasses.replace(model, vision=dataclasses.replace(vision, largest=settings.rules().largest))


def this_machine() -> Hardware:
    """The GPU with the least memory, or the host's memory if there is no GPU."""
    import torch

    memory = [torch.cuda.get_device_properties(index).total_memory for index in range(torch.cuda.device_count())]
    if memory:
        index = memory.index(min(memory))
        return Hardware(name=torch.cuda.get_device_name(index), memory=memory[index])
    return Hardware(name="this machine's CPU", memory=host_memory().total, is_gpu=False)
