"""The style sheet of the Batch and Throughput tabs, which is in batch.css beside this file."""

from functools import cache
from pathlib import Path


@cache
def style_element() -> str:
    """A `<style>` for the HTML of a tab."""
    return f"<style>{Path(__file__).with_name('batch.css').read_text(encoding='utf-8')}</style>"
