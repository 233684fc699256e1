"""Every method with every option, between real processes, and the page that says what goes with what."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import composition
import pytest
from optimizers_under_test import ENTRIES
from ranks import run_ranks

PAGE = Path(__file__).parent.parent / "docs" / "composition.md"


@pytest.fixture(scope="module")
def resumed() -> list[dict[str, list[int]]]:
    return run_ranks(composition.resumed, 2, timeout=300)


@pytest.fixture(scope="module")
def tried() -> dict[Any, Any]:
    return composition.all_outcomes()


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.id)
def test_resume_at_every_step(resumed: list[dict[str, list[int]]], entry: Any) -> None:
    """Saved at every step of two periods, in mid-round and in flight, loaded anew, continued: the same bits."""
    assert [found[entry.id] for found in resumed] == [[], []]


def test_the_page_is_what_was_found(tried: dict[Any, Any], resumed: list[dict[str, list[int]]]) -> None:
    assert PAGE.read_text() == composition.page(tried, resumed[0]), "run `make composition`"


@pytest.mark.parametrize("title", composition.NAMES)
def test_what_does_not_compose_is_refused_with_a_reason(tried: dict[Any, Any], title: str) -> None:
    for column in composition.COLUMNS:
        one = tried[title, column]
        assert one["word"] == "refused" or not one["reason"]
        assert one["word"] != "refused" or len(one["reason"]) > 20
