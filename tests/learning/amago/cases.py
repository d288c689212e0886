"""The cases, and the numbers that the maker of the golden files and the test draw alike: weights and observations.

A golden file has the names and shapes of a state dict, AMAGO's settings as its config.txt has them, and the outputs of
its agent. Weights follow from names, so they are not stored.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

GOLDEN = Path(__file__).parent / "golden"
BATCH, LENGTH = 2, 7


@dataclass(frozen=True, kw_only=True)
class Case:
    """An agent of AMAGO: its class, trajectory encoder, actor and gin settings; observed arrays (shape and dtype by
    AMAGO's name), Discrete observations (number of values) and actions (kind and size)."""

    agent: str = "Agent"
    encoder: str
    tstep: str = "FFTstepEncoder"
    actor: str = "Actor"
    arrays: Mapping[str, tuple[tuple[int, ...], str]] = field(
        default_factory=lambda: {"observation": ((5,), "float32")}
    )
    choices: Mapping[str, int] = field(default_factory=dict)
    action: tuple[str, int] = ("discrete", 3)
    gin: str = ""


_SMALL = """
FFTstepEncoder.d_hidden = 12
FFTstepEncoder.d_output = 10
CNNTstepEncoder.img_features = 9
CNNTstepEncoder.rl2_features = 4
CNNTstepEncoder.d_output = 10
TformerTrajEncoder.d_model = 12
TformerTrajEncoder.n_heads = 3
TformerTrajEncoder.d_ff = 16
TformerTrajEncoder.n_layers = 2
TformerTrajEncoder.attention_type = @VanillaAttention
GRUTrajEncoder.d_hidden = 11
GRUTrajEncoder.d_output = 12
FFTrajEncoder.d_model = 12
FFTrajEncoder.d_ff = 16
MambaTrajEncoder.d_model = 12
MambaTrajEncoder.d_state = 4
MambaTrajEncoder.n_layers = 2
Actor.d_hidden = 14
ResidualActor.feature_dim = 14
ResidualActor.residual_ff_dim = 15
NCritics.d_hidden = 13
NCriticsTwoHot.d_hidden = 13
NCriticsTwoHot.output_bins = 16
Agent.num_critics = 3
MultiTaskAgent.num_critics = 3
"""
_TWO = {"b": ((2, 2), "float32"), "a": ((3,), "uint8")}
CASES = {
    "transformer": Case(encoder="TformerTrajEncoder", arrays=_TWO, choices={"c": 4}),
    "transformer-box": Case(
        encoder="TformerTrajEncoder",
        action=("box", 2),
        gin="""
TformerTrajEncoder.pos_emb = 'rope'
TformerTrajEncoder.normformer_norms = False
TformerTrajEncoder.activation = 'gelu'
FFTstepEncoder.activation = 'relu'
FFTstepEncoder.n_layers = 1
TanhGaussian.std_low = 0.01
Agent.gamma = 0.98
Agent.use_multigamma = False
""",
    ),
    "transformer-plain": Case(
        encoder="TformerTrajEncoder",
        gin="""
TformerTrajEncoder.pos_emb = 'learnable'
LearnablePosEmb.max_time_idx = 9
TformerTrajEncoder.sigma_reparam = False
TformerTrajEncoder.norm = 'rmsnorm'
FFTstepEncoder.normalize_inputs = False
Agent.popart = False
Actor.n_layers = 1
Actor.activation = 'mish'
""",
    ),
    "transformer-multitask": Case(agent="MultiTaskAgent", encoder="TformerTrajEncoder", choices={"c": 3}),
    "transformer-multitask-box": Case(
        agent="MultiTaskAgent",
        encoder="TformerTrajEncoder",
        action=("box", 2),
        gin="""
NCriticsTwoHot.min_return = -50.0
NCriticsTwoHot.max_return = 100.0
NCriticsTwoHot.use_symlog = False
NCriticsTwoHot.n_layers = 3
Multigammas.continuous = [0.5, 0.9]
FFTstepEncoder.hide_rl2s = True
""",
    ),
    "gru": Case(encoder="GRUTrajEncoder"),
    "gru-box": Case(encoder="GRUTrajEncoder", action=("box", 3), gin="GRUTrajEncoder.n_layers = 1"),
    "gru-multitask": Case(agent="MultiTaskAgent", encoder="GRUTrajEncoder"),
    "mamba": Case(encoder="MambaTrajEncoder"),
    "mamba-box": Case(encoder="MambaTrajEncoder", action=("box", 2), gin="MambaTrajEncoder.norm = 'rmsnorm'"),
    "identity-bits": Case(
        encoder="IdentityTrajEncoder", action=("bits", 3), gin="Actor.continuous_dist_type = @Multibinary"
    ),
    "nature-gru": Case(
        encoder="GRUTrajEncoder",
        tstep="CNNTstepEncoder",
        arrays={"observation": ((36, 36, 3), "uint8")},
        gin="NatureishCNN.channels = [4, 5, 6]",
    ),
    "grid-transformer": Case(
        encoder="TformerTrajEncoder",
        tstep="CNNTstepEncoder",
        arrays={"view": ((5, 6, 2), "uint8")},
        gin="CNNTstepEncoder.cnn_type = @GridworldCNN\nCNNTstepEncoder.obs_key = 'view'",
    ),
    "feedforward-gmm": Case(
        encoder="FFTrajEncoder",
        action=("box", 2),
        gin="Actor.continuous_dist_type = @GMM\nGMM.gmm_modes = 3\nFFTrajEncoder.activation = 'gelu'",
    ),
    "feedforward-beta": Case(
        agent="MultiTaskAgent",
        encoder="FFTrajEncoder",
        action=("box", 2),
        gin="""
Actor.continuous_dist_type = @Beta
Beta.clip_actions_on_log_prob = (-0.995, 0.995)
FFTrajEncoder.n_layers = 2
FFTrajEncoder.norm = 'layer'
""",
    ),
    "residual-rms": Case(
        encoder="FFTrajEncoder",
        gin="FFTrajEncoder.norm = 'rmsnorm'",
        actor="ResidualActor",
    ),
    "residual-box": Case(encoder="IdentityTrajEncoder", action=("box", 3), actor="ResidualActor"),
    "impala-identity": Case(
        encoder="IdentityTrajEncoder",
        tstep="CNNTstepEncoder",
        arrays={"observation": ((17, 22, 3), "uint8")},
        gin="CNNTstepEncoder.cnn_type = @IMPALAishCNN",
    ),
    "drq-identity": Case(
        encoder="IdentityTrajEncoder",
        tstep="CNNTstepEncoder",
        arrays={"observation": ((3, 20, 20), "float32")},
        action=("box", 1),
        gin="CNNTstepEncoder.cnn_type = @DrQCNN\nCNNTstepEncoder.channels_first = True",
    ),
}


def gin_of(case: Case) -> str:
    """Return the settings of a case, the later of each name."""
    lines = dict(line.split(" = ", 1) for line in (_SMALL + case.gin).strip().splitlines() if line)
    return "\n".join(f"{name} = {value}" for name, value in lines.items())


def draw_weights(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Draw a state dict whose statistics and scales differ from those of a new agent: features that barely vary,
    spectral estimates that are not exact, a PopArt layer that is not the identity."""
    made: dict[str, np.ndarray] = {}
    for name, shape in shapes.items():
        rng = np.random.default_rng(zlib.crc32(name.encode()))
        last = name.rpartition(".")[2]
        value = rng.normal(size=shape)
        if last in ("u", "v"):
            value /= np.linalg.norm(value)
        elif last in ("gamma", "w", "head_scaler", "scale") or (".norm." in name and last == "weight"):
            value = 1 + 0.2 * value
        elif last == "_t":
            value = np.full(shape, 41.0)
        elif last == "A_log":
            value = np.log(np.arange(1, shape[1] + 1)) + 0.1 * value
        elif last not in ("mu", "nu"):
            value *= 0.7 / np.sqrt(max(np.prod(shape[1:]), 1)) if "weight" in last else 0.2
            # Policies are sure of some choices, so that bounds of their probabilities matter.
            value *= 12 if "actor.base.out_layer" in name else 1
        made[name] = value
    for name in [name for name in made if name.endswith(".nu")]:
        # Deviations: some below .01, which AMAGO leaves alone, and below .003.
        mean = made[f"{name.removesuffix('.nu')}.mu"] = 0.4 * made[f"{name.removesuffix('.nu')}.mu"]
        deviation = np.resize([0.7, 0.02, 1.3, 0.006, 0.3, 0.0], mean.shape) if "in_norm" in name else 2.0
        made[name] = mean**2 + np.square(deviation)
    return {name: value.astype(np.float32) for name, value in made.items()}


def draw_tokens(case: Case) -> dict[str, Any]:
    """Draw observations by AMAGO's names, and previous rewards and actions, zero at first: (BATCH, LENGTH, ...)."""
    rng, shape = np.random.default_rng(7), (BATCH, LENGTH)
    observation: dict[str, np.ndarray] = {}
    for name, (own, dtype) in case.arrays.items():
        most = 256 if len(own) == 3 else 3  # of an image, or of numbers that are not far from their mean
        drawn = rng.integers(0, most, (*shape, *own)) if dtype == "uint8" else rng.normal(size=(*shape, *own))
        observation[name] = drawn.astype(dtype)
    for name, n in case.choices.items():
        observation[name] = rng.integers(0, n, shape)
    kind, size = case.action
    action: np.ndarray
    if kind == "discrete":
        action = rng.integers(0, size, shape)
    elif kind == "bits":
        action = rng.integers(0, 2, (*shape, size)).astype(np.uint8)
    else:
        action = rng.uniform(-0.9, 0.9, (*shape, size)).astype(np.float32)
    reward = rng.normal(size=shape).astype(np.float32)
    reward[:, 0], action[:, 0] = 0, 0
    return {"observation": observation, "action": action, "reward": reward}
