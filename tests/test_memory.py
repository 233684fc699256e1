"""What methods keep in memory, measured between two processes, and the page that says so."""

from __future__ import annotations

from pathlib import Path

import pytest
from lowcomm.recipes.memory import measure, page
from ranks import run_ranks

PAGE = Path(__file__).parent.parent / "docs" / "memory.md"


def test_memory_is_what_the_page_says() -> None:
    first, second = run_ranks(measure, 2)
    assert page(first) == page(second) == PAGE.read_text(), "run `make memory`"
    # anchor, momentum and a send buffer; beyond them one vector for what is in flight, one for the own share
    least = {name: numbers[0] for name, numbers in first.items()}
    for name, numbers in {
        "LocalSGD": 1,
        "DiLoCo": 3,
        "AutoLoCo": 3,
        "SlowMo": 3,
        "SignMomentum": 3,
        "EagerDiLoCo(delayed=True)": 4,
        "CO2": 4,
        "EagerDiLoCo": 5,
    }.items():
        assert least[name] == pytest.approx(numbers, abs=0.01), name
    assert first["StreamingDiLoCo, 4 fragments, delay 1"][1] == pytest.approx(2.5, abs=0.01)
