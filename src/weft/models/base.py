"""CausalLM: the model that the engine runs. A model family is a subclass that builds the layers."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.kernels.attention import Attend
from weft.models.config import ModelConfig
from weft.models.layers import Attention, RMSNorm, SparseMLP, wide
from weft.models.linear import ChooseMethod, Dtypes, Linear, ParameterSource, choose_method
from weft.models.rope import Rope


class CausalLM(nn.Module):
    """Embedding, decoder layers, final norm and head, for inference. Built without weights; weights.py loads them."""

    norm_type: ClassVar[type[RMSNorm]] = RMSNorm

    @staticmethod
    def modernise(raw: dict[str, Any]) -> dict[str, Any]:
        """config.json with the family's defaults, old spellings rewritten, and keys that it does not know removed."""
        return raw

    def __init__(self, config: ModelConfig, dtypes: Dtypes, choose: ChooseMethod = choose_method) -> None:
        super().__init__()
        self.config, self.dtypes = config, dtypes
        vocab, hidden = config.vocab_size, config.hidden_size
        # From a tensor: the usual constructor draws random values, which on the meta device imports the compiler.
        self.embed_tokens = nn.Embedding(vocab, hidden, _weight=torch.empty(vocab, hidden))
        self.layers = nn.ModuleList(self.build_layer(config, index) for index in range(config.num_layers))
        self._active_layers = list(self.layers)  # of a forward pass: all, except in `abridged`
        self.norm = self.norm_type(config.hidden_size, config.rms_norm_eps)
        self.lm_head = Linear(hidden, {"lm_head": vocab}, is_tied=config.tie_embeddings)
        self.to(dtypes.activations)  # before methods create parameters, which have types of their own
        for path, layer in self._linears():
            layer.method = choose(_full_name(path), layer, dtypes)
            if not layer.is_tied:
                layer.method.create(layer)

    def build_layer(self, config: ModelConfig, index: int) -> nn.Module:
        raise NotImplementedError

    def finish_loading(self, max_model_len: int, device: torch.device) -> None:
        """To be called once when the weights are loaded, before the first forward pass. (vLLM:
        process_weights_after_loading.)

        Ties the head to the embedding, finishes all Linears, and makes the rotary tables up to `max_model_len`.
        """
        if self.lm_head.is_tied:
            self.lm_head.weight, self.lm_head.bias = self.embed_tokens.weight.detach(), None
        for _, layer in self._linears():
            layer.method.finish(layer)
        ropes = {rope: Rope(rope, max_model_len, self.dtypes.activations, device) for rope in self.config.layer_ropes}
        attentions = [module for module in self.modules() if isinstance(module, Attention)]
        for attention, rope in zip(attentions, self.config.layer_ropes, strict=True):
            attention.set_attention_params(ropes[rope])

    def embed(self, token_ids: Tensor) -> Tensor:
        return F.embedding(token_ids, self.embed_tokens.weight)

    def forward(self, token_ids: Tensor, attend: Attend) -> Tensor:
        """Final hidden states [T, hidden] of a step's tokens. `attend` knows the slot and position of each token.

        Rows that `attend` drops in the last layer are missing here.
        """
        x, residual = self.embed(token_ids), None
        for layer in self._active_layers:
            x, residual = layer(x, residual, attend)
        return self.norm.add(x, residual)[0]

    @contextmanager
    def abridged(self) -> Iterator[None]:
        """For forward passes that only warm up: skips layers that only repeat other layers. The remaining layers run
        all kernels of the whole model, on tensors of the same shapes, and take as much memory.
        """
        self._active_layers = [self.layers[index] for index in self._representatives()]
        try:
            yield
        finally:
            self._active_layers = list(self.layers)

    def _representatives(self) -> list[int]:
        """Indices of the first layer (it has no residual yet), the last, and one layer of each kind in between."""
        config, last = self.config, len(self.layers) - 1
        kinds: dict[object, int] = {}
        for index in range(1, last):
            layer = self.layers[index]
            parameters = tuple((name, one.shape, one.dtype) for name, one in layer.named_parameters())
            methods = tuple(type(one.method) for one in layer.modules() if isinstance(one, Linear))
            kinds.setdefault((config.layer_windows[index], config.layer_ropes[index], parameters, methods), index)
        return sorted({0, *kinds.values(), last})

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [N, vocab] of the next token for rows of `forward`'s result, in float32 or wider."""
        return wide(self.raw_logits(hidden))

    def raw_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """The same as `logits`, but in `logits_dtype`. Written to `out` if given."""
        cap = self.config.logit_softcap
        if cap is None:
            return self.lm_head.forward(hidden, out)
        capped = torch.tanh(wide(self.lm_head.forward(hidden)) / cap) * cap
        return capped if out is None else out.copy_(capped)

    @property
    def logits_dtype(self) -> torch.dtype:
        """The dtype of activations. With a softcap, which needs more precision, float32 or wider."""
        dtype = self.dtypes.activations
        return dtype if self.config.logit_softcap is None else torch.promote_types(dtype, torch.float32)

    @property
    def can_be_captured(self) -> bool:
        """Whether a forward pass never synchronises with the host. A mixture of experts does."""
        return not any(isinstance(module, SparseMLP) for module in self.modules())

    def parameter_sources(self) -> Iterator[ParameterSource]:
        """Yields every parameter with its name in a Transformers 5 model, and its parts by their checkpoint names."""
        for path, module in self.named_modules():
            leaf = path.rpartition(".")[2]
            parent = _full_name(path).removesuffix(leaf)
            sources = (
                module.method.parameter_sources(module, leaf)
                if isinstance(module, Linear)
                else _module_sources(module, leaf)
            )
            for name, target, parts in sources:
                published = {self.published_name(parent + part): view for part, view in parts.items()}
                yield ParameterSource(parent + name, target, published)

    def published_name(self, name: str) -> str:
        """The name of a tensor in checkpoints of this family, given the name of our parameter."""
        return name

    def _linears(self) -> Iterator[tuple[str, Linear]]:
        return ((path, module) for path, module in self.named_modules() if isinstance(module, Linear))


def _full_name(path: str) -> str:
    """The name of a module in a Transformers 5 model, given its path in ours."""
    return path if path == "lm_head" else f"model.{path}"


def _module_sources(module: nn.Module, name: str) -> Iterator[ParameterSource]:
    """The sources of a module that is not a Linear: one tensor for each parameter."""
    for key, parameter in module.named_parameters(recurse=False):
        yield ParameterSource(f"{name}.{key}", parameter, {f"{name}.{key}": parameter})
