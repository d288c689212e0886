"""Encoder of short sequences of numbers: texts, instructions, goals. M sequences, S places, E embedding, H state."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from pipelines.config.encoders import TokenSettings


class TokenEncoder(nn.Module):
    """Embedding, then a GRU, whose last state is the result (..., H); zeros for an empty sequence.

    Sequences mostly stay the same from step to step: only those that differ from the previous one are computed.
    """

    def __init__(self, rows: int, settings: TokenSettings) -> None:
        super().__init__()
        self.rows, self.output_size = rows, settings.hidden
        self.embedding = nn.Embedding(rows, settings.embedding)
        self.rnn = nn.GRU(settings.embedding, settings.hidden, batch_first=True)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Encode integers (..., S), of which the first `lengths` (...,) are valid."""
        if torch.compiler.is_exporting():
            return self._stepwise(tokens, lengths)
        leading = lengths.shape
        tokens_MS, lengths_M = tokens.reshape(-1, tokens.shape[-1]).long(), lengths.reshape(-1).long()
        begins_M = torch.ones_like(lengths_M, dtype=torch.bool)
        begins_M[1:] = (tokens_MS[1:] != tokens_MS[:-1]).any(1) | (lengths_M[1:] != lengths_M[:-1])
        last_MH = self._encode(tokens_MS[begins_M], lengths_M[begins_M])
        return last_MH[begins_M.cumsum(0) - 1].view(*leading, -1)

    def _encode(self, tokens_MS: Tensor, lengths_M: Tensor) -> Tensor:
        with torch.autocast(tokens_MS.device.type, enabled=False):
            x_MSE = self.embedding(tokens_MS.remainder(self.rows))
            packed = pack_padded_sequence(x_MSE, lengths_M.clamp_min(1).cpu(), batch_first=True, enforce_sorted=False)
            return self.rnn(packed)[1][0] * (lengths_M > 0)[:, None]

    def _stepwise(self, tokens_NS: Tensor, lengths_N: Tensor) -> Tensor:
        """Encode every sequence (N, S), place by place, in operators that any runtime has."""
        x_NSE = self.embedding(tokens_NS.long().remainder(self.rows))
        state_NH = x_NSE.new_zeros(x_NSE.shape[0], self.rnn.hidden_size)
        for place in range(x_NSE.shape[1]):
            _, after_1NH = self.rnn(x_NSE[:, place : place + 1], state_NH[None])
            state_NH = torch.where((lengths_N > place)[:, None], after_1NH[0], state_NH)
        return state_NH
