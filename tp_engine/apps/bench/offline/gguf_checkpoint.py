"""Write a Hugging Face checkpoint of a Llama or a Qwen3 as a GGUF file for llama.cpp; needs gguf and numpy only.  Its
quantised forms are written by llama_cpp.

For a Llama, llama.cpp rotates neighbouring values of a head; the checkpoint's layout rotates the halves of a head.  So
the rows of query and key weights change places::

    checkpoint    a0 a1 a2 b0 b1 b2        GGUF    a0 b0 a1 b1 a2 b2
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]

_OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_INNER = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip


def write_gguf(folder: Path, target: Path, dtype: str) -> None:
    """Write ``folder``'s weights in ``dtype`` (norms in float32); its words are ``<0>``, ``<1>``, ..."""
    import gguf

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    kind = config["model_type"]
    if kind not in ("llama", "qwen3"):
        raise ValueError(f"model_type is {kind}; llama and qwen3 can be converted")
    writer = gguf.GGUFWriter(target, kind)
    _add_config(writer, config)
    _add_words(writer, gguf, config["vocab_size"])
    wide = gguf.GGMLQuantizationType.BF16 if dtype == "bfloat16" else gguf.GGMLQuantizationType.F32
    for name, values in read_checkpoint(folder):
        if kind == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
            values = interleave(values, heads)
        if values.ndim == 1:
            writer.add_tensor(gguf_name(name), values)
        else:
            writer.add_tensor(gguf_name(name), gguf.quants.quantize(values, wide), raw_dtype=wide)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def quantise_gguf(source: Path, kind: str) -> Path:
    """Write ``source`` in llama.cpp's file type ``kind`` ("Q4_K_M") beside it, with llama.cpp's own choice of a type
    for each tensor, and delete ``source``.  Returns the new file."""
    import ctypes

    import llama_cpp

    target = source.with_suffix(f".{kind}.gguf")
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    if failed := llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(params)):
        raise RuntimeError(f"llama.cpp cannot write {kind}: its llama_model_quantize returned {failed}")
    source.unlink()
    return target


def read_checkpoint(folder: Path) -> Iterator[tuple[str, FloatArray]]:
    """(name, values in float32) of every tensor in the folder's safetensors files."""
    for path in sorted(folder.glob("*.safetensors")):
        data = np.memmap(path, dtype=np.uint8, mode="r")
        size = int(data[:8].view(np.uint64)[0])
        header = json.loads(bytes(data[8 : 8 + size]))
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            start, end = entry["data_offsets"]
            raw = np.array(data[8 + size + start : 8 + size + end])
            if entry["dtype"] == "BF16":
                values = (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
            elif entry["dtype"] == "F32":
                values = raw.view(np.float32)
            else:
                raise ValueError(f"{name} has the type {entry['dtype']}; F32 and BF16 can be converted")
            yield name, values.reshape(entry["shape"])


def interleave(values: FloatArray, num_heads: int) -> FloatArray:
    """Query or key weights [heads * head_dim, hidden] with rows in GGUF's order."""
    halves = values.reshape(num_heads, 2, values.shape[0] // num_heads // 2, values.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))


def gguf_name(name: str) -> str:
    """GGUF's name of a tensor."""
    stem = name.removesuffix(".weight")
    if stem in _OUTER:
        return f"{_OUTER[stem]}.weight"
    layer, _, part = stem.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{_INNER[part]}.weight"


def _add_config(writer: Any, config: dict[str, Any]) -> None:
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    theta = (config.get("rope_parameters") or config)["rope_theta"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(theta)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])


def _add_words(writer: Any, gguf: Any, size: int) -> None:
    kinds = [gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL]
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"<{token}>" for token in range(size)])
    writer.add_token_scores([0.0] * size)
    writer.add_token_types([*kinds, *[gguf.TokenType.NORMAL] * (size - len(kinds))])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
