import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from trial.emulator import Emulator


@pytest.fixture(scope="session")
def emulator():
    return Emulator()
