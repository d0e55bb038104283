"""docs/evidence.md is what the tables say."""

from pathlib import Path

from workers.evidence_page import fact_sources, page
from workers.rules import RULES

PAGE = Path(__file__).parents[3] / "docs" / "evidence.md"


def test_the_page_is_current():
    """Otherwise: python -m workers.evidence_page > docs/evidence.md."""
    assert PAGE.read_text(encoding="utf-8") == page()


def test_every_rule_has_a_source_that_can_tell():
    """A rule about a fact that nobody reports would make every run invalid, or none."""
    assert {rule.fact for rule in RULES} <= fact_sources().keys()


def test_version_backend_and_dtype_have_two_sources():
    sources = fact_sources()
    for fact in ("server.version", "server.attention_backend", "server.kv_cache_dtype"):
        assert len(sources[fact]) >= 2
