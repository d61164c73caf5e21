"""The parts that families are built from: norms, attention, MLPs, experts, and the pre-norm decoder layer.

Everything works on the flat batch of one step, [T, ...]. A token's row reads other rows only through `attend`.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.errors import ModelError
from weft.kernels import ops
from weft.kernels.attention import Attend, AttentionParams, HeadNorm, Rotation
from weft.models.config import ModelConfig, MoeConfig
from weft.models.linear import Activation, Linear

ACTIVATIONS: dict[str, Activation] = {
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}


def activation(name: str) -> Activation:
    if name not in ACTIVATIONS:
        raise ModelError(f"unknown activation {name!r}; known: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def wide(x: Tensor) -> Tensor:
    """x in float32 or wider: for norms, softmax and logits."""
    return x if x.dtype == torch.float64 else x.float()


class RMSNorm(nn.Module):
    neutral = 1.0  # the weight that changes nothing

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """The norm of x + residual, and the sum."""
        return ops.add_rms_norm(x, residual, self.weight, self.eps)

    def of_heads(self) -> HeadNorm:
        return HeadNorm(self.forward, self.weight, self.eps)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions; `qk_norm` is applied to each head before the rotation."""

    def __init__(
        self,
        config: ModelConfig,
        index: int,
        *,
        qkv_bias: bool = False,
        output_bias: bool = False,
        qk_norm: type[RMSNorm] | None = None,
    ) -> None:
        super().__init__()
        self.index, self.config = index, config
        sizes = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads, "v_proj": config.num_kv_heads}
        sizes = {name: heads * config.head_dim for name, heads in sizes.items()}
        self.qkv_proj = Linear(config.hidden_size, sizes, bias=qkv_bias)
        self.o_proj = Linear(sizes["q_proj"], {"o_proj": config.hidden_size}, bias=output_bias)
        self.q_norm = qk_norm(config.head_dim, config.rms_norm_eps) if qk_norm else None
        self.k_norm = qk_norm(config.head_dim, config.rms_norm_eps) if qk_norm else None
        self._params: AttentionParams | None = None

    def set_attention_params(self, rotation: Rotation) -> None:
        """Stores what backends need to know of this layer. To be called when its weights are loaded."""
        config, index = self.config, self.index
        self._params = AttentionParams(
            index,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            config.attention_scale,
            config.layer_windows[index],
            rotation,
            None if self.q_norm is None else self.q_norm.of_heads(),
            None if self.k_norm is None else self.k_norm.of_heads(),
            is_last_layer=index == config.num_layers - 1,
        )

    def forward(self, x: Tensor, residual: Tensor, attend: Attend) -> tuple[Tensor, Tensor]:
        """Returns what to add to the residual, and the residual, maybe with fewer rows (see `Attend`)."""
        assert self._params is not None, "call CausalLM.finish_loading before the first forward pass"
        out, residual = attend(self._params, self.qkv_proj(x), residual)
        return self.o_proj.forward(out), residual


class MLP(nn.Module):
    """down(act(gate(x)) * up(x))"""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        inner = config.intermediate_size
        sizes = {"gate_proj": inner, "up_proj": inner}
        self.gate_up_proj = Linear(config.hidden_size, sizes, bias=config.mlp_bias)
        self.down_proj = Linear(inner, {"down_proj": config.hidden_size}, bias=config.mlp_bias)
        self.activation = activation(config.activation)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj.forward(self.gate_up_proj.gated(x, self.activation))


class Experts(nn.Module):
    """The gated MLPs of all experts. `names` are the names of gate, up and down in a checkpoint."""

    def __init__(self, config: ModelConfig, moe: MoeConfig, names: tuple[str, str, str]) -> None:
        super().__init__()
        inner, self.num_experts = moe.intermediate_size, moe.num_experts
        gate, up, down = names
        self.gate_up_proj = Linear(config.hidden_size, {gate: inner, up: inner}, experts=self.num_experts)
        self.down_proj = Linear(inner, {down: config.hidden_size}, experts=self.num_experts)
        self.activation = activation(config.activation)

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Each token's sum over its `chosen` experts [T, k] by `weights` [T, k]. Other tokens do not affect it."""
        if not len(x):
            return x
        order = chosen.flatten().argsort(stable=True)
        # Reading how many rows each expert has is the only host-device synchronisation of a mixture-of-experts layer.
        counts = chosen.flatten().bincount(minlength=self.num_experts).tolist()
        rows = torch.split(x[order // chosen.shape[1]], counts)
        results = [self._expert(expert, group) for expert, group in enumerate(rows) if len(group)]
        out = x.new_empty(len(order), x.shape[1])
        out[order] = torch.cat(results)
        return (out.view(*chosen.shape, -1) * weights[..., None]).sum(dim=1).to(x.dtype)

    def _expert(self, expert: int, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj.expert(expert, x).chunk(2, dim=-1)
        return self.down_proj.expert(expert, self.activation(gate) * up)


class SparseMLP(nn.Module):
    """A router that sends each token to a few experts. `names` are the names of gate, up and down in a checkpoint."""

    def __init__(
        self, config: ModelConfig, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    ) -> None:
        super().__init__()
        assert config.moe is not None
        self.moe = config.moe
        self.gate = Linear(config.hidden_size, {"gate": self.moe.num_experts}, is_router=True)
        self.experts = Experts(config, self.moe, names)

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = wide(self.gate(x)).softmax(dim=-1).topk(self.moe.experts_per_token, dim=-1)
        if self.moe.normalize:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return self.experts.forward(x, chosen, weights)


class DecoderLayer(nn.Module):
    """Attention and MLP, each behind a norm and added to the residual.

    A layer returns its MLP output and the residual separately: the next norm adds them and normalises at once.
    """

    def __init__(self, config: ModelConfig, attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.self_attn = attention
        self.mlp = mlp
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, residual: Tensor | None, attend: Attend) -> tuple[Tensor, Tensor | None]:
        x, residual = self.input_layernorm.add(x, residual)
        x, residual = self.self_attn(x, residual, attend)
        x, residual = self.post_attention_layernorm.add(x, residual)
        return self.mlp(x), residual
