"""Timestep encoder: one token (observation, previous reward, previous action) becomes one vector.

Columns are routed by their space, unless the settings say otherwise: images through convolutions, texts and other
sequences through an embedding and a small recurrent network, everything else (choices one-hot) into one flat vector
with the previous reward and action. Leading dimensions are free: (B, T) while learning, (N,) while acting. Sequences: M
of S places, E embedding, H state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from pipelines.config.model import TIMESTEP_ENCODERS, Route, TimestepSettings, TokenSettings
from pipelines.errors import UsageError
from pipelines.lake.spaces import LENGTH, Box, Discrete, MultiDiscrete, Ragged, Space, Spaces
from pipelines.nets import init
from pipelines.nets.activation import activation
from pipelines.nets.cnn import ImageEncoder, channels_first, require_image, shifted
from pipelines.nets.features import features
from pipelines.nets.linear import MLP
from pipelines.nets.norms import RunningNorm, is_finite, symlog


class Tokens(Protocol):
    """Tokens with leading shape (B, T), and which of them are valid (bool)."""

    @property
    def observation(self) -> Mapping[str, Tensor]: ...
    @property
    def action(self) -> Tensor: ...
    @property
    def reward(self) -> Tensor: ...
    @property
    def time(self) -> Tensor: ...
    @property
    def valid_rows(self) -> Tensor: ...


class TimestepEncoder(nn.Module):
    """MLP and LayerNorm over flat inputs and sequences. With images: features of each image, of each sequence, and a
    few of all other inputs, merged by a linear and LayerNorm."""

    activation_checkpointing = False  # encode images in chunks, again in the backward: less memory, more time

    def __init__(self, spaces: Spaces, settings: TimestepSettings) -> None:
        super().__init__()
        self.spaces, self.settings, self.output_size = spaces, settings, settings.output
        way, columns = routes(spaces.observation, settings.columns), spaces.observation
        self.images = {n: require_image(n, columns[n].shape) for n in columns if way[n] == "image"}
        self.sequences = {name: columns[name] for name in columns if way[name] == "tokens"}
        self.flat = {name: columns[name] for name in columns if way[name] == "flat"}
        size = sum(space.flat_size for space in self.flat.values()) + 1 + spaces.action.flat_size
        self.norm = RunningNorm(size, settings.normalize_rate) if settings.normalize else None
        extra = settings.tokens.hidden * len(self.sequences)
        if self.images:
            self.image_encoders = nn.ModuleList(
                ImageEncoder(shape, settings.image, settings.activation) for shape in self.images.values()
            )
            self.activation = activation(settings.activation)
            self.extras = init.linear(size, settings.image.extras)
            width = settings.image.features * len(self.images) + settings.image.extras + extra
            self.body: nn.Module = init.linear(width, settings.output, gain=1.0)
        else:
            self.body = MLP(size + extra, settings.hidden, settings.output, activation=settings.activation)
        self.token_encoders = nn.ModuleList(
            TokenEncoder(_vocabulary(space, settings.tokens.vocabulary), settings.tokens)
            for space in self.sequences.values()
        )
        self.out = nn.LayerNorm(settings.output)

    def forward(
        self, observation: Mapping[str, Tensor], prev_action: Tensor, prev_reward: Tensor, time: Tensor
    ) -> Tensor:
        """Encode to (..., output). `prev_action` is in stored form; at time 0 its features are zero."""
        flat = self.flat_inputs(observation, prev_action, prev_reward, time)
        if self.norm is not None:
            flat = self.norm(flat)
        texts = [
            encoder(*_tokens(observation, name, space))
            for (name, space), encoder in zip(self.sequences.items(), self.token_encoders, strict=True)
        ]
        if not self.images:
            return self.out(self.body(torch.cat((flat, *texts), -1) if texts else flat))
        parts = [
            encoder(observation[name], activation_checkpointing=self.activation_checkpointing)
            for name, encoder in zip(self.images, self.image_encoders, strict=True)
        ]
        merged = torch.cat((*parts, *texts, self.extras(flat)), -1)
        return self.out(self.body(self.activation(merged)))

    def augment(self, observation: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return columns (B, T, ...) with data augmentation: images randomly shifted, if enabled."""
        image = self.settings.image
        if not (image.random_shift and self.images):
            return observation
        moved = {
            name: shifted(observation[name], image.random_shift, image.random_shift_share, first=channels_first(shape))
            for name, shape in self.images.items()
        }
        return {**observation, **moved}

    def flat_inputs(
        self, observation: Mapping[str, Tensor], prev_action: Tensor, prev_reward: Tensor, time: Tensor
    ) -> Tensor:
        """Concatenate everything that is neither image nor sequence into one float32 vector, (..., F)."""
        action = features(prev_action, self.spaces.action) * (time > 0)[..., None]
        reward = prev_reward[..., None]
        if self.settings.hide_action:
            action = torch.zeros_like(action)
        if self.settings.hide_reward:
            reward = torch.zeros_like(reward)
        columns = [features(observation[name], space) for name, space in self.flat.items()]
        flat = torch.cat((*columns, reward, action), -1)
        return symlog(flat) if self.settings.symlog else flat

    @torch.no_grad()
    def update_statistics(self, tokens: Sequence[Tokens]) -> None:
        """Add the valid tokens of an update's micro-batches to the running statistics, once before the update. A token
        with a non-finite number is left out: it would corrupt them permanently."""
        if self.norm is None:
            return
        flat = [
            self.flat_inputs(part.observation, part.action, part.reward, part.time).flatten(0, 1) for part in tokens
        ]
        rows_NF, real_N = torch.cat(flat), torch.cat([part.valid_rows.flatten() for part in tokens])
        self.norm.update(rows_NF, real_N & is_finite(rows_NF).all(-1))


def timestep_encoder(spaces: Spaces, settings: TimestepSettings) -> TimestepEncoder:
    """Construct the encoder that `settings.kind` names: a class called with (spaces, settings)."""
    return TIMESTEP_ENCODERS.get(settings.kind)(spaces, settings)


def routes(columns: Mapping[str, Space], wanted: Mapping[str, Route]) -> dict[str, Route]:
    """Return the route of each column: the one `wanted`, or by its space. UsageError for an unknown column."""
    unknown = sorted(wanted.keys() - columns.keys())
    if unknown:
        raise UsageError(
            f"agent.timestep.columns names what is not observed: {', '.join(unknown)}",
            hint=f"observed are: {', '.join(columns)}",
        )
    ways: dict[str, Route] = {}
    for name, space in columns.items():
        if isinstance(space, Box) and space.is_image:
            ways[name] = "image"
        elif isinstance(space, Ragged) and not space.dtype.startswith("float"):
            ways[name] = "tokens"
        else:
            ways[name] = "flat"
    ways |= wanted
    for name, space in columns.items():  # the length of a sequence is read by its encoder, or hidden with it
        end = f"{name}.{LENGTH}"
        if isinstance(space, Ragged) and end in columns and end not in wanted and ways[name] != "flat":
            ways[end] = "hidden"
    return ways


def _vocabulary(space: Space, most: int) -> int:
    match space:
        case Discrete(n=n):
            return min(n, most)
        case MultiDiscrete(nvec=nvec):
            return min(max(nvec), most)
        case _:
            return most


def _tokens(observation: Mapping[str, Tensor], name: str, space: Space) -> tuple[Tensor, Tensor]:
    """Return the numbers of a column (..., S), and how many there are."""
    value = observation[name]
    tokens = value.flatten(value.dim() - len(space.shape)) if space.shape else value[..., None]
    length = observation.get(f"{name}.{LENGTH}")
    if length is None:
        length = torch.full(tokens.shape[:-1], tokens.shape[-1], device=tokens.device)
    return tokens, length


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
            x_NSE = self.embedding(tokens.long().remainder(self.rows))
            rnn = self.rnn
            weights = (rnn.weight_ih_l0, rnn.weight_hh_l0, rnn.bias_ih_l0, rnn.bias_hh_l0)
            return last_state(x_NSE, lengths, *weights)
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


@torch.library.custom_op("amago::last_state", mutates_args=())
def last_state(
    x_NSE: Tensor, lengths_N: Tensor, weight_ih: Tensor, weight_hh: Tensor, bias_ih: Tensor, bias_hh: Tensor
) -> Tensor:
    """Return the state (N, H) of a GRU after the last valid place of each sequence, zeros if it has none.

    Graphs of `torch.export` have this operator where one of torch would be traced place by place, which takes a minute
    for a few texts; `pipelines.export.graph` replaces it.
    """
    return last_state_of_torch(x_NSE, lengths_N, weight_ih, weight_hh, bias_ih, bias_hh)


@last_state.register_fake
def _(x_NSE: Tensor, lengths_N: Tensor, weight_ih: Tensor, weight_hh: Tensor, *biases: Tensor) -> Tensor:
    return x_NSE.new_empty(x_NSE.shape[0], weight_hh.shape[1])


def last_state_of_torch(x_NSE: Tensor, lengths_N: Tensor, *weights: Tensor) -> Tensor:
    """Do what `last_state` does, in torch's operators."""
    begin_1NH = x_NSE.new_zeros(1, x_NSE.shape[0], weights[1].shape[1])
    states_NSH, _ = torch.gru(x_NSE, begin_1NH, weights, True, 1, 0.0, False, False, True)
    last_N11 = (lengths_N.long() - 1).clamp_min(0)[:, None, None]
    last_NH = states_NSH.gather(1, last_N11.expand(-1, 1, states_NSH.shape[-1]))[:, 0]
    return last_NH * (lengths_N > 0)[:, None]
