# SPDX-License-Identifier: Apache-2.0
"""The torch provider of routed experts against one token, one expert at a time."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F

from tests.exl3_trellis.moe_layers import dense, load, make_layer, make_spec, query_of, slices_of, stored_tensors
from vllm.model_executor.layers.quantization.exl3_trellis.backends import torch_moe
from vllm.model_executor.layers.quantization.exl3_trellis.moe_plan import choose_experts
from vllm.model_executor.layers.quantization.exl3_trellis.plan import (
    Activation,
    Device,
    NoBackendError,
    Window,
)

CPU = Device(kind="cpu")
RATES = {"w1": [3, 4, 3, 4], "w3": [3, 4, 3, 4], "w2": [3, 4, 3, 4]}
TOLERANCE = 1e-5  # relative, float32


def routing(rows: int, experts: int, top_k: int = 2, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(experts, generator=random)[:top_k] for _ in range(rows)])
    return torch.rand(rows, top_k, generator=random), ids.int()


def one_by_one(spec, tensors, x, weights, ids, act, weight_on_input=False):
    """The meaning: every (row, expert) pair by itself, in float64."""

    @functools.cache
    def matrix(shard, expert):
        return dense(spec, tensors, shard, expert).double()

    y = torch.zeros(x.shape, dtype=torch.float64)
    for row in range(x.shape[0]):
        for weight, expert in zip(weights[row].double(), ids[row].tolist(), strict=True):
            if expert < 0:
                continue
            into = x[row].double() * (weight if weight_on_input else 1)
            up = into @ matrix("w3", expert) if "w3" in spec.projections else None
            part = act(into @ matrix("w1", expert), up) @ matrix("w2", expert)
            y[row] += part if weight_on_input else part * weight
    return y


def run(spec, tensors, x, weights, ids, decode_once=True, intermediate=256, tp=1, rank=0, **changes):
    """One rank's output through the provider."""
    layer, parts = make_layer(spec, intermediate, tp, rank)
    load(layer, tensors)
    changes = {"intermediate": intermediate // tp} | changes
    query = query_of(spec, parts, **changes)
    plan = torch_moe.plan(query, CPU, Window(name="parity", rows=64, block=64))
    prepared = torch_moe.prepare(query, slices_of(layer, spec, parts), decode_once)
    y = torch.full_like(x, torch.nan)
    torch_moe.run(plan, prepared, torch.empty(0, dtype=torch.uint8), x, weights, ids, y)
    return y


def silu(gate, up):
    return F.silu(gate) * up


def close(got: torch.Tensor, want: torch.Tensor, tolerance: float = TOLERANCE) -> None:
    assert (got.double() - want).norm() / want.norm() < tolerance


@pytest.mark.parametrize("decode_once", [True, False], ids=["decoded at load", "decoded in the call"])
@pytest.mark.parametrize("shared", [False, True], ids=["per expert", "shared_h"])
@pytest.mark.parametrize("rows", [1, 5, 33])
def test_mixed_rates_in_two_slices(decode_once, shared, rows):
    spec = make_spec(RATES, shared=shared)
    tensors = stored_tensors(spec)
    x, (weights, ids) = torch.randn(rows, 256), routing(rows, 4)
    want = one_by_one(spec, tensors, x, weights, ids, silu)
    close(run(spec, tensors, x, weights, ids, decode_once), want)
    ranks = [run(spec, tensors, x, weights, ids, decode_once, tp=2, rank=rank) for rank in (0, 1)]
    close(ranks[0] + ranks[1], want)


@pytest.mark.parametrize("codebook, rates", [("3inst", [1, 8]), ("mul1", [1.5, 3.5])])
def test_every_codebook_cut_for_two_ranks(codebook, rates):
    spec = make_spec(dict.fromkeys(RATES, rates), ranks=None, width=256, codebook=codebook)
    tensors = stored_tensors(spec)
    x, (weights, ids) = torch.randn(7, 256), routing(7, 2)
    parts = [run(spec, tensors, x, weights, ids, tp=2, rank=rank) for rank in (0, 1)]
    close(parts[0] + parts[1], one_by_one(spec, tensors, x, weights, ids, silu))


def test_true_sizes_smaller_than_the_padded_ones():
    spec = make_spec(RATES, hidden=256, width=256, ranks=None)
    tensors = stored_tensors(spec)
    x, (weights, ids) = torch.randn(6, 200), routing(6, 4)
    cut = {"w1": (200, 192), "w3": (200, 192), "w2": (192, 200)}

    @functools.cache
    def module(shard, expert):
        return dense(spec, tensors, shard, expert)[: cut[shard][0], : cut[shard][1]].double()

    want = torch.zeros(6, 200, dtype=torch.float64)
    for row in range(6):
        for weight, expert in zip(weights[row], ids[row].tolist(), strict=True):
            middle = silu(x[row].double() @ module("w1", expert), x[row].double() @ module("w3", expert))
            want[row] += weight * (middle @ module("w2", expert))
    for decode_once in (True, False):
        close(run(spec, tensors, x, weights, ids, decode_once, intermediate=192, hidden=200), want)


@pytest.mark.parametrize(
    "ids",
    [
        [[-1, -1], [-1, -1], [-1, -1]],
        [[0, -1], [-1, 3], [2, 1]],
        [[1, 0], [1, 2], [1, 3]],
    ],
    ids=["nobody", "some inactive", "one expert gets every row"],
)
def test_any_routing(ids):
    spec = make_spec(RATES)
    tensors = stored_tensors(spec)
    x, weights, ids = torch.randn(3, 256), torch.rand(3, 2), torch.tensor(ids)
    want = one_by_one(spec, tensors, x, weights, ids, silu)
    for dtype in (torch.int32, torch.int64):
        got = run(spec, tensors, x, weights, ids.to(dtype))
        if want.any():
            close(got, want)
        else:
            assert not got.any()


def test_weights_on_the_input():
    spec = make_spec(RATES)
    tensors = stored_tensors(spec)
    x, (weights, ids) = torch.randn(4, 256), routing(4, 4, top_k=1)
    got = run(spec, tensors, x, weights, ids, top_k=1, weight_on_input=True)
    close(got, one_by_one(spec, tensors, x, weights, ids, silu, weight_on_input=True))


def _clamped(limit, alpha, beta):
    def act(gate, up):
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return gate * torch.sigmoid(alpha * gate) * (up + beta)

    return act


ACTIVATIONS = {
    "silu": (Activation(name="silu"), silu),
    "silu with a limit": (Activation(name="silu", limit=0.5), _clamped(0.5, 1, 0)),
    "gelu": (Activation(name="gelu"), lambda g, u: F.gelu(g) * u),
    "gelu_tanh": (Activation(name="gelu_tanh"), lambda g, u: F.gelu(g, approximate="tanh") * u),
    "swigluoai": (Activation(name="swigluoai", limit=0.7, alpha=1.702, beta=1.0), _clamped(0.7, 1.702, 1)),
    "swiglustep": (
        Activation(name="swiglustep", limit=0.3),
        lambda g, u: F.silu(g).clamp(max=0.3) * u.clamp(-0.3, 0.3),
    ),
    "relu2": (Activation(name="relu2"), lambda g, u: F.relu(g).square() * u),
    "silu_no_mul": (Activation(name="silu_no_mul"), lambda g, u: F.silu(g)),
    "relu2_no_mul": (Activation(name="relu2_no_mul"), lambda g, u: F.relu(g).square()),
}


@pytest.mark.parametrize("activation, act", ACTIVATIONS.values(), ids=ACTIVATIONS.keys())
def test_activations(activation, act):
    rates = RATES if activation.gated else {"w1": RATES["w1"], "w2": RATES["w2"]}
    spec = make_spec(rates)
    tensors = stored_tensors(spec)
    x, (weights, ids) = torch.randn(4, 256), routing(4, 4)
    got = run(spec, tensors, x, weights, ids, activation=activation)
    close(got, one_by_one(spec, tensors, x, weights, ids, act))


def test_bfloat16():
    spec = make_spec(RATES)
    tensors = stored_tensors(spec)
    x, (weights, ids) = torch.randn(9, 256).bfloat16(), routing(9, 4)
    got = run(spec, tensors, x, weights, ids, io_dtype="bfloat16")
    assert got.dtype == torch.bfloat16
    close(got, one_by_one(spec, tensors, x.float(), weights, ids, silu), 0.02)


def test_an_unknown_activation_is_refused_by_name():
    spec = make_spec(RATES)
    _, parts = make_layer(spec, 256)
    with pytest.raises(NoBackendError, match="torch: activation situ, want one of silu, swigluoai"):
        choose_experts(query_of(spec, parts, activation=Activation(name="situ")), CPU, (torch_moe,))
