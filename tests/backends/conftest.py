from __future__ import annotations

import pytest

from support.machine import Machine


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    found = Machine()
    found.install(monkeypatch)
    return found
