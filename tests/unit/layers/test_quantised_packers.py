"""The tests' packers of quantised weights: bit positions by hand, plain loops, and the makers' own readers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.quantised.checkpoints import compress
from tests.quantised.formats import FORMATS
from tests.quantised.numbers import E2M1_MAGNITUDES, Numbers, quantise_e4m3, quantise_int, quantise_mxfp4
from tests.quantised.packing import Tensors, pack_awq, pack_bytes, pack_gptq, pack_plain, pack_quantized, pack_words

BITS = np.uint32
FORMATS_OF_COMPRESSED_TENSORS = [
    "fp8-channel",
    "fp8-ct-tensor",
    "fp8-ct-block",
    "pack-quantized",
    "pack-quantized-asym",
    "pack-quantized-channel",
    "pack-quantized-8",
    "pack-quantized-8-channel",
    "mxfp4-pack-quantized",
    "mxfp8-quantized",
    "nvfp4-pack-quantized-w4a16",
    "w8a8-int8",
]


def numbers_of(codes: list[list[int]], zeros: list[list[int]] | None = None, bits: int = 4) -> Numbers:
    """Integer codes with scales of 1 and groups of all columns."""
    table = torch.tensor(codes, dtype=torch.int32)
    return Numbers(
        kind="int",
        codes=table,
        scales=torch.ones(len(codes), 1),
        block=(1, table.shape[1]),
        bits=bits,
        zeros=None if zeros is None else torch.tensor(zeros, dtype=torch.int32),
    )


def words(tensor: torch.Tensor) -> list[str]:
    """All words in hexadecimal."""
    return [f"{value & 0xFFFFFFFF:08x}" for value in tensor.flatten().tolist()]


def random_weight(rows: int, columns: int) -> torch.Tensor:
    """Wide, with a mean that differs by column, so that zero points differ."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(rows + columns)
        return torch.randn(rows, columns) * 0.2 + torch.linspace(-0.3, 0.3, columns)


def test_words_hold_the_first_value_in_their_lowest_bits() -> None:
    """Oracle: by hand."""
    assert words(pack_words(torch.arange(1, 9), 4)) == ["87654321"]
    assert words(pack_words(torch.tensor([1, 2, 3, 254, 5]), 8)) == ["fe030201", "00000005"]
    assert pack_bytes(torch.tensor([[1, 15, 2, 3]])).tolist() == [[0xF1, 0x32]]


def test_pack_quantized_by_hand() -> None:
    """Oracle: by hand; the values -8, -7, ... 7 are the codes 0, 1, ... 15; zero points are packed along the rows."""
    packed = pack_quantized(numbers_of([list(range(8)), list(range(8, 16))], [[3], [12]]))
    assert words(packed["weight_packed"]) == ["76543210", "fedcba98"]
    assert packed["weight_zero_point"].shape == (1, 1) and words(packed["weight_zero_point"]) == ["000000c3"]
    assert packed["weight_shape"].tolist() == [2, 8]
    assert "weight_zero_point" not in pack_quantized(numbers_of([[0] * 8]))


def test_awq_by_hand() -> None:
    """Oracle: by hand; from its low bits up, a word holds the columns 0, 2, 4, 6, 1, 3, 5, 7."""
    packed = pack_awq(numbers_of([[row, 15 - row] for row in range(8)], [[row + 4] for row in range(8)]))
    assert words(packed["qweight"]) == ["75316420", "8ace9bdf"]
    assert words(packed["qzeros"]) == ["b975a864"]
    assert packed["scales"].shape == (1, 8)


@pytest.mark.parametrize(("version", "zeros"), [(1, "76543210"), (2, "87654321")])
def test_gptq_by_hand(version: int, zeros: str) -> None:
    """Oracle: by hand; words of codes go down a column, words of zero points along a row, less 1 in version 1."""
    packed = pack_gptq(numbers_of([list(range(8))] * 8, [[row] for row in range(1, 9)]), version=version)
    assert packed["qweight"].shape == (1, 8) and words(packed["qweight"]) == ["76543210"] * 8
    assert words(packed["qzeros"]) == [zeros]
    assert packed["g_idx"].tolist() == [0] * 8


def test_symmetric_gptq_by_hand() -> None:
    """Oracle: by hand; the zero point is 8, or 128 with 8 bits."""
    assert words(pack_gptq(numbers_of([[1] * 8] * 8), version=1)["qzeros"]) == ["77777777"]
    assert words(pack_gptq(numbers_of([[1] * 8] * 8), version=2)["qzeros"]) == ["88888888"]
    of_8_bits = pack_gptq(numbers_of([[1, 2, 3, 255]] * 4, bits=8), version=1)
    assert words(of_8_bits["qzeros"]) == ["7f7f7f7f"]
    assert words(of_8_bits["qweight"]) == ["ff030201"] * 4


def test_floats_by_hand() -> None:
    """Oracle: by hand; 448 is 0 1111 110, the scale 2**0 is the byte 127, and -1.5 and 6 are 1 01 1 and 0 11 1."""
    fp8 = pack_plain(quantise_e4m3(torch.tensor([[448.0, -1.0]]), (None, None)), scale_shape=())
    assert fp8["weight"].view(torch.uint8).tolist() == [[0x7E, 0xB8]] and fp8["weight_scale"].item() == 1.0
    numbers = quantise_mxfp4(torch.tensor([[-1.5, 6.0, *([0.0] * 30)], [3.0, 0.25, *([0.0] * 30)]]))
    packed = FORMATS["mxfp4-pack-quantized"].pack(numbers)
    assert packed["weight_scale"].tolist() == [[127], [126]]
    assert packed["weight_packed"][:, 0].tolist() == [0x7B, 0x17]
    int8 = pack_plain(quantise_int(torch.tensor([[1.0, -0.5]]), None, bits=8, scale_type=torch.float32))
    assert int8["weight"].tolist() == [[127, -64]]


def unpacked_by_loops(
    name: str, tensors: Tensors, shape: tuple[int, int], group: int
) -> Iterator[tuple[int, int, float]]:
    """(row, column, value) of each element of an integer layout, from its definition."""
    bits = 8 if "-8" in name else 4
    per_word, highest = 32 // bits, (1 << bits) - 1

    def field(word: torch.Tensor, place: int) -> int:
        return (int(word.item()) >> bits * place) & highest

    for row in range(shape[0]):
        for column in range(shape[1]):
            groups = next((tensors[one] for one in ("g_idx", "weight_g_idx") if one in tensors), None)
            block = column // group if groups is None else int(groups[column])
            if name.startswith("pack"):
                code = field(tensors["weight_packed"][row, column // per_word], column % per_word)
                zero = highest // 2 + 1
                if "asym" in name:
                    zero = field(tensors["weight_zero_point"][row // per_word, block], row % per_word)
                scale = tensors["weight_scale"][row, block]
            elif name == "awq":
                place = [0, 4, 1, 5, 2, 6, 3, 7][row % 8]
                code = field(tensors["qweight"][column, row // 8], place)
                zero = field(tensors["qzeros"][block, row // 8], place)
                scale = tensors["scales"][block, row]
            else:
                code = field(tensors["qweight"][column // per_word, row], column % per_word)
                zero = field(tensors["qzeros"][block, row // per_word], row % per_word) + ("v2" not in name)
                scale = tensors["scales"][block, row]
            yield row, column, float(np.float32(code - zero) * np.float32(scale.item()))


@pytest.mark.parametrize("name", [name for name in FORMATS if name.startswith(("pack", "awq", "gptq"))])
def test_twins_of_integers_equal_plain_loops(name: str) -> None:
    """Oracle: each element from the layout's definition, to the bit."""
    how, group = FORMATS[name], 48 if FORMATS[name].group is None else 16
    numbers = how.quantise(random_weight(16, 48), None if how.group is None else group)
    expected = torch.empty(16, 48)
    for row, column, value in unpacked_by_loops(name, how.pack(numbers), (16, 48), group):
        expected[row, column] = value
    assert torch.equal(numbers.weight(), expected)


@pytest.mark.parametrize("name", ["fp8-block", "fp8-ct-block", "fp8-channel", "fp8-tensor-static", "modelopt-fp8"])
def test_twins_of_fp8_equal_plain_loops(name: str) -> None:
    """Oracle: each element from the layout's definition, to the bit; blocks of 32 do not divide 40 x 72."""
    how = FORMATS[name]
    numbers = how.quantise(random_weight(40, 72), how.group and 32)
    packed, weight = how.pack(numbers), numbers.weight()
    scales = packed["weight_scale_inv" if name == "fp8-block" else "weight_scale"]
    assert tuple(scales.shape) == {"block": (2, 3), "channel": (40, 1)}.get(name.rpartition("-")[2], ())
    for row in range(40):
        for column in range(72):
            scale = scales[row // 32, column // 32] if "block" in name else scales.flatten()[row % scales.numel()]
            code = int(packed["weight"].view(torch.uint8)[row, column])
            exponent, fraction = code >> 3 & 15, code & 7
            size = fraction / 8 * 2**-6 if exponent == 0 else (1 + fraction / 8) * 2.0 ** (exponent - 7)
            value = np.float32(-size if code & 128 else size) * np.float32(scale.item())
            assert weight[row, column].item() == value


@pytest.mark.parametrize(
    "name", ["mxfp4-pack-quantized", "nvfp4-pack-quantized", "nvfp4-pack-quantized-w4a16", "nvfp4-modelopt"]
)
def test_twins_of_fp4_equal_plain_loops(name: str) -> None:
    """Oracle: each element from the layout's definition."""
    how = FORMATS[name]
    numbers = how.quantise(random_weight(8, 96), how.group)
    packed, weight, group = how.pack(numbers), numbers.weight(), how.group or 0
    codes = packed["weight" if name == "nvfp4-modelopt" else "weight_packed"]
    for row in range(8):
        for column in range(96):
            code = int(codes[row, column // 2]) >> column % 2 * 4 & 15
            value = np.float32(-E2M1_MAGNITUDES[code & 7] if code & 8 else E2M1_MAGNITUDES[code & 7])
            scale = packed["weight_scale"][row, column // group]
            if name.startswith("mxfp4"):
                expected = value * np.float32(2.0 ** (int(scale) - 127))
            elif name == "nvfp4-modelopt":
                expected = value * np.float32(scale.float().item()) * np.float32(packed["weight_scale_2"].item())
            else:
                expected = value * (np.float32(scale.float().item()) / np.float32(packed["weight_global_scale"].item()))
            assert weight[row, column].item() == expected


@pytest.mark.parametrize("name", FORMATS)
def test_rounding_is_to_nearest(name: str) -> None:
    """Oracle: the weight itself; the error of a good rounding is a few percent with 4 bits, less with more."""
    how = FORMATS[name]
    weight = random_weight(64, 128)
    error = (how.quantise(weight, how.group).weight() - weight).norm() / weight.norm()
    assert error < (0.16 if "4" in name or "awq" in name or how.fused else 0.13)


@pytest.mark.parametrize("name", FORMATS_OF_COMPRESSED_TENSORS)
@pytest.mark.parametrize("architecture", ["qwen3", "qwen3-moe"])
def test_compressed_tensors_reads_the_same(
    name: str, architecture: str, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """Oracle: the package compressed-tensors, with its own configuration, names and arithmetic."""
    from compressed_tensors.entrypoints.convert.converters.ct_dequantizer import CompressedTensorsDequantizer
    from safetensors.torch import load_file

    folder = checkpoint(architecture, **({"moe_intermediate_size": 96} if "moe" in architecture else {}))
    group = {128: 32, None: None, 16: None, 32: None}[FORMATS[name].group]
    compress(folder, tmp_path / "own", tmp_path / "twin", name, group=group, kept_layers=[1], with_patterns=True)
    stored = load_file(tmp_path / "own" / "model.safetensors")
    wide = {key: one.float() if one.dtype == torch.bfloat16 else one for key, one in stored.items()}
    ignored = ["re:.*(embed_tokens|norm)$"]  # it knows names only, not which modules are linear
    read = CompressedTensorsDequantizer(tmp_path / "own", ignore=ignored, dtype=torch.float32).process(wide)
    twin = load_file(tmp_path / "twin" / "model.safetensors")
    rounding = 2**-6 if name.startswith("nvfp4") else 0.0  # it reads these in bfloat16
    for key, expected in twin.items():
        torch.testing.assert_close(read[key], expected, rtol=rounding, atol=0.0, msg=key)


def test_awq_equals_the_converter_of_compressed_tensors() -> None:
    """Oracle: compressed-tensors' converter of AWQ gives the tensors of ``pack-quantized``."""
    from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter

    numbers = quantise_int(random_weight(32, 64), 32, has_zeros=True, scale_type=torch.float16)
    packed = {f"model.x_proj.{name}": tensor for name, tensor in pack_awq(numbers).items()}
    found = AutoAWQConverter(group_size=32).process(packed)
    for name, expected in pack_quantized(numbers).items():
        assert torch.equal(found[f"model.x_proj.{name}"], expected), name


@pytest.mark.parametrize("architecture", ["qwen3", "mixtral"])
def test_fp8_blocks_equal_other_readers(architecture: str, checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Oracle: compressed-tensors' and transformers' readers of FP8 blocks; the latter knows whole blocks only."""
    from compressed_tensors.entrypoints.convert.converters.fp8block_dequantizer import FP8BlockDequantizer
    from safetensors.torch import load_file
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    compress(checkpoint(architecture), tmp_path / "own", tmp_path / "twin", "fp8-block", group=32)
    stored = load_file(tmp_path / "own" / "model.safetensors")
    twin = load_file(tmp_path / "twin" / "model.safetensors")
    read = FP8BlockDequantizer(weight_block_size=(32, 32), dtype=torch.float32, targets=["re:.*_proj", "re:.*w[123]"])
    assert read.process(dict(stored)).keys() == twin.keys()
    for name, tensor in read.process(dict(stored)).items():
        assert torch.equal(tensor, twin[name]), name
        if f"{name}_scale_inv" in stored:
            pair = {"weight": stored[name], "weight_scale_inv": stored[f"{name}_scale_inv"]}
            assert torch.equal(Fp8Dequantize(None).convert(pair)["weight"], twin[name])


def test_gpt_oss_equals_transformers(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Oracle: transformers' own reader of MXFP4 experts."""
    from safetensors.torch import load_file
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    folder = checkpoint("gpt-oss", intermediate_size=96)
    compress(folder, tmp_path / "own", tmp_path / "twin", "mxfp4")
    stored = load_file(tmp_path / "own" / "model.safetensors")
    twin = load_file(tmp_path / "twin" / "model.safetensors")
    layer = "model.layers.0.mlp.experts"
    assert stored[f"{layer}.gate_up_proj_blocks"].shape == (6, 192, 2, 16)
    for name in (f"{layer}.gate_up_proj", f"{layer}.down_proj"):
        read = convert_moe_packed_tensors(stored[f"{name}_blocks"], stored[f"{name}_scales"], dtype=torch.float32)
        assert torch.equal(read, twin[name])
        assert torch.equal(stored[f"{name}_bias"], twin[f"{name}_bias"])


def test_modelopt_equals_the_converter_of_compressed_tensors(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Oracle: compressed-tensors' converter and reader of 4-bit floats; it divides by the inverse of the scale."""
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.entrypoints.convert.converters.modelopt_nvfp4 import ModelOptNvfp4Converter
    from safetensors.torch import load_file

    compress(checkpoint("qwen3"), tmp_path / "own", tmp_path / "twin", "nvfp4-modelopt")
    stored = load_file(tmp_path / "own" / "model.safetensors")
    read = ModelOptNvfp4Converter(targets=["re:.*_proj"]).process(stored)
    modules = [name.removesuffix(".weight_packed") for name in read if name.endswith(".weight_packed")]
    assert len(modules) == 14
    for module in modules:
        rows, columns = read[f"{module}.weight_packed"].shape
        codes = unpack_fp4_from_uint8(read[f"{module}.weight_packed"], rows, columns * 2, dtype=torch.float32)
        scales = read[f"{module}.weight_scale"].float() / read[f"{module}.weight_global_scale"]
        twin = load_file(tmp_path / "twin" / "model.safetensors")[f"{module}.weight"]
        torch.testing.assert_close(codes * scales.repeat_interleave(16, 1), twin, rtol=1e-6, atol=0)
