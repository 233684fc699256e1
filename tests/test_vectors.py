"""Every published vector (compressors_vectors.json) is compared with something: the list of what and where."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from codec_checks import decode, encode
from lowcomm.compress import E3M0, Codec, Float8, Int4, Int8, Sign, Ternary, TopK, available_levels, use_kernel_level
from lowcomm.sync.frames import FrameHeader, write_header

HERE = Path(__file__).parent
VECTORS: dict[str, Any] = json.loads((HERE / "compressors_vectors.json").read_text())

BODIES: dict[str, Codec] = {
    "int8_sym_B8": Int8(8),
    "int8_sym_B4": Int8(4),
    "int4_sym_B8": Int4(8),
    "int4_asym_B8": Int4(8, affine=True),
    "int8_sym_zero_and_tiny_blocks_B4": Int8(4),
    "fp8_e4m3_B8": Float8("e4m3", 8),
    "fp8_e5m2_B8": Float8("e5m2", 8),
    "e3m0_B8": E3M0(8),
    "sign_l1_B8": Sign("l1", 8),
    "sign_l2_B8": Sign("l2", 8),
    "topk_c8_k4_ef_f32": TopK(k=4, chunk=8, value="f32"),
    "topk_c8_k4_ef_mag2": TopK(k=4, chunk=8, iterations=0),
    "topk_c8_k4_bits_f32": TopK(k=4, chunk=8, index="bits", value="f32"),
    "topk_c8_k4_bits_mag2": TopK(k=4, chunk=8, index="bits", iterations=0),
    "topk_two_chunks_c8_k2_ef_mag2": TopK(k=2, chunk=8, iterations=0),
    "topk_two_chunks_c8_k2_ef_bf16": TopK(k=2, chunk=8, value="bf16"),
    "topk_two_chunks_c8_k2_bits_mag2": TopK(k=2, chunk=8, index="bits", iterations=0),
    "topk_two_chunks_c8_k2_bits_bf16": TopK(k=2, chunk=8, index="bits", value="bf16"),
}
TERNARY = {"body_2bit": Ternary(packing="2bit", block=8), "body_base3": Ternary(block=8)}

# What is compared by tests of other files, which name the vector.
ELSEWHERE = {
    "test_quantize.py": ["int4_sr_B8", "bf16_rne"],
    "test_ternary.py": ["ternary2", "ternary3"],
    "test_topk.py": ["elias_fano_c4096_k4", "elias_fano_c8_k4", "mag2", "mag2_lloyd", "topk_tie"],
    "test_comparison_quantizers.py": ["qsgd_s7_B8", "bucket_mean_4bins_6sigma"],
    "test_small_floats.py": ["fp8_e4m3_codes", "fp8_e5m2_codes"],
    "test_eden.py": ["drive_p4", "eden2_p4"],
    "test_packing.py": [
        *("pack12", "tree_sum", "philox_kat", "rademacher_seed42", "feistel_perm_n10_seed42_step7"),
        *("feistel_perm_n1000_seed42_step7_first8", "uniform_seed42_stream0_step0_first8"),
        "uniform_seed42_stream3_step5_first4",
    ],
    "test_feedback.py": [
        *("ef14_top1", "sparseloco_ef_beta05_top1", "ef21_top1_g0zero", "ef21w_top1_N4", "ef21_sgdm_eta05_top1"),
        *("econtrol_eta05_top1", "loco_ema_beta05_top1", "dgc_m05_top1", "ef_inputs"),
    ],
    "test_delta.py": ["delta_bf16"],
    "test_powersgd.py": ["powersgd_r1"],
    "test_dct.py": ["dct4"],
    "test_container.py": ["safetensors_example"],
    "test_sketch.py": ["countsketch_r3_c8_seed42"],
    "test_sign.py": ["majority_vote", "two_phase_sign_l1_B4_N2_EF"],
    "test_sync_oracles.py": ["two_phase_int8_B4_N2", "two_phase_sign_l1_B4_N2_EF"],
    "test_sync_sums.py": ["union_allreduce"],
    "test_sync_robust.py": ["robust", "gaf_tau097"],
}


def test_no_vector_was_left_out() -> None:
    here = {"x8", "ternary_det_B8", "frame_header", *BODIES}
    named = {name for names in ELSEWHERE.values() for name in names}
    assert here | named == set(VECTORS)
    for file, names in ELSEWHERE.items():
        text = (HERE / file).read_text()
        for name in names:
            # by its whole name or, where a format follows, by the beginning of it
            spelled = rf"[\"']{name}[\"']|[\"']{re.sub('e4m3|e5m2', '{form}', name)}[\"']"
            assert re.search(spelled, text), f"{file} does not use {name}"


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("level", available_levels())
@pytest.mark.parametrize("name", BODIES)
def test_bodies(name: str, level: str, threads: int) -> None:
    entry, codec = VECTORS[name], BODIES[name]
    x, before = torch.tensor(entry.get("x", VECTORS["x8"])), torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        with use_kernel_level(level):
            body, flags = encode(codec, x)
            assert flags == 0 and bytes(body.tolist()).hex() == entry["body"]
            assert decode(codec, body, x.numel()).tolist() == entry["decoded"]
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("level", available_levels())
@pytest.mark.parametrize("key", TERNARY)
def test_deterministic_ternary(key: str, level: str) -> None:
    entry, codec = VECTORS["ternary_det_B8"], TERNARY[key]
    with use_kernel_level(level):
        body, _ = encode(codec, torch.tensor(entry["x"]))
        assert bytes(body.tolist()).hex() == entry[key]
        assert decode(codec, body, 8).tolist() == entry["decoded"]


def test_frame_header() -> None:
    entry = VECTORS["frame_header"]
    frame = torch.zeros(16, dtype=torch.uint8)
    write_header(frame, FrameHeader(entry["codec"], entry["flags"], entry["round"], entry["weight"]))
    assert bytes(frame.tolist()).hex() == entry["hex"]
