"""FLOP/s of a timed step against probed and printed peaks."""

import pytest
import torch

from lmperf import utilisation as used
from lmperf.recipe import Precision, Recipe


@pytest.fixture
def peaks(monkeypatch):
    asked = []

    def probe(dtype, size, seconds, device):
        asked.append((dtype, size, device))
        return 100.0

    monkeypatch.setattr(used, "matmul_rate", probe)
    return asked


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [
        (Precision(), "float32"),
        (Precision(tf32=True), "tf32"),
        (Precision(autocast=torch.bfloat16), "bfloat16"),
        (Precision(parameters=torch.float16), "float16"),
    ],
)
def test_the_peak_is_that_of_the_recipe_s_format(peaks, precision, dtype):
    found = used.utilisation(50.0, 2.0, Recipe(precision=precision), "cuda:1")
    assert peaks == [(dtype, used.PROBE_SIZE["cuda"], "cuda:1")]
    assert found.metrics["flops_per_s"].value == 25.0
    assert found.metrics["mfu"].value == 0.25
    assert "mfu_datasheet" not in found.metrics
    assert found.implausible is None


def test_a_printed_peak_counts_for_the_exact_device(peaks, monkeypatch):
    monkeypatch.setattr(used, "device_name", lambda device: "NVIDIA L4")
    found = used.utilisation(121e12, 2.0, Recipe(precision=Precision(autocast=torch.bfloat16)), "cuda")
    assert found.metrics["mfu_datasheet"].value == 0.5
    assert found.implausible is None
    assert "times the peak" in used.utilisation(121e13, 2.0, Recipe(), "cuda").implausible


def test_without_flops_or_a_time_there_is_nothing(peaks):
    assert used.utilisation(None, 2.0, Recipe(), "cpu") == used.Utilisation()
    assert used.utilisation(5.0, None, Recipe(), "cpu") == used.Utilisation()
    assert peaks == []


def test_on_this_machine():
    found = used.utilisation(1e6, 1.0, Recipe(), "cpu", probe_s=0.01)
    assert 0 < found.metrics["mfu"].value < 1e-2
