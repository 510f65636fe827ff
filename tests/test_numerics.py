"""Tables about number formats."""

import torch

from lmperf.model import TrainingStep, build
from lmperf.numerics import dtype_table, layer_of, missing_update_error, norm_table, underflow_share
from lmperf.precision_tables import KINDS
from lmperf.recipe import Precision, Recipe
from lmperf.records import ModelShape
from lmperf.reference import layer_norm

SHAPE = ModelShape(vocab_size=61, context_length=24, layers=2, heads=2, kv_heads=2, d_model=32, d_ff=64)


def test_underflow_counts_zeros_by_layer_and_what_a_format_would_lose():
    model = torch.nn.Linear(4, 1)
    model.weight.grad, model.bias.grad = torch.tensor([[1.0, 1e-5, 1e-12, 0.0]]), torch.zeros(1)
    assert underflow_share(model) == {"total": 0.25, "weight": 0.25}  # vectors are left out
    half = torch.float16
    assert underflow_share(model, dtype=half)["total"] == 0.75  # 1e-5 is subnormal
    assert underflow_share(model, dtype=half, scale=2.0**16)["total"] == 0.5  # 1e-12 · 65536 still is
    assert underflow_share(torch.nn.Linear(4, 1)) == {}


def test_underflow_of_a_model_falls_with_the_loss_scale():
    model = build(SHAPE, Recipe(), seed=0)
    step = TrainingStep(model, Recipe(), learning_rate=0.0)
    tokens = torch.randint(61, (2, 25), generator=torch.Generator().manual_seed(0))
    step(tokens[:, :-1], tokens[:, 1:])
    plain, scaled, shrunk = (underflow_share(model, dtype=torch.float16, scale=s) for s in (1.0, 2.0**12, 1e-6))
    assert set(plain) == {"total", "blocks.0", "blocks.1"}  # embeddings have true zeros, norms are vectors
    assert all(scaled[layer] <= plain[layer] <= shrunk[layer] for layer in plain)
    assert shrunk["blocks.0"] == 1.0
    assert underflow_share(model)["total"] < 0.05


def test_layers_are_named_by_block():
    assert layer_of("blocks.11.norm_1.weight") == "blocks.11"
    assert layer_of("embedding.weight") == "embedding"
    assert layer_of("module._orig_mod.blocks.3._orig_mod.norm_1.weight") == "blocks.3"


def test_dtype_table_has_each_kind_once_and_a_column_in_the_tables():
    masters = Recipe(precision=Precision(parameters=torch.bfloat16, master_weights=True))
    names = [row.tensor for row in dtype_table(masters, SHAPE)]
    assert len(names) == len(set(names))
    assert set(names) == set(KINDS)


def test_grad_scaler_refuses_a_loop_without_update():
    assert "update" in (missing_update_error() or "")


def test_norm_table_reports_errors_only_where_outputs_are_finite():
    rows = norm_table(lambda dim: torch.nn.LayerNorm(dim, eps=-1e-6))
    assert all((row.error is None) == (row.finite_share < 1) for row in rows)
    assert any(row.finite_share < 1 for row in rows)
    assert all(row.error < 2e-3 for row in norm_table(layer_norm))
