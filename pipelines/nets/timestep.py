"""Timestep encoder: one token (observation, previous reward, previous action) becomes one vector.

Columns are routed by their space, unless the settings say otherwise: images through convolutions, texts and other
sequences through an embedding and a small recurrent network, everything else (choices one-hot) into one flat vector
with the previous reward and action. Leading dimensions are free: (B, T) while learning, (N,) while acting. Images: C
channels, X height, Y width. Sequences: M of S places, E embedding, H state.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint

from pipelines.config.model import TIMESTEP_ENCODERS, Activation, ImageSettings, Route, TimestepSettings, TokenSettings
from pipelines.errors import UsageError
from pipelines.lake.spaces import LENGTH, Box, Discrete, MultiDiscrete, Ragged, Space, Spaces
from pipelines.nets import init
from pipelines.nets.compute import Kept, is_exporting
from pipelines.nets.inputs import RunningNorm, is_finite, join_rows, symlog, to_features
from pipelines.nets.linear import MLP, make_activation

_NATURE_PIXELS = 36  # minimum side for the strided kernels
# (channels, kernel, stride) of each layer; Nature: Mnih et al. 2015, "Methods"
_NATURE = ((32, 8, 4), (64, 4, 2), (64, 3, 1))
_GRID = ((16, 2, 1), (32, 2, 1), (64, 2, 1))
IMPALA = (16, 32, 32)  # channels of each stage; Espeholt et al. 2018, arXiv 1802.01561, figure 3
_IMPALA_PIXELS = 15  # minimum side of three stages
_GROUPS = 4  # of channels that are normalised together
CPU_PIXELS, _CUDA_PIXELS = 1 << 18, 1 << 21  # encoded at a time with activation checkpointing


class Residual(nn.Module):
    """Residual block: norm(x + convolution(act(convolution(act(x)))))."""

    def __init__(self, channels: int, activation: Activation) -> None:
        super().__init__()
        self.body = nn.Sequential()
        for _ in range(2):
            self.body.append(make_activation(activation))
            self.body.append(init.make_layer(nn.Conv2d, channels, channels, 3, padding=1))
        self.norm = nn.GroupNorm(_GROUPS, channels)

    def forward(self, x_NCXY: Tensor) -> Tensor:
        return self.norm(x_NCXY + self.body(x_NCXY))


class ImageEncoder(nn.Module):
    """Convolutional encoder of images (..., X, Y, C) -> (..., features). Images with channels first (C < X, C < Y) are
    recognised; bytes x become x / 255, with impala x / 128 - 1, other dtypes are used unchanged."""

    def __init__(
        self, shape: tuple[int, int, int], settings: ImageSettings, activation: Activation = "leaky-relu"
    ) -> None:
        super().__init__()
        self.channels_first = self.has_channels_first(shape)
        channels, height, width = shape if self.channels_first else (shape[2], shape[0], shape[1])
        kind = settings.kind
        if kind == "auto":
            kind = "nature" if min(height, width) >= _NATURE_PIXELS else "grid"
        least = {"nature": 0 if settings.layers else _NATURE_PIXELS, "impala": _IMPALA_PIXELS}.get(kind, 0)
        if min(height, width) < least:
            raise UsageError(
                f"an image of {height}x{width} is too small for '{kind}' ({least} pixels or more)",
                hint="let agent.timestep.image.kind be auto or grid",
            )
        self.pixels, self.centred = height * width, kind == "impala"
        layers: list[nn.Module] = []
        if kind == "impala":
            for outputs in IMPALA:
                layers += [init.make_layer(nn.Conv2d, channels, outputs, 3, padding=1)]
                layers += [nn.MaxPool2d(3, stride=2)]
                layers += [Residual(outputs, activation), Residual(outputs, activation)]
                height, width, channels = (height - 1) // 2, (width - 1) // 2, outputs
        else:
            for outputs, kernel, stride in settings.layers or (_NATURE if kind == "nature" else _GRID):
                padding = int(min(height, width) < kernel)  # a last row or column of a tiny image is kept
                layers += [init.make_layer(nn.Conv2d, channels, outputs, kernel, stride=stride, padding=padding)]
                layers += [make_activation(activation, inplace=True)]
                height, width = ((side + 2 * padding - kernel) // stride + 1 for side in (height, width))
                if min(height, width) < 1:
                    raise UsageError(
                        f"an image of {shape} is too small for agent.timestep.image.layers",
                        hint="choose smaller kernels or strides",
                    )
                channels = outputs
        self.convolutions = nn.Sequential(*layers)
        self.head = init.make_linear(channels * height * width, settings.features)

    @staticmethod
    def has_channels_first(shape: tuple[int, int, int]) -> bool:
        """Check whether images of this shape are (C, X, Y), that is, whether C is less than both sides."""
        return shape[0] < min(shape[1], shape[2])

    def forward(self, image: Tensor, *, activation_checkpointing: bool = False) -> Tensor:
        """Encode images. With `activation_checkpointing`, a few at a time, keeping only the stored images: the backward
        encodes them again."""
        flat = image.reshape(-1, *image.shape[-3:])
        if not activation_checkpointing:
            return self._encode(flat).view(*image.shape[:-3], -1)
        encode = self._encode
        if torch.is_grad_enabled():  # nothing in it is random: no generator state to keep
            encode = functools.partial(checkpoint, encode, use_reentrant=False, preserve_rng_state=False)
        return torch.cat([encode(part) for part in flat.split(self._frames(image.device))]).view(*image.shape[:-3], -1)

    def _frames(self, device: torch.device) -> int:
        return max(1, (_CUDA_PIXELS if device.type == "cuda" else CPU_PIXELS) // self.pixels)

    def _encode(self, image_N: Tensor) -> Tensor:
        image_NCXY = image_N if self.channels_first else image_N.permute(0, 3, 1, 2)
        pixels = image_NCXY.to(self.head.weight.dtype)
        if image_N.dtype == torch.uint8:
            pixels = pixels / 128 - 1 if self.centred else pixels / 255
        return self.head(self.convolutions(pixels).flatten(1))


def shift_images(image_BT: Tensor, pixels: int, share: float, *, first: bool) -> Tensor:
    """Shift images (B, T, ...) by up to `pixels` in each direction, repeating edges (DrQ; Kostrikov et al. 2021, arXiv
    2004.13649): each window as a whole, and only a `share` of the windows. Draws from torch's global generator."""
    axis = 3 if not first else 4  # of the columns of pixels, in (B, T, X, Y, C) or (B, T, C, X, Y)
    batch, device = len(image_BT), image_BT.device
    shift = torch.randint(-pixels, pixels + 1, (batch, 2), device=device)
    shift = shift * (torch.rand(batch, 1, device=device) < share)
    out = torch.empty_like(image_BT)
    places = [torch.arange(image_BT.shape[side], device=device) for side in (axis - 1, axis)]
    rows, columns = ((place + shift[:, side, None]).clamp(0, len(place) - 1) for side, place in enumerate(places))
    for b in range(batch):
        out[b] = image_BT[b].index_select(axis - 2, rows[b]).index_select(axis - 1, columns[b])
    return out


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
        way, columns = choose_routes(spaces.observation, settings.columns), spaces.observation
        self.images = {n: self._require_image(n, columns[n].shape) for n in columns if way[n] == "image"}
        self.sequences = {name: columns[name] for name in columns if way[name] == "tokens"}
        self.flat = {name: columns[name] for name in columns if way[name] == "flat"}
        size = sum(space.flat_size for space in self.flat.values()) + 1 + spaces.action.flat_size
        self.norm: RunningNorm | None = None
        if settings.normalize:
            self.norm = RunningNorm(size, settings.normalize_rate, limit=settings.normalize_limit)
        extra = settings.tokens.hidden * len(self.sequences)
        if self.images:
            self.image_encoders = nn.ModuleList(
                ImageEncoder(shape, settings.image, settings.activation) for shape in self.images.values()
            )
            self.activation = make_activation(settings.activation)
            self.extras = init.make_linear(size, settings.image.extras)
            width = settings.image.features * len(self.images) + settings.image.extras + extra
            self.body: nn.Module = init.make_linear(width, settings.output, gain=1.0)
            last = self.body
        else:
            self.body = MLP(size + extra, settings.hidden, settings.output, activation=settings.activation)
            last = self.body.last
        # Of inputs that are all zero, every layer norm would divide by the root of its epsilon, and the gradient of the
        # first update was 10^16. These biases draw nothing, and vanish beside other inputs.
        init.fill_ramp(last.bias)
        self.token_encoders = nn.ModuleList()
        for space in self.sequences.values():
            most = settings.tokens.vocabulary
            if isinstance(space, Discrete | MultiDiscrete):
                most = min(space.n if isinstance(space, Discrete) else max(space.nvec), most)
            self.token_encoders.append(TokenEncoder(most, settings.tokens))
        self.out = nn.LayerNorm(settings.output)
        self._joined = Kept[Tensor]()

    def forward(
        self, observation: Mapping[str, Tensor], prev_action: Tensor, prev_reward: Tensor, time: Tensor
    ) -> Tensor:
        """Encode to (..., output). `prev_action` is in stored form; at time 0 its features are zero."""
        flat = self.flat_inputs(observation, prev_action, prev_reward, time)
        if self.norm is not None:
            flat = self.norm(flat)
        texts = [
            encoder(*TokenEncoder.read(observation, name, space))
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

    @staticmethod
    def _require_image(name: str, shape: tuple[int, ...]) -> tuple[int, int, int]:
        if len(shape) != 3:
            raise UsageError(
                f"column '{name}' of shape {shape} is not an image (height, width, channels)",
                hint="change its way in agent.timestep.columns",
            )
        return shape[0], shape[1], shape[2]

    def augment(self, observation: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Augment columns (B, T, ...): images randomly shifted, if enabled."""
        image = self.settings.image
        if not (image.random_shift and self.images):
            return observation
        pixels, share = image.random_shift, image.random_shift_share
        moved = {
            name: shift_images(observation[name], pixels, share, first=ImageEncoder.has_channels_first(shape))
            for name, shape in self.images.items()
        }
        return {**observation, **moved}

    def flat_inputs(
        self, observation: Mapping[str, Tensor], prev_action: Tensor, prev_reward: Tensor, time: Tensor
    ) -> Tensor:
        """Concatenate everything that is neither image nor sequence into one float32 vector, (..., F)."""
        given = [*(observation[name] for name in self.flat), prev_action, prev_reward, time]
        if not torch.compiler.is_compiling() and not any(each.requires_grad for each in given):
            found = self._joined.find(given)
            if found is not None:
                self._joined = Kept()  # of a large batch it would be much memory
                return found
        return self._join_flat(observation, prev_action, prev_reward, time)

    def _join_flat(
        self, observation: Mapping[str, Tensor], prev_action: Tensor, prev_reward: Tensor, time: Tensor
    ) -> Tensor:
        action = to_features(prev_action, self.spaces.action) * (time > 0)[..., None]
        reward = prev_reward[..., None]
        if self.settings.hide_action:
            action = torch.zeros_like(action)
        if self.settings.hide_reward:
            reward = torch.zeros_like(reward)
        columns = [to_features(observation[name], space) for name, space in self.flat.items()]
        flat = torch.cat((*columns, reward, action), -1)
        return symlog(flat) if self.settings.symlog else flat

    @torch.no_grad()
    def update_statistics(self, tokens: Sequence[Tokens]) -> None:
        """Add the valid tokens of an update's micro-batches to the running statistics, once before the update. A token
        with a non-finite number is left out: it would corrupt them permanently."""
        if self.norm is None:
            return
        flat = [self._join_flat(part.observation, part.action, part.reward, part.time) for part in tokens]
        if len(tokens) == 1:  # the update begins with the same columns
            (part,) = tokens
            given = [*(part.observation[name] for name in self.flat), part.action, part.reward, part.time]
            self._joined.set(given, flat[0])
        rows_NF = join_rows([each.flatten(0, 1) for each in flat])
        real_N = join_rows([part.valid_rows.flatten() for part in tokens])
        self.norm.update(rows_NF, real_N & is_finite(rows_NF).all(-1))


def make_timestep_encoder(spaces: Spaces, settings: TimestepSettings) -> TimestepEncoder:
    """Construct the encoder that `settings.kind` names: a class called with (spaces, settings)."""
    return TIMESTEP_ENCODERS.get(settings.kind)(spaces, settings)


def choose_routes(columns: Mapping[str, Space], wanted: Mapping[str, Route]) -> dict[str, Route]:
    """Choose the route of each column: the one `wanted`, or by its space. UsageError for an unknown column."""
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


class TokenEncoder(nn.Module):
    """Embedding, then a GRU, whose last state is the result (..., H); zeros for an empty sequence.

    Sequences mostly stay the same from step to step and are shared by episodes: each distinct one is computed once.
    """

    def __init__(self, rows: int, settings: TokenSettings) -> None:
        super().__init__()
        self.rows, self.output_size = rows, settings.hidden
        self.embedding = nn.Embedding(rows, settings.embedding)
        self.rnn = nn.GRU(settings.embedding, settings.hidden, batch_first=True)

    @staticmethod
    def read(observation: Mapping[str, Tensor], name: str, space: Space) -> tuple[Tensor, Tensor]:
        """Read the numbers of an observed column (..., S), and how many there are."""
        value = observation[name]
        tokens = value.flatten(value.dim() - len(space.shape)) if space.shape else value[..., None]
        length = observation.get(f"{name}.{LENGTH}")
        if length is None:
            length = torch.full(tokens.shape[:-1], tokens.shape[-1], device=tokens.device)
        return tokens, length

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Encode integers (..., S), of which the first `lengths` (...,) are valid."""
        if is_exporting():
            x_NSE = self.embedding(tokens.long().remainder(self.rows))
            rnn = self.rnn
            weights = (rnn.weight_ih_l0, rnn.weight_hh_l0, rnn.bias_ih_l0, rnn.bias_hh_l0)
            return last_state(x_NSE, lengths, *weights)
        leading = lengths.shape
        tokens_MS, lengths_M = tokens.reshape(-1, tokens.shape[-1]).long(), lengths.reshape(-1).long()
        begins_M = torch.ones_like(lengths_M, dtype=torch.bool)
        begins_M[1:] = (tokens_MS[1:] != tokens_MS[:-1]).any(1) | (lengths_M[1:] != lengths_M[:-1])
        # The negated length comes first, so that sorting puts the longest sequence first. Comparing neighbours before
        # leaves a few dozen rows to sort.
        rows_MT = torch.cat((-lengths_M[:, None], tokens_MS), 1)[begins_M]
        rows_MT, place_M = rows_MT.unique(dim=0, return_inverse=True)
        last_MH = self._encode(rows_MT[:, 1:], -rows_MT[:, 0])
        return last_MH[place_M[begins_M.cumsum(0) - 1]].view(*leading, -1)

    def _encode(self, tokens_MS: Tensor, lengths_M: Tensor) -> Tensor:
        """Encode sequences that are sorted by length, the longest first."""
        rnn, steps_M = self.rnn, lengths_M.clamp_min(1).cpu()
        with torch.autocast(tokens_MS.device.type, enabled=False):
            x_MSE = self.embedding(tokens_MS.remainder(self.rows))
            packed = pack_padded_sequence(x_MSE, steps_M, batch_first=True)
            if tokens_MS.device.type != "cpu" or not torch.is_grad_enabled():
                last_MH = rnn(packed)[1][0]
            else:
                run: Callable[..., Tensor] = _LastState.apply
                weights = (rnn.weight_ih_l0, rnn.weight_hh_l0, rnn.bias_ih_l0, rnn.bias_hh_l0)
                last_MH = run(packed.data, packed.batch_sizes, *weights)
            return last_MH * (lengths_M > 0)[:, None]


class _LastState(torch.autograd.Function):
    """The last states (M, H) of a GRU over packed sequences (N, E).

    The backward of torch's GRU takes about forty operators a place on a CPU: as many, for a text of twenty letters, as
    all else in an update of a small agent. Here the gates of all places are computed again at once, and a place takes
    three operators. W gates: 3 H of them, reset, keep and new.
    """

    @staticmethod
    def forward(ctx: Any, x_NE: Tensor, sizes_S: Tensor, *weights: Tensor) -> Tensor:
        begin_1MH = x_NE.new_zeros(1, int(sizes_S[0]), weights[1].shape[1])
        state_NH, last_1MH = torch.gru(x_NE, sizes_S, begin_1MH, weights, True, 1, 0.0, False, False)
        ctx.sizes = sizes_S.tolist()
        ctx.save_for_backward(x_NE, state_NH, *weights)
        return last_1MH[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x_NE, state_NH, weight_ih, weight_hh, bias_ih, bias_hh = ctx.saved_tensors
        states = state_NH.split(ctx.sizes)
        following = zip(states, ctx.sizes[1:], strict=False)
        before_NH = torch.cat((torch.zeros_like(states[0]), *(state[:size] for state, size in following)))
        from_input_NW = torch.addmm(bias_ih, x_NE, weight_ih.t())
        from_state_NW = torch.addmm(bias_hh, before_NH, weight_hh.t())
        own_NH = from_state_NW.chunk(3, -1)[2]
        reset_NH, keep_NH, _ = (from_input_NW + from_state_NW).sigmoid_().chunk(3, -1)
        new_NH = torch.addcmul(from_input_NW.chunk(3, -1)[2], reset_NH, own_NH).tanh_()
        # The slopes of a state with respect to the gates' inputs: h = new + keep (before - new).
        slope_NH = (1 - keep_NH) * (1 - new_NH.square())
        slope_N3H = torch.stack((slope_NH * own_NH, before_NH - new_NH, slope_NH), 1)
        slope_N3H[:, 0] *= reset_NH * (1 - reset_NH)
        slope_N3H[:, 1] *= keep_NH * (1 - keep_NH)
        to_state_N3H = slope_N3H.clone()
        to_state_N3H[:, 2] *= reset_NH
        grad_MH, grad_NH = grads[0].clone(), torch.empty_like(state_NH)
        parts = (each.split(ctx.sizes)[::-1] for each in (grad_NH, to_state_N3H, keep_NH))
        for grad_mH, to_state_m3H, keep_mH in zip(*parts, strict=True):
            now_mH = grad_MH[: len(grad_mH)]
            grad_mH.copy_(now_mH)
            to_state_m3H *= grad_mH[:, None]
            now_mH.mul_(keep_mH).addmm_(to_state_m3H.flatten(1), weight_hh)
        grad_NW, to_state_NW = (slope_N3H * grad_NH[:, None]).flatten(1), to_state_N3H.flatten(1)
        of_weights = grad_NW.t() @ x_NE, to_state_NW.t() @ before_NH, grad_NW.sum(0), to_state_NW.sum(0)
        return grad_NW @ weight_ih, None, *of_weights


@torch.library.custom_op("amago::last_state", mutates_args=())
def last_state(
    x_NSE: Tensor, lengths_N: Tensor, weight_ih: Tensor, weight_hh: Tensor, bias_ih: Tensor, bias_hh: Tensor
) -> Tensor:
    """Compute the state (N, H) of a GRU after the last valid place of each sequence, zeros if it has none.

    Graphs of `torch.export` have this operator where one of torch would be traced place by place, which takes a minute
    for a few texts; `pipelines.export.graph` replaces it.
    """
    return last_state_of_torch(x_NSE, lengths_N, weight_ih, weight_hh, bias_ih, bias_hh)


last_state.register_fake(
    lambda x_NSE, lengths_N, weight_ih, weight_hh, *biases: x_NSE.new_empty(x_NSE.shape[0], weight_hh.shape[1])
)


def last_state_of_torch(x_NSE: Tensor, lengths_N: Tensor, *weights: Tensor) -> Tensor:
    """Do what `last_state` does, in torch's operators."""
    begin_1NH = x_NSE.new_zeros(1, x_NSE.shape[0], weights[1].shape[1])
    states_NSH, _ = torch.gru(x_NSE, begin_1NH, weights, True, 1, 0.0, False, False, True)
    last_N11 = (lengths_N.long() - 1).clamp_min(0)[:, None, None]
    last_NH = states_NSH.gather(1, last_N11.expand(-1, 1, states_NSH.shape[-1]))[:, 0]
    return last_NH * (lengths_N > 0)[:, None]
