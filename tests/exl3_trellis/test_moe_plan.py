"""Which rows of routed experts go through which window, whom it is served by, and what is refused before planning."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest

from tests.exl3_trellis.moe_layers import make_layer, make_spec, query_of
from tests.exl3_trellis.recording import Recording
from vllm import exl3_envs
from vllm.model_executor.layers.quantization.exl3_trellis import moe_plan
from vllm.model_executor.layers.quantization.exl3_trellis.moe_plan import Limits, choose_experts, kernels_of, windows
from vllm.model_executor.layers.quantization.exl3_trellis.plan import Device, MoeQuery, NoBackendError, Window

ROWS = 3072  # of a step

DEFAULT = Limits()
SWITCHED_OFF = Limits(prefill=False)
FEW = Limits(min_rows=3, decode_rows=8, capacity=20, chunk=4)

# limits, rows -> the slices they run in
CUTS = [
    (DEFAULT, 0, []),
    (DEFAULT, 1, [("decode", 1)]),
    (DEFAULT, 32, [("decode", 32)]),
    (DEFAULT, 33, [("prefill", 33)]),
    (DEFAULT, ROWS, [("prefill", ROWS)]),
    (DEFAULT, ROWS + 1, [("prefill", ROWS), ("decode", 1)]),
    (SWITCHED_OFF, 32, [("decode", 32)]),
    (SWITCHED_OFF, 33, [("parity", 33)]),
    (SWITCHED_OFF, ROWS, [("parity", ROWS)]),
    (FEW, 1, [("parity", 1)]),
    (FEW, 2, [("parity", 2)]),
    (FEW, 3, [("decode", 3)]),
    (FEW, 8, [("decode", 8)]),
    (FEW, 9, [("prefill", 9)]),
    (FEW, 20, [("prefill", 20)]),
    (FEW, 21, [("prefill", 18), ("decode", 3)]),  # one row alone would be below the window
    (FEW, 22, [("prefill", 19), ("decode", 3)]),
    (FEW, 23, [("prefill", 20), ("decode", 3)]),
    (FEW, 28, [("prefill", 20), ("decode", 8)]),
    (FEW, 29, [("prefill", 20), ("prefill", 9)]),
    (FEW, 40, [("prefill", 20), ("prefill", 20)]),
    (FEW, 41, [("prefill", 20), ("prefill", 18), ("decode", 3)]),
    (FEW, 60, [("prefill", 20)] * 3),
    (Limits(min_rows=8, decode_rows=8, capacity=9), 10, [("prefill", 9), ("parity", 1)]),  # nothing to spare
]


@pytest.mark.parametrize(("limits", "rows", "slices"), CUTS)
def test_cuts(limits: Limits, rows: int, slices: list[tuple[str, int]]) -> None:
    cuts = windows(limits, ROWS, planned=True).cuts(rows)
    assert [(name, stop - start) for name, start, stop in cuts] == slices
    assert [start for _, start, _ in cuts] == [0, *(stop for _, _, stop in cuts[:-1])][: len(cuts)]


SWEPT = [
    (limits, most)
    for limits in (DEFAULT, SWITCHED_OFF, FEW, Limits(min_rows=5, capacity=40))
    for most in (1, 4, 20, 31, 32, 33, 200)
    if not list(limits.problems(most))
]


@pytest.mark.parametrize(("limits", "most"), SWEPT)
def test_every_number_of_rows_is_cut_to_fit(limits: Limits, most: int) -> None:
    served = windows(limits, most, planned=True)
    by_name = {window.name: window for window in served.all}
    for rows in range(1, 2 * most + 10):
        cuts = served.cuts(rows)
        assert sum(stop - start for _, start, stop in cuts) == rows
        assert all(0 < stop - start <= by_name[name].rows for name, start, stop in cuts)
        used = {name for name, start, stop in cuts if name != "decode" or stop - start >= limits.min_rows}
        assert used == {name for name, _, _ in cuts}


# limits, rows of a step, planned -> decode, prefill, parity as (rows, block)
WINDOWS = {
    "default": (DEFAULT, ROWS, True, (32, 8), (ROWS, 64), None),
    "blocks and capacity": (
        Limits(decode_rows=16, decode_block=16, prefill_block=32, capacity=512),
        ROWS,
        True,
        (16, 16),
        (512, 32),
        None,
    ),
    "one chunk is staged beside a prefill plan": (Limits(min_rows=2), ROWS, True, (32, 8), (ROWS, 64), (128, 128)),
    "kill switch": (SWITCHED_OFF, ROWS, True, (32, 8), None, (ROWS, 128)),
    "steps no longer than the decode plan": (DEFAULT, 24, True, (24, 8), None, None),
    "nobody plans": (DEFAULT, ROWS, False, None, None, (ROWS, 128)),
    "fewer rows than any plan wants": (Limits(min_rows=20), 16, True, None, None, (16, 16)),
}


@pytest.mark.parametrize("case", WINDOWS.values(), ids=WINDOWS.keys())
def test_windows(case: tuple) -> None:
    limits, most, planned, *expected = case
    served = windows(limits, most, planned)
    named = zip(("decode", "prefill", "parity"), expected, strict=True)
    assert served.all == tuple(Window(name=name, rows=size[0], block=size[1]) for name, size in named if size)


REFUSED = {
    "capacity above a step": (Limits(capacity=4096), ROWS, "CAPACITY=4096: want at most max_num_batched_tokens=3072"),
    "capacity above a step of a decode plan": (Limits(capacity=17), 16, "CAPACITY=17: want at most max_num.*=16"),
    "capacity within the decode plan": (
        Limits(capacity=32),
        ROWS,
        "CAPACITY=32: want more than VLLM_EXL3_TRELLIS_MAX_M=32, or .*TRELLIS=0",
    ),
    "chunk below the window": (
        Limits(min_rows=200, decode_rows=256),
        ROWS,
        "CHUNK=128: want at least 199, the rows below .*MIN_M=200",
    ),
    "fewest above most": (Limits(min_rows=33), ROWS, "MIN_M=33: want at most VLLM_EXL3_TRELLIS_MAX_M=32"),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_planned_is_refused(case: tuple[Limits, int, str]) -> None:
    limits, most, message = case
    for planned in (True, False):
        with pytest.raises(ValueError, match="routed experts cannot be planned: .*" + message):
            windows(limits, most, planned)


def test_all_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(ValueError, match=r"MIN_M=200: .*; .*CAPACITY=4096: .*; .*CHUNK=128: "):
        windows(Limits(min_rows=200, capacity=4096), ROWS, planned=True)


def test_what_the_kill_switch_leaves_out_is_not_asked() -> None:
    limits = Limits(prefill=False, capacity=4096, min_rows=32, chunk=8)
    assert windows(limits, ROWS, planned=True).parity == Window(name="parity", rows=ROWS, block=8)


@pytest.mark.parametrize(
    ("limits", "rows", "remedy"),
    [
        (Limits(min_rows=4), 3, "VLLM_EXL3_TRELLIS_MIN_M to at most 3"),
        (SWITCHED_OFF, 40, "VLLM_EXL3_PREFILL_TRELLIS to 1, or VLLM_EXL3_TRELLIS_MAX_M to at least 40"),
    ],
)
def test_remedy(limits: Limits, rows: int, remedy: str) -> None:
    assert windows(limits, ROWS, planned=True).remedy(rows) == remedy


def test_rows_of_each_window_in_words() -> None:
    def text(limits: Limits) -> dict[str, str]:
        served = windows(limits, ROWS, planned=True)
        return {window.name: served.describe(window.name) for window in served.all}

    assert text(Limits(min_rows=4)) == {
        "decode": "4 to 32 rows, 8 a block",
        "prefill": "33 to 3072 rows, 64 a block",
        "parity": "1 to 3 rows, 128 a block",
    }
    assert text(Limits(min_rows=4, prefill=False))["parity"] == "1 to 3 and 33 to 3072 rows, 128 a block"


NAMES = {
    "VLLM_EXL3_TRELLIS_MIN_M": "min_rows",
    "VLLM_EXL3_TRELLIS_MAX_M": "decode_rows",
    "VLLM_EXL3_TRELLIS_BLOCK_M": "decode_block",
    "VLLM_EXL3_PREFILL_TRELLIS": "prefill",
    "VLLM_EXL3_PREFILL_BLOCK_M": "prefill_block",
    "VLLM_EXL3_PREFILL_CAPACITY": "capacity",
    "VLLM_EXL3_PREFILL_CHUNK": "chunk",
}


def read() -> Limits:
    return Limits.read(SimpleNamespace(**{name: knob() for name, knob in exl3_envs.environment_variables.items()}))


def test_unset_and_blank_variables_are_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in (None, "", "  "):
        for name in NAMES:
            monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
        assert read() == Limits()


@pytest.mark.parametrize(("name", "field"), NAMES.items())
def test_every_variable_is_read(name: str, field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    value = {"prefill": 0}.get(field, 16)
    monkeypatch.setenv(name, str(value))
    assert read() == dataclasses.replace(Limits(), **{field: value})


def test_the_fewest_rows_are_those_of_the_smallest_graph() -> None:
    assert moe_plan.MIN_ROWS == 1
    assert windows(Limits(min_rows=moe_plan.MIN_ROWS), ROWS, planned=True).find(1).name == "decode"


CPU = Device(kind="cpu")
HOPPER = Device(kind="cuda", sm=90, sms=132, smem=232_448)
BLACKWELL = Device(kind="cuda", sm=120, sms=188, smem=101_376)


def provider(name: str, refusal: str = "") -> Recording:
    return Recording(name=name, refusal=refusal)


def query() -> MoeQuery:
    spec = make_spec({shard: [3, 4, 3, 4] for shard in ("w1", "w3", "w2")})
    return query_of(spec, make_layer(spec, 256)[1])


# device, refusing providers, forced, fused -> planned, parity
CHOICES = {
    "native first": (HOPPER, "", None, True, "native", "exllamav3"),
    "b12x first where native is not measured": (BLACKWELL, "", None, True, "b12x", "exllamav3"),
    "the other where one refuses": (HOPPER, "native", None, True, "b12x", "exllamav3"),
    "torch where exllamav3 refuses": (HOPPER, "exllamav3", None, True, "native", "torch"),
    "nobody for the parity path": (HOPPER, "exllamav3 torch", None, True, "native", None),
    "no plans on a CPU": (CPU, "native b12x exllamav3", None, True, None, "torch"),
    "parity path only": (HOPPER, "", None, False, None, "exllamav3"),
    "parity path only, without exllamav3": (HOPPER, "exllamav3", None, False, None, "torch"),
    "b12x forced": (HOPPER, "", "b12x", True, "b12x", "exllamav3"),
    "native forced": (BLACKWELL, "", "native", True, "native", "exllamav3"),
    "exllamav3 forced": (HOPPER, "", "exllamav3", True, None, "exllamav3"),
    "torch forced": (HOPPER, "", "torch", True, None, "torch"),
    "torch forced, parity path only": (HOPPER, "", "torch", False, None, "torch"),
}


@pytest.mark.parametrize("case", CHOICES.values(), ids=CHOICES.keys())
def test_choice(case: tuple) -> None:
    device, refusing, forced, fused, planned, parity = case
    names = ("torch", "b12x", "native", "exllamav3")
    candidates = [provider(name, "cannot" if name in refusing.split() else "") for name in names]
    choice = choose_experts(query(), device, candidates, forced, fused)
    assert choice.planned is next((one for one in candidates if one.name == planned), None)
    assert choice.parity is next((one for one in candidates if one.name == parity), None)
    if parity is None:
        with pytest.raises(NoBackendError, match="parity rows of routed experts: exllamav3: cannot; torch: cannot"):
            choice.of("parity")


@pytest.mark.parametrize(
    ("device", "refusing", "forced", "message"),
    [
        (HOPPER, "native b12x", None, "native: cannot; b12x: cannot; VLLM_EXL3_FUSED=0 runs it, slowly"),
        (HOPPER, "native b12x exllamav3 torch", None, "native: cannot; b12x: cannot; exllamav3: cannot; torch: cannot"),
        (HOPPER, "b12x", "b12x", "b12x: cannot"),
        (CPU, "native", "native", "native: cannot"),
        (HOPPER, "torch", "torch", "torch: cannot"),
        (HOPPER, "", "another", "no provider is called 'another'"),
    ],
    ids=["no plan", "nobody", "forced", "forced on a CPU", "forced parity", "unknown"],
)
def test_a_layer_without_its_plan_stops_the_start(device, refusing, forced, message) -> None:
    names = ("native", "b12x", "exllamav3", "torch")
    candidates = [provider(name, "cannot" if name in refusing.split() else "") for name in names]
    with pytest.raises(NoBackendError, match=f"no EXL3 kernel for 4 experts .* on Device.*: {message}"):
        choose_experts(query(), device, candidates, forced)


def test_why_others_were_passed_over_is_kept() -> None:
    candidates = [provider("native", "too old"), provider("b12x"), provider("torch")]
    choice = choose_experts(query(), HOPPER, candidates)
    assert choice.of("prefill") == (candidates[1], ("native: too old",))
    assert choice.of("parity") == (candidates[2], ())


def test_kernels_differ_by_kind_of_expert_not_by_their_number() -> None:
    def kernels(rates: list[float], **changes: object) -> object:
        spec = make_spec(dict.fromkeys(("w1", "w3", "w2"), rates))
        return kernels_of(query_of(spec, make_layer(spec, 256)[1], **changes))

    assert kernels([3, 4, 3, 4]) == kernels([4, 4, 4, 3, 3]) == kernels([3, 4, 3, 4], max_rows=7)
    assert kernels([3, 4]) != kernels([3, 3])
    assert kernels([3, 4]) != kernels([3, 4], io_dtype="bfloat16")
