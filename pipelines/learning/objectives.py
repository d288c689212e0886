"""What an update minimises: value targets, ensemble reductions, advantage filters, and the terms of the loss.

B batch, T time (steps of the window), N valid steps, C critics, M drawn critics, G discounts, K action samples, R rows
of outputs, Z bins. Losses are sums over valid steps: the caller divides by the number of steps of the whole update, so
that micro-batches add up to the batch.

A term of the agent's loss is a row of `TERMS`; its weight is a setting (pipelines/config/model.py).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from pipelines.config.model import FILTERS, AgentSettings, FilterSettings
from pipelines.errors import UsageError
from pipelines.learning.agent_types import AgentType
from pipelines.learning.batch import StepIndex
from pipelines.nets.actor import Distribution
from pipelines.nets.critic import TwoHot
from pipelines.nets.scan import recur_back

Reduction = Literal["min", "mean"]
_Filter = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class ValidSteps:
    """Valid steps of a batch that count in the losses: states and policies with gradient, dataset actions, the actions
    that behaviour cloning imitates (these, or their labels), and action masks (N, 1, choices). `importance_N` weights
    the critics' loss, `actor_N` the policy's terms; None: all weights are 1."""

    index: StepIndex
    h_ND: Tensor
    action: Tensor
    imitated: Tensor
    params_NGP: Tensor
    legal: Tensor | None
    importance_N: Tensor | None
    actor_N: Tensor | None


@dataclass(frozen=True, kw_only=True)
class DataValues:
    """Critic output for the dataset actions, without gradient. `shared` is reused for the policy's actions: a table of
    all actions' values, or the state part of the critics' first layer."""

    q_CNG: Tensor
    shared: Tensor


@dataclass(frozen=True, kw_only=True)
class PolicyValues:
    """Critic output for the policy's own actions. `min_q_NG`: minimum over the drawn critics, with gradient to the
    policy alone; None unless the actor loss needs it. `q_CNG`: all critics, without gradient."""

    min_q_NG: Tensor | None
    q_CNG: Tensor


@dataclass(frozen=True, kw_only=True)
class CriticOutput:
    """Values at the valid steps, the critics' loss, and the weights of behaviour cloning. Only `loss` and
    `policy.min_q_NG` have gradient. `q_NG` and `v_NG`: means over critics of the values of the dataset actions and of
    the policy; these and `target_NG` are in the critics' units."""

    loss: Tensor
    data: DataValues
    policy: PolicyValues
    target_NG: Tensor
    q_NG: Tensor
    v_NG: Tensor
    advantage_NG: Tensor  # in reward units
    weight_NG: Tensor


@dataclass(frozen=True, kw_only=True)
class LossInputs:
    """All that a term of the loss may depend on. `min_q_NG`: the policy's value in normalised units, with gradient to
    the policy; `divergence_NG`: of the policy from its reference, None without one; `ratio_NG`: factors of the cloning
    weights, None without; `critics` is None for an agent without critics."""

    settings: AgentSettings
    type: AgentType
    policy: Distribution
    steps: ValidSteps
    log_prob_NG: Tensor
    entropy_NG: Tensor | None
    entropy_weight_G: Tensor | float | None
    min_q_NG: Tensor | None
    divergence_NG: Tensor | None
    ratio_NG: Tensor | None
    critics: CriticOutput | None


@dataclass(frozen=True)
class _Term:
    """A term of the loss: `compute` returns a sum over valid steps, or None for an agent that has no such term."""

    compute: Callable[[LossInputs], Tensor | None]
    weight: Callable[[AgentSettings], float]


def actor_loss(inputs: LossInputs) -> Tensor:
    """-Q of the policy's own actions plus (advantage-filtered) behaviour cloning, each times its weight."""
    actor_N = inputs.steps.actor_N
    if inputs.critics is not None and inputs.settings.target == "action":
        weight_NG = inputs.critics.weight_NG
    else:
        weight_NG = torch.ones_like(inputs.log_prob_NG)
    if inputs.ratio_NG is not None:
        weight_NG = weight_NG * inputs.ratio_NG
    if actor_N is not None:
        weight_NG = weight_NG * actor_N[:, None]
    num_discounts = inputs.log_prob_NG.shape[1]  # sums over steps, means over discounts
    if (value_NG := inputs.min_q_NG) is None:
        return (weight_NG * inputs.log_prob_NG).sum() * (-inputs.type.bc_weight / num_discounts)
    if actor_N is not None:
        value_NG = value_NG * actor_N[:, None]
    if inputs.type.actor_weight != 1:
        value_NG = inputs.type.actor_weight * value_NG
    gain_NG = torch.addcmul(value_NG, weight_NG, inputs.log_prob_NG, value=inputs.type.bc_weight)
    return gain_NG.sum() * (-1 / num_discounts)


def critic_loss(inputs: LossInputs) -> Tensor | None:
    """Return the critics' loss, which was computed together with their values."""
    return None if inputs.critics is None else inputs.critics.loss


def entropy_loss(inputs: LossInputs) -> Tensor | None:
    """Negative entropy of the policy, mean over discounts, sum over steps, each times its weight.

    The actor loss has a factor pi(a): an action that became improbable by chance is hardly learned again. The bonus
    holds the policy open where advantages are small compared with their noise.
    """
    if inputs.entropy_NG is None or inputs.entropy_weight_G is None:
        return None
    entropy_NG = inputs.entropy_NG * inputs.entropy_weight_G
    if inputs.steps.actor_N is not None:
        entropy_NG = entropy_NG * inputs.steps.actor_N[:, None]
    return entropy_NG.sum() * (-1 / entropy_NG.shape[1])


def reference_loss(inputs: LossInputs) -> Tensor | None:
    """KL(policy || reference), mean over discounts, sum over steps, each times its weight."""
    divergence_NG = inputs.divergence_NG
    if divergence_NG is None:
        return None
    if inputs.steps.actor_N is not None:
        divergence_NG = divergence_NG * inputs.steps.actor_N[:, None]
    return divergence_NG.sum() / divergence_NG.shape[1]


# By the name of their metric. Auxiliary losses (pipelines/learning/auxiliary.py) follow after these.
TERMS: Mapping[str, _Term] = {
    "actor_loss": _Term(actor_loss, lambda settings: 1.0),
    "critic_loss": _Term(critic_loss, lambda settings: settings.critic_weight),
    "entropy_loss": _Term(entropy_loss, lambda settings: 1.0),
    "reference_loss": _Term(reference_loss, lambda settings: settings.reference_weight),
}


def squared_error(value: Tensor, target: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """Sum of squared errors, each times `scale` (None: 1) -> (loss, its gradient with respect to `value`)."""
    error = value - target
    scaled = error if scale is None else scale * error
    return torch.dot(scaled.flatten(), error.flatten()), 2 * scaled


def cross_entropy(
    readout: TwoHot, logits_CRZ: Tensor, target_R: Tensor, scale_R1: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Cross-entropy with the labels of the targets, each row times `scale_R1` (None: 1) -> (loss, values (C, R),
    gradient of the logits, which are overwritten)."""
    if readout.sigma is not None:
        label_RZ = readout.labels(target_R)
        label_RZ = label_RZ if scale_R1 is None else label_RZ * scale_R1
        log_CRZ = logits_CRZ.log_softmax(-1)
        loss, probs_CRZ = -(label_RZ * log_CRZ).sum(), log_CRZ.exp()
        value_CR = readout.decode(probs_CRZ)
        return loss, value_CR, (probs_CRZ if scale_R1 is None else probs_CRZ.mul_(scale_R1)).sub_(label_RZ)
    index_R2, share_R2 = readout.neighbours(target_R)  # two bins only: one pass of exponentials serves loss and slope
    share_R2 = share_R2 if scale_R1 is None else share_R2 * scale_R1
    index_CR2 = index_R2.expand(len(logits_CRZ), -1, -1)
    logits_CRZ -= logits_CRZ.amax(-1, keepdim=True)
    named_CR2 = logits_CRZ.gather(-1, index_CR2)
    probs_CRZ = logits_CRZ.exp_()
    total_CR1 = probs_CRZ.sum(-1, keepdim=True)
    probs_CRZ /= total_CR1
    loss = (share_R2 * (total_CR1.log() - named_CR2)).sum()
    value_CR = readout.decode(probs_CRZ)
    probs_CRZ = probs_CRZ if scale_R1 is None else probs_CRZ.mul_(scale_R1)
    return loss, value_CR, probs_CRZ.scatter_add_(-1, index_CR2, -share_R2.expand_as(index_CR2))


def n_step_targets(
    reward_BT: Tensor, terminated_BT: Tensor, next_value_BTG: Tensor, gamma_G: Tensor, mask_BT: Tensor, *, n: int = 1
) -> Tensor:
    """y_t = sum_{i<k} gamma^i r_{t+i} + gamma^k V_{t+k}, k the minimum of n, the first terminal and the window's end.

    `reward_BT[t]`, `terminated_BT[t]` and `next_value_BTG[t]` belong to the step from t to t+1; V is not used where
    that step terminated. `mask_BT`: valid steps, padding on the right; targets at padding are undefined (B, T, G).
    """
    reward_BT1 = reward_BT[..., None]
    discount_BTG = gamma_G * (~terminated_BT)[..., None]
    if n == 1:
        return reward_BT1 + discount_BTG * next_value_BTG
    goes_on_BT1 = torch.cat((mask_BT[:, 1:], torch.zeros_like(mask_BT[:, :1])), 1)[..., None]
    one_step = target = reward_BT1 + discount_BTG * next_value_BTG
    for _ in range(n - 1):
        following = torch.cat((target[:, 1:], torch.zeros_like(target[:, :1])), 1)
        target = torch.where(goes_on_BT1, reward_BT1 + discount_BTG * following, one_step)
    return target


def trace_targets(
    reward_BT: Tensor,
    terminated_BT: Tensor,
    next_value_BTG: Tensor,
    next_q_BTG: Tensor,
    trace_BTG: Tensor,
    gamma_G: Tensor,
    mask_BT: Tensor,
) -> Tensor:
    """y_t = r_t + gamma (V_{t+1} + c_{t+1} (y_{t+1} - Q_{t+1})), without the correction at the end of the window.

    `next_q_BTG[t]` is the value of the action taken after the step, `trace_BTG[t]` the trace coefficient c_{t+1}:
    with Q = V and c = lambda Peng's Q(lambda) (Harutyunyan et al. 2016, arXiv 1602.04951), with c = lambda pi(a | s)
    tree backup (Precup et al. 2000). Other arguments and the result as for `n_step_targets`.
    """
    target = reward_BT[..., None] + gamma_G * (~terminated_BT)[..., None] * next_value_BTG
    # y_t = (1-step target - gamma c Q) + gamma c y_{t+1}: a scan from the end of the window. In `weight_BTG`, a factor
    # gamma c is at the place of the later step.
    weight_BTG = torch.zeros_like(target)
    torch.mul(gamma_G * trace_BTG[:, :-1], (mask_BT[:, 1:] & ~terminated_BT[:, :-1])[..., None], out=weight_BTG[:, 1:])
    target[:, :-1].addcmul_(weight_BTG[:, 1:], next_q_BTG[:, :-1], value=-1)
    recur_back(weight_BTG, target)
    return target


def vtrace_values(
    reward_BT: Tensor,
    terminated_BT: Tensor,
    next_value_BTG: Tensor,
    rho_BTG: Tensor,
    gamma_G: Tensor,
    mask_BT: Tensor,
) -> tuple[Tensor, Tensor]:
    """Compute the arguments `next_value_BTG` and `next_q_BTG` with which `trace_targets` gives V-trace (Espeholt et al.
    2018, arXiv 1802.01561, section 4.1): y_t = r_t + gamma v_{t+1}, where

        v_t = V_t + rho_t (r_t + gamma V_{t+1} - V_t) + gamma c_t (v_{t+1} - V_{t+1})
            = V_t + rho_t (y'_t - V_t) + c_t (y_t - y'_t),    y'_t = r_t + gamma V_{t+1}.

    `rho_BTG[t]` is rho_{t+1} = min(1, pi / mu) of the action taken after the step; the trace coefficients are c.
    """
    one_step_BTG = n_step_targets(reward_BT, terminated_BT, next_value_BTG, gamma_G, mask_BT)
    goes_on_BT1 = (mask_BT[:, 1:] & ~terminated_BT[:, :-1])[..., None]
    value_BTG, following_BTG = next_value_BTG.clone(), next_value_BTG.clone()
    following_BTG[:, :-1] = torch.where(goes_on_BT1, one_step_BTG[:, 1:], next_value_BTG[:, :-1])
    value_BTG += rho_BTG * (following_BTG - next_value_BTG)
    return value_BTG, following_BTG


def draw(noise: Tensor, subset: int) -> Tensor:
    """Draw `subset` of the C critics without replacement, at every place: uniforms (C, ...) -> indices (M, ...)."""
    if noise.device.type != "cuda":
        return noise.topk(subset, dim=0).indices
    drawn = [noise.argmax(0)]  # a maximum at a time takes CUDA a tenth of the time of `topk`, and a CPU seven times it
    while len(drawn) < subset:
        noise = noise.scatter(0, drawn[-1][None], -1.0)
        drawn.append(noise.argmax(0))
    return torch.stack(drawn)


def reduce(values: Tensor, drawn: Tensor, how: Reduction) -> Tensor:
    """Return the minimum or mean over the drawn critics: (C, ...), (M, ...) -> (...)."""
    chosen = values.gather(0, drawn)
    return chosen.amin(0) if how == "min" else chosen.mean(0)


def reduce_both(values: Tensor, others: Tensor, drawn: Tensor, how: Reduction) -> tuple[Tensor, Tensor]:
    """Reduce `values` as `reduce` does, and `others` (C, ...) with the same critics."""
    chosen, beside = values.gather(0, drawn), others.gather(0, drawn)
    if how == "mean":
        return chosen.mean(0), beside.mean(0)
    least, place = chosen.min(0)
    return least, beside.gather(0, place[None])[0]


# Advantage filters: f(advantage, mask, **options) -> weights. `advantage` is (B, T, G) in reward units, without
# gradient; `mask` (B, T, 1) is true at valid steps. Weights at padding are ignored; a filter that looks across steps
# (a quantile, a batch mean) must apply the mask.


def binary(advantage: Tensor, mask: Tensor, *, threshold: float = 0.0) -> Tensor:
    """Keep steps with weight 1 where the advantage is above `threshold` (Wang et al. 2020, arXiv 2006.15134)."""
    return (advantage > threshold).to(advantage.dtype)


def exp(
    advantage: Tensor, mask: Tensor, *, beta: float = 1.0, clip_adv_low: float = -math.inf,
    clip_adv_high: float = math.inf, clip_weights_low: float = 1e-7, clip_weights_high: float = math.inf,
) -> Tensor:  # fmt: skip
    """Return exp(beta advantage), with advantage and weight clipped: AMAGO's `exp_filter`. The exponent stays below 80,
    so that weights are finite."""
    exponent = beta * advantage.clamp(clip_adv_low, clip_adv_high)
    return torch.exp(exponent.clamp_max(80.0)).clamp(clip_weights_low, clip_weights_high)


def leaky_relu(
    advantage: Tensor, mask: Tensor, *, beta: float = 2.0, tau: float = 1e-2, neg_slope: float = 0.05,
    target_f0: float = 1e-2, clip_weights_low: float = 1e-7, clip_weights_high: float = 10.0, add_binary: float = 1,
) -> Tensor:  # fmt: skip
    """Return a leaky ReLU of (advantage - tau) / beta whose value at 0 is `target_f0`, clipped, plus the binary filter
    if `add_binary`: AMAGO's `leaky_relu_filter`."""
    ramp = F.leaky_relu((advantage - tau) / beta, neg_slope) + target_f0 + neg_slope * tau / beta
    weight = ramp.clamp(clip_weights_low, clip_weights_high)
    return weight + binary(advantage, mask) if add_binary else weight


def advantage_filter(settings: FilterSettings) -> _Filter:
    """Return the filter that `settings` names, with its options bound. UsageError for options it does not take."""
    function = FILTERS.get(settings.kind)
    try:
        inspect.signature(function).bind(None, None, **settings.options)
    except TypeError as error:
        raise UsageError(f"filter '{settings.kind}': {error}", hint="see filter.options") from error

    def bound(advantage: Tensor, mask: Tensor) -> Tensor:
        return function(advantage, mask, **settings.options)

    return bound
