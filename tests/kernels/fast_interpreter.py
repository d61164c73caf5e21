"""Makes Triton's interpreter faster, which works out the same things anew for each of a million operations."""

import inspect
from typing import Any

import numpy as np
from triton.language import core, semantic
from triton.runtime import interpreter


def remember_types() -> None:
    """Half of the time of a kernel goes into types and shapes of its values. What a kernel computes stays as it is."""
    _remember_shapes()
    _remember_number_types()
    _compare_names_of_types()
    _leave_equal_shapes_alone()


def patch_the_language_once() -> None:
    """The interpreter replaces the functions of triton.language for every function that a kernel calls, and puts them
    back after each launch, which takes half of its time. Nothing else uses them here, so replacing them once will do.
    """
    patch = interpreter._patch_lang
    patched: set[tuple[bool, bool]] = set()
    seen: set[int] = set()  # globals of modules, which stay

    class Kept:
        def restore(self) -> None:
            pass

    kept = Kept()

    def once(fn: Any) -> Kept:
        if id(fn.__globals__) not in seen:
            modules = [value for value in fn.__globals__.values() if inspect.ismodule(value)]
            languages = (interpreter.tl in modules, interpreter.tl.core in modules)
            if languages not in patched:
                patched.add(languages)
                patch(fn)
            seen.add(id(fn.__globals__))
        return kept

    interpreter._patch_lang = once


def _remember_shapes() -> None:
    """Each result checks its shape, wraps its numbers and writes down its name."""
    block_init, tensor_init = core.block_type.__init__, core.tensor.__init__
    blocks: dict[tuple[int, ...], Any] = {}
    tensors: dict[tuple[int, ...], dict[str, Any]] = {}

    def init_block(self: Any, element_ty: Any, shape: Any) -> None:
        key = tuple([one.value if isinstance(one, core.constexpr) else one for one in shape])
        if key not in blocks:
            block_init(self, element_ty, shape)
            blocks[key] = self.shape, self.numel
        self.element_ty = element_ty
        self.shape, self.numel = blocks[key]

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        key = tuple(type.shape.values) if type.is_block() else ()
        if key not in tensors:
            tensor_init(self, handle, type)
            tensors[key] = {"shape": self.shape, "numel": self.numel}
        self.__dict__.update(tensors[key], handle=handle, type=type, dtype=type.scalar)

    core.block_type.__init__ = init_block
    core.block_type.name = property(lambda self: f"<{self.shape}, {self.element_ty}>", lambda self, value: None)
    core.tensor.__init__ = init_tensor


def _remember_number_types() -> None:
    find = interpreter._get_np_dtype
    found: dict[str, np.dtype[Any]] = {}

    def number_type(type: Any) -> np.dtype[Any]:
        scalar = type.scalar
        if scalar.name not in found:
            found[scalar.name] = find(scalar)
        return found[scalar.name]

    interpreter._get_np_dtype = number_type


def _compare_names_of_types() -> None:
    """Else each comparison first looks whether the other is a constant in a box, or a list of some."""
    equal = core.dtype.__eq__

    def same(self: Any, other: Any) -> bool:
        return self.name == other.name if isinstance(other, core.dtype) else equal(self, other)

    core.dtype.__eq__ = same


def _leave_equal_shapes_alone() -> None:
    broadcast = semantic.TritonSemantic.broadcast_impl_value

    def fitted(self: Any, lhs: Any, rhs: Any) -> Any:
        one, other = lhs.type, rhs.type
        if one.is_block() and other.is_block() and one.shape.values == other.shape.values:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    semantic.TritonSemantic.broadcast_impl_value = fitted
