"""Checkpoints of both kinds: what they say about the model, their tensors, their digest, and what is refused."""

import hashlib
import json
import math
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from factories_model import make_llama, make_model, save_llama, save_llama_gguf
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from engine.errors import ModelError
from engine.model_spec import ModelSpec
from engine.models.registry import load_model
from engine.rope_spec import RopeSpec
from engine.weights import Checkpoint, open_checkpoint, weights_digest
from kernels.attention import get_attention_backend


def _tensors(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    return {name: values for name, values, _ in checkpoint.tensors()}


def _load(path: Path) -> None:
    load_model(open_checkpoint(path), get_attention_backend("sdpa", dtype=torch.float32), dtype=torch.float32)


def _edit_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


# --- what a checkpoint says about its model


def _expected_spec(**changes: Any) -> ModelSpec:
    settings: dict[str, Any] = {
        "architecture": "llama",
        "vocab_size": 128,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 64,
        "max_position": 512,
        "rms_norm_eps": 1e-6,
        "rope": RopeSpec(theta=10_000.0),
        "tie_word_embeddings": False,
    }
    return ModelSpec(**{**settings, **changes})


def test_safetensors_folder_gives_its_spec(tmp_path: Path) -> None:
    assert open_checkpoint(save_llama(tmp_path)).spec == _expected_spec()


def test_gguf_file_gives_the_same_spec(tmp_path: Path) -> None:
    file = save_llama_gguf(tmp_path / "m.gguf", make_llama(rms_norm_eps=2**-20))
    assert open_checkpoint(file).spec == _expected_spec(rms_norm_eps=2**-20)


def test_tied_embeddings_are_recognised_in_both_kinds(tmp_path: Path) -> None:
    model = make_llama(tie_word_embeddings=True)
    assert open_checkpoint(save_llama(tmp_path, model)).spec.tie_word_embeddings
    assert open_checkpoint(save_llama_gguf(tmp_path / "m.gguf", model)).spec.tie_word_embeddings


def test_biases_are_recognised_in_both_kinds(tmp_path: Path) -> None:
    model = make_llama(attention_bias=True, mlp_bias=True)
    for path in (save_llama(tmp_path, model), save_llama_gguf(tmp_path / "m.gguf", model)):
        spec = open_checkpoint(path).spec
        assert (spec.qkv_bias, spec.o_bias, spec.mlp_bias) == (True, True, True)


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ({"rope_theta": 5e5}, RopeSpec(theta=5e5)),
        ({"rope_theta": 5e5, "rope_scaling": None}, RopeSpec(theta=5e5)),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, RopeSpec(theta=1e4, type="linear", factor=2.0)),
        ({"rope_parameters": {"rope_theta": 7e4, "rope_type": "default"}}, RopeSpec(theta=7e4)),
        (
            {"max_position_embeddings": 4096, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
            RopeSpec(theta=1e4, type="dynamic", factor=2.0),
        ),
        (
            {
                "rope_theta": 1e6,
                "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
            },
            RopeSpec(
                theta=1e6,
                type="yarn",
                factor=4.0,
                original_max_position=32768,
                attention_factor=1 + 0.1 * math.log(4),
            ),
        ),
        (
            {
                "rope_theta": 5e5,
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 8192,
                },
            },
            RopeSpec(theta=5e5, type="llama3", factor=8.0, original_max_position=8192),
        ),
    ],
    ids=["theta", "no scaling", "linear, old names", "new names", "dynamic", "yarn", "llama3"],
)
def test_rope_settings_of_old_and_new_files_are_read(tmp_path: Path, written: Any, expected: RopeSpec) -> None:
    save_llama(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps({**config, **written}))
    assert open_checkpoint(tmp_path).spec.rope == expected


def test_yarn_stretches_the_window_of_the_pre_training(tmp_path: Path) -> None:
    save_llama(tmp_path)
    scaling = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 512}
    _edit_config(tmp_path, rope_parameters=scaling)
    assert open_checkpoint(tmp_path).spec.max_position == 2048


def test_rope_key_differs_where_angles_differ() -> None:
    keys = {
        RopeSpec(theta=1e4).key,
        RopeSpec(theta=1e5).key,
        RopeSpec(theta=1e4, type="linear", factor=2.0).key,
        RopeSpec(theta=1e4, type="linear", factor=4.0).key,
        RopeSpec(theta=1e4, frequency_divisors=(1.0, 2.0)).key,
    }
    assert len(keys) == 5
    assert RopeSpec(theta=1e4).key == RopeSpec(theta=1e4).key


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ({"sliding_window": None}, ()),
        ({}, (4096, 4096)),
        ({"sliding_window": 64}, (64, 64)),
        ({"architectures": ["LlamaForCausalLM"], "sliding_window": 64}, ()),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 64}, ()),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "sliding_window": 64,
                "use_sliding_window": True,
                "max_window_layers": 1,
            },
            (None, 64),
        ),
        (
            {
                "architectures": ["Qwen3ForCausalLM"],
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            (4096, None),
        ),
        ({"architectures": ["Gemma3ForCausalLM"], "num_hidden_layers": 6}, (4096,) * 5 + (None,)),
        ({"architectures": ["Gemma3ForCausalLM"], "sliding_window_pattern": 2}, (4096, None)),
    ],
)
def test_windows_of_the_layers_are_those_of_transformers(
    tmp_path: Path, written: dict[str, Any], expected: tuple[int | None, ...]
) -> None:
    save_llama(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["MistralForCausalLM"], **written}))
    assert open_checkpoint(tmp_path).spec.sliding_windows == expected


def test_window_of_a_gguf_file_whose_layers_are_unknown_limits_the_positions(tmp_path: Path) -> None:
    model = make_model("qwen2")
    file = save_llama_gguf(tmp_path / "m.gguf", model, metadata={"qwen2.attention.sliding_window": 100})
    assert open_checkpoint(file).spec.max_position == 100


def test_sliding_window_leaves_all_positions(tmp_path: Path) -> None:
    save_llama(tmp_path)
    _edit_config(tmp_path, architectures=["MistralForCausalLM"], sliding_window=100)
    spec = open_checkpoint(tmp_path).spec
    assert (spec.max_position, spec.sliding_windows) == (512, (100, 100))


# --- tensors


def test_safetensors_shards_give_all_tensors_in_their_dtype(tmp_path: Path) -> None:
    model = make_llama().to(torch.bfloat16)
    save_llama(tmp_path, model, max_shard_size="500KB")
    checkpoint = open_checkpoint(tmp_path)
    assert len(checkpoint.files) > 1
    tensors = _tensors(checkpoint)
    expected = model.state_dict()
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)


def test_gguf_tensors_come_back_under_their_names_and_in_their_row_order(tmp_path: Path) -> None:
    model = make_llama(attention_bias=True)
    tensors = _tensors(open_checkpoint(save_llama_gguf(tmp_path / "m.gguf", model)))
    expected = model.state_dict()
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)


def test_gguf_parts_give_all_tensors_whichever_part_is_named(tmp_path: Path) -> None:
    model = make_llama()
    save_llama_gguf(tmp_path / "m.gguf", model, split_max_tensors=8)
    parts = sorted(tmp_path.glob("*.gguf"))
    assert len(parts) == 3
    for path in (*parts, tmp_path):
        checkpoint = open_checkpoint(path)
        assert checkpoint.files == parts
        assert _tensors(checkpoint).keys() == model.state_dict().keys()


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_gguf_type_is_dequantized(tmp_path: Path, kind: str) -> None:
    model = make_llama()
    file = save_llama_gguf(tmp_path / "m.gguf", model, tensor_type=kind)
    tensors = _tensors(open_checkpoint(file))
    # largest error relative to the largest weight of a block: half a step of the type
    tolerance = {
        "F16": 2**-11,
        "BF16": 2**-8,
        "Q8_0": 1 / 200,
        "Q4_0": 1 / 8,
        "Q4_1": 1 / 14,
        "Q5_0": 1 / 16,
        "Q5_1": 1 / 30,
    }[kind]
    for name, expected in model.state_dict().items():
        error = (tensors[name] - expected).abs().max()
        assert error <= tolerance * expected.abs().max() * 1.05, name
        assert name.endswith("norm.weight") or error > 0, name


def _half(raw: bytes) -> float:
    return float(np.frombuffer(raw, dtype=np.float16)[0])


def _scale_and_min(scales: bytes, index: int) -> tuple[int, int]:
    """The 6-bit scale and minimum of sub-block ``index``, as ggml's ``get_scale_min_k4`` unpacks them."""
    if index < 4:
        return scales[index] & 63, scales[index + 4] & 63
    return (
        (scales[index + 4] & 0xF) | ((scales[index - 4] >> 6) << 4),
        (scales[index + 4] >> 4) | ((scales[index] >> 6) << 4),
    )


def _q4_k_block(raw: bytes) -> list[float]:
    d, dmin, scales, quants = _half(raw[0:2]), _half(raw[2:4]), raw[4:16], raw[16:144]
    values = []
    for pair in range(4):
        for half in range(2):
            scale, minimum = _scale_and_min(scales, 2 * pair + half)
            nibbles = [byte >> 4 if half else byte & 0xF for byte in quants[32 * pair : 32 * pair + 32]]
            values += [d * scale * nibble - dmin * minimum for nibble in nibbles]
    return values


def _q5_k_block(raw: bytes) -> list[float]:
    d, dmin, scales, high, quants = _half(raw[0:2]), _half(raw[2:4]), raw[4:16], raw[16:48], raw[48:176]
    values = []
    for pair in range(4):
        for half in range(2):
            scale, minimum = _scale_and_min(scales, 2 * pair + half)
            for index, byte in enumerate(quants[32 * pair : 32 * pair + 32]):
                bit = (high[index] >> (2 * pair + half)) & 1
                values.append(d * scale * ((byte >> 4 if half else byte & 0xF) + 16 * bit) - dmin * minimum)
    return values


def _q6_k_block(raw: bytes) -> list[float]:
    low, high, scales, d = raw[0:128], raw[128:192], np.frombuffer(raw[192:208], dtype=np.int8), _half(raw[208:210])
    values = [0.0] * 256
    for part in range(2):
        for index in range(32):
            first, second = low[64 * part + index], low[64 * part + 32 + index]
            bits = high[32 * part + index]
            quants = (
                (first & 0xF) | ((bits & 3) << 4),
                (second & 0xF) | (((bits >> 2) & 3) << 4),
                (first >> 4) | (((bits >> 4) & 3) << 4),
                (second >> 4) | (((bits >> 6) & 3) << 4),
            )
            for quarter, quant in enumerate(quants):
                scale = int(scales[8 * part + index // 16 + 2 * quarter])
                values[128 * part + 32 * quarter + index] = d * scale * (quant - 32)
    return values


@pytest.mark.parametrize(
    ("kind", "read_block", "half_offsets"),
    [("Q4_K", _q4_k_block, (0, 2)), ("Q5_K", _q5_k_block, (0, 2)), ("Q6_K", _q6_k_block, (208,))],
)
def test_gguf_k_quants_agree_with_a_scalar_reading_of_their_blocks(
    tmp_path: Path, kind: str, read_block: Any, half_offsets: tuple[int, ...]
) -> None:
    values_per_block, bytes_per_block = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    rows, blocks_per_row = 256, 512 // values_per_block
    raw = np.random.default_rng(0).integers(0, 256, (rows, blocks_per_row, bytes_per_block), dtype=np.uint8)
    scales = np.linspace(0.001, 0.1, rows * blocks_per_row, dtype=np.float16).view(np.uint8)
    for offset in half_offsets:  # random bytes would make some scales NaN
        raw[:, :, offset : offset + 2] = scales.reshape(rows, blocks_per_row, 2)
    raw = raw.reshape(rows, -1)
    file = save_llama_gguf(tmp_path / "m.gguf", make_llama(), extra_tensors={"blk.1.ffn_down.weight": (raw, kind)})
    values = _tensors(open_checkpoint(file))["model.layers.1.mlp.down_proj.weight"]
    assert values.shape == (256, 512)
    for row in (0, 1, 255):
        blocks = raw[row].tobytes()
        expected = [
            value
            for start in range(0, len(blocks), bytes_per_block)
            for value in read_block(blocks[start : start + bytes_per_block])
        ]
        torch.testing.assert_close(values[row], torch.tensor(expected), rtol=1e-5, atol=1e-6)


def test_gguf_frequency_divisors_become_part_of_the_spec(tmp_path: Path) -> None:
    divisors = np.linspace(1.0, 8.0, 32, dtype=np.float32)
    extra = {"rope_freqs.weight": (divisors, "F32")}
    checkpoint = open_checkpoint(save_llama_gguf(tmp_path / "m.gguf", make_llama(), extra_tensors=extra))
    assert checkpoint.spec.rope.frequency_divisors == pytest.approx(tuple(divisors.tolist()))
    assert "rope_freqs.weight" not in _tensors(checkpoint)


# --- digest


def test_digest_of_a_single_file_is_its_sha256(tmp_path: Path) -> None:
    file = save_llama_gguf(tmp_path / "m.gguf", make_llama())
    expected = hashlib.sha256(file.read_bytes()).hexdigest()
    assert weights_digest(file, tmp_path / "cache") == expected
    assert weights_digest(tmp_path, tmp_path / "cache") == expected


def test_digest_of_a_folder_changes_with_weights_and_with_settings(tmp_path: Path) -> None:
    folder, cache = save_llama(tmp_path / "model", max_shard_size="500KB"), tmp_path / "cache"
    digests = {weights_digest(folder, cache)}
    _edit_config(folder, rms_norm_eps=1e-3)
    digests.add(weights_digest(folder, cache))
    shard = sorted(folder.glob("*.safetensors"))[-1]
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    digests.add(weights_digest(folder, cache))
    assert len(digests) == 3


def _large_file(tmp_path: Path) -> Path:
    """Large enough for its digest to be worth keeping."""
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF" + bytes(17 << 20))
    return file


def test_digest_is_kept_by_path_size_and_modification_time(tmp_path: Path) -> None:
    file, cache = _large_file(tmp_path), tmp_path / "cache"
    first = weights_digest(file, cache)
    status = file.stat()
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert weights_digest(file, cache) == first  # taken from the note: nothing that it goes by has changed
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert weights_digest(file, cache) == hashlib.sha256(content).hexdigest()


@pytest.mark.parametrize("note", ["", "{}", "[1]", '[["x", 1, 2], 5]', '["a", "b", "c"]'])
def test_digest_survives_a_broken_note(tmp_path: Path, note: str) -> None:
    file, cache = _large_file(tmp_path), tmp_path / "cache"
    expected = weights_digest(file, cache)
    (written,) = (cache / "digests").iterdir()
    written.write_text(note)
    assert weights_digest(file, cache) == expected


def test_digest_of_a_small_file_leaves_no_note(tmp_path: Path) -> None:
    weights_digest(save_llama_gguf(tmp_path / "m.gguf", make_llama()), tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_digest_needs_no_writable_cache(tmp_path: Path) -> None:
    file = _large_file(tmp_path)
    (tmp_path / "cache").write_text("a file where the folder should be")
    assert weights_digest(file, tmp_path / "cache") == hashlib.sha256(file.read_bytes()).hexdigest()


# --- what is refused


def test_missing_path_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"nowhere does not exist"):
        open_checkpoint(tmp_path / "nowhere")


def test_folder_without_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"holds neither config.json with safetensors nor a .gguf"):
        open_checkpoint(tmp_path)


def test_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(b"x")
    with pytest.raises(ModelError, match=r"weights.bin is neither a folder nor a .gguf file"):
        open_checkpoint(tmp_path / "weights.bin")


def test_folder_with_two_gguf_models_asks_for_one(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        save_llama_gguf(tmp_path / name, make_llama())
    with pytest.raises(ModelError, match=r"holds 2 GGUF models; name one: a.gguf, b.gguf"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, r"config.json: architectures .*GPT2LMHeadModel"),
        ({"hidden_act": "gelu"}, r"hidden_act 'gelu' is not supported"),
        ({"quantization_config": {"quant_method": "awq"}}, r"quantization_config 'awq' is not supported"),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, r"rope_type 'longrope' is not supported"),
        ({"rope_parameters": {"rope_type": "linear"}}, r"has no factor"),
        ({"hidden_size": None}, r"config.json has no hidden_size"),
        ({"num_hidden_layers": "two"}, r"num_hidden_layers must be a number, got 'two'"),
        ({"num_key_value_heads": 3}, r"4 query heads cannot share 3 KV heads"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor"),
        (
            {"architectures": ["Gemma3ForCausalLM"], "hidden_activation": "gelu"},
            r"hidden_act 'gelu' is not supported; only gelu_pytorch_tanh",
        ),
        (
            {"architectures": ["Gemma3ForCausalLM"], "use_bidirectional_attention": True},
            r"use_bidirectional_attention True is not supported",
        ),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "use_sliding_window": True,
                "layer_types": ["full_attention", "chunked_attention"],
            },
            r"layer_types 'chunked_attention' is not supported",
        ),
        (
            {"architectures": ["Qwen3ForCausalLM"], "use_sliding_window": True, "layer_types": ["full_attention"]},
            r"layer_types \['full_attention'\] is not supported; there are 2 layers",
        ),
    ],
)
def test_unsupported_setting_of_a_folder_is_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    save_llama(tmp_path)
    _edit_config(tmp_path, **change)
    with pytest.raises(ModelError, match=message):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"general.architecture": "mamba"}, r"m.gguf: general.architecture 'mamba' is not supported"),
        ({"llama.expert_count": 8}, r"llama.expert_count 8 is not supported"),
        ({"llama.rope.scaling.type": "longrope"}, r"llama.rope.scaling.type 'longrope' is not supported"),
        ({"llama.rope.dimension_count": 32}, r"llama.rope.dimension_count 32 is not supported"),
    ],
)
def test_unsupported_setting_of_a_gguf_file_is_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    file = save_llama_gguf(tmp_path / "m.gguf", make_llama(), metadata=change)
    with pytest.raises(ModelError, match=message):
        open_checkpoint(file)


def test_config_that_is_not_json_is_named(tmp_path: Path) -> None:
    save_llama(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"cannot read .*config.json"):
        open_checkpoint(tmp_path)


def test_missing_shard_is_named(tmp_path: Path) -> None:
    save_llama(tmp_path, max_shard_size="500KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ModelError, match=rf"names {shard.name}, which is missing"):
        open_checkpoint(tmp_path)


def test_missing_gguf_part_is_named(tmp_path: Path) -> None:
    save_llama_gguf(tmp_path / "m.gguf", make_llama(), split_max_tensors=8)
    (tmp_path / "m-00002-of-00003.gguf").unlink()
    with pytest.raises(ModelError, match=r"m-00002-of-00003.gguf is missing"):
        open_checkpoint(tmp_path / "m-00001-of-00003.gguf")


def test_truncated_safetensors_file_is_named(tmp_path: Path) -> None:
    save_llama(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelError, match=r"cannot read .*model.safetensors"):
        list(open_checkpoint(tmp_path).tensors())


def test_truncated_gguf_file_names_the_tensor(tmp_path: Path) -> None:
    file = save_llama_gguf(tmp_path / "m.gguf", make_llama())
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelError, match=r"m.gguf: tensor output.weight ends at byte \d+, the file at \d+"):
        list(open_checkpoint(file).tensors())


@pytest.mark.parametrize("size", [0, 3, 20, 60, 1000, 2500])
def test_gguf_file_cut_inside_its_header_is_refused(tmp_path: Path, size: int) -> None:
    file = save_llama_gguf(tmp_path / "m.gguf", make_llama())
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(ModelError, match=r"m.gguf"):
        open_checkpoint(file)


def test_gguf_array_with_an_absurd_length_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    key = struct.pack("<Q", 1) + b"k"
    file.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + key + struct.pack("<IIQ", 9, 8, 2**60))
    with pytest.raises(ModelError, match=r"m.gguf is not a whole GGUF file"):
        open_checkpoint(file)


def test_unsupported_gguf_type_names_file_and_tensor(tmp_path: Path) -> None:
    raw = np.zeros((256, 512 // 256 * 84), dtype=np.uint8)
    file = save_llama_gguf(tmp_path / "m.gguf", make_llama(), extra_tensors={"blk.0.ffn_down.weight": (raw, "Q2_K")})
    with pytest.raises(ModelError, match=r"m.gguf: tensor blk.0.ffn_down.weight is Q2_K; there are F32, F16"):
        list(open_checkpoint(file).tensors())


def test_unsupported_safetensors_dtype_names_file_and_tensor(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_llama(tmp_path)
    save_file({"model.norm.weight": torch.zeros(4, dtype=torch.int8)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"model.safetensors: tensor model.norm.weight is torch.int8"):
        list(open_checkpoint(tmp_path).tensors())


def test_missing_tensor_names_file_and_tensor(tmp_path: Path) -> None:
    file = save_llama_gguf(tmp_path / "m.gguf", make_llama(), skip=["blk.1.ffn_up.weight"])
    with pytest.raises(ModelError, match=r"m.gguf has no tensor model.layers.1.mlp.up_proj.weight$"):
        _load(file)


def test_unexpected_tensor_names_file_and_tensor(tmp_path: Path) -> None:
    extra = {"blk.0.attn_sinks.weight": (np.zeros(4, dtype=np.float32), "F32")}
    file = save_llama_gguf(tmp_path / "m.gguf", make_llama(), extra_tensors=extra)
    with pytest.raises(ModelError, match=r"m.gguf: blk.0.attn_sinks.weight has no place in the model"):
        _load(file)


def test_tensor_of_another_shape_names_both_shapes(tmp_path: Path) -> None:
    save_llama(tmp_path)
    _edit_config(tmp_path, intermediate_size=256)
    with pytest.raises(ModelError, match=r"has shape .*512.*, the model needs .*256"):
        _load(tmp_path)
