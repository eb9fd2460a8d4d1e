"""Activation formats from what checkpoints declare, and users' settings, as used by the adapters of all engines."""

import types

import nvfp4_moe
import pytest
from nvfp4_moe import _declared
from nvfp4_moe import _settings as settings
from nvfp4_moe._declared import Declared, choose_activations, declared_by_arguments, declared_by_modelopt, most_precise

SIZES = {"num_experts": 8, "top_k": 2, "hidden_size": 64, "intermediate_size": 32}
FP4 = {"num_bits": 4, "type": "float", "group_size": 16}
FP8 = {"num_bits": 8, "type": "float"}
RULE = {  # the default format by declared format and backend
    "bf16": {"sm100": "bf16", "cpu": "bf16"},
    "nvfp4": {"sm100": "nvfp4", "sm90": "bf16", "cuda": "bf16", "cpu": "int8_block"},
    "fp8": {"sm90": "fp8", "cpu": "fp8", "sm100": "bf16"},
}


@pytest.mark.parametrize("declared", RULE)
def test_auto_is_never_less_precise_than_declared(monkeypatch, declared):
    for backend, expected in RULE[declared].items():
        for passed in (True, False):  # a failed self-check moves the choice to the next backend, and keeps the format
            rows = [
                {"supported": False, "chosen": False, "backend": "reference"},
                {"supported": True, "chosen": passed, "backend": backend},
                {"supported": True, "chosen": not passed, "backend": "cuda"},
            ]
            monkeypatch.setattr(_declared, "explain", lambda options, backend, device, rows=rows: rows)
            found, because = choose_activations(SIZES, "cuda:0", "auto", Declared(declared, "quant_algo X"))
            assert found == expected and because.endswith("(quant_algo X)")
            rule = nvfp4_moe.choose_activation_format(declared, backend)
            assert rule == (found, because.removesuffix(" (quant_algo X)"))


@pytest.mark.parametrize(
    ("options", "device", "asked", "declared", "expected", "why"),
    [
        (SIZES, "cpu", "auto", "nvfp4", "int8_block", "more precise and fast on a host (w)"),
        (SIZES, "cpu", "bf16", "bf16", "bf16", "it was asked for"),
        (SIZES, "cpu", "nvfp4", "bf16", "nvfp4", "it was asked for, less precise than the declared bf16 (w)"),
        # Options of no layer: the refusal names them.
        (SIZES | {"intermediate_size": 40}, "cpu", "auto", "nvfp4", "nvfp4", "it is declared (w)"),
        (SIZES, "cuda:99", "auto", "nvfp4", "nvfp4", "it is declared (w)"),
    ],
)
def test_a_format_is_chosen_for_the_backend_of_the_device_or_as_it_is_asked_for(
    options, device, asked, declared, expected, why
):
    found, said = choose_activations(options, device, asked, Declared(declared, "w"))
    assert found == expected and (said == why if asked != "auto" else said.endswith(why))


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        (None, "bf16"),
        (FP4, "nvfp4"),
        ({"num_bits": 8, "type": "int"}, "bf16"),
        ({"num_bits": 16, "type": "float"}, "bf16"),
        (types.SimpleNamespace(num_bits=4, type=types.SimpleNamespace(value="float")), "nvfp4"),
        (types.SimpleNamespace(num_bits=8, type="float"), "fp8"),
    ],
    ids=str,
)
def test_input_activations(inputs, expected):
    assert declared_by_arguments(inputs, "group_0").format == expected


@pytest.mark.parametrize(
    ("algorithm", "groups", "expected"),
    [
        ("NVFP4", None, "nvfp4"),
        ("W4A16_NVFP4", None, "bf16"),
        ("W4A8_NVFP4_FP8", None, "fp8"),
        ("NVFP4", {"a": {"weights": FP4}}, "bf16"),
        ("NVFP4", {"a": {"weights": FP4, "input_activations": FP8}}, "fp8"),
        ("NVFP4", {"a": {"weights": FP8}, "b": {"weights": FP4, "input_activations": FP4}}, "nvfp4"),
        ("NVFP4", {"a": {"weights": FP4, "input_activations": FP4}, "b": {"weights": FP4}}, "bf16"),
    ],
    ids=str,
)
def test_modelopt(algorithm, groups, expected):
    assert declared_by_modelopt(algorithm, groups).format == expected


def test_quantized_layers_are_read_matrix_by_matrix_and_the_most_precise_counts():
    assert most_precise([Declared("nvfp4", "a"), Declared("bf16", "b"), Declared("fp8", "c")]) == Declared("bf16", "b")

    def named(**algorithms):
        return {name.replace("__", "."): {"quant_algo": algo} for name, algo in algorithms.items()}

    below = named(m__0__experts__0__up="nvfp4", m__0__experts__1__down="FP8", m__1__experts__0__up="FP8")
    below |= named(m__0__experts_b__up="FP8")  # another module's
    ask = _declared.modelopt_algorithms
    assert ask(below, ("m.0.experts",), ("up",)) == {"m.0.experts.0.up": "NVFP4", "m.0.experts.1.down": "FP8"}
    assert ask(named(m__0__experts="NVFP4"), ("m.0.experts",), ()) == {"m.0.experts": "NVFP4"}
    beside = named(m__0__up="NVFP4", m__0__gate="FP8")
    assert ask(beside, ("m.0.experts",), ("up", "down")) == {"m.0.up": "NVFP4"}
    known = {"NVFP4", "W4A16_NVFP4"}
    assert _declared.mixture({"a": "NVFP4", "b": "W4A16_NVFP4"}, known) is None
    said = _declared.mixture({"a": "NVFP4", "b": "NVFP4", "c": "FP8"}, known)
    assert said == "matrices in different formats, expected one: a: NVFP4; c: FP8"


def test_a_layer_of_matrices_in_several_formats_is_refused_with_the_formats():
    found = _declared.declared_by_algorithms({"a": "NVFP4", "b": "W4A16_NVFP4"})
    assert found == Declared("bf16", "quant_algo W4A16_NVFP4")
    refused = _declared.declared_by_algorithms({"a": "NVFP4", "b": "FP8"})
    assert isinstance(refused, _declared.Refused) and str(refused).endswith("expected one: a: NVFP4; b: FP8")

    def by_schemes(**schemes):
        named = {f"experts.0.{name}": scheme for name, scheme in schemes.items()}
        return _declared.declared_by_schemes(named, lambda weights: weights.num_bits == 4)

    four, eight = types.SimpleNamespace(num_bits=4), types.SimpleNamespace(num_bits=8, type="float")
    nvfp4 = {"weights": four, "input_activations": FP4}
    assert by_schemes(up=nvfp4, down=nvfp4) == Declared("nvfp4", "up: input_activations of 4 bits, float")
    assert by_schemes(up=nvfp4, down={"weights": four}).format == "bf16", "the most precise one"
    assert by_schemes(up={}, down={"weights": eight}) is None
    refused = by_schemes(up=nvfp4, gate={"weights": eight}, down={})
    assert isinstance(refused, _declared.Refused)
    words = "experts.0.up: NVFP4; experts.0.gate: 8 bits, float; experts.0.down: not quantized"
    assert str(refused).endswith(words)


def test_settings_come_from_the_engine_s_configuration_then_the_environment():
    assert settings.read_settings({}, {}) == settings.Settings("auto", "auto", "auto", "auto")
    environ = {"NVFP4_MOE_MODE": "1", "NVFP4_MOE_ACTIVATIONS": "nvfp4", "NVFP4_MOE_EXCHANGE": "peers"}
    assert settings.read_settings(None, environ) == settings.Settings("1", "nvfp4", exchange="peers")
    given = {"mode": 0, "activations": "bf16", "exchange": "engine"}
    assert settings.read_settings(given, environ) == settings.Settings("0", "bf16", exchange="engine")


@pytest.mark.parametrize(
    ("given", "environ", "message"),
    [
        ({}, {"NVFP4_MOE_MODE": "yes"}, "NVFP4_MOE_MODE: expected one of 0, auto, 1, got 'yes'"),
        ({}, {"NVFP4_MOE": "0"}, "NVFP4_MOE: expected NVFP4_MOE_MODE, its new name, got NVFP4_MOE=0"),
        ({"activation": "bf16"}, {}, "expected the keys mode, activations, router and exchange, got activation"),
    ],
)
def test_settings_that_mean_nothing_are_named(given, environ, message):
    with pytest.raises(nvfp4_moe.InvalidArgument, match=message):
        settings.read_settings(given, environ)
