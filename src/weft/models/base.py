"""CausalLM: the model that the engine runs and the loader fills. A family is a subclass that builds the layers."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.kernels import ops
from weft.kernels.attention import Attend
from weft.models.config import ModelConfig
from weft.models.layers import Attention, RMSNorm, SparseMLP, Stacked, wide
from weft.models.linear import Dtypes
from weft.models.rope import Rope


class Fill(NamedTuple):
    """A parameter and its source: the whole checkpoint tensor `name`, or one checkpoint tensor per view in `parts`."""

    name: str
    target: Tensor
    parts: dict[str, Tensor]


class CausalLM(nn.Module):
    """Embedding, decoder layers, final norm and head, for inference. Built without weights; weights.py fills it."""

    norm_type: ClassVar[type[RMSNorm]] = RMSNorm

    @staticmethod
    def modernise(raw: dict[str, Any]) -> dict[str, Any]:
        """config.json with the family's defaults, old spellings rewritten, and keys that it does not know removed."""
        return raw

    def __init__(self, config: ModelConfig, dtypes: Dtypes) -> None:
        super().__init__()
        self.config, self.dtypes = config, dtypes
        vocab, hidden = config.vocab_size, config.hidden_size
        # From a tensor: the usual constructor draws random values, which on the meta device imports the compiler.
        self.embed_tokens = nn.Embedding(vocab, hidden, _weight=torch.empty(vocab, hidden))
        self.layers = nn.ModuleList(self.build_layer(config, index) for index in range(config.num_layers))
        self._passed = list(self.layers)  # layers of a forward pass: all, except in `abridged`
        self.norm = self.norm_type(config.hidden_size, config.rms_norm_eps)
        self.lm_head = None if config.tie_embeddings else nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.to(dtypes.weights)

    def build_layer(self, config: ModelConfig, index: int) -> nn.Module:
        raise NotImplementedError

    def settle(self, max_model_len: int, device: torch.device) -> None:
        """Prepares rotary embeddings for positions up to `max_model_len`. To be called when the weights are loaded."""
        ropes = {rope: Rope(rope, max_model_len, self.dtypes.activations, device) for rope in self.config.layer_ropes}
        attentions = [module for module in self.modules() if isinstance(module, Attention)]
        for attention, rope in zip(attentions, self.config.layer_ropes, strict=True):
            attention.settle(ropes[rope])

    def embed(self, token_ids: Tensor) -> Tensor:
        return F.embedding(token_ids, self.embed_tokens.weight)

    def forward(self, token_ids: Tensor, attend: Attend) -> Tensor:
        """Final hidden states [T, hidden] of a step's tokens. `attend` knows the slot and position of each token.

        Rows that `attend` drops in the last layer are missing here.
        """
        x, residual = self.embed(token_ids), None
        for layer in self._passed:
            x, residual = layer(x, residual, attend)
        return self.norm.add(x, residual)[0]

    @contextmanager
    def abridged(self) -> Iterator[None]:
        """For passes with results that are not used: skips layers that only repeat other layers. The remaining layers
        run all kernels of the whole model, on tensors of the same shapes, and take as much memory.
        """
        self._passed = [self.layers[index] for index in self._unlike()]
        try:
            yield
        finally:
            self._passed = list(self.layers)

    def _unlike(self) -> list[int]:
        """Indices of the first layer (it has no residual yet), the last, and one layer of each kind in between."""
        config, last = self.config, len(self.layers) - 1
        kinds: dict[object, int] = {}
        for index in range(1, last):
            parameters = tuple((name, one.shape) for name, one in self.layers[index].named_parameters())
            kinds.setdefault((config.layer_windows[index], config.layer_ropes[index], parameters), index)
        return sorted({0, *kinds.values(), last})

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores [N, vocab] of the next token for rows of `forward`'s result, in float32 or wider."""
        return wide(self.scores(hidden))

    def scores(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Same as `logits`, but in `score_dtype`. Written to `out` if given."""
        head = self.embed_tokens if self.lm_head is None else self.lm_head
        cap = self.config.logit_softcap
        if cap is None:
            weight = head.weight
            return ops.linear(hidden, weight) if out is None else ops.linear_into(out, hidden, weight)
        capped = torch.tanh(wide(ops.linear(hidden, head.weight)) / cap) * cap
        return capped if out is None else out.copy_(capped)

    @property
    def score_dtype(self) -> torch.dtype:
        """The dtype of activations. With a softcap, which needs more precision, float32 or wider."""
        dtype = self.dtypes.activations
        return dtype if self.config.logit_softcap is None else torch.promote_types(dtype, torch.float32)

    @property
    def can_be_captured(self) -> bool:
        """Whether a forward pass never synchronises with the host. A mixture of experts does."""
        return not any(isinstance(module, SparseMLP) for module in self.modules())

    @property
    def on_gpu(self) -> bool:
        return self.embed_tokens.weight.is_cuda

    def fills(self) -> Iterator[Fill]:
        """Yields every parameter with its name in a Transformers 5 model, and its parts by their checkpoint names."""
        for path, module in self.named_modules():
            leaf = path.rpartition(".")[2]
            parent = ("" if path == "lm_head" else "model.") + path.removesuffix(leaf)
            for name, parameter in module.named_parameters(recurse=False):
                whole = f"{leaf}.{name}"
                parts = module.parts(name) if isinstance(module, Stacked) else {whole: parameter}
                published = {self.published_name(parent + part): view for part, view in parts.items()}
                yield Fill(parent + whole, parameter, published)

    def published_name(self, name: str) -> str:
        """The name of a tensor in checkpoints of this family, given the name of our parameter."""
        return name
