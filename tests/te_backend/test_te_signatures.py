"""Every call that the adapter makes to TransformerEngine binds against the signatures of 2.20.2.

The calls are read from the source, so none is forgotten: a call to a TE name without an entry in
`CALLEES` fails, and so does a keyword that TE does not have.
"""

import ast
import inspect
import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.layouts import ROOT
from tests.support.ranks import Ranks

ADAPTER = ROOT / "megafp8/layers/transformer_engine"
STORED = json.loads((ROOT / "tests/support/te_cpu/signatures.json").read_text())
CORE = "pytorch.attention.dot_product_attention.dot_product_attention"
# Source of the callee -> key of the stored signature.
CALLEES = {
    "te.autocast": "pytorch.quantization:autocast.__init__",
    "te.is_fp8_available": "pytorch.quantization:is_fp8_available",
    "te.is_mxfp8_available": "pytorch.quantization:is_mxfp8_available",
    "te.is_fp8_block_scaling_available": "pytorch.quantization:is_fp8_block_scaling_available",
    "te.initialize_ub": "pytorch.module.base:initialize_ub",
    "te.destroy_ub": "pytorch.module.base:destroy_ub",
    "TeLinear.super().__init__": "pytorch.module.linear:Linear.__init__",
    "TeLinear.super().forward": "pytorch.module.linear:Linear.forward",
    "TeNormLinear.super().__init__": "pytorch.module.layernorm_linear:LayerNormLinear.__init__",
    "TeNormLinear.super().forward": "pytorch.module.layernorm_linear:LayerNormLinear.forward",
    "TeCore.super().__init__": f"{CORE}:DotProductAttention.__init__",
    "TeCore.super().forward": f"{CORE}:DotProductAttention.forward",
    "FP8GlobalStateManager.is_fp8_enabled": (
        "pytorch.quantization:FP8GlobalStateManager.is_fp8_enabled"
    ),
}
# Called as well, and not among the stored signatures: checked on the real classes in a rank below.
LIVE = {
    "DeferredWeightStore.super().__init__",
    "FP8GlobalStateManager.get_buffer_info",
    "Float8Quantizer",
    "Float8Tensor",
    "Float8Tensor.make_like",
    "is_ub_initialized",
    "RegistryQuantizers.super().set_meta_tensor",
}
RECIPES = {"DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling", "MXFP8BlockScaling"}
# Dataclasses of recipes, whose fields are stored.
PARAMETERS = {"QParams", "MMParams"}


def signature(entry: dict[str, Any]) -> inspect.Signature:
    kinds = {kind.name: kind for kind in inspect._ParameterKind}
    parameters = [
        inspect.Parameter(
            item["name"], kinds[item["kind"]], default=item.get("default", inspect.Parameter.empty)
        )
        for item in entry["params"]
        if item["name"] not in ("self", "cls")
    ]
    return inspect.Signature(parameters)


def bind(callee: str, call: ast.Call) -> None:
    """Raise TypeError if the call does not fit the stored signature."""
    assert not any(keyword.arg is None for keyword in call.keywords), "** hides keywords"
    names = {str(keyword.arg): None for keyword in call.keywords}
    signature(STORED["callables"][CALLEES[callee]]).bind(*[None] * len(call.args), **names)


def te_calls(source: str) -> Iterator[tuple[str, ast.Call]]:
    """Yield (callee, call) for calls of names that come from TE, `super()` of TE classes too."""
    tree = ast.parse(source)
    names = {"te"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
            "transformer_engine"
        ):
            names |= {alias.asname or alias.name for alias in node.names}
    owners = {
        child: owner.name
        for owner in ast.walk(tree)
        if isinstance(owner, ast.ClassDef)
        and any(ast.unparse(base).split(".")[0] in names for base in owner.bases)
        for child in ast.walk(owner)
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        text = ast.unparse(node.func)
        if text.startswith("super().") and node in owners:
            yield f"{owners[node]}.{text}", node
        elif text.split(".")[0] in names:
            yield text, node


def test_every_call_binds() -> None:
    seen = set()
    for path in sorted(ADAPTER.glob("*.py")):
        for callee, call in te_calls(path.read_text(encoding="utf-8")):
            listed = callee in CALLEES or callee in LIVE or callee in PARAMETERS
            assert listed, f"{path.name}: {callee} is not listed"
            seen.add(callee)
            if callee in CALLEES:
                bind(callee, call)
            if callee in PARAMETERS:  # unknown keywords would be dropped
                fields = {field["name"] for field in STORED["recipes"][callee]["fields"]}
                assert not call.args and {keyword.arg for keyword in call.keywords} <= fields
    assert seen == set(CALLEES) | LIVE | PARAMETERS


def test_recipe_fields_are_those_of_the_wheel() -> None:
    source = (ADAPTER / "recipes.py").read_text(encoding="utf-8")
    calls = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "checked"
    ]
    assert {ast.unparse(call.args[0]) for call in calls} == RECIPES
    for call in calls:
        fields = {field["name"] for field in STORED["recipes"][ast.unparse(call.args[0])]["fields"]}
        used = {str(keyword.arg) for keyword in call.keywords}
        assert used <= fields, used - fields
        # Nothing is left to TE's defaults, which come from the environment, but what has no effect
        # in our use of it.
        assert fields - used <= {"scaling_factor_compute_algo"}, fields - used


@pytest.mark.parametrize(
    "source",
    [
        "te.autocast(enabled=True, fp8_recipe=r)",
        "te.autocast(True, False, None, None, False, 1)",
        "te.is_fp8_available(reason=True)",
        "te.initialize_ub(shape=s, tp_size=2, quantization_mode=[])",
    ],
)
def test_a_wrong_keyword_fails(source: str) -> None:
    ((callee, call),) = te_calls(source)
    with pytest.raises(TypeError):
        bind(callee, call)


def test_a_call_of_super_is_seen() -> None:
    source = "class TeLinear(te.Linear):\n    def f(self):\n        super().forward(1, first=2)"
    ((callee, call),) = te_calls(source)
    assert callee == "TeLinear.super().forward"
    with pytest.raises(TypeError):
        bind(callee, call)


def live_signatures() -> dict[str, list[str]]:
    from tests.support import te_cpu

    te = te_cpu.load()
    from transformer_engine.pytorch.module._common import WeightGradStore
    from transformer_engine.pytorch.module.base import is_ub_initialized
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager
    from transformer_engine.pytorch.quantized_tensor import QuantizedTensor
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Quantizer, Float8Tensor
    from transformer_engine.pytorch.tensor.storage.float8_tensor_storage import Float8TensorStorage

    found = {
        "te.autocast": te.autocast.__init__,
        "te.is_fp8_available": te.is_fp8_available,
        "te.is_mxfp8_available": te.is_mxfp8_available,
        "te.is_fp8_block_scaling_available": te.is_fp8_block_scaling_available,
        "te.initialize_ub": te.initialize_ub,
        "te.destroy_ub": te.destroy_ub,
        "TeLinear.super().__init__": te.Linear.__init__,
        "TeLinear.super().forward": te.Linear.forward,
        "TeNormLinear.super().__init__": te.LayerNormLinear.__init__,
        "TeNormLinear.super().forward": te.LayerNormLinear.forward,
        "TeCore.super().__init__": te.DotProductAttention.__init__,
        "TeCore.super().forward": te.DotProductAttention.forward,
        "DeferredWeightStore.super().__init__": WeightGradStore.__init__,
        "DeferredWeightStore.put": WeightGradStore.put,
        "FP8GlobalStateManager.is_fp8_enabled": FP8GlobalStateManager.is_fp8_enabled,
        "FP8GlobalStateManager.get_buffer_info": FP8GlobalStateManager.get_buffer_info,
        "Float8Quantizer": Float8Quantizer.__init__,
        "Float8TensorStorage": Float8TensorStorage.__new__,
        "QuantizedTensor": QuantizedTensor.__new__,
        "Float8Tensor.make_like": Float8Tensor.make_like,
        "is_ub_initialized": is_ub_initialized,
        "RegistryQuantizers.super().set_meta_tensor": te.Linear.set_meta_tensor,
    }
    return {
        name: [p for p in inspect.signature(function).parameters if p != "self"]
        for name, function in found.items()
    }


def test_installed_wheel_has_the_stored_signatures(te_ranks: Ranks) -> None:
    (live,) = te_ranks.run(live_signatures, world_size=1)
    for callee, key in CALLEES.items():
        stored = [item["name"] for item in STORED["callables"][key]["params"]]
        assert live[callee] == [name for name in stored if name not in ("self", "cls")], callee
    assert live["Float8Quantizer"][:3] == ["scale", "amax", "fp8_dtype"]
    # `Float8Tensor` is built by these two; keywords that neither knows are lost.
    tensor = {"data", "fp8_scale_inv", "fp8_dtype", "quantizer"}
    assert tensor <= set(live["Float8TensorStorage"])
    assert {"shape", "dtype", "device"} <= set(live["QuantizedTensor"])
    assert live["Float8Tensor.make_like"][0] == "tensor" and live["is_ub_initialized"] == []
    assert live["RegistryQuantizers.super().set_meta_tensor"] == ["fwd", "recipe"]
    assert live["FP8GlobalStateManager.get_buffer_info"] == []
    assert live["DeferredWeightStore.super().__init__"][0] == "delay_wgrad_compute"
    assert live["DeferredWeightStore.put"] == ["tensor_list", "func"]  # TE calls ours
