"""Methods of linear layers: two that exist only here run every family, and no matrix product passes them by."""

import ast
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import weft
from tests.models import tiny
from tests.models.conftest import Saved
from tests.models.test_abridged import called
from tests.models.test_logits import CPU, load
from weft.errors import ModelError
from weft.kernels import ops
from weft.models import CausalLM, Dtypes, load_config, load_model
from weft.models.linear import ChooseMethod, Linear, LinearMethod, ParameterSource, PlainLinear, choose_method

MODELS = Path(weft.__file__).parent / "models"
METHODS = {"LinearMethod", "PlainLinear"}
PRODUCTS = {"linear", "gated_linear", "linear_into", "Linear", "Bilinear", "bilinear", "matvec", "matvec_silu", "@"}
PRODUCTS |= {"mm", "bmm", "matmul", "addmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "inner", "einsum", "tensordot"}
INT8 = Dtypes(torch.int8, torch.float32, torch.float32)
ROUNDING = (
    0.06  # standard deviations of the logits: the largest median difference that int8 makes (0.047 in six layers)
)


def quantized(weight: Tensor) -> tuple[Tensor, Tensor]:
    """int8 numbers, and a float32 scale for each row."""
    scales = weight.float().abs().amax(dim=-1, keepdim=True) / 127
    return (weight.float() / scales).round().to(torch.int8), scales


def rounded(weight: Tensor) -> Tensor:
    numbers, scales = quantized(weight)
    return (numbers * scales).to(weight.dtype)


class Int8(LinearMethod):
    """int8 weights, made from a floating-point checkpoint when it is loaded."""

    def __init__(self, dtypes: Dtypes) -> None:
        assert dtypes.weights == torch.int8
        self.plain = PlainLinear(dtypes.activations)

    def create(self, layer: Linear) -> None:
        self.plain.create(layer)

    def finish(self, layer: Linear) -> None:
        numbers, scales = quantized(layer.weight)
        del layer.weight
        layer.numbers = nn.Parameter(numbers, requires_grad=False)
        layer.scales = nn.Parameter(scales, requires_grad=False)

    def apply(self, layer: Linear, x: Tensor, out: Tensor | None) -> Tensor:
        weight = layer.get_parameter("numbers") * layer.get_parameter("scales")
        y = F.linear(x, weight.to(x.dtype), layer.bias)
        return y if out is None else out.copy_(y)

    def expert(self, layer: Linear, index: int, x: Tensor) -> Tensor:
        weight = layer.get_parameter("numbers")[index] * layer.get_parameter("scales")[index]
        return F.linear(x, weight.to(x.dtype))


PUBLISHED = {"numbers": "weight_packed", "scales": "weight_scale", "bias": "bias"}


class Packed(Int8):
    """int8 weights that the checkpoint already has, under other names than our parameters."""

    def create(self, layer: Linear) -> None:
        shape = (layer.rows,) if layer.experts is None else (layer.experts, layer.rows)
        layer.numbers = nn.Parameter(torch.empty((*shape, layer.inputs), dtype=torch.int8), requires_grad=False)
        layer.scales = nn.Parameter(torch.empty((*shape, 1)), requires_grad=False)
        layer.bias = nn.Parameter(torch.empty(shape), requires_grad=False) if layer.has_bias else None

    def parameter_sources(self, layer: Linear, name: str) -> Iterator[ParameterSource]:
        for key, parameter in layer.named_parameters(recurse=False):
            parts = {f"{part}.{PUBLISHED[key]}": view for part, view in layer.views(parameter).items()}
            yield ParameterSource(f"{name}.{PUBLISHED[key]}", parameter, parts)

    def finish(self, layer: Linear) -> None:
        pass


class Half(PlainLinear):
    """bfloat16 weights that are widened for the product."""

    def apply(self, layer: Linear, x: Tensor, out: Tensor | None) -> Tensor:
        return F.linear(x, layer.weight.to(x.dtype))


def every(method: type[Int8], name: str, layer: Linear, dtypes: Dtypes) -> LinearMethod:
    return method(dtypes)


def untied(method: type[Int8], name: str, layer: Linear, dtypes: Dtypes) -> LinearMethod:
    return PlainLinear(dtypes.activations) if layer.is_tied else method(dtypes)


def load_int8(path: Path, choose: ChooseMethod, dtypes: Dtypes = INT8, **options: Any) -> CausalLM:
    limits: dict[str, Any] = {"device": CPU, "max_model_len": tiny.CONTEXT}
    return load_model(path, load_config(path), dtypes=dtypes, choose=choose, **limits, **options)


def is_of_a_linear(name: str, tensor: Tensor) -> bool:
    return tensor.dim() == 2 and "embed_tokens" not in name


def copy_config(source: Path, target: Path, **changes: Any) -> Path:
    raw = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**raw, **changes}))
    return target


def write_rounded(source: Path, target: Path, dtype: torch.dtype = torch.float32) -> Path:
    """A copy of a saved model with rounded matrices. A tied head becomes one of its own: embeddings are not rounded."""
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(source / "model.safetensors").items()}
    tensors.setdefault("lm_head.weight", tensors["model.embed_tokens.weight"])
    tensors = {name: rounded(one) if is_of_a_linear(name, one) else one for name, one in tensors.items()}
    save_file(tensors, target / "model.safetensors")
    return copy_config(source, target, tie_word_embeddings=False)


def write_packed(source: Path, target: Path) -> Path:
    """A copy of a saved model with int8 matrices and their scales."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if is_of_a_linear(name, tensor):
            tensors[f"{name}_packed"], tensors[f"{name}_scale"] = quantized(tensor)
        else:
            tensors[name] = tensor
    save_file(tensors, target / "model.safetensors")
    return copy_config(source, target)


def linears(model: CausalLM) -> list[Linear]:
    return [module for module in model.modules() if isinstance(module, Linear)]


def logits(model: CausalLM) -> Tensor:
    return torch.cat(tiny.weft_logits(model, tiny.prompt(40), tiny.prompt(17, seed=1)))


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_int8_weights_give_the_logits_of_rounded_weights(family: str, saved: Saved, tmp_path: Path) -> None:
    _, path = saved(family)
    model = load_int8(path, partial(every, Int8))
    for layer in linears(model):
        assert {name for name, _ in layer.named_parameters()} - {"bias"} == {"numbers", "scales"}
        assert layer.get_parameter("numbers").dtype == torch.int8
    found, exact = logits(model), logits(load(path))
    assert torch.equal(found, logits(load(write_rounded(path, tmp_path))))
    assert 0 < (found - exact).abs().median() < ROUNDING * exact.std()


def test_the_types_of_weights_and_activations_differ(saved: Saved, tmp_path: Path) -> None:
    path = saved("qwen3-moe-mixed")[1]
    model = load_int8(path, partial(every, Int8), Dtypes(torch.int8, torch.bfloat16, torch.bfloat16))
    assert (model.logits_dtype, model.norm.weight.dtype, model.embed_tokens.weight.dtype) == (torch.bfloat16,) * 3
    plain = load(write_rounded(path, tmp_path, torch.bfloat16), dtype=torch.bfloat16)
    assert torch.equal(logits(model), logits(plain))
    hidden = torch.randn(3, plain.config.hidden_size).bfloat16()
    written = torch.empty(3, tiny.VOCAB, dtype=torch.bfloat16)
    with torch.no_grad():
        assert model.raw_logits(hidden, written) is written
        assert torch.equal(written, plain.raw_logits(hidden))


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a_method_names_what_it_reads(family: str, saved: Saved, tmp_path: Path) -> None:
    path = saved(family)[1]
    model = load_int8(write_packed(path, tmp_path), partial(untied, Packed))
    assert torch.equal(logits(model), logits(load_int8(path, partial(untied, Int8))))


def test_errors_name_the_tensors_of_a_method(saved: Saved, tmp_path: Path) -> None:
    write_packed(saved("llama")[1], tmp_path)
    file, name = tmp_path / "model.safetensors", "model.layers.1.mlp.up_proj.weight_packed"
    tensors = load_file(file)

    def message(**changes: Tensor) -> str:
        save_file({**{key: one for key, one in tensors.items() if key != name}, **changes}, file)
        with pytest.raises(ModelError) as caught:
            load_int8(tmp_path, partial(every, Packed))
        return str(caught.value)

    whole = "model.layers.1.mlp.gate_up_proj.weight_packed"
    assert message() == f"{tmp_path}: tensor {name} is missing (nor {whole})"
    assert f"tensor {name} has shape [96, 8], but config.json asks for [96, 64]" in message(
        **{name: tensors[name][:, :8].contiguous()}
    )
    assert f"tensor {name} is F32; only integers are supported" in message(**{name: tensors[name].float()})


def test_dummy_weights_are_finished_too(saved: Saved) -> None:
    for family in ("qwen3-moe", "gemma3"):
        model = load_int8(saved(family)[1], partial(every, Int8), load_format="dummy")
        assert all(layer.get_parameter("numbers").dtype == torch.int8 for layer in linears(model))
        assert 0.3 < logits(model).std() < 10


def test_a_method_is_chosen_by_name_and_layer(saved: Saved) -> None:
    asked: dict[str, Linear] = {}

    def choose(name: str, layer: Linear, dtypes: Dtypes) -> LinearMethod:
        asked[name] = layer
        return choose_method(name, layer, dtypes)

    dtypes = Dtypes.of(torch.float32)
    model = load_int8(saved("qwen3-moe-mixed")[1], choose, dtypes)
    assert list(asked.values()) == linears(model)
    mlp, sparse = "model.layers.0.mlp", "model.layers.1.mlp"
    dense = {"model.layers.0.self_attn.qkv_proj", f"{mlp}.gate_up_proj", f"{mlp}.down_proj", "lm_head"}
    assert asked.keys() >= dense | {f"{sparse}.gate", f"{sparse}.experts.gate_up_proj", f"{sparse}.experts.down_proj"}
    assert [name for name, layer in asked.items() if layer.is_router] == [f"{sparse}.gate", "model.layers.2.mlp.gate"]
    assert all(type(layer.method) is PlainLinear for layer in linears(model))
    load_int8(saved("llama-tied")[1], choose, dtypes)
    assert asked["lm_head"].is_tied


def test_a_tied_head_shares_the_memory_of_the_embedding(saved: Saved) -> None:
    model = load(saved("llama-tied")[1])
    assert model.lm_head.weight.data_ptr() == model.embed_tokens.weight.data_ptr()
    assert not list(model.lm_head.parameters())


def test_layers_of_different_methods_are_not_repetitions(saved: Saved) -> None:
    def choose(name: str, layer: Linear, dtypes: Dtypes) -> LinearMethod:
        return Half(torch.bfloat16) if name == "model.layers.3.self_attn.o_proj" else PlainLinear(dtypes.weights)

    model = load_int8(saved("llama-deep")[1], choose, Dtypes.of(torch.float32))
    with model.abridged():
        assert [params.layer for params in called(model)] == [0, 1, 3, 5]


def test_the_engine_runs_any_method(saved: Saved, tmp_path: Path) -> None:
    path = saved("qwen3-moe")[1]
    prompts = [tiny.prompt(length, length).tolist() for length in (3, 30)]
    params = weft.SamplingParams(temperature=0, max_tokens=16)
    options: dict[str, Any] = {"dtype": "float32", "max_model_len": 128, "kv_cache_memory_bytes": 1 << 20}
    with weft.LLM(path, **options) as int8, weft.LLM(write_rounded(path, tmp_path), **options) as plain:
        int8.engine.loop.executor.model = load_int8(path, partial(every, Int8))  # type: ignore[attr-defined]
        found, expected = (
            [result.token_ids for result in llm.generate(prompts, params, progress=False)] for llm in (int8, plain)
        )
    assert found == expected


def test_the_engine_stores_keys_and_values_in_their_type(saved: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved("llama")[1]

    def half_cache(cls: type[Dtypes], dtype: torch.dtype) -> Dtypes:
        return cls(dtype, dtype, torch.bfloat16)

    def blocks(dtype: torch.dtype) -> int:
        with weft.LLM(path, dtype="float32", kv_cache_memory_bytes=1 << 20) as llm:
            loop = llm.engine.loop
            assert loop.executor.kv.k[0].dtype == dtype  # type: ignore[attr-defined]
            return loop.scheduler.num_blocks

    wide = blocks(torch.float32)
    monkeypatch.setattr(Dtypes, "of", classmethod(half_cache))
    assert blocks(torch.bfloat16) == 2 * wide


def test_names_of_types() -> None:
    half, wide = torch.bfloat16, torch.float32
    assert Dtypes.of(half).name == "bfloat16"
    mixed = [Dtypes(half, half, wide), Dtypes(half, wide, half), Dtypes(wide, half, half), Dtypes(wide, half, wide)]
    assert mixed[0].name == "bfloat16-bfloat16-float32"
    assert len({dtypes.name for dtypes in mixed}) == len(mixed)


def test_routers_and_experts_run_in_the_library(saved: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    """And all other products in weft's kernels, where it has one."""
    model = load(saved("qwen3-moe-mixed")[1])
    ours: list[int] = []

    def note(function: str, at: int) -> None:
        before = getattr(ops, function)

        def noted(*arguments: Any) -> Tensor:
            ours.append(arguments[at].data_ptr())
            return before(*arguments)

        monkeypatch.setattr(ops, function, noted)

    note("linear", 1)
    note("linear_into", 2)
    logits(model)
    model.raw_logits(torch.zeros(1, model.config.hidden_size), torch.empty(1, tiny.VOCAB))
    expected = [layer for layer in linears(model) if not layer.is_router and layer.experts is None]
    assert set(ours) == {layer.weight.data_ptr() for layer in expected}
    assert len(ours) == len(expected) + 1


def products(source: str) -> tuple[set[str], set[str]]:
    """Names of matrix products in a module: inside classes that derive from LinearMethod, and outside."""
    inside: set[str] = set()
    outside: set[str] = set()

    def visit(node: ast.AST, is_method: bool) -> None:
        names: set[str] = set()
        if isinstance(node, ast.ClassDef):
            is_method = any(isinstance(base, ast.Name) and base.id in METHODS for base in node.bases)
        elif isinstance(node, ast.Attribute):
            names = {node.attr}
        elif isinstance(node, ast.MatMult):
            names = {"@"}
        elif isinstance(node, ast.ImportFrom) and node.module != "weft.models.linear":
            names = {alias.name for alias in node.names}
        (inside if is_method else outside).update(names & PRODUCTS)
        for child in ast.iter_child_nodes(node):
            visit(child, is_method)

    visit(ast.parse(source), False)
    return inside, outside


def test_every_matrix_product_is_one_of_a_method() -> None:
    found = {path.name: products(path.read_text()) for path in MODELS.glob("*.py")}
    assert {name: outside for name, (_, outside) in found.items() if outside} == {}
    assert {name: inside for name, (inside, _) in found.items() if inside} == {
        "linear.py": {"linear", "linear_into", "gated_linear"}
    }


@pytest.mark.parametrize(
    "line",
    [
        "x = F.linear(x, w)",
        "y = ops.linear(x, w)",
        "head = nn.Linear(1, 2)",
        "class A(nn.Linear): pass",
        "f = torch.matmul",
        "def f(self): return x @ self.w",
        "x @= w",
        "from torch.nn.functional import linear",
        "from torch.nn import Linear",
        "class PlainLinear(nn.Module):\n    def f(self): return F.linear(x, w)",
    ],
)
def test_the_search_finds_a_product(line: str) -> None:
    assert products(line)[1]
