"""What tests of compiled models share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """torch's compiler knows nothing of other tests, and other tests nothing of this one. Not for
    all: some files compile a model once for all of their tests."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
