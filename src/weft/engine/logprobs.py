"""Log probabilities: the device computes them and sends them to the host, which does not wait."""

from typing import NamedTuple

import torch
from torch import Tensor

from weft.engine.executor import TokenLogprobs

NUMBERS = 3  # per row, before the most likely tokens: the token, its rank, its log probability


class LogprobsChunk(NamedTuple):
    """Log probabilities of a few rows. The size of a chunk limits the memory that computing them takes."""

    numbers: Tensor  # [N, NUMBERS + 2 * k] int32 on the host; valid once the device has finished the step
    wanted: list[int]  # for each row, how many of the k most likely tokens to report

    @classmethod
    def of(cls, logits: Tensor, tokens: Tensor, wanted: list[int]) -> "LogprobsChunk":
        """Starts computing the log probabilities of one token per row. Does not wait for the logits."""
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


class PendingLogprobs(NamedTuple):
    """Log probabilities of rows, in chunks, on their way to the host."""

    chunks: list[LogprobsChunk]

    def read(self) -> list[TokenLogprobs]:
        """Returns one result per row. Call it after the device has finished the step."""
        return [one for chunk in self.chunks for one in chunk.read()]
