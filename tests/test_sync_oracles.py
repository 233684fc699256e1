"""Documented two-phase exchanges with the real codecs, and permuted ranks."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from lowcomm.compress import Int8, Sign
from lowcomm.sync import AllReduce
from ranks import run_ranks

VECTORS = json.loads((Path(__file__).parent / "compressors_vectors.json").read_text())
INT8, SIGN = VECTORS["two_phase_int8_B4_N2"], VECTORS["two_phase_sign_l1_B4_N2_EF"]


def _oracle_rank(rank: int, world_size: int) -> dict[str, object]:
    results: dict[str, object] = {}
    plain = AllReduce(codec=Int8(block=4), algorithm="two_phase")
    sent: list[torch.Tensor] = []
    prepare = plain._algorithm.prepare

    def spy(exchange: object) -> None:
        prepare(exchange)
        sent.append(exchange.frames.clone().view(world_size, -1))

    plain._algorithm.prepare = spy
    results["int8"] = plain.reduce(torch.tensor(INT8[f"x{rank}"])).result
    results["bodies"] = [bytes(frame[16:24].tolist()).hex() for frame in sent[0]]
    sign = AllReduce(codec=Sign(block=4), feedback="auto", algorithm="two_phase")
    for t in range(2):
        result = sign.reduce(torch.tensor(SIGN[f"x{rank}"]), round=t).result.clone()
        results[f"sign {t}"] = (result, sign.state(0))
    mine = torch.randn(500, generator=torch.Generator().manual_seed(rank))
    other = torch.randn(500, generator=torch.Generator().manual_seed(1 - rank))
    for name, x in (("in order", mine), ("permuted", other)):
        results[name] = AllReduce(codec=Int8(block=32), algorithm="two_phase").reduce(x).result
    return results


def test_documented_exchanges() -> None:
    outcomes = run_ranks(_oracle_rank, 2)
    for rank, outcome in enumerate(outcomes):
        assert outcome["int8"].tolist() == INT8["result"]
        assert outcome["bodies"] == INT8[f"rank{rank}_to_chunks"]
        for t, expected in enumerate(SIGN["rounds"]):
            result, state = outcome[f"sign {t}"]
            assert result.tolist() == expected["result"]
            assert state["residual"].tolist() == expected["worker_err"][rank]
            assert state["owner_residual"].tolist() == expected["server_err"][rank]
        torch.testing.assert_close(outcome["in order"], outcome["permuted"], rtol=1e-5, atol=0.02)
