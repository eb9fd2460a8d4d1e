import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from trial.emulator import BUILD, Emulator


def pytest_configure(config):
    config.addinivalue_line("markers", "long: minutes rather than seconds; -m 'not long' leaves them out")


@pytest.fixture(scope="session", autouse=True)
def built():
    if not (BUILD / "libptxemu.so").exists():
        pytest.skip("the emulator is built on x86-64 with nvcc alone (PTXEMU_BUILD names another folder)")


@pytest.fixture(scope="session")
def emulator(built):
    return Emulator()
