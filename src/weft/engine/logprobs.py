"""Log probabilities, which the device computes and sends to the host while that goes on."""

from typing import NamedTuple

import torch
from torch import Tensor

from weft.engine.executor import TokenLogprobs

NUMBERS = 3  # of a token, before the most likely ones: the token, its rank, its log probability


class DescribedPiece(NamedTuple):
    numbers: Tensor  # [N, NUMBERS + 2 * k] int32 on the host, where they are once the device has come so far
    wanted: list[int]  # how many of the k most likely tokens, for each row

    @classmethod
    def of(cls, logits: Tensor, tokens: Tensor, wanted: list[int]) -> "DescribedPiece":
        """Of one token a row. The device need not have the logits yet."""
        logprobs = torch.log_softmax(logits.float(), -1)
        chosen = logprobs.gather(-1, tokens[:, None].long())
        ranks = (logprobs > chosen).sum(-1, keepdim=True) + 1
        top = logprobs.topk(min(max(wanted), logprobs.shape[-1]), -1)
        floats = torch.cat([chosen, top.values], -1).view(torch.int32)
        numbers = torch.cat([tokens[:, None].int(), ranks.int(), floats, top.indices.int()], -1)
        if numbers.is_cuda:
            pinned = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            numbers = pinned.copy_(numbers, non_blocking=True)
        return cls(numbers, wanted)

    def read(self) -> list[TokenLogprobs]:
        k = (self.numbers.shape[1] - NUMBERS) // 2
        found = []
        floats = self.numbers[:, NUMBERS - 1 : NUMBERS + k].view(torch.float32).tolist()
        for whole, (logprob, *values), wanted in zip(self.numbers.tolist(), floats, self.wanted, strict=True):
            top = dict(zip(whole[NUMBERS + k :][:wanted], values[:wanted], strict=True))
            found.append(TokenLogprobs(whole[0], logprob, whole[1], top))
        return found


class Described(NamedTuple):
    pieces: list[DescribedPiece]

    def read(self) -> list[TokenLogprobs]:
        """When the device has come so far."""
        return [one for piece in self.pieces for one in piece.read()]
