"""The worked examples with four workers, two and two alike: every worker makes the run of its kind among two.

The runs of two workers are compared with the published numbers beside each method's tests.
"""

from __future__ import annotations

from typing import Any

import pytest
import test_desloc
import test_oracles_local
import test_outer_rules
import test_streaming
from ranks import run_ranks

EXAMPLES = {
    "local SGD": test_oracles_local._local_sgd,
    "DiLoCo": test_oracles_local._diloco,
    "outer rules": test_outer_rules._runs,
    "streaming": test_streaming._streams,
    "DES-LOC and MT-DAO": test_desloc._runs,
}


def _examples(rank: int, world_size: int) -> dict[str, dict[str, Any]]:
    return {name: run(rank % 2, world_size) for name, run in EXAMPLES.items()}


def test_four_workers_make_the_runs_of_two() -> None:
    two, four = run_ranks(_examples, 2), run_ranks(_examples, 4)
    for rank, found in enumerate(four):
        for name, runs in found.items():
            for run, rows in runs.items():
                for step, (ours, theirs) in enumerate(zip(rows, two[rank % 2][name][run], strict=True)):
                    same = pytest.approx(theirs, rel=1e-11, abs=1e-13, nan_ok=True)
                    assert ours == same, f"{name}, {run}, step {step + 1}, rank {rank}"
