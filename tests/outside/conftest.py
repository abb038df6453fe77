"""Fixtures of the tests of files as people have them."""

from tests.app.conftest import run as run
