"""One complete, real run of the workflow that several test files look at; each leaves it as it was."""

from __future__ import annotations

import pytest
from tiny_workflow import CONFIG, Whole, complete_run


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """The tiny run in a folder with a space and Chinese characters in its name."""
    return complete_run(tmp_path_factory.mktemp("whole run 全程"), CONFIG)
