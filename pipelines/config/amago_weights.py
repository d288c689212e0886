"""Weights of AMAGO, the implementation that the authors of arXiv 2310.09971 and 2411.11188 published (version 3.3), as
the settings and tensors of an agent of ours: `amago:PATH`.

AMAGO writes the state dict of its agent, `policy_weights/policy_epoch_N.pt` or `latest/policy.pt`, and its gin settings
as text, `config.txt`, in the folder above. Most of the network follows from shapes and names. The rest, such as
activations and discounts, is read from that text, and is AMAGO's default where there is none. Weights are read as
tensors only, and the text is parsed; nothing in either is imported or executed.

Where networks are the same function written otherwise, weights are converted: PopArt's affine layer is multiplied into
the critics' last layer, rows of queries, keys and values are sorted by head, critics receive the action before the
discount. What cannot be the same function is refused.

The inputs of the first layer still have AMAGO's order and encoding, since they depend on the spaces:
`pipelines.learning.amago_inputs` arranges them.

C critics, D width, G discounts, H heads, O outputs.
"""

from __future__ import annotations

import ast
import io
import math
import re
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from pydantic import ValidationError

from pipelines.config.model import Activation, AgentSettings
from pipelines.config.places import AMAGO
from pipelines.errors import AmagoError, InputMissing
from pipelines.files.checksums import checksum
from pipelines.files.malformed import UNREADABLE, read_limited, reason

if TYPE_CHECKING:
    from torch import Tensor

_MOST_BYTES, _MOST_TEXT = 4 << 30, 1 << 20
_COPIES = ("target_critics.", "target_actor.", "maximized_critics.")  # of heads, which a warm start copies itself
_ASSIGNMENT = re.compile(r"^(?P<name>[\w./]+)[ \t]*=(?P<value>.*(?:\n[ \t]+.*)*)", re.MULTILINE)
_EPOCH = re.compile(r"policy_epoch_(\d+)\.pt")
_GAMMAS = (0.1, 0.9, 0.95, 0.97, 0.99, 0.995)
_ACTIVATIONS: dict[Any, Activation] = {"leaky_relu": "leaky-relu", "relu": "relu", "gelu": "gelu", "mish": "mish"}
_CONVOLUTIONS, _IMPALA = "timestep.image_encoders.0.convolutions", (16, 32, 32)
_STRIDES = {(8, 4, 3): (4, 2, 1), (2, 2, 2): (1, 1, 1), (3, 3, 3, 3): (2, 1, 1, 1)}  # by kernels: AMAGO's defaults
# Settings of AMAGO that change the losses alone: the agent's parameter, and ours.
_OF_LOSSES = {
    "reward_multiplier": "reward_scale",
    "tau": "target_tau",
    "n_step": "n_step",
    "online_coeff": "actor_weight",
    "offline_coeff": "bc_weight",
    "critic_loss_weight": "critic_weight",
    "num_actions_for_value_in_critic_loss": "critic_samples",
    "num_actions_for_value_in_actor_loss": "actor_samples",
    "use_target_actor": "target_actor",
}
_FILTERS = {"exp_filter": "exp", "leaky_relu_filter": "leaky-relu", "binary_filter": "binary"}


@dataclass(frozen=True, kw_only=True)
class AmagoWeights:
    """The policy in a file: settings of an agent of ours, its context length if that is known, the number of epochs it
    was trained for, the columns that it observes (None: all), and its tensors by our names. `checksum` is the file's.
    """

    path: Path
    agent: dict[str, Any]
    context_length: int | None
    epoch: int
    columns: tuple[str, ...] | None
    tensors: dict[str, Tensor]
    checksum: str

    @property
    def identity(self) -> str:
        """The name of its policy in lakes, which depends on its content alone."""
        return f"amago-{self.checksum[:12]}"


def read(name: str) -> AmagoWeights:
    """Read the weights that `name`, amago:PATH, names.

    InputMissing if there is no such file, or none whose agent has an equivalent here.
    """
    path = Path(name.removeprefix(AMAGO))
    try:
        content = read_limited(path, _MOST_BYTES)
    except OSError as error:
        hint = "give the path of AMAGO's policy_epoch_N.pt or policy.pt"
        raise InputMissing(f"no weights of AMAGO at '{path}': {error.strerror or error}", hint=hint) from error
    config = _read_config(path)
    tensors = _read_tensors(path, content)
    try:
        return _Reading(path, tensors, config).convert(checksum(content))
    except AmagoError:
        raise
    except UNREADABLE as error:
        raise _refuse(path, f"it has another network than AMAGO's agents: {reason(error)}") from error


def _refuse(path: Path, text: str) -> InputMissing:
    return InputMissing(f"'{path}': {text}", hint="see docs/learning.md for the networks of AMAGO that can be taken")


def _read_tensors(path: Path, content: bytes) -> dict[str, Tensor]:
    """Read a state dict. An archive without compression, whose tensors are not larger than the file, cannot ask for
    more memory than it takes on disk."""
    import torch

    text = "it is not a state dict, as torch.save writes it"
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
                raise _refuse(path, text)
        found = torch.load(io.BytesIO(content), weights_only=True, map_location="cpu")
    except UNREADABLE as error:
        raise _refuse(path, f"{text}, of tensors alone") from error
    if not isinstance(found, Mapping) or not found:
        raise _refuse(path, text)
    for name, tensor in found.items():
        is_plain = isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided and not tensor.is_quantized
        if not isinstance(name, str) or not is_plain or not (tensor.is_floating_point() or tensor.numel() == 1):
            raise _refuse(path, text)
    if sum(tensor.numel() * tensor.element_size() for tensor in found.values()) > len(content):
        raise _refuse(path, "its tensors are larger than the file")
    # Weights that were trained in half precision are ours in single precision.
    found = {name: tensor.float().contiguous() for name, tensor in found.items()}
    if broken := next((name for name, tensor in found.items() if not tensor.isfinite().all()), None):
        raise _refuse(path, f"'{broken[:80]}' has numbers that are not finite")
    return found


def _read_config(path: Path) -> dict[str, Any]:
    """Read config.txt beside the weights or in the folder above; empty if there is none."""
    for folder in (path.parent, path.parent.parent):
        try:
            content = read_limited(folder / "config.txt", _MOST_TEXT)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise _refuse(folder / "config.txt", str(error.strerror or error)) from error
        return parse_gin(content.decode(errors="replace"))
    return {}


def parse_gin(text: str) -> dict[str, Any]:
    """Parse the assignments of gin's text, without scopes and modules: {"Agent.gamma": 0.999}. A value that is not a
    literal, such as "@exp_filter", stays text."""
    found: dict[str, Any] = {}
    for match in _ASSIGNMENT.finditer(text):
        name = ".".join(match["name"].rpartition("/")[2].split(".")[-2:])
        value = match["value"].replace("\\\n", " ").strip()
        try:
            found[name] = ast.literal_eval(value) if len(value) < 1 << 12 else value
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            found[name] = value
    return found


class _Reading:
    """One conversion. Tensors are taken by name and shape, so that the network cannot be larger than the file; whatever
    is left in the end belongs to another network."""

    def __init__(self, path: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
        self.path, self.config = path, config
        self.left = {name: tensor for name, tensor in tensors.items() if not name.startswith(_COPIES)}
        self.made: dict[str, Tensor] = {}

    def convert(self, checksum: str) -> AmagoWeights:
        agent: dict[str, Any] = {}
        agent["timestep"], size = self._convert_timestep()
        agent["sequence"], size = self._convert_sequence(size)
        agent |= self._convert_popart()
        agent |= self._convert_heads(size, discounts=len(agent["gammas"]) + 1)
        agent |= self._convert_losses(agent)
        if self.left:
            self.refuse(f"it has '{min(self.left)[:80]}', which the networks here have not")
        try:
            settings = AgentSettings.model_validate(agent).model_dump(mode="json")
        except ValidationError as error:
            fault = error.errors()[0]
            self.refuse(
                f"agent.{'.'.join(map(str, fault['loc']))} would be {fault['input']!r:.40}, which is refused here"
            )
        named = _EPOCH.fullmatch(self.path.name)
        wanted = self.setting("FFTstepEncoder.specify_obs_keys", None)
        if "image_encoders" in "".join(self.made):
            wanted = [self.setting("CNNTstepEncoder.obs_key", "observation")]
        context = self.setting("Experiment.max_seq_len", None)
        return AmagoWeights(
            path=self.path,
            agent=settings,
            context_length=context if isinstance(context, int) and context > 0 else None,
            epoch=int(named[1]) if named else 0,
            columns=None if wanted is None else tuple(map(str, wanted)),
            tensors=self.made,
            checksum=checksum,
        )

    def refuse(self, text: str) -> NoReturn:
        raise _refuse(self.path, text)

    def setting(self, name: str, otherwise: Any) -> Any:
        return self.config.get(name, otherwise)

    def require(self, name: str, *allowed: Any) -> None:
        """Refuse a setting of config.txt that has no equivalent."""
        value = self.setting(name, allowed[0])
        if value not in allowed:
            self.refuse(f"{name} = {value!r} has no equivalent here".replace("\n", " ")[:160])

    def activation(self, *classes: str) -> Activation:
        """Choose the activation of the first class that config.txt has."""
        value = next((self.config[f"{name}.activation"] for name in classes if f"{name}.activation" in self.config), 0)
        if value and value not in _ACTIVATIONS:
            self.refuse(f"the activation {value!r} has no equivalent here"[:160])
        return _ACTIVATIONS[value or "leaky_relu"]

    def has(self, name: str) -> bool:
        return name in self.left

    def count(self, name: str) -> int:
        """Count the layers `name`.0, `name`.1, ..."""
        found = {int(n[1]) for key in self.left if (n := re.match(re.escape(name) + r"\.(\d{1,4})\.", key))}
        return len(found) if found == set(range(len(found))) else self.refuse(f"layers of '{name}' are missing")

    def shape(self, name: str, dims: int) -> tuple[int, ...]:
        if not self.has(name):
            self.refuse(f"it lacks '{name}', which every agent of AMAGO with this network has")
        shape = tuple(self.left[name].shape)
        if len(shape) != dims or 0 in shape:
            self.refuse(f"'{name}' has the shape {shape}, not {dims} axes")
        return shape

    def take(self, name: str, shape: Sequence[int]) -> Tensor:
        if self.shape(name, len(shape)) != tuple(shape):
            self.refuse(f"'{name}' has the shape {tuple(self.left[name].shape)}, not {tuple(shape)}")
        return self.left.pop(name)

    def move_linear(self, old: str, new: str, inputs: int, outputs: int, *kernel: int) -> None:
        self.made[f"{new}.weight"] = self.take(f"{old}.weight", (outputs, inputs, *kernel))
        self.made[f"{new}.bias"] = self.take(f"{old}.bias", (outputs,))

    def move_norm(self, old: str, new: str, size: int, *, rms: bool = False) -> None:
        self.made[f"{new}.weight"] = self.take(f"{old}.norm.{'scale' if rms else 'weight'}", (size,))
        if not rms:
            self.made[f"{new}.bias"] = self.take(f"{old}.norm.bias", (size,))

    def move_mlp(self, old: str, new: str, inputs: int) -> tuple[list[int], int]:
        """Convert an MLP; return the widths of its hidden layers, and its outputs."""
        width, _ = self.shape(f"{old}.in_layer.weight", 2)
        depth = 1 + self.count(f"{old}.layers")
        outputs, _ = self.shape(f"{old}.out_layer.weight", 2)
        self.move_linear(f"{old}.in_layer", f"{new}.hidden.0", inputs, width)
        for layer in range(1, depth):
            self.move_linear(f"{old}.layers.{layer - 1}", f"{new}.hidden.{2 * layer}", width, width)
        self.move_linear(f"{old}.out_layer", f"{new}.last", width, outputs)
        return [width] * depth, outputs

    # Timestep encoders.

    def _convert_timestep(self) -> tuple[dict[str, Any], int]:
        is_image = any(name.startswith("tstep_encoder.cnn.") for name in self.left)
        kind = "CNNTstepEncoder" if is_image else "FFTstepEncoder"
        made, size = self._convert_images() if is_image else self._convert_flat()
        self.move_norm("tstep_encoder.out_norm", "timestep.out", size)
        hidden = self.setting(f"{kind}.hide_rl2s", False)
        made |= {"output": size, "hide_reward": bool(hidden), "hide_action": bool(hidden)}
        return made | {"activation": self.activation(kind)}, size

    def _convert_flat(self) -> tuple[dict[str, Any], int]:
        self.require("FFTstepEncoder.norm", None)
        _, inputs = self.shape("tstep_encoder.base.in_layer.weight", 2)
        widths, size = self.move_mlp("tstep_encoder.base", "timestep.body", inputs)
        mean, square = (self.take(f"tstep_encoder.in_norm.{name}", (inputs,)) for name in ("mu", "nu"))
        updates = self.take("tstep_encoder.in_norm._t", (1,)).clamp(0, 2**31).long()[0]
        normalize = bool(self.setting("FFTstepEncoder.normalize_inputs", True))
        if normalize:
            self.made |= {"timestep.norm.mean": mean, "timestep.norm.square": square, "timestep.norm.updates": updates}
            # We divide by a deviation of at least .01, AMAGO by one that exceeds .01, else not at all. The first layer
            # makes up for the difference, so that the statistics go on from where they are.
            variance = square - mean.square()
            theirs = (variance + 1e-5).sqrt().nan_to_num().clamp(1e-3, 1e6)
            divisor = theirs.where(theirs > 0.01, theirs.new_ones(()))
            self.made["timestep.body.hidden.0.weight"] *= variance.clamp_min(1e-4).sqrt() / divisor
        rate = self.setting("InputNorm.beta", 1e-4)
        norm = {"normalize": normalize, "normalize_limit": 1e4, "normalize_rate": rate}
        return {"hidden": widths, "symlog": False} | norm, size

    def _convert_images(self) -> tuple[dict[str, Any], int]:
        if any(name.startswith("tstep_encoder.cnn.blocks.") for name in self.left):
            convolutions = self._convert_impala()
        else:
            convolutions = self._convert_convolutions()
        features, pixels = self.shape("tstep_encoder.img_features.weight", 2)
        extras, inputs = self.shape("tstep_encoder.rl2_features.weight", 2)
        size, _ = self.shape("tstep_encoder.merge.weight", 2)
        self.move_linear("tstep_encoder.img_features", "timestep.image_encoders.0.head", pixels, features)
        self.move_linear("tstep_encoder.rl2_features", "timestep.extras", inputs, extras)
        self.move_linear("tstep_encoder.merge", "timestep.body", features + extras, size)
        shift = {"random_shift": 4} if self.setting("CNNTstepEncoder.drqv2_aug", False) else {}
        shift |= {"random_shift_share": self.setting("CNNTstepEncoder.aug_pct_of_batch", 0.75)}
        image = convolutions | {"features": features, "extras": extras, **shift}
        return {"image": image, "normalize": False, "symlog": True}, size

    def _convert_convolutions(self) -> dict[str, Any]:
        names = [f"tstep_encoder.cnn.conv{n}" for n in range(1, 10) if self.has(f"tstep_encoder.cnn.conv{n}.weight")]
        if not names:
            self.refuse("its convolutions are AMAGO's user's own, with no equivalent here")
        shapes = [self.shape(f"{name}.weight", 4) for name in names]
        kernels = tuple(kernel for *_, kernel in shapes)
        given = [self.setting(f"{kind}.strides", None) for kind in ("NatureishCNN", "GridworldCNN")]
        strides = next((tuple(each) for each in given if each is not None), _STRIDES.get(kernels, ()))
        if len(strides) != len(kernels):
            self.refuse("the strides of its convolutions are unknown; put AMAGO's config.txt beside it")
        channels, layers = shapes[0][1], []
        for place, (name, (outputs, *_, kernel), stride) in enumerate(zip(names, shapes, strides, strict=True)):
            self.move_linear(name, f"{_CONVOLUTIONS}.{2 * place}", channels, outputs, kernel, kernel)
            layers.append((outputs, kernel, stride))
            channels = outputs
        return {"kind": "nature", "layers": layers}

    def _convert_impala(self) -> dict[str, Any]:
        self.require("IMPALAishCNN.post_group_norm", True)
        stages = self.count("tstep_encoder.cnn.blocks")
        channels = self.shape("tstep_encoder.cnn.blocks.0.conv.weight", 4)[1]
        found = [self.shape(f"tstep_encoder.cnn.blocks.{stage}.conv.weight", 4)[0] for stage in range(stages)]
        if found != [*_IMPALA]:
            self.refuse(f"IMPALAishCNN.cnn_block_depths = {found} has no equivalent here, only {[*_IMPALA]}"[:160])
        for stage, outputs in enumerate(found):
            old = f"tstep_encoder.cnn.blocks.{stage}"
            self.move_linear(f"{old}.conv", f"{_CONVOLUTIONS}.{4 * stage}", channels, outputs, 3, 3)
            for block in (1, 2):
                was, now = f"{old}.residual{block}", f"{_CONVOLUTIONS}.{4 * stage + 1 + block}"
                self.move_linear(f"{was}.conv1", f"{now}.body.1", outputs, outputs, 3, 3)
                self.move_linear(f"{was}.conv2", f"{now}.body.3", outputs, outputs, 3, 3)
                for name in ("weight", "bias"):
                    self.made[f"{now}.norm.{name}"] = self.take(f"{was}.norm.{name}", (outputs,))
            channels = outputs
        return {"kind": "impala"}

    # Sequence encoders.

    def _convert_sequence(self, inputs: int) -> tuple[dict[str, Any], int]:
        names = "".join(f" {name}" for name in self.left)
        if " traj_encoder.tformer." in names:
            return self._convert_transformer(inputs)
        if " traj_encoder.rnn." in names:
            return self._convert_gru(inputs)
        if " traj_encoder.mambas." in names:
            return self._convert_mamba(inputs)
        if " traj_encoder.traj_blocks." in names:
            return self._convert_feedforward(inputs)
        if " traj_encoder." in names:
            self.refuse("its sequence encoder is AMAGO's user's own, with no equivalent here")
        return {"kind": "identity"}, inputs

    def _convert_feedforward(self, inputs: int) -> tuple[dict[str, Any], int]:
        size, _ = self.shape("traj_encoder.traj_emb.weight", 2)
        layers, first = self.count("traj_encoder.traj_blocks"), "traj_encoder.traj_blocks.0"
        inner, _ = self.shape(f"{first}.ff1.weight", 2)
        rms, layer_norm = self.has(f"{first}.norm1.norm.scale"), self.has(f"{first}.norm1.norm.weight")
        self.move_linear("traj_encoder.traj_emb", "sequence.embed", inputs, size)
        for layer in range(layers):
            was, now = f"traj_encoder.traj_blocks.{layer}", f"sequence.blocks.{layer}"
            self.move_linear(f"{was}.ff1", f"{now}.expand", size, inner)
            self.move_linear(f"{was}.ff2", f"{now}.contract", inner, size)
            if rms or layer_norm:
                self.move_norm(f"{was}.norm1", f"{now}.inner_norm", inner, rms=rms)
                self.move_norm(f"{was}.norm2", f"{now}.norm", size, rms=rms)
        if not (rms or layer_norm):
            self.require("FFTrajEncoder.norm", None, "none")
        self.move_linear("traj_encoder.traj_last", "sequence.last", size, size)
        self.move_norm("traj_encoder.out_norm", "sequence.norm", size)
        return {
            "kind": "feedforward",
            "d_model": size,
            "num_layers": layers,
            "d_ff": inner,
            "norm": "rms" if rms else "layer" if layer_norm else "none",
            "activation": self.activation("FFTrajEncoder"),
            "dropout": self.setting("FFTrajEncoder.dropout", 0.0),
        }, size

    def _convert_gru(self, inputs: int) -> tuple[dict[str, Any], int]:
        layers = sum(name.startswith("traj_encoder.rnn.weight_ih_l") for name in self.left)
        size, hidden = self.shape("traj_encoder.out.weight", 2)
        for layer in range(layers):
            for name, shape in (
                (f"weight_ih_l{layer}", (3 * hidden, inputs if layer == 0 else hidden)),
                (f"weight_hh_l{layer}", (3 * hidden, hidden)),
                (f"bias_ih_l{layer}", (3 * hidden,)),
                (f"bias_hh_l{layer}", (3 * hidden,)),
            ):
                self.made[f"sequence.rnn.{name}"] = self.take(f"traj_encoder.rnn.{name}", shape)
        self.move_linear("traj_encoder.out", "sequence.head.0", hidden, size)
        self.move_norm("traj_encoder.out_norm", "sequence.head.1", size)
        return {"kind": "gru", "num_layers": layers, "hidden": hidden, "output": size}, size

    def _convert_transformer(self, inputs: int) -> tuple[dict[str, Any], int]:
        old, kind = "traj_encoder.tformer", "TformerTrajEncoder"
        size, _ = self.shape(f"{old}.inp.weight", 2)
        self.move_linear(f"{old}.inp", "sequence.embed", inputs, size)
        layers, first = self.count(f"{old}.layers"), f"{old}.layers.0"
        heads = self.shape(f"{first}.attention_layer.head_scaler", 4)[2]
        inner, _ = self.shape(f"{first}.ff1.weight", 2)
        sigma, rms = self.has(f"{first}.ff1.gamma"), self.has(f"{first}.norm1.norm.scale")
        extra = any(name.startswith(f"{first}.norm2.") for name in self.left)
        table = f"{old}.position_embedding.embeddings.weight"
        position, rows = "sinusoid", {}
        if self.has(table):
            position, rows = "learned", {"max_time": self.shape(table, 2)[0]}
            self.made["sequence.position.weight"] = self.take(table, (rows["max_time"], size))
        elif self.setting(f"{kind}.pos_emb", "fixed") == "rope":
            position = "rope"
        for layer in range(layers):
            was, now = f"{old}.layers.{layer}", f"sequence.blocks.{layer}"
            self._move_stream(f"{was}.attention_layer.qkv_projection", f"{now}.qkv", size, 3 * size, sigma, heads)
            self._move_stream(f"{was}.attention_layer.out_projection", f"{now}.merge", size, size, sigma)
            scale = self.take(f"{was}.attention_layer.head_scaler", (1, 1, heads, 1))
            self.made[f"{now}.head_scale"] = scale.reshape(heads, 1, 1)
            self._move_stream(f"{was}.ff1", f"{now}.expand", size, inner, sigma)
            self._move_stream(f"{was}.ff2", f"{now}.contract", inner, size, sigma)
            norms = [("norm1", "before_attention", size), ("norm3", "before_ff", size)]
            norms += [("norm2", "after_attention", size), ("norm4", "inside_ff", inner)] if extra else []
            for theirs, ours, width in norms:
                self.move_norm(f"{was}.{theirs}", f"{now}.{ours}", width, rms=rms)
        self.move_norm(f"{old}.norm", "sequence.norm", size, rms=rms)
        return {
            "kind": "transformer",
            "d_model": size,
            "num_layers": layers,
            "num_heads": heads,
            "d_ff": inner,
            "norm": "rms" if rms else "layer",
            "normformer": extra,
            "sigma_reparam": sigma,
            "activation": self.activation(kind),
            "dropout": self.setting(f"{kind}.dropout_ff", 0.05),
            "dropout_attention": self.setting(f"{kind}.dropout_attn", 0.0),
            "dropout_qkv": self.setting(f"{kind}.dropout_qkv", 0.0),
            "position": position,
            **rows,
            **self._choose_window(),
        }, size

    def _move_stream(self, old: str, new: str, inputs: int, outputs: int, sigma: bool, heads: int = 0) -> None:
        """Convert a linear layer of a Transformer block; one with `heads` has queries, keys and values, and no bias."""
        made = {"weight": self.take(f"{old}.weight", (outputs, inputs))}
        made["bias"] = made["weight"].new_zeros(outputs) if heads else self.take(f"{old}.bias", (outputs,))
        if sigma:
            made |= {"left": self.take(f"{old}.u", (outputs,)), "right": self.take(f"{old}.v", (inputs,))}
            made["gain"] = self.take(f"{old}.gamma", (1,)).reshape(())
        if heads:  # AMAGO's outputs are (3, head size, heads), ours (3, heads, head size)
            for name in ("weight", "left") if sigma else ("weight",):
                made[name] = made[name].unflatten(0, (3, -1, heads)).transpose(1, 2).flatten(0, 2).contiguous()
        self.made |= {f"{new}.{name}": tensor for name, tensor in made.items()}

    def _choose_window(self) -> dict[str, Any]:
        """Choose the attention window. AMAGO counts the tokens before the query, ours the query itself, too."""
        kind = str(self.setting("TformerTrajEncoder.attention_type", "")).rpartition(".")[2].lstrip("@")
        if kind == "FlashAttention" or "FlashAttention.window_size" in self.config:
            left, _ = self.setting("FlashAttention.window_size", (-1, -1))
            return {"window": left + 1} if left >= 0 else {}
        if kind not in ("SlidingWindowFlexAttention", "ClippedSlidingSinkAttention"):
            return {}
        self.require(f"{kind}.logit_clip", 0.0, None)
        self.require(f"{kind}.sink_bias", 0.0)
        window = self.setting(f"{kind}.window_size", None)
        if not isinstance(window, int):
            self.refuse(f"{kind}.window_size is unknown")
        return {"window": window + 1, "sink": self.setting(f"{kind}.sink_size", 0)}

    def _convert_mamba(self, inputs: int) -> tuple[dict[str, Any], int]:
        size, _ = self.shape("traj_encoder.inp.weight", 2)
        layers, first = self.count("traj_encoder.mambas"), "traj_encoder.mambas.0.mamba"
        inner, states = self.shape(f"{first}.A_log", 2)
        taps = self.shape(f"{first}.conv1d.weight", 3)[2]
        rank, rms = math.ceil(size / 16), self.has("traj_encoder.mambas.0.norm.norm.scale")
        if inner % size:
            self.refuse(f"its Mamba blocks are {inner} wide, not a multiple of {size}")
        self.move_linear("traj_encoder.inp", "sequence.embed", inputs, size)
        for layer in range(layers):
            was, now = f"traj_encoder.mambas.{layer}.mamba", f"sequence.blocks.{layer}"
            self.move_norm(f"traj_encoder.mambas.{layer}.norm", f"{now}.norm", size, rms=rms)
            self.made[f"{now}.inputs.weight"] = self.take(f"{was}.in_proj.weight", (2 * inner, size))
            # AMAGO's last tap is the present token's, our first.
            tap = self.take(f"{was}.conv1d.weight", (inner, 1, taps))[:, 0].flip(1).contiguous()
            self.made[f"{now}.taps_IK"], self.made[f"{now}.tap_bias_I"] = tap, self.take(f"{was}.conv1d.bias", (inner,))
            self.made[f"{now}.select.weight"] = self.take(f"{was}.x_proj.weight", (rank + 2 * states, inner))
            self.move_linear(f"{was}.dt_proj", f"{now}.step_size", rank, inner)
            self.made[f"{now}.log_rate_IS"] = self.take(f"{was}.A_log", (inner, states))
            self.made[f"{now}.skip_I"] = self.take(f"{was}.D", (inner,))
            self.made[f"{now}.output.weight"] = self.take(f"{was}.out_proj.weight", (size, inner))
            self.made[f"{now}.output.bias"] = self.made[f"{now}.output.weight"].new_zeros(size)
        self.move_norm("traj_encoder.out_norm", "sequence.norm", size, rms=rms)
        norm = "rms" if rms else "layer"
        widths = {"state": states, "conv": taps, "expand": inner // size}
        return {"kind": "mamba", "d_model": size, "num_layers": layers, "norm": norm, **widths}, size

    # Heads.

    def _convert_popart(self) -> dict[str, Any]:
        """Convert value statistics; PopArt's affine layer waits for the critics."""
        count, _ = self.shape("popart.mu", 2)
        mean, square, updates = (self.take(f"popart.{name}", (count, 1))[:, 0] for name in ("mu", "nu", "_t"))
        steps = updates.max().clamp(0, 2**31).long()
        self.made["popart.mu_G"] = mean
        self.made["popart.variance_G"] = (square - mean.square()).clamp(1e-4, 1e8)
        self.made["popart.updates"] = steps
        enabled = bool(self._of_agent("popart", True))
        beta = self.setting("PopArtLayer.beta", 5e-4)
        return {"popart": {"enabled": enabled, "beta": beta}, **self._choose_discounts(count)}

    def _of_agent(self, name: str, otherwise: Any) -> Any:
        return self.setting(f"MultiTaskAgent.{name}", self.setting(f"Agent.{name}", otherwise))

    def _choose_discounts(self, count: int) -> dict[str, Any]:
        given = [self.setting(f"Multigammas.{kind}", _GAMMAS) for kind in ("discrete", "continuous")]
        gammas = next((tuple(each) for each in given if len(each) == count - 1), None)
        if count == 1:
            gammas = ()
        if gammas is None:
            text = f"it has {count} discounts, whose values are unknown; put AMAGO's config.txt beside it"
            self.refuse(text)
        return {"gammas": gammas, "acting_gamma": self._of_agent("gamma", 0.999)}

    def _convert_heads(self, size: int, discounts: int) -> dict[str, Any]:
        residual = any(name.startswith("actor.residual_blocks") for name in self.left)
        if residual:
            of_class, (widths, outputs) = "ResidualActor", self._move_residual_actor(size)
        else:
            of_class, (widths, outputs) = "Actor", self.move_mlp("actor.base", "heads.actor.net", size)
        critic, action = self._convert_critics(size, discounts)
        if outputs % discounts:
            self.refuse(f"its actor has {outputs} outputs, and {discounts} discounts")
        actor: dict[str, Any] = {"hidden": widths, "residual": residual, "activation": self.activation(of_class)}
        actor |= {
            "probability_floor": self.setting("Discrete.clip_prob_low", 1e-3),
            "probability_ceiling": self.setting("Discrete.clip_prob_high", 0.99),
            "bit_probability_floor": 0.0,
        }
        if action and outputs != discounts * action:  # else choices or bits, which have a number each
            actor |= self._convert_distribution(of_class, outputs // discounts, action)
        kind = "multi-task" if critic["kind"] == "two-hot" else "actor-critic"
        return {"actor": actor, "critic": critic, "kind": kind}

    def _move_residual_actor(self, size: int) -> tuple[list[int], int]:
        """Convert a ResidualActor; return its width and the inner widths of its blocks, and its outputs."""
        old, new = "actor.residual_blocks", "heads.actor.net"
        (width, *_), last = self.move_mlp("actor.inp", f"{new}.hidden.0", size)
        widths = [width]
        if last != width:
            self.refuse(f"its actor is {last} wide, and {width} before")
        for block in range(self.count(old)):
            inner, _ = self.shape(f"{old}.{block}.0.weight", 2)
            now = f"{new}.hidden.{block + 1}"
            self.move_linear(f"{old}.{block}.0", f"{now}.expand", width, inner)
            self.move_norm(f"{old}.{block}.1", f"{now}.inner_norm", inner)
            self.move_linear(f"{old}.{block}.3", f"{now}.contract", inner, width)
            self.move_norm(f"{old}.{block}.4", f"{now}.norm", width)
            widths.append(inner)
        outputs, _ = self.shape("actor.out.weight", 2)
        self.move_linear("actor.out", f"{new}.last", width, outputs)
        return widths, outputs

    def _convert_distribution(self, of_class: str, params: int, action: int) -> dict[str, Any]:
        """Choose the distribution of a policy of `action` numbers with `params` parameters."""
        kind = str(self.setting(f"{of_class}.continuous_dist_type", "")).rpartition(".")[2].lstrip("@")
        kind = kind or ("TanhGaussian" if params == 2 * action else "GMM")
        modes, rest = divmod(params, 2 * action + 1)
        if rest if kind == "GMM" else params != 2 * action:
            self.refuse(f"its actor has {params} outputs for {action} actions, which are not those of a {kind[:40]}")
        if kind == "TanhGaussian":
            self._require_deviations(kind, "tanh_bounded_positive")
            bounds = {"min": ("std_low", math.exp(-5.0)), "max": ("std_high", math.exp(2.0))}
            made = {f"{end}_log_std": math.log(self.setting(f"{kind}.{name}", n)) for end, (name, n) in bounds.items()}
            return {"distribution": "tanh-gaussian", **made, **self._choose_clip(kind)}
        if kind == "Beta":
            self._require_deviations(kind, "softplus_bounded_positive")
            for name in ("alpha", "beta"):
                self.require(f"Beta.{name}_low", 1.0001)
                self.require(f"Beta.{name}_high", None)
            return {"distribution": "beta", **self._choose_clip(kind)}
        if kind != "GMM":
            self.refuse(f"the distribution of its actor ({kind[:40]}) has no equivalent here")
        self._require_deviations(kind, "softplus_bounded_positive")
        self._sort_modes(modes, action)
        high = self.setting("GMM.std_high", None)
        made = {"min_log_std": math.log(self.setting("GMM.std_low", 1e-4))}
        made["max_log_std"] = 60.0 if high is None else math.log(high)
        # Where AMAGO clips the inside of its logarithm.
        return {"distribution": "gaussian-mixture", "modes": modes, "action_clip": 1 - 1e-6, **made}

    def _require_deviations(self, kind: str, function: str) -> None:
        self.require(f"{kind}.std_activation", f"@{function}", f"@policy_dists.{function}")

    def _choose_clip(self, kind: str) -> dict[str, Any]:
        low, high = self.setting(f"{kind}.clip_actions_on_log_prob", (-0.99, 0.99))
        if low != -high:
            self.refuse(f"{kind}.clip_actions_on_log_prob is not symmetric, as it is here")
        return {"action_clip": high}

    def _sort_modes(self, modes: int, action: int) -> None:
        """Sort the outputs of a mixture. AMAGO's are means, deviations and weights of all modes, ours the weights, then
        each mode's means and deviations."""
        from torch import cat

        for name in ("weight", "bias"):
            rows = self.made[f"heads.actor.net.last.{name}"].unflatten(0, (-1, modes * (2 * action + 1)))
            means, deviations, weights = rows.split((modes * action, modes * action, modes), 1)
            by_mode = cat([each.unflatten(1, (modes, -1)) for each in (means, deviations)], 2).flatten(1, 2)
            self.made[f"heads.actor.net.last.{name}"] = cat((weights, by_mode), 1).flatten(0, 1).contiguous()

    def _convert_critics(self, size: int, discounts: int) -> tuple[dict[str, Any], int]:
        """Convert the critics; return their settings, and the size of actions, 0 for a table of values."""
        old, new = "critics.net", "heads.critic"
        members, inputs, width = self.shape(f"{old}.inp_layer.weight", 3)
        outputs = self.shape(f"{old}.output_layer.weight", 3)[2]
        depth = 1 + self.count(f"{old}.core_layers")
        action = inputs - size - 1 if inputs != size else 0
        if action < 0:
            self.refuse(f"its critics have {inputs} inputs, and states {size}")
        names = ["inp_layer", *(f"core_layers.{layer}" for layer in range(depth - 1))]
        for layer, name in enumerate(names):
            weight = self.take(f"{old}.{name}.weight", (members, width if layer else inputs, width))
            if layer == 0 and action:  # AMAGO: state, discount, action; ours: state, action, discount
                order = [*range(size), *range(size + 1, inputs), size]
                weight = weight[:, order].contiguous()
            self.made[f"{new}.weights.{layer}"] = weight
            self.made[f"{new}.biases.{layer}"] = self._take_bias(f"{old}.{name}", members, width)
        weight = self.take(f"{old}.output_layer.weight", (members, width, outputs))
        bias = self._take_bias(f"{old}.output_layer", members, outputs)
        scale, shift = (self.take(f"popart.{name}", (discounts, 1)) for name in ("w", "b"))
        critic: dict[str, Any] = {"hidden": [width] * depth, "ensemble": members, "kind": "scalar"}
        of_class = "NCritics"
        if action and outputs > 1:
            critic, of_class = critic | self._choose_bins(outputs), "NCriticsTwoHot"
        else:
            # PopArt's layer becomes part of the last one, which has values of each discount.
            values = 1 if action else outputs // discounts
            if not action and values * discounts != outputs:
                self.refuse(f"its critics have {outputs} outputs, and {discounts} discounts")
            weight, bias = (each.unflatten(-1, (-1, values)) for each in (weight, bias))
            if self._of_agent("popart", True):
                weight, bias = weight * scale, bias * scale + shift
            weight, bias = (each.expand(*each.shape[:-2], discounts, values).flatten(-2) for each in (weight, bias))
        self.made[f"{new}.last_weight"], self.made[f"{new}.last_bias"] = weight.contiguous(), bias.contiguous()
        self.require(f"{of_class}.activation", "leaky_relu")
        subset = self._of_agent("num_critics_td", min(2, members))
        return critic | {"subset": subset}, action

    def _take_bias(self, name: str, members: int, width: int) -> Tensor:
        return self.take(f"{name}.bias", (1, 1, members, width)).reshape(members, 1, width)

    def _choose_bins(self, bins: int) -> dict[str, Any]:
        given = {name: self.setting(f"NCriticsTwoHot.{name}", None) for name in ("min_return", "max_return")}
        low, high = (-1e5 if given["min_return"] is None else given["min_return"]), given["max_return"]
        labels = self.setting("NCriticsTwoHot.label_type", "twohot")
        return {
            "kind": "two-hot",
            "bins": bins,
            "low": low,
            "high": 1e5 if high is None else high,
            "symlog": self.setting("NCriticsTwoHot.use_symlog", True),
            "labels": "hl-gauss" if labels == "hlgauss" else "two-hot",
            "label_sigma": self.setting("NCriticsTwoHot.sigma", 0.75),
        }

    def _convert_losses(self, agent: Mapping[str, Any]) -> dict[str, Any]:
        """Choose the losses of config.txt; AMAGO's defaults are ours."""
        given = {ours: self._of_agent(theirs, None) for theirs, ours in _OF_LOSSES.items()}
        made = {name: value for name, value in given.items() if value is not None}
        weighed = str(self._of_agent("fbc_filter_func", "")).rpartition(".")[2].lstrip("@")
        if weighed in _FILTERS:
            options = {
                name.partition(".")[2]: float(value)
                for name, value in self.config.items()
                if name.startswith(f"{weighed}.") and isinstance(value, int | float)
            }
            made["filter"] = {"kind": _FILTERS[weighed], "options": options}
        return made
