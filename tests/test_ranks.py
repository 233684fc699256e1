"""The multi-process test helper itself."""

import torch
import torch.distributed as dist
from ranks import run_ranks, start_ranks


def _sum(rank: int, world_size: int, values: torch.Tensor) -> torch.Tensor:
    mine = values[rank].clone()
    dist.all_reduce(mine)
    return mine


def _fail_on_one(rank: int, world_size: int) -> None:
    if rank == 1:
        raise ValueError("rank 1 says no")


def test_every_rank_returns_its_value() -> None:
    values = torch.arange(6.0).view(3, 2)
    for result in run_ranks(_sum, 3, values):
        assert torch.equal(result, values.sum(0))


def test_an_error_is_reported_for_its_rank() -> None:
    outcomes = start_ranks(_fail_on_one, 2)
    assert outcomes[0] == (None, None)
    assert "rank 1 says no" in str(outcomes[1][1])
