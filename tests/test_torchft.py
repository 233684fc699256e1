"""torchft's process groups are taken as they are. Needs the extra: pip install lowcomm[torchft]."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lowcomm.compress import Int4
from lowcomm.sync import AllReduce
from ranks import run_ranks


def _torchft_rank(rank: int, world_size: int) -> dict[str, Any]:
    from torchft.process_group import ProcessGroupGloo

    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False) if rank == 0 else None
    ports: list[Any] = [None] * world_size
    dist.all_gather_object(ports, store.port if store else 0)
    group = ProcessGroupGloo(timeout=timedelta(seconds=30))
    results: dict[str, Any] = {}
    for quorum, members in enumerate(([0, 1, 2], [0, 2])):  # rank 1 leaves, and the group is configured anew
        if rank not in members:
            continue
        place, size = members.index(rank), len(members)
        group.configure(f"localhost:{ports[0]}/lowcomm/{quorum}", "replica", place, size)
        x = torch.linspace(-1, 1, 5000) * (rank + 1)
        exact, coded = AllReduce(group), AllReduce(group, Int4(), "auto", algorithm="two_phase")
        results[f"place {quorum}"] = (exact.rank, exact.world_size)
        results[f"exact {quorum}"] = exact.reduce(x.clone()).result
        works = [coded.start(x.clone(), bucket=i) for i in range(3)]
        results[f"coded {quorum}"] = [(work.wait(), work.result)[1] for work in works]
    dist.barrier()
    return results


def test_torchft_groups() -> None:
    pytest.importorskip("torchft", reason="torchft is not installed (pip install lowcomm[torchft])")
    outcomes = run_ranks(_torchft_rank, 3)
    for quorum, members in enumerate(([0, 1, 2], [0, 2])):
        expected = torch.linspace(-1, 1, 5000) * sum(rank + 1 for rank in members) / len(members)
        first = outcomes[members[0]]
        for place, rank in enumerate(members):
            outcome = outcomes[rank]
            assert outcome[f"place {quorum}"] == (place, len(members))
            torch.testing.assert_close(outcome[f"exact {quorum}"], expected)
            for result, other in zip(outcome[f"coded {quorum}"], first[f"coded {quorum}"], strict=True):
                assert torch.equal(result, other)
                torch.testing.assert_close(result, expected, rtol=0, atol=0.3)
