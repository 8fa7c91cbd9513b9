"""Shared by several test files; no test file imports another."""

from pathlib import Path

import pytest

pytest.register_assert_rewrite(*(f"support.{path.stem}" for path in Path(__file__).parent.glob("[a-z]*.py")))
